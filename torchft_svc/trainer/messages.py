"""The messages between a trainer and its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FaultTolerance = Literal["per-step", "restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The position of training; equal for all workers that have done the same steps.

    Args:
        epoch: number of passes over the data that have been completed.
        step: number of optimizer steps since the beginning of training.
        num_samples: samples that this pass has used, on all workers together.
    """

    epoch: int = 0
    step: int = 0
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StateHandle:
    """The place of a state that a worker offered; only the backend knows what it means."""

    position: Position
    where: Any


# From the trainer to a worker. All but `Abandon` are carried out one after another.


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinWorld:
    """Form a process group with the other workers (``restart``), or join the job (``per-step``).

    Answered by `Joined`, or by `Failed`.

    Args:
        world: number of the world, which grows with each one.
        rank, world_size: of this worker (``per-step``: the index of its replica group, and the
            number of workers asked for).
        address: ``host:port`` of the store of this world, or of the lighthouse (``per-step``).
            Empty: open a store, and send its address (`StoreOpened`) before joining.
        state: to begin with; None: as it was created.
        is_spare: stand by until a place among the others is free (``per-step``).
    """

    world: int
    rank: int
    world_size: int
    address: str
    state: StateHandle | None = None
    checkpoint: str = ""
    is_spare: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Train to the end of the pass, or for ``num_steps`` more steps. Answered by `Finished`.

    Args:
        command: number of this command, in its answer.
        checkpoint_dir: where checkpoints are written; empty: none are, and the trainer keeps the
            states that come with reports.
        until: pass and step at which to stop; a worker that joins late stops there, too.
    """

    command: int
    until_epoch: int
    until_step: int | None
    checkpoint_dir: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validate:
    """Go once through part ``part`` of ``num_parts`` of the validation data.

    Answered by `Finished`, whose result is a mapping with ``num_samples`` of this part. Workers
    do not wait for one another in it.
    """

    command: int
    num_steps: int | None
    part: int = 0
    num_parts: int = 1
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveState:
    """Offer the whole state. Answered by `Finished`, whose result is a `StateHandle`.

    None: the program has prepared nothing yet.
    """

    command: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Leave the world in good order, and end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abandon:
    """Another worker is lost, or workers are added: end the step now, whatever it waits for.

    Offer the state after the last completed step (`StateOffered`), then end. A worker that has not
    joined, or whose last step is neither undone nor complete, ends without an offer.
    """

    reason: str


# From a worker to the trainer.


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """The worker runs, and has created what it trains."""

    pid: int
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOpened:
    """This worker hosts the store of ``world``."""

    world: int
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """This worker is in ``world``, and has loaded the state it was to begin with."""

    world: int
    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Sent at the beginning of each step and at least every `BEAT_S`: the worker lives."""

    position: Position


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """``metrics`` that the program reported, at ``position``; maybe with the state there."""

    position: Position
    metrics: Mapping[str, Any]
    state: StateHandle | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointWritten:
    """This worker has written a checkpoint, which can be resumed from."""

    position: Position
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StateOffered:
    """Answers `Abandon`: the state after the last completed step."""

    state: StateHandle


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """``command`` is done."""

    command: int
    position: Position
    result: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The program of the user raised an error.

    The worker waits some seconds for `Abandon`, to offer its last whole state, before it ends.

    Args:
        kind: qualified name of the class of the error.
        message: its words.
        traceback: as Python prints it.
        pickled: the error itself; empty if it cannot be pickled.
        position: where it happened.
        is_peers: a collective failed, which another worker may have caused.
        place: the class of the error, and the line that has raised it.
        is_final: a restart cannot mend it, such as a `ConfigError`.
        refuses_state: the state to begin with could not be read, or does not fit.
    """

    kind: str
    message: str
    traceback: str
    pickled: bytes
    position: Position
    is_peers: bool = False
    place: str = ""
    is_final: bool = False
    refuses_state: bool = False


class BareError:
    """Pickles as ``error``, whose class cannot be called with its arguments alone."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _bare, (type(self._error), self._error.args, dict(self._error.__dict__))


def _bare(kind: type[BaseException], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


# How often a worker reports at least that it lives.
BEAT_S = 0.5

Command = JoinWorld | Train | Validate | GiveState | End | Abandon
Answer = (
    Started
    | StoreOpened
    | Joined
    | Progress
    | Reported
    | CheckpointWritten
    | StateOffered
    | Finished
    | Failed
)
