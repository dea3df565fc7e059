"""The trainer on Ray: workers, all of them, and nodes are lost, and come back."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.running import END_S, environment, eventually
from support.trained import (
    BATCH_SIZE,
    NUM_SAMPLES,
    Faults,
    assert_equal,
    data,
    model,
    optimizer,
    samples,
    train,
    weights,
)
from torch import nn

from torchft_svc.errors import ConfigError, WorkerFailed
from torchft_svc.trainer import TrainContext, Trainer
from torchft_svc.trainer.checkpoint import CheckpointStore

# Ray starts processes in seconds, of which a busy machine makes many.
pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(300)]

# Two workers need so many steps for a pass.
STEPS = NUM_SAMPLES // (2 * BATCH_SIZE)
LONG_S = 120.0
# A checkpoint of a few kilobytes is written in less, also on a busy machine.
WRITTEN_S = 20.0
# A busy machine may be late with signs of life; a test that freezes a worker waits for less.
HEARTBEAT_S, SHORT_S = 60.0, 10.0


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: Any) -> Iterator[None]:
    """Ray keeps processes of its own; of ours, no worker may be left."""
    yield
    eventually(lambda: not workers(), END_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node with room for three workers, which need one of the pool of 3 each if they say so."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 3, "resources": {"pool": 1}, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patched:  # of all that Ray starts on the first node
        patched.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
        cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class SlowFaults(Faults):
    """Leaves time to report a step before the next one."""

    def meet(self, step: int, rank: int) -> None:
        time.sleep(0.1)
        super().meet(step, rank)


class FaultsAfterCheckpoints(SlowFaults):
    """Waits at each step of the second pass for the checkpoint of the step before.

    One that is due while another one is not over is left out. Then this waits in vain, until a
    deadline, and the next step has one.
    """

    def __init__(self, folder: Path, *faults: tuple[int, int, str], checkpoints: Path) -> None:
        super().__init__(folder, *faults)
        self._checkpoints = checkpoints

    def meet(self, step: int, rank: int) -> None:
        deadline = time.monotonic() + WRITTEN_S
        while step > STEPS and self._newest() < step - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        super().meet(step, rank)

    def _newest(self) -> int:
        found = CheckpointStore(self._checkpoints).checkpoints()
        return found[0].position.step if found else 0


def workers() -> list[psutil.Process]:
    """The processes of all workers: Ray's, which it has named after their actors."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith("ray::RayWorkerActor"):
                found.append(process)
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Makes trainers of `train` with these faults, and ends them."""
    made: list[Trainer] = []

    def make(
        *faults: tuple[int, int, str],
        epochs: int = 1,
        meets: Callable[..., Faults] = SlowFaults,
        **options: Any,
    ) -> Trainer:
        folder = tmp_path / f"faults-{len(made)}"
        folder.mkdir()
        config = {"faults": meets(folder, *faults), "epochs": epochs}
        options = {"train_fn": train, "backend": "ray", "num_workers": 2, **options}
        made.append(Trainer(config=config, **{"heartbeat_timeout_s": HEARTBEAT_S, **options}))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown(force=True)


def incidents(found: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    return [(each.rung, each.source, each.lost_steps) for each in found["incidents"]]


def test_lost_and_frozen_workers_and_all_of_them(
    running: Callable[..., Trainer], tmp_path: Path
) -> None:
    last = STEPS + 4
    faults = [(2, 0, "kill"), (STEPS, 1, "freeze"), (last, 0, "kill"), (last, 1, "kill")]
    checkpoints = tmp_path / "checkpoints"
    trainer = running(
        *faults,
        meets=partial(FaultsAfterCheckpoints, checkpoints=checkpoints),
        epochs=2,
        checkpoint_dir=checkpoints,
        checkpoint_every=1,
        heartbeat_timeout_s=SHORT_S,
    )
    found = trainer.train(max_retries=3, checkpoint="auto")
    assert (found["result"], found["retries"], found["num_workers"]) == (2 * STEPS, 3, 2)
    killed, frozen, (rung, source, lost_steps) = incidents(found)
    assert killed == frozen == ("restart", "peer", 0)
    assert (rung, source) == ("restart", "checkpoint")
    assert lost_steps <= 2  # as many as may not have been written
    assert "its process has ended" in found["incidents"][0].reason
    assert "was silent for 10 s" in found["incidents"][1].reason
    assert len(workers()) == 2
    undisturbed = running(epochs=2, backend="local")
    undisturbed.train(max_retries=0)
    assert_equal(weights(trainer), weights(undisturbed))


def test_errors_of_the_program_are_distinguished(running: Callable[..., Trainer]) -> None:
    trainer = running((3, 0, "a bad sample"), num_workers=1)
    with pytest.raises(ValueError, match="a bad sample") as raised:
        trainer.train(max_retries=0)
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert "in meet" in cause.traceback
    assert trainer.train(max_retries=0)["result"] == 2 * STEPS  # there is nobody beside it


def test_the_others_train_on_while_a_worker_is_replaced(running: Callable[..., Trainer]) -> None:
    trainer = running((2, 0, "kill"), epochs=4, fault_tolerance="per-step")
    found = trainer.train(max_retries=0)
    assert trainer.position.epoch == 4
    (incident,) = found["incidents"]
    assert (found["retries"], incident.rung, incident.lost_steps) == (0, "per-step", 0)


class NodeFault(Faults):
    """Ends the node of a worker."""

    def __init__(self, folder: Path, step: int, node: str) -> None:
        super().__init__(folder)
        self._step, self._node = step, node

    def meet(self, step: int, rank: int) -> None:
        import ray

        if step == self._step and ray.get_runtime_context().get_node_id() == self._node:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()


def test_a_node_is_lost_and_others_come(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three workers, with two at least: there is a place for one, for two, and for all again."""
    lost = cluster.add_node(num_cpus=2, resources={"pool": 2})
    config = {"faults": NodeFault(tmp_path, 3, lost.node_id)}
    trainer = Trainer(
        train_until_three,
        config=config,
        num_workers=3,
        min_workers=2,
        resources_per_worker={"pool": 1},
        backend="ray",
        heartbeat_timeout_s=HEARTBEAT_S,  # Ray itself reports the loss of a node
        first_pause_s=0.1,
        max_pause_s=0.5,
        grow_every_s=0.1,
    )

    with trainer, ThreadPoolExecutor(1) as pool:
        training = pool.submit(trainer.train, max_retries=1)

        def meanwhile(holds: Callable[[], bool]) -> None:
            eventually(lambda: holds() or training.done(), LONG_S)
            if training.done():
                pytest.fail(f"the training is over: {training.result()}")

        meanwhile(lambda: caplog.text.count("there are resources for 1 workers") > 2)
        added = [cluster.add_node(num_cpus=1, resources={"pool": 1})]
        meanwhile(lambda: trainer.num_workers == 2)
        added.append(cluster.add_node(num_cpus=1, resources={"pool": 1}))
        found = training.result(LONG_S)
    assert (found["retries"], found["num_workers"]) == (1, 3)
    node_loss, growth = found["incidents"]
    assert (node_loss.rung, node_loss.source, node_loss.num_workers) == ("restart", "peer", 2)
    assert (growth.rung, growth.source, growth.num_workers) == ("growth", "peer", 3)
    assert node_loss.lost_steps == growth.lost_steps == 0
    assert node_loss.waited_s > 0
    for node in (lost, *added):
        cluster.remove_node(node)


