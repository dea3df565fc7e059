"""Checks the promises I1 to I7 on what happens, as it happens; each by its name (rule X4).

The checks keep ledgers of their own, from what was said aloud, and take nothing from the core on
trust.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.lighthouse.incidents import MAX_INCIDENTS, JobLedger
from torchft_svc.core.quorum.lighthouse.jobs import ReportHang, ReportLoss
from torchft_svc.core.quorum.lighthouse.lighthouse import Publish
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, Quorum
from torchft_svc.core.quorum.worker.step import StepState

# A timer of the world is exact; what it starts may still need a few messages.
SLACK_S = 2.0
# Walking through the core costs more than an event: do it now and then.
EVENTS_BETWEEN_WALKS = 2000
# One may have been under way when the news of a newcomer came; in the next one all learn of it.
MAX_STEPS_WITH_NEWCOMER = 2
# Until members know that a group waits; a few messages.
NEWS_S = 0.5
# What a collection may hold beside one entry (or three) for each group that is alive.
ENTRIES_PER_GROUP, SPARE_ENTRIES = 3, 32


class InvariantViolated(Exception):
    """``name`` (I1 to I7) does not hold."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.name = name
        self.what = what

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


def first_violation(run: Callable[[], None]) -> tuple[str | None, str]:
    """Which invariant falls in ``run``, and why (None: none does)."""
    try:
        run()
    except InvariantViolated as fall:
        return fall.name, fall.what
    except Exception as error:  # noqa: BLE001 - whatever the core raises is a fall, too
        return "crash", f"{type(error).__name__}: {error}"
    return None, ""


def must(holds: bool, name: str, what: Callable[[], str] | str) -> None:
    if not holds:
        raise InvariantViolated(name, what if isinstance(what, str) else what())


SettledSince = Callable[[str], float]  # a newcomer
Places = tuple[tuple[str, str, str], ...]
Barrier = tuple[int, int]  # round and step


class Ids:
    """I1: quorum ids strictly grow per job; one id never names two member lists.

    If the wall clock was set back, a new lighthouse knows earlier ids only from the groups that
    ask: then no group may receive an id below one that it has reported.
    """

    def __init__(self, is_clock_honest: bool) -> None:
        self._is_clock_honest = is_clock_honest
        self._last: dict[str, tuple[int, Places]] = {}
        self._spent: dict[str, int] = {}

    def restarted(self) -> None:
        """Forget unreported ids if the clock was set back: a new lighthouse may repeat them."""
        if not self._is_clock_honest:
            self._last.clear()
            self._spent.clear()

    def spent(self, job: str, quorum_id: int) -> None:
        """The members leave this quorum: none of them may meet in it again."""
        self._spent[job] = max(quorum_id, self._spent.get(job, 0))

    def published(self, job: str, quorum: Quorum) -> None:
        places = tuple(
            (each.replica_id, each.address, each.store_address) for each in quorum.participants
        )
        new_id = quorum.quorum_id
        must(
            new_id > self._spent.get(job, 0), "I1", f"id {new_id} is that of a quorum that is over"
        )
        last_id, last_places = self._last.get(job, (0, ()))
        failed = any(member.commit_failures for member in quorum.participants)
        for member in quorum.participants:
            seen = member.seen_quorum_id
            must(new_id >= seen, "I1", f"{member.replica_id} received {seen}, now {new_id}")
        if places == last_places and not failed:
            must(new_id >= last_id, "I1", f"id {new_id} after {last_id}")
        else:
            must(new_id > last_id, "I1", f"id {new_id} after {last_id}, for another quorum")
        self._last[job] = (new_id, places)


