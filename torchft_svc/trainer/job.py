"""The job of a trainer's worker; sent to each worker once, with cloudpickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchft_svc.trainer.messages import FaultTolerance

# The longest that all workers of a world may take to meet.
DEFAULT_JOIN_TIMEOUT_S = 60.0
# The longest that a collective may take. A lost worker is noticed by the trainer long before.
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgram:
    """A program of one of two kinds, and those of its settings that users choose.

    Either ``train_fn(context)``, the user's own loop, or creators, whose loop is the trainer's:
    ``model_creator(config)``, ``data_creator(config)`` (training data, or a pair of training and
    validation data), ``optimizer_creator(model, config)``, ``loss_creator(config)`` or a class of
    ``torch.nn``, ``scheduler_creator(optimizer, config)``.

    Args:
        config: for all functions of the user.
        batch_loss: ``batch_loss(model, batch, info)`` returns the loss of a batch, or a pair of it
            and a mapping of metrics (default: the loss of ``model(*features)`` and the target, the
            last element of the batch).
        scheduler_step: whether the scheduler moves after each pass or after each step.
        setup: called in each worker before anything else.
        batch_size: samples of one worker in a step, for a Dataset (a DataLoader has its own;
            default: ``config["batch_size"]``).
        seed: of the order of the data, the initial weights, and the random numbers of each step.
        num_threads: of torch in each worker (default: torch's).
        ddp_args: of the wrapper ``DistributedDataParallel``.
        timeout_s: the longest that a collective may take.
        join_timeout_s: the longest that all workers may take to meet.
        keep_last: how many checkpoints are kept.
        run_name: different for each run at the same time on the same lighthouse.
    """

    fault_tolerance: FaultTolerance = "restart"
    config: Mapping[str, Any] = field(default_factory=dict)
    train_fn: Callable[[Any], Any] | None = None
    model_creator: Callable[..., Any] | None = None
    data_creator: Callable[..., Any] | None = None
    optimizer_creator: Callable[..., Any] | None = None
    loss_creator: Callable[..., Any] | None = None
    scheduler_creator: Callable[..., Any] | None = None
    batch_loss: Callable[..., Any] | None = None
    scheduler_step: Literal["epoch", "step"] = "epoch"
    setup: Callable[[Mapping[str, Any]], None] | None = None
    batch_size: int | None = None
    seed: int = 0
    num_threads: int | None = None
    ddp_args: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    keep_last: int = 3
    run_name: str = "trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJob(TrainingProgram):
    """The program, and what the trainer has decided about it.

    Args:
        use_gpu: train on the first CUDA device that is visible.
        checkpoint_every_steps, checkpoint_every_s: when a checkpoint is written inside a pass;
            None: never.
    """

    use_gpu: bool = False
    checkpoint_every_steps: int | None = None
    checkpoint_every_s: float | None = None
