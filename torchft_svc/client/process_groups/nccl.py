"""Collectives between GPUs, which can be aborted at any moment."""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from torchft_svc.client.process.deadlines import Timer
from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup, WholeBackend
from torchft_svc.client.process_groups.operations import WrappedWork
from torchft_svc.env import set_default, switched_on
from torchft_svc.errors import ConfigError, DeadlineExceeded, QuorumFailed
from torchft_svc.host.uninterruptible import wait_checking

log = logging.getLogger(__name__)

# Torch's watchdog terminates the process when a collective fails or hangs. Where it only aborts, it
# does so while other threads wait for the same operation, which then looks successful. Only this
# variable, read when a group is created, disables the watchdog; it is set for that moment only, so
# that it does not affect other NCCL groups of the process. It also makes torch's own waits block
# the CPU: `DeviceWork` does not use them. And torch's flight recorder must not be dumped: without a
# watchdog it keeps pointers to the events of completed operations.
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"
_MAKING = threading.Lock()
# Torch reads this variable once. An abandoned connection attempt ends after so many seconds.
_GIVE_UP_CONNECTING = ("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
# Interval at which the wait for a connection checks whether it is still wanted.
_CHECK_S = 0.002
# How long `shutdown` waits for communicators that are still being aborted.
_JOIN_S = 2.0
# A collective that ends within this time is noticed at once; after it, sleeping is cheaper.
_SPIN_S = 0.0003
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 0.00005, 0.0002
# For an operation that has ended; without a timeout, only the stream would wait.
_OVER = timedelta(seconds=1)


class ProcessGroupNCCL(DelegatingProcessGroup):
    """NCCL on one device, with members that change.

    A dead member is noticed when NCCL notices it, a hung one at ``timeout``. `abort` ends the
    operations under way on the device within milliseconds. At ``timeout`` the group aborts itself,
    so no operation waits forever, even without a wait on the CPU.

    A work's ``wait()`` blocks the current stream, as torch's does; ``wait(timeout)`` blocks the
    caller until the operation has ended on the device, and raises if it failed or timed out. A
    collective inside of a CUDA graph is refused.

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
        super().__init__(timeout)
        check_support("ProcessGroupNCCL", "ProcessGroupGloo")
        self._device = resolve_device(device)
        self._high_priority = high_priority
        self._timer = Timer("torchft-nccl-timer")
        self._teardowns: list[_Teardown] = []
        set_default(*_GIVE_UP_CONNECTING)

    def reduces_on(self, device: torch.device) -> bool:
        """See `ProcessGroup.reduces_on`: CUDA devices only."""
        return device.type == "cuda"

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options(self._high_priority)
        options._timeout = self._timeout
        options.config.blocking = 0  # or a connection that hangs could not be aborted
        with _MAKING, switched_on(_NO_WATCHDOG):
            backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
        connecting = _Connecting(backend, self._device)
        try:
            self._await(connecting)
        except BaseException:
            self._take_down(backend)
            raise
        return _Communicator(backend, store, rank, world_size)

    def _await(self, connecting: _Connecting) -> None:
        """Wait for the connection, as long as it is wanted.

        Torch waits for the other members in a call that cannot be interrupted: it runs on a thread
        that is abandoned if the connection is not wanted any more.
        """
        wait_checking(
            connecting.is_over,
            self._check_wanted,
            self._timeout.total_seconds(),
            "connecting over NCCL",
            "a member does not answer",
            check_s=_CHECK_S,
        )
        if connecting.error is not None:
            raise connecting.error

    def abort(self) -> None:
        """See `ProcessGroup.abort`; ends operations under way on the device, on any thread."""
        # Without the lock: a launch may hold it while it waits for what is aborted here.
        comm = self._backend
        self._give_up_record()
        if comm is not None and not comm.left:
            # First: on the device an aborted operation ends like a successful one.
            comm.left = True
            comm.teardown = self._take_down(comm.backend)
            # The operations are not checked before that: see `DeviceWork.is_completed`.
            self._works = [comm.teardown, *self._works]
        del comm
        super().abort()

    def shutdown(self) -> None:
        super().shutdown()
        self._timer.close(_JOIN_S)
        deadline = time.monotonic() + _JOIN_S
        for teardown in self._teardowns:
            teardown.join(max(0.0, deadline - time.monotonic()))
        self._abandoned.clear()

    def _take_down(self, backend: Any) -> _Teardown:
        self._teardowns = [teardown for teardown in self._teardowns if not teardown.is_completed()]
        teardown = _Teardown(backend)
        self._teardowns.append(teardown)
        return teardown

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        refuse_capture(name)
        with self._lock:
            comm = self._backend
            if comm is not None and not comm.left:
                self._works = [work for work in self._works if not work.is_completed()]
        work = super()._launch(name, args, kwargs)
        if comm is not None:
            with self._lock:
                comm.add(work, time.monotonic() + self._timeout.total_seconds())
                self._watch(comm)
        return DeviceWork(work, comm)

    def _is_over(self, work: Any) -> bool:
        """False once the members were left, see `DeviceWork.is_completed`."""
        comm = self._backend
        return comm is not None and not comm.left and bool(work.is_completed())

    def _watch(self, comm: _Communicator) -> None:
        """Call `_check_deadline` at the deadline of the oldest operation."""
        if not comm.watched and comm.pending:
            comm.watched = True
            self._timer.call_at(comm.pending[0][0], lambda: self._check_deadline(comm))

    def _check_deadline(self, comm: _Communicator) -> None:
        with self._lock:
            comm.watched = False
            comm.forget_completed()
            overdue = bool(comm.pending) and comm.pending[0][0] <= time.monotonic()
            if comm.left:
                return
            if not overdue:
                self._watch(comm)
                return
        limit_s = self._timeout.total_seconds()
        log.warning("a collective is not over after %.3g s: it is aborted", limit_s)
        error = DeadlineExceeded("a collective", limit_s, "a member does not take part")
        self.save_record(str(error))
        self.abort()
        self._error = error


class _Communicator(WholeBackend):
    """The present members; ``left``: no longer; ``pending``: deadlines and works."""

    kind = dist.ProcessGroup.BackendType.NCCL
    device_type = "cuda"

    def __init__(self, backend: Any, store: Store, rank: int, world_size: int) -> None:
        super().__init__(backend, store, rank, world_size)
        self.left = False
        self.watched = False
        self.teardown: _Teardown | None = None
        self.pending: list[tuple[float, Any]] = []

    def is_down(self) -> bool:
        """Whether the communicator, and with it every operation, has been aborted."""
        return self.teardown is not None and self.teardown.is_completed()

    def add(self, work: Any, deadline: float) -> None:
        """``work`` has to end by ``deadline`` (monotonic)."""
        self.forget_completed()
        self.pending.append((deadline, work))

    def forget_completed(self) -> None:
        """Drop completed works, which may keep much device memory."""
        if self.left:
            return
        self.pending = [entry for entry in self.pending if not entry[1].is_completed()]

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], sources: list[torch.Tensor], *options: Any
    ) -> Any:
        """Run one ``allgather`` after the other: torch has no such operation over NCCL.

        ``outputs``: of each member, one for each of the ``sources``.
        """
        gathered = zip(*outputs, strict=True)
        return _Several(
            [
                self.backend.allgather([list(parts)], [source], *options)
                for parts, source in zip(gathered, sources, strict=True)
            ]
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: list[int],
        source_sizes: list[int],
        *_: Any,
    ) -> Any:
        """Run ``alltoall``: torch's own fails while a non-blocking communicator is in progress.

        ``output_sizes`` and ``source_sizes`` are rows per member; empty: equal parts.
        """
        size = self.backend.size()
        return self.backend.alltoall(
            list(torch.split(output, output_sizes or output.size(0) // size)),
            list(torch.split(source, source_sizes or source.size(0) // size)),
        )


class _Several(WrappedWork):
    """Operations that run one after the other on the same stream: they end with the last one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__(works[-1])
        self._all = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._all:
            work.wait()
        return True

    def synchronize(self) -> None:
        for work in self._all:
            _order_stream(work)

    block_current_stream = synchronize


class DeviceWork(WrappedWork):
    """An operation on the device's own stream for collectives, among the members of ``comm``."""

    def __init__(self, work: Any, comm: Any) -> None:
        super().__init__(work)
        self._comm = comm

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the operation; with a timeout, wait on the CPU.

        Raises:
            RuntimeError: it failed, or timed out; then `is_completed` is False.
            QuorumFailed: the members were left meanwhile.
        """
        if timeout:
            self._wait_on_cpu(timeout.total_seconds())
        # Checked after the end: an aborted operation ends, too.
        self._check()
        if not timeout:
            _order_stream(self._work)  # torch's wait would block the CPU
            return True
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        """Whether it has ended on the device, or has failed.

        While the communicator is aborted, torch's own check would block until the end of that, and
        hold the GIL: so it is not called any more.
        """
        if self._comm.left:
            return bool(self._comm.is_down())
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended and not failed; torch's own is not supported."""
        if not self.is_completed():
            return False
        try:
            return self.wait(_OVER)
        except (RuntimeError, QuorumFailed):
            return False

    def _check(self) -> None:
        if self._comm.left:
            raise QuorumFailed("the process group was left while a collective was under way")

    def _wait_on_cpu(self, timeout_s: float) -> None:
        """Torch's own timed wait would abort the communicator at the timeout."""
        began_at = time.monotonic()
        sleep_s = _FIRST_SLEEP_S
        while not self.is_completed():
            self._check()
            waited_s = time.monotonic() - began_at
            if waited_s >= timeout_s:
                raise dist.DistBackendError(f"a collective is not over after {timeout_s:.3g} s")
            if waited_s > _SPIN_S:
                time.sleep(min(sleep_s, timeout_s - waited_s))
                sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)


