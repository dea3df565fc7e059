"""Tests all classes of process groups when members fail, hang, change or misuse the group."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.bounds import check
from support.meeting_place import MeetingPlace, marked
from support.running import TESTS, environment
from support.training import together
from support.warm import Warm

from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)
from torchft_svc.errors import QuorumFailed, TorchFTError
from torchft_svc.testing import FakeProcessGroupWrapper

# Nothing here may take longer, whatever fails.
pytestmark = pytest.mark.timeout(100)
TIMEOUT = timedelta(seconds=30)
# Of who waits for a group that does not answer.
SHORT = timedelta(seconds=1)
KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": lambda: ProcessGroupGloo(TIMEOUT),
    "baby": lambda: ProcessGroupBabyGloo(TIMEOUT),
    "fake": lambda: FakeProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)),
    "swallowing": lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)),
}
Failure = (RuntimeError, TorchFTError)


@pytest.fixture
def place() -> MeetingPlace:
    return MeetingPlace()


@pytest.fixture(params=marked(KINDS))
def groups(request: pytest.FixtureRequest) -> Iterator[list[ProcessGroup]]:
    groups = [KINDS[request.param]() for _ in range(3)]
    if request.param == "baby":  # its processes take their time to start, but not in the test
        for group in groups:
            MeetingPlace().configure(group)
            group.abort()
    yield groups
    for group in groups:
        group.shutdown()
        group.shutdown()  # twice is harmless


def total(group: ProcessGroup, value: float, timeout: timedelta = TIMEOUT) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait(timeout)
    return tensor.item()


def fails(group: ProcessGroup, action: Callable[[], Any]) -> bool:
    """Whether ``action`` raises, or is swallowed and leaves an error."""
    try:
        action()
    except Failure:
        return True
    return group.errored() is not None


def test_a_peer_leaves_in_the_middle(place: MeetingPlace, groups: list[ProcessGroup]) -> None:
    a, b, c = groups
    place.configure(*groups)
    began_at = time.monotonic()
    together(
        lambda: fails(a, lambda: total(a, 1, SHORT)),
        lambda: fails(b, lambda: total(b, 1, SHORT)),
        lambda: c.abort() is None,
    )
    check("a peer leaves", time.monotonic() - began_at, 3)
    assert c.errored() is not None
    place.configure(a, b)
    assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]


def test_a_peer_hangs(place: MeetingPlace, groups: list[ProcessGroup]) -> None:
    a, b, _ = groups
    place.configure(a, b)
    began_at = time.monotonic()
    assert fails(a, lambda: total(a, 1, SHORT))
    check("a peer hangs", time.monotonic() - began_at, 3)


@pytest.mark.parametrize("num_members", [1, 2, 3])
def test_reconfigured_with_fewer_more_or_the_same(
    place: MeetingPlace, groups: list[ProcessGroup], num_members: int
) -> None:
    place.configure(*groups[:2])
    for _ in range(3):
        members = groups[:num_members]
        place.configure(*members)
        sums = together(*(lambda member=member: total(member, 1) for member in members))
        assert sums == [num_members] * num_members


def test_wrong_sizes(place: MeetingPlace, groups: list[ProcessGroup]) -> None:
    """One member's own tensors differ. For members that disagree see below and test_isolated.py."""
    place.configure(*groups)

    def gather(group: ProcessGroup, numel: int) -> list[float]:
        output = torch.zeros(numel)
        group._allgather_base(output, torch.ones(1)).wait(TIMEOUT)
        return output.tolist()

    failed = together(
        *(lambda group=group: fails(group, lambda: gather(group, 5)) for group in groups)
    )
    assert failed == [True] * 3
    place.configure(*groups)
    found = together(*(lambda group=group: gather(group, 3) for group in groups))
    assert found == [[1] * 3] * 3


@pytest.mark.processes
def test_gloo_ends_the_process_of_who_disagrees_on_a_size() -> None:
    """Gloo's docstring promises it: no wait without an end, and no wrong sum."""
    trainer = Warm(
        [sys.executable, "-m", "support.scripts.differing_trainer"],
        cwd=TESTS,
        text=True,
        env=environment(),
    )
    assert trainer.wait(30) == -signal.SIGABRT
    assert trainer.stdout.read() == ""
    trainer.close()


def test_use_before_configure(groups: list[ProcessGroup]) -> None:
    for group in groups:
        assert fails(group, lambda group=group: total(group, 1))  # type: ignore[misc]


def test_use_after_abort(place: MeetingPlace, groups: list[ProcessGroup]) -> None:
    place.configure(*groups)
    for group in groups:
        group.abort()
        group.abort()
        assert group.errored() is not None
        assert fails(group, lambda group=group: total(group, 1))  # type: ignore[misc]


def test_use_after_shutdown(place: MeetingPlace, groups: list[ProcessGroup]) -> None:
    place.configure(*groups)
    for group in groups:
        group.shutdown()
        assert fails(group, lambda group=group: total(group, 1))  # type: ignore[misc]
        with pytest.raises(QuorumFailed, match="was shut down"):
            place.configure(group)
