"""Tests healing over a process group: what arrives, what is refused, and a whole heal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from torchft_svc.client import PGTransport, ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from torchft_svc.client.checkpointing import pg as module
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded

from .meeting_place import MeetingPlace
from .training import Trainer, assert_identical, bits, in_step, lighthouse, together

TIMEOUT = timedelta(seconds=10)


@pytest.fixture(params=[ProcessGroupGloo, ProcessGroupBabyGloo])
def pair(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    groups = [request.param(TIMEOUT) for _ in range(2)]
    MeetingPlace().configure(*groups)
    yield groups
    for group in groups:
        group.shutdown()


def state() -> dict[str, Any]:
    return {
        "weights": OrderedDict(
            a=torch.randn(3, 5),
            b=torch.arange(7, dtype=torch.int8),
            c=torch.randn(4, 4, dtype=torch.bfloat16).t(),
            d=torch.tensor(True),
            e=torch.empty(0, 3),
            f=torch.randn(2, dtype=torch.complex64),
        ),
        "others": [1, 2.5, None, "x", (True, b"y")],
    }


def sent(pair: list[ProcessGroup], value: Any, step: int = 3, **options: Any) -> Any:
    source, receiver = PGTransport(pair[0], TIMEOUT), PGTransport(pair[1], TIMEOUT, **options)
    source.send_checkpoint([1], 3, value, TIMEOUT)
    source.disallow_checkpoint()
    return receiver.recv_checkpoint(0, source.metadata(), step, TIMEOUT)


def test_a_state_arrives_bit_by_bit(pair: list[ProcessGroup]) -> None:
    value = state()
    assert bits(sent(pair, value)) == bits(value)


def test_what_was_offered_may_change_at_once(pair: list[ProcessGroup]) -> None:
    value = state()
    before = bits(value)
    source, receiver = PGTransport(pair[0], TIMEOUT), PGTransport(pair[1], TIMEOUT)
    source.send_checkpoint([1], 3, value, TIMEOUT)
    value["weights"]["a"].zero_()
    assert bits(receiver.recv_checkpoint(0, "", 3, TIMEOUT)) == before


def test_large_tensors_travel_in_parts(
    pair: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PART_BYTES", 1000)
    value = {"w": torch.randn(777)}
    assert bits(sent(pair, value)) == bits(value)


def test_in_place_if_the_layout_is_the_same(pair: list[ProcessGroup]) -> None:
    value, own = {"w": torch.randn(5), "n": 1}, {"w": torch.zeros(5), "n": 0}
    received = sent(pair, value, state_dict=lambda: own)
    assert received["w"].data_ptr() == own["w"].data_ptr()
    assert bits(received) == bits(value)
    other = {"w": torch.zeros(6), "n": 0}
    received = sent(pair, value, state_dict=lambda: other)
    assert bits(received) == bits(value)
    assert other["w"].tolist() == [0] * 6


def test_another_step_is_refused(pair: list[ProcessGroup]) -> None:
    with pytest.raises(CheckpointError, match=r"replica rank 0.*step 3 instead of step 4"):
        sent(pair, {"n": 1}, step=4)


def test_something_else_is_refused(pair: list[ProcessGroup]) -> None:
    work = pair[0].send([torch.zeros(3, dtype=torch.int64)], 1, module._TAG)
    with pytest.raises(CheckpointError, match="not the beginning of a state"):
        PGTransport(pair[1], TIMEOUT).recv_checkpoint(0, "", 3, TIMEOUT)
    work.wait()


@pytest.mark.parametrize(
    "document",
    [
        b"no JSON",
        b"[]",
        b'{"tree": null, "tensors": [["float32", -1]]}',
        b'{"tree": null, "tensors": [["float32", 4611686018427387904, 8]]}',
        b'{"tree": null, "tensors": [["pickle", 1]]}',
        b'{"tree": ["T", 5], "tensors": []}',
    ],
)
def test_a_hostile_description_is_refused(document: bytes) -> None:
    groups = [ProcessGroupGloo(TIMEOUT) for _ in range(2)]
    MeetingPlace().configure(*groups)
    header = torch.tensor([module._MAGIC, 3, len(document)])
    body = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    works = [groups[0].send([part], 1, module._TAG) for part in (header, body)]
    with pytest.raises(CheckpointError, match="malformed description"):
        PGTransport(groups[1], TIMEOUT).recv_checkpoint(0, "", 3, TIMEOUT)
    for work in works:
        work.wait()
    for group in groups:
        group.shutdown()


def test_a_source_that_sends_nothing(pair: list[ProcessGroup]) -> None:
    soon = timedelta(seconds=0.2)
    with pytest.raises(DeadlineExceeded, match=r"receiving a state timed out after 0\.2 s"):
        PGTransport(pair[1], TIMEOUT).recv_checkpoint(0, "", 3, soon)


def test_what_cannot_be_sent_is_named(pair: list[ProcessGroup]) -> None:
    with pytest.raises(ConfigError, match=r"state_dict\['w'\]"):
        PGTransport(pair[0], TIMEOUT).send_checkpoint([1], 3, {"w": object()}, TIMEOUT)


class Watchful(Trainer):
    """Notes for each heal whether the state arrived in the very weights."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine, theirs = self.state_dict()["model"], state["model"]
        self.in_place = [mine[key].data_ptr() == theirs[key].data_ptr() for key in mine]
        super().load_state_dict(state)


@pytest.mark.parametrize("in_place", [False, True])
def test_i3_a_group_heals_over_the_group_s_own_connections(in_place: bool) -> None:
    with lighthouse() as address:

        def trainer(name: str, seed: int) -> Watchful:
            group = ProcessGroupGloo(TIMEOUT)
            own = (lambda: made.state_dict()) if in_place else None
            made = Watchful(
                address,
                name,
                seed,
                pg=group,
                checkpoint_transport=PGTransport(group, TIMEOUT, state_dict=own),
                use_async_quorum=not in_place,
            )
            for parameter in made.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            made.inner.step()  # now the optimizer has its state, too: of the same layout
            made.inner.zero_grad()
            return made

        with trainer("a", 1) as first:
            assert first.steps(3) == [True] * 3
            with trainer("b", 2) as second:
                together(lambda: first.meets(2), lambda: second.meets(2))
                step = max(each.manager.current_step() for each in (first, second)) + 3
                in_step(step, first, second)
                assert_identical([first, second])
                assert second.in_place == [in_place] * 4
