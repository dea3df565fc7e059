"""Tests that a preempted group finishes its step and exits 0, and that no group loses a step."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.bounds import check
from support.files import complete_lines
from support.fork_server import Call, Forked
from support.running import (
    SCRIPTS,
    command,
    environment,
    eventually,
    manager_process,
    steady_address,
)
from support.scripts import loading_trainer
from support.scripts.drained_trainer import leads_a_session
from support.training import Trainer, lighthouse
from support.warm import Warm

from torchft_svc.client.process import draining
from torchft_svc.client.process.draining import TermSignal
from torchft_svc.client.runtime import bootstrap
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.errors import Drained

pytestmark = pytest.mark.processes
PROGRAM = SCRIPTS / "drained_trainer.py"
DEADLINE_S = 60.0
# Far below the join timeout of the lighthouse, for which a group that did not leave is waited for.
DELAY_S = 4.0
JOIN_TIMEOUT_MS = 10_000
# One step of all these processes on two cores, and the way of the order through the manager.
ONE_STEP_S = 0.5


class Worker:
    """A process of a group: what it has written into ``out``, and how it ends."""

    def __init__(self, out: Path, pid: int, wait: Callable[[], int]) -> None:
        self.out, self.pid, self._wait = out, pid, wait

    @classmethod
    def forked(cls, address: str, name: str, out: Path, place: dict[str, str]) -> Worker:
        """Start it with a process group of its own, as a launcher makes it."""
        process = Forked(Call(leads_a_session, (address, name), place, out))
        return cls(out, process.pid, lambda: process.wait(DEADLINE_S))

    @classmethod
    def started(
        cls, address: str, name: str, out: Path, *flags: str, place: dict[str, str]
    ) -> Worker:
        with out.open("wb") as file:
            process = Warm(
                [sys.executable, str(PROGRAM), address, name, *flags],
                stdout=file.fileno(),
                stderr=file.fileno(),
                env=environment(OMP_NUM_THREADS="1", **place),
            )
        return cls(out, process.pid, lambda: process.wait(DEADLINE_S))

    def send(self, number: int) -> float:
        """The instant before."""
        at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
        return at

    def send_all(self, number: int) -> None:
        """Signal as systemd and Kubernetes do: every process, so the manager too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        self.send_all(signal.SIGKILL)
        self.send(signal.SIGKILL)
        self._wait()

    def lines(self) -> list[list[str]]:
        return [line.split() for line in complete_lines(self.out) if line]

    def steps(self, num_groups: int) -> int:
        """How many steps it has committed with so many groups."""
        return sum(line[:2] == ["training", str(num_groups)] for line in self.lines())

    def waits_s(self) -> float:
        """The longest time between two of its last hundred steps."""
        at = [float(line[2]) for line in self.lines() if line[0] == "training"]
        return max(after - before for before, after in itertools.pairwise(at[-100:]))

    def last_step(self) -> str:
        """The step at which it was drained."""
        (step,) = [line[1] for line in self.lines() if line[0] == "drained"]
        return step

    def drained_at(self) -> float:
        """The instant at which it had finished its step, and its group had left."""
        (at,) = [float(line[2]) for line in self.lines() if line[0] == "drained"]
        return at

    def left_s(self) -> float:
        """How long it could have lived when it was drained."""
        (left_s,) = [float(line[3]) for line in self.lines() if line[0] == "drained"]
        return left_s

    def ends(self) -> None:
        assert self._wait() == 0, self.out.read_text()
        assert int(self.last_step()) > 0

    def discards(self, num_groups: int) -> int:
        """Steps discarded since the first that so many groups committed."""
        words = [line[0] if line[0] != "training" else line[0] + line[1] for line in self.lines()]
        return words[words.index(f"training{num_groups}") :].count("discarded")


@pytest.fixture
def no_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def nothing(command: Drain) -> None:
    """A group of one worker informs no other worker."""


@pytest.mark.usefixtures("no_handler")
def test_a_later_manager_is_drained_after_the_first_one_was() -> None:
    first, later = [], []
    before = TermSignal(first.append, nothing)
    os.kill(os.getpid(), signal.SIGTERM)
    eventually(lambda: first)
    before.close()
    after = TermSignal(later.append, nothing)
    os.kill(os.getpid(), signal.SIGTERM)
    eventually(lambda: later)
    after.close()
    assert len(first) == 1


