"""Checks which groups are left out of a quorum because they hang or heal, and which not (I5)."""

from __future__ import annotations

from collections.abc import Collection

from tools.sim.invariants import SLACK_S, must
from tools.sim.ledger import Ledger
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.jobs import ReportEviction, ReportLeftHealing
from torchft_svc.core.quorum.types import Quorum, QuorumConfig

# Phases that a group ends by itself; in others it waits, or has another deadline.
_OWN_WORK = (Phase.TRAINING, Phase.VOTING)
# Waiting groups report that with each heartbeat, every 0.3 s.
HANDLE_S = 1.0
ROUNDING_S = 1e-6


def check_eviction(ledger: Ledger, out: ReportEviction, config: QuorumConfig, now: float) -> None:
    """The group hangs, and another one of its quorum, which is not left out itself, waits for
    it."""
    who = out.replica_id
    must(who in _hung(ledger, config, now), "I5", f"{who} is left out: {ledger.doing.get(who)}")
    must(who in out.recipients, "I5", f"{who} is left out, and not informed")
    if who in ledger.previous:  # or that was published by an earlier lighthouse
        # A group that was left out and is awaited again may be the first one to continue.
        back = ledger.recalled & ledger.previous & ledger.who(Phase.QUORUM)
        waiting = (_waiting(ledger) | back) - {who}
        must(bool(waiting), "I5", f"{who} is left out, though nobody waits for it")


def check_hangs_are_handled(name: str, ledger: Ledger, config: QuorumConfig, now: float) -> None:
    """Check that nobody waits long for a hanging group after having reported that it waits."""
    hung = ledger.going_on() | (ledger.recalled & ledger.previous)
    hung &= _hung(ledger, config, now) - ledger.asking.keys()
    is_certain = not ledger.may_be_late(now, config.join_timeout_s)
    if config.on_hang != "evict" or not (hung and _waiting(ledger) and is_certain):
        ledger.hangs_unhandled_since = None
    elif ledger.hangs_unhandled_since is None:
        ledger.hangs_unhandled_since = now
    else:
        is_new = now - ledger.hangs_unhandled_since < HANDLE_S
        must(is_new, "I5", f"{name} waits for {sorted(hung)[:4]}, which hang")


def check_left_healing(
    ledger: Ledger, left: ReportLeftHealing, config: QuorumConfig, now: float
) -> None:
    """Check that it is reported once for each group, when its time is up."""
    who = left.replica_id
    must(who in ledger.who(Phase.HEALING), "I5", f"{who} was left out, but does not heal")
    must(who not in ledger.left_healing, "I5", f"{who} was left out, which is reported twice")
    _check_time_is_up(ledger, who, config, now)


def check_heals(ledger: Ledger, quorum: Quorum, config: QuorumConfig, now: float) -> None:
    """A healing group is left out only when its time is up; for others that was reported."""
    members = {member.replica_id for member in quorum.participants}
    left = (ledger.going_on() & ledger.who(Phase.HEALING)) - ledger.left_healing - members
    if left:
        _check_time_is_up(ledger, min(left), config, now)


def _check_time_is_up(ledger: Ledger, healing: str, config: QuorumConfig, now: float) -> None:
    back = [since for each, since in ledger.asking.items() if each in ledger.previous]
    if back:
        waited_s = now - min(back)
        is_over = waited_s + SLACK_S >= (config.heal_timeout_s or config.join_timeout_s)
        must(is_over, "I5", f"{healing} heals, and is left out after {waited_s:.2f} s")


def check_history(name: str, ledger: Ledger, quorum: Quorum) -> None:
    """Newcomers do not continue without a member of the last quorum while some of its members
    hang."""
    members = {member.replica_id for member in quorum.participants}
    hung = (ledger.evicted | ledger.recalled) - ledger.dead
    must(
        not (hung & ledger.previous) or bool(members & ledger.previous),
        "I4",
        f"{name} begins anew with {sorted(members)[:4]} while {sorted(hung)[:4]} hang",
    )


def check_all_are_in(ledger: Ledger, quorum: Quorum, known: Collection[str]) -> None:
    """Every group that asks is in the quorum.

    Except newcomers if a member wants none (``shrink_only``), and groups whose name another one of
    the ``known`` groups has.
    """
    members = {member.replica_id: member for member in quorum.participants}
    left = ledger.asking.keys() - members.keys()
    if any(each.shrink_only for each in members.values()):
        left &= ledger.previous
    names = [each.partition(":")[0] for each in known]
    left = {each for each in left if names.count(each.partition(":")[0]) < 2}
    must(not left, "I5", f"{sorted(left)[:4]} ask, and are not in the quorum")


def _waiting(ledger: Ledger) -> set[str]:
    return ledger.who(Phase.QUORUM) & ledger.going_on()


def _hung(ledger: Ledger, config: QuorumConfig, now: float) -> set[str]:
    if config.hang_timeout_s is None:
        return set()
    since = now - config.hang_timeout_s + ROUNDING_S
    return {each for each in ledger.who(*_OWN_WORK) if ledger.doing[each].since <= since}