class Agreement:
    """I2: all members of a quorum compute the same order, store, and heal plan."""

    def __init__(self) -> None:
        self._quorums: dict[str, _Agreed] = {}

    def assigned(self, job: str, quorum: Quorum, part: QuorumResult, group_rank: int) -> None:
        agreed = self._quorums.get(job)
        if agreed is None or agreed.quorum is not quorum:
            agreed = self._quorums[job] = _Agreed(quorum)
        common = (part.quorum_id, part.replica_ids, part.store_address, part.max_step)
        first = agreed.common.setdefault(group_rank, common)
        must(first == common, "I2", lambda: f"{common} is not {first}")
        me = part.replica_ids[part.replica_rank]
        steps = agreed.steps
        must(part.max_step == max(steps.values()), "I2", f"max_step is {part.max_step}")
        if part.recover_src_replica_rank is not None:
            source = part.replica_ids[part.recover_src_replica_rank]
            must(source != me, "I2", f"{me} heals from itself")
            must(
                steps[source] == part.max_step,
                "I2",
                f"{me} heals from {source}, which is at {steps[source]} of {part.max_step}",
            )
        behind = steps[me] < part.max_step
        must(
            not behind or part.recover_src_replica_rank is not None,
            "I2",
            f"{me} is behind and does not heal",
        )
        healing = agreed.healing.setdefault(group_rank, {})
        healing[part.replica_rank] = (part.recover_src_replica_rank, part.recover_dst_replica_ranks)
        if len(healing) == len(part.replica_ids):
            for rank, (source_rank, _) in healing.items():
                if source_rank is not None:
                    served = rank in healing[source_rank][1]
                    must(served, "I2", f"{source_rank} does not know that it heals {rank}")


@dataclass(slots=True)
class _Agreed:
    quorum: Quorum
    common: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    healing: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = field(default_factory=dict)
    steps: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = {member.replica_id: member.step for member in self.quorum.participants}


class Identity:
    """I3: groups that committed the same step hold identical state.

    "The same step" is a step of one quorum. If one group commits a step that the others discard,
    they may repeat it without that group (ARCHITECTURE.md); but different states never meet in one
    sum.
    """

    # Commits of one quorum and step happen close together: older ones need not be remembered.
    MAX_REMEMBERED = 4096

    def __init__(self) -> None:
        self._committed: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._yes: dict[tuple[str, Barrier], set[int]] = {}
        self._fates: dict[tuple[str, int, int], list[tuple[Process, bool]]] = {}

    def contributed(self, where: str, states: dict[str, tuple[int, int]]) -> None:
        """``states``: step and weights of each worker that contributes to one sum."""
        must(
            len(set(states.values())) <= 1,
            "I3",
            lambda: f"different states (step, weights) in one sum of {where}: {states}",
        )

    def divided(self, where: str, num_groups: dict[str, int]) -> None:
        """``num_groups``: by how many groups each worker that contributes divides its gradients."""
        must(
            all(num == len(num_groups) for num in num_groups.values()),
            "I3",
            lambda: f"the sum of {where} is no average of those that contribute: {num_groups}",
        )

    def committed(self, key: tuple[Any, ...], who: str, weights: int) -> None:
        """``key``: job, group rank, quorum id and step."""
        other, theirs = self._committed.setdefault(key, (who, weights))
        must(theirs == weights, "I3", f"{who} and {other} committed {key} with different weights")
        if len(self._committed) > self.MAX_REMEMBERED:
            del self._committed[next(iter(self._committed))]

    def voted_yes(self, group: str, barrier: Barrier, group_rank: int) -> None:
        self._yes.setdefault((group, barrier), set()).add(group_rank)
        if len(self._yes) > self.MAX_REMEMBERED:
            del self._yes[next(iter(self._yes))]

    def decided(self, group: str, barrier: Barrier, group_world_size: int) -> None:
        """A group commits as a whole, or not at all."""
        yes = self._yes.get((group, barrier), set())
        must(
            len(yes) == group_world_size,
            "I3",
            f"{group} commits in {barrier}, where only ranks {sorted(yes)} said yes",
        )

    def shared_fate(self, barrier: tuple[str, int, int], worker: Process, committed: bool) -> None:
        """All living workers of a group commit a step, or all discard it."""
        fates = self._fates.setdefault(barrier, [])
        for other, theirs in fates:
            differ = f"{(worker.name, committed)}, but {(other.name, theirs)} in {barrier}"
            must(committed is theirs or other.is_dead, "I3", differ)
        fates.append((worker, committed))
        if len(self._fates) > self.MAX_REMEMBERED:
            del self._fates[next(iter(self._fates))]


