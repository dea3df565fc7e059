"""What torchelastic promises when workers and nodes fail: each line with agents and workers.

The hard policy and soft ones, on a lighthouse; torch's own back ends are torch's.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.agents import runs_at
from support.launched import Launch, are_gone, launch

from torchft_svc.lighthouse_server.operator_commands import drain
from torchft_svc.proto import torchft_pb2 as pb

pytestmark = pytest.mark.processes

both = pytest.mark.parametrize("policy", ["hard", "soft"])


def two_nodes(run: Launch) -> dict[str, list[int]]:
    """Nodes ``a`` and ``b`` in one world, and their workers."""
    run.start("a")
    run.start("b")
    return run.until(lambda: both_work(run), "two workers")


def both_work(run: Launch) -> dict[str, list[int]] | None:
    """Process ids of both nodes' workers; under the hard policy each worker of a world is new."""
    pids = {node: run.pids(node) for node in ("a", "b")}
    return pids if all(len(found) == 1 for found in pids.values()) else None


def num_finished(run: Launch) -> int:
    """How many nodes have finished, as the lighthouse knows."""
    nodes = [node for each in runs_at(run.lighthouse) for node in each.nodes]
    return sum(node.status == pb.AGENT_FINISHED for node in nodes)


def has_said(run: Launch, node: str, text: str) -> bool:
    return any(text in line for line in run.nodes[node].lines)


