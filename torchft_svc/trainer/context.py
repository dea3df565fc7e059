"""Runs a training function of the user, and shows it the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchft_svc.client.data.seeds import BETWEEN_STEPS, CREATION, seed_everything
from torchft_svc.trainer.backend import Link
from torchft_svc.trainer.data import batch_source
from torchft_svc.trainer.held_state import HeldState
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import Position, Reported, StateHandle, Train
from torchft_svc.trainer.state import encode_state
from torchft_svc.trainer.steps import Steps, move, part_of
from torchft_svc.trainer.world import TrainingWorld

# Of the time of training, at most this part goes to states that are given with reports.
_GIVING_PART = 0.05


class TrainContext:
    """A worker's side of a training function::

        def train(context):
            model = Net()
            optimizer = torch.optim.Adam(model.parameters())
            model, optimizer = context.prepare(model, optimizer)
            for epoch in range(context.position.epoch, 10):
                losses = []
                for features, target in context.batches(dataset, batch_size=32):
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(features), target)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                context.report(losses=losses)

    The function is started from its beginning after a loss. `prepare` then loads the state after
    the last step that was done, and `batches` continues after its samples. After the last step of a
    pass these are none, until the pass is ended: what follows the loop is then done all the same.
    """

    def __init__(
        self, link: Link, job: WorkerJob, held: HeldState, world: TrainingWorld, steps: Steps
    ) -> None:
        self._link, self._job = link, job
        self._held, self._world, self._steps = held, world, steps
        self._info: Mapping[str, Any] = {}
        self._in_step = False
        self._pass_is_over = False
        self._gives_states = False
        self._give_at = 0.0

    @property
    def rank(self) -> int:
        """The rank of this worker; it may change between two steps (``per-step``)."""
        return self._world.turn.rank

    @property
    def world_size(self) -> int:
        """The number of workers that train together."""
        return self._world.turn.size

    @property
    def config(self) -> Mapping[str, Any]:
        """The ``config`` of the trainer."""
        return self._job.config

    @property
    def info(self) -> Mapping[str, Any]:
        """The ``info`` of `Trainer.train`."""
        return self._info

    @property
    def device(self) -> torch.device:
        """The device on which this worker trains."""
        return self._held.device

    @property
    def position(self) -> Position:
        """The position of training after the last update."""
        return self._held.reached

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None, **others: Any) -> Any:
        """Train ``model`` on all workers, which is moved to `device`, and resume its state.

        Call it right before the loop: from then on the others wait for this worker's batches.

        Args:
            model, optimizer, scheduler: one of each, or lists.
            others: objects with ``state_dict`` and ``load_state_dict``, such as an average of the
                weights, which belong to the state; copied after each step.

        Returns:
            What takes their places in the loop: ``(model, optimizer)``, or ``(model, optimizer,
            scheduler)`` if a scheduler was given.

        Raises:
            ConfigError: the state that is to be resumed does not fit.
        """
        given = [model, optimizer, *([] if scheduler is None else [scheduler])]
        models, optimizers, schedulers = (
            _several(each) for each in (model, optimizer, [] if scheduler is None else scheduler)
        )
        for each in models:
            each.to(self.device)
        self._held.own(models, optimizers, schedulers, others)
        prepared = self._world.prepare(models, optimizers, schedulers)
        # One that joins a running job has to know how far that is before its loop begins.
        self._world.begin_step()
        self._held.check()
        self._seed_between_steps()
        return tuple(
            made if isinstance(before, list | tuple) else made[0]
            for before, made in zip(given, prepared, strict=False)
        )

    def batches(
        self, data: Any, batch_size: int | None = None, *, shuffle: bool = True
    ) -> Iterator[Any]:
        """The batches of this worker, on `device`, to the end of the pass that is under way.

        Together the workers use each sample of a pass once. Each batch is one step, or a part of
        one if the optimizer's step is called after several. Random numbers are seeded for each.

        Args:
            data: a Dataset, a DataLoader, or another iterable of batches; see docs/trainer.md.
            batch_size: of one worker, for a Dataset (default: the trainer's).
            shuffle: a Dataset.

        Raises:
            ConfigError: ``data`` is none of these, or has no sample.
        """
        self._end_pass()
        size = self._job.batch_size if batch_size is None else batch_size
        source = batch_source(data, size, self._job.seed, shuffles=shuffle)
        self._in_step = True
        try:
            while (batch := self._steps.next_batch(source)) is not None:
                yield batch
            self._pass_is_over = True
        finally:
            self._in_step = False
            self._seed_between_steps()

    def share(self, data: Any, batch_size: int | None = None) -> Iterator[Any]:
        """This worker's part of data that is not trained on, such as for validation, on `device`.

        Arguments as for `batches`, but the order is that of ``data``.
        """
        size = self._job.batch_size if batch_size is None else batch_size
        source = batch_source(data, size, self._job.seed, trains=False, shuffles=False)
        try:
            for batch in part_of(source, self._world.turn):
                yield move(batch, self.device)
        finally:
            self._seed_between_steps()

    def report(self, **metrics: Any) -> None:
        """Report ``metrics`` to the trainer. After a pass, this also ends it: see `position`."""
        if not self._in_step:
            self._end_pass()
        plain = {name: _plain(value) for name, value in metrics.items()}
        state = self._given_state()
        self._link.send(Reported(position=self.position, metrics=plain, state=state))

    def _given_state(self) -> StateHandle | None:
        """The state for a trainer that has no checkpoints, if that takes little time."""
        began_at = time.monotonic()
        if not self._gives_states or self.rank != 0 or began_at < self._give_at:
            return None
        with self._held.holding():
            state = self._held.whole(by_main=False)
            if state is None:
                return None
            handle = self._link.offer_state(state.position, encode_state(state))
        took_s = time.monotonic() - began_at
        self._give_at = began_at + took_s / _GIVING_PART
        return handle

    def _end_pass(self) -> None:
        self._held.complete(closes_pass=self._pass_is_over)
        self._pass_is_over = False
        self._seed_between_steps()

    def _seed_between_steps(self) -> None:
        """What the program makes between two passes is the same in each worker, and again when it
        goes on within the second one."""
        epoch = self.position.epoch + self._pass_is_over
        seed_everything(self._job.seed, BETWEEN_STEPS, epoch)

    def _run(self, function: Callable[[TrainContext], Any], command: Train) -> Any:
        self._info = command.info
        self._gives_states = not command.checkpoint_dir
        seed_everything(self._job.seed, CREATION)
        result = function(self)
        self._end_pass()
        return result


class FunctionProgram:
    """Runs the training function of the user."""

    def __init__(self, link: Link, job: WorkerJob, held: HeldState) -> None:
        self._link, self._job, self._held = link, job, held
        self._context: TrainContext | None = None

    def enter_world(self, world: TrainingWorld, steps: Steps) -> None:
        """Train in ``world`` from now on."""
        self._context = TrainContext(self._link, self._job, self._held, world, steps)

    def train(self, command: Train) -> Any:
        """Run the user's function, and return its result."""
        assert self._context is not None
        assert self._job.train_fn is not None
        return self._context._run(self._job.train_fn, command)


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.numel() == 1 else value.detach().cpu()


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
