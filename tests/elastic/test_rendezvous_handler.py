"""Tests torchrun's rendezvous at a lighthouse, as torch's agents use it, without their workers."""

from __future__ import annotations

import contextlib
import gc
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from support.agents import lighthouse, runs_at
from support.running import eventually, refusing
from support.torchrun import needs_entry_point
from torch.distributed import DistStoreError
from torch.distributed.elastic.agent.server.api import (
    _TERMINAL_STATE_SYNC_ID,
    SimpleElasticAgent,
    Worker,
    WorkerSpec,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.utils.store import barrier

from torchft_svc.elastic.rendezvous.handler import LighthouseRendezvous
from torchft_svc.elastic.rendezvous.plugin import create_handler, get_handler_creator
from torchft_svc.errors import ConfigError
from torchft_svc.testing.proxy import Proxy

WAIT_S = 60.0
MAX_WORLDS = 5


class Nodes:
    """Agents' rendezvous handlers, each used on a thread of its own."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.run_id = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(16))
        self._made: list[LighthouseRendezvous] = []

    def node(
        self, nnodes: str = "1:4", run: str | None = None, **options: Any
    ) -> LighthouseRendezvous:
        min_nodes, _, max_nodes = nnodes.partition(":")
        options = {"last_call_timeout": 0.2, "join_timeout": WAIT_S, **options}
        params = RendezvousParameters(
            "lighthouse",
            self.address,
            run or self.run_id,
            int(min_nodes),
            int(max_nodes),
            **options,
        )
        handler = create_handler(params)
        assert isinstance(handler, LighthouseRendezvous)
        self._made.append(handler)
        return handler

    def run(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._pool.submit(call, *args)

    def join(self, *handlers: LighthouseRendezvous) -> list[RendezvousInfo]:
        """All of them enter the next world together.

        One that is late may leave a world that the others have entered: as agents do, they enter
        the one after it.
        """
        infos: dict[LighthouseRendezvous, RendezvousInfo] = {}
        late = list(handlers)
        for _ in range(MAX_WORLDS):
            calls = {each: self.run(each.next_rendezvous) for each in late}
            infos |= {each: call.result(WAIT_S) for each, call in calls.items()}
            late = [each for each in handlers if each.num_nodes_waiting()]
            if not late:
                break
        return [infos[each] for each in handlers]

    def close(self) -> None:
        kill(*self._made)
        self._stack.close()


def kill(*handlers: LighthouseRendezvous) -> None:
    """End the connections of ``handlers``, as if their agents had been killed."""
    for handler in handlers:
        if handler._link is not None:
            handler._link.close()
        handler._stores = None  # its stores end, too, once nothing refers to them
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _few_objects() -> Iterator[None]:
    """Exempt what is there from collections of garbage: `kill` collects it again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as all that was imported, see `tests/conftest.py`


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of one lighthouse: it begins no run in its first second."""
    with lighthouse() as started:
        yield started


@pytest.fixture
def nodes(address: str) -> Iterator[Nodes]:
    with contextlib.closing(Nodes(address)) as made:
        yield made


def test_a_node_whose_store_was_used_unnoticed_opens_another_one() -> None:
    """The node is cut off while the other node dies, and alone in a world until it is lost, too."""
    with (
        lighthouse(heartbeat_timeout_ms=4000) as address,
        Proxy(address) as proxy,
        contextlib.closing(Nodes(proxy.address)) as far,
        contextlib.closing(Nodes(address)) as near,
    ):

        def present() -> tuple[int, str, list[bool]]:
            [run] = runs_at(address)
            return run.round, run.phase, [node.reached for node in run.nodes]

        a, b = far.node("1:2"), near.node("1:2", far.run_id)
        far.join(a)
        calls = [far.run(a.next_rendezvous), near.run(b.next_rendezvous)]
        assert [call.result(WAIT_S).rank for call in calls] == [0, 1]
        eventually(lambda: present() == (2, "running", [True, True]))
        proxy.hold()
        kill(b)
        eventually(lambda: present() == (3, "running", [False]))
        eventually(lambda: present() == (3, "forming", []))  # a is lost
        proxy.cut()
        proxy.release()
        eventually(a.num_nodes_waiting)
        [info] = far.join(a)
        assert info.world_size == 1


def ranks(info: RendezvousInfo, num_workers: int) -> list[Worker]:
    """What torch's agent makes of it."""
    handler: Any = None
    spec = WorkerSpec("default", num_workers, handler, entrypoint="program")
    assign: Any = SimpleElasticAgent._assign_worker_ranks
    workers: list[Worker] = assign.__wrapped__(None, info.store, info.rank, info.world_size, spec)
    return workers


def test_nodes_get_ranks_and_a_store(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    infos = nodes.join(a, b)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert {info.world_size for info in infos} == {2}
    first, second = sorted(infos, key=lambda info: info.rank)
    assert first.bootstrap_store_info == second.bootstrap_store_info
    calls = [nodes.run(ranks, first, 1), nodes.run(ranks, second, 3)]
    of_first, of_second = (call.result(WAIT_S) for call in calls)
    assert [worker.global_rank for worker in of_first] == [0]
    assert [worker.global_rank for worker in of_second] == [1, 2, 3]
    assert {worker.world_size for worker in (*of_first, *of_second)} == {4}
    assert a.num_nodes_waiting() == b.num_nodes_waiting() == 0
    assert a.use_agent_store


def test_workers_may_have_a_store_of_their_own(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of them hosts it, as with torchrun's other back ends."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    a, b = nodes.node(), nodes.node()
    first, second = nodes.join(a, b)
    assert first.bootstrap_store_info == second.bootstrap_store_info
    assert first.bootstrap_store_info.master_port != first.store.port  # type: ignore[union-attr]
    assert not a.use_agent_store


def test_a_lost_node_is_noticed_and_the_store_is_another_one(nodes: Nodes) -> None:
    a, b, c = nodes.node(), nodes.node(), nodes.node()
    before = nodes.join(a, b, c)
    lost = next(node for node, info in zip((a, b, c), before, strict=True) if info.rank == 0)
    left = [node for node in (a, b, c) if node is not lost]
    kill(lost)
    for node in left:
        eventually(node.num_nodes_waiting)
    after = nodes.join(*left)
    assert sorted(info.rank for info in after) == [0, 1]
    ports = {info.bootstrap_store_info.master_port for info in (*before, *after)}  # type: ignore[union-attr]
    assert len(ports) == 2
    assert [node.num_nodes_waiting() for node in left] == [0, 0]


def two_nodes(
    nodes: Nodes, rank: int
) -> tuple[LighthouseRendezvous, LighthouseRendezvous, RendezvousInfo]:
    """Two nodes in one world: the one with this ``rank``, and the other with its information."""
    both = nodes.node(), nodes.node()
    by_rank = {info.rank: (node, info) for node, info in zip(both, nodes.join(*both), strict=True)}
    return by_rank[rank][0], *by_rank[1 - rank]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_that_dies_between_rendezvous_and_ranks_holds_nobody_up(
    nodes: Nodes, is_first: bool
) -> None:
    dead, living, info = two_nodes(nodes, 0 if is_first else 1)
    kill(dead)
    assert len(nodes.run(ranks, info, 2).result(WAIT_S)) == 2
    eventually(living.num_nodes_waiting)
    assert nodes.join(living)[0].world_size == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_a_node_that_has_finished_does_not_wait_for_one_that_is_dead(
    nodes: Nodes, is_first: bool
) -> None:
    dead, living, info = two_nodes(nodes, 0 if is_first else 1)
    waiting = nodes.run(barrier, info.store, 2, _TERMINAL_STATE_SYNC_ID, 10 * WAIT_S)
    kill(dead)
    waiting.result(WAIT_S)
    assert living.is_closed()


def test_nodes_finish_together(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    infos = nodes.join(a, b)
    calls = [nodes.run(barrier, info.store, 2, _TERMINAL_STATE_SYNC_ID, WAIT_S) for info in infos]
    for call in calls:
        call.result(WAIT_S)


def test_one_that_does_not_finish_is_waited_for_until_the_timeout(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    info, _ = nodes.join(a, b)
    with pytest.raises(DistStoreError):
        barrier(info.store, 2, _TERMINAL_STATE_SYNC_ID, 0.5)


def test_a_node_joins(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    nodes.join(a)
    joining = nodes.run(b.next_rendezvous)
    eventually(a.num_nodes_waiting)
    (info,) = nodes.join(a)
    assert (info.rank, info.world_size) == (0, 2)
    assert joining.result(WAIT_S).rank == 1


def test_a_failed_worker_makes_a_new_world_for_all(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    nodes.join(a, b)
    again = nodes.run(a.next_rendezvous)
    eventually(b.num_nodes_waiting)
    (info,) = nodes.join(b)
    assert info.world_size == again.result(WAIT_S).world_size == 2


def test_a_node_that_failed_closes_the_run(nodes: Nodes) -> None:
    a, b = nodes.node(), nodes.node()
    nodes.join(a, b)
    try:
        raise ValueError
    except ValueError:
        assert a.shutdown()
    eventually(b.is_closed)
    assert b.num_nodes_waiting() == 1
    with pytest.raises(RendezvousClosedError, match="ValueError on node"):
        b.next_rendezvous()


def test_a_closed_run_stays_closed(nodes: Nodes) -> None:
    a = nodes.node()
    nodes.join(a)
    a.set_closed()
    with pytest.raises(RendezvousClosedError, match="its rendezvous was closed"):
        a.next_rendezvous()


def test_too_few_nodes(nodes: Nodes) -> None:
    with pytest.raises(RendezvousTimeoutError, match="fewer than 2 nodes"):
        nodes.node("2:3", join_timeout=0.3).next_rendezvous()


def test_a_place_becomes_free(nodes: Nodes) -> None:
    a, b, c = (nodes.node("1:2") for _ in range(3))
    nodes.join(a, b)
    waiting = nodes.run(c.next_rendezvous)
    kill(b)
    for _ in range(MAX_WORLDS):
        eventually(lambda: waiting.done() or a.num_nodes_waiting())
        if waiting.done():
            break
        nodes.join(a)
    assert waiting.result(WAIT_S).world_size == 2


def test_two_nodes_with_one_node_rank(nodes: Nodes) -> None:
    nodes.join(nodes.node(rank=0))
    with pytest.raises(RendezvousStateError, match="were both given node rank 0"):
        nodes.node(rank="0").next_rendezvous()


def test_node_ranks_given_by_hand(nodes: Nodes) -> None:
    a, b = nodes.node("2:2", rank=1), nodes.node("2:2", rank=0)
    assert [info.rank for info in nodes.join(a, b)] == [1, 0]


def test_nobody_answers() -> None:
    with (
        refusing() as address,
        contextlib.closing(Nodes(address)) as nodes,
        pytest.raises(RendezvousConnectionError, match="Connection refused"),
    ):
        nodes.node(connect_timeout=0.2).next_rendezvous()


def test_it_starts_a_lighthouse_of_its_own() -> None:
    for endpoint in ("", "localhost:0"):
        with contextlib.closing(Nodes(endpoint)) as nodes:
            alone = nodes.node("1:1")
            info = alone.next_rendezvous()
            assert (info.rank, info.world_size) == (0, 1)
            alone.shutdown()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_alive": 3}, "rdzv_conf keep_alive=3 cannot work: the lighthouse knows connect_"),
        ({"join_timeout": "soon"}, "rdzv_conf join_timeout='soon' cannot work: use a number of"),
        ({"join_timeout": -1}, "use a number of seconds, 0 or more"),
        ({"rank": "first"}, "rdzv_conf rank='first' cannot work: use a whole number"),
        ({"rank": -2}, "node rank -2 is not in"),
        ({"run": "r" * 300}, "rdzv_id="),
    ],
)
def test_arguments_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with contextlib.closing(Nodes("localhost:1")) as nodes:
        with pytest.raises(ConfigError) as error:
            nodes.node(**options)
        assert text in str(error.value)


def test_several_nodes_need_an_endpoint() -> None:
    refused = pytest.raises(ConfigError, match="name host:port of a lighthouse")
    with contextlib.closing(Nodes("")) as nodes, refused:
        nodes.node("1:2")


@needs_entry_point
def test_torchrun_finds_it() -> None:
    assert get_handler_creator() is create_handler
    params = RendezvousParameters("lighthouse", "localhost:0", "run", 1, 1)
    assert isinstance(get_rendezvous_handler(params), LighthouseRendezvous)
