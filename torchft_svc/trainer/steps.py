"""The boundary between two steps: what was done is counted, the next batch is drawn.

Both kinds of program take their batches from `Steps`, so the position in the data, the seeds, the
checkpoints and the end of an abandoned step are the same for both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchft_svc.client.data.plan import Turn
from torchft_svc.client.data.seeds import seed_everything
from torchft_svc.trainer.backend import Link
from torchft_svc.trainer.checkpoint import Checkpoint, CheckpointStore, CheckpointWriter
from torchft_svc.trainer.data import BatchSource
from torchft_svc.trainer.held_state import HeldState
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import CheckpointWritten, Position, Progress
from torchft_svc.trainer.world import TrainingWorld

log = logging.getLogger(__name__)

# Faster steps are not each reported to the trainer.
_SEND_EVERY_S = 0.02
# A checkpoint of a command that has ended is waited for so long.
_WRITE_S = 60.0


class Steps:
    """Draws the batch of each step, for the main thread."""

    def __init__(self, link: Link, job: WorkerJob, held: HeldState, world: TrainingWorld) -> None:
        self._link, self._job = link, job
        self._held, self._world = held, world
        self.checkpoints = Checkpoints(link, job, held)
        self._has_begun = False
        self._sent_at = 0.0

    def next_batch(self, source: BatchSource) -> Any:
        """The batch of the next step, which begins with it; None: the pass is over.

        Raises:
            StepAbandoned: the trainer wants this worker to end.
        """
        held = self._held
        updated = held.complete()
        if self._world.has_lost_vote():
            held.undraw()
        at = held.drawn
        accumulates = not updated and at != held.position
        if not source.has_more(at.epoch, at.num_samples):
            return None
        if not accumulates or not self._has_begun:
            self._has_begun = True
            self._world.begin_step()  # it may take over the state of another worker
            held.check()
            is_leader = self._world.turn.rank == 0
            self.checkpoints.at_step(held.position, is_leader=is_leader)
            at = held.drawn
            if not source.has_more(at.epoch, at.num_samples):
                return None
        turn = self._world.turn
        drawn = source.draw(at.epoch, at.num_samples, turn)
        if drawn is None:
            return None
        batch, num_samples = drawn
        held.draw(replace(at, num_samples=num_samples))
        self._send_progress()
        seed_everything(self._job.seed, at.epoch, at.step, at.num_samples, turn.rank)
        return move(batch, held.device)

    def _send_progress(self) -> None:
        now = time.monotonic()
        if now >= self._sent_at + _SEND_EVERY_S:
            self._sent_at = now
            self._link.send(Progress(position=self._held.position))


class Checkpoints:
    """Decides when a checkpoint is written: before a pass, and within one by the job's interval."""

    def __init__(self, link: Link, job: WorkerJob, held: HeldState) -> None:
        self._link, self._job, self._held = link, job, held
        self._directory = ""
        self._writer: CheckpointWriter | None = None
        self._last: Position | None = None
        self._last_at = 0.0

    def use_directory(self, directory: str) -> None:
        """Write checkpoints to ``directory`` from now on; empty: write none."""
        if directory == self._directory:
            return
        self.end()
        self._directory, self._last = directory, None
        if directory:
            store = CheckpointStore(directory, self._job.keep_last)
            self._writer = CheckpointWriter(store, self._report_written)

    def at_step(self, position: Position, *, is_leader: bool) -> None:
        """Write one, if it is due at the beginning of this step."""
        if self._writer is None or not is_leader or not self._is_due(position):
            return
        begins = position.num_samples == 0
        if not begins and not self._writer.wait(0.0):
            return  # the last one is still being written
        state = self._held.whole()
        if state is not None:
            self._writer.begin_write(state)
            self._last, self._last_at = position, time.monotonic()

    def _is_due(self, position: Position) -> bool:
        if position == self._last:
            return False
        if position.num_samples == 0 or self._last is None:
            return True
        every, every_s = self._job.checkpoint_every_steps, self._job.checkpoint_every_s
        if every is not None and position.step >= self._last.step + every:
            return True
        return every_s is not None and time.monotonic() >= self._last_at + every_s

    def end(self) -> None:
        """Wait for the one that is being written."""
        if self._writer is not None and not self._writer.wait(_WRITE_S):
            log.warning("the last checkpoint is not waited for any longer")
        self._writer, self._directory = None, ""

    def _report_written(self, written: Checkpoint) -> None:
        self._link.send(CheckpointWritten(position=written.position, path=written.path))


def part_of(source: BatchSource, turn: Turn) -> Iterator[Any]:
    """One worker's batches of one pass over data that is not trained on."""
    num_samples = 0
    while source.has_more(0, num_samples):
        drawn = source.draw(0, num_samples, turn)
        if drawn is None:
            return
        batch, num_samples = drawn
        yield batch


def move(batch: Any, device: torch.device) -> Any:
    """``batch`` with all its tensors on ``device``."""
    if device.type == "cpu":
        return batch
    return tree_map(
        lambda each: each.to(device, non_blocking=True) if isinstance(each, torch.Tensor) else each,
        batch,
    )
