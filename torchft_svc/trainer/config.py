"""The settings of a trainer, checked before any worker starts."""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import cloudpickle

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.job import TrainingProgram, WorkerJob
from torchft_svc.trainer.retry.budget import RetryBudget
from torchft_svc.trainer.retry.machine import RetryRules

# Where checkpoints go if they are wanted and nobody said where.
DEFAULT_CHECKPOINT_DIR = "torchft-checkpoints"
AUTO = "auto"
_CREATORS = ("model_creator", "data_creator", "optimizer_creator")
_OPTIONAL = ("loss_creator", "scheduler_creator", "batch_loss", "setup")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(TrainingProgram):
    """The arguments of `Trainer`; see there."""

    num_workers: int = 1
    spares: int = 0
    min_workers: int = 1
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    checkpoint_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | timedelta | None = None
    resume: str | None = None
    use_gpu: bool | None = None
    heartbeat_timeout_s: float = 5.0
    start_timeout_s: float = 120.0
    first_pause_s: float = 0.5
    max_pause_s: float = 60.0
    resources_timeout_s: float = 600.0
    grow_every_s: float = 5.0
    max_restarts_without_progress: int | None = None

    def __post_init__(self) -> None:
        self._check_program()
        for name in ("num_workers", "min_workers", "keep_last"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("spares", self.spares, 0)
        for name in ("batch_size", "num_threads"):
            if getattr(self, name) is not None:
                _check_whole(name, getattr(self, name), 1)
        for name in ("timeout_s", "join_timeout_s"):
            value = getattr(self, name)
            if not (_is_number(value) and math.isfinite(value) and value > 0):
                raise ConfigError(name, value, "use a finite number of seconds above 0")
        _check_choice("fault_tolerance", self.fault_tolerance, ("restart", "per-step"))
        _check_choice("scheduler_step", self.scheduler_step, ("epoch", "step"))
        _check_choice("resume", self.resume, (None, AUTO))
        for name in ("config", "resources_per_worker", "ddp_args"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(name, getattr(self, name), "use a dict")
        self._check_checkpoints()
        self._check_batch_size()
        for name, amount in self.resources_per_worker.items():
            if not (_is_number(amount) and math.isfinite(amount) and amount >= 0):
                given = dict(self.resources_per_worker)
                raise ConfigError("resources_per_worker", given, f"{name}: use a number, 0 or more")
        self.rules()

    def rules(self) -> RetryRules:
        """The rules of the restart protocol."""
        return RetryRules(
            num_workers=self.num_workers,
            min_workers=self.min_workers,
            num_spares=self.spares,
            ends_spares=self.train_fn is not None,
            keeps_others=self.fault_tolerance == "per-step",
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            start_timeout_s=self.start_timeout_s,
            first_pause_s=self.first_pause_s,
            max_pause_s=self.max_pause_s,
            resources_timeout_s=self.resources_timeout_s,
            grow_every_s=self.grow_every_s,
            max_restarts_without_progress=self.max_restarts_without_progress,
        )

    def job(self) -> bytes:
        """What each worker gets.

        Raises:
            ConfigError: a function or a value cannot be sent to another process.
        """
        every = self.checkpoint_every
        use_gpu = self.use_gpu
        if use_gpu is None:
            use_gpu = self.resources_per_worker.get("GPU", 0) > 0
        program = {each.name: getattr(self, each.name) for each in fields(TrainingProgram)}
        for name in ("config", "ddp_args"):
            program[name] = dict(program[name])
        job = WorkerJob(
            **program,
            use_gpu=use_gpu,
            checkpoint_every_steps=every if isinstance(every, int) else None,
            checkpoint_every_s=every.total_seconds() if isinstance(every, timedelta) else None,
        )
        try:
            return bytes(cloudpickle.dumps(job))
        except Exception as error:  # what it may be is up to the user's objects
            for name in ("train_fn", *_CREATORS, *_OPTIONAL, "config", "ddp_args"):
                value = getattr(self, name)
                if not _can_be_sent(value):
                    reason = f"it cannot be sent to a worker: {error}"
                    raise ConfigError(name, value, reason) from error
            raise

    def _check_program(self) -> None:
        given = [name for name in (*_CREATORS, *_OPTIONAL) if getattr(self, name) is not None]
        for name in ("train_fn", *given):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise ConfigError(name, function, "use a function")
        _check_whole("seed", self.seed)
        if not (isinstance(self.run_name, str) and self.run_name):
            raise ConfigError("run_name", self.run_name, "use a word")
        _check_choice("use_gpu", self.use_gpu, (None, True, False))
        if self.train_fn is not None:
            loop = [name for name in given if name != "setup"]
            if loop:
                reason = f"train_fn is a loop of its own: it needs no {loop[0]}"
                raise ConfigError(loop[0], getattr(self, loop[0]), reason)
            return
        missing = [name for name in _CREATORS if getattr(self, name) is None]
        if missing:
            names = ", ".join(_CREATORS)
            raise ConfigError(missing[0], None, f"give train_fn, or all of {names}")
        if self.loss_creator is None and self.batch_loss is None:
            raise ConfigError("loss_creator", None, "give it, or batch_loss")

    def _check_batch_size(self) -> None:
        """Check the batch size, which has to be known if the loop is the trainer's."""
        if self.train_fn is not None or self.batch_size is not None:
            return
        size = self.config.get("batch_size", 1)
        try:
            is_fine = int(size) >= 1
        except (TypeError, ValueError):
            is_fine = False
        if not is_fine:
            raise ConfigError("batch_size", size, "use a whole number, 1 or more, in config")

    def _check_checkpoints(self) -> None:
        every = self.checkpoint_every
        if isinstance(every, timedelta):
            if every <= timedelta():
                raise ConfigError("checkpoint_every", every, "use a time above 0")
        elif every is not None:
            _check_whole("checkpoint_every", every, 1)


def check_options(known: Callable[..., Any], unknown: Iterable[tuple[str, Any]]) -> None:
    """Raise `ConfigError` for the first of the ``unknown`` options, with the likeliest name."""
    for name, value in unknown:
        names = [each for each in inspect.signature(known).parameters if each != "self"]
        likely = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {likely[0]}?" if likely else ""
        raise ConfigError(name, value, f"there is no such option{hint}")


def check_num_steps(num_steps: int | None) -> None:
    """Raise `ConfigError` unless it is a number of steps, or None."""
    if num_steps is not None:
        _check_whole("num_steps", num_steps, 1)


def check_info(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy; raise `ConfigError` if it cannot be sent to workers."""
    if not (info is None or isinstance(info, Mapping)):
        raise ConfigError("info", info, "use a dict")
    checked = dict(info or {})
    for name, value in checked.items():
        if not _can_be_sent(value):
            raise ConfigError("info", name, "its value cannot be sent to a worker")
    return checked


def budget(max_retries: int, reset_retries_after: int | None) -> RetryBudget:
    """Raise `ConfigError` unless both are numbers that can work."""
    if not _is_whole(max_retries):
        raise ConfigError("max_retries", max_retries, "use a whole number, -1 for no limit")
    if reset_retries_after is not None and not _is_whole(reset_retries_after):
        raise ConfigError("reset_retries_after", reset_retries_after, "use a number of steps")
    return RetryBudget(max_retries=max_retries, reset_after=reset_retries_after)


def _check_whole(name: str, value: object, low: int | None = None) -> None:
    if not _is_whole(value):
        raise ConfigError(name, value, "use a whole number")
    if low is not None and value < low:  # type: ignore[operator]
        raise ConfigError(name, value, f"use a whole number, {low} or more")


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(name, value, f"use one of {', '.join(map(repr, choices))}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _can_be_sent(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - see above
        return False
    return True
