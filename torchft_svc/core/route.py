"""Which service to try next, when to call it or open a stream again, and after which pause (F2)."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchft_svc.errors import Unreachable

# Pauses between two attempts, in seconds. A short interruption must be over long before the
# heartbeat timeout (5 s by default) counts a group as dead.
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
# A client that is not at the first lighthouse of its list asks this often whether an earlier one
# would accept it: for this long the groups of a job may be at different ones.
LOOK_BACK_S = 1.0
# A restarted manager is back within a second, on a busy machine within a few seconds; after this
# time the machine of rank 0 is probably gone.
MANAGER_PATIENCE_S = 5.0
# A worker that has voted yes has to end if it does not learn the decision. On a busy machine,
# another manager comes so long after one that was stuck.
DECISION_PATIENCE_S = 15.0
# A stream to the manager that was open for so long has not failed at once: after its end the first
# pause is the shortest one again.
LASTING_S = 1.0
# The pause before a manager that did not answer is asked again.
RETRY_S = 0.05


class Route:
    """The order of the list decides, so that all groups of a job end at the same lighthouse."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._untried = list(addresses[1:])
        self._leaders_tried: set[str] = set()
        self.current = addresses[0]

    @property
    def preferred(self) -> tuple[str, ...]:
        """The addresses before the current one: the job's other groups move there when one is
        back."""
        if self.current not in self.addresses:  # a leader's own name for itself
            return ()
        return self.addresses[: self.addresses.index(self.current)]

    @property
    def is_sole(self) -> bool:
        """Whether the current one is the only one that is known."""
        return self.addresses == (self.current,)

    def record_answer(self) -> None:
        """Record that the current one has answered: if it breaks, it is tried again first, then
        the list."""
        self._untried = [self.current, *(each for each in self.addresses if each != self.current)]
        self._leaders_tried.clear()

    def choose_next(self, leader: str = "") -> bool:
        """Choose another one, because the current one failed or named the ``leader``.

        Return False if all have been tried in vain, and it is time for a pause.
        """
        if leader and leader != self.current and leader not in self._leaders_tried:
            self._leaders_tried.add(leader)  # once: two that name each other are no way out
            self.current = leader
            return True
        is_fresh = bool(self._untried)
        if not is_fresh:
            self._untried = list(self.addresses)
            self._leaders_tried.clear()
        self.current = self._untried.pop(0)
        return is_fresh

    def return_to(self, address: str) -> None:
        """Choose one of `preferred`, which would accept the client."""
        self.current = address
        self.record_answer()


class Backoff:
    """Pauses that double from the shortest to the longest, each shortened at random by up to a
    half.

    So a thousand managers that lost a lighthouse at one moment do not come back at one moment.
    ``draw`` gives numbers from 0 to 1.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._longest_s = MIN_PAUSE_S

    def record_attempt(self, *, failed: bool) -> None:
        """Record an attempt, or one at each address: the next pause is longer, or short again."""
        self._longest_s = min(2 * self._longest_s, MAX_PAUSE_S) if failed else MIN_PAUSE_S

    def pause_s(self) -> float:
        """The next pause, in seconds."""
        return self._longest_s * (1 + self._draw()) / 2


class AttachEnd(enum.Enum):
    """How a worker's stream to its manager has ended."""

    CLOSED = "in good order"
    BROKEN = "the manager, or the connection to it, is gone"
    REFUSED = "another worker had this rank: it may be dead, and not be missed yet"
    MOVED = "the worker has found the manager at another address"


@dataclass(frozen=True, slots=True)
class Reattach:
    """Open the stream again after ``pause_s``.

    ``is_broken``: it was open; the group is out of its quorum if a step of that needs the manager.
    ``is_cut``: the group is out, because the manager did not come back in time, or took this worker
    for gone. ``is_lost``: the manager may be at another address.
    """

    pause_s: float
    is_broken: bool
    is_cut: bool
    is_lost: bool


class AttachRetry:
    """Decides when a worker opens its stream to the manager again, and what its end means (M3)."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._backoff = Backoff(draw)
        self._failing_since: float | None = None
        self._is_cut = False  # and the worker was informed
        self._ended_at = -math.inf  # the stream, or the attempt to open one

    def received(self) -> None:
        """News have come: the stream is open."""
        self._failing_since = None
        self._is_cut = False

    def ended(self, how: AttachEnd, now: float) -> Reattach:
        is_closed = how is AttachEnd.CLOSED
        is_first = self._failing_since is None and how is not AttachEnd.MOVED
        if not is_closed and self._failing_since is None:
            self._failing_since = now
        failing_since, was_cut = self._failing_since, self._is_cut
        if is_first and now - self._ended_at >= LASTING_S:
            self._backoff.record_attempt(failed=False)
        self._ended_at = now
        is_late = failing_since is not None and now - failing_since >= MANAGER_PATIENCE_S
        self._is_cut |= is_late or is_closed or (is_first and how is AttachEnd.REFUSED)
        pause_s = self._backoff.pause_s()
        self._backoff.record_attempt(failed=failing_since is not None)
        return Reattach(
            pause_s,
            is_broken=is_first or is_closed,
            is_cut=self._is_cut and (is_closed or not was_cut),
            is_lost=how is AttachEnd.BROKEN,
        )


class CallRetry:
    """How long one call is repeated to a manager that cannot be reached."""

    def __init__(self, deadline: float, patience_s: float) -> None:
        self.deadline = deadline
        self._patience_s = patience_s
        self._lost_at: float | None = None

    def pause_s(self, error: Exception, now: float, is_over: bool) -> float | None:
        """The pause before the next attempt; None: there is no use in one."""
        # The manager itself reports another peer, such as the lighthouse.
        if is_over or not isinstance(error, Unreachable) or error.peer != "manager":
            return None
        if self._lost_at is None:
            self._lost_at = now
        give_up_at = min(self.deadline, self._lost_at + self._patience_s)
        return RETRY_S if now + RETRY_S < give_up_at else None
