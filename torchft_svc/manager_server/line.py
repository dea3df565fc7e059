"""The seam between a manager and its lighthouse: two ways to be connected."""

from __future__ import annotations

from typing import Protocol

from torchft_svc.core.types import Member, Quorum

# Leaving is a courtesy: a lighthouse that does not answer must not hold up the end.
LEAVE_TIMEOUT_S = 1.0


class Line(Protocol):
    """How one incarnation of a group talks to the lighthouse."""

    async def hold(self) -> None:
        """Prove that the group is alive, until cancelled.

        Raises:
            NotSupported: the lighthouse does not know this way.
        """

    async def ask(self, member: Member, timeout_s: float) -> Quorum:
        """Wait for a quorum that contains ``member``.

        Raises:
            TorchFTError: there is none; `Unreachable` if the lighthouse could not be asked.
        """

    async def leave(self, reason: str) -> None:
        """Tell the lighthouse that nobody has to wait for this group any more; never raises.

        A sign of life that follows would bring the group back, so this ends `hold` too.
        """


class NotSupported(Exception):
    """The lighthouse does not know this way of being connected."""
