"""The seam between a manager and its lighthouse: two ways to be connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from torchft_svc.core.types import Member, Quorum

# Leaving is a courtesy: a lighthouse that does not answer must not hold up the end.
LEAVE_TIMEOUT_S = 1.0
# A lighthouse may want fewer beats, though four in its heartbeat timeout; one that wants none for a
# minute is mistaken, and a group that obeyed would be as good as dead.
MAX_WANTED_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Contact:
    """One lighthouse: its address, as the user wrote it, and the channel to it."""

    address: str
    channel: grpc.aio.Channel


def beat_interval_s(own_s: float, wanted_ms: int) -> float:
    """How often to beat: as the manager was told, or more rarely if the lighthouse wants that."""
    return max(own_s, min(wanted_ms / 1000, MAX_WANTED_INTERVAL_S))


class Line(Protocol):
    """How one incarnation of a group talks to one lighthouse."""

    async def hold(self, on_open: Callable[[], None]) -> None:
        """Prove that the group is alive, until the line breaks; ``on_open``: it can be asked now.

        Raises:
            NotSupported: the lighthouse does not know this way.
            TorchFTError: why it broke; nothing is raised after `leave`.
        """

    async def ask(self, member: Member, timeout_s: float) -> Quorum:
        """Wait for a quorum that contains ``member``.

        Raises:
            TorchFTError: there is none; `Unreachable` if the lighthouse could not be asked,
                `QuorumFailed` if its answer is not to be taken.
        """

    async def leave(self, reason: str, *, between_steps: bool, ends: bool = False) -> None:
        """Tell the lighthouse that nobody has to wait for this group any more; never raises.

        A sign of life that follows would bring the group back, so this ends `hold` too. A question
        under way gets its answer or its error before this returns. ``between_steps``: the group has
        finished its last step, so nobody has to give one up. ``ends``: its program ends on purpose.
        """


class NotSupported(Exception):
    """The lighthouse does not know this way of being connected."""