class Progress:
    """I4: a job's committed step never goes back unless it is accepted.

    It is accepted if the policy is to warn, or if no group of the job is left, and is reported. A
    new lighthouse knows no more than the groups that have a session with it. A quorum with a higher
    id, which newcomers report when nobody else is left, is newer than its own: another lighthouse
    may have continued the job, or the wall clock was set back.
    """

    def __init__(self, policy: str, went_back: dict[str, int]) -> None:
        """``went_back`` gets the last quorum of each job that gave up steps, and reported it."""
        self._policy = policy
        self._committed: dict[str, int] = {}
        self._reported: dict[str, int] = {}  # since its last quorum, from those that have a session
        # The last quorum and step that each group has reported.
        self._took_part: dict[str, dict[str, tuple[int, int]]] = {}
        self._accepted: set[str] = set()
        self._last_ids: dict[str, int] = {}  # of the jobs
        # Of the last quorum of a job that a lighthouse has published: the groups that have not
        # ended on purpose.
        self._remaining: dict[tuple[object, str], set[str]] = {}
        self._members: dict[str, set[str]] = {}  # of the last quorum
        # How far they have reported to be in it if its steps may ask nobody, until one of them asks
        # or is gone.
        self._reached: dict[str, dict[str, int]] = {}
        self._went_back = went_back
        self._begun_anew: dict[tuple[object, str], int] = {}  # by newcomers, in a lighthouse's life

    def opened(self, job: str, replica_id: str, last: LastQuorum) -> None:
        """A session begins, with what the group knew when it connected: if the lighthouse was
        frozen meanwhile, the group may be elsewhere by now."""
        if last != NO_QUORUM:
            took_part = self._took_part.setdefault(job, {})
            if job not in self._members and last.quorum_id > self._last_ids.get(job, 0):
                self._committed.pop(job, None)
            took_part[replica_id] = last.quorum_id, last.max_step
            self._reported[job] = max(self._reported.get(job, 0), last.max_step)

    def asked(self, job: str, member: Member, has_rival: Callable[[], bool]) -> None:
        """A group asks, maybe as another incarnation; it is not let in while a rival with its
        name lives.

        The others may have discarded the last step that it committed in its last quorum. They
        repeat that step if the group is kept out of the next quorum (rules Q5 and Q7).
        """
        self._note_progress(job, member.replica_id)
        took_part = self._took_part.setdefault(job, {})
        if member.has_history and member.replica_id not in took_part and not has_rival():
            took_part[member.replica_id] = shown = _shown(member)
            if job not in self._members:  # it is a report, too (rule Q12)
                self._reported[job] = max(self._reported.get(job, 0), shown[1])

    def gone(self, job: str, replica_id: str) -> None:
        """A group has left; that is reported as a loss only if it was let in."""
        self._note_progress(job, replica_id)
        self._took_part.get(job, {}).pop(replica_id, None)

    def went_silent(self, job: str, replica_id: str) -> None:
        """A session has ended without a word: in a term that is reported if it is a loss (E7)."""
        if job not in self._reached or replica_id not in self._members.get(job, set()):
            self.gone(job, replica_id)

    def reached(self, job: str, replica_id: str, step: int) -> None:
        """Record that a group has reported with a beat how far it is."""
        reached = self._reached.get(job, {})
        reached[replica_id] = max(reached.get(replica_id, 0), step)

    def _note_progress(self, job: str, replica_id: str) -> None:
        """A member of the last quorum asks, or is gone: no step follows in its term."""
        members = self._members.get(job, set())
        if replica_id in members and job in self._reached:
            reached = self._reached.pop(job)
            lowest = min(reached.get(each, 0) for each in members)
            self._committed[job] = max(self._committed.get(job, 0), lowest)

    def accepted(self, job: str) -> None:
        self._accepted.add(job)

    def restarted(self) -> None:
        self._committed.clear()
        self._reported.clear()
        self._accepted.clear()
        self._took_part.clear()
        self._members.clear()
        self._reached.clear()

    def lost(self, order: ReportLoss, by: object) -> None:
        """``by``: what stands for one life of one lighthouse, which knows what it has published."""
        self._note_progress(order.job, order.replica_id)
        took_part = self._took_part.get(order.job, {})
        took_part.pop(order.replica_id, None)
        if not took_part:  # the job may have ended: members are those that report its last quorum
            self._members.pop(order.job, None)
        if order.is_orderly:
            self._remaining.get((by, order.job), set()).discard(order.replica_id)

    def published(self, order: Publish, by: object, *, is_young: bool) -> None:
        """``is_young``: the lighthouse serves for less than the heartbeat timeout."""
        step = order.quorum.max_step
        took_part = self._took_part.setdefault(order.job, {})
        if order.job in self._committed:
            before = self._committed[order.job]
            is_reported = order.lost_from is not None and order.lost_from >= before
        else:  # some groups that reported more may have died since
            before = max(took_part.values(), default=(0, 0))[1]
            is_reported = order.lost_from is not None
        if step < before:
            must(is_reported, "I4", f"from step {before} to {step}, and not reported")
        if order.lost_from is not None:
            self._went_back[order.job] = order.quorum.quorum_id
        remaining = self._remaining.get((by, order.job), {"not known"})
        must(not (order.begins_anew and remaining), "I4", f"{remaining} had not ended on purpose")
        if step < before and order.job not in self._accepted:
            is_held = self._policy == "hold" and not order.begins_anew
            must(not is_held, "I4", f"from step {before} to {step} in spite of hold")
            alive = sorted(took_part) if self._policy != "warn" else []
            must(not alive, "I4", f"from step {before} to {step}, though {alive[:4]} live")
        newest = max(before, self._reported.pop(order.job, 0))
        if order.job in self._committed:
            # A loss is reported again if a group with the newer state came and went.
            is_true = order.lost_from is None or step < order.lost_from <= newest
            must(
                is_true,
                "I4",
                f"a loss of {order.lost_from} is reported, but {step} follows {newest}",
            )
        self._check_jump(order, self._begun_anew.get((by, order.job), 0) if is_young else 0)
        self._check_belief(order)
        knows_one = any(each.has_history for each in order.quorum.participants)
        if not (knows_one or self._committed.get(order.job)):
            self._begun_anew[by, order.job] = order.quorum.quorum_id
        self._committed[order.job] = step
        self._reached.pop(order.job, None)
        steady = [each for each in order.quorum.up_to_date if each.steady]
        if step > 0 and len(steady) == len(order.quorum.participants) > 1:
            self._reached[order.job] = {}
        self._last_ids[order.job] = order.quorum.quorum_id
        self._accepted.discard(order.job)
        self._members[order.job] = {member.replica_id for member in order.quorum.participants}
        self._remaining[by, order.job] = set(self._members[order.job])
        latest = order.quorum.quorum_id, step
        took_part.update((each.replica_id, latest) for each in order.quorum.participants)

    def _check_belief(self, order: Publish) -> None:
        """A member that has committed its step in the last quorum is believed (rule E5)."""
        last_id, members = self._last_ids.get(order.job, 0), self._members.get(order.job, ())
        for each in order.quorum.participants:
            went_on = 0 < each.step_quorum_id == last_id and each.replica_id in members
            what = f"{each.replica_id} is not believed, and has committed its step in {last_id}"
            must(not (each.doubted_step and went_on), "I4", what)

    def _check_jump(self, order: Publish, begun_anew: int) -> None:
        """A job follows a group that is far ahead only if that was in a newer quorum elsewhere, or
        is back soon after newcomers have begun anew at a restarted lighthouse (rule F8)."""
        if order.job not in self._committed or order.job not in self._members:
            return
        last_id = self._last_ids[order.job]
        in_term = [
            each.step
            for each in order.quorum.participants
            if each.replica_id in self._members[order.job] and each.step_quorum_id == last_id
        ]
        limit = max(self._committed[order.job] + 1, *in_term, 0)
        believed = [each for each in order.quorum.participants if not each.doubted_step]
        ahead = [each for each in believed if each.step > limit]
        is_newer = any(each.seen_quorum_id > last_id for each in ahead)
        is_back = any(0 < each.seen_quorum_id < begun_anew for each in ahead)
        if ahead and not (is_newer or is_back):
            stay = [each.replica_id for each in believed if each.step <= limit]
            stay = [each for each in stay if each in self._members[order.job]]
            must(not stay, "I4", f"{stay[:4]} follow {ahead[0].replica_id} from step {limit - 1}")