@pytest.mark.parametrize("first", ["workers", "all"])
def test_the_end_of_its_data_loader_does_not_spoil_a_drain(first: str, tmp_path: Path) -> None:
    """Slurm and systemd signal all processes of a job; the loader's workers end first."""
    out = tmp_path / "out"
    with lighthouse(min_replicas=1) as address:
        process = Forked(Call(loading_trainer.leads_a_session, (address, "group"), {}, out))
        try:
            eventually(lambda: out.exists() and "training" in out.read_text(), DEADLINE_S)
            if first == "workers":
                workers = [pid for pid in children(process.pid) if is_fork(pid)]
                assert len(workers) == loading_trainer.NUM_WORKERS
                for pid in workers:
                    os.kill(pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGTERM)
            status = process.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert status == 0, out.read_text()
        assert "saved" in out.read_text().splitlines()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_fork(pid: int) -> bool:
    """Whether the process has its parent's command line, as the workers of a loader have."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()


HUNG = """
import os, sys, time
from torchft_svc.client.process import draining
draining.REPEAT_S = 0.0
draining.TermSignal(lambda reason: print("drains", flush=True), lambda reason: None)
print(os.getpid(), os.readlink("/proc/self"), flush=True)
while True:
    time.sleep(0.5)  # one that a signal has just preceded is not interrupted by it
"""


def is_asleep(pid: int) -> bool:
    """Whether the main thread of the process waits in the kernel."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@pytest.mark.parametrize("is_init", [True, False])
def test_a_second_sigterm_ends_a_program_that_hangs(is_init: bool) -> None:
    """SIGTERM also ends the first process of a container, where it has no default action."""
    own_ids = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if is_init and (
        shutil.which("unshare") is None or subprocess.run([*own_ids, "true"]).returncode
    ):
        pytest.skip("no namespace of process ids can be made here")
    with subprocess.Popen(
        [*(own_ids if is_init else []), sys.executable, "-c", HUNG],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as program:
        try:
            assert program.stdout is not None
            own_pid, pid = map(int, program.stdout.readline().split())
            assert (own_pid == 1) is is_init
            os.kill(pid, signal.SIGTERM)
            assert program.stdout.readline() == "drains\n"
            # Python handles one that arrives while the first one's handler runs after the sleep.
            eventually(lambda: is_asleep(pid))
            os.kill(pid, signal.SIGTERM)
            status = 128 + signal.SIGTERM if is_init else -signal.SIGTERM
            assert program.wait(DEADLINE_S) == status
        finally:
            program.kill()


@pytest.mark.usefixtures("no_handler")
def test_the_handler_of_a_drained_manager_stays_while_the_signal_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for repeat_s in (60.0, 0.0):
        reasons: list[Drain] = []
        monkeypatch.setattr(draining, "REPEAT_S", repeat_s)
        term_signal = TermSignal(reasons.append, nothing)
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda reasons=reasons: reasons)
        term_signal.close()
        assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (repeat_s == 0.0)


@pytest.mark.usefixtures("no_handler")
def test_a_handler_of_the_program_stays() -> None:
    term_signal = TermSignal(nothing, nothing)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    term_signal.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@contextlib.contextmanager
def groups(
    address: str, where: Path, names: str, group_world_size: int, **variables: str
) -> Iterator[dict[str, list[Worker]]]:
    """Groups that train together: the workers of each."""
    made: dict[str, list[Worker]] = {}
    where = Path(tempfile.mkdtemp(dir=where))  # another attempt finds no lines of this one
    try:
        for name in names:
            port = steady_address().rpartition(":")[2]
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {"WORLD_SIZE": str(group_world_size), **variables}
            made[name] = [
                Worker.forked(address, name, where / f"{name}{rank}", place | {"RANK": str(rank)})
                for rank in range(group_world_size)
            ]
        for worker in itertools.chain(*made.values()):
            eventually(lambda worker=worker: worker.steps(len(names)) >= 3, DEADLINE_S)
        yield made
    finally:
        for worker in itertools.chain(*made.values()):
            worker.end()


