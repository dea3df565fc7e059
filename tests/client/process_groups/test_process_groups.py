"""Tests process groups whose members change: they connect, fail at once, and never block."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.bounds import Late, check, raises_in_time
from support.meeting_place import MeetingPlace
from support.running import eventually
from support.training import together

from torchft_svc.client import HTTPTransport, PGTransport, ProcessGroupDummy, ProcessGroupGloo
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.process_groups import delegate
from torchft_svc.client.process_groups import gloo as gloo_group
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.client.reduce.wait_times import WaitTimes
from torchft_svc.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerError,
    QuorumFailed,
    Unreachable,
)
from torchft_svc.host.abandoned import AbandonedBackends

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def store() -> MeetingPlace:
    return MeetingPlace()


@pytest.fixture
def gloo() -> Iterator[list[ProcessGroupGloo]]:
    groups = [ProcessGroupGloo(TIMEOUT) for _ in range(3)]
    yield groups
    for group in groups:
        group.shutdown()


def total(group: ProcessGroupGloo, value: float) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait(TIMEOUT)
    return tensor.item()


def test_members_may_change(store: MeetingPlace, gloo: list[ProcessGroupGloo]) -> None:
    a, b, c = gloo
    store.configure(a, b)
    assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]
    store.configure(a, b, c)
    assert together(lambda: total(a, 1), lambda: total(b, 2), lambda: total(c, 4)) == [7, 7, 7]
    assert [(group.rank(), group.size()) for group in gloo] == [(0, 3), (1, 3), (2, 3)]
    store.configure(c, a)
    assert together(lambda: total(a, 1), lambda: total(c, 4)) == [5, 5]
    assert (c.rank(), a.rank(), a.size()) == (0, 1, 2)


def test_torch_s_functions_take_it(store: MeetingPlace, gloo: list[ProcessGroupGloo]) -> None:
    a, b, _ = gloo
    store.configure(a, b)

    def use(group: ProcessGroupGloo) -> tuple[float, list[float]]:
        summed, mine = torch.tensor([1.0]), torch.tensor([float(group.rank())])
        all_of_them = [torch.zeros(1), torch.zeros(1)]
        group.allreduce(summed).wait()
        group.allgather([all_of_them], [mine]).wait()
        group.broadcast([mine], dist.BroadcastOptions()).wait()
        group.barrier().wait()
        return summed.item(), [tensor.item() for tensor in all_of_them]

    assert together(lambda: use(a), lambda: use(b)) == [(2.0, [0.0, 1.0])] * 2


def test_without_members_an_operation_is_an_error(gloo: list[ProcessGroupGloo]) -> None:
    with pytest.raises(QuorumFailed, match="members again with the next quorum"):
        gloo[0].allreduce([torch.ones(1)])


def test_a_group_that_leaves_ends_the_others_waits_at_once(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    a, b, _ = gloo
    store.configure(a, b)
    work = a.allreduce([torch.ones(1)])
    began_at = time.monotonic()
    b.abort()
    with pytest.raises(RuntimeError):
        work.wait(TIMEOUT)
    check("a peer leaves", time.monotonic() - began_at, 1.0)
    assert b.errored() is not None


def test_leaving_with_an_operation_under_way_blocks_nobody(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    a, b, c = gloo
    store.configure(a, b)
    tensor = torch.ones(1)
    work = a.allreduce([tensor])
    began_at = time.monotonic()
    a.abort()
    store.configure(a, c)
    assert together(lambda: total(a, 1), lambda: total(c, 2)) == [3, 3]
    check("leaving, and a new group", time.monotonic() - began_at, 1.0)
    assert not work.is_completed()
    b.abort()  # only now the abandoned operation ends, and with it its group
    with pytest.raises(RuntimeError):
        work.wait(TIMEOUT)
    del work
    assert a._abandoned.clear() == 0


@pytest.mark.parametrize("is_transfer", [False, True])
def test_a_cut_ends_waits_also_for_operations_that_gloo_does_not_end(
    store: MeetingPlace, gloo: list[ProcessGroupGloo], is_transfer: bool
) -> None:
    a, b, _ = gloo
    store.configure(a, b)
    rounds: list[int] = []

    def move(group: ProcessGroupGloo) -> float:
        tensor = torch.ones(10_000_000)  # more than fits into a connection
        try:
            for count in itertools.count():
                if is_transfer:
                    is_first = group is a
                    work = group.send([tensor], 1, 0) if is_first else group.recv([tensor], 0, 0)
                else:
                    work = group.broadcast([tensor], dist.BroadcastOptions())
                work.wait()
                rounds.append(count)
        except (RuntimeError, PeerError):
            return time.monotonic()

    def cut() -> float:
        eventually(lambda: len(rounds) > 6)
        a.cut()
        b.cut()
        return time.monotonic()

    first, second, cut_at = together(lambda: move(a), lambda: move(b), cut)
    check("leaving what gloo does not end", max(first, second) - cut_at, 2.0)


def test_operations_of_whose_end_nobody_is_informed_are_not_kept_for_ever(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    group = gloo[0]
    store.configure(group)
    group.set_timeout(timedelta(milliseconds=50))  # of what is launched from here on

    def forgets_some() -> bool:
        before = len(group._works)
        group.reduce_scatter([torch.zeros(1)], [[torch.ones(1)]]).wait()
        return len(group._works) <= before

    eventually(forgets_some)
    group.abort()
    eventually(lambda: group._abandoned.clear() == 0)


class Backend:
    """Somebody's, with or without operations."""


