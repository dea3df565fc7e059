"""The seam between a trainer's manager and what carries its collectives."""

from __future__ import annotations

import abc
from datetime import timedelta

import torch.distributed as dist

from torchft_svc.errors import ConfigError


class ProcessGroup(dist.ProcessGroup):
    """A process group that can be built anew, with other members, as often as the quorum changes.

    Usable wherever torch takes ``group=``. It has no members until `configure` was called.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        if timeout <= timedelta(0):
            raise ConfigError("timeout", timeout, "a collective needs more than no time")
        self._timeout = timeout

    @abc.abstractmethod
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
        """Leave the present members, and meet the new ones.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; the prefix is new for every quorum.
            replica_id: who this is, for messages.
            rank: this member's index among ``world_size`` members.

        Raises:
            PeerError: the others did not come in time, or one of them failed.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Leave the members at once, so that their collectives fail instead of waiting.

        Operations under way fail or are abandoned: what they write to must not be used again.
        """

    def errored(self) -> Exception | None:
        """Why the group cannot be used until it is configured again, or None."""
        return None

    def shutdown(self) -> None:
        """Leave the members and release everything; may be called twice."""
        self.abort()

    def lose_member(self, quorum_id: int, reason: str) -> None:
        """A member of this quorum is known to be gone.

        A `configure` under way, or yet to come, for this quorum fails. Collectives under way get a
        moment to end, because the member may have left after its last one; then `errored` tells.
        May be called on any thread.
        """

    def interrupt(self) -> None:
        """Make a `configure` on another thread fail soon; the group is not needed any more."""

    def tidy(self) -> None:
        """Release what is over by now of the groups that were left; cheap, to be called often."""

    def set_timeout(self, timeout: timedelta) -> None:
        """How long the collectives of later `configure` calls may take."""
        self._timeout = timeout

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Which torch looks up by name."""
        return f"torchft-{type(self).__name__}"
