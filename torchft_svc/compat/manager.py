"""`torchft.manager`: the manager, by the arguments, variables and errors of the public release."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft_svc import env
from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.manager import Manager as NativeManager
from torchft_svc.client.process_groups.operations import WrappedWork
from torchft_svc.client.process_groups.torch_group import TorchGroup
from torchft_svc.compat.errors import public_errors
from torchft_svc.compat.forward_gate import ForwardGate
from torchft_svc.env import Environment
from torchft_svc.host.store_ping import check_store_answers
from torchft_svc.settings import DEFAULT_HEARTBEAT_INTERVAL, WorldSizeMode, resolve_place

__all__ = [
    "ExceptionWithTraceback",
    "Manager",
    "WorldSizeMode",
    "extract_trailing_digits",
    "get_timeout",
]

MANAGER_PORT_ENV = "TORCHFT_MANAGER_PORT"
TIMEOUT_SEC_ENV = "TORCHFT_TIMEOUT_SEC"
QUORUM_TIMEOUT_SEC_ENV = "TORCHFT_QUORUM_TIMEOUT_SEC"
CONNECT_TIMEOUT_SEC_ENV = "TORCHFT_CONNECT_TIMEOUT_SEC"
QUORUM_RETRIES_ENV = "TORCHFT_QUORUM_RETRIES"

_TIMEOUT = timedelta(seconds=60)
# There it is how long a thread may be silent (see `futures`), here what ends a stuck collective.
_WITHOUT_WATCHDOG: dict[str, str | None] = {"TORCHFT_WATCHDOG_TIMEOUT_SEC": None}
_JOB_VARIABLE, _NO_JOB = "JOB_ID", "unknown"
_SECOND_KEY = "set_state_dict_fns"
# A store that a launcher has started answers within milliseconds.
_STORE_ANSWERS_S = 2.0


class ExceptionWithTraceback(Exception):
    """An error of a step, with the place that reported it.

    Args:
        e: the error, which is ``original_exception``.
    """

    def __init__(self, e: Exception) -> None:
        self.original_exception = e
        self.stack_trace = "".join(traceback.format_exception(e))
        super().__init__(f"{e}\n{self.stack_trace}")


class Manager(NativeManager):
    """The native manager, by the arguments of the public release.

    Variables of the environment go before the timeouts that are given, and before
    ``quorum_retries``. A timeout that is longer than ``quorum_timeout`` makes that as long. The
    store at ``MASTER_ADDR`` and ``MASTER_PORT`` is joined if there is one, and started if not.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta = _TIMEOUT,
        quorum_timeout: timedelta = _TIMEOUT,
        connect_timeout: timedelta = _TIMEOUT,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str = socket.gethostname(),
        heartbeat_interval: timedelta = DEFAULT_HEARTBEAT_INTERVAL,
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
    ) -> None:
        environment = self._read_environment()
        collective = _preferred(environment.timeout_s, timeout)
        connect = _preferred(environment.connect_timeout_s, connect_timeout)
        quorum = _preferred(environment.quorum_timeout_s, quorum_timeout)
        retries = environment.quorum_retries
        if store_addr is None and store_port is None:
            store_addr, store_port = _running_store(environment, rank, world_size)
        with public_errors():
            super().__init__(
                pg=pg,
                load_state_dict=load_state_dict,
                state_dict=state_dict,
                min_replica_size=min_replica_size,
                use_async_quorum=use_async_quorum,
                timeout=collective,
                quorum_timeout=max(quorum, collective, connect),
                connect_timeout=connect,
                rank=rank,
                world_size=world_size,
                world_size_mode=world_size_mode,
                store_addr=store_addr,
                store_port=store_port,
                lighthouse_addr=lighthouse_addr,
                replica_id=replica_id,
                port=port,
                # Its default is what the native manager finds better by itself.
                hostname=None if hostname == socket.gethostname() else hostname,
                heartbeat_interval=heartbeat_interval,
                checkpoint_transport=checkpoint_transport,
                init_sync=init_sync,
                max_retries=max_retries,
                quorum_retries=quorum_retries if retries is None else retries,
            )
        self._runtime.deps.streams.name_job(env.value_of(_JOB_VARIABLE, _NO_JOB))
        self._logger = _Logger(self)
        self._gate = ForwardGate(self._stepper)

    @staticmethod
    def _read_environment() -> Environment:
        return Environment(env.for_child(_WITHOUT_WATCHDOG))

    # -- names that real programs read, although they are private --------------------------------

    @property
    def _pg(self) -> dist.ProcessGroup:
        pg = self._runtime.deps.pg
        return pg.group if isinstance(pg, TorchGroup) else pg

    @property
    def _use_async_quorum(self) -> bool:
        return self._rules.use_async_quorum

    def _manager_state_dict(self) -> dict[str, Any]:
        """Return all state that groups heal by, with live tensors."""
        with self.consistent_state():
            return {"user": self._registry.save_all(), "torchft": self.state_dict()}

    # -- a step ----------------------------------------------------------------------------------

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step: request a quorum.

        Raises:
            RuntimeError, TimeoutError: there is none (only where this waits for it).
        """
        with public_errors():
            super().start_quorum(allow_heal, shrink_only, timeout)
        self._gate.close_for_step()

    def wait_quorum(self) -> None:
        """Wait until the members of this step are connected.

        Raises:
            RuntimeError, TimeoutError: there is no quorum.
        """
        with public_errors():
            super().wait_quorum()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step; returns whether its update is to be applied.

        Raises:
            RuntimeError: more than ``max_retries`` steps in a row were discarded.
        """
        with public_errors():
            return super().should_commit(timeout)

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | str = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> dist.Work:
        """Reduce ``tensor`` in place over the groups that contribute in this step.

        The work's ``wait()`` returns False after an error of the step.
        """
        return _StepWork(super().allreduce(tensor, should_quantize, reduce_op), self)

    def errored(self) -> ExceptionWithTraceback | None:
        """Return the first error of this step as ``original_exception``, or None."""
        error = super().errored()
        return None if error is None else ExceptionWithTraceback(error)

    def keep_bucket_order(self) -> None:
        """Expect the same order of gradients in torch's buckets in all steps."""
        self._sums.bucket_hook.keep_order()

    # -- state -----------------------------------------------------------------------------------

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add the functions to those that were given at construction, if any."""
        self.register_state_dict_fn(_SECOND_KEY, load_state_dict, state_dict)


class _StepWork(WrappedWork):
    """A reduction of a step, whose wait returns whether the step has no error."""

    def __init__(self, work: dist.Work, manager: Manager) -> None:
        super().__init__(work)
        self._manager = manager

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; returns False after an error of the step."""
        return bool(self._work.wait()) and NativeManager.errored(self._manager) is None