def _order_stream(work: Any) -> None:
    """Order the current stream behind ``work``; older versions of torch call that differently."""
    if hasattr(work, "block_current_stream"):
        work.block_current_stream()
    else:
        work.synchronize()


class _Connecting:
    """The first operation of a communicator; it ends when all members are connected."""

    def __init__(self, backend: Any, device: torch.device) -> None:
        self.error: Exception | None = None
        self._backend = backend
        self._device = device
        self._work: Any = None
        self._thread = threading.Thread(target=self._run, name="nccl-connect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.cuda.device(self._device):
                self._backend.eager_connect_single_device(self._device)
                self._work = self._backend.allreduce([torch.zeros(1, device=self._device)])
        except RuntimeError as error:
            self.error = error
        finally:
            self._backend = None

    def is_over(self, timeout_s: float) -> bool:
        """Whether it ended, successfully or not, within about ``timeout_s``."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._work is None or not self._work.is_completed():
            return self._work is None
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error
        return True


class _Teardown(threading.Thread):
    """Aborts a communicator: its operations end within milliseconds, the rest takes longer."""

    def __init__(self, backend: Any) -> None:
        super().__init__(name="nccl-end", daemon=True)
        self._backend = backend
        self.start()

    def run(self) -> None:
        backend, self._backend = self._backend, None
        try:
            backend.abort()
        except RuntimeError as error:
            log.warning("NCCL could not be aborted: %s", error)

    def is_completed(self) -> bool:
        """Whether the communicator is aborted."""
        return not self.is_alive()


def check_support(name: str, instead: str) -> None:
    """Whether NCCL can be used here.

    Raises:
        ConfigError: there is no CUDA device, or torch was built without NCCL.
    """
    if not dist.is_nccl_available():
        raise ConfigError("pg", name, f"this build of torch has no NCCL; use {instead}")
    if not torch.cuda.is_available():
        raise ConfigError("pg", name, f"there is no CUDA device here; use {instead}")


def refuse_capture(name: str) -> None:
    """Raise `ConfigError` if a CUDA graph is being captured.

    Its replays would sum among the members of the capture.
    """
    if torch.cuda.is_current_stream_capturing():
        reason = (
            "the members may change between two replays of a CUDA graph: capture the forward and "
            "the backward pass without the sums, as torch.cuda.make_graphed_callables does"
        )
        raise ConfigError("collective", name, reason)


def resolve_device(device: torch.device | int | None) -> torch.device:
    """``device`` with its index; None: the current one."""
    found = torch.device("cuda", device) if isinstance(device, int) else device
    if found is not None and found.type != "cuda":
        raise ConfigError("device", str(found), "NCCL works on CUDA devices")
    if found is None or found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
