"""Leaves operations of a broken world that gloo does not end (rule L37).

When a connection breaks while gloo sends or receives one part of an operation, gloo forgets that
part: the operation ends at the timeout of the process group, although all of its sockets are shut
down. So a wait is left a moment after the group was cut: a wait from Python, and those inside of
C++ that `DistributedDataParallel` begins, which get a group (`_LeavableGroup`) whose operations can
end before gloo's. The operation goes on in a thread of gloo. Destroying its process group would
wait for it, so that is done on another thread (`_Destroyer`).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchft_svc.host.uninterruptible import UninterruptibleCall, wait_in_slices

_NO_TIMEOUT = timedelta(0)
# Of torch.distributed: what waits in C++ for operations of the process group that it is given.
_WAIT_IN_CPP = "_broadcast_coalesced", "_verify_params_across_processes"
# Process groups that wait to be destroyed, each with its connections and threads; a world has one
# or a few, and is left once per failure.
MAX_GROUPS = 64
# How long a group is kept for another owner, such as the program's model: gloo's own timeout.
_OWNED_S = 1800.0
# How soon the last owner of a destroyed group is noticed: at first, and later.
_FIRST_LOOK_S, _LOOK_S = 0.005, 1.0
# For a destruction under way; one that waits for a forgotten operation takes far longer.
_EXIT_S = 0.5


class WorldOperations:
    """The operations of the default process group of one world.

    Args:
        why: returns why they are not waited for any more; empty: they are.
    """

    def __init__(self, why: Callable[[], str]) -> None:
        self.why = why
        self._group: weakref.ref[Any] | None = None
        self._lock = threading.Lock()
        self._pending: set[_LeavableWork] = set()  # those that C++ waits for
        self._reason_left = ""

    def follow_group(self) -> None:
        """Watch over the default process group, which was just formed for this world."""
        global _present
        _install()
        _present = self
        self._group = weakref.ref(dist.group.WORLD)
        _destroy_elsewhere()

    def has_group(self, group: Any) -> bool:
        """Whether this is the default process group of this world, and gloo's."""
        return self._group is not None and group is self._group() and _is_gloo_alone()

    def leave_cpp_waits(self, reason: str) -> None:
        """End the waits inside of C++ with an error, also later ones; on any thread.

        Forgotten operations occupy gloo's threads, so later ones may not even begin.
        """
        with self._lock:
            self._reason_left = reason
            pending = list(self._pending)
        for work in pending:
            work.end(dist.DistBackendError(reason))

    def add_pending(self, work: _LeavableWork) -> None:
        """C++ may wait for ``work``, until it ends."""
        with self._lock:
            self._pending.add(work)
            reason = self._reason_left
        if reason:
            work.end(dist.DistBackendError(reason))

    def drop_pending(self, work: _LeavableWork) -> bool:
        """Remove ``work``; whether it was pending, so that its end is still to be reported."""
        with self._lock:
            was_pending = work in self._pending
            self._pending.discard(work)
            return was_pending


@functools.lru_cache(maxsize=1)
def _install() -> None:
    """Replace the waits of this process, from Python and those that DDP begins in C++."""
    original: Any = dist.Work.wait

    def wait(self: dist.Work, timeout: timedelta = _NO_TIMEOUT) -> bool:
        if type(self) is not dist.Work or not _is_gloo_alone():
            return bool(original(self, timeout))
        operation = _Operation(self, functools.partial(original, self), _present.why)
        return operation.wait(timeout)

    def get_leavable_future(self: dist.Work) -> Any:
        """What a communication hook of DDP returns; C++ waits for it."""
        if type(self) is not dist.Work or not _is_gloo_alone():
            return _get_future(self)
        return _LeavableWork(self, _get_future(self), _present).get_future()

    wait.__doc__ = original.__doc__
    dist.Work.wait = wait  # type: ignore[method-assign]
    dist.Work.get_future = get_leavable_future  # type: ignore[method-assign]
    names: Any = dist
    for name in _WAIT_IN_CPP:
        setattr(names, name, _with_leavable_group(getattr(names, name)))
    names.Reducer = _leavable_reducer(names.Reducer)