def test_a_signal_to_one_worker_drains_its_group_at_one_step(tmp_path: Path) -> None:
    with (
        lighthouse(join_timeout_ms=JOIN_TIMEOUT_MS) as address,
        groups(address, tmp_path, "ab", 2, TORCHFT_GRACE_SEC="45") as made,
    ):
        reported_at = made["b"][1].send(signal.SIGTERM)
        for worker in made["b"]:
            worker.ends()
            check("a preempted group is at its end", worker.drained_at() - reported_at, ONE_STEP_S)
        assert made["b"][0].last_step() == made["b"][1].last_step(), "they end at one step"
        assert all(40 < worker.left_s() < 45 for worker in made["b"]), "they know for how long"
        for worker in made["a"]:
            eventually(lambda worker=worker: worker.steps(1) >= 3, DEADLINE_S)
            check("the others wait", worker.waits_s(), DELAY_S)
        assert [worker.discards(2) for worker in made["a"] + made["b"]] == [0] * 4


def test_preempted_groups_cost_nobody_a_step(tmp_path: Path) -> None:
    with (
        lighthouse(join_timeout_ms=JOIN_TIMEOUT_MS) as address,
        groups(address, tmp_path, "abc", 1) as made,
        LighthouseClient(address, timedelta(seconds=20)) as operator,
    ):
        (a,), (b,), (c,) = made.values()
        reported_at = time.monotonic()
        c.send_all(signal.SIGTERM)
        c.ends()
        check("a preempted group is at its end", c.drained_at() - reported_at, ONE_STEP_S)
        for worker in (a, b):
            eventually(lambda worker=worker: worker.steps(2) >= 3, DEADLINE_S)
        assert c.left_s() == math.inf, "nobody has said how long"
        operator.drain("b", "maintenance", within=timedelta(seconds=60))
        b.ends()
        assert 55 < b.left_s() < 60
        eventually(lambda: a.steps(1) >= 3, DEADLINE_S)
        check("the last one waits", a.waits_s(), DELAY_S)
        assert [worker.discards(3) for worker in (a, b, c)] == [0] * 3


@pytest.mark.parametrize("kind", ["in-process", "sidecar"])
def test_a_manager_of_any_kind_drains(tmp_path: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack, lighthouse() as address:
        place = {}
        if kind == "sidecar":
            port = steady_address().rpartition(":")[2]
            store = f"--store-address=127.0.0.1:{port}"
            sidecar = stack.enter_context(manager_process(address, store, name="a"))
            place = {"TORCHFT_MANAGER_ADDR": sidecar.address, "MASTER_PORT": port}
            place |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
        worker = Worker.started(address, "a", tmp_path / "a", kind, place=place)
        stack.callback(worker.end)
        eventually(lambda: worker.steps(1) >= 3, DEADLINE_S)
        if kind == "sidecar":
            done = command("manager_server", "drain", f"--manager={sidecar.address}", "--within=30")
            assert done.returncode == 0, done.stderr
        else:
            worker.send(signal.SIGTERM)
        worker.ends()
        assert worker.left_s() < 30 if kind == "sidecar" else worker.left_s() == math.inf
        assert worker.discards(1) == 0


def test_a_program_learns_how_long_it_may_live_though_the_order_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusal of the quorum, by another call, may arrive before it."""
    record = SharedRound.drain

    def record_late(self: SharedRound, command: Drain) -> None:
        time.sleep(0.5)
        record(self, command)

    monkeypatch.setattr(SharedRound, "drain", record_late)
    with (
        lighthouse() as address,
        LighthouseClient(address, timedelta(seconds=20)) as operator,
        Trainer(address, "a", 0) as trainer,
    ):
        assert trainer.steps(2) == [True, True]
        operator.drain("a", "maintenance", within=timedelta(seconds=60))
        with pytest.raises(Drained, match="maintenance"):
            trainer.steps(100_000)
        until = trainer.manager.draining_until()
        assert until is not None
        assert 30 < until - time.monotonic() < 60


def test_a_worker_ends_in_good_order_though_its_manager_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap, "MANAGER_PATIENCE_S", 0.1)
    with lighthouse() as address, Trainer(address, "a", 0) as trainer:
        assert trainer.steps(2) == [True, True]
        trainer.manager._runtime.services.close()
        trainer.manager._runtime.worker.drain(Drain("a signal"))
        with pytest.raises(Drained, match="a signal; it could not leave: manager at") as caught:
            trainer.optimizer.zero_grad()
        assert caught.value.code == 0