def _shown(member: Member) -> tuple[int, int]:
    """The last quorum that a question reports, and a step that all its members have reached: one
    that its group committed in that quorum, or does not say where, it may have committed alone."""
    is_shared = 0 < member.step_quorum_id < member.seen_quorum_id
    return member.seen_quorum_id, max(0, member.step - (not is_shared))


class Waits:
    """I5: nobody waits beyond a deadline; each waiting party is answered once, and no other
    party."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._open: dict[object, tuple[float, Process, str, float]] = {}
        self._due: list[tuple[float, int, object]] = []
        self._num_begun = 0

    def begin_wait(
        self,
        key: object,
        process: Process,
        what: str,
        timeout_s: float,
        slack_s: float = SLACK_S,
    ) -> None:
        at = self._world.now + timeout_s + slack_s
        self._open[key] = (at, process, what, process.stopped_s)
        self._num_begun += 1
        heapq.heappush(self._due, (at, self._num_begun, key))

    def end(self, key: object) -> None:
        self._open.pop(key, None)

    def answered(self, key: object, what: str) -> None:
        must(key in self._open, "I5", f"{what}: it does not wait for that, or not any more")
        del self._open[key]

    def check(self) -> None:
        while self._due and self._due[0][0] <= self._world.now:
            _, _, key = heapq.heappop(self._due)
            wait = self._open.get(key)
            if wait is None:
                continue
            at, process, what, stopped_s = wait
            if process.is_dead:
                del self._open[key]
                continue
            until = at + process.stopped_s - stopped_s  # a process that is stopped does nothing
            if until > self._world.now:
                self._num_begun += 1
                heapq.heappush(self._due, (until, self._num_begun, key))
                continue
            if process.is_frozen or process.thawed_at + SLACK_S > self._world.now:
                self._num_begun += 1
                heapq.heappush(self._due, (self._world.now + SLACK_S, self._num_begun, key))
                continue
            must(False, "I5", f"{process.name} still waits for {what}, and is late")


class Hangs:
    """Checks that only a group that something has happened to is reported as hanging."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._troubled_until: dict[str, float] = {}

    def trouble(self, group: str, seconds: float) -> None:
        until = max(self._troubled_until.get(group, 0.0), self._world.now + seconds)
        self._troubled_until[group] = until

    def has_trouble(self, group: str, since: float) -> bool:
        return self._troubled_until.get(group, -math.inf) >= since

    def reported(self, hang: ReportHang) -> None:
        group = hang.replica_id.partition(":")[0]
        began_at = self._world.now - hang.for_s
        until = self._troubled_until.get(group, 0.0)
        must(until + SLACK_S >= began_at, "I5", f"{hang.replica_id} is fine, but reported to hang")