def train_until_three(context: TrainContext) -> int:
    """Train while there is no room for three."""
    net = model({})
    net, steps = context.prepare(net, optimizer(net, {}))
    while context.position.epoch < 2 or context.world_size < 3:
        for features, target in context.batches(samples(), BATCH_SIZE):
            context.config["faults"].meet(context.position.step, context.rank)
            steps.zero_grad()
            nn.functional.mse_loss(net(features), target).backward()
            steps.step()
        context.report()
    return context.position.step


def test_a_job_uses_the_ray_it_runs_in(cluster: Any, tmp_path: Path) -> None:
    """Ray names its address to a job by this variable."""
    program = tmp_path / "job.py"
    program.write_text(
        "import sys\n"
        "from torch import nn\n"
        "from support.trained import data, model, optimizer\n"
        "from torchft_svc.trainer import Trainer\n"
        "assert 'ray' not in sys.modules\n"
        "with Trainer(model_creator=model, data_creator=data, optimizer_creator=optimizer,\n"
        "             loss_creator=nn.MSELoss, batch_size=4, backend='ray') as trainer:\n"
        "    print('trained', trainer.train(max_retries=0)['num_samples'])\n"
        "    import ray\n"
        "    print('nodes', ray.nodes()[0]['NodeID'])\n"
    )
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    variables = environment(RAY_ADDRESS=cluster.address, PYTHONPATH=paths)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert f"trained {NUM_SAMPLES}" in done.stdout, done.stderr
    assert f"nodes {cluster.head_node.node_id}" in done.stdout


def create_trainer(config: dict[str, Any]) -> Trainer:
    return Trainer(
        model_creator=model,
        data_creator=data,
        optimizer_creator=optimizer,
        loss_creator=nn.MSELoss,
        batch_size=BATCH_SIZE,
        num_workers=2,
        backend="ray",
        setup=config["setup"],
    )


def test_a_trial_of_ray_tune(cluster: Any, tmp_path: Path) -> None:
    """All three CPUs are the trial's: its trainer finds room in what the trial has reserved."""
    try:
        from ray import tune
    except ImportError as error:
        pytest.skip(str(error))
    from torchft_svc.trainer.ray_tune import as_trainable

    trainable = as_trainable(create_trainer, num_epochs=2, num_workers=2, max_retries=0)
    tuner = tune.Tuner(
        trainable,
        param_space={"setup": None},
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    (result,) = tuner.fit()
    assert result.error is None
    assert result.metrics["epoch"] == 2
    assert result.metrics["num_workers"] == 2
    assert result.checkpoint is not None


def test_without_ray_the_command_that_installs_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(sys.modules):
        if name.startswith("torchft_svc.trainer.ray"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"Ray is not installed.*pip install 'torchft-svc\[ray\]'"
    ):
        create_trainer({"setup": None})
