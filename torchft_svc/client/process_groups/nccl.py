"""Collectives between GPUs, which can be given up at any moment."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.delegate import DelegatingProcessGroup
from torchft_svc.client.process_groups.stores import Store
from torchft_svc.errors import ConfigError, DeadlineExceeded, QuorumFailed

log = logging.getLogger(__name__)

# What torch reads when it makes a group. Its own answer to a hung or failed collective is to end
# the process; here the communicator is to be aborted and the process to live. A launcher sets some
# of these, too, so they are overwritten. They hold for every NCCL group that the process makes.
_TORCH_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # abort the communicator, do not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no second watchdog that ends the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # Four times this long torch's watchdog sleeps before it aborts (default: 60 s in all).
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # a wait without a time holds up the stream, not the CPU
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",  # seconds, after which an abandoned connection ends
}
# A collective that is over so soon is noticed at once; later, sleeping costs less than it saves.
_SPIN_S = 0.0003
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 0.00005, 0.001
# How often the wait for a connection looks whether it is still wanted.
_LOOK_S = 0.002


class ProcessGroupNCCL(DelegatingProcessGroup):
    """NCCL on one device, with members that change.

    A dead or hung member is noticed only at ``timeout``, unless somebody calls `abort` before: that
    ends the operations under way on the device within a moment. At ``timeout`` torch's watchdog
    does the same, so nothing waits forever even if nobody waits on the CPU.

    A work's ``wait()`` holds up the current stream, as torch's does; ``wait(timeout)`` holds up the
    caller until the operation is over on the device, and raises if it is not in time or has failed.

    Args:
        timeout: the longest time for a collective, and for connecting.
        device: where the tensors are (default: the current CUDA device).
        high_priority: run the collectives before other work on the device.
        trace_folder: where to leave NCCL's flight recorder when a group is left with operations
            under way: ``quorum-{id}-rank-{rank}.json``.

    Raises:
        ConfigError: there is no CUDA device, or torch was built without NCCL.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        *,
        device: torch.device | int | None = None,
        high_priority: bool = False,
        trace_folder: Path | None = None,
    ) -> None:
        super().__init__(timeout)
        _check_support()
        self._device = _resolve(device)
        self._high_priority = high_priority
        self._trace_folder = trace_folder
        self._wanted_quorum_id: int | None = None
        os.environ.update(_TORCH_VARIABLES)

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """See `ProcessGroup.configure`."""
        self._wanted_quorum_id = quorum_id
        super().configure(store_addr, replica_id, rank, world_size, quorum_id)

    def _make_backend(self, store: Store, rank: int, world_size: int) -> Any:
        options = dist.ProcessGroupNCCL.Options(self._high_priority)
        options._timeout = self._timeout
        options.config.blocking = 0  # or a connection that hangs could not be given up
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
        opening = _Opening(backend, self._device)
        try:
            self._await(opening)
        except BaseException:
            # It may wait for the connection itself: nobody waits for that any more.
            threading.Thread(
                target=_try_abort, args=(backend,), name="nccl-end", daemon=True
            ).start()
            raise
        return backend

    def _await(self, opening: _Opening) -> None:
        """Wait for the connection, unless it is not wanted any more.

        Torch waits for the other members inside a call that cannot be interrupted: a thread does
        that, and is left to itself if it has to be given up.
        """
        limit_s = self._timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not opening.is_over(_LOOK_S):
            loss = self._loss
            if self._stopped:
                raise QuorumFailed("the process group was shut down")
            if loss is not None and loss.quorum_id == self._wanted_quorum_id:
                raise loss.error
            if time.monotonic() > deadline:
                raise DeadlineExceeded("connecting over NCCL", limit_s, "a member does not answer")
        if opening.error is not None:
            raise opening.error

    def abort(self) -> None:
        """See `ProcessGroup.abort`; ends operations under way on the device, on any thread."""
        # Not under the lock: a launch may hold it, waiting for the very thing that is ended here.
        backend = self._backend
        if backend is not None:
            self._leave_trace()
            _try_abort(backend)
        del backend
        super().abort()

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        return DeviceWork(super()._launch(name, args, kwargs))

    def _leave_trace(self) -> None:
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        if self._trace_folder is None or dump is None:
            return
        if all(work.is_completed() for work in list(self._works)):
            return
        name = f"quorum-{self._quorum_id}-rank-{self._rank}.json"
        try:
            self._trace_folder.mkdir(parents=True, exist_ok=True)
            (self._trace_folder / name).write_bytes(dump(True, False))
        except OSError as error:
            log.warning("the flight recorder of %s cannot be written: %s", name, error)


class DeviceWork(dist.Work):
    """An operation on the device's own stream for collectives."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Without a time: order the current stream behind the operation. Else: wait here.

        Raises:
            RuntimeError: it failed, or is not over in time; `is_completed` tells which.
        """
        if timeout:
            _wait_on_cpu(self._work, timeout.total_seconds())
        return bool(self._work.wait())

    def is_completed(self) -> bool:
        """Whether it is over on the device, or has failed."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is over and has not failed."""
        return bool(self._work.is_success())

    def synchronize(self) -> None:
        """Order the current stream behind the operation."""
        self._work.synchronize()

    def result(self) -> Any:
        """The tensors."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Torch's own; its callbacks run on a stream behind the operation."""
        future: torch.futures.Future[Any] = self._work.get_future()
        return future


class _Opening:
    """The first operation of a communicator, which ends when all members are connected."""

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
        """Whether it has ended, well or not, within about ``timeout_s``."""
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


def _try_abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning("NCCL could not be aborted: %s", error)


def _wait_on_cpu(work: Any, timeout_s: float) -> None:
    """Torch's own timed wait would abort the communicator when the time is over."""
    began_at = time.monotonic()
    sleep_s = _FIRST_SLEEP_S
    while not work.is_completed():
        waited_s = time.monotonic() - began_at
        if waited_s >= timeout_s:
            raise dist.DistBackendError(f"a collective is not over after {timeout_s:.3g} s")
        if waited_s > _SPIN_S:
            time.sleep(min(sleep_s, timeout_s - waited_s))
            sleep_s = min(sleep_s * 1.2, _LONGEST_SLEEP_S)


def _check_support() -> None:
    if not dist.is_nccl_available():
        raise ConfigError("pg", "ProcessGroupNCCL", "this build of torch has no NCCL; use gloo")
    if not torch.cuda.is_available():
        raise ConfigError("pg", "ProcessGroupNCCL", "there is no CUDA device here; use gloo")


def _resolve(device: torch.device | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device())
    found = torch.device("cuda", device) if isinstance(device, int) else device
    if found.type != "cuda":
        raise ConfigError("device", str(found), "NCCL works on CUDA devices")
    if found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
