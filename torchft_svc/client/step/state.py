"""The pieces of state that a group heals by, and the gate that protects them from readers."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchft_svc.client.checkpointing.encoding.shards import put_together, take_apart
from torchft_svc.client.checkpointing.encoding.tree import map_nodes
from torchft_svc.client.step.assignments import Assignments
from torchft_svc.core.limits import MAX_INT64
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded, TornState

log = logging.getLogger(__name__)

DEFAULT_KEY = "default"
MANAGER_KEY = "torchft"
USER_KEY = "user"
EARLY_KEY = "torchft.early"
# The only key of a dict that replaces a tensor that was sent early.
_EARLY_MARK = "torchft.early_tensor"
_TRAINED = "trained"  # a 1 or a 0 for each parameter
_SOURCE = "the group healed from"
_NO_STATE = "it is not the state of a replica group"
_KEEP = (
    "the optimizer and the wrapper of the model still use the former parameters, so this group "
    "would train nothing any more: copy the state into the parameters, with load_state_dict() and "
    "without assign=True"
)


@dataclass(frozen=True, slots=True)
class _Piece:
    load: Callable[[Any], None]
    save: Callable[[], Any]


class ReadGate:
    """A gate that is shut while the state is being changed and must not be read."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._shut = False
        self._readers: Counter[int] = Counter()  # by their threads

    def is_reading(self) -> bool:
        """Whether this thread reads the state."""
        return self._readers[threading.get_ident()] > 0

    def open(self) -> None:
        with self._lock:
            if self._shut:
                self._shut = False
                self._changed.notify_all()

    def shut(self, timeout_s: float) -> None:
        """Block new readers, and wait for the present ones.

        Raises:
            DeadlineExceeded: they still read after ``timeout_s``; the gate is left as it was.
        """
        with self._lock:
            before, self._shut = self._shut, True
            if not self._readers:
                return
            if not self._changed.wait_for(lambda: not self._readers, timeout_s):
                self._shut = before
                self._changed.notify_all()
                raise DeadlineExceeded("waiting for readers of the state", timeout_s)

    @contextlib.contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Allow the block to read the state; a thread may nest such blocks.

        Raises:
            DeadlineExceeded: the gate was shut for ``timeout_s`` seconds.
        """
        thread = threading.get_ident()
        with self._lock:
            is_nested = thread in self._readers
            if not is_nested and not self._changed.wait_for(lambda: not self._shut, timeout_s):
                raise DeadlineExceeded("reading the state", timeout_s, "it is being changed")
            self._readers[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[thread] -= 1
                if not self._readers[thread]:
                    del self._readers[thread]
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class EarlyTensors:
    """Live tensors that only an update changes, and their numbers by identity."""

    tensors: list[torch.Tensor]  # kept alive, so that their memory is not reused
    numbers: dict[tuple[Any, ...], int]

    def ordered(self, trained: set[int]) -> EarlyTensors:
        """The tensors in another order: first those whose memory is not ``trained``.

        So a chunk of frozen parameters has no parameter between them that changes (rule K2).
        """
        order = sorted(range(len(self.tensors)), key=lambda n: _storage(self.tensors[n]) in trained)
        places = {number: place for place, number in enumerate(order)}
        numbers = {identity: places[number] for identity, number in self.numbers.items()}
        return EarlyTensors([self.tensors[number] for number in order], numbers)

    @property
    def state(self) -> dict[str, Any]:
        """The tensors as a state that can be sent."""
        return {EARLY_KEY: self.tensors}


class StateRegistry:
    """Named pieces of state, each with functions that save and load it.

    ``load`` and ``save`` are those of the unnamed first piece; both or neither.
    """

    def __init__(
        self, load: Callable[[Any], None] | None = None, save: Callable[[], Any] | None = None
    ) -> None:
        self._pieces: dict[str, _Piece] = {}
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._check: Callable[[object], None] | None = None
        self._watched: Callable[[], list[nn.Parameter]] = list
        self._replaced: Callable[[], list[str]] = list
        self.gate = ReadGate()
        if load is not None or save is not None:
            self.register(DEFAULT_KEY, load, save)

    def register(
        self, key: str, load: Callable[[Any], None] | None, save: Callable[[], Any] | None
    ) -> None:
        """Add a piece.

        Raises:
            ConfigError: the key is taken or empty, a function is not callable, or the state
                contains a value that cannot be sent.
        """
        if not isinstance(key, str) or not key:
            raise ConfigError("key", key, "a piece of state is registered under a name")
        if key in self._pieces:
            raise ConfigError("key", key, "another piece of state has this name")
        for name, function in (("load_state_dict", load), ("state_dict", save)):
            if not callable(function):
                raise ConfigError(name, function, "a function is needed")
        assert load is not None
        assert save is not None
        piece = _Piece(load, save)
        self._check_piece(key, piece)
        self._pieces[key] = piece

    def check_with(self, check: Callable[[object], None]) -> None:
        """Check the present pieces now, and later ones when they are registered.

        Raises:
            ConfigError: from ``check``; the message names the path.
        """
        self._check = check
        for key, piece in self._pieces.items():
            self._check_piece(key, piece)

    def _check_piece(self, key: str, piece: _Piece) -> None:
        if self._check is None:
            return
        try:
            state = take_apart({key: piece.save()})
        except Exception:  # the state may not exist yet; the first round checks again
            log.debug("the state %r cannot be checked yet", key, exc_info=True)
            return
        self._check(state)

    def collect(self, counters: dict[str, int], timeout_s: float) -> dict[str, Any]:
        """The whole state that other groups heal by; its tensors are live, not copies."""
        with self.gate.reading(timeout_s):
            pieces = take_apart(self.save_all())
            trained = "".join("01"[parameter.requires_grad] for parameter in self._watched())
        mine = {**counters, _TRAINED: trained} if trained else counters
        return {USER_KEY: pieces, MANAGER_KEY: mine}

    def watch(
        self, parameters: Callable[[], list[nn.Parameter]], replaced: Callable[[], list[str]]
    ) -> None:
        """Make ``requires_grad`` of ``parameters()`` a part of the state.

        ``replaced()``: the names of those that are not the model's any more.
        """
        self._watched, self._replaced = parameters, replaced

    def save_all(self) -> dict[str, Any]:
        """Return what the functions of the program return, by the names of the pieces."""
        return {key: piece.save() for key, piece in self._pieces.items()}

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the state of ``optimizer`` changes only in its step.

        Only while the program keeps it: one that it has replaced is no part of the state.
        """
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The registered optimizers that still exist, in the order of registration."""
        return [each for ref in self._optimizers if (each := ref()) is not None]

    def updated_parameters(self) -> list[torch.Tensor]:
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def holds_any(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of ``tensors`` shares its memory with the state."""
        return bool(self._held_storages() & _storages(list(tensors)))

    def missing(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``tensors`` whose memory is no part of the state."""
        held = self._held_storages()
        return [each for each in tensors if not held.issuperset(_storages([each]))]

    def collect_copied(self, counters: dict[str, int], timeout_s: float) -> dict[str, Any]:
        """Collect the whole state, with copies of what may change outside of an update."""
        owned = self._owned_storages()
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and _storage(value) not in owned:
                return copies.setdefault(_identity(value), value.detach().clone())
            if isinstance(value, np.ndarray | set | bytearray):
                return copy.copy(value)
            return value

        with self.gate.reading(timeout_s):  # the copies, too, are of one moment
            state: dict[str, Any] = map_nodes(self.collect(counters, timeout_s), copied)
        return state

    def collect_early(self, timeout_s: float) -> EarlyTensors:
        """The tensors of the state that only an update changes; live, not copies."""
        return self._find_early(self.collect({}, timeout_s))

    def _find_early(self, state: dict[str, Any]) -> EarlyTensors:
        owned = self._owned_storages()
        early = EarlyTensors([], {})

        def number_tensor(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and _storage(value) in owned:
                number = early.numbers.setdefault(_identity(value), len(early.tensors))
                if number == len(early.tensors):
                    early.tensors.append(value)
            return value

        map_nodes(state, number_tensor)
        return early.ordered(self._trained_storages())

    def collect_rest(
        self, early: EarlyTensors, counters: dict[str, int], timeout_s: float
    ) -> dict[str, Any]:
        """Collect the whole state, with a mark in place of each unchanged ``early`` tensor."""
        return _without(early, self.collect(counters, timeout_s))

    def collect_deferred(self, counters: dict[str, int], timeout_s: float) -> dict[str, Any]:
        """Collect the whole state, with marks for the tensors that `collect_early` would find now;
        the program's functions are called once."""
        with self.gate.reading(timeout_s):  # no update changes a tensor between the two
            state = self.collect(counters, timeout_s)
            return _without(self._find_early(state), state)

    def _trained_storages(self) -> set[int]:
        """The memory that each update changes."""
        trained: list[Any] = [each for each in self.updated_parameters() if each.requires_grad]
        for optimizer in self.optimizers:
            trained += list(optimizer.state.values())
        return _storages(trained)

    def _owned_storages(self) -> set[int]:
        held: list[Any] = self.updated_parameters()
        for optimizer in self.optimizers:
            held += list(optimizer.state.values())
        return _storages(held)

    def check(self, state: Any, source: str) -> dict[str, int]:
        """The counters in a ``state`` that was fetched from ``source``.

        Raises:
            CheckpointError: it does not match the state of this worker.
        """
        if not isinstance(state, dict) or not {USER_KEY, MANAGER_KEY} <= state.keys():
            raise CheckpointError(source, _NO_STATE)
        theirs, ours = set(state[USER_KEY]), set(self._pieces)
        if theirs != ours:
            raise CheckpointError(
                source,
                f"it has the state of {_names(theirs)}, here {_names(ours)} is registered",
            )
        counters: dict[str, int] = state[MANAGER_KEY]
        num_theirs, num_ours = len(state[MANAGER_KEY].get(_TRAINED, "")), len(self._watched())
        if num_theirs and num_ours and num_theirs != num_ours:
            raise CheckpointError(
                source, f"it trains {num_theirs} parameters of a wrapped model, here are {num_ours}"
            )
        return counters

    def load(self, state: dict[str, Any]) -> bool:
        """Load a checked state; whether other parameters are trained now than before.

        Every piece is checked before the first one is loaded.

        Raises:
            CheckpointError: it is sharded differently from this worker's; nothing was loaded.
            ConfigError: a load function has replaced parameters, so that this group would not
                train any more; the state is loaded.
            TornState: a load function raised; torch's functions may have loaded a part then.
        """
        pieces = put_together(state[USER_KEY], self.save_all, _SOURCE)
        replaced, apart = self._replaced(), self._kept_apart()
        updated, assigned = set(map(id, self.updated_parameters())), Assignments()
        with assigned.watch():
            for key, piece in self._pieces.items():
                try:
                    piece.load(pieces[key])
                except Exception as error:
                    raise TornState(_SOURCE, f"{key!r} cannot be loaded: {error!r}") from error
        gone = [name for name in self._replaced() if name not in replaced]
        gone = gone or assigned.find_replaced(updated)
        held = self._held_storages() if apart and not gone else set()
        if held:
            gone += [each for each, tensors in apart if not held.issuperset(_storages(tensors))]
        if gone:
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            raise ConfigError("load_state_dict", f"a function that replaced {gone[0]}{more}", _KEEP)
        return self._train(state[MANAGER_KEY].get(_TRAINED, ""))

    def _kept_apart(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Parameters of registered optimizers that no wrapper sums, if they are in the state.

        For each group of an optimizer, its name and the parameters.
        """
        watched = set(map(id, self._watched()))
        groups = [
            (f"parameters of {type(optimizer).__name__}", group["params"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        apart = [(name, [p for p in params if id(p) not in watched]) for name, params in groups]
        if not any(params for _, params in apart):
            return []
        held = self._held_storages()
        inside = [(name, [p for p in params if held & _storages([p])]) for name, params in apart]
        return [(name, params) for name, params in inside if params]

    def _held_storages(self) -> set[int]:
        """The memory of the state, which is saved to see that; nothing if a function fails.

        For the training thread, also while the gate is shut.
        """
        try:
            return _storages(self.save_all())
        except Exception:
            log.debug("the state cannot be saved now", exc_info=True)
            return set()

    def _train(self, flags: str) -> bool:
        """Train exactly the parameters whose flag is 1; returns whether that is a change."""
        changed = False
        for parameter, flag in zip(self._watched(), flags, strict=False):
            if parameter.requires_grad != (flag == "1"):
                parameter.requires_grad_(flag == "1")
                changed = True
        return changed


def counters_of_copy(state: Any, source: str) -> dict[str, int]:
    """Return the counters in a copy of a worker's state, as ``source`` has sent it.

    Raises:
        CheckpointError: it is no such state, or has counters that no worker has.
    """
    if not isinstance(state, dict) or not isinstance(state.get(USER_KEY), dict):
        raise CheckpointError(source, _NO_STATE)
    counters = state.get(MANAGER_KEY)
    if not isinstance(counters, dict):
        raise CheckpointError(source, _NO_STATE)
    for name in ("step", "quorum_id", "batches_committed"):
        if type(counters.get(name)) is not int or not 0 <= counters[name] <= MAX_INT64:
            raise CheckpointError(source, f"its counter {name!r} is {counters.get(name)!r:.40}")
    return counters


def size_of(state: Any) -> int:
    """The bytes of the tensors in ``state``."""
    return sum(each.nbytes for each in tree_leaves(state) if isinstance(each, torch.Tensor))


def join(early: Any, rest: Any, source: str) -> Any:
    """The state, from an `EarlyTensors.state` and the result of `collect_rest`.

    Raises:
        CheckpointError: they do not belong together.
    """
    tensors = early[EARLY_KEY]

    def put(value: Any) -> Any:
        if type(value) is not dict or value.keys() != {_EARLY_MARK}:
            return value
        number = value[_EARLY_MARK]
        if type(number) is not int or not 0 <= number < len(tensors):
            raise CheckpointError(source, "its two parts do not belong together")
        return tensors[number]

    return map_nodes(rest, put)


def _without(early: EarlyTensors, state: dict[str, Any]) -> dict[str, Any]:
    """The ``state`` with a mark in place of each unchanged ``early`` tensor."""

    def refer(value: Any) -> Any:
        number = early.numbers.get(_identity(value)) if _may_be_owned(value) else None
        return value if number is None else {_EARLY_MARK: number}

    rest: dict[str, Any] = map_nodes(state, refer)
    return rest


def _may_be_owned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _storages(state: Any) -> set[int]:
    """The memory of the tensors in ``state``."""
    found: set[int] = set()

    def add_storage(value: Any) -> Any:
        if _may_be_owned(value):
            found.add(_storage(value))
        return value

    map_nodes(take_apart(state), add_storage)
    return found - {0}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors with the same memory and content.

    Writes through ``.data``, and by code outside of torch, are not detected.
    """
    version = -1 if tensor.is_inference() else tensor._version
    place = (_storage(tensor), int(tensor.storage_offset()), str(tensor.device))
    return (*place, tuple(tensor.shape), tensor.stride(), tensor.dtype, version)


def _names(keys: set[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys)) or "nothing"