def test_a_member_that_leaves_and_idles_keeps_nobody_waiting(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    """What it had launched goes on; the others' next operation fails, though it does nothing."""
    leaver, other, _ = gloo
    store.configure(leaver, other)
    leaver.allreduce([torch.ones(1)])
    leaver.abort()
    total = torch.ones(1)
    other.allreduce([total]).wait()
    assert total == 2
    began_at = time.monotonic()
    with pytest.raises(RuntimeError):
        other.allreduce([torch.ones(1)]).wait()
    check("noticing that a member has left", time.monotonic() - began_at, 1.0)


def test_leaving_after_an_interrupted_launch_blocks_nobody(
    store: MeetingPlace, gloo: list[ProcessGroupGloo], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, other, _ = gloo
    store.configure(interrupted, other)
    # Ctrl-C comes as soon as the backend has begun the operation.
    ctrl_c = itertools.takewhile(bool, iter(_thread.interrupt_main, 0))
    monkeypatch.setattr(delegate, "_ONCE", itertools.chain([()], ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        interrupted.allreduce([torch.ones(1)])
    monkeypatch.undo()
    interrupted.abort()
    assert interrupted._abandoned.clear() == 1, "destroying it would have waited for its operation"
    other.allreduce([torch.ones(1)]).wait()
    eventually(lambda: interrupted._abandoned.clear() == 0)  # and so its connections are closed


def test_a_launch_that_fails_leaves_nothing_to_wait_for(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    a, b, _ = gloo
    store.configure(a, b)
    with pytest.raises(RuntimeError, match="requires non-empty tensor list"):
        a.allreduce([])
    a.abort()
    assert a._abandoned.clear() == 0


def test_a_member_that_does_not_come_is_named(store: MeetingPlace) -> None:
    group = ProcessGroupGloo(timedelta(milliseconds=200))
    with raises_in_time(PeerError, r"0\.2 s: replica rank 1 did not come"):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)


def test_news_of_a_loss_ends_the_wait_for_members(store: MeetingPlace) -> None:
    group = ProcessGroupGloo(TIMEOUT)
    news = threading.Timer(0.1, group.lose_member, [1, "b is gone: killed"])
    news.start()
    began_at = time.monotonic()
    with pytest.raises(QuorumFailed, match="b is gone: killed"):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)
    check("news of a loss", time.monotonic() - began_at, 1.0)
    news.join()


def test_news_of_a_loss_ends_the_wait_for_a_connection(store: MeetingPlace) -> None:
    """The member was killed when all had met: gloo waits for it, and cannot be interrupted."""
    group = ProcessGroupGloo(TIMEOUT)
    store.store.set("torchft/1/0/present/1", "1")

    def is_connecting() -> bool:
        return "gloo-connect" in {thread.name for thread in threading.enumerate()}

    def report_loss() -> None:
        eventually(is_connecting)
        group.lose_member(1, "b is gone: killed")

    news = threading.Thread(target=report_loss)
    news.start()
    with pytest.raises(QuorumFailed, match="b is gone: killed"):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)
    news.join()
    group.configure(store.place(2), "a", 0, 1, quorum_id=2)
    assert group.errored() is None
    group.shutdown()
    store.end()


def test_news_that_comes_before_the_wait_counts_too(store: MeetingPlace) -> None:
    group = ProcessGroupGloo(TIMEOUT)
    group.lose_member(1, "b is gone: killed")
    with pytest.raises(QuorumFailed, match="b is gone: killed"):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)
    group.configure(store.place(2), "a", 0, 1, quorum_id=2)
    assert group.errored() is None
    group.shutdown()


def test_a_lost_member_gets_a_moment_for_what_it_has_sent(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    a, b, _ = gloo
    store.configure(a, b)
    a.lose_member(store.quorum_id, "b is gone: it has left")
    if a.errored() is not None:
        raise Late("the moment was over at once")
    try:
        assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]
    except (RuntimeError, QuorumFailed) as error:
        raise Late("the moment was over") from error
    eventually(lambda: a.errored() is not None)
    assert "b is gone" in str(a.errored())


def test_an_interrupted_configure_ends(store: MeetingPlace) -> None:
    group = ProcessGroupGloo(TIMEOUT)
    stop = threading.Timer(0.1, group.interrupt)
    stop.start()
    with pytest.raises(QuorumFailed, match="shut down"):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)
    stop.join()


