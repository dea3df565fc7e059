"""Tests that files in the folder where a job is started do not get into its other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import Process, lighthouse_process, run_fresh

from torchft_svc.client.process_groups.isolated import process as isolated
from torchft_svc.client.process_groups.isolated.messages import Forget
from torchft_svc.client.process_groups.isolated.process import ChildProcess
from torchft_svc.elastic.warm_start import WarmStart
from torchft_svc.errors import QuorumFailed, Unreachable
from torchft_svc.host.fork_server import ForkServer
from torchft_svc.manager_server.child import ManagerProcess
from torchft_svc.manager_server.config import ManagerConfig

pytestmark = pytest.mark.processes

RUN_S = 90.0
FAILED_CHILD = "the process that carries the collectives failed"
# Of the standard library and of other packages: what some process of ours imports.
NAMES = (
    *("secrets", "random", "token", "platform", "signal", "select", "queue", "selectors", "socket"),
    *("asyncio", "json", "logging", "multiprocessing", "pickle", "subprocess", "uuid", "runpy"),
    *("grpc", "google", "uvloop", "h11", "click", "numpy", "torch", "cloudpickle", "traceback"),
)
BEGIN = """
import os, torch
from torchft_svc import Manager, start_manager_early, ProcessGroupBabyGloo
from datetime import timedelta
"""
LOOP = """
for _ in range(2):
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert manager.should_commit()
manager.shutdown()
print("trained", flush=True)
"""
MANAGER = "manager = Manager(state_dict=dict, load_state_dict=print, replica_id='a'{more})\n"
PROGRAMS = {
    "early manager": BEGIN + "start_manager_early()\n" + MANAGER.format(more="") + LOOP,
    "manager and isolated collectives": BEGIN
    + "pg = ProcessGroupBabyGloo(timedelta(seconds=20))\n"
    + MANAGER.format(more=", pg=pg")
    + LOOP,
}
TRAINER = """
import torch
from torchft_svc.trainer import Trainer
import mine  # beside this script

def train():
    trainer = Trainer(
        model_creator=mine.model, data_creator=mine.data, optimizer_creator=mine.optimizer,
        loss_creator=torch.nn.MSELoss, batch_size=4,
    )
    with trainer:
        trainer.train()
    print("trained", flush=True)

if __name__ == "__main__":
    train()
"""
MINE = """
import torch
def model(config): return torch.nn.Linear(2, 1)
def data(config): return torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
def optimizer(model, config): return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[Process]:
    with lighthouse_process() as process:
        yield process


@pytest.fixture
def start_folder(tmp_path: Path) -> Path:
    """A folder with a file, or a package, for each of `NAMES`."""
    folder = tmp_path / "start"
    for number, name in enumerate(NAMES):
        path = folder / name / "__init__.py" if number % 2 else folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"raise ImportError('this {name} is of the start folder')\n")
    return folder


def run_in(folder: Path, script: Path, **variables: str) -> str:
    done = run_fresh([sys.executable, str(script)], RUN_S, folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_trains_in_a_folder_with_any_files(
    lighthouse: Process, tmp_path: Path, start_folder: Path, name: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[name])
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_JOB_ID": name.replace(" ", "-")}
    assert run_in(start_folder, script, **variables) == "trained\n"


def test_a_variable_that_makes_python_safe_changes_nothing(
    lighthouse: Process, tmp_path: Path, start_folder: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS["manager and isolated collectives"])
    variables = {"TORCHFT_LIGHTHOUSE": lighthouse.address, "TORCHFT_JOB_ID": "safe"}
    assert run_in(start_folder, script, PYTHONSAFEPATH="1", **variables) == "trained\n"


def test_workers_of_a_trainer_import_the_programs_modules_and_not_those_of_the_folder(
    tmp_path: Path, start_folder: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    (tmp_path / "mine.py").write_text(MINE)
    assert "trained\n" in run_in(start_folder, tmp_path / "train.py")


def test_a_warm_worker_finds_what_a_cold_one_finds(
    tmp_path: Path, start_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beside its script, and what is on ``PYTHONPATH``."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.py").write_text("")
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "worker.py").write_text("import mine, other, secrets, sys; print(sys.path)")
    monkeypatch.chdir(start_folder)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "more"))
    command = [sys.executable, str(tmp_path / "worker.py")]
    cold = subprocess.run(command, capture_output=True, check=True, timeout=RUN_S)
    reading, writing = os.pipe()
    warm = WarmStart(command, ["mine", "other", "json"])
    try:
        assert warm._server.is_ready(RUN_S)
        forked = warm.fork(command, dict(os.environ), [0, writing, 2])
        os.close(writing)
        with open(reading) as read:
            assert read.read() == cold.stdout.decode()
        assert forked is not None
        assert forked.end.wait(RUN_S)
        assert forked.poll() == 0
        forked.close(kill_rest=False)
    finally:
        warm.close()


# -- errors ---------------------------------------------------------------------------------------


def config() -> ManagerConfig:
    return ManagerConfig(
        lighthouse_address="127.0.0.1:1",
        replica_name="a",
        group_world_size=1,
        store_address="127.0.0.1:1",
        bind="127.0.0.1:0",
        owner_pid=os.getpid(),
    )


def test_a_manager_that_cannot_start_names_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "uvloop.py").write_text("raise ImportError('libuv.so.1: no\\nsuch file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Unreachable, match="its process failed: such file") as caught:
        ManagerProcess.start(config())
    assert "status" not in str(caught.value)
    assert "ImportError: libuv.so.1: no\nsuch file" in capfd.readouterr().err


def test_a_manager_that_is_killed_at_its_start_names_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "uvloop.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Unreachable, match="at its start, its process was killed by SIGKILL"):
        ManagerProcess.start(config())


def test_a_fork_server_that_cannot_start_names_its_last_line() -> None:
    server = ForkServer("torchft_svc.nowhere", "a test")
    with pytest.raises(QuorumFailed, match=r"has ended: .*No module named torchft_svc.nowhere"):
        server.fork(b"")
    server.close()


def test_isolated_collectives_name_the_error_that_ends_their_process() -> None:
    child = ChildProcess()
    child.send(Forget(99))  # a segment that was never shared
    child._reader.join(isolated._REAP_S)
    assert str(child.ended) == f"no quorum: {FAILED_CHILD}: KeyError: 99"
