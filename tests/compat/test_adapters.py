"""Tests the parts of `torchft_svc.compat` by the behavior of the public release."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from support.reconfigurable import add_to_torch, make_groups
from support.running import eventually, refusing
from support.training import together

from torchft_svc.client.process_groups import registry
from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.reduce.bucket_hook import BucketHook
from torchft_svc.client.reduce.operations import Kind
from torchft_svc.compat import futures
from torchft_svc.compat._torchft import _with_hyphens
from torchft_svc.compat.checkpointing import HTTPTransport
from torchft_svc.compat.checkpointing._rwlock import RWLock
from torchft_svc.compat.checkpointing.pg_transport import PGTransport
from torchft_svc.compat.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
)
from torchft_svc.compat.data import DistributedSampler
from torchft_svc.compat.local_sgd import extract_local_tensor
from torchft_svc.compat.manager import ExceptionWithTraceback, extract_trailing_digits, get_timeout
from torchft_svc.compat.parameter_server import ParameterServer
from torchft_svc.compat.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupXCCL,
    ReconfigureOptions,
    create_store_client,
    reconfigure_with_store,
)
from torchft_svc.compat.work import _DummyWork
from torchft_svc.errors import ConfigError

LONG = timedelta(seconds=20)
SHORT = timedelta(milliseconds=200)


@pytest.fixture
def hosted() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(hosted: dist.TCPStore) -> str:
    return f"127.0.0.1:{hosted.port}"


@pytest.fixture(autouse=True)
def _no_timer_is_left() -> Iterator[None]:
    yield
    futures._TIMEOUTS.close()


def summed(group: ProcessGroup) -> float:
    value = torch.ones(3)
    assert group.allreduce([value], dist.ReduceOp.SUM).wait()
    return float(value[0])


# -- process groups ------------------------------------------------------------------------------


def test_groups_are_configured_as_in_the_stable_release(store: str) -> None:
    groups = [ProcessGroupGloo(timeout=LONG) for _ in range(2)]

    def use(rank: int) -> float:
        group = groups[rank]
        group.configure(f"{store}/a", f"r{rank}", rank, 2, 1, 0, 1, [rank])
        one = torch.full((2,), float(rank + 1))
        group.broadcast_one(one, root=1).wait()
        assert one.tolist() == [2.0, 2.0]
        return summed(group)

    assert together(lambda: use(0), lambda: use(1)) == [2.0, 2.0]
    assert [group.size() for group in groups] == [2, 2]
    assert groups[0].getBackendName() == "torchft-gloo"
    groups[0].abort(errored=True)
    assert isinstance(groups[0].errored(), Exception)
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("as_set", [False, True])
def test_groups_are_reconfigured_by_handles_as_in_the_nightly(as_set: bool) -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(3)]
    for number, group in enumerate(groups):
        assert group.supports_reconfigure
        group.set_rank_info(f"r{number}", 0, 1, number)
    handles = [group.get_reconfigure_handle() for group in groups]
    assert handles == [group.get_reconfigure_handle() for group in groups]

    def meet(number: int, uuid: int, present: list[str]) -> tuple[int, int, float]:
        group = groups[number]
        given = set(present) if as_set else present
        options = ReconfigureOptions(uuid=uuid, handles=given, timeout=LONG)
        assert group.reconfigure(options).wait()
        return group.rank(), group.size(), summed(group)

    three = together(*[lambda n=n: meet(n, 1, handles) for n in range(3)])  # type: ignore[misc]
    assert sorted(rank for rank, _, _ in three) == [0, 1, 2]
    if not as_set:
        assert [rank for rank, _, _ in three] == [0, 1, 2]
    assert {(size, total) for _, size, total in three} == {(3, 3.0)}
    # One leaves; the same two meet twice.
    for _ in range(2):
        two = together(*[lambda n=n: meet(n, 2, handles[1:]) for n in (1, 2)])  # type: ignore[misc]
        assert [total for _, _, total in two] == [2.0, 2.0]
    with pytest.raises(ConfigError, match="own handle is not among them"):
        groups[0].reconfigure(ReconfigureOptions(handles=handles[1:]))
    for other in ("", "{}", "[]", "1"):
        with pytest.raises(ConfigError, match="has returned it"):
            groups[0].reconfigure(ReconfigureOptions(handles=[other, *handles]))
    for group in groups:
        group.shutdown()


def test_members_meet_after_one_of_them_has_given_up_alone() -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in groups]

    def meet(number: int, timeout: timedelta) -> float:
        options = ReconfigureOptions(uuid=1, handles=handles, timeout=timeout)
        groups[number].reconfigure(options).wait()
        return summed(groups[number])

    for number in (0, 1):
        with pytest.raises(TimeoutError, match="meeting the other members"):
            meet(number, SHORT)
    for _ in range(2):
        assert together(lambda: meet(0, LONG), lambda: meet(1, LONG)) == [2.0, 2.0]
    assert groups[0]._timeout == LONG
    with pytest.raises(ConfigError, match="above 0"):
        meet(0, timedelta(0))
    for group in groups:
        group.shutdown()


def test_meetings_leave_nothing_behind() -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in groups]

    def meet(number: int, uuid: int) -> None:
        options = ReconfigureOptions(uuid=uuid, handles=handles, timeout=LONG)
        groups[number].reconfigure(options).wait()

    store = groups[0]._store
    assert store is not None
    together(lambda: meet(0, 1), lambda: meet(1, 1))
    size = store.num_keys()
    for uuid in range(2, 8):
        together(lambda: meet(0, uuid), lambda: meet(1, uuid))  # noqa: B023 - ends in this turn
    eventually(lambda: store.num_keys() <= size)
    for group in groups:
        group.shutdown()


def test_groups_meet_at_a_store(store: str) -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(2)]

    def use(rank: int) -> float:
        reconfigure_with_store(groups[rank], f"{store}/meet", rank, 2, LONG)
        return summed(groups[rank])

    assert together(lambda: use(0), lambda: use(1)) == [2.0, 2.0]
    for group in groups:
        group.shutdown()


class ByHandlesOnly(ProcessGroupDummy):
    """A program's own group, which only has the interface of the nightly."""

    given: tuple[str, ...] = ()

    def get_reconfigure_handle(self) -> str:
        return f"handle of {self.rank()}"

    def reconfigure(self, opts: ReconfigureOptions) -> dist.Work:
        self.given = tuple(opts.handles)
        return _DummyWork(None)