class Discards:
    """I6: a discarded step changes nothing, a committed one adds one step."""

    MAX_LEFT = 4096

    def __init__(self) -> None:
        self.num = 0
        self._left: dict[str, None] = {}

    def began(self, who: str, step: int, step_of_weights: int) -> None:
        must(step == step_of_weights, "I6", f"{who}: step {step}, weights of {step_of_weights}")

    def updates(self, who: str, step: int, step_of_weights: int, max_step: int) -> None:
        steps = (step, step_of_weights)
        must(set(steps) == {max_step}, "I3", f"{who}: step and weights of {steps} at {max_step}")

    def left(self, replica_id: str) -> None:
        self._left[replica_id] = None
        if len(self._left) > self.MAX_LEFT:
            del self._left[next(iter(self._left))]

    def session_opened(self, replica_id: str) -> None:
        """Record another session of a group that may have left: a stranger may have in its name."""
        self._left.pop(replica_id, None)

    def reported_as_lost(self, replica_id: str) -> None:
        """Check a report of a loss: the group's peers discard the step that they are in."""
        must(replica_id not in self._left, "I6", f"{replica_id} left, and is reported as lost")

    def drained(self, who: str, num_commits: int) -> None:
        """Check that a drained group finishes its step, and at most one more that was granted."""
        must(num_commits <= 2, "I5", f"{who} has to end, and has committed {num_commits} steps")

    def decided(self, who: str, before: StepState, after: StepState, committed: bool) -> None:
        if committed:
            must(after.step == before.step + 1, "I6", f"{who}: {before.step} to {after.step}")
            must(after.failures == 0, "I6", f"{who} committed, and counts {after.failures}")
            return
        self.num += 1
        counters = (before.step, before.batches_committed)
        now = (after.step, after.batches_committed)
        must(counters == now, "I6", f"{who}: a discarded step took it from {counters} to {now}")
        must(after.failures == before.failures + 1, "I6", f"{who}: a discarded step is not counted")