def _with_leavable_group(function: Any) -> Any:
    """``function``, which is given a group that can be left instead of that of the world."""

    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def call(*args: Any, **named: Any) -> Any:
        return function(*map(_leavable, args), **_leavable_values(named))

    return call


def _leavable_reducer(original: Any) -> Any:
    class LeavableReducer(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            args, named = tuple(map(_leavable, args)), _leavable_values(named)
            given = *args, *named.values()
            # C++ does not keep the Python part of a group.
            self._groups = [each for each in given if isinstance(each, _LeavableGroup)]
            super().__init__(*args, **named)

    LeavableReducer.__doc__ = original.__doc__
    return LeavableReducer


def _leavable_values(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _leavable(value) for name, value in named.items()}


def _leavable(value: Any) -> Any:
    is_group = type(value) is dist.ProcessGroup
    return _LeavableGroup(value, _present) if is_group and _present.has_group(value) else value


class _LeavableGroup(dist.ProcessGroup):
    """Hands operations to ``group``; they end when the world's operations are left, too.

    It has those that C++ calls for data parallel training.
    """

    def __init__(self, group: dist.ProcessGroup, operations: WorldOperations) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._operations = operations

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return a name that is not gloo: DDP's logger would look for its backend here."""
        return "torchft-world"

    def allreduce(self, *args: Any) -> Any:
        return self._launch(self._group.allreduce, args)

    def broadcast(self, *args: Any) -> Any:
        return self._launch(self._group.broadcast, args)

    def allgather(self, *args: Any) -> Any:
        return self._launch(self._group.allgather, args)

    def _launch(self, launch: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        work = launch(*args)
        if any(tensor.device.type != "cpu" for tensor in _tensors(args[0])):
            return work  # its end has to be ordered with the device's other work
        return _LeavableWork(work, _get_future(work), self._operations)


class _LeavableWork(dist.Work):
    """An operation of gloo whose waits end early when its world's operations are left."""

    def __init__(self, work: Any, future: Any, operations: WorldOperations) -> None:
        super().__init__()
        self._work = work  # and with it the tensors that gloo uses
        self._operations = operations
        self._ended: Any = torch.futures.Future()
        # Only an exception in such a function is an error for C++.
        self._result = self._ended.then(_value_or_error)
        operations.add_pending(self)
        future.add_done_callback(self._note_end)

    def end(self, value: Any) -> None:
        """The first call counts; an exception is raised where the operation is waited for."""
        if self._operations.drop_pending(self):
            self._ended.set_result(value)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._result.wait()  # gloo's operation has the timeout of the group
        return True

    def get_future(self) -> Any:
        return self._result

    def is_completed(self) -> bool:
        return bool(self._result.done())

    def result(self) -> Any:
        return self._result.value()

    def _note_end(self, future: Any) -> None:
        try:
            value = future.value()
        except RuntimeError as error:
            value = error
        self.end(value)


def _value_or_error(ended: Any) -> Any:
    value = ended.value()
    if isinstance(value, Exception):
        raise value
    return value


@dataclass(frozen=True)
class _Operation:
    """One that Python waits for."""

    work: Any
    original: Callable[[timedelta], bool]
    why: Callable[[], str]

    def wait(self, timeout: timedelta) -> bool:
        timeout_s = timeout.total_seconds() or float("inf")
        if self._can_be_waited_for_in_slices():
            return wait_in_slices(self.original, self.work.is_completed, self._check, timeout_s)
        call = UninterruptibleCall(lambda: self.original(timeout), "torchft-world-wait")
        return call.result(self._check)

    def _can_be_waited_for_in_slices(self) -> bool:
        """A timeout ends those that have no future: sends, receives, reduce-scatters."""
        try:
            _get_future(self.work)
        except RuntimeError:
            return False
        return True

    def _check(self) -> None:
        reason = self.why()
        if reason:
            raise dist.DistBackendError(reason)


def _destroy_elsewhere() -> None:
    """Destroy the present process groups where no thread of the program waits for it.

    torch drops the store of a group when the group is destroyed, and has all groups of the process
    in its other tables then.
    """
    _, store = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()]
    weakref.finalize(store, _take_destroyed_groups).atexit = False


def _take_destroyed_groups() -> None:
    backends = distributed_c10d._world.pg_backend_config
    groups = [group for group, backend in backends.items() if "nccl" not in backend]
    _destroyer.destroy(groups)


class _Destroyer:
    """Destroys process groups on one thread, when nothing else uses them. Thread-safe.

    The thread waits as long as gloo's operations take, and the groups behind that one wait, too. At
    interpreter exit groups are not destroyed: that would block.

    Args:
        owned_s: how long a group that something else still uses is kept; after that its last owner
            destroys it.
        max_groups: above this number the oldest groups that wait are never destroyed.
    """

    def __init__(self, owned_s: float = _OWNED_S, max_groups: int = MAX_GROUPS) -> None:
        self._owned_s = owned_s
        self._max_groups = max_groups
        # A finalizer calls `destroy`, maybe in the middle of another call of it.
        self._news: queue.SimpleQueue[_Left | None] = queue.SimpleQueue()
        self._waiting: deque[_Left] = deque()
        self._is_exit = False
        self._thread: threading.Thread | None = None
        atexit.register(self.stop)

    def destroy(self, groups: list[Any]) -> None:
        """Take over ``groups``; returns at once."""
        until = time.monotonic() + self._owned_s
        while groups:
            self._news.put(_Left(groups.pop(), until))
        while self._news.qsize() + len(self._waiting) > self._max_groups:
            if not _keep_for_ever(self._waiting, self._news):
                break
        if self._is_exit:
            self._keep_rest()
        elif self._thread is None or not self._thread.is_alive():  # also in a forked child
            self._thread = threading.Thread(
                target=self._run, name="torchft-world-destroyer", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Destroy no more; waits a moment for a destruction under way."""
        self._is_exit = True
        self._news.put(None)
        if self._thread is not None:
            self._thread.join(_EXIT_S)
        self._keep_rest()

    def _keep_rest(self) -> None:
        while _keep_for_ever(self._waiting, self._news):
            pass

    def _run(self) -> None:
        pause_s = _FIRST_LOOK_S
        while not self._is_exit:
            try:
                left = self._news.get(timeout=pause_s if self._waiting else None)
            except queue.Empty:
                pause_s = min(2 * pause_s, _LOOK_S)
            else:
                pause_s = _FIRST_LOOK_S
                if left is not None:
                    self._waiting.append(left)
                del left
            for _ in range(len(self._waiting)):
                if self._is_exit or not self._destroy_next():
                    break

    def _destroy_next(self) -> bool:
        """Destroy the first group that waits, or put it behind the others."""
        try:
            left = self._waiting.popleft()
        except IndexError:  # kept for ever meanwhile
            return False
        # Its attribute and the argument.
        is_free = sys.getrefcount(left.group) <= 2 or time.monotonic() > left.until
        if not is_free:
            self._waiting.append(left)
        return True  # and drops it: gloo is waited for here, without the interpreter's lock


@dataclass(frozen=True)
class _Left:
    """A process group of a world that is over, which something else may use ``until`` an instant
    of the monotonic clock."""

    group: Any
    until: float


def _keep_for_ever(waiting: deque[_Left], news: queue.SimpleQueue[_Left | None]) -> bool:
    """Keep the oldest waiting group for ever; returns whether there is one."""
    try:
        left = waiting.popleft() if waiting else news.get_nowait()
    except (IndexError, queue.Empty):
        return False
    if left is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(left.group))
    return True


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)


def _is_gloo_alone() -> bool:
    """Whether an operation can be left: its connections were cut, so it writes nothing any more.

    Those of subgroups are not known; a wait with a timeout means something else to NCCL.
    """
    groups = distributed_c10d._world.pg_map
    return len(groups) == 1 and all(backend == "gloo" for backend, _ in groups.values())


def _no_reason() -> str:
    return ""


_get_future: Any = dist.Work.get_future
_present = WorldOperations(_no_reason)
_destroyer = _Destroyer()