def test_a_program_s_group_gets_the_handles_of_all_members(store: str) -> None:
    groups = [ByHandlesOnly(rank, 2) for rank in range(2)]
    together(
        *[lambda r=r: reconfigure_with_store(groups[r], f"{store}/own", r, 2, LONG) for r in (0, 1)]  # type: ignore[misc]
    )
    assert {group.given for group in groups} == {("handle of 0", "handle of 1")}


def test_torch_s_own_groups_meet_at_a_store(
    hosted: dist.TCPStore, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_to_torch(monkeypatch)
    groups = make_groups(hosted, 2)
    for turn in range(2):

        def use(rank: int, turn: int = turn) -> float:
            reconfigure_with_store(groups[rank], f"{store}/own/{turn}", rank, 2, LONG)
            value = torch.ones(3)
            groups[rank].allreduce([value]).wait()
            return float(value[0])

        assert together(lambda: use(0), lambda: use(1)) == [2.0, 2.0]
    with pytest.raises(ConfigError, match="enable_reconfigure=True"):
        reconfigure_with_store(dist.ProcessGroup(0, 1), f"{store}/fixed", 0, 1, LONG)


def test_a_member_that_does_not_come_is_a_timeout_or_a_runtime_error(store: str) -> None:
    group = ProcessGroupGloo(LONG)
    with pytest.raises((TimeoutError, RuntimeError)):
        reconfigure_with_store(group, f"{store}/alone", 0, 2, SHORT)
    group.shutdown()


def test_errors_are_swallowed_until_the_next_configure(store: str) -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(LONG))
    group.configure(f"{store}/x", "r", 0, 1)
    assert summed(group) == 1.0
    failure = RuntimeError("planted")
    group.report_error(failure)
    assert group.error() is failure
    assert group.allreduce([torch.ones(1)], dist.ReduceOp.SUM).wait()
    group.configure(f"{store}/y", "r", 0, 1)
    assert group.error() is None
    group.shutdown()


