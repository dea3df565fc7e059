"""Tests groups that torch itself reconfigures, against torch's documented interface."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.meeting_place import MeetingPlace
from support.reconfigurable import ReconfigurableGroup, add_to_torch, make_groups
from support.running import eventually
from support.training import Trainer, assert_identical, in_step, lighthouse, together

from torchft_svc.client import ProcessGroup
from torchft_svc.client.process_groups.torch_group import TorchGroup, adopt_torch_group
from torchft_svc.errors import ConfigError, MemberLost, PeerError

pytestmark = pytest.mark.timeout(100)
TIMEOUT = timedelta(seconds=20)
SHORT = timedelta(milliseconds=300)
# What was given up waits so long for the others, in a thread that the test must not leave behind.
GIVEN_UP = timedelta(seconds=2)


@pytest.fixture
def place() -> MeetingPlace:
    return MeetingPlace()


@pytest.fixture
def shared() -> dist.TCPStore:
    """The store that torch's groups were made with."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def natives(shared: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> list[ReconfigurableGroup]:
    add_to_torch(monkeypatch)
    return make_groups(shared, 3)


def total(group: dist.ProcessGroup) -> float:
    value = torch.ones(2)
    group.allreduce([value]).wait()
    return float(value[0])


def test_the_same_object_gets_fewer_and_more_members(
    place: MeetingPlace, natives: list[ReconfigurableGroup]
) -> None:
    groups = [adopt_torch_group(native, TIMEOUT) for native in natives]
    for members in ([0, 1, 2], [2, 0], [1], [0, 1, 2]):
        place.configure(*[groups[index] for index in members])
        size = len(members)
        for each in (groups, natives):
            sums = together(*(lambda i=i, each=each: total(each[i]) for i in members))
            assert sums == [size] * size
        assert [(natives[i].rank(), natives[i].size()) for i in members] == [
            (rank, size) for rank in range(size)
        ]
        assert [groups[i].rank() for i in members] == list(range(size))
    assert natives[0].uuids[0] == natives[2].uuids[0]
    assert len(set(natives[0].uuids)) == 3
    assert natives[0].limit == TIMEOUT
    for group, native in zip(groups, natives, strict=True):
        group.shutdown()
        assert native.num_aborts == len(native.uuids)
        with pytest.raises(PeerError, match="was left"):
            total(group)


def test_members_meet_after_one_has_not_come(
    place: MeetingPlace, natives: list[ReconfigurableGroup]
) -> None:
    first, second = (adopt_torch_group(native, SHORT) for native in natives[:2])
    with pytest.raises(PeerError, match="replica rank 1 did not come"):
        first.configure(place.place(1), "group 0", 0, 2, quorum_id=1)
    place.quorum_id = 1
    place.configure(first, second)
    assert together(lambda: total(first), lambda: total(second)) == [2, 2]


def test_an_attempt_that_was_given_up_connects_nobody_later(
    place: MeetingPlace, natives: list[ReconfigurableGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object serves one list of members: the newest."""
    first, second, third = (adopt_torch_group(native, GIVEN_UP) for native in natives)
    asked, may_answer = threading.Event(), threading.Event()

    def answer_late() -> str:
        asked.set()
        assert may_answer.wait(20)
        return ReconfigurableGroup.get_reconfigure_handle(natives[1])

    monkeypatch.setattr(natives[1], "get_reconfigure_handle", answer_late)
    stuck = threading.Thread(
        target=lambda: fails(lambda: second.configure(place.place(1), "b", 1, 2, quorum_id=1))
    )
    stuck.start()

    def lose() -> None:
        assert asked.wait(20)
        first.lose_member(1, "planted")

    with pytest.raises(MemberLost, match="planted"):
        together(lambda: first.configure(place.place(1), "a", 0, 2, quorum_id=1), lose)
    place.quorum_id = 1
    given_up = first._newest

    def answer() -> None:
        eventually(lambda: first._newest is not given_up)
        may_answer.set()

    together(lambda: place.configure(first, third), answer)
    assert together(lambda: total(first), lambda: total(third)) == [2, 2]
    stuck.join()
    assert [len(native.uuids) for native in natives] == [1, 0, 1]


@pytest.mark.parametrize("error", [RuntimeError("planted"), ValueError("planted")], ids=repr)
def test_the_others_learn_that_torch_has_raised(
    place: MeetingPlace,
    natives: list[ReconfigurableGroup],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """The others do not wait for this member, whatever class of exception that was."""
    first, second = (adopt_torch_group(native, TIMEOUT) for native in natives[:2])

    def refuse(opts: object) -> None:
        raise error

    def fails_too(group: ProcessGroup, rank: int) -> None:
        with pytest.raises(PeerError, match="planted"):
            group.configure(place.place(1), f"group {rank}", rank, 2, quorum_id=1)

    with monkeypatch.context() as patched:
        patched.setattr(natives[1], "reconfigure", refuse)
        together(lambda: fails_too(first, 0), lambda: fails_too(second, 1))
    place.quorum_id = 1
    place.configure(first, second)
    assert together(lambda: total(first), lambda: total(second)) == [2, 2]


def fails(action: Callable[[], None]) -> None:
    with pytest.raises(PeerError):
        action()


def test_a_group_with_fixed_members_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = dist.ProcessGroup(0, 1)
    if not hasattr(dist, "_reconfigure"):
        with pytest.raises(ConfigError, match=r"from 2\.14 on, and this is"):
            adopt_torch_group(group, TIMEOUT)
    add_to_torch(monkeypatch)
    with pytest.raises(ConfigError, match="give init_process_group enable_reconfigure=True"):
        adopt_torch_group(group, TIMEOUT)


def test_a_manager_drives_torch_s_groups(natives: list[ReconfigurableGroup]) -> None:
    with lighthouse(join_timeout_ms=1000) as address:
        a, b = together(
            *(lambda i=i: Trainer(address, "ab"[i], i, pg=natives[i]) for i in (0, 1))  # type: ignore[misc]
        )
        in_step(3, a, b)
        assert_identical([a, b])
        assert isinstance(a.manager._runtime.deps.pg, TorchGroup)
        b.manager.shutdown()
        assert a.meets(1)
        with a, Trainer(address, "c", 2, pg=natives[2]) as c:
            in_step(a.manager.current_step() + 3, a, c)
            assert_identical([a, c])
    assert (natives[0].size(), natives[0].rank() + natives[2].rank()) == (2, 1)
