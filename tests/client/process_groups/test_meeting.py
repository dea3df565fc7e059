"""Tests that a store which is frozen, filled, or no store at all neither blocks nor misleads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.bounds import check
from support.meeting_place import MeetingPlace
from support.running import END_S, START_S, eventually, freeze, silent
from support.stores import store_process
from support.training import lighthouse, together

from torchft_svc.client import Manager, ProcessGroupGloo
from torchft_svc.client.process_groups import rendezvous
from torchft_svc.client.process_groups.rendezvous import MembersMeeting
from torchft_svc.errors import DeadlineExceeded, PeerError, QuorumFailed, Unreachable
from torchft_svc.host import uninterruptible
from torchft_svc.host.uninterruptible import MAX_ABANDONED_CALLS, UninterruptibleCall

TIMEOUT = timedelta(seconds=60)
CALL_S = 0.5
ENOUGH_S = 1.0
# Of one process, which may have 1024 descriptors.
NUM_IDLE = 600


@pytest.fixture
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CALL_TIMEOUT_S", CALL_S)


@pytest.fixture
def group() -> Iterator[ProcessGroupGloo]:
    made = ProcessGroupGloo(TIMEOUT)
    yield made
    made.shutdown()


def test_a_store_that_accepts_and_never_answers(group: ProcessGroupGloo, short_calls: None) -> None:
    with silent() as nowhere:
        began_at = time.monotonic()
        with pytest.raises(Unreachable, match=f"store at {nowhere} .* (timed out|not answer)"):
            group.configure(f"{nowhere}/torchft/1/0", "a", 0, 2, quorum_id=1)
        check("a store that never answers", time.monotonic() - began_at, CALL_S + ENOUGH_S)


def test_news_of_its_host_ends_the_wait_for_a_store(group: ProcessGroupGloo) -> None:
    with silent() as nowhere:
        news = threading.Timer(0.1, group.lose_member, [1, "b is out: no sign of life"])
        news.start()
        began_at = time.monotonic()
        with pytest.raises(QuorumFailed, match="b is out: no sign of life"):
            group.configure(f"{nowhere}/torchft/1/0", "a", 0, 2, quorum_id=1)
        check("news of the store's host", time.monotonic() - began_at, ENOUGH_S)
        news.join()


def test_a_service_that_is_no_store_is_said_to_be_none(group: ProcessGroupGloo) -> None:
    with lighthouse() as address:
        where = address.removeprefix("http://")
        with pytest.raises(Unreachable, match="the service there is no store"):
            group.configure(f"{where}/torchft/1/0", "a", 0, 2, quorum_id=1)


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.processes
def test_the_host_of_a_store_is_frozen(
    group: ProcessGroupGloo, connected: bool, short_calls: None
) -> None:
    """A frozen host's kernel still accepts connections, and what is sent over them."""
    with store_process() as (host, port):
        if connected:
            other = ProcessGroupGloo(TIMEOUT)
            where = f"127.0.0.1:{port}/torchft/1/0"
            together(
                lambda: group.configure(where, "a", 0, 2, quorum_id=1),
                lambda: other.configure(where, "b", 1, 2, quorum_id=1),
            )
            other.shutdown()
        freeze(host.pid)
        for quorum_id in range(2, 5):
            where = f"127.0.0.1:{port}/torchft/{quorum_id}/0"
            began_at = time.monotonic()
            with pytest.raises(Unreachable, match=r"not answer|timed out"):
                group.configure(where, "a", 0, 2, quorum_id=quorum_id)
            check("a frozen store", time.monotonic() - began_at, CALL_S + ENOUGH_S)
        os.kill(host.pid, signal.SIGCONT)
        eventually(lambda: "torchft-store" not in {each.name for each in threading.enumerate()})


@pytest.mark.processes
def test_what_is_given_up_too_often_is_made_to_end() -> None:
    """A connection to a store that stays frozen is cut, and its thread ends."""
    uninterruptible._abandoned.clear()
    with store_process() as (host, port):
        connections = [
            rendezvous.StoreConnection(f"127.0.0.1:{port}", 60.0)
            for _ in range(MAX_ABANDONED_CALLS + 3)
        ]
        freeze(host.pid)
        for connection in connections:
            with pytest.raises(QuorumFailed):
                connection.call(connection.store.num_keys, _not_wanted)

        def stuck() -> int:
            return sum(each.name == "torchft-store" for each in threading.enumerate())

        eventually(lambda: stuck() == MAX_ABANDONED_CALLS)
        for connection in connections:
            connection.cut()
        eventually(lambda: stuck() == 0)


def _not_wanted() -> None:
    raise QuorumFailed("nobody wants this any more")


def test_an_attempt_has_a_deadline() -> None:
    may_end = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"waiting for nothing timed out after 0\.05 s"):
        UninterruptibleCall(may_end.wait, "waits").result(lambda: None, 0.05, "waiting for nothing")
    may_end.set()


@pytest.mark.processes
def test_idle_connections_do_not_keep_members_from_meeting(group: ProcessGroupGloo) -> None:
    """Torch's server looks up the name of each, so whoever comes later waits for that."""
    other = ProcessGroupGloo(TIMEOUT)
    with contextlib.ExitStack() as idle, store_process() as (_, port):
        for _ in range(NUM_IDLE):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), START_S))
        began_at = time.monotonic()
        where = f"127.0.0.1:{port}/torchft/1/0"
        with contextlib.suppress(PeerError):
            together(
                lambda: group.configure(where, "a", 0, 2, quorum_id=1),
                lambda: other.configure(where, "b", 1, 2, quorum_id=1),
            )
        check(
            "meeting at a filled store",
            time.monotonic() - began_at,
            4 * rendezvous.CALL_TIMEOUT_S + ENOUGH_S,
        )
    other.shutdown()


