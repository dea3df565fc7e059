"""Decides how long a lighthouse that is new to a job waits for groups not seen yet (rules Q11 and
Q25)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, QuorumConfig

# Managers that are at another lighthouse of their list look every second whether this one answers.
GATHER_S = 2.0
# Managers that know only this lighthouse try it at least every half second, so all of them are back
# so long after its start. Each new session takes it 1 to 2 ms.
ALL_BACK_S, EACH_BACK_S = 0.75, 0.002


@dataclass(frozen=True, slots=True)
class Gathering:
    """Groups that ask report a last quorum of ``num_groups``; the others are waited for ``until``
    then (None: nobody is).

    The lighthouse has published no quorum of the job. Otherwise the first group would train alone,
    and if the others are still at another lighthouse, both halves would commit the same steps.
    ``told``: the newest quorum that those who ask know of, and how far it has come at least; they
    may have no session, or another manager, which could not report it (rule Q12).
    ``since``: the first of these requests. ``is_sole``: there is no other lighthouse.
    ``starts_at``: nobody that has asked was in a quorum of the job before, so this is a cold start:
    groups that are started together with the first one are waited for until then (None: it is not).
    """

    num_groups: int = 0
    until: float | None = None
    since: float = 0.0
    is_sole: bool = True
    told: LastQuorum = NO_QUORUM
    starts_at: float | None = None

    def after_request(
        self, member: Member, now: float, config: QuorumConfig, began_at: float
    ) -> Gathering:
        """``began_at``: since when this lighthouse serves."""
        told = max(self.told, member.last_quorum) if member.has_history else self.told
        if member.last_num_groups < 2:  # a newcomer, or one that was alone: there is nobody to come
            starts_at = now + config.startup_wait_s if self.starts_at is None else self.starts_at
            is_new = told == NO_QUORUM and self.until is None
            return replace(self, told=told, starts_at=starts_at if is_new else None)
        num_groups = max(self.num_groups, member.last_num_groups)
        since = now if self.until is None else self.since
        is_sole = self.is_sole and member.sole_lighthouse
        until = since + min(GATHER_S, config.join_timeout_s)
        all_back_at = began_at + ALL_BACK_S + num_groups * EACH_BACK_S
        if is_sole and since <= all_back_at:
            until = min(until, all_back_at)
        return Gathering(num_groups, until, since, is_sole, told)


NOBODY_IS_TO_COME = Gathering()
