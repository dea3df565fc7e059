"""Process groups whose collectives run in another process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from torchft_svc.client.process_groups.base import ProcessGroup, left_error
from torchft_svc.client.process_groups.isolated.device_segments import DeviceSegment, new_stream
from torchft_svc.client.process_groups.isolated.messages import (
    Abort,
    Backend,
    Configure,
    Forget,
    Launch,
    Lose,
    Place,
    Share,
    options_to_plain,
    replace_leaves,
)
from torchft_svc.client.process_groups.isolated.process import (
    FORK_SERVER,
    ChildProcess,
    KilledProcesses,
)
from torchft_svc.client.process_groups.isolated.segments import HostSegment, Loan, Pool, StreamWait
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.nccl import check_support, refuse_capture, resolve_device
from torchft_svc.client.process_groups.operations import IN_PLACE, result_of
from torchft_svc.client.process_groups.recording import STARTED, Record
from torchft_svc.client.process_groups.rendezvous import announce
from torchft_svc.errors import PeerError, QuorumFailed
from torchft_svc.host.uninterruptible import wait_checking

# The process' own error, which names the reason, should arrive before the deadline here.
_ANSWER_GRACE_S = 2.0
# Sending a command takes less, unless the process has stopped reading.
_STUCK_S = 0.2
# How long `shutdown` waits until a device has released a process.
_GONE_S = 2.0
# Torch declares no types for what is in there.
_sharing: Any = torch.multiprocessing
# Operations without results to copy back.
_WITHOUT_RESULT = frozenset({"send", "barrier"})


class IsolatedProcessGroup(ProcessGroup):
    """Collectives in a process of their own, with members that change.

    Slower than in the trainer by one copy in each direction, and more robust: a crash of the
    backend, or an operation that never ends, is only an error here, and an abandoned operation
    cannot write to the memory of the trainer. The process is killed when
    the group is left with operations under way, or after one has failed; the next one is forked
    from a server that has imported torch already, so that import delays no step.

    Host tensors that are in shared memory already (`torch.Tensor.share_memory_`) are used without a
    copy, and an operation may write to them until the group is left.

    Args:
        timeout: the longest time for a collective, and for connecting.
        backend: the backend of the collectives.
        make_pool: creates an empty pool of memory to share with a process.
    """

    def __init__(self, timeout: timedelta, backend: Backend, make_pool: Callable[[], Pool]) -> None:
        super().__init__(timeout)
        FORK_SERVER.start()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._backend = backend
        self._make_pool = make_pool
        self._child: ChildProcess | None = None
        self._pool = make_pool()
        self._shared_tensors = SharedTensors()
        self._killed = KilledProcesses()
        self._error = left_error()

    def prepare(self) -> None:
        """See `ProcessGroup.prepare`; the fork server imports torch, which takes seconds."""
        FORK_SERVER.start()
        wait_checking(FORK_SERVER.is_ready, lambda: self._check_meeting(None))

    def _configure(self, members: Members) -> None:
        self._leave_record()
        self.abort()
        self._check_meeting(members.quorum_id)
        try:
            self._connect(members)
        except PeerError as error:
            child = self._child
            if not self._stopped and (child is None or child.ended is not None):
                announce(members, error)  # the process cannot do it
            raise
        with self._lock:
            self._rank, self._world_size = members.rank, members.world_size
            self._quorum_id, self._error = members.quorum_id, None
            self._begin_record(members, self._backend.kind)

    def abort(self) -> None:
        """See `ProcessGroup.abort`; kills the process if an operation may still write."""
        self._give_up_record()
        self.tidy()
        child = self._child
        if child is None:
            return
        if not self._lock.acquire(timeout=_STUCK_S):
            child.kill()  # ends a launch that is blocked because the process does not read
            self._lock.acquire()
        was_member, self._error = self._error is None, self._error or left_error()
        self._lock.release()
        if child.is_busy or child.has_failed or child.ended is not None:
            self._drop_child(child)
        elif was_member:
            child.send(Abort())

    def tidy(self) -> None:
        self._killed.clear()

    def errored(self) -> Exception | None:
        """Why the group cannot be used until it is configured again, or None."""
        loss = self._loss
        if self._error is None and loss is not None and loss.quorum_id == self._quorum_id:
            return loss.error if loss.is_final() else None
        return self._error or (self._child.ended if self._child else None)

    def lose_member(self, quorum_id: int, reason: str) -> None:
        super().lose_member(quorum_id, reason)
        child = self._child
        if child is not None:
            with contextlib.suppress(QuorumFailed):  # the process has exited
                child.send(Lose(quorum_id, reason))

    def shutdown(self) -> None:
        """Leave the members for good and end the processes; idempotent."""
        self.interrupt()
        self.save_record("shut down", only_if_broken=True)
        with self._lock:
            self._error = self._error or left_error()
            child = self._child
        if child is not None:
            self._drop_child(child)
        self._killed.close(_GONE_S)

    @property
    def pid(self) -> int | None:
        """The id of the process that runs the collectives, if there is one."""
        return self._child.pid if self._child else None

    # -- inside ----------------------------------------------------------------------------------

    def _connect(self, members: Members) -> None:
        child = self._child = self._child or ChildProcess()
        number = next(self._numbers)
        over = threading.Event()
        outcome: list[Exception | None] = []

        def on_end(error: Exception | None) -> None:
            outcome.append(error)
            over.set()

        child.send(Configure(number, members, self._timeout, self._backend), number, on_end)
        try:
            self._await(over, self._timeout.total_seconds() + _ANSWER_GRACE_S, members.quorum_id)
        except PeerError:
            self._drop_child(child)
            raise
        if outcome[0] is not None:
            raise outcome[0]

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        if self._pool.on_device:
            refuse_capture(name)
        with self._lock:
            child = self._child
            if self._error is not None or child is None:
                raise self._error or left_error()
            results = [] if name in _WITHOUT_RESULT else result_of(name, args, kwargs)
            shared, lent = self._locate(child, [results, args, kwargs])
            loan, is_new = self._pool.lend(lent)
            if is_new:
                child.share(loan.segment.announce(), loan.segment.descriptor)
            written = set() if name in IN_PLACE else _only_written(results, args, kwargs)
            pairs = zip(loan.tensors(), lent, strict=True)
            loan.segment.put([(a, b.detach()) for a, b in pairs if id(b) not in written])
            places = {**shared, **dict(zip(map(id, lent), loan.places, strict=True))}
            request = self._request(name, loan, places, args, kwargs)
            # These are the first of the lent tensors, in the same order.
            copied = [result for result in results if id(result) not in shared]
            limit_s = self._timeout.total_seconds() + _ANSWER_GRACE_S
            work = IsolatedWork(results, copied, loan, limit_s)
            record = self._record(name, args, kwargs)
            completion = _Completion(work, loan, self._pool, record)
            if record is not None:
                record.state = STARTED  # before its end can be recorded
            child.send(request, request.number, completion.on_end)
        return work

    def _locate(
        self, child: ChildProcess, args: Any
    ) -> tuple[dict[int, Place], list[torch.Tensor]]:
        """The places of tensors in ``args`` that are in shared memory, by id; and the others."""
        places: dict[int, Place] = {}
        lent: dict[int, torch.Tensor] = {}

        def locate(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and id(value) not in places:
                on_host = not self._pool.on_device
                place = self._shared_tensors.place(value, child) if on_host else None
                if place is None:
                    lent.setdefault(id(value), value)
                else:
                    places[id(value)] = place
            return value

        self._shared_tensors.forget_freed(child)
        replace_leaves(args, locate)
        return places, list(lent.values())

    def _request(
        self, name: str, loan: Loan, places: Mapping[int, Place], args: Any, kwargs: Any
    ) -> Launch:
        def to_plain(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return places[id(value)]
            return options_to_plain(value)

        sent = replace_leaves(args, to_plain), replace_leaves(kwargs, to_plain)
        return Launch(next(self._numbers), loan.segment.number, name, *sent)

    def _await(self, event: threading.Event, timeout_s: float, quorum_id: int | None) -> None:
        action = "configuring the process group"
        wait_checking(event.wait, lambda: self._check_meeting(quorum_id), timeout_s, action)

    def _drop_child(self, child: ChildProcess) -> None:
        """Kill ``child``, and stop using the memory that was shared with it."""
        with self._lock:
            if self._child is not child:
                return
            self._child = None
            pool, self._pool = self._pool, self._make_pool()
            self._shared_tensors = SharedTensors()
            self._error = self._error or left_error()
        self._killed.kill(child, pool)


class ProcessGroupBabyGloo(IsolatedProcessGroup):
    """gloo in a process of its own, with members that change; see `IsolatedProcessGroup`."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout, Backend("gloo"), lambda: Pool(HostSegment.create))