class _Logger:
    """Logs with the place of the worker in front; programs use it as ``manager._logger``."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def info(self, msg: str) -> None:
        self._log(logging.INFO, msg)

    def warn(self, msg: str) -> None:
        self._log(logging.WARNING, msg)

    def exception(self, msg: str) -> None:
        self._log(logging.ERROR, msg, with_error=True)

    def _log(self, level: int, msg: str, *, with_error: bool = False) -> None:
        rank, _ = self._manager.place_in_group()
        group, step = self._manager.replica_id(), self._manager.committed_step()
        logging.getLogger(__name__).log(
            level, "[%s/%d - step %d] %s", group, rank, step, msg, exc_info=with_error
        )


def get_timeout(timeout_sec_env: str | None, default_timeout_sec: timedelta) -> timedelta:
    """Return the time that a variable's text gives in seconds, or the default without one."""
    return default_timeout_sec if not timeout_sec_env else timedelta(seconds=float(timeout_sec_env))


def extract_trailing_digits(s: str) -> int:
    """Return the number at the end of ``s``; 0 if there is none."""
    found = re.search(r"\d+$", s)
    return int(found.group()) if found else 0


def _preferred(variable_s: float | None, argument: timedelta) -> timedelta:
    return argument if variable_s is None else timedelta(seconds=variable_s)


def _running_store(
    environment: Environment, rank: int | None, world_size: int | None
) -> tuple[str | None, int | None]:
    """Return where the environment's store is, if it runs already; other workers wait for it."""
    host, port = environment.master_address, environment.master_port
    if host is None or port is None or not resolve_place(environment, rank, world_size).leads:
        return None, None
    with contextlib.suppress(OSError):
        check_store_answers(host, port, _STORE_ANSWERS_S, _STORE_ANSWERS_S)
        return host, port
    return None, None
