"""Tests when the process groups of earlier worlds are destroyed, and on which thread.

Plain objects stand for torch's groups: what counts is who drops the last reference.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from support import bounds
from support.running import eventually

from torchft_svc.elastic.world_waits import _EXIT_S, _Destroyer

MakeDestroyer = Callable[..., _Destroyer]


class Group:
    """A group whose destruction waits for ``may_end``, as one of gloo for its operations."""

    def __init__(self, may_end: threading.Event | None = None) -> None:
        self.may_end = may_end
        self.destroyed_on: list[str] = []

    def __del__(self) -> None:
        self.destroyed_on.append(threading.current_thread().name)
        if self.may_end is not None:
            self.may_end.wait(60)


_others: set[threading.Thread] = set()


@pytest.fixture
def make() -> Iterator[MakeDestroyer]:
    made: list[_Destroyer] = []
    _others.update(threading.enumerate())  # an earlier test may have left this process' own one

    def make_one(**options: float) -> _Destroyer:
        made.append(_Destroyer(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for destroyer in made:
        destroyer.stop()
    _others.clear()


def num_threads() -> int:
    started = set(threading.enumerate()) - _others
    return sum(each.name == "torchft-world-destroyer" for each in started)


def test_one_thread_destroys_the_groups_of_all_worlds(make: MakeDestroyer) -> None:
    destroyer, used = make(), [Group() for _ in range(20)]
    seen = [each.destroyed_on for each in used]
    for each in used:
        destroyer.destroy([each])
    del each
    assert num_threads() == 1
    assert seen == [[]] * 20, "the program still uses them"
    used.clear()
    eventually(lambda: seen == [["torchft-world-destroyer"]] * 20)


def test_a_group_that_is_used_for_too_long_is_left_to_its_owner(make: MakeDestroyer) -> None:
    group = Group()
    num_owners = sys.getrefcount(group)
    make(owned_s=0.1).destroy([group])
    eventually(lambda: sys.getrefcount(group) == num_owners)
    assert group.destroyed_on == []


def test_of_too_many_groups_the_oldest_ones_are_kept(make: MakeDestroyer) -> None:
    destroyer, may_end = make(max_groups=3), threading.Event()
    first = Group(may_end)
    began = first.destroyed_on
    destroyer.destroy([first])
    del first
    eventually(lambda: began)
    groups = [Group() for _ in range(5)]
    living = [weakref.ref(each) for each in groups]
    while groups:
        destroyer.destroy([groups.pop(0)])
    may_end.set()
    eventually(lambda: [each() is None for each in living] == [False, False, True, True, True])


def test_an_exit_waits_for_no_destruction_and_begins_none(make: MakeDestroyer) -> None:
    destroyer, may_end = make(), threading.Event()
    first, second = Group(may_end), Group()
    began, other = first.destroyed_on, second.destroyed_on
    destroyer.destroy([first])
    del first
    eventually(lambda: began)
    destroyer.destroy([second])
    del second
    began_at = time.monotonic()
    destroyer.stop()
    bounds.check("an exit", time.monotonic() - began_at, _EXIT_S + 0.5)
    third = Group()
    last = third.destroyed_on
    destroyer.destroy([third])
    del third
    may_end.set()
    eventually(lambda: num_threads() == 0)
    assert (other, last) == ([], [])
