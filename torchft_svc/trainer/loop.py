"""The trainer's own loop over what the user's creators make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from torchft_svc.client.data.plan import Turn
from torchft_svc.client.data.seeds import CREATION, VALIDATION, mix, seed_everything
from torchft_svc.errors import ConfigError
from torchft_svc.trainer.data import BatchSource, batch_source
from torchft_svc.trainer.held_state import HeldState
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import Train, Validate
from torchft_svc.trainer.steps import Steps, move, part_of
from torchft_svc.trainer.world import TrainingWorld


class CreatorLoop:
    """Makes what is trained, and trains it pass by pass."""

    def __init__(self, job: WorkerJob, held: HeldState) -> None:
        self._job, self._held = job, held
        seed_everything(job.seed, CREATION)
        assert job.model_creator is not None
        assert job.optimizer_creator is not None
        assert job.data_creator is not None
        self._training, self._validation = _split(job.data_creator(job.config))
        models = _several(job.model_creator(job.config))
        _check_each("model_creator", models, nn.Module)
        for model in models:
            model.to(held.device)
        self._models = models
        made = job.optimizer_creator(_one_or_all(models), job.config)
        self._optimizers = _several(made)
        _check_each("optimizer_creator", self._optimizers, torch.optim.Optimizer)
        self._schedulers: list[Any] = []
        if job.scheduler_creator is not None:
            self._schedulers = _several(job.scheduler_creator(made, job.config))
            if any(isinstance(each, ReduceLROnPlateau) for each in self._schedulers):
                reason = "it wants to know how good the model is: use a training function"
                raise ConfigError("scheduler_creator", "ReduceLROnPlateau", reason)
        self._loss = _loss(job)
        self._wrapped: list[Any] = []
        self._voting: list[Any] = []
        self._following: list[Any] = []
        self._steps: Steps | None = None
        self._source: BatchSource | None = None
        held.own(self._models, self._optimizers, self._schedulers, updates_once=True)

    def enter_world(self, world: TrainingWorld, steps: Steps) -> None:
        """Train in ``world`` from now on."""
        self._steps = steps
        self._wrapped, self._voting, self._following = world.prepare(
            self._models, self._optimizers, self._schedulers
        )

    def train(self, command: Train) -> dict[str, Any]:
        """Train until the command's end; the metrics of this worker."""
        held, steps = self._held, self._steps
        assert steps is not None
        if self._source is None:
            size = _batch_size(self._job)
            self._source = batch_source(self._training, size, self._job.seed)
        sums = Metrics("train_loss")
        for model in self._wrapped:
            model.train()
        while not self._is_done(command):
            batch = steps.next_batch(self._source)
            if batch is None:
                self._end_pass()
                continue
            loss, metrics = self._step(batch, command.info)
            if loss is not None:
                sums.add(loss, metrics, _num_samples(batch))
        held.complete()
        return {"epoch": held.position.epoch, **sums.result()}

    def _is_done(self, command: Train) -> bool:
        at = self._held.reached
        if at.epoch >= command.until_epoch:
            return True
        return command.until_step is not None and at.step >= command.until_step

    def _step(self, batch: Any, info: Mapping[str, Any]) -> tuple[Tensor | None, Mapping[str, Any]]:
        """One step; its loss, None: it was discarded."""
        for optimizer in self._voting:
            optimizer.zero_grad()
        loss, metrics = self._loss(_one_or_all(self._wrapped), batch, info)
        if not isinstance(loss, Tensor):
            reason = "let it return a tensor, or a pair of it and a dict"
            raise ConfigError("batch_loss", type(loss).__name__, reason)
        torch.autograd.backward(loss)
        applied = [optimizer.step() is not False for optimizer in self._voting]
        if not all(applied):
            return None, {}
        if self._job.scheduler_step == "step":
            for scheduler in self._following:
                scheduler.step()
        return loss.detach(), metrics

    def _end_pass(self) -> None:
        if self._job.scheduler_step == "epoch":
            for scheduler in self._schedulers:
                scheduler.step()
        self._held.complete(closes_pass=True)

    def validate(self, command: Validate) -> dict[str, Any]:
        """The metrics of this worker's part of the validation data."""
        if self._validation is None:
            reason = "data_creator returns no validation data: let it return a pair"
            raise ConfigError("data_creator", "training data alone", reason)
        seed = mix(self._job.seed, VALIDATION)
        size = _batch_size(self._job)
        source = batch_source(self._validation, size, seed, trains=False, shuffles=False)
        turn = Turn(command.part, command.num_parts)
        sums = Metrics("val_loss")
        for model in self._models:
            model.eval()
        batches: Iterator[Any] = part_of(source, turn)
        with torch.no_grad():
            for batch in islice(batches, command.num_steps):
                self._held.check()
                moved = move(batch, self._held.device)
                loss, metrics = self._loss(_one_or_all(self._models), moved, command.info)
                sums.add(loss, metrics, _num_samples(moved))
        return sums.result()


