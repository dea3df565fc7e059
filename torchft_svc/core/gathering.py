"""Decides how long a lighthouse that is new to a job waits for groups not seen yet (rule Q11)."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.types import Member

# After a lighthouse's restart managers are back within half a second; those that are with another
# one of their list look every second whether this one answers.
GATHER_S = 2.0


@dataclass(frozen=True, slots=True)
class Gathering:
    """Of a job that has no quorum here yet, though its groups tell that they were in one.

    The first of them would else train alone, and where the others are still with another
    lighthouse, both halves would commit the same steps.
    """

    num_groups: int = 0
    until: float | None = None

    def heard(self, member: Member, now: float, join_timeout_s: float) -> Gathering:
        """The same after ``member`` has asked at ``now``."""
        if member.last_num_groups < 2:
            return self  # a newcomer, or one that was alone: there is nobody to come
        until = now + min(GATHER_S, join_timeout_s) if self.until is None else self.until
        return Gathering(max(self.num_groups, member.last_num_groups), until)

    def missing(self, num_living: int, now: float) -> int:
        """How many groups of the last quorum are still waited for."""
        if self.until is None or now >= self.until:
            return 0
        return max(0, self.num_groups - num_living)


NOBODY_IS_TO_COME = Gathering()