class Newcomers:
    """I5: a group that asks takes part at most two steps later, also where steps ask nobody."""

    def __init__(self) -> None:
        self._members: dict[str, frozenset[str]] = {}  # of the last quorum of each job
        self._asked_at: dict[str, dict[str, float]] = {}
        self._num_steps: dict[str, int] = {}  # that a worker has begun meanwhile, one by one

    def asked(self, job: str, member: Member, now: float) -> None:
        members = self._members.get(job, frozenset())
        if members and not member.has_history and member.replica_id not in members:
            self._asked_at.setdefault(job, {}).setdefault(member.replica_id, now)

    def gone(self, job: str, replica_id: str) -> None:
        """Forget the question of a group that does not ask any more."""
        self._asked_at.get(job, {}).pop(replica_id, None)

    def published(self, order: Publish) -> None:
        members = frozenset(each.replica_id for each in order.quorum.participants)
        self._members[order.job] = members
        for each in members:
            self.gone(order.job, each)

    def restarted(self) -> None:
        self._asked_at.clear()

    def began(
        self, job: str, me: str, worker: str, now: float, settled_since: SettledSince
    ) -> None:
        """``worker`` of group ``me`` begins a step that asks nobody."""
        waiting = self._asked_at.get(job, {}) if me in self._members.get(job, ()) else {}
        since = [(max(at, settled_since(each)), each) for each, at in waiting.items()]
        if not since or now - min(since)[0] < NEWS_S:
            self._num_steps.pop(worker, None)
            return
        num_steps = self._num_steps[worker] = self._num_steps.get(worker, 0) + 1
        what = f"{min(since)[1]} waits, and {worker} begins step after step without a question"
        must(num_steps <= MAX_STEPS_WITH_NEWCOMER, "I5", what)

    def asks(self, worker: str) -> None:
        self._num_steps.pop(worker, None)


class Groups:
    """G2: a job has no more groups than places, but for those that were started in addition, or
    were only taken for lost."""

    def __init__(self) -> None:
        self.num_places: Counter[str] = Counter()  # by job: the groups that are no spares
        self._num_more: Counter[str] = Counter()

    def may_add(self, job: str, number: int = 1) -> None:
        """Allow so many groups beside the spares that have taken their places."""
        self._num_more[job] += number

    def published(self, job: str, quorum: Quorum) -> None:
        limit = self.num_places[job] + self._num_more[job]
        num_groups = len(quorum.participants)
        what = f"{job} has {num_groups} groups, and {self.num_places[job]} places"
        must(num_groups <= limit, "G2", what)


class Bounds:
    """I7: dead groups are forgotten: no collection of the core outgrows the living ones, except for
    ledgers, which record the past (rule N3)."""

    def check(self, core: object, num_living: int) -> None:
        """``num_living``: the groups of a lighthouse, the workers of a group."""
        limit = ENTRIES_PER_GROUP * num_living + SPARE_ENTRIES
        for path, part in parts_of(core, type(core).__name__):
            must(len(part) <= limit, "I7", f"{path} has {len(part)} entries for {num_living}")


def parts_of(thing: object, path: str) -> Iterator[tuple[str, Collection[object]]]:
    """Each collection that belongs to an object of the core, and its path."""
    if isinstance(thing, dict | list | set | frozenset | tuple):
        yield path, thing
        inner = thing.values() if isinstance(thing, dict) else thing
        for each in inner:
            yield from parts_of(each, f"{path}[]")
    elif isinstance(thing, JobLedger):
        must(len(thing) <= MAX_INCIDENTS, "I7", f"{path} has {len(thing)} records")
    elif type(thing).__module__.startswith("torchft_svc.core.") and not isinstance(thing, Quorum):
        names = list(getattr(thing, "__dict__", ()))
        for base in type(thing).__mro__:
            names += getattr(base, "__slots__", ())
        for name in names:
            yield from parts_of(getattr(thing, name, None), f"{path}.{name}")


class Invariants:
    """All of them, over one run."""

    def __init__(self, world: VirtualWorld, is_clock_honest: bool, policy: str) -> None:
        self._is_clock_honest, self._policy = is_clock_honest, policy
        self.ids = Ids(is_clock_honest)
        self.agreement = Agreement()
        self.identity = Identity()
        self.went_back: dict[str, int] = {}
        self.progress = Progress(policy, self.went_back)
        self.waits = Waits(world)
        self.hangs = Hangs(world)
        self.discards = Discards()
        self.newcomers = Newcomers()
        self.groups = Groups()
        self.bounds = Bounds()

    def of_lighthouse(self) -> Invariants:
        """The same checks, with separate ledgers for one lighthouse."""
        its_own = copy.copy(self)
        its_own.ids = Ids(self._is_clock_honest)
        its_own.progress = Progress(self._policy, self.went_back)
        its_own.discards = Discards()
        return its_own
