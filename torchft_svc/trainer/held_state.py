"""The state of training in a worker: what belongs to it, and when it is that of a whole step.

A step is whole when the program asks for the next batch. An update that has begun cannot be undone,
so a state is handed out either before the update begins, or after the step is whole. Before it,
parameters and the optimizer's state are those of the last step; all else that a forward pass or the
program may have changed meanwhile (buffers, learning rates, schedulers) is taken from copies, which
are made after each step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.state import MODEL, TrainingState, check_fits


class StepAbandoned(BaseException):
    """Raised in the main thread of a worker whose trainer wants it to end.

    Not an `Exception`: a training loop that survives errors must not survive this.
    """


class _Phase(Enum):
    WHOLE = auto()  # no update has begun since the last step
    UPDATING = auto()
    UPDATED = auto()  # the update is applied; a scheduler may follow


# Names of the parts of a state; of one model `MODEL`, and so on.
_MODELS, _OPTIMIZERS, _SCHEDULERS, _EXTRAS = "models", "optimizers", "schedulers", "registered"
_ONE = {_MODELS: MODEL, _OPTIMIZERS: "optimizer", _SCHEDULERS: "scheduler"}


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The trained objects, or the states of them, each a list."""

    models: Sequence[Any] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)

    def states(self) -> _Pieces:
        return _Pieces(
            [each.state_dict() for each in self.models],
            [each.state_dict() for each in self.optimizers],
            [each.state_dict() for each in self.schedulers],
            {name: each.state_dict() for name, each in self.extras.items()},
        )

    def to_state(self, position: Position) -> TrainingState:
        """The `TrainingState` of these states."""
        parts: dict[str, Any] = {}
        for name, one in _ONE.items():
            states = getattr(self, name)
            if states:
                parts.update({one: states[0]} if len(states) == 1 else {name: list(states)})
        if self.extras:
            parts[_EXTRAS] = dict(self.extras)
        return TrainingState(position=position, parts=parts)

    def load(self, state: TrainingState) -> None:
        """Load ``state``; the models are checked before anything changes.

        Raises:
            ConfigError: it does not fit.
        """
        found = _pieces_in(state)
        for name in _ONE:
            _check_number(name, getattr(found, name), getattr(self, name))
        if found.extras.keys() != self.extras.keys():
            registered = f"the program has registered {sorted(self.extras)}"
            raise ConfigError("state", sorted(found.extras), registered)
        pair_models(self.models, state)
        for name in (*_ONE, "extras"):
            pieces, states = getattr(self, name), getattr(found, name)
            keys = states if name == "extras" else range(len(states))
            for key in keys:
                _load(pieces[key], states[key])


def pair_models(
    models: Sequence[nn.Module], state: TrainingState
) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    """Each model with its part of ``state``.

    Raises:
        ConfigError: it does not fit.
    """
    states = _pieces_in(state).models
    _check_number(_MODELS, states, models)
    for model, its_state in zip(models, states, strict=True):
        check_fits(its_state, model)
    return list(zip(models, states, strict=True))


def _check_number(name: str, states: Sequence[Any], pieces: Sequence[Any]) -> None:
    if len(states) != len(pieces):
        raise ConfigError("state", f"of {len(states)} {name}", f"the program has {len(pieces)}")


def _pieces_in(state: TrainingState) -> _Pieces:
    lists: dict[str, Any] = {
        name: [state.parts[one]] if one in state.parts else state.parts.get(name, [])
        for name, one in _ONE.items()
    }
    return _Pieces(**lists, extras=state.parts.get(_EXTRAS, {}))


def _load(piece: Any, state: Any) -> None:
    try:
        piece.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        name = type(piece).__name__
        raise ConfigError("state", f"of a {name}", f"it does not fit: {error}") from error


class _Buffers:
    """Copies of the buffers of a model; made in every step, so into the same memory."""

    def __init__(self, model: nn.Module) -> None:
        # A program may replace a buffer by another tensor, but hardly a module.
        self._places = [
            (f"{prefix}." if prefix else "", module._buffers)
            for prefix, module in model.named_modules(remove_duplicate=False)
        ]
        self.copies: dict[str, torch.Tensor] = {}

    def copy_buffers(self) -> None:
        present = {
            prefix + name: buffer.detach()
            for prefix, buffers in self._places
            for name, buffer in buffers.items()
            if buffer is not None
        }
        if [_likeness(each) for each in present.values()] == [
            _likeness(each) for each in self.copies.values()
        ]:
            if present:
                torch._foreach_copy_(list(self.copies.values()), list(present.values()))
        else:
            self.copies = {name: each.clone() for name, each in present.items()}


