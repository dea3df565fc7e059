"""Looks at a lighthouse now and then: which groups it awaits (I5), and which it remembers (I7).

Like the other checks it keeps a ledger of its own, from what the lighthouse receives and sends.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from tools.sim.invariants import SLACK_S, must, parts_of
from tools.sim.ledger import Ledger
from tools.sim.left_out import (
    ROUNDING_S,
    check_all_are_in,
    check_eviction,
    check_hangs_are_handled,
    check_heals,
    check_history,
    check_left_healing,
)
from torchft_svc.core.quorum.activity import Activity, Phase
from torchft_svc.core.quorum.lighthouse.jobs import (
    MAX_LOSSES_SENT,
    Jobs,
    ReportEviction,
    ReportLeftHealing,
)
from torchft_svc.core.quorum.lighthouse.prepared_spares import MAX_PREPARED_SPARES
from torchft_svc.core.quorum.lighthouse.quorum import Formed, Waiting
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Member, Quorum, QuorumConfig

LOOK_S = 0.25
_REPLICA_ID = re.compile(r"g\d+:\S+")

Key = tuple[str, str]  # job and replica id


class LivenessChecks:
    """Checks one life of a lighthouse."""

    def __init__(self, config: QuorumConfig) -> None:
        self._config = config
        self._longest_s = config.heal_timeout_s or config.join_timeout_s
        self._ledgers: dict[str, Ledger] = {}

    def record_sign(self, key: Key) -> None:
        self._ledger(key[0]).dead.discard(key[1])

    def asked(self, key: Key, member: Member, now: float) -> None:
        ledger = self._ledger(key[0])
        ledger.dead.discard(key[1])
        since, gave_up_at = ledger.gave_up.pop(key[1], (now, now))
        if now - gave_up_at > self._config.heartbeat_timeout_s:
            since = now
        since = ledger.asking.setdefault(key[1], since)
        if key[1] in ledger.previous:
            ledger.first_back_at = min(since, ledger.first_back_at or since)
        for ids in (ledger.late, ledger.evicted, ledger.recalled):
            ids.discard(key[1])
        self.does(key, Activity(Phase.QUORUM, member.step, now), now)

    def does(self, key: Key, activity: Activity, now: float) -> None:
        ledger = self._ledger(key[0])
        ledger.doing[key[1]], ledger.reported_at[key[1]] = activity, now

    def withdrew(self, key: Key, now: float) -> None:
        ledger = self._ledger(key[0])
        since = ledger.asking.pop(key[1], None)
        if since is not None:
            ledger.gave_up[key[1]] = (since, now)

    def gone(self, key: Key, now: float) -> None:
        """Record a loss; hanging groups are awaited again if no other member is left."""
        ledger = self._ledger(key[0])
        ledger.forget(key[1])
        left = ledger.going_on()
        if ledger.may_be_late(now, self._config.join_timeout_s):
            left &= ledger.asking.keys()
        if not left:
            ledger.recalled |= ledger.evicted
            ledger.evicted.clear()

    def over(self, name: str) -> None:
        """No group of the job is left: its last quorum is forgotten."""
        self._ledgers[name] = Ledger()

    def evicted(self, out: ReportEviction, now: float) -> None:
        ledger = self._ledger(out.job)
        check_eviction(ledger, out, self._config, now)
        ledger.recalled.discard(out.replica_id)
        ledger.evicted.add(out.replica_id)

    def left_healing(self, left: ReportLeftHealing, now: float) -> None:
        ledger = self._ledger(left.job)
        check_left_healing(ledger, left, self._config, now)
        ledger.left_healing.add(left.replica_id)

    def term_ended(self, key: Key, over: TermEnds, now: float) -> None:
        """Record that ``over`` is sent to a member. If others have waited in that step for too
        long, those that have not begun it are stragglers, unless a member asks."""
        ledger = self._ledger(key[0])
        if ledger.asking.keys() & ledger.previous:
            return
        waiting = [ledger.doing[each] for each in ledger.who(Phase.QUORUM) & ledger.going_on()]
        since = [doing.since for doing in waiting if doing.step == over.step]
        due_at = min(since, default=now) + self._config.join_timeout_s - ROUNDING_S
        if now >= due_at:
            known = {
                each for each in ledger.going_on() if ledger.reported_at.get(each, 0.0) >= due_at
            }
            began = {each for each in known if _has_begun(ledger, each, over.step)}
            ledger.late |= known - ledger.asking.keys() - began

    def published(self, name: str, quorum: Quorum, known: Collection[Key], now: float) -> None:
        ledger = self._ledger(name)
        check_history(name, ledger, quorum)
        check_heals(ledger, quorum, self._config, now)
        check_all_are_in(ledger, quorum, [key for job, key in known if job == name])
        ledger.late |= ledger.evicted
        ledger.evicted.clear()
        ledger.recalled.clear()
        ledger.previous = frozenset(member.replica_id for member in quorum.participants)
        ledger.due_since = ledger.first_back_at = None
        for replica_id in ledger.previous:
            ledger.asking.pop(replica_id, None)

    def check_jobs(self, core: Jobs, alive: Collection[Key], now: float) -> None:
        """A straggler delays the others once, a dead group not at all."""
        for name, ledger in self._ledgers.items():
            decision = core.pause(name, now).decision
            self._check_due(name, ledger, decision, now)
            check_hangs_are_handled(name, ledger, self._config, now)
            awaited = decision.awaited if isinstance(decision, Waiting) else frozenset()
            if ledger.going_on():
                held = awaited & ledger.evicted
                must(not held, "I5", f"{name} waits for {held}, which hang and were left out")
            for each in awaited:
                must((name, each) in alive, "I5", f"{name} waits for {each}, which is dead")
                must(each not in ledger.late, "I5", f"{name} waits for the straggler {each} again")
            back = [since for each, since in ledger.asking.items() if each in ledger.previous]
            if back and now - min(back) > self._longest_s + SLACK_S:
                must(not awaited, "I5", f"{name} waits for {awaited} since {min(back):.2f} s")
                ledger.late |= ledger.going_on() - ledger.asking.keys()

    def _ledger(self, name: str) -> Ledger:
        return self._ledgers.setdefault(name, Ledger())

    def _check_due(self, name: str, ledger: Ledger, decision: Formed | Waiting, now: float) -> None:
        if isinstance(decision, Waiting):
            ledger.due_since = None
        elif ledger.due_since is None:
            ledger.due_since = now
        else:
            is_new = now - ledger.due_since < SLACK_S
            must(is_new, "I5", f"a quorum of {name} is due since {ledger.due_since:.2f} s")

    def check_memory(self, core: Jobs, alive: Collection[Key]) -> None:
        """Check that the core remembers no dead group, except those that it may need again.

        These are the groups of the last quorum, the few to which it may have to send a loss, or an
        order to end, again or when they are back, and members that have hung: time that was lost to
        a hang is lost to something else if they turn out to have died.
        """
        known = {replica_id for _, replica_id in alive}
        for job in core._jobs.values():
            must(len(job.term.lost) <= MAX_LOSSES_SENT, "I7", "too many losses are remembered")
            must(len(job.away_spares) <= MAX_PREPARED_SPARES, "I7", "too many spares are away")
            known |= job.term.lost.keys() | job.left.keys() | job.away_spares.keys()
            known |= job.accounts._blamed_groups
        for ended in core._ended.values():  # spares whose order to end may be lost, and members
            must(len(ended.spares) <= MAX_PREPARED_SPARES, "I7", "too many spares are remembered")
            known |= ended.spares | ended.left.keys() | ended.accounts._blamed_groups
        for ledger in self._ledgers.values():
            known |= ledger.previous
        for name in _names_of(core):
            must(name in known, "I7", f"the lighthouse still remembers {name}")


def _has_begun(ledger: Ledger, replica_id: str, step: int | None) -> bool:
    doing = ledger.doing.get(replica_id)
    if doing is None or step is None or doing.phase is Phase.HEALING:
        return True
    return doing.step > step or (doing.step == step and doing.phase is not Phase.IDLE)


def _names_of(core: Jobs) -> Iterator[str]:
    for _, part in parts_of(core, "lighthouse"):
        for each in part:
            if isinstance(each, str) and _REPLICA_ID.fullmatch(each):
                yield each
