"""The pieces of state that a group heals by, and who may read them when."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchft_svc.client.shards import put_together, take_apart
from torchft_svc.errors import CheckpointError, ConfigError, DeadlineExceeded, TornState

log = logging.getLogger(__name__)

DEFAULT_KEY = "default"
MANAGER_KEY = "torchft"
USER_KEY = "user"
_SOURCE = "the group healed from"


@dataclass(frozen=True, slots=True)
class _Piece:
    load: Callable[[Any], None]
    save: Callable[[], Any]


class ReadGate:
    """While the gate is shut nobody may read the state, because somebody is changing it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shut = False
        self._num_readers = 0

    def open(self) -> None:
        """Reading is allowed from here on."""
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    def shut(self, timeout_s: float) -> None:
        """Let no new reader in, and wait for those inside.

        Raises:
            DeadlineExceeded: they still read after ``timeout_s`` seconds; the gate stays as it was.
        """
        with self._changed:
            before, self._shut = self._shut, True
            if not self._changed.wait_for(lambda: self._num_readers == 0, timeout_s):
                self._shut = before
                self._changed.notify_all()
                raise DeadlineExceeded("waiting for readers of the state", timeout_s)

    @contextlib.contextmanager
    def reading(self, timeout_s: float) -> Iterator[None]:
        """Read inside this block.

        Raises:
            DeadlineExceeded: the gate was shut for ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._shut, timeout_s):
                raise DeadlineExceeded("reading the state", timeout_s, "it is being changed")
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()


class StateRegistry:
    """Named pieces of state, each with a function that saves and one that loads it.

    ``load`` and ``save`` are those of the first piece, which needs no name; both or neither.
    """

    def __init__(
        self, load: Callable[[Any], None] | None = None, save: Callable[[], Any] | None = None
    ) -> None:
        self._pieces: dict[str, _Piece] = {}
        self._check: Callable[[object], None] | None = None
        self.gate = ReadGate()
        if load is not None or save is not None:
            self.register(DEFAULT_KEY, load, save)

    def register(
        self, key: str, load: Callable[[Any], None] | None, save: Callable[[], Any] | None
    ) -> None:
        """Add a piece.

        Raises:
            ConfigError: the key is taken, empty, or a function cannot be called; or the state
                holds what cannot be sent.
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
        self._look_at(key, piece)
        self._pieces[key] = piece

    def check_with(self, check: Callable[[object], None]) -> None:
        """From here on every piece is looked at when it is registered; those here already are now.

        Raises:
            ConfigError: from ``check``; the sentence names the path.
        """
        self._check = check
        for key, piece in self._pieces.items():
            self._look_at(key, piece)

    def _look_at(self, key: str, piece: _Piece) -> None:
        if self._check is None:
            return
        try:
            state = take_apart({key: piece.save()})
        except Exception:  # what it saves may not be there yet; the first round looks again
            log.debug("the state %r cannot be looked at yet", key, exc_info=True)
            return
        self._check(state)

    def collect(self, counters: dict[str, int], timeout_s: float) -> dict[str, Any]:
        """The whole state, as others heal by it; its tensors are the live ones, not copies."""
        with self.gate.reading(timeout_s):
            pieces = take_apart(self._save_all())
        return {USER_KEY: pieces, MANAGER_KEY: counters}

    def _save_all(self) -> dict[str, Any]:
        return {key: piece.save() for key, piece in self._pieces.items()}

    def check(self, state: Any, source: str) -> dict[str, int]:
        """The counters in a ``state`` that was fetched from ``source``.

        Raises:
            CheckpointError: it is not what `collect` makes here.
        """
        if not isinstance(state, dict) or not {USER_KEY, MANAGER_KEY} <= state.keys():
            raise CheckpointError(source, "it is not the state of a replica group")
        theirs, ours = set(state[USER_KEY]), set(self._pieces)
        if theirs != ours:
            raise CheckpointError(
                source,
                f"it has the state of {_names(theirs)}, here {_names(ours)} is registered",
            )
        counters: dict[str, int] = state[MANAGER_KEY]
        return counters

    def load(self, state: dict[str, Any]) -> None:
        """Put a checked state in place.

        Every piece is looked at before the first one is loaded.

        Raises:
            CheckpointError: it is sharded in another way than this worker's; nothing was loaded.
            TornState: a load function raised, as torch's do after they have loaded what fits.
        """
        pieces = put_together(state[USER_KEY], self._save_all, _SOURCE)
        for key, piece in self._pieces.items():
            try:
                piece.load(pieces[key])
            except Exception as error:
                raise TornState(_SOURCE, f"{key!r} cannot be loaded: {error!r}") from error


def readable_size(state: Any) -> str:
    """For people, how large a fetched state's tensors are."""
    size = float(sum(each.nbytes for each in _tensors(state)))
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3f} GB"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _names(keys: set[str]) -> str:
    return ", ".join(repr(key) for key in sorted(keys)) or "nothing"