class ProcessGroupBabyNCCL(IsolatedProcessGroup):
    """NCCL in a process of its own, with members that change; see `IsolatedProcessGroup`.

    The process has its own CUDA context, which needs some hundred MB of device memory and is
    created again after each kill. Compared with `ProcessGroupNCCL`, a collective costs one more
    copy on the device in each direction. A work's ``wait()`` and ``wait(timeout)`` both block the
    caller until the operation has ended: the trainer's streams never wait for the other process,
    whose end they would not notice.

    Args:
        timeout: the longest time for a collective, and for connecting.
        device: where the tensors are (default: the current CUDA device).
        high_priority: run the collectives before other work on the device.

    Raises:
        ConfigError: there is no CUDA device, or torch was built without NCCL.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | int | None = None,
        high_priority: bool = False,
    ) -> None:
        check_support("ProcessGroupBabyNCCL", "ProcessGroupBabyGloo")
        where = resolve_device(device)
        create = functools.partial(DeviceSegment, device=where, stream=new_stream(where))
        backend = Backend("nccl", str(where), high_priority)
        super().__init__(timeout, backend, lambda: Pool(create, on_device=True))

    def reduces_on(self, device: torch.device) -> bool:
        """See `ProcessGroup.reduces_on`: CUDA devices only."""
        return device.type == "cuda"


class IsolatedWork(dist.Work):
    """``results`` are copied from the segment of ``loan``, or are in shared memory themselves.

    The copy happens, or is queued on the device, when the operation has ended; a failed or
    abandoned operation writes nothing to them. A wait blocks the caller until then, and orders the
    current stream behind the copy.

    Args:
        copied: those of ``results`` that are the first tensors of ``loan``.
        limit_s: the longest ``wait()``.
    """

    def __init__(
        self,
        results: list[torch.Tensor],
        copied: list[torch.Tensor],
        loan: Loan,
        limit_s: float,
    ) -> None:
        super().__init__()
        self._results = results
        self._copied = copied
        self._loan: Loan | None = loan
        self._limit_s = limit_s
        self._order: StreamWait | None = None
        self._over = threading.Event()
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None

    def fetch_results(self) -> None:
        """Copy the results from the segment."""
        loan = self._loan
        assert loan is not None, "fetched before it is completed"
        with torch.no_grad():
            pairs = list(zip(self._copied, loan.tensors(), strict=False))
            self._order = loan.segment.fetch(pairs)

    def complete(self, error: Exception | None) -> None:
        """Record the end of the operation; its results were copied unless it failed."""
        with self._lock:
            self._error = error
            self._loan = None  # a work that is kept must not keep the memory
            self._over.set()
            future = self._future
        if future is not None:
            self._fulfil(future)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results.

        Raises:
            RuntimeError: it failed, or timed out; then `is_completed` is False.
        """
        limit_s = timeout.total_seconds() if timeout else self._limit_s
        if not self._over.wait(limit_s):
            raise dist.DistBackendError(f"a collective is not over after {limit_s:.3g} s")
        if self._error is not None:
            raise dist.DistBackendError(str(self._error)) from self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Order the current stream behind the results."""
        if self._order is not None:
            self._order()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._results if tensor.is_cuda}
                self._future = torch.futures.Future(devices=list(devices))
                if self._over.is_set():
                    self._fulfil(self._future)
            return self._future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            self.synchronize()  # the future passes this thread's stream on to its waiters
            future.set_result(self._results)
        else:
            future.set_exception(self._error)


class _Completion:
    """Completes one operation; called by the thread that reads the process' replies."""

    def __init__(self, work: IsolatedWork, loan: Loan, pool: Pool, record: Record | None) -> None:
        self._work, self._loan, self._pool, self._record = work, loan, pool, record

    def on_end(self, error: Exception | None) -> None:
        """Copy the results, complete the work, and give its memory back."""
        if self._record is not None:
            self._record.end(failed=error is not None)
        if error is None:  # else the memory may still be written to
            try:
                self._work.fetch_results()
            except RuntimeError as problem:  # torch's, if a tensor or the device has changed
                error = problem
            self._pool.give_back(self._loan)  # first: the next operation may follow at once
        self._work.complete(error)


