"""A trainer as a trainable of Ray Tune, which is imported only by those who ask for it."""

from __future__ import annotations

import importlib
import numbers
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.trainer import Trainer

# In the folder of a checkpoint of Tune.
_STATE = "state"


def as_trainable(
    create_trainer: Callable[[Mapping[str, Any]], Trainer],
    *,
    num_epochs: int,
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
    **train_options: Any,
) -> Any:
    """A trainable for ``ray.tune.Tuner``::

        def create_trainer(config):
            return Trainer(..., config=config, num_workers=2, backend="ray")

        trainable = as_trainable(create_trainer, num_epochs=10, num_workers=2, max_retries=3)
        Tuner(trainable, param_space={"lr": tune.loguniform(1e-4, 1e-1)}).fit()

    A trial reports after each pass what `Trainer.train` returned, as far as it is numbers or words,
    with a checkpoint: a trial that is stopped or lost goes on from its last one. Lost workers cost
    the trial nothing but a restart of its trainer.

    Args:
        create_trainer: called in each trial with its configuration; the trainer has ``num_workers``
            workers with ``resources_per_worker`` (default: a CPU each). They run in the trial's own
            placement group, which has a CPU for the trial besides.
        train_options: for `Trainer.train`.

    Raises:
        ConfigError: Ray Tune is not installed.
    """
    try:
        tune = importlib.import_module("ray.tune")
    except ImportError as error:
        reason = f"{error}: pip install 'ray[tune]'"
        raise ConfigError("as_trainable", "ray.tune", reason) from error

    def run(config: dict[str, Any]) -> None:
        with create_trainer(config) as trainer:
            before = tune.get_checkpoint()
            if before is not None:
                with before.as_directory() as folder:
                    trainer.load(Path(folder) / _STATE)
            while trainer.position.epoch < num_epochs:
                result = trainer.train(**train_options)
                with tempfile.TemporaryDirectory() as folder:
                    trainer.save(Path(folder) / _STATE)
                    tune.report(_metrics(result), checkpoint=tune.Checkpoint.from_directory(folder))

    each = dict(resources_per_worker or {"CPU": 1.0})
    bundles = [{"CPU": 1.0}, *(dict(each) for _ in range(num_workers))]
    return tune.with_resources(run, tune.PlacementGroupFactory(bundles))


def _metrics(result: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {
        name: value for name, value in result.items() if isinstance(value, numbers.Real | str)
    }
    return {**metrics, "num_incidents": len(result["incidents"])}