class Metrics:
    """Averages over the samples of a worker; on the device until they are asked for."""

    def __init__(self, loss_name: str) -> None:
        self._loss_name = loss_name
        self._sums: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._num_batches = self._num_samples = 0

    def add(self, loss: Tensor, metrics: Mapping[str, Any], num_samples: int) -> None:
        self._num_batches += 1
        self._num_samples += num_samples
        self._last = {self._loss_name: loss.detach(), **metrics}
        for name, value in self._last.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * num_samples

    def result(self) -> dict[str, Any]:
        """Numbers of batches and samples, each average, and each value of the last batch."""
        averages: dict[str, Any] = {
            "batch_count": self._num_batches,
            "num_samples": self._num_samples,
        }
        for name, total in self._sums.items():
            averages[name] = float(total) / self._num_samples
            averages[f"last_{name}"] = float(self._last[name])
        return averages


BatchLoss = Callable[[Any, Any, Mapping[str, Any]], tuple[Tensor, Mapping[str, Any]]]


def _loss(job: WorkerJob) -> BatchLoss:
    given = job.batch_loss
    if given is None:
        return _default_loss(job)
    function = given

    def loss(model: Any, batch: Any, info: Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
        result = function(model, batch, info)
        return result if isinstance(result, tuple) else (result, {})

    return loss


def _default_loss(job: WorkerJob) -> BatchLoss:
    creator = job.loss_creator
    assert creator is not None
    is_loss = inspect.isclass(creator) and issubclass(creator, nn.Module)
    criterion = creator() if is_loss else creator(job.config)

    def loss(model: Any, batch: Any, info: Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Any]]:
        if isinstance(model, list):
            raise ConfigError("model_creator", f"{len(model)} models", "give batch_loss, too")
        if not isinstance(batch, Sequence) or len(batch) < 2:
            reason = "a tuple of features and target is needed, or give batch_loss"
            raise ConfigError("batch", type(batch).__name__, reason)
        *features, target = batch
        output = model(*features)
        value = criterion(output, target)
        return value, {} if torch.is_grad_enabled() else _accuracy(output, target)

    return loss


def _accuracy(output: Any, target: Any) -> dict[str, Tensor]:
    """The part of the samples whose class is right, if these are classes."""
    is_classes = (
        isinstance(output, Tensor)
        and isinstance(target, Tensor)
        and output.dim() == target.dim() + 1
        and not target.is_floating_point()
    )
    return {"val_accuracy": (output.argmax(1) == target).float().mean()} if is_classes else {}


def _num_samples(batch: Any) -> int:
    """The length of the first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Tensor):
        return len(batch)
    for value in values if isinstance(values, Sequence) or isinstance(batch, Mapping) else ():
        if isinstance(value, Tensor) and value.dim():
            return len(value)
    return 1


def _batch_size(job: WorkerJob) -> int | None:
    size = job.config.get("batch_size") if job.batch_size is None else job.batch_size
    return None if size is None else int(size)


def _split(data: Any) -> tuple[Any, Any]:
    """Training and validation data (None: none). A list may also be one of batches."""
    if isinstance(data, tuple) and len(data) == 2:
        return data
    is_list = isinstance(data, list) and len(data) == 2
    if is_list and all(isinstance(each, Dataset | DataLoader) for each in data):
        return data[0], data[1]
    return data, None


def _several(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _check_each(creator: str, made: list[Any], kind: type) -> None:
    for each in made:
        if not isinstance(each, kind):
            reason = f"let it return a torch {kind.__name__}, or a list of them"
            raise ConfigError(creator, type(each).__name__, reason)


def _one_or_all(made: list[Any]) -> Any:
    return made[0] if len(made) == 1 else made
