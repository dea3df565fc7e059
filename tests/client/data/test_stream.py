"""Tests streams: each item in one committed step, by their own state or by reading again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.reading import BATCH, SIZE, Numbers, ReadingGroup
from support.training import lighthouse, make_manager, together
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tools.chaos.samples import SampleLedger
from torchft_svc.client.data import ElasticStream, EpochPosition
from torchft_svc.errors import ConfigError

STEPS_OF_EPOCH = -(-SIZE // BATCH)


class Stream(IterableDataset[Any]):
    """The samples of `Numbers`, in another order in each epoch; counts how many were read."""

    def __init__(self) -> None:
        self._epoch = self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        data = Numbers()
        for number in range(SIZE):
            self.num_read += 1
            yield data[(number * 7 + self._epoch) % SIZE]


class StatefulStream(Stream):
    """The same, which can go to a place."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        data = Numbers()
        begin, self._next = self._next, 0
        for number in range(begin, SIZE):
            self.num_read += 1
            self._next = number + 1
            yield data[(number * 7 + self._epoch) % SIZE]
        self._next = 0


class StreamingGroup(ReadingGroup):
    """Reads a stream instead of a data set with indices."""

    def make_loader(self, options: dict[str, Any]) -> Any:
        self.stream: Stream = options.pop("stream")
        for each in ("size", "order_seed", "num_workers"):
            options.pop(each, None)
        options.setdefault("global_batch_size", BATCH)
        return ElasticStream(self.manager, self.stream, **options)


def train(group: ReadingGroup, until: int, fails_at: int = 0) -> None:
    num = 0
    while group.manager.current_step() < until:
        num += 1
        group.step(fails=num == fails_at)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
@pytest.mark.parametrize("options", [{}, {"microbatch_size": 3}], ids=str)
def test_two_groups_train_as_one(kind: type[Stream], options: dict[str, Any]) -> None:
    ledger, until = SampleLedger(SIZE, BATCH), 2 * STEPS_OF_EPOCH + 2
    with lighthouse() as address, StreamingGroup(address, "a", stream=kind()) as alone:
        train(alone, until)
        expected = alone.weights()
    with (
        lighthouse(2) as address,
        StreamingGroup(address, "a", ledger, stream=kind(), **options) as first,
        StreamingGroup(address, "b", ledger, stream=kind(), **options) as second,
    ):
        together(lambda: train(first, until, fails_at=3), lambda: train(second, until, fails_at=5))
        assert ledger.faults() == []
        torch.testing.assert_close(second.weights(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "most"), [(Stream, 2 * SIZE), (StatefulStream, SIZE)])
def test_a_joiner_goes_to_the_place_of_the_others(kind: type[Stream], most: int) -> None:
    ledger = SampleLedger(SIZE, BATCH)
    with lighthouse(1) as address, StreamingGroup(address, "a", ledger, stream=kind()) as first:
        train(first, STEPS_OF_EPOCH + 1)
        with StreamingGroup(address, "b", ledger, stream=kind()) as joiner:
            together(lambda: first.meets(2), lambda: joiner.meets(2))
            assert joiner.loader.position.epoch >= 1
            assert joiner.stream.num_read <= most
        train(first, first.manager.current_step() + STEPS_OF_EPOCH)
    assert ledger.faults() == []


def test_a_checkpoint_holds_the_place() -> None:
    with lighthouse() as address, StreamingGroup(address, "a", stream=StatefulStream()) as first:
        train(first, 2)
        saved = first.loader.state_dict()
    with lighthouse() as address, StreamingGroup(address, "b", stream=StatefulStream()) as second:
        second.loader.load_state_dict(saved)
        assert second.loader.position == EpochPosition(0, 2 * BATCH)
        train(second, 1)
        assert second.stream.num_read <= 2 * BATCH


def test_a_stream_of_batches() -> None:
    with lighthouse() as address, make_manager(address, "a") as manager:
        torchs = DataLoader(Numbers(), batch_size=5)
        stream = ElasticStream(
            manager,
            torchs,
            global_batch_size=2,
            microbatch_size=1,
            collate_fn=lambda items: items[0],
        )
        _, _, indices = next(iter(stream))
        assert indices.tolist() == [0, 1, 2, 3, 4]
        assert stream.weight == 0.5
        assert not stream.ends_step


def test_streams_that_cannot_be_read() -> None:
    with lighthouse() as address, make_manager(address, "a") as manager:
        for stream, sentence in ((iter([1]), "only once"), (3, "an iterable is needed")):
            with pytest.raises(ConfigError, match=sentence):
                ElasticStream(manager, stream, global_batch_size=2)  # type: ignore[arg-type]
        for torchs, sentence in (
            (DataLoader(Stream(), batch_size=5), "batch_size=5.*its items are batches"),
            (DataLoader(Numbers(), None, shuffle=True), "with RandomSampler.*ElasticDataLoader"),
            (
                DataLoader(Numbers(), None, sampler=DistributedSampler(Numbers(), 2, 0)),
                "with DistributedSampler.*other items in each group",
            ),
        ):
            with pytest.raises(ConfigError, match=sentence):
                ElasticStream(manager, torchs, global_batch_size=2)
        empty = ElasticStream(manager, [], global_batch_size=2)
        with pytest.raises(ConfigError, match="yields no step"):
            next(iter(empty))
