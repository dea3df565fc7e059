"""Tests healing over a process group: what arrives, what is refused, and a whole heal."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bounds import check
from support.meeting_place import MeetingPlace
from support.running import eventually
from support.training import Trainer, assert_identical, bits, in_step, lighthouse, together

from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    PGTransport,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)
from torchft_svc.client.checkpointing import pg as module
from torchft_svc.client.process_groups.wrappers import ProcessGroupWrapper
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded, PeerError, TornState

TIMEOUT = timedelta(seconds=10)
# From the end of the moment of grace; without it, the whole timeout.
SOON_S = 2.0


@pytest.fixture(
    params=[ProcessGroupGloo, pytest.param(ProcessGroupBabyGloo, marks=pytest.mark.processes)]
)
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


def test_every_array_arrives_as_itself(pair: list[ProcessGroup]) -> None:
    value = {f"a{n}": np.full(50, n, dtype=np.float32) for n in range(20)}
    received = sent(pair, value)
    assert [received[key].tolist() for key in value] == [array.tolist() for array in value.values()]


@dataclass
class Record:
    step: int
    weights: torch.Tensor


def test_known_types_arrive_as_they_were(pair: list[ProcessGroup]) -> None:
    value = {
        "queue": deque([torch.randn(2), torch.randn(3)], maxlen=4),
        "records": [Record(3, torch.randn(4))],
        "seen": {1, Path("x")},
        "strings": np.array(["x", "yz"]),
        "model": torch.nn.BatchNorm1d(2).state_dict(),
    }
    received = sent(pair, value)
    assert bits(list(received["queue"])) == bits(list(value["queue"]))
    assert received["queue"].maxlen == 4
    assert bits(received["records"][0].weights) == bits(value["records"][0].weights)
    assert received["seen"] == value["seen"]
    assert received["strings"].tolist() == ["x", "yz"]
    assert received["model"]._metadata == value["model"]._metadata


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


def test_i7_what_has_arrived_is_forgotten(pair: list[ProcessGroup]) -> None:
    source, receiver = PGTransport(pair[0], TIMEOUT), PGTransport(pair[1], TIMEOUT)
    for step in range(3):
        source.send_checkpoint([1], step, {"w": torch.ones(1000)}, TIMEOUT)
        assert source.copied_bytes > 4000
        receiver.recv_checkpoint(0, "", step, TIMEOUT)
        eventually(lambda: source.copied_bytes == 0)
    eventually(lambda: "torchft-sent" not in {thread.name for thread in threading.enumerate()})


def test_i7_what_nobody_takes_is_forgotten_with_its_quorum(pair: list[ProcessGroup]) -> None:
    source = PGTransport(pair[0], TIMEOUT)
    source.send_checkpoint([1], 3, {"w": torch.ones(1000)}, TIMEOUT)
    MeetingPlace().configure(*pair)
    eventually(lambda: source.copied_bytes == 0)


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


def test_in_place_by_place_in_the_tree_whatever_its_order(pair: list[ProcessGroup]) -> None:
    value = {"user": {"model": {"a": torch.randn(5), "b": torch.randn(5)}}, "step": 1}
    own = {"b": torch.zeros(5), "a": torch.zeros(5)}
    received = sent(pair, value, state_dict=lambda: own)["user"]["model"]
    assert bits(received) == bits(value["user"]["model"])
    assert bits(own) == bits(received)
    assert own["a"].data_ptr() == received["a"].data_ptr()


@pytest.mark.parametrize(
    "own",
    [
        {"a": torch.zeros(5), "c": torch.zeros(5)},
        {"a": torch.zeros(5)},
        {"a": torch.zeros(5), "b": torch.zeros(5), "c": torch.zeros(5)},
        [torch.zeros(5), torch.zeros(5)],
        dict.fromkeys("ab", torch.zeros(5)),
        {"x": {"a": torch.zeros(5), "b": torch.zeros(5)}},
        {"a": torch.zeros(5), "b": torch.zeros(5, dtype=torch.float64)},
    ],
)
def test_not_in_place_if_the_tree_differs(pair: list[ProcessGroup], own: Any) -> None:
    value = {"model": {"a": torch.randn(5), "b": torch.randn(5)}}
    before = bits(own)
    assert bits(sent(pair, value, state_dict=lambda: own)) == bits(value)
    assert bits(own) == before


class Damages(ProcessGroupWrapper):
    """One bit of the operation with this number is another one."""

    def __init__(self, pg: ProcessGroup, number: int) -> None:
        super().__init__(pg)
        self._number = number

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        self._number -= 1
        if self._number == 0:
            args[0][0].view(torch.uint8)[3] ^= 16
        return super()._launch(name, args, kwargs)


@pytest.mark.parametrize(
    ("number", "what"), [(2, "the description"), (3, "tensor 0 of 2"), (4, "tensor 1 of 2")]
)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_arrives_damaged_is_refused(
    pair: list[ProcessGroup], number: int, what: str, in_place: bool
) -> None:
    value = {"a": torch.randn(5), "b": torch.randn(5, dtype=torch.float64)}
    own = {"a": torch.zeros(5), "b": torch.zeros(5, dtype=torch.float64)}
    pair[0] = Damages(pair[0], number)
    torn = in_place and number > 2
    with pytest.raises(TornState if torn else CheckpointError, match=f"{what} arrived damaged"):
        sent(pair, value, **({"state_dict": lambda: own} if in_place else {}))
    if not torn:
        assert not own["a"].any()
        assert not own["b"].any()


def test_a_sum_on_a_device_depends_on_any_bit_and_any_place() -> None:
    data = torch.randint(256, (1001,), dtype=torch.uint8)
    digest = module._sum(data)
    for place, bit in ((0, 0), (7, 7), (8, 7), (500, 3), (1000, 7)):
        other = data.clone()
        other[place] ^= 1 << bit
        assert module._sum(other) != digest
    assert module._sum(data.roll(8)) != digest
    assert module._sum(data[:1000]) != digest
    assert module._sum(torch.cat([data, torch.zeros(1, dtype=torch.uint8)])) != digest
    assert module._sum(data.clone()) == digest


@pytest.mark.parametrize("num_operations", [0, 1, 2, 3])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_receive_that_failed_in_a_group_that_swallows_errors_heals_nobody(
    pair: list[ProcessGroup], num_operations: int, in_place: bool
) -> None:
    source = PGTransport(OutOfMemory(pair[0], num_operations), TIMEOUT)
    with pytest.raises(MemoryError):
        source.send_checkpoint([1], 3, {"a": torch.arange(3), "b": torch.arange(3)}, TIMEOUT)
    own = {"a": torch.full((3,), 7), "b": torch.full((3,), 7)}
    receiver = PGTransport(
        ErrorSwallowingProcessGroupWrapper(pair[1]), TIMEOUT, state_dict=lambda: own
    )
    if not in_place:
        receiver._own_state = None
    torn = in_place and num_operations > 1
    soon = timedelta(seconds=0.2)
    with pytest.raises(TornState if torn else PeerError):
        receiver.recv_checkpoint(0, "", 3, soon)
    with pytest.raises(PeerError):  # nor does a later one, until the group is configured again
        receiver.recv_checkpoint(0, "", 3, soon)
    assert own["a"].all() or torn


def test_another_step_is_refused(pair: list[ProcessGroup]) -> None:
    with pytest.raises(CheckpointError, match=r"replica rank 0.*step 3 instead of step 4"):
        sent(pair, {"n": 1}, step=4)


def test_something_else_is_refused(pair: list[ProcessGroup]) -> None:
    work = pair[0].send([torch.zeros(4, dtype=torch.int64)], 1, module._TAG)
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
        b'{"tree": ["T", 5], "tensors": [], "digests": [], "digest": "xxh3"}',
        b'{"tree": null, "tensors": [["float32", 1]], "digests": [], "digest": "xxh3"}',
        b'{"tree": null, "tensors": [["float32", 1]], "digests": [1], "digest": "crc"}',
    ],
)
def test_a_hostile_description_is_refused(document: bytes) -> None:
    groups = [ProcessGroupGloo(TIMEOUT) for _ in range(2)]
    MeetingPlace().configure(*groups)
    body = torch.frombuffer(bytearray(document), dtype=torch.uint8)
    header = torch.tensor([module._MAGIC, 3, len(document), module._xxh3(body)])
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


def test_a_source_that_is_out_of_the_quorum_and_frozen_is_not_waited_for(
    pair: list[ProcessGroup],
) -> None:
    receiver = PGTransport(pair[1], TIMEOUT)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receiver.recv_checkpoint, 0, "", 3, TIMEOUT)
        assert pair[1]._quorum_id is not None
        receiver.lose_source("not yet")  # what it has sent may still come
        pair[1].lose_member(pair[1]._quorum_id, "a:1 is out: no sign of life for 5 s")
        began_at = time.monotonic()

        def is_over() -> bool:
            receiver.lose_source("a:1 is out: no sign of life for 5 s")
            return receiving.done()

        eventually(is_over)
        check("a frozen source", time.monotonic() - began_at, SOON_S)
        with pytest.raises(CheckpointError, match="replica rank 0: a:1 is out: no sign of life"):
            receiving.result()


@pytest.mark.parametrize("why", ["ZeroDivisionError()", "\n\x1b[0m" + 2000 * "x", ""])
def test_a_source_that_cannot_offer_its_state_says_why(pair: list[ProcessGroup], why: str) -> None:
    source, receiver = PGTransport(pair[0], TIMEOUT), PGTransport(pair[1], TIMEOUT)
    source.refuse_checkpoint([1], 3, why)
    with pytest.raises(
        CheckpointError, match="replica rank 0: step 3 cannot be offered: "
    ) as caught:
        receiver.recv_checkpoint(0, "", 3, TIMEOUT)
    reason = caught.value.reason.removeprefix("step 3 cannot be offered: ")
    assert reason.isprintable()
    assert (reason == why) == (len(why) < 100)
    source.send_checkpoint([1], 3, {"n": 1}, TIMEOUT)  # it can after all
    assert receiver.recv_checkpoint(0, "", 3, TIMEOUT) == {"n": 1}


class OutOfMemory(ProcessGroupWrapper):
    """The third operation does not begin, or another one."""

    def __init__(self, pg: ProcessGroup, num_good: int = 2) -> None:
        super().__init__(pg)
        self._num_good = num_good

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        self._num_good -= 1
        if self._num_good < 0:
            raise MemoryError
        return super()._launch(name, args, kwargs)


def test_who_has_got_a_part_of_a_state_takes_nothing_else_for_the_rest(
    pair: list[ProcessGroup],
) -> None:
    source = PGTransport(OutOfMemory(pair[0]), TIMEOUT)
    with pytest.raises(MemoryError):
        source.send_checkpoint([1], 3, {"w": torch.ones(3)}, TIMEOUT)
    source.refuse_checkpoint([1], 3, "no memory")
    with pytest.raises(DeadlineExceeded):
        PGTransport(pair[1], TIMEOUT).recv_checkpoint(0, "", 3, timedelta(seconds=0.2))


def test_weights_that_a_state_has_replaced_in_part_are_torn(pair: list[ProcessGroup]) -> None:
    source = PGTransport(OutOfMemory(pair[0]), TIMEOUT)
    with pytest.raises(MemoryError):
        source.send_checkpoint([1], 3, {"w": torch.ones(3)}, TIMEOUT)
    receiver = PGTransport(pair[1], TIMEOUT, state_dict=lambda: {"w": torch.zeros(3)})
    with pytest.raises(TornState, match=r"replica rank 0: receiving a state timed out"):
        receiver.recv_checkpoint(0, "", 3, timedelta(seconds=0.2))


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


def test_a_group_whose_source_cannot_offer_its_state_does_not_wait() -> None:
    with lighthouse() as address:

        def trainer(name: str, seed: int) -> Trainer:
            group = ProcessGroupGloo(TIMEOUT)
            transport = PGTransport(group, TIMEOUT)
            return Trainer(address, name, seed, pg=group, checkpoint_transport=transport)

        with trainer("a", 1) as first:
            assert first.steps(2) == [True] * 2
            fails = Fails()
            first.manager.register_state_dict_fn("fails", lambda _: None, fails)
            with trainer("b", 2) as second:
                second.manager.register_state_dict_fn("fails", lambda _: None, dict)
                assert together(second.step, lambda: first.meets(2)) == [False, True]
                assert "cannot be offered: ZeroDivisionError(" in str(second.manager.errored())
                fails.is_over = True
                together(lambda: first.meets(2), lambda: second.meets(2))
                step = max(each.manager.current_step() for each in (first, second)) + 3
                in_step(step, first, second)
                assert_identical([first, second])


class Fails:
    """A state that cannot be collected, until ``is_over``."""

    is_over = False

    def __call__(self) -> dict[str, Any]:
        if not self.is_over:
            raise ZeroDivisionError("of the test")
        return {}
