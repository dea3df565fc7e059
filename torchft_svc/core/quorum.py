"""Decides whether the groups that ask now are a quorum, and if not, why not and when to look again.

The rules are those of docs/design/quorum.md, and so are their numbers in the comments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from torchft_svc.core.types import Member, QuorumConfig

# A reason is read by people: it names a few groups and counts the others.
MAX_NAMES_IN_A_REASON = 4
# After a lighthouse's restart managers are back within half a second; those that are with another
# one of their list look every second whether this one answers.
GATHER_S = 2.0


@dataclass(frozen=True, slots=True)
class Waiter:
    """A group whose request waits for an answer, since ``asked_at`` (monotonic seconds)."""

    member: Member
    asked_at: float


@dataclass(frozen=True, slots=True)
class Gathering:
    """How long a lighthouse that is new to a job waits for groups not seen yet (rule Q11).

    Of a job that has no quorum here yet, though its groups tell that they were in one.

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


@dataclass(frozen=True, slots=True)
class Heal:
    """A group has been healing since ``since``, until ``ended_at`` (None: it still does)."""

    since: float
    ended_at: float | None = None

    def patience_until(self, join_timeout_s: float) -> float:
        """Until when this is reason to wait: when it is over, its group has a step to finish."""
        return math.inf if self.ended_at is None else self.ended_at + join_timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """All that a decision depends on; save for ``previous``, all ids are of groups in ``living``.

    ``previous`` are the members of the last quorum; if this lighthouse has published none yet, who
    tells that it was in the newest one. ``veterans`` took part in a quorum of this job,
    ``straggling`` were waited for in vain (and are not in ``waiting``). ``told_min_replicas`` is
    the largest that those who wait tell (0: none). ``loss_accepted``: an operator gave up the steps
    that those who wait do not have. ``is_finished``: that step is the one of a run that has ended
    on purpose.
    ``ahead`` tell of a quorum that is newer than the last one here: the job went on elsewhere. Who
    tells that and is not to be believed is not among them.
    ``gathering`` matters until this lighthouse has published a quorum. ``heals`` are those of
    groups since the last quorum.
    """

    waiting: Mapping[str, Waiter]
    living: Set[str]
    veterans: Set[str]
    straggling: Set[str]
    previous: Set[str]
    committed_step: int
    told_min_replicas: int = 0
    loss_accepted: bool = False
    is_finished: bool = False
    ahead: Set[str] = frozenset()
    gathering: Gathering = NOBODY_IS_TO_COME
    heals: Mapping[str, Heal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Formed:
    """These members are the quorum, sorted by replica id. ``lost_from`` is the committed step of
    the job if it goes back with this quorum (rule Q7), else None."""

    members: tuple[Member, ...]
    lost_from: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """No quorum yet, because of ``why``; time alone changes that at ``until`` (None: never)."""

    why: str
    until: float | None = None


def decide(view: JobView, config: QuorumConfig, now: float) -> Formed | Waiting:
    """Apply the rules to what is known at ``now`` (monotonic seconds)."""
    too_early = _before_all_are_here(view, config, now)
    if too_early is not None:
        return too_early
    min_replicas = view.told_min_replicas or config.min_replicas
    if len(view.waiting) < min_replicas:  # at a cold start, most decisions end here
        return Waiting(f"{len(view.waiting)} of at least {min_replicas} groups ask")
    candidates = _candidates(view)
    if len(candidates) < min_replicas:
        note = f"{len(view.waiting) - len(candidates)} more kept out by shrink_only"
        return Waiting(f"{len(candidates)} of at least {min_replicas} groups ask, {note}")
    return _check_progress(view, config, candidates)


def _before_all_are_here(view: JobView, config: QuorumConfig, now: float) -> Waiting | None:
    """Why it is too early to look at who asks: nobody does, or somebody is still waited for."""
    if not view.waiting:
        return Waiting("no group asks for a quorum")
    missing = view.gathering.missing(len(view.living), now)
    if missing:
        why = f"this lighthouse is new to the job: waiting for {missing} more groups of its quorum"
        return Waiting(why, view.gathering.until)
    deadlines = absent_deadlines(view, config)
    absent = {replica_id: at for replica_id, at in deadlines.items() if at > now}
    if absent:
        until = min(absent.values())
        why = f"waiting for {name_some(absent)}: alive, but has not asked"
        why += _name_heal(view, absent, now)
        return Waiting(why, None if until == math.inf else until)
    return None


def absent_deadlines(view: JobView, config: QuorumConfig) -> dict[str, float]:
    """The living groups that have not asked, each with the time until which it is waited for: Q3.

    ``inf``: as long as it lives. That holds for members of the previous quorum while none of them
    has asked: they may be in the middle of a long step, and newcomers must not start a second
    history (rule Q10).
    """
    if len(view.waiting) + len(view.straggling) == len(view.living):
        return {}  # the usual case, without looking at each of ten thousand groups
    absent = view.living - view.waiting.keys() - view.straggling  # rule Q4
    rivals = absent & view.previous
    first_at = first_asked_at(view)
    if first_at < math.inf:
        # Newcomers that have not asked do not make a running job wait. So if all members of the
        # previous quorum are back, nobody is waited for: that is the fast path (rule Q2).
        deadlines = dict.fromkeys(rivals, first_at + config.join_timeout_s)
        if config.heal_timeout_s is not None:
            for key in rivals & view.heals.keys():
                limit = first_at + config.heal_timeout_s
                patience = view.heals[key].patience_until(config.join_timeout_s)
                deadlines[key] = max(deadlines[key], min(limit, patience))
        return deadlines
    if rivals:
        return dict.fromkeys(rivals, math.inf)
    first = min(waiter.asked_at for waiter in view.waiting.values())
    return {
        key: first + (config.join_timeout_s if key in view.veterans else config.newcomer_timeout_s)
        for key in absent
    }


def first_asked_at(view: JobView) -> float:
    """Since when a member of the previous quorum has asked (``inf``: none has)."""
    asked = (waiter.asked_at for key, waiter in view.waiting.items() if key in view.previous)
    return min(asked, default=math.inf)


def _name_heal(view: JobView, absent: Mapping[str, object], now: float) -> str:
    """Which of the absent heals for the longest time, if one does."""
    healing = {key: view.heals[key] for key in absent if key in view.heals}
    since = {key: heal.since for key, heal in healing.items() if heal.ended_at is None}
    if not since:
        return ""
    first = min(since, key=lambda key: (since[key], key))
    return f"; {first} heals since {now - since[first]:.0f} s"


def _candidates(view: JobView) -> list[Member]:
    """Who could be in the quorum: all who ask, or with shrink_only, no newcomers (rule Q5)."""
    back = [waiter.member for key, waiter in view.waiting.items() if key in view.previous]
    if any(member.shrink_only for member in back):
        return back
    return [waiter.member for waiter in view.waiting.values()]


def _check_progress(
    view: JobView, config: QuorumConfig, candidates: list[Member]
) -> Formed | Waiting:
    """Hold back a quorum that would silently lose committed steps (rule Q7), or skip some."""
    doubted = _doubted(view, config, candidates)
    believed = [member for member in candidates if member.replica_id not in doubted]
    if not believed:
        return Waiting(
            f"{name_some(doubted)}: more than a step ahead of the job, which has committed step "
            f"{view.committed_step}; waiting for a group of the last quorum, to heal from it"
        )
    max_step = max(member.step for member in believed)
    members = tuple(
        _with_doubt(member, is_doubted=member.replica_id in doubted)
        for member in sorted(candidates, key=lambda member: member.replica_id)
    )
    if max_step >= view.committed_step:
        return Formed(members)
    if view.loss_accepted or _is_loss_allowed(view, config):
        return Formed(members, lost_from=view.committed_step)
    done = "finished after" if view.is_finished else "committed"
    return Waiting(
        f"the job has {done} step {view.committed_step}, the groups that ask have at most "
        f"step {max_step}: waiting for a group with the newer state "
        "(or for `lighthouse accept-loss`, which gives it up)"
    )


def _doubted(view: JobView, config: QuorumConfig, candidates: list[Member]) -> dict[str, int]:
    """Whose step is not believed (rule Q14), and which: it is further than a commit ahead of the
    job, though a group of the last quorum lives that does not say so.

    From a quorum to the next a group commits one step, also alone while the others discard it, and
    maybe while this lighthouse was away: then it was not in the last quorum here. Who tells more
    comes from another run, or is wrong, unless it was in a newer quorum elsewhere. A lighthouse
    that has published none yet knows the last one only if all its groups are here.
    """
    limit = view.committed_step + 1
    jumps = {member.replica_id: member.step for member in candidates if member.step > limit}
    if not jumps or config.on_step_jump == "follow":
        return {}
    if view.gathering.num_groups > len(view.previous):
        return {}
    claims = {key for key, waiter in view.waiting.items() if waiter.member.step > limit}
    if not (view.previous & view.living) - claims:
        return {}
    elsewhere = max((jumps[key] for key in jumps if key in view.ahead), default=limit)
    return {key: step for key, step in jumps.items() if step > elsewhere and key not in view.ahead}


def _with_doubt(member: Member, *, is_doubted: bool) -> Member:
    """As it is published: who has the step 0 heals, whatever version its manager has."""
    if is_doubted:
        return replace(member, step=0, doubted_step=member.step)
    return replace(member, doubted_step=0) if member.doubted_step else member


def _is_loss_allowed(view: JobView, config: QuorumConfig) -> bool:
    """Without asking an operator. Who took part in the job never takes it back: it was frozen, or
    cut off, and the others went on."""
    policy = config.on_step_regression
    is_restart = not view.veterans and (policy == "auto" or view.is_finished)
    return policy == "warn" or is_restart


def has_loss_to_accept(view: JobView, config: QuorumConfig, now: float) -> bool:
    """Whether those who ask are behind the job's committed step, and held back because of that,
    or would be as soon as they are enough. Who is still waited for may have the newer state."""
    if _before_all_are_here(view, config, now) is not None or _is_loss_allowed(view, config):
        return False
    candidates = _candidates(view)
    doubted = _doubted(view, config, candidates)
    steps = [member.step for member in candidates if member.replica_id not in doubted]
    return bool(steps) and max(steps) < view.committed_step


def joining(members: tuple[Member, ...], previous: Set[str] | None) -> frozenset[str]:
    """Whose state may not be that of the others, although its step is theirs (rule Q13).

    Those of ``members`` that were not in the ``previous`` quorum, or have not healed since.

    A lighthouse that was restarted does not know that quorum (None); whoever is as far as others
    but was told only of earlier ones was not in it, and may have another state. So may one that has
    restored a checkpoint of a step that was committed in an earlier quorum: the job went back to
    before it once, and did it again.
    """
    max_step = max(member.step for member in members)
    strangers = {member.replica_id for member in members if member.unhealed}
    if previous is None:
        newest = max(each.history for each in members if each.step == max_step)
        strangers |= {each.replica_id for each in members if each.history < newest}
    else:
        strangers |= {each.replica_id for each in members if each.replica_id not in previous}
    at_max = [member for member in members if member.step == max_step]
    if all(member.replica_id in strangers for member in at_max):
        strangers -= _most_trusted(at_max)
    return frozenset(strangers)


def _most_trusted(strangers: list[Member]) -> set[str]:
    """Of ``strangers`` at one step, those from whom all go on, because nobody else is as far."""
    healthy = [each for each in strangers if not each.unhealed]
    if not healthy:
        return {strangers[0].replica_id}  # whoever should have served them is gone
    newest = max(each.history for each in healthy)
    return {each.replica_id for each in healthy if each.history == newest}


def name_some(replica_ids: Mapping[str, object]) -> str:
    """The first few ids in order, and how many more there are."""
    names = sorted(replica_ids)
    more = len(names) - MAX_NAMES_IN_A_REASON
    shown = ", ".join(names[:MAX_NAMES_IN_A_REASON])
    return f"{shown} and {more} more" if more > 0 else shown
