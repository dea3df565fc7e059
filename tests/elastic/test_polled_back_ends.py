"""torchrun's own back ends: the hard policy beside torchrun, and how far the soft ones go there."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.etcd_server import EtcdServer, etcd_server, needs_etcd
from support.launched import OURS, TORCHS, Launch, are_gone, launch
from support.running import steady_address
from support.torchrun import Nodes
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from torchft_svc.core.launch.world import AgentState, AgentStatus, AgentWelcome, Node, RunClosed
from torchft_svc.elastic.rendezvous.polled import PolledMeeting

pytestmark = pytest.mark.processes

ETCDS = [pytest.param(each, marks=needs_etcd) for each in ("etcd-v2", "etcd")]
BACK_ENDS = ["c10d", *ETCDS]


def begin_etcd(folder: Path) -> contextlib.AbstractContextManager[EtcdServer]:
    """One for torchrun's back ends, which know only etcd's older interface."""
    pytest.importorskip("etcd", reason="needs python-etcd")
    return etcd_server(folder / "etcd", flags={"enable-v2": "true"})


@contextlib.contextmanager
def rendezvous(folder: Path, back_end: str) -> Iterator[list[str]]:
    """Flags that name it."""
    with contextlib.ExitStack() as servers:
        address = steady_address()
        if back_end != "c10d":
            address = servers.enter_context(begin_etcd(folder)).address
        yield [f"--rdzv-backend={back_end}", f"--rdzv-endpoint={address}"]


@contextlib.contextmanager
def launch_on(server: EtcdServer, folder: Path, back_end: str, policy: str) -> Iterator[Launch]:
    """A run of one node that meets at ``server``."""
    flags = [f"--rdzv-backend={back_end}", f"--rdzv-endpoint={server.address}"]
    with launch(folder, *flags, nnodes="1", policy=policy) as run:
        yield run


class ClosedRendezvous:
    """A rendezvous that ends as torch's own back ends end one: without a word."""

    def next_rendezvous(self) -> None:
        raise RendezvousClosedError


def test_a_rendezvous_that_others_have_closed_has_a_reason() -> None:
    news: queue.Queue[Any] = queue.Queue()
    handler: Any = ClosedRendezvous()
    meeting = PolledMeeting(handler, Node(node_id="a", host="host", num_workers=1), 60.0, news.put)
    meeting.send_state(AgentState(status=AgentStatus.JOINING, store_port=1))
    assert isinstance(news.get(timeout=10.0), AgentWelcome)
    closed = news.get(timeout=10.0)
    assert closed == RunClosed(
        "the rendezvous was closed: a node has finished, or failed too often", failed=True
    )
    meeting.close()


@pytest.mark.parametrize("of", [OURS, TORCHS])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_killed_worker_uses_one_restart_of_its_node(
    tmp_path: Path, back_end: str, of: str
) -> None:
    """All workers are new under the hard policy, as with torchrun, and the job ends well."""
    with (
        rendezvous(tmp_path, back_end) as flags,
        Nodes(
            tmp_path,
            *flags,
            "--rdzv-id=run",
            "--rdzv-conf=last_call_timeout=1",
            "--nnodes=2",
            "--nproc-per-node=2",
            "--max-restarts=1",
            "--monitor-interval=0.1",
            of=of,
        ) as nodes,
    ):
        nodes.start()
        nodes.start()
        before = nodes.await_world(2, 2)
        killed = before[-1]
        os.kill(killed["pid"], signal.SIGKILL)
        old = [each["pid"] for each in before]
        after = nodes.await_world(2, 2, holds=lambda each: each["pid"] not in old)
        counts = {each["agent"]: each["TORCHELASTIC_RESTART_COUNT"] for each in after}
        assert counts.pop(killed["agent"]) == "1"
        assert list(counts.values()) == ["0"]
        assert are_gone(old)
        assert nodes.finish() == [0, 0]


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_workers_survive_under_a_soft_policy(tmp_path: Path, back_end: str) -> None:
    """A node joins, and starts its workers anew: those of the other are the same all the time."""
    with (
        rendezvous(tmp_path, back_end) as flags,
        launch(
            tmp_path,
            *flags,
            "--nproc-per-node=2",
            "--max-restarts=2",
            "--rdzv-conf=last_call_timeout=1",
            nnodes="1:2",
        ) as run,
    ):
        run.start("a")
        alone = run.await_world(a=2)
        run.start("b")
        before = run.await_world(a=2, b=2)
        assert before["a"] == alone["a"]
        os.kill(before["b"][0], signal.SIGKILL)
        run.until(lambda: are_gone(before["b"]), "the worker beside it is ended")
        after = run.await_world(a=2, b=2)
        assert after["a"] == before["a"]
        assert {worker.attempt for worker in run.workers("a")} == {0}
        assert {worker.attempt for worker in run.workers("b")} == {1}
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_wait_for_more_nodes_is_reported(tmp_path: Path) -> None:
    """torch's default is half a minute; a node that is alone says why nothing happens."""
    with rendezvous(tmp_path, "c10d") as flags, launch(tmp_path, *flags, nnodes="1:3") as run:
        run.start("a").wait_for("with fewer than 3 nodes, c10d begins each new world after 30 s")
        informed = run.start("b", "--rdzv-conf=last_call_timeout=1")
        run.await_world(a=1, b=1)
        assert not any("fewer than 3 nodes" in line for line in informed.read_so_far())


def test_a_node_that_has_finished_ends_well_when_the_store_is_gone(tmp_path: Path) -> None:
    """The host of the store is the last to finish, and gone before the other one looks again."""
    with (
        rendezvous(tmp_path, "c10d") as flags,
        launch(tmp_path, *flags, "--monitor-interval=5", nnodes="2") as run,
    ):
        run.start("a", "--rdzv-conf=is_host=1")
        run.start("b", "--rdzv-conf=is_host=0")
        pids = run.await_world(a=1, b=1)
        run.finish(pids["b"][0])
        run.until(lambda: are_gone(pids["b"]), "one has finished")
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}, run.output()


@needs_etcd
@pytest.mark.parametrize("policy", ["hard", "soft"])
@pytest.mark.parametrize("back_end", ETCDS)
def test_without_its_etcd_a_run_ends(tmp_path: Path, back_end: str, policy: str) -> None:
    with (
        begin_etcd(tmp_path) as server,
        launch_on(server, tmp_path, back_end, policy) as run,
    ):
        run.start("a")
        pids = run.until(run.pids, "a worker")
        server.kill()
        assert run.nodes["a"].wait() == 1
        assert are_gone(pids)
        assert "the connection to etcd has failed" in run.nodes["a"].lines[-1], run.output()


@needs_etcd
@pytest.mark.parametrize("policy", ["hard", "soft"])
@pytest.mark.parametrize("back_end", ["etcd-v2", "etcd"])
def test_an_etcd_without_its_older_interface_is_named(
    tmp_path: Path, back_end: str, policy: str
) -> None:
    pytest.importorskip("etcd", reason="needs python-etcd")
    with (
        etcd_server(tmp_path / "etcd") as server,
        launch_on(server, tmp_path, back_end, policy) as run,
    ):
        assert run.start("a").wait() == 1
        assert "--enable-v2" in run.nodes["a"].lines[-1], run.output()