@pytest.mark.usefixtures("short_calls")
def test_workers_of_a_group_whose_store_never_answers_say_so() -> None:
    with silent() as nowhere, lighthouse() as address:
        host, port = nowhere.split(":")
        began_at = time.monotonic()
        with pytest.raises(Unreachable, match="store at"):
            Manager(
                lighthouse_addr=address,
                store_addr=host,
                store_port=int(port),
                rank=1,
                world_size=2,
                connect_timeout=timedelta(seconds=1),
                in_process=True,
            )
        took_s = time.monotonic() - began_at
        check("a group's store that never answers", took_s, 1.0 + rendezvous.CALL_TIMEOUT_S)


def _put(port: int, key: bytes, value: bytes = b"x") -> None:
    """Set ``key`` as torch's client would, if it accepted a key that is not UTF-8."""
    with socket.create_connection(("127.0.0.1", port), END_S) as line:
        line.sendall(struct.pack("=BI", 0, 0x3C85F7CE))
        line.sendall(b"\x01" + struct.pack("=Q", len(key)) + key)
        line.sendall(struct.pack("=Q", len(value)) + value)
        line.sendall(struct.pack("=BI", 13, 7))  # a ping: what was sent has been read
        assert line.recv(4) == struct.pack("=I", 7)


# Torch puts a slash before each key of its own.
STRANGE_KEYS = [
    b"/torchft/\xff\xfe/0/present/0",
    b"/torchft/" + b"9" * 5000 + b"/0/present/0",
    "/torchft/\u0663/0/present/0".encode(),
    b"/torchft//0/present/0",
    b"/torchft/-1/0/present/0",
]


@pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch lists no keys of a store"
)
@pytest.mark.parametrize("key", STRANGE_KEYS, ids=lambda key: repr(key[:24]))
def test_strange_keys_in_a_store_end_no_meeting(group: ProcessGroupGloo, key: bytes) -> None:
    place, other = MeetingPlace(), ProcessGroupGloo(TIMEOUT)
    for _ in range(2):
        place.configure(group, other)
    _put(place.store.port, key)
    for _ in range(2):
        place.configure(group, other)
    other.shutdown()


def test_what_a_store_says_of_a_failure_is_one_printable_line(group: ProcessGroupGloo) -> None:
    place = MeetingPlace()
    lie = b"\x1b[31mfine\n2026-01-01 00:00:00 CRITICAL all is lost\xff" + b"x" * 100_000
    place.store.set("torchft/1/0/failed", lie)
    with pytest.raises(QuorumFailed) as caught:
        group.configure(place.place(1), "a", 0, 2, quorum_id=1)
    assert re.search("fine.2026", str(caught.value))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000


class CountingStore:
    """A store without a network, that counts its requests."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.num_requests = 0

    def set(self, key: str, _: str) -> None:
        self.num_requests += 1
        self.keys.add(key)

    def check(self, keys: list[str]) -> bool:
        self.num_requests += 1
        return self.keys.issuperset(keys)


def _meetings(store: CountingStore, world_size: int) -> list[MembersMeeting]:
    return [MembersMeeting(store, rank, world_size) for rank in range(world_size)]  # type: ignore[arg-type]


def test_a_meeting_takes_a_few_requests_for_each_member() -> None:
    """Rule P9: not one of each member for each of the others."""
    store, num_members = CountingStore(), 300
    meetings = _meetings(store, num_members)
    for each in meetings[:-1]:
        assert not each.poll(0.0)
    assert meetings[-1].first_missing() == num_members - 1
    assert meetings[-1].poll(0.0) or meetings[0].poll(0.0)
    for each in meetings:
        assert each.poll(0.0)
    assert store.num_requests < 7 * num_members


class VirtualTime:
    """A clock that only `sleep` moves on; ``arrive`` is called when it is ``arrives_at``."""

    def __init__(self, arrives_at: float, arrive: Callable[[], None]) -> None:
        self.now = 0.0
        self._arrives_at = arrives_at
        self._arrive = arrive

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        before, self.now = self.now, self.now + pause_s
        if before < self._arrives_at <= self.now:
            self._arrive()


@pytest.mark.parametrize("arrives_at", [0.004, 0.008, 0.016, 0.032, 0.1, 0.2])
def test_a_member_that_comes_late_is_noticed_soon(
    monkeypatch: pytest.MonkeyPatch, arrives_at: float
) -> None:
    """Groups wait for a prepared spare, which has to connect to the store first."""
    store = CountingStore()
    clock = VirtualTime(arrives_at, lambda: store.set("present/1", "1"))
    monkeypatch.setattr(rendezvous, "time", clock)
    meeting = MembersMeeting(store, 0, 2)  # type: ignore[arg-type]
    assert meeting.poll(1.0)
    assert clock.now - arrives_at <= 0.001 + 0.15 * arrives_at
    assert store.num_requests < 100


def test_members_meet_without_the_one_that_announces_it() -> None:
    """Rank 0 has arrived, and died; nobody else has written that they met."""
    store = CountingStore()
    store.set("present/0", "1")
    first, last = _meetings(store, 3)[1:]
    assert not first.poll(0.0)
    assert first.first_missing() == 2
    eventually(lambda: last.poll(0.0))
    assert first.poll(0.0)