def test_a_planted_error_reaches_the_caller(store: str) -> None:
    group = FakeProcessGroupWrapper(ProcessGroupGloo(LONG))
    group.configure(f"{store}/x", "r", 0, 1)
    group.report_future_error(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        group.allreduce([torch.ones(1)], dist.ReduceOp.SUM).wait()
    assert summed(group) == 1.0
    group.shutdown()


@pytest.mark.processes
def test_an_isolated_group_takes_seconds_or_a_timedelta(store: str) -> None:
    group = ProcessGroupBabyGloo(20.0)
    assert group.num_active_work() == 0
    group.configure(f"{store}/x", "r", 0, 1)
    assert summed(group) == 1.0
    assert group.num_active_work() == 0
    group.shutdown()


def test_a_registered_factory_makes_the_group_of_another_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_factories", {})
    monkeypatch.setattr(registry, "_devices", ["cpu", "cuda"])
    with pytest.raises(ConfigError, match=r"known are .*gloo.*register_process_group"):
        ProcessGroupXCCL(timeout=LONG)
    made = []

    def factory(timeout: timedelta) -> ProcessGroupGloo:
        made.append(timeout)
        return ProcessGroupGloo(timeout)

    registry.register_process_group("xccl", factory, device_type="xpu")
    assert type(ProcessGroupXCCL(timeout=LONG)) is ProcessGroupGloo
    assert made == [LONG]
    assert registry.device_types() == ["cpu", "cuda", "xpu"]
    with pytest.raises(ConfigError, match="another process group has this name"):
        registry.register_process_group("gloo", factory)


def test_a_registered_group_is_found_by_torch_until_it_is_unregistered() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = ProcessGroupDummy(0, 1)
        assert group.register("compat_dummy") is group
        name = group.group_name
        assert dist.distributed_c10d._resolve_process_group(name) is group
        value = torch.ones(2)
        assert funcol.all_reduce(value, "sum", group).equal(value)
        dist.all_reduce(value, group=group)
        group.unregister()
        with pytest.raises((RuntimeError, ValueError)):
            dist.distributed_c10d._resolve_process_group(name)
    finally:
        dist.destroy_process_group()


def test_a_store_client_writes_below_its_prefix(store: str) -> None:
    create_store_client(f"{store}/here", LONG).set("key", "value")
    assert create_store_client(f"{store}/here", LONG).get("key") == b"value"
    with refusing() as nobody, pytest.raises(RuntimeError):
        create_store_client(f"{nobody}/here", SHORT)


# -- services ------------------------------------------------------------------------------------


def test_a_lighthouse_forms_a_quorum_for_clients() -> None:
    server = LighthouseServer(bind="[::]:0", min_replicas=1)
    client = LighthouseClient(server.address(), connect_timeout=LONG)
    client.heartbeat("a")
    quorum = client.quorum("a", LONG, address="here", data={"key": 1})
    assert [(each.replica_id, each.address, each.data) for each in quorum.participants] == [
        ("a", "here", {"key": 1})
    ]
    client.close()
    server.shutdown()


def test_a_quorum_that_does_not_form_is_a_timeout() -> None:
    with LighthouseServer(bind="[::]:0", min_replicas=2) as server:
        client = LighthouseClient(server.address(), LONG)
        with pytest.raises(TimeoutError):
            client.quorum("a", SHORT)
        client.close()


def test_who_cannot_be_reached_is_a_runtime_error() -> None:
    with refusing() as nobody:
        with pytest.raises(RuntimeError):
            LighthouseClient(f"http://{nobody}", SHORT)
        with pytest.raises(RuntimeError):
            ManagerClient(f"http://{nobody}", SHORT)


def test_a_manager_speaks_for_its_worker(store: str) -> None:
    with LighthouseServer(bind="[::]:0", min_replicas=1) as lighthouse:
        manager = ManagerServer(
            replica_id="group",
            lighthouse_addr=lighthouse.address(),
            hostname="127.0.0.1",
            bind="[::]:0",
            store_addr=store,
            world_size=1,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=LONG,
            quorum_retries=0,
        )
        client = ManagerClient(manager.address(), connect_timeout=LONG)
        result = client._quorum(
            group_rank=0,
            step=7,
            checkpoint_metadata="metadata",
            shrink_only=False,
            init_sync=True,
            commit_failures=0,
            timeout=LONG,
        )
        assert (result.max_step, result.replica_world_size, result.heal) == (7, 1, False)
        assert client._checkpoint_metadata(0, LONG) == "metadata"
        assert client.should_commit(0, 7, True, LONG)
        with pytest.raises(RuntimeError):
            client.should_commit(5, 7, True, LONG)
        client.close()
        manager.shutdown()


def test_flags_of_the_lighthouse_may_have_underscores() -> None:
    given = ["--min_replicas", "2", "--join_timeout_ms=100", "a_b", "--bind=[::]:0"]
    assert [_with_hyphens(each) for each in given] == [
        *("--min-replicas", "2", "--join-timeout-ms=100", "a_b", "--bind=[::]:0")
    ]


class Doubling(ParameterServer):
    """Doubles what a client sends."""

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(LONG)

    def forward(self, session_id: str, pg: Any) -> None:
        value = torch.zeros(2)
        pg.broadcast_one(value, root=1).wait()
        pg.broadcast_one(2 * value, root=0).wait()


def test_a_parameter_server_serves_a_session() -> None:
    with Doubling(port=0) as server:
        session: Any = Doubling.new_session(server.address())
        session.broadcast_one(torch.tensor([1.0, 2.0]), root=1).wait()
        answer = torch.zeros(2)
        session.broadcast_one(answer, root=0).wait()
        assert answer.tolist() == [2.0, 4.0]
        session.shutdown()
    with refusing() as nobody, pytest.raises(RuntimeError):
        Doubling.new_session(f"http://{nobody}/new_session")


# -- transports ----------------------------------------------------------------------------------


def test_a_state_is_served_over_http_under_its_step() -> None:
    source, receiver = HTTPTransport(LONG, 0), HTTPTransport(timeout=LONG, num_chunks=4)
    assert source.address() == source.metadata()
    state = {"weights": torch.arange(100.0), "step": 5}
    source.send_checkpoint([1], 5, state, LONG)
    found = receiver.recv_checkpoint(0, source.metadata(), 5, LONG)
    assert found["weights"].equal(state["weights"])  # type: ignore[arg-type]
    source.allow_checkpoint(6)
    assert receiver.recv_checkpoint(0, source.metadata(), 6, LONG)["step"] == 5
    with pytest.raises((RuntimeError, TimeoutError)):
        receiver.recv_checkpoint(0, source.metadata(), 7, SHORT)
    source.disallow_checkpoint()
    source.shutdown()
    receiver.shutdown()


def test_a_state_is_sent_over_a_process_group(store: str) -> None:
    groups = [ProcessGroupGloo(LONG) for _ in range(2)]
    transports = [PGTransport(group, LONG, torch.device("cpu")) for group in groups]
    state = {"weights": torch.arange(10.0)}

    def send() -> None:
        groups[0].configure(f"{store}/pg", "a", 0, 2)
        transports[0].send_checkpoint([1], 3, state)

    def receive() -> torch.Tensor:
        groups[1].configure(f"{store}/pg", "b", 1, 2)
        found: torch.Tensor = transports[1].recv_checkpoint(0, "process group", 3)["weights"]
        return found

    _, found = together(send, receive)
    assert isinstance(found, torch.Tensor)
    assert found.equal(state["weights"])
    for each in (*transports, *groups):
        each.shutdown()


def test_a_lock_has_readers_or_one_writer() -> None:
    lock = RWLock(timeout=0.05)
    with lock.r_lock(), lock.r_lock(), pytest.raises(TimeoutError):
        lock.w_acquire()
    with lock.w_lock():
        assert lock.w_locked()
        with pytest.raises(TimeoutError):
            lock.r_acquire()
    assert not lock.w_locked()


# -- futures -------------------------------------------------------------------------------------


def test_a_future_ends_at_its_timeout() -> None:
    never: torch.futures.Future[int] = torch.futures.Future()
    with pytest.raises(TimeoutError, match="did not complete within"):
        futures.future_timeout(never, SHORT).wait()
    with pytest.raises(TimeoutError, match="did not complete within"):
        futures.future_wait(never, SHORT)


def test_a_future_that_ends_in_time_keeps_its_outcome() -> None:
    good: torch.futures.Future[int] = torch.futures.Future()
    limited = futures.future_timeout(good, LONG)
    good.set_result(7)
    assert limited.wait() == 7
    assert futures.future_wait(good, LONG) == 7
    bad: torch.futures.Future[int] = torch.futures.Future()
    limited = futures.future_timeout(bad, LONG)
    bad.set_exception(ValueError("planted"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="planted"):
        limited.wait()


def test_a_block_that_takes_too_long_calls_back() -> None:
    late = threading.Event()
    with futures.context_timeout(late.set, SHORT):
        assert late.wait(20)
    early = threading.Event()
    with futures.context_timeout(early.set, SHORT):
        pass
    assert not early.wait(2 * SHORT.total_seconds())


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e300"])
def test_a_timeout_of_the_watchdog_that_cannot_be_understood(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TORCHFT_WATCHDOG_TIMEOUT_SEC", value)
    with pytest.raises(ConfigError, match="TORCHFT_WATCHDOG_TIMEOUT_SEC"):
        futures.watchdog_timeout()
    monkeypatch.setenv("TORCHFT_WATCHDOG_TIMEOUT_SEC", "")
    assert futures.watchdog_timeout() == timedelta(seconds=30)


def test_a_timer_thread_that_stands_still_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    make = futures.Watchdog
    monkeypatch.setattr(futures, "Watchdog", lambda s: make(s, lambda reason: ended.set()))
    timeouts = futures.Timeouts(0.3)
    release = threading.Event()
    timeouts.call_after(timedelta(0), lambda: release.wait(20))
    assert ended.wait(20)
    release.set()
    timeouts.close()


def test_a_timer_thread_that_shows_life_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    make = futures.Watchdog
    monkeypatch.setattr(futures, "Watchdog", lambda s: make(s, lambda reason: ended.set()))
    timeouts = futures.Timeouts(1.5)
    timeouts.call_after(timedelta(0), lambda: None)
    began_at = time.monotonic()
    assert not ended.wait(3.0)
    assert time.monotonic() - began_at >= 3.0
    timeouts.close()


def test_buckets_that_keep_their_order_are_alike_in_all_passes() -> None:
    kinds: list[Kind] = []

    def allreduce(tensor: torch.Tensor, kind: Kind) -> dist.Work:
        kinds.append(kind)
        return CompletedWork(tensor)

    for keeps in (False, True):
        hook = BucketHook(allreduce)
        if keeps:
            hook.keep_order()
        hook.average(torch.ones(1)).wait()
    assert kinds == [Kind.FIRST_BUCKET, Kind.BUCKET]


# -- small things --------------------------------------------------------------------------------


def test_the_sampler_divides_by_groups_and_ranks() -> None:
    sampler = DistributedSampler(
        list(range(8)),  # type: ignore[arg-type]
        replica_rank=1,
        num_replica_groups=2,
        group_rank=0,
        num_replicas=2,
        shuffle=False,
    )
    assert (sampler.global_rank, sampler.global_world_size) == (2, 4)
    assert list(sampler) == [2, 6]


def test_helpers_of_the_manager() -> None:
    assert extract_trailing_digits("group_12") == 12
    assert extract_trailing_digits("group") == 0
    assert get_timeout("3", LONG) == timedelta(seconds=3)
    assert get_timeout(None, LONG) == LONG
    failure = ValueError("planted")
    assert ExceptionWithTraceback(failure).original_exception is failure
    part = torch.ones(2, requires_grad=True)
    copied = extract_local_tensor(part)
    assert not copied.requires_grad
    assert copied.data_ptr() != part.data_ptr()
