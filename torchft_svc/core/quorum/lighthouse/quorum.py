"""Decides whether the groups that ask are a quorum, and if not, why, and when to look again.

The rule numbers are those of docs/design/quorum.md.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from torchft_svc.core.quorum.activity import HangWatch, Phase
from torchft_svc.core.quorum.lighthouse.membership import (
    AWAITED_MEMBERS,
    GroupState,
    JobView,
    Membership,
)
from torchft_svc.core.quorum.types import Member, Quorum, QuorumConfig


@dataclass(frozen=True, slots=True)
class Formed:
    """The ``members`` of a quorum, sorted by replica id. ``lost_from``: the committed step of the
    job if it goes back with this quorum (rule Q7), else None."""

    members: tuple[Member, ...]
    lost_from: int | None = None


class Why(enum.Enum):
    """Why there is no quorum."""

    NOBODY_ASKS = "no group asks"
    GATHERING = "this lighthouse is new to the job, and waits for groups that it has not seen"
    STARTING = "a cold start waits for groups that are started together"
    AWAITED = "groups that live have not asked"
    TOO_FEW = "too few groups ask"
    NOT_BELIEVED = "all that ask report a step that is not believed"
    WOULD_GO_BACK = "the job would lose committed steps"


@dataclass(frozen=True, slots=True)
class Waiting:
    """No quorum yet; time alone changes that at ``until`` (None: never).

    ``awaited`` have not asked, and ``heal`` is the longest heal among them (replica id, and since
    when). ``num_missing`` groups were not seen yet. ``num_asking`` of ``num_needed`` groups ask,
    and ``num_kept_out`` more may not join because of ``shrink_only``. ``not_believed`` ask, but
    report too high a step. The job has ``committed_step``, in a run that ended on purpose
    (``is_finished``) or not; the groups that ask have at most ``max_step``.
    `torchft_svc.core.quorum.lighthouse.overview.explain` makes the sentence.
    """

    why: Why
    until: float | None = None
    awaited: frozenset[str] = frozenset()
    heal: tuple[str, float] | None = None
    num_missing: int = 0
    num_asking: int = 0
    num_needed: int = 0
    num_kept_out: int = 0
    not_believed: frozenset[str] = frozenset()
    committed_step: int = 0
    max_step: int = 0
    is_finished: bool = False


def decide(view: JobView, config: QuorumConfig, now: float) -> Formed | Waiting:
    """Decide whether the groups that ask are a quorum now."""
    too_early = _before_all_are_here(view, config, now)
    if too_early is not None:
        return too_early
    num_needed = view.requested_min_replicas or config.min_replicas
    num_asking = len(view.waiting)
    if num_asking < num_needed:  # at a cold start, most decisions end here
        return Waiting(Why.TOO_FEW, num_asking=num_asking, num_needed=num_needed)
    candidates = candidates_of(view)
    num_kept_out = num_asking - len(candidates)
    if len(candidates) < num_needed:
        return Waiting(
            Why.TOO_FEW,
            num_asking=len(candidates),
            num_needed=num_needed,
            num_kept_out=num_kept_out,
        )
    return check_progress(view, config, candidates)


def patience(
    groups: Mapping[GroupState, Set[str]], first: Mapping[GroupState, float], config: QuorumConfig
) -> dict[GroupState, float]:
    """The instants until which groups that have not asked are awaited, by state; groups in other
    states are not.

    ``first``: see `JobView`; for HEALED, when the first heal ended.

    All deadlines count from the first request of a member of the last quorum (rules Q3 and Q16).
    Newcomers do not delay members (rules Q2 and Q9), and do not start without them: if no member
    asks, one that may be in a long step is awaited as long as it lives (rule Q10). If no member is
    left, deadlines count from the first request. Stragglers and evicted groups are not awaited
    (rules Q4 and Q18).
    """
    if groups[GroupState.ASKING]:
        since = first[GroupState.ASKING]
        until = {
            GroupState.AWAITED: since + config.join_timeout_s,
            GroupState.HEALING: since + config.healing_timeout_s,
        }
        if groups[GroupState.HEALED]:
            until[GroupState.HEALED] = _healed_until(since, first[GroupState.HEALED], config)
        return until
    if any(groups[state] for state in AWAITED_MEMBERS):
        return dict.fromkeys(AWAITED_MEMBERS, math.inf)
    since = first.get(GroupState.JOINING, math.inf)
    return {
        GroupState.ABSENT: since + config.join_timeout_s,
        GroupState.NEWCOMER: since + config.newcomer_timeout_s,
    }


def _healed_until(since: float, healed_at: float, config: QuorumConfig) -> float:
    """A group whose heal has ended has a step to finish, and gets the join timeout for it."""
    longest = min(since + config.healing_timeout_s, healed_at + config.join_timeout_s)
    return max(since + config.join_timeout_s, longest)


def look_at(members: Membership, config: QuorumConfig) -> float:
    """The time before which there is nothing to decide, because a group is awaited (-inf: none
    is). The cost does not depend on the number of groups."""
    until = patience(members.groups, members.first, config)
    ats = [at for state, at in until.items() if members.groups[state]]
    return min(ats) if ats else -math.inf


def absent_deadlines(view: JobView, config: QuorumConfig) -> dict[str, float]:
    """The groups that are or were awaited, each with its deadline (``inf``: as long as it
    lives)."""
    until = patience(view.groups, view.first, config)
    deadlines = {key: at for state, at in until.items() for key in view.groups[state]}
    if view.groups[GroupState.ASKING]:
        for key in view.groups[GroupState.HEALED]:
            healed_at = view.heals[key].ended_at
            assert healed_at is not None
            deadlines[key] = _healed_until(view.first[GroupState.ASKING], healed_at, config)
    return deadlines


def _before_all_are_here(view: JobView, config: QuorumConfig, now: float) -> Waiting | None:
    """Why it is too early to look at the requests: there is none, or a group is still awaited."""
    if not view.waiting:
        return Waiting(Why.NOBODY_ASKS)
    num_missing = view.gathering.num_groups - len(view.living) - view.num_gone
    until = view.gathering.until
    if until is not None and now < until and num_missing > 0:
        return Waiting(Why.GATHERING, until, num_missing=num_missing)
    starts_at = view.gathering.starts_at
    if starts_at is not None and now < starts_at:
        return Waiting(Why.STARTING, starts_at)
    awaited = {key: at for key, at in absent_deadlines(view, config).items() if at > now}
    if awaited:
        until = min(awaited.values())
        return Waiting(
            Why.AWAITED,
            None if until == math.inf else until,
            awaited=frozenset(awaited),
            heal=_longest_heal(view, awaited),
        )
    return None


def _longest_heal(view: JobView, awaited: Iterable[str]) -> tuple[str, float] | None:
    """The id of the group that has been healing for the longest time, and since when."""
    heals = ((key, view.heals[key]) for key in awaited if key in view.heals)
    healing = [(heal.since, key) for key, heal in heals if heal.ended_at is None]
    if not healing:
        return None
    since, key = min(healing)
    return key, since


def candidates_of(view: JobView) -> list[Member]:
    """All groups that ask; with shrink_only, no newcomers (rule Q5)."""
    back = [waiter.member for key, waiter in view.waiting.items() if key in view.previous]
    if any(member.shrink_only for member in back):
        return back
    return [waiter.member for waiter in view.waiting.values()]


def check_progress(
    view: JobView, config: QuorumConfig, candidates: list[Member]
) -> Formed | Waiting:
    """Hold back a quorum that would silently lose committed steps (rule Q7), or skip some."""
    doubted = doubted_steps(view, config, candidates)
    believed = [member for member in candidates if member.replica_id not in doubted]
    if not believed:
        return Waiting(
            Why.NOT_BELIEVED, not_believed=frozenset(doubted), committed_step=view.committed_step
        )
    max_step = max(member.step for member in believed)
    members = tuple(
        _with_doubt(member, is_doubted=member.replica_id in doubted)
        for member in sorted(candidates, key=lambda member: member.replica_id)
    )
    if max_step >= view.committed_step:
        return Formed(members)
    if view.loss_accepted or is_loss_allowed(view, config):
        return Formed(members, lost_from=view.committed_step)
    return Waiting(
        Why.WOULD_GO_BACK,
        committed_step=view.committed_step,
        max_step=max_step,
        is_finished=view.is_finished,
    )


def doubted_steps(view: JobView, config: QuorumConfig, candidates: list[Member]) -> dict[str, int]:
    """The groups whose step is not believed (rule Q14), and that step: it is more than a commit
    ahead of the job, and a living group of the last quorum does not report the same.

    From one quorum to the next a group commits one step, also alone while the others discard it,
    and maybe while this lighthouse was away. A group that reports more comes from another run, or
    is wrong, unless it was in a newer quorum elsewhere. A lighthouse that has published no quorum
    yet knows the last one only if all its groups are here. One that was restarted may have begun
    with newcomers before the groups of the job were back: for a while these are believed (rule F8).
    """
    limit = _highest_believed(view)
    jumps = {
        member.replica_id: member.step
        for member in candidates
        if member.step > limit and not 0 < member.seen_quorum_id < view.begun_anew
    }
    if not jumps or config.on_step_jump == "follow":
        return {}
    if view.gathering.num_groups > len(view.previous):
        return {}
    claims = {key for key, waiter in view.waiting.items() if waiter.member.step > limit}
    if not (view.previous & view.living) - claims:
        return {}
    elsewhere = max((jumps[key] for key in jumps if key in view.ahead), default=limit)
    return {key: step for key, step in jumps.items() if step > elsewhere and key not in view.ahead}


def _highest_believed(view: JobView) -> int:
    """The highest step that a group of the job may have: the next one, as far as the lighthouse
    knows, or one that a member has committed in the last quorum, of whose steps not all are
    reported (rule E5)."""
    in_term = [
        waiter.member.step
        for key, waiter in view.waiting.items()
        if key in view.previous and 0 < waiter.member.step_quorum_id == view.last_quorum_id
    ]
    return max(view.committed_step + 1, max(in_term, default=0))


def _with_doubt(member: Member, *, is_doubted: bool) -> Member:
    """The member as it is published: a group with step 0 heals, whatever version its manager
    has."""
    if is_doubted:
        return replace(member, step=0, doubted_step=member.step)
    return replace(member, doubted_step=0) if member.doubted_step else member


def is_loss_allowed(view: JobView, config: QuorumConfig) -> bool:
    """Whether a quorum may lose committed steps without an operator. No group that took part in
    the job may take it back: it was frozen, or cut off, and the others went on."""
    policy = config.on_step_regression
    is_restart = view.num_veterans == 0 and (policy == "auto" or view.is_finished)
    return policy == "warn" or is_restart


def has_loss_to_accept(view: JobView, config: QuorumConfig, now: float) -> bool:
    """Whether the groups that ask are held back because they are behind the job's committed
    step, or would be as soon as they are enough. A group that is still awaited may have the
    newer state."""
    if _before_all_are_here(view, config, now) is not None or is_loss_allowed(view, config):
        return False
    candidates = candidates_of(view)
    doubted = doubted_steps(view, config, candidates)
    steps = [member.step for member in candidates if member.replica_id not in doubted]
    return bool(steps) and max(steps) < view.committed_step


def joining(members: tuple[Member, ...], previous: Quorum | None) -> frozenset[str]:
    """Members whose state may differ from that of the others although their step is equal (rule
    Q13).

    Those that were not in the ``previous`` quorum, or have not healed since, as one that was to
    heal there, and has not received it: it reports earlier quorums only. A restarted lighthouse
    does not know that quorum (None): a group at the highest step that reports only earlier quorums
    than others was not in it, and may have another state. So may a group that has restored a
    checkpoint of a step that was committed in an earlier quorum: the job went back to before it
    once, and repeated it.
    """
    max_step = max(member.step for member in members)
    strangers = {member.replica_id for member in members if member.unhealed}
    if previous is None:
        newest = max(each.history for each in members if each.step == max_step)
        strangers |= {each.replica_id for each in members if each.history < newest}
    else:
        missed_it = {each.replica_id for each in members if _has_missed(each, previous)}
        met = {each.replica_id for each in previous.participants} - missed_it
        strangers |= {each.replica_id for each in members} - met
    at_max = [member for member in members if member.step == max_step]
    if all(member.replica_id in strangers for member in at_max):
        strangers -= _most_trusted(at_max)
    return frozenset(strangers)


def _has_missed(member: Member, quorum: Quorum) -> bool:
    """Whether it was to heal in ``quorum``, and has not received it; those of versions that report
    no ids have."""
    reports_ids = member.seen_quorum_id > 0 or member.step_quorum_id > 0
    is_behind = reports_ids and member.seen_quorum_id < quorum.quorum_id
    return is_behind and member.replica_id in quorum.joining


def _most_trusted(strangers: list[Member]) -> set[str]:
    """The most advanced of ``strangers`` that are at one step; every other group heals from
    them."""
    healthy = [each for each in strangers if not each.unhealed]
    if not healthy:
        return {strangers[0].replica_id}  # the group that should have served them is gone
    newest = max(each.history for each in healthy)
    return {each.replica_id for each in healthy if each.history == newest}


def to_evict(members: Membership, hangs: HangWatch, candidates: Iterable[str]) -> list[str]:
    """The hanging groups to leave out now (rule Q18), if one of ``candidates`` waits for them.

    If all stand still, as on a file system that does not answer, leaving some of them out helps
    nobody. So a member of the last quorum must wait that was not left out itself. One that trains
    for less than the hang timeout may stand still in the same place, and exceed it a moment later.
    """
    if not hangs.unhandled or not any(
        waits_for_others(members, hangs, each) for each in candidates
    ):
        return []
    evicted = sorted(each for each in hangs.unhandled if members.state(each) in AWAITED_MEMBERS)
    hangs.unhandled.clear()
    return evicted


def can_lose_a_group(members: Membership, may_end: Set[str]) -> bool:
    """Whether the last quorum has enough living groups for one of them to be left out (rule Q26),
    without those that ``may_end`` just now, or hang.

    Not before the first quorum here: until then it is not known how many the groups ask for.
    """
    if members.previous is None:
        return False
    asked_for = max(each.min_replicas for each in members.previous.participants)
    awaited = (GroupState.ASKING, *AWAITED_MEMBERS)
    staying = [each for each in members.quorum_left() if members.state(each) in awaited]
    return len(set(staying) - may_end) > max(1, members.min_replicas, asked_for)


def waits_for_others(members: Membership, hangs: HangWatch, replica_id: str) -> bool:
    """Whether a group of the last quorum waits: for the next one, or for others in a step."""
    doing = hangs.activity(replica_id)
    waits = doing is not None and doing.phase is Phase.QUORUM
    return waits and members.state(replica_id) in (GroupState.ASKING, *AWAITED_MEMBERS)