def _only_written(results: list[torch.Tensor], args: Any, kwargs: Any) -> set[int]:
    """The ids of ``results`` that the collective does not read."""
    read: set[int] = set()
    given = [*args, *kwargs.values()][1:]  # the first one holds the results
    replace_leaves(given, lambda value: read.add(id(value)))
    return set(map(id, results)) - read


class SharedTensors:
    """The storages that were sent to one process, which forgets them when they are freed."""

    def __init__(self) -> None:
        # Negative numbers; segments of the pool have the others.
        self._numbers = itertools.count(-1, -1)
        self._known: dict[int, tuple[Any, int]] = {}

    def forget_freed(self, child: ChildProcess) -> None:
        """Send ``child`` the numbers of storages that were freed; cheap.

        Raises:
            QuorumFailed: the process has ended.
        """
        freed = {key: number for key, (ref, number) in self._known.items() if ref.expired()}
        for key, number in freed.items():
            del self._known[key]
            child.send(Forget(number))

    def place(self, tensor: torch.Tensor, child: ChildProcess) -> Place | None:
        """Return the place where ``child`` finds ``tensor``; None if it has to be copied.

        Raises:
            QuorumFailed: the process has ended.
        """
        if not _is_shared(tensor):
            return None
        storage: Any = tensor.untyped_storage()
        known = self._known.get(storage._cdata)
        number = self._share(storage, child) if known is None or known[0].expired() else known[1]
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return Place(number, offset, tuple(tensor.shape), tensor.dtype)

    def _share(self, storage: Any, child: ChildProcess) -> int:
        descriptor, num_bytes = storage._share_fd_cpu_()  # torch owns this descriptor
        number = next(self._numbers)
        child.share(Share(number, num_bytes), descriptor)
        self._known[storage._cdata] = _sharing.reductions.StorageWeakRef(storage), number
        return number


def _is_shared(tensor: torch.Tensor) -> bool:
    storage: Any = tensor.untyped_storage()
    if tensor.device.type != "cpu" or tensor.numel() == 0 or not tensor.is_contiguous():
        return False
    # Torch's other strategy has no descriptor that could be sent.
    by_descriptor = _sharing.get_sharing_strategy() == "file_descriptor"
    return bool(by_descriptor and storage.is_shared())
