"""`Trainer(spares=1)` with real processes: one that stands by takes a killed worker's place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from support.files import complete_lines
from support.running import eventually
from support.trained import (
    BATCH_SIZE,
    Sharing,
    data,
    model,
    optimizer,
    samples,
    shared,
)
from torch import Tensor, nn

from torchft_svc.errors import ConfigError
from torchft_svc.trainer import TrainContext, Trainer

START_S = 120.0
STEP_S = 0.02
# With so many steps the loss is a small part of the first one's.
NUM_STEPS = 60
# The heartbeat of a worker is late on a busy machine.
SETTINGS: dict[str, Any] = {
    "fault_tolerance": "per-step",
    "num_workers": 2,
    "spares": 1,
    "heartbeat_timeout_s": 60.0,
    "show_progress": False,
}


def refuse(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Trainer(lambda context: None, **options)
    return str(caught.value)


def test_spares_that_make_no_sense_are_refused() -> None:
    assert "spares=-1 cannot work: use a whole number, 0 or more" in refuse(spares=-1)
    assert "use 'per-step'" in refuse(spares=1)
    assert "use backend='local'" in refuse(spares=1, fault_tolerance="per-step", backend="ray")


@pytest.fixture(scope="module")
def processes() -> Iterator[Sharing]:
    with shared() as backend:
        yield backend


def train_until_stopped(context: TrainContext) -> int:
    """Note each step with a digest of the weights before it, until there is a file ``stop``."""
    folder = Path(context.config["folder"])
    net = model(context.config)
    net, steps = context.prepare(net, optimizer(net, context.config))
    with open(folder / f"steps-{os.getpid()}", "w", buffering=1) as notes:
        while not (folder / "stop").exists():
            for features, target in context.batches(samples(), BATCH_SIZE):
                weights = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
                digest = hashlib.sha256(weights).hexdigest()[:16]
                steps.zero_grad()
                loss = nn.functional.mse_loss(net(features), target)
                loss.backward()
                time.sleep(STEP_S)
                step = context.position.step
                if steps.step():
                    notes.write(f"{step} {digest} {loss.item()}\n")
            context.report()
    return context.position.step


class Run:
    """A call of `train` on another thread, while its workers are killed."""

    def __init__(self, trainer: Trainer, result: Future[Any]) -> None:
        self.trainer, self.result = trainer, result

    def until(self, holds: Callable[[], object], what: str) -> None:
        def look() -> object:
            time.sleep(0.02)
            if self.result.done():
                self.result.result()
                raise AssertionError(f"it has ended before {what}")
            return holds()

        eventually(look, START_S, what)

    def kill(self, rank: int) -> int:
        pid = self.trainer.worker_pids[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def replaces(self, rank: int, pid: int) -> Callable[[], bool]:
        """Whether another worker has the place of ``pid``, and another one stands by."""

        def holds() -> bool:
            trainer = self.trainer
            has_other = trainer.worker_pids.get(rank, pid) != pid
            return has_other and trainer.num_workers == 2 and trainer.num_spares == 1

        return holds


@contextlib.contextmanager
def running(trainer: Trainer, call: Callable[[], Any]) -> Iterator[Run]:
    """Call it on another thread; the trainer ends if the block fails."""
    with ThreadPoolExecutor(1) as pool:
        run = Run(trainer, pool.submit(call))
        try:
            yield run
        except BaseException:
            trainer.shutdown()
            raise


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_spare_takes_the_place_of_a_killed_worker(processes: Sharing, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path)}
    with Trainer(train_until_stopped, config=config, backend=processes, **SETTINGS) as trainer:
        with running(trainer, lambda: trainer.train(max_retries=0)) as run:
            run.until(lambda: trainer.num_spares == 1, "a spare stands by")
            before = set(trainer.worker_pids.values())
            run.until(run.replaces(1, run.kill(1)), "a spare has taken the place")
            assert trainer.worker_pids[1] in before  # it was there already
            run.until(run.replaces(0, run.kill(0)), "the next one has taken a place")
            run.until(lambda: max(noted(tmp_path)) >= NUM_STEPS, "enough steps")
            (tmp_path / "stop").touch()
            result = run.result.result(START_S)
        assert [each.rung for each in result["incidents"]] == ["per-step", "per-step"]
        steps = noted(tmp_path)
        assert all(len({digest for digest, _ in each}) == 1 for each in steps.values())
        losses = [fmean(loss for _, loss in each) for _, each in sorted(steps.items())]
        assert fmean(losses[-10:]) < fmean(losses[:10]) / 2


def noted(folder: Path) -> dict[int, list[tuple[str, float]]]:
    """What workers have noted of each step: the digest of the weights before it, and the loss."""
    found: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for file in folder.glob("steps-*"):
        for line in complete_lines(file):
            step, digest, loss = line.split()
            found[int(step)].append((digest, float(loss)))
    return found


def slow_loss(net: nn.Module, batch: tuple[Tensor, Tensor], info: Mapping[str, Any]) -> Tensor:
    features, target = batch
    time.sleep(info["step_s"])
    return nn.functional.mse_loss(net(features), target)


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_a_spare_outlives_a_pass_and_takes_a_place_in_a_later_one(processes: Sharing) -> None:
    trainer = Trainer(
        model_creator=model,
        data_creator=data,
        optimizer_creator=optimizer,
        batch_loss=slow_loss,
        batch_size=BATCH_SIZE,
        backend=processes,
        **SETTINGS,
    )
    with trainer:
        first = trainer.train(max_retries=0, info={"step_s": 0.0})
        while trainer.num_spares == 0:
            trainer.train(max_retries=0, info={"step_s": STEP_S})
        pids = set(trainer.worker_pids.values())
        trainer.train(max_retries=0, info={"step_s": 0.0})
        assert set(trainer.worker_pids.values()) == pids
        with running(trainer, lambda: trainer.train(max_retries=0, info={"step_s": 1.0})) as run:
            killed = run.kill(1)
            run.until(lambda: trainer.worker_pids.get(1, killed) in pids - {killed}, "a place")
            last = run.result.result(START_S)
        assert (last["num_workers"], last["retries"]) == (2, 0)
        assert last["train_loss"] < first["train_loss"]