@both
def test_the_others_get_some_time_after_the_first_has_finished(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--exit-barrier-timeout=1", nnodes="2", policy=policy) as run:
        pids = two_nodes(run)
        run.finish(pids["a"][0])
        assert run.nodes["a"].wait() == 0
        assert run.nodes["b"].wait() == 1
        assert are_gone(pids["b"])
        assert has_said(run, "b", "is over")


@both
def test_who_finishes_within_that_time_finishes_well(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="2", policy=policy) as run:
        pids = two_nodes(run)
        run.finish(pids["a"][0])
        run.until(lambda: are_gone(pids["a"]), "the first one has finished")
        run.finish(pids["b"][0])
        assert run.statuses() == {"a": 0, "b": 0}


def test_restarts_are_counted_by_each_agent(tmp_path: Path) -> None:
    with launch(tmp_path, "--max-restarts=3", nnodes="2", policy="hard") as run:
        before = two_nodes(run)
        os.kill(before["b"][0], signal.SIGKILL)
        run.until(lambda: are_gone(before["a"]) and both_work(run), "all workers are new")
        assert {worker.attempt for worker in run.workers("a")} == {0}
        assert {worker.attempt for worker in run.workers("b")} == {1}
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


def test_a_failure_that_follows_from_another_one_uses_no_restart(tmp_path: Path) -> None:
    with launch(tmp_path, "--max-restarts=3", nnodes="2", policy="hard") as run:
        before = two_nodes(run)
        os.kill(before["b"][0], signal.SIGKILL)
        run.fail(before["a"][0])  # as by the exception of a collective
        run.until(lambda: are_gone(before["a"]) and both_work(run), "all workers are new")
        assert {worker.attempt for worker in run.workers("a")} == {0}
        assert {worker.attempt for worker in run.workers("b")} == {1}
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


@both
def test_nodes_that_come_and_go_use_no_restart(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--max-restarts=0", nnodes="1:2", policy=policy) as run:
        run.start("a")
        first = run.until(lambda: run.pids("a"), "a worker")
        run.start("b")
        two = run.until(lambda: _new(run, policy, first) and both_work(run), "a world of two")
        run.nodes["b"].signal(signal.SIGKILL)
        run.until(lambda: are_gone(two["b"]) and _new(run, policy, two["a"]), "a world of one")
        assert {worker.attempt for worker in run.workers()} == {0}
        run.finish()
        assert run.nodes["a"].wait() == 0


def _new(run: Launch, policy: str, before: list[int]) -> bool:
    """The first node's worker is in another world: as a new process, if the policy is hard."""
    now = run.pids("a")
    return len(now) == 1 and (now == before) == (policy == "soft")


def test_an_agent_that_fails_ends_the_run_under_the_hard_policy(tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:2", policy="hard") as run:
        pids = two_nodes(run)
        run.fail(pids["a"][0])
        assert run.statuses() == {"a": 1, "b": 1}
        assert are_gone(pids["b"])
        assert has_said(run, "b", "is over")


@both
def test_a_loss_has_no_effect_once_an_agent_has_finished(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:3", policy=policy) as run:
        run.start("c")
        pids = {**_three(run)}
        run.finish(pids["a"][0])
        run.until(lambda: num_finished(run) == 1, "one has finished")
        notes = run.workers("b")[0].notes
        run.nodes["c"].signal(signal.SIGKILL)
        run.until(lambda: are_gone(pids["c"]), "one is lost")
        time.sleep(1.0)  # in which nothing must happen
        assert run.workers("b")[0].notes == notes
        run.finish()
        assert {run.nodes[node].wait() for node in ("a", "b")} == {0}


def _three(run: Launch) -> dict[str, list[int]]:
    run.start("a")
    run.start("b")
    nodes = ("a", "b", "c")

    def work() -> dict[str, list[int]] | None:
        workers = {node: run.workers(node) for node in nodes}
        if any(len(found) != 1 for found in workers.values()):
            return None
        # Under the hard policy the worker's environment shows it.
        sizes = {found[0].world[1] for found in workers.values() if found[0].world}
        return {node: run.pids(node) for node in nodes} if sizes == {3} else None

    return run.until(work, "a world of three")


@both
def test_a_node_too_many_waits_for_a_place(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1", policy=policy) as run:
        run.start("a")
        first = run.until(lambda: run.pids("a"), "a worker")
        run.start("b")
        time.sleep(1.0)  # in which nothing must happen
        assert not run.pids("b")
        assert run.pids("a") == first
        run.nodes["a"].signal(signal.SIGKILL)
        run.until(lambda: run.pids("b"), "the second one has the place")
        run.finish()
        assert run.nodes["b"].wait() == 0


@both
def test_a_node_too_many_gives_up_after_a_while(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--rdzv-conf=join_timeout=3", nnodes="1", policy=policy) as run:
        run.start("a")
        first = run.until(lambda: run.pids("a"), "a worker")
        assert run.start("b").wait() == 1
        assert has_said(run, "b", "torchft-run: error: ")
        assert run.pids("a") == first
        run.finish()
        assert run.nodes["a"].wait() == 0


@both
def test_too_few_nodes_end_with_a_rendezvous_error(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--rdzv-conf=join_timeout=5", nnodes="2", policy=policy) as run:
        pids = two_nodes(run)
        run.nodes["b"].signal(signal.SIGKILL)
        assert run.nodes["a"].wait() == 1
        assert are_gone(pids["a"])
        assert has_said(run, "a", "torchft-run: error: ")


@both
def test_without_restarts_the_scheduler_starts_a_node_again(policy: str, tmp_path: Path) -> None:
    """A failure ends a run of the hard policy: the scheduler starts all of its nodes."""
    with launch(tmp_path, "--max-restarts=0", nnodes="1:2", policy=policy) as run:
        pids = two_nodes(run)
        run.fail(pids["b"][0])
        assert run.nodes["b"].wait() == 1
        run.start("b")
        if policy == "hard":
            assert run.nodes["a"].wait() == 1
            return
        after = run.await_world(a=1, b=1)
        assert after["a"] == pids["a"]
        run.finish()
        assert run.statuses() == {"a": 0, "b": 0}


@both
def test_agents_of_one_run_have_soft_policies_or_none(policy: str, tmp_path: Path) -> None:
    other = "soft-replace" if policy == "hard" else "hard"
    with launch(tmp_path, nnodes="1:2", policy=policy) as run:
        run.start("a")
        first = run.until(lambda: run.pids("a"), "a worker")
        assert run.start("b", f"--restart-policy={other}").wait() == 1
        assert has_said(run, "b", "torchft-run: error: the lighthouse refuses this node")
        assert has_said(run, "b", "is_soft")
        assert run.pids("a") == first
        run.finish()
        assert run.nodes["a"].wait() == 0


FAILS = """
import os, sys
from pathlib import Path
from torchft_svc.elastic import get_worker_info, report_progress
from torchft_svc.errors import ConfigError
get_worker_info()
lives = Path(sys.argv[1], "lives-" + os.environ["NODE"])
with lives.open("a") as file:
    file.write("+")
num_lives = len(lives.read_text())
report_progress(5 if sys.argv[2] != "moves" else num_lives)
if sys.argv[2] == "config":
    raise ConfigError("lr", -1, "use more")
if sys.argv[2] == "same":
    raise ValueError(num_lives)
os.kill(os.getpid(), 9)
"""


@both
@pytest.mark.parametrize(
    ("kind", "num_lives", "status"),
    [("config", 1, 93), ("same", 2, 93), ("killed", 3, 93), ("moves", 5, 1)],
)
def test_restarts_that_cannot_help_end_the_run_with_a_verdict(
    policy: str, kind: str, num_lives: int, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    options = "--max-restarts=4", "--max-restarts-without-progress=2"
    with launch(tmp_path, *options, nnodes="1", policy=policy) as run:
        agent = run.start("a", script=[str(script), str(tmp_path), kind])
        assert agent.wait() == status, agent.lines
        assert (tmp_path / "lives-a").read_text() == "+" * num_lives
        if kind == "killed":
            assert has_said(run, "a", "2 restarts in a row have not got beyond step 5")


@both
def test_a_node_that_is_not_healthy_does_not_join(policy: str, tmp_path: Path) -> None:
    bad = "--health-check=sh -c 'echo 7 of 8 GPUs; exit 4'"
    with launch(tmp_path, nnodes="1:2", policy=policy) as run:
        run.start("a")
        run.until(lambda: run.pids("a"), "a worker")
        assert run.start("b", OTHER_HOST, bad).wait() == 1, "another machine may be healthy"
        assert has_said(run, "b", "ended with status 4: 7 of 8 GPUs")
        assert not list(tmp_path.glob("lives-b"))
        run.finish()
        assert run.nodes["a"].wait() == 0


@both
def test_a_node_is_checked_again_after_its_workers_have_failed(policy: str, tmp_path: Path) -> None:
    script, ill = tmp_path / "fails.py", tmp_path / "ill"
    script.write_text(FAILS.replace("os.kill", f'open({str(ill)!r}, "w"); os.kill'))
    check = f"--health-check=sh -c 'echo checked >>{tmp_path}/checks; test ! -e {ill}'"
    with launch(tmp_path, "--max-restarts=4", check, nnodes="1", policy=policy) as run:
        agent = run.start("a", script=[str(script), str(tmp_path), "killed"])
        assert agent.wait() == 1, agent.lines
        assert has_said(run, "a", "the health check")
        assert (tmp_path / "lives-a").read_text() == "+"
        assert (tmp_path / "checks").read_text() == "checked\n" * 2


@both
def test_the_verdict_reaches_all_nodes_of_a_run(policy: str, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    options = "--max-restarts=4", "--max-restarts-without-progress=1"
    with launch(tmp_path, *options, nnodes="2", policy=policy) as run:
        run.start("a")
        run.start("b", OTHER_HOST, script=[str(script), str(tmp_path), "killed"])
        assert run.statuses() == {"a": 93, "b": 93}


OTHER_HOST = "--local-addr=127.0.0.2"


@both
def test_a_node_that_fails_again_and_again_is_excluded(policy: str, tmp_path: Path) -> None:
    options = "--max-restarts=9", "--max-node-failures=0"
    with launch(tmp_path, *options, nnodes="1:2", policy=policy) as run:
        run.start("a")
        run.start("b", OTHER_HOST)
        before = run.until(lambda: both_work(run), "two workers")
        os.kill(before["b"][0], signal.SIGKILL)
        assert run.nodes["b"].wait() == 1
        assert has_said(run, "b", "is excluded for")
        assert run.start("b", OTHER_HOST).wait() == 1
        assert has_said(run, "b", "--max-node-failures is 0")
        run.until(lambda: _new(run, policy, before["a"]), "a world of one")
        run.finish()
        assert run.nodes["a"].wait() == 0


def test_a_run_that_fails_again_and_again_is_closed(tmp_path: Path) -> None:
    options = "--max-restarts=9", "--max-run-failures=0"
    with launch(tmp_path, *options, nnodes="2", policy="hard") as run:
        pids = two_nodes(run)
        os.kill(pids["b"][0], signal.SIGKILL)
        assert run.statuses() == {"a": 1, "b": 1}
        for node in ("a", "b"):
            assert has_said(run, node, "--max-run-failures is 0")


@both
def test_a_drained_node_ends_well_and_the_others_go_on(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, nnodes="1:2", policy=policy) as run:
        run.start("a")
        run.start("b", OTHER_HOST)
        before = run.until(lambda: both_work(run), "two workers")
        arguments = ["--lighthouse", run.lighthouse, "--job-id=run", "--node=127.0.0.2"]
        assert CliRunner().invoke(drain, arguments).exit_code == 0
        assert run.nodes["b"].wait() == 0
        assert are_gone(before["b"])
        run.until(lambda: _new(run, policy, before["a"]), "a world of one")
        run.finish()
        assert run.nodes["a"].wait() == 0


WAITS = """
import os, signal, time
from torchft_svc.elastic import get_worker_info
from torchft_svc.env import Environment
from torchft_svc.host.progress_file import open_progress
get_worker_info()
progress = open_progress(Environment().progress_file)
def answer(*_):
    print(f"has {progress.drain_until - time.monotonic():.3f} s", flush=True)
signal.signal(signal.SIGTERM, answer)
print("waits", progress.drain_until, flush=True)
while True:
    time.sleep(60)
"""


@both
@pytest.mark.parametrize("by", ["operator", "signal"])
def test_workers_learn_when_a_drain_is_over(
    policy: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    monkeypatch.setenv("TORCHFT_GRACE_SEC", "3")
    with launch(tmp_path, nnodes="1", policy=policy) as run:
        program = run.start("a", script=[str(script)])
        program.wait_for("waits None")
        began_at = time.monotonic()
        if by == "operator":
            arguments = ["--lighthouse", run.lighthouse, "--job-id=run", "--node=127.0.0.1"]
            assert CliRunner().invoke(drain, [*arguments, "--within=4"]).exit_code == 0
        else:
            program.signal(signal.SIGTERM)
        assert program.wait() == (0 if by == "operator" else 1)
        (left_s,) = re.findall(r"has ([\d.]+) s", "\n".join(program.lines))
        usable = 3.0 if by == "operator" else 2.0  # less a second
        assert usable - 1 < float(left_s) <= usable
        assert time.monotonic() - began_at > usable, "it has had that time"


FUNCTIONS = ("--run-path", "--start-method=fork")


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("hard", ()),
        ("soft", ()),
        ("hard", ("--standalone",)),
        ("hard", FUNCTIONS),
        ("soft", FUNCTIONS),
    ],
)
def test_workers_never_outlive_their_agent(
    policy: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    with launch(tmp_path, "--nproc-per-node=2", nnodes="1", policy=policy) as run:
        run.start("a", *options, traits=("stubborn",))
        pids = run.until(lambda: len(run.pids()) == 2 and run.pids(), "two workers")
        run.nodes["a"].signal(signal.SIGKILL)
        run.until(lambda: are_gone(pids), "they have ended, too")


@both
def test_what_a_shell_script_has_started_ends_with_the_agent(policy: str, tmp_path: Path) -> None:
    script = ["sh", "-c", f"sleep 600 & echo $! >{tmp_path}/child; wait"]
    child = tmp_path / "child"
    with launch(tmp_path, "--soft-ready-timeout=0", nnodes="1", policy=policy) as run:
        run.start("a", "--no-python", script=script)
        pid = run.until(lambda: child.exists() and child.read_text().strip(), "it is started")
        assert not are_gone([int(pid)])
        run.nodes["a"].signal(signal.SIGKILL)
        run.until(lambda: are_gone([int(pid)]), "it has ended, too")


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_workers_in_the_grace_time(
    policy: str, number: signal.Signals, tmp_path: Path
) -> None:
    traits = ("stubborn",) if number is signal.SIGTERM else ()
    with launch(tmp_path, "--shutdown-timeout=1", nnodes="1", policy=policy) as run:
        run.start("a", traits=traits)
        pids = run.until(lambda: run.pids(), "a worker")
        run.nodes["a"].signal(number)
        assert run.nodes["a"].wait() == 1
        assert are_gone(pids)
        assert has_said(run, "a", f"torchft-run: ended by {number.name}")


LOADS = """
import signal, tempfile, time, torch
from torch.utils.data import DataLoader
tempfile.tempdir = "/tmp"  # the path of a socket of the loader has at most 107 bytes
from torchft_svc.elastic import get_worker_info
get_worker_info()
ends = []
signal.signal(signal.SIGTERM, lambda *_: ends.append(True))
num_later = 0
for batch in DataLoader(torch.ones(10_000_000), batch_size=1, num_workers=2):
    print("loads", flush=True)
    time.sleep(0.01)  # the step
    num_later += bool(ends)
    if num_later == 50:  # far more than its workers have sent already
        print("saved", flush=True)
        break
"""


@both
def test_a_worker_that_is_ended_keeps_its_data_loader(policy: str, tmp_path: Path) -> None:
    """A worker without its data loader could neither finish its step nor save."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    with launch(tmp_path, nnodes="1", policy=policy) as run:
        program = run.start("a", script=[str(script)])
        program.wait_for("loads")
        program.signal(signal.SIGTERM)
        assert program.wait() == 1
        assert has_said(run, "a", "saved"), run.output()[-4000:]


@both
def test_two_agents_with_one_node_rank(policy: str, tmp_path: Path) -> None:
    with launch(tmp_path, "--node-rank=0", nnodes="1:2", policy=policy) as run:
        run.start("a")
        first = run.until(lambda: run.pids("a"), "a worker")
        assert run.start("b").wait() == 1
        assert has_said(run, "b", "torchft-run: error: the lighthouse refuses this node")
        assert run.pids("a") == first
        run.finish()
        assert run.nodes["a"].wait() == 0