def test_a_transfer_has_the_group_s_time_and_not_that_of_connecting(
    store: MeetingPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_group, "CONNECT_TIMEOUT_S", 1.0)
    pair = [ProcessGroupGloo(timedelta(milliseconds=1100)) for _ in range(2)]
    store.configure(*pair)
    with pytest.raises(RuntimeError, match="Timed out waiting 1100ms"):
        pair[0].recv([torch.ones(1)], 1, 0).wait()
    for group in pair:
        group.shutdown()


def test_a_store_that_is_gone() -> None:
    with pytest.raises(Unreachable, match="store at localhost:1"):
        ProcessGroupGloo(TIMEOUT).configure("localhost:1/torchft/1/0", "a", 0, 2)


@pytest.mark.skipif(
    not hasattr(dist.TCPStore, "list_keys"), reason="this torch lists no keys of a store"
)
def test_i7_the_store_forgets_earlier_quorums(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    store.store.set("torchft/services/0/manager_address", "kept")
    a, b, _ = gloo
    for _ in range(5):
        store.configure(a, b)

    def quorums() -> set[str]:
        keys = [key.lstrip("/").split("/") for key in store.store.list_keys()]
        return {key[1] for key in keys if key[0] == "torchft"}

    eventually(lambda: quorums() == {"services", str(store.quorum_id)})
    assert store.store.check(["torchft/services/0/manager_address"])


class Pending:
    """An operation that is over on request."""

    over = False

    def is_completed(self) -> bool:
        return self.over


def test_i7_abandoned_groups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned, work = AbandonedBackends(), Pending()
    for _ in range(16):
        abandoned.add(object(), [work])
    with pytest.raises(DeadlineExceeded, match="16 abandoned process groups"):
        abandoned.make_room(0.05, lambda: None)
    work.over = True
    abandoned.make_room(0.05, lambda: None)
    assert abandoned.clear() == 0


def test_an_abandoned_group_outlives_who_abandoned_it() -> None:
    abandoned, work, backend = AbandonedBackends(), Pending(), Backend()
    is_there = weakref.ref(backend)
    abandoned.add(backend, [work])
    del abandoned, backend
    assert is_there() is not None
    work.over = True
    assert AbandonedBackends().clear() == 0
    assert is_there() is None


class Watched:
    """Something that records on which thread its last reference is dropped."""

    def __init__(self, threads: list[str]) -> None:
        self._threads = threads

    def __del__(self) -> None:
        self._threads.append(threading.current_thread().name)


class Broken(dist.Work):
    """An operation whose connections have broken; with something that is kept as long as it is."""

    def __init__(self, threads: list[str]) -> None:
        super().__init__()
        self._watched = Watched(threads)

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError("the connection was closed")


def test_a_backend_is_closed_on_another_thread() -> None:
    """Gloo takes about 10 ms for each member, and the next ones are waiting."""
    threads: list[str] = []
    abandoned = AbandonedBackends()
    backend = Watched(threads)
    abandoned.add(backend, [])
    del backend
    abandoned.clear_soon()
    eventually(lambda: threads == ["torchft-abandoned"])


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_sum_that_has_failed_is_dropped_on_another_thread(is_given_up: bool) -> None:
    """The traceback of an error that is kept would keep the sum, and drop it with the next step."""
    threads: list[str] = []
    errors: list[Exception] = []
    reduction = Reduction(
        torch.ones(1),
        Broken(threads),
        1.0,
        pg=ProcessGroupDummy(),
        on_error=errors.append,
        on_wait=lambda _: None,
        watchdog=Watchdog(None),
        times=WaitTimes(),
    )
    if is_given_up:
        reduction.abandon()
    assert not reduction.wait()
    eventually(lambda: threads == ["torchft-abandoned"])
    assert len(errors) == (not is_given_up)


def test_the_dummy_gives_back_what_it_got() -> None:
    group = ProcessGroupDummy()
    group.configure("nowhere:1/x", "a", 1, 3)
    assert (group.rank(), group.size()) == (1, 3)
    tensor = torch.tensor([5.0])
    assert group.allreduce([tensor]).wait()
    gathered = [torch.zeros(1) for _ in range(3)]
    group.allgather([gathered], [tensor]).wait()
    assert [part.item() for part in (tensor, *gathered)] == [5.0] * 4


def test_the_dummy_needs_no_members_to_be_used() -> None:
    group = ProcessGroupDummy(2, 3)
    assert (group.rank(), group.size(), group.errored()) == (2, 3, None)
    tensor = torch.tensor([5.0])
    assert group.allreduce([tensor]).wait()
    gathered = [torch.zeros(1) for _ in range(3)]
    group.allgather([gathered], [tensor]).wait()
    assert [part.item() for part in (tensor, *gathered)] == [5.0] * 4


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_dummys_rank_is_below_its_world_size(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank={rank}.*below world_size={world_size}"):
        ProcessGroupDummy(rank, world_size)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), timedelta.max])
def test_no_time_is_refused_and_so_is_too_much(timeout: timedelta) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        ProcessGroupGloo(timeout)
    with pytest.raises(ConfigError, match="timeout"):
        ProcessGroupGloo().set_timeout(timeout)
    with pytest.raises(ConfigError, match="timeout"):
        PGTransport(ProcessGroupGloo(), timeout)
    with pytest.raises(ConfigError, match="timeout"):
        HTTPTransport(timeout)


def test_the_connection_to_the_store_is_kept(
    store: MeetingPlace, gloo: list[ProcessGroupGloo]
) -> None:
    a, b, _ = gloo
    store.configure(a, b)
    kept = a._last_store._connection
    store.configure(b, a)
    assert a._last_store._connection is kept
    other = MeetingPlace()
    other.configure(a, b)
    assert a._last_store._connection is not kept


def test_a_connection_that_broke_is_not_kept(store: MeetingPlace) -> None:
    group = ProcessGroupGloo(timedelta(milliseconds=100))
    with pytest.raises(PeerError):
        group.configure(store.place(1), "a", 0, 2, quorum_id=1)
    assert group._last_store._connection is None
