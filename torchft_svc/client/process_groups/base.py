"""The interface between a trainer's manager and the process groups that run its collectives."""

from __future__ import annotations

import abc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchft_svc.client.process_groups.members import Loss, Members
from torchft_svc.client.process_groups.operations import COLLECTIVES, OLDER_NAMES
from torchft_svc.client.process_groups.recording import FlightLog, FlightRecorder, Record
from torchft_svc.client.process_groups.registry import device_types
from torchft_svc.errors import ConfigError, MemberLost, QuorumFailed
from torchft_svc.settings import positive_s


class ProcessGroup(dist.ProcessGroup):
    """A process group that is reconfigured with new members whenever the quorum changes.

    Usable wherever torch takes ``group=``; where torch needs its name (``DeviceMesh``, functional
    collectives), `register` it. It has no members before the first `configure`.

    Every collective of torch (`operations.COLLECTIVES`, under older and newer names) is one call of
    `_launch`.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        positive_s("timeout", timeout)
        self._timeout = timeout
        self._group_name = ""
        self._rank = 0
        self._world_size = 1
        self._quorum_id: int | None = None
        self._error: Exception | None = None
        self._loss: Loss | None = None
        self._stopped = False
        self._recorder: FlightRecorder | None = None
        self._flight: FlightLog | None = None

    @abc.abstractmethod
    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        """Start collective ``name`` of `operations.COLLECTIVES`; returns the work."""

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
        """Leave the present members, and connect the new ones.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; the prefix is new for every quorum.
            replica_id: this group's id, for messages.
            rank: this member's index among ``world_size`` members.

        Raises:
            PeerError: a member did not arrive in time, or failed.
        """
        self._configure(
            Members(
                store_addr,
                replica_id,
                rank,
                world_size,
                quorum_id,
                group_rank,
                group_world_size,
                global_ranks,
            )
        )

    @abc.abstractmethod
    def _configure(self, members: Members) -> None:
        """Implements `configure`."""

    def prepare(self) -> None:
        """Prepare what the first `configure` needs, so that other members need not wait for it.

        Called before the first quorum request. Most groups need nothing.

        Raises:
            PeerError: the preparation failed; `configure` would fail as well.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Leave the members at once, so that their collectives fail instead of waiting.

        Operations under way fail or are abandoned: their memory must not be used again.
        """

    def cut(self) -> None:
        """Make operations under way fail soon, including those that `abort` would abandon.

        The group must be configured again before its next use. May be called on any thread.
        """
        self.abort()

    def errored(self) -> Exception | None:
        """Why the group cannot be used until it is configured again, or None."""
        loss = self._loss
        if self._error is None and loss is not None and loss.quorum_id == self._quorum_id:
            return loss.error if loss.is_final() else None
        return self._error

    def failure(self) -> Exception | None:
        """Why results since `configure` may be wrong, or None; checked before each vote.

        The error of `errored`, except for the loss of a member: earlier results are valid then. A
        group or wrapper that does not raise its errors must return them from `errored`.
        """
        error = self.errored()
        return None if isinstance(error, MemberLost) else error

    def shutdown(self) -> None:
        """Leave the members and release everything; may be called twice."""
        self.abort()

    def lose_member(self, quorum_id: int, reason: str) -> None:
        """A member of this quorum is gone, for ``reason``.

        A present or later `configure` for this quorum fails. Collectives under way get a moment to
        end, because the member may have left after its last one; then `errored` returns the loss.
        May be called on any thread.
        """
        self._loss = Loss.now(quorum_id, reason)

    def interrupt(self) -> None:
        """Make a `configure` on another thread fail soon; the group is not used any more."""
        self._stopped = True

    def rank(self) -> int:
        """This member's index."""
        return self._rank

    def size(self) -> int:
        """How many members there are."""
        return self._world_size

    @property
    def needs_all_members(self) -> bool:
        """Whether a sum ends only if all members take part; steps of a term rely on it (rule
        E3)."""
        return True

    @property
    def sums_exactly(self) -> bool:
        """Whether a sum keeps small numbers that stand beside large ones.

        A group that compresses what it sums has to return False: then the wish to end a term (rule
        E2) is a sum of one element, which has to stay above zero, and not a number among the
        gradients. Must be equal in all groups of a job.
        """
        return True

    def reduces_on(self, device: torch.device) -> bool:
        """Whether collectives can have tensors on ``device``.

        What needs others is refused at once then, instead of failing in each step.
        """
        return True

    def tidy(self) -> None:
        """Release abandoned backends whose operations have ended; cheap, call it often."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout for collectives after the next `configure`.

        Raises:
            ConfigError: the timeout is not positive, or too long.
        """
        positive_s("timeout", timeout)
        self._timeout = timeout

    def record_to(self, recorder: FlightRecorder) -> None:
        """Record collectives from the next `configure` on that names a quorum."""
        self._recorder = recorder

    def save_record(self, reason: str, *, only_if_broken: bool = False) -> None:
        """Write and close the record that began with `configure`, if there is one.

        `abort` does this, and every other way to leave members with collectives under way.
        ``only_if_broken``: write it only if a collective is not over, or has failed.
        """
        flight, self._flight = self._flight, None
        if flight is None or self._recorder is None:
            return
        self._update_record()
        snapshot = flight.snapshot()
        if not (only_if_broken and snapshot.is_complete):
            self._recorder.write(snapshot, reason)

    def _begin_record(self, members: Members, backend: str) -> None:
        """``members`` are connected over ``backend``."""
        recorder = self._recorder
        self._flight = None if recorder is None else recorder.start_log(members, backend)

    def _record(self, name: str, args: Any, kwargs: Any) -> Record | None:
        """Record that collective ``name`` is about to begin; None if it is not recorded."""
        return None if self._flight is None else self._flight.launch(name, args, kwargs)

    def _check_meeting(self, quorum_id: int | None) -> None:
        """Raise if connecting the members of ``quorum_id`` is pointless."""
        if self._stopped:
            raise QuorumFailed("the process group was shut down")
        loss = self._loss
        if loss is not None and loss.quorum_id == quorum_id:
            raise loss.error

    def _give_up_record(self) -> None:
        """End the record because the operations under way are given up."""
        self.save_record(self._lost() or "given up")

    def _leave_record(self) -> None:
        """End the record because other members follow; write it only if a present one is gone."""
        lost = self._lost()
        self.save_record(lost or "another quorum", only_if_broken=not lost)

    def _lost(self) -> str:
        """Name the present member that is gone, and why; empty if none is known to be."""
        loss = self._loss
        return str(loss.error) if loss is not None and loss.quorum_id == self._quorum_id else ""

    def _update_record(self) -> None:
        """Note which of the recorded collectives have ended."""

    def register(self, name: str) -> None:
        """Register the group with torch under ``name``: once, on every worker.

        ``torch.distributed`` must be initialized. For torch, this worker is the group's only rank:
        to name a rank of the group, use ``group_src`` and ``group_dst``, not global ranks. Calls
        that take only global ranks (``batch_isend_irecv``, ``recv`` without a source) reject it.

        Raises:
            ConfigError: the name is taken, or ``torch.distributed`` is not initialized.
        """
        if not dist.is_initialized():
            raise ConfigError("register", name, "call torch.distributed.init_process_group first")
        if hasattr(dist.Backend, name.upper()):
            raise ConfigError("register", name, "torch knows another backend by this name")
        dist.Backend.register_backend(name, lambda *_: self, devices=device_types())
        dist.new_group([dist.get_rank()], backend=name, use_local_synchronization=True)

    @property
    def group_name(self) -> Any:
        """The name that torch assigned in `register`; empty before."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        """Called by torch; its own implementation does not support replaced backends."""
        self._group_name = name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's name in torch's registry."""
        return f"torchft-{type(self).__name__}"


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that hands its arguments to `ProcessGroup._launch`."""
    handed_on = OLDER_NAMES.get(name, name)

    def forward(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return self._launch(handed_on, args, kwargs)

    forward.__name__ = name
    return forward


for _name in (*COLLECTIVES, *OLDER_NAMES):
    setattr(ProcessGroup, _name, _forwarded(_name))


def left_error() -> QuorumFailed:
    """The error of a group that has left its members."""
    return QuorumFailed("the process group was left; it has members again with the next quorum")
