"""The decisions once more, slow and obvious, written from docs/design/quorum.md and not from
the code.

Nothing here remembers or prepares anything: every question is answered by looking at everyone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.lighthouse.membership import GroupState, Heal, JobView
from torchft_svc.core.quorum.types import Member, Quorum, QuorumConfig


def waited_for(view: JobView, config: QuorumConfig) -> dict[str, float]:
    """Return who is waited for, and until when (rules Q3, Q4, Q9, Q10 and Q16)."""
    left_out = view.groups[GroupState.STRAGGLING] | view.groups[GroupState.EVICTED]
    absent = [x for x in view.living if x not in view.waiting and x not in left_out]
    previous = view.previous
    members_that_ask = [view.waiting[x].asked_at for x in previous if x in view.waiting]
    members_that_are_expected = [x for x in previous if x in absent]
    result = {}
    for replica_id in absent:
        if members_that_ask:  # a running job: newcomers can not hold it up
            if replica_id in members_that_are_expected:
                result[replica_id] = min(members_that_ask) + config.join_timeout_s
                if config.heal_timeout_s is not None and replica_id in view.heals:
                    result[replica_id] = longer_for_a_heal(
                        view.heals[replica_id], min(members_that_ask), config
                    )
        elif members_that_are_expected:  # newcomers can not start without them
            if replica_id in members_that_are_expected:
                result[replica_id] = math.inf
        else:
            timeout_s = config.join_timeout_s
            if (
                replica_id in view.groups[GroupState.NEWCOMER]
                and config.startup_timeout_s is not None
            ):
                timeout_s = config.startup_timeout_s
            result[replica_id] = min(w.asked_at for w in view.waiting.values()) + timeout_s
    return result


def longer_for_a_heal(heal: Heal, first: float, config: QuorumConfig) -> float:
    """The end of a wait that is no longer than the heal timeout, no shorter than the join timeout.

    In between it is as long as the group heals, and then as long as others get to ask.
    """
    assert config.heal_timeout_s is not None
    if (
        heal.ended_at is None
        or heal.ended_at + config.join_timeout_s > first + config.heal_timeout_s
    ):
        return first + config.heal_timeout_s
    return max(first, heal.ended_at) + config.join_timeout_s


def still_waited_for(view: JobView, config: QuorumConfig, now: float) -> list[float]:
    """The times until which groups are waited for, one for each.

    A lighthouse without a quorum lets those gather that were in one elsewhere.
    """
    gather_until = view.gathering.until
    few = len(view.living) + view.num_gone < view.gathering.num_groups
    if few and gather_until is not None and now < gather_until:
        return [gather_until]
    starts_at = view.gathering.starts_at
    if starts_at is not None and now < starts_at:
        return [starts_at]
    if view.previous and all(replica_id in view.waiting for replica_id in view.previous):
        return []
    return [until for until in waited_for(view, config).values() if until > now]


def decide(
    view: JobView, config: QuorumConfig, now: float
) -> tuple[list[Member], int | None] | float:
    """The members and the step that is lost with them, or when to look again (inf: never)."""
    if not view.waiting:
        return math.inf
    still = still_waited_for(view, config, now)
    if still:
        return min(still)
    asking = [view.waiting[replica_id].member for replica_id in sorted(view.waiting)]
    if any(member.shrink_only and member.replica_id in view.previous for member in asking):
        asking = [member for member in asking if member.replica_id in view.previous]
    minimums = [waiter.member.min_replicas for waiter in view.waiting.values()]
    if len(asking) < (max(minimums) or config.min_replicas):
        return math.inf
    wrong = not_believed(view, config, asking)
    believed = [member for member in asking if member not in wrong]
    if not believed:
        return math.inf
    asking = [
        replace(each, step=0, doubted_step=each.step) if each in wrong else each for each in asking
    ]
    return progress(view, config, asking, max(member.step for member in believed))


def progress(
    view: JobView, config: QuorumConfig, asking: list[Member], newest: int
) -> tuple[list[Member], int | None] | float:
    """Decide whether the job may continue with these members (rule Q7)."""
    if newest < view.committed_step:
        if view.loss_accepted:
            return asking, view.committed_step
        if config.on_step_regression == "warn":
            return asking, view.committed_step
        if view.num_veterans > 0:  # who trained in this job does not take it back
            return math.inf
        if config.on_step_regression == "hold" and not view.is_finished:
            return math.inf
        return asking, view.committed_step
    return asking, None


def not_believed(view: JobView, config: QuorumConfig, asking: list[Member]) -> list[Member]:
    """The members who are more than a step ahead, against the word of a living member."""
    usual = view.committed_step + 1
    for each in asking:  # who has committed in the last quorum shows how far that is
        if each.replica_id in view.previous and 0 < each.step_quorum_id == view.last_quorum_id:
            usual = max(usual, each.step)
    witnesses = []
    for replica_id in view.previous:
        waiter = view.waiting.get(replica_id)
        if replica_id in view.living and (waiter is None or waiter.member.step <= usual):
            witnesses.append(replica_id)
    few = view.gathering.num_groups > 0 and len(view.previous) < view.gathering.num_groups
    if config.on_step_jump == "follow" or not witnesses or few:
        return []
    from_elsewhere = [member.step for member in asking if member.replica_id in view.ahead]
    most = max([usual, *from_elsewhere])
    wrong = [each for each in asking if each.step > most and each.replica_id not in view.ahead]
    return [each for each in wrong if not 0 < each.seen_quorum_id < view.begun_anew]


def assign(quorum: Quorum, replica_id: str, group_rank: int, init_sync: bool) -> QuorumResult:
    """Compute the part of one worker in a quorum (I2)."""
    ordered = sorted(quorum.participants, key=lambda member: member.replica_id)
    ids = [member.replica_id for member in ordered]
    me = ids.index(replica_id)
    top = max(member.step for member in ordered)
    up_to_date = []
    for joins in (False, True):
        for i in range(len(ordered)):
            wanted = top == 0 or (ids[i] in quorum.joining) == joins
            wanted = wanted and not ordered[i].doubted_step
            if ordered[i].step == top and wanted and i not in up_to_date:
                up_to_date.append(i)
        if up_to_date:
            break
    behind = [i for i in range(len(ordered)) if i not in up_to_date]
    source_of: dict[int, int] = {}
    if top == 0:
        for i in range(1, len(ordered)):
            if init_sync:
                source_of[i] = 0
    else:
        turn = group_rank
        for i in behind:
            source_of[i] = up_to_date[turn % len(up_to_date)]
            turn += 1
    targets = [i for i in range(len(ordered)) if source_of.get(i) == me]
    extras = {i: followers(up_to_date, source_of[i]) for i in source_of if top > 0}
    turn = group_rank
    for _ in range(1, max(member.commit_failures for member in ordered)):
        turn += 1  # the stores before did not help
    host = ordered[up_to_date[turn % len(up_to_date)]]
    return QuorumResult(
        quorum_id=quorum.quorum_id,
        group_rank=group_rank,
        replica_rank=me,
        replica_world_size=len(ordered),
        max_step=top,
        max_replica_rank=up_to_date.index(me) if me in up_to_date else None,
        max_world_size=len(up_to_date),
        store_address=host.store_address,
        recover_src_replica_rank=source_of.get(me),
        recover_src_manager_address=ordered[source_of[me]].address if me in source_of else "",
        recover_dst_replica_ranks=tuple(targets),
        recover_extra_src_manager_addresses=tuple(ordered[i].address for i in extras.get(me, [])),
        recover_extra_dst_replica_ranks=tuple(
            i for i in range(len(ordered)) if me in extras.get(i, [])
        ),
        commit_failures=max(member.commit_failures for member in ordered),
        replica_ids=tuple(ids),
        steady=top > 0 and not behind and len(ids) > 1 and all(each.steady for each in ordered),
    )


def followers(up_to_date: list[int], source: int) -> list[int]:
    """Three more than the one that somebody heals from, in a circle."""
    found: list[int] = []
    candidate = source
    while len(found) < 3:
        candidate = up_to_date[(up_to_date.index(candidate) + 1) % len(up_to_date)]
        if candidate == source:
            break
        found.append(candidate)
    return found
