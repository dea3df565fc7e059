"""Any life that groups can lead around a lighthouse keeps the invariants I1, I2, I4, I5 and I7."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.core import twin
from support.core.world import Group, World

from torchft_svc.core.quorum.lighthouse.incidents import MAX_GROUPS_NAMED, MAX_INCIDENTS
from torchft_svc.core.quorum.lighthouse.membership import (
    AWAITED_MEMBERS,
    STATES,
    GroupState,
    Tenure,
)
from torchft_svc.core.quorum.types import QuorumConfig

BUSY = [HealthCheck.too_slow]  # on a busy machine, slow is no sign of a fault
JOBS = ["x", "y"]


class Groups(RuleBasedStateMachine):
    """Groups of two jobs ask, train, commit, discard, die, hang, freeze, come back; so does the
    lighthouse. `World` checks the orders, the invariants here check what lies between them."""

    world: World

    @initialize(
        min_replicas=st.integers(1, 3),
        join_timeout_s=st.sampled_from([0.0, 3.0, 7.0]),
        heals_longer_s=st.sampled_from([None, 0.0, 5.0]),
        startup_timeout_s=st.sampled_from([None, 1.0, 6.0]),
        startup_wait_s=st.sampled_from([0.0, 0.0, 2.0]),
        policy=st.sampled_from(["auto", "hold", "warn"]),
        num_groups=st.integers(1, 4),
        hang_timeout_s=st.sampled_from([None, 3.0]),
        on_hang=st.sampled_from(["report", "evict"]),
    )
    def begin(
        self,
        min_replicas: int,
        join_timeout_s: float,
        heals_longer_s: float | None,
        startup_timeout_s: float | None,
        startup_wait_s: float,
        policy: str,
        num_groups: int,
        hang_timeout_s: float | None,
        on_hang: str,
    ) -> None:
        self.world = World(
            QuorumConfig(
                min_replicas=min_replicas,
                join_timeout_s=join_timeout_s,
                heal_timeout_s=None if heals_longer_s is None else join_timeout_s + heals_longer_s,
                startup_timeout_s=startup_timeout_s,
                startup_wait_s=startup_wait_s,
                heartbeat_timeout_s=4.0,
                on_step_regression=policy,  # type: ignore[arg-type]
                hang_timeout_s=hang_timeout_s,
                on_hang=on_hang,  # type: ignore[arg-type]
                max_jobs=2,
            )
        )
        for name in "abcd"[:num_groups]:
            self.world.start("x", name, 0)

    def pick(self, data: st.DataObject, able: Callable[[Group], bool]) -> Group | None:
        """One of the groups that are ``able``, and not frozen."""
        found = [key for key, group in self.world.groups.items() if able(group)]
        return self.world.groups[data.draw(st.sampled_from(found))] if found else None

    @rule(
        job=st.sampled_from(JOBS),
        name=st.sampled_from("abcd"),
        step=st.sampled_from([0, 1, 2, 2, 9, 1000]),
        min_replicas=st.sampled_from([0, 0, 0, 1, 2]),
    )
    @precondition(lambda self: len(self.world.groups) < 6)
    def a_group_starts(self, job: str, name: str, step: int, min_replicas: int) -> None:
        """Start a group, maybe under the name of another that lives, maybe from a checkpoint."""
        self.world.start(job, name, step, min_replicas)

    @rule(data=st.data(), shrink_only=st.sampled_from([False, False, False, True]))
    def a_group_asks(self, data: st.DataObject, shrink_only: bool) -> None:
        group = self.pick(data, lambda g: not (g.is_hung or g.is_frozen) and g.quorum is None)
        if group is not None:
            self.world.ask(group, shrink_only)

    @rule(shrink_only=st.sampled_from([False, False, False, True]))
    def all_who_can_ask(self, shrink_only: bool) -> None:
        for group in list(self.world.groups.values()):
            is_here = (group.job, group.replica_id) in self.world.groups
            can = not (group.is_hung or group.is_frozen) and group.quorum is None
            if is_here and can and group.caller is None:
                self.world.ask(group, shrink_only)

    @rule(data=st.data())
    def a_caller_gives_up(self, data: st.DataObject) -> None:
        group = self.pick(data, lambda g: g.caller is not None)
        if group is not None:
            self.world.withdraw(group)

    @rule(data=st.data(), commits=st.booleans(), has_healed=st.booleans())
    def a_group_ends_its_step(self, data: st.DataObject, commits: bool, has_healed: bool) -> None:
        group = self.pick(data, lambda g: g.quorum is not None and not g.is_frozen)
        if group is not None:
            self.world.end_step(group, commits, has_healed)

    @rule(commits=st.sampled_from([True, True, False]))
    def all_end_their_step(self, commits: bool) -> None:
        for group in self.world.groups.values():
            if group.quorum is not None and not (group.is_hung or group.is_frozen):
                self.world.end_step(group, commits, has_healed=True)

    @rule(data=st.data(), noticed=st.booleans())
    def a_group_dies(self, data: st.DataObject, noticed: bool) -> None:
        group = self.pick(data, lambda g: True)
        if group is not None:
            self.world.kill(group, noticed)

    @rule(data=st.data())
    def a_group_ends_on_purpose(self, data: st.DataObject) -> None:
        group = self.pick(data, lambda g: True)
        if group is not None:
            self.world.kill(group, noticed=True, ends=True)

    @rule(job=st.sampled_from(JOBS))
    def a_job_ends_on_purpose(self, job: str) -> None:
        for group in list(self.world.groups.values()):
            if group.job == job and (group.job, group.replica_id) in self.world.groups:
                self.world.kill(group, noticed=True, ends=True)

    @rule(data=st.data())
    def a_group_is_followed_by_another_incarnation(self, data: st.DataObject) -> None:
        group = self.pick(data, lambda g: g.caller is None)
        if group is not None:
            self.world.succeed(group)

    @rule(data=st.data())
    def a_manager_moves(self, data: st.DataObject) -> None:
        group = self.pick(data, lambda g: g.caller is None)
        if group is not None:
            group.address = f"there:{self.world.now}"

    @rule(data=st.data(), kind=st.sampled_from(["is_hung", "is_frozen"]))
    def a_group_hangs_or_wakes_up(self, data: st.DataObject, kind: str) -> None:
        group = self.pick(data, lambda g: True)
        if group is not None:
            setattr(group, kind, not getattr(group, kind))

    @rule(data=st.data())
    def a_group_begins_or_ends_to_heal(self, data: st.DataObject) -> None:
        group = self.pick(data, lambda g: g.quorum is not None)
        if group is not None:
            group.is_healing = not group.is_healing
            group.trains_since = self.world.now

    @rule(data=st.data())
    def a_group_hangs_and_the_others_wait_for_it(self, data: st.DataObject) -> None:
        self.all_end_their_step(commits=True)
        self.all_who_can_ask(shrink_only=False)
        group = self.pick(data, lambda g: g.quorum is not None and len(g.quorum.participants) > 1)
        if group is not None:
            group.is_hung = True
            self.all_end_their_step(commits=True)
            self.time_passes(1)
            self.all_who_can_ask(shrink_only=False)
            self.time_passes(2)

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.pass_second()

    @rule(job=st.sampled_from(JOBS))
    def an_operator_accepts_a_loss(self, job: str) -> None:
        self.world.accept_loss(job)

    @rule()
    def the_lighthouse_restarts(self) -> None:
        self.world.restart_lighthouse()

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def i5_nobody_waits_without_a_reason(self) -> None:
        """Whoever waits is known to wait, and the rules name a reason for it."""
        world = self.world
        asking: dict[str, set[int]] = {job: set() for job in JOBS}
        for group in world.groups.values():
            if group.caller is not None:
                asking[group.job].add(group.caller)
        for job in JOBS:
            state = world.jobs._jobs.get(job)
            assert state is not None or not asking[job]
            if state is None:
                continue
            known = {*state.members._replica_of, *(caller for _, caller in state.held.values())}
            assert asking[job] <= known, "a caller was lost"
            for replica_id in state.held:
                assert state.members.names.earlier(replica_id)
            at = twin.decide(state.members.view(world.now), world.config, world.now)
            assert isinstance(at, float), "a quorum is there, but not published"
            wake_at = world.jobs.next_deadline()
            assert at == math.inf or (wake_at is not None and world.now < wake_at <= at)

    @invariant()
    def who_hangs_is_informed(self) -> None:
        world = self.world
        timeout_s = world.config.hang_timeout_s
        for (job, replica_id), group in world.groups.items():
            stands_s = 0 if group.quorum is None else world.now - group.trains_since
            hangs = timeout_s is not None and stands_s >= timeout_s and not group.is_healing
            state = world.jobs._jobs.get(job)
            known = state.hangs.activity(replica_id) if state else None
            if state and known == group.activity(world.now) and not group.is_frozen:
                assert state.hangs.is_hung(replica_id) == hangs

    @invariant()
    def nobody_waits_for_whom_was_left_out(self) -> None:
        """A hung group may be waited for only when nobody else is left: that costs no more time."""
        world = self.world
        if world.config.on_hang != "evict" or world.config.hang_timeout_s is None:
            return
        for job in JOBS:
            state = world.jobs._jobs.get(job)
            if state is None:
                continue
            members = state.members
            if not members.groups[GroupState.ASKING]:
                continue
            awaited = [key for each in AWAITED_MEMBERS for key in members.groups[each]]
            hung = {key for key in awaited if state.hangs.is_hung(key)}
            assert not hung, "it is waited for"

    @invariant()
    def n3_the_ledger_is_bounded_and_remembers_only_the_living_as_such(self) -> None:
        jobs = self.world.jobs
        for job in JOBS:
            ledger = jobs.ledgers.find(job)
            if ledger is None:
                continue
            assert len(ledger) <= MAX_INCIDENTS
            assert {*ledger.hung, *ledger.healing} <= set(self.world.living(job))
            shown = {each.number: each for each in ledger.incidents()}
            is_open = {number for number, each in shown.items() if each.is_open}
            indexed = [number for about in ledger._open_about.values() for number in about]
            assert is_open == ledger._open.keys()
            assert set(indexed) <= is_open
            if job not in jobs._jobs:
                assert not is_open, "nothing of a job that has ended is under way"
            for each in shown.values():
                assert len(each.groups) <= MAX_GROUPS_NAMED
                durations = (each.detected_after_s, each.decided_after_s, each.first_commit_after_s)
                assert all(seconds >= 0 for seconds in durations if seconds is not None)

    @invariant()
    def n6_the_parts_of_the_goodput_sum_to_the_wall_time(self) -> None:
        world = self.world
        for job in JOBS:
            if job in world.jobs._jobs or job in world.jobs._ended:
                goodput = world.jobs.goodput(job, world.now)
                parts = [goodput.committed_s, *goodput.lost_s.values()]
                assert math.isclose(sum(parts), goodput.wall_s, abs_tol=1e-6)
                assert min(parts) >= 0
                assert 0 <= goodput.ratio <= 1

    @invariant()
    def i7_only_the_living_are_remembered(self) -> None:
        jobs = self.world.jobs
        assert len(jobs._ended) <= self.world.config.max_jobs
        for job in JOBS:
            living = self.world.living(job)
            state = jobs._jobs.get(job)
            assert (state is not None) == bool(living)
            if state is None:
                continue
            members = state.members
            assert set(members._known) == living
            assert {key for each in members.names._groups.values() for key in each} == living
            assert all(members.names._groups.values())
            waiting = set(members._waiting)
            records = members._known
            assert waiting == {key for key, each in records.items() if each.caller is not None}
            assert members._replica_of == {records[key].caller: key for key in waiting}
            assert sum(members._requested_min_replicas.values()) == len(waiting)
            for key, each in records.items():
                assert each.state is STATES[each.conduct][each.tenure]
                assert [at for at in GroupState if key in members.groups[at]] == [each.state]
                assert (each.tenure is Tenure.MEMBER) == (key in members.previous_ids)
            assert sum(map(len, members.groups.values())) == len(living)
            assert members.ahead <= living
            num_bytes = sum(each.member.num_bytes for each in members._waiting.values())
            assert members._waiting_bytes == num_bytes
            assert set(state.held) <= living - waiting
            assert state.hangs.unhandled <= state.hangs._hung
            if members.groups[GroupState.EVICTED]:
                assert members.groups[GroupState.ASKING] or members.num_awaited, (
                    "a way for newcomers"
                )
            assert state.hangs._hung <= state.hangs._reports.keys() <= living
            assert state.term.reached.keys() <= living

    def teardown(self) -> None:
        """I5: once the hung and the dead are gone and all others ask, nobody waits for long."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for group in list(world.groups.values()):
            if group.is_hung or group.is_frozen:
                world.kill(group, noticed=False)
            group.quorum = None
        waiting: set[int | None] = set()
        for second in range(20):
            if second == 16:
                waiting = {group.caller for group in world.groups.values()}
            world.pass_second()
            self.all_who_can_ask(shrink_only=False)
            for group in world.groups.values():
                group.quorum = None
        for group in world.groups.values():
            if group.caller is not None and group.caller in waiting:
                why = world.jobs.why(group.job, world.now)
                is_held = "the job has committed step" in why or "the job has finished" in why
                assert "of at least" in why or is_held, why
                reported = [each.min_replicas for each in world.groups.values()]
                assert max(world.config.min_replicas, *reported) > 1 or is_held
        self.i5_nobody_waits_without_a_reason()
        self.i7_only_the_living_are_remembered()


TestGroups = Groups.TestCase
TestGroups.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=BUSY
)