def _likeness(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of what may change outside of an update, as it was after the last step."""

    buffers: list[_Buffers]
    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]
    extras: dict[str, Any]

    @classmethod
    def of(cls, parts: _Pieces, buffers: list[_Buffers]) -> _Copies:
        for each in buffers:
            each.copy_buffers()
        return cls(
            buffers=buffers,
            groups=[_settings(optimizer) for optimizer in parts.optimizers],
            schedulers=[copy.deepcopy(each.state_dict()) for each in parts.schedulers],
            extras={name: _copied(each.state_dict()) for name, each in parts.extras.items()},
        )

    def put_into(self, states: _Pieces) -> _Pieces:
        """``states``, with what they were after the last step."""
        for its_state, buffers in zip(states.models, self.buffers, strict=True):
            copies = buffers.copies
            its_state.update((name, copies[name]) for name in its_state if name in copies)
        for its_state, groups in zip(states.optimizers, self.groups, strict=True):
            for group, before in zip(its_state["param_groups"], groups, strict=True):
                group.update(before)
        return replace(states, schedulers=self.schedulers, extras=self.extras)


class HeldState:
    """Holds what is trained, and knows its last whole step.

    The main thread trains; any other may call `abandon`, `whole` and `position`.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._lock = threading.RLock()
        self._parts = _Pieces()
        self._num_updates = 0  # in the step that is under way
        self._most_updates = 0  # in any step; 0: none has ended yet
        self._before: TrainingState | None = None  # the updates of a step that may be several
        self._copies = _Copies.of(self._parts, [])
        self._phase = _Phase.WHOLE
        self._position = self._drawn = Position()
        self._pending: TrainingState | None = None
        self._hooked: list[Any] = []
        self._scheduler_moves = False  # with each step
        self.abandoned = ""
        self.is_refused = False  # the state to begin with could not be read, or does not fit

    @property
    def position(self) -> Position:
        """The position after the last whole step."""
        return self._position

    @property
    def drawn(self) -> Position:
        """The position after the batch that was drawn last; its ``step`` does not count."""
        return self._drawn

    @property
    def reached(self) -> Position:
        """The position after the update that was applied last, whose step may not be whole yet."""
        if self._phase is _Phase.UPDATED:
            return replace(self._drawn, step=self._position.step + 1)
        return self._position

    # -- what is trained -------------------------------------------------------------------------

    def begin_with(self, state: TrainingState) -> None:
        """Load ``state`` as soon as there is something to load it into.

        Raises:
            ConfigError: it does not fit.
        """
        with self._lock:
            self._pending = state
            self._position = self._drawn = state.position
            self._load_pending()

    def own(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        extras: Mapping[str, Any] | None = None,
        *,
        updates_once: bool = False,
    ) -> None:
        """Hold what is trained from now on; loads a state that waits for it.

        ``updates_once``: no step is more than one update of each optimizer. If that is not known,
        the first step shows it.

        Raises:
            ConfigError: that state does not fit.
        """
        with self._lock:
            if self._parts.models and self._pending is None:  # the program was started again
                self._pending = _all_of(self._parts, self._position)
            for handle in self._hooked:
                handle.remove()
            self._hooked = [
                handle
                for optimizer in optimizers
                for handle in (
                    optimizer.register_step_pre_hook(self._begin_update),
                    optimizer.register_step_post_hook(self._end_update),
                )
            ]
            self._parts = _Pieces(models, optimizers, schedulers, dict(extras or {}))
            self._phase = _Phase.WHOLE
            self._num_updates, self._most_updates = 0, int(updates_once)
            self._copies = replace(self._copies, buffers=[_Buffers(model) for model in models])
            self._load_pending()
            self._copy_rest()

    def _load_pending(self) -> None:
        if self._pending is not None and self._parts.models:
            self.is_refused = True
            self._parts.load(self._pending)
            self.is_refused = False
            self._pending = None
            self._copy_rest()

    # -- steps -----------------------------------------------------------------------------------

    def draw(self, position: Position) -> None:
        """The samples up to ``position`` are in the batches of the step that is under way."""
        self._drawn = position

    def complete(self, *, closes_pass: bool = False) -> bool:
        """The program is between two steps; whether an update was applied since the last call.

        If not, its samples are still in the accumulated gradients: see `undraw`.

        Raises:
            StepAbandoned: see `abandon`.
        """
        with self._lock:
            updated = self._phase is _Phase.UPDATED
            if updated:
                self._count()
            if closes_pass:
                epoch = self._position.epoch + 1
                self._position = replace(self._position, epoch=epoch, num_samples=0)
                self._drawn = self._position
            if self._drawn == self._position:
                self._copy_rest()
            self.check()
            return updated

    def undraw(self) -> None:
        """The step was discarded: its samples are drawn again."""
        self._drawn = self._position

    def check(self) -> None:
        """Raise `StepAbandoned` if the trainer wants this worker to end."""
        if self.abandoned:
            raise StepAbandoned(self.abandoned)

    def _count(self) -> None:
        self._position = replace(self._drawn, step=self._position.step + 1)
        self._drawn = self._position
        self._phase = _Phase.WHOLE
        self._most_updates = max(self._most_updates, self._num_updates)
        self._num_updates = 0

    def _copy_rest(self) -> None:
        before = self._copies.schedulers
        self._copies = _Copies.of(self._parts, self._copies.buffers)
        if self._position.num_samples:  # not after a pass, when other schedulers move
            self._scheduler_moves = _moved(before, self._copies.schedulers)

    def _begin_update(self, *_: Any) -> None:
        """Wait for the gradients before the optimizer's step, because they may fail later."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        with self._lock:
            if self._phase is _Phase.UPDATED and self._drawn != self._position:
                self._most_updates = max(self._most_updates, self._num_updates + 1)
            self.check()
            if self._phase is _Phase.UPDATED and self._drawn == self._position:
                self._count()  # a program that draws its batches elsewhere
                self._copy_rest()
            if self._phase is _Phase.WHOLE:
                self._before = self._copy_before()
            self._phase = _Phase.UPDATING

    def _copy_before(self) -> TrainingState | None:
        """A copy of the last whole state, if the step may be several updates."""
        several = len(self._parts.optimizers) > 1 or self._most_updates > 1
        if self._most_updates == 1 and not several:
            return None
        # Where this is only not known yet, do not fill the memory of the device.
        device = None if several else torch.device("cpu")
        state = self._last_whole()
        return replace(state, parts=_copied(state.parts, device))

    def _last_whole(self) -> TrainingState:
        return self._copies.put_into(self._parts.states()).to_state(self._position)

    def _end_update(self, *_: Any) -> None:
        with self._lock:
            self._phase = _Phase.UPDATED
            self._num_updates += 1

    # -- handing it out --------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """End the main thread before its next update, or after this one."""
        with self._lock:
            self.abandoned = self.abandoned or reason

    def whole(self, *, by_main: bool = True) -> TrainingState | None:
        """The state after the last whole step; None: there is none at the moment.

        Its tensors are not copied: they may change in the next update, which waits while the caller
        holds `holding`. ``by_main``: called by the main thread, which does not go on with the step.
        """
        with self._lock:
            if self._pending is not None:
                return self._pending
            if not self._parts.models:
                return None
            if self._phase is _Phase.WHOLE:
                return self._last_whole()
            if by_main and self._is_complete():
                self._count()
                return self._parts.states().to_state(self._position)
            return self._before

    def holding(self) -> AbstractContextManager[Any]:
        """A lock, inside of which no update begins."""
        return self._lock

    def _is_complete(self) -> bool:
        """Whether the step that is under way is whole, although the program has not ended it."""
        if self._phase is not _Phase.UPDATED or len(self._parts.optimizers) > 1:
            return False
        if self._parts.extras or self._most_updates != 1:
            return False
        schedulers = [each.state_dict() for each in self._parts.schedulers]
        return not self._scheduler_moves or _moved(self._copies.schedulers, schedulers)

    # -- per-step mode ---------------------------------------------------------------------------

    def live(self) -> TrainingState:
        """The present state, for groups that heal: read between an update and the next one."""
        return self._parts.states().to_state(self.reached)

    def heal(self, state: TrainingState) -> None:
        """Load the state of another group."""
        with self._lock:
            self._parts.load(state)
            self._position = self._drawn = state.position
            self._phase, self._num_updates = _Phase.WHOLE, 0
            self._copy_rest()


def _all_of(parts: _Pieces, position: Position) -> TrainingState:
    """A copy."""
    state = parts.states().to_state(position)
    return replace(state, parts=_copied(state.parts))


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: _copied(value) if isinstance(value, torch.Tensor | list | dict) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _copied(state: Any, device: torch.device | None = None) -> Any:
    """A copy; its tensors are on ``device`` (default: where they were)."""

    def clone(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(device or value.device, copy=True)
        return copy.deepcopy(value)

    return tree_map(clone, state)


def _moved(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> bool:
    """Whether schedulers have moved."""
    return [each.get("last_epoch") for each in before] != [each.get("last_epoch") for each in after]
