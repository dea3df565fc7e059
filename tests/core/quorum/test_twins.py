"""The fast decisions agree with their slow twins, on whatever hypothesis thinks of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.core import twin
from support.core.naive import Naive
from support.core.recorded_jobs import AnswerQuorum, Record, RecordedJobs, RefuseRequest
from support.core.scenes import JOB, member
from support.core.views import job_view

from torchft_svc.core.quorum.lighthouse.jobs import ReportLoss
from torchft_svc.core.quorum.lighthouse.membership import SILENT, Gathering, Heal, JobView, Waiter
from torchft_svc.core.quorum.lighthouse.quorum import Formed, decide
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import LastQuorum, QuorumConfig
from torchft_svc.errors import RequestRefused

BUSY = [HealthCheck.too_slow]  # on a busy machine, slow is no sign of a fault
configs = st.builds(
    QuorumConfig,
    min_replicas=st.integers(1, 3),
    join_timeout_s=st.sampled_from([0.0, 2.0, 5.0]),
    startup_timeout_s=st.sampled_from([None, 0.0, 3.0, 8.0]),
    startup_wait_s=st.sampled_from([0.0, 0.0, 1.0, 4.0]),
    heartbeat_timeout_s=st.sampled_from([3.0, 6.0, 50.0]),
    on_step_regression=st.sampled_from(["auto", "hold", "warn"]),
    on_step_jump=st.sampled_from(["heal", "heal", "follow"]),
)


healing_configs = st.builds(
    lambda config, longer_s: replace(
        config, heal_timeout_s=None if longer_s is None else config.join_timeout_s + longer_s
    ),
    configs,
    st.sampled_from([None, 0.0, 6.0]),
)


@st.composite
def views(draw: st.DrawFn) -> JobView:
    """Up to five groups in any state that the rules distinguish."""
    names = draw(st.sets(st.sampled_from("abcde"), min_size=1))
    states = {name: draw(st.sampled_from(["dead", "living", "asking", "late"])) for name in names}
    living = {name for name in names if states[name] != "dead"}
    waiting = {
        name: Waiter(
            member(
                name,
                draw(st.integers(0, 7)),
                shrink_only=draw(st.sampled_from([False] * 3 + [True])),
                min_replicas=draw(st.sampled_from([0] * 3 + [1, 2, 4])),
                step_quorum_id=draw(st.sampled_from([0, 0, 6, 7])),
            ),
            draw(st.integers(0, 9)),
        )
        for name in sorted(names)
        if states[name] == "asking"
    }
    before = draw(st.sets(st.sampled_from(sorted(names))))
    known = draw(st.sets(st.sampled_from(sorted(names))))
    if draw(st.booleans()):  # no member of the last quorum is left, earlier ones are awaited
        before, known = {name for name in before if states[name] in ("dead", "late")}, names
    return job_view(
        waiting=waiting,
        living=living,
        veterans=(before | known) & living,
        straggling={name for name in names if states[name] == "late"},
        previous=before,
        committed_step=draw(st.integers(0, 4)),
        last_quorum_id=7,
        requested_min_replicas=max(
            (each.member.min_replicas for each in waiting.values()), default=0
        ),
        loss_accepted=draw(st.sampled_from([False, False, True])),
        ahead={name for name in sorted(living) if draw(st.sampled_from([False, False, True]))},
        is_finished=draw(st.sampled_from([False, False, True])),
        gathering=draw(
            st.sampled_from([*(Gathering(),) * 2, Gathering(3, 15.0), Gathering(starts_at=14.0)])
        ),
        heals={
            name: Heal(0.0, draw(st.sampled_from([None, 4, 9, 12])))
            for name in sorted(living)
            if states[name] == "living" and draw(st.booleans())
        },
    )


@settings(max_examples=400, deadline=None, suppress_health_check=BUSY)
@given(view=views(), config=healing_configs, now=st.integers(9, 20))
def test_decide_agrees_with_its_twin(view: JobView, config: QuorumConfig, now: int) -> None:
    decision = decide(view, config, now)
    expected = twin.decide(view, config, now)
    if isinstance(decision, Formed):
        assert (list(decision.members), decision.lost_from) == expected
    else:
        assert (math.inf if decision.until is None else decision.until) == expected


REPLICA_IDS = ["a:1", "a:2", "a:3", "b:1", "c:1", "d:1"]
replica_ids = st.sampled_from(REPLICA_IDS)
members = st.builds(
    member,
    replica_ids,
    st.integers(0, 5),
    shrink_only=st.sampled_from([False, False, False, True]),
    commit_failures=st.sampled_from([0, 0, 0, 1]),
    seen_quorum_id=st.sampled_from([0, 0, 0, 3, 9]),
    min_replicas=st.sampled_from([0, 0, 0, 1, 3]),
    last_num_groups=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
    sole_lighthouse=st.booleans(),
    has_history=st.sampled_from([False, False, False, True]),
    address=st.sampled_from(["x:1", "x:1", "x:1", "y:1"]),
)
last_quorums = st.builds(LastQuorum, st.sampled_from([0, 1, 3, 9]), st.integers(0, 3))
events = st.one_of(
    st.tuples(st.just("request"), members),
    st.tuples(st.just("request"), members),
    st.tuples(st.just("request"), members),
    st.tuples(st.just("beat"), replica_ids),
    st.tuples(st.just("hello"), st.tuples(replica_ids, last_quorums)),
    st.tuples(st.just("leave"), replica_ids),
    st.tuples(st.just("withdraw"), st.integers(1, 5)),
    st.tuples(st.just("pass"), st.integers(1, 4)),
    st.tuples(st.just("accept"), st.none()),
    st.tuples(st.just("question"), st.none()),
)


@settings(max_examples=300, deadline=None, suppress_health_check=BUSY)
@given(
    config=configs,
    first=st.sets(st.sampled_from(["a:1", "b:1", "c:1"])),
    play=st.lists(events, max_size=40),
)
def test_the_lighthouse_publishes_exactly_when_a_naive_one_does(
    config: QuorumConfig, first: set[str], play: list[tuple[str, Any]]
) -> None:
    """The play begins with a quorum of ``first``, if they are enough."""
    run = Side(config)
    begin: list[tuple[str, Any]] = [("beat", replica_id) for replica_id in sorted(first)]
    begin += [("request", member(replica_id)) for replica_id in sorted(first)]
    for number, (kind, what) in enumerate(begin + play, start=1):
        if kind == "request":
            run.fast += run.orders(run.jobs.request(JOB, what, number, run.now))
            run.naive.request(what, number, run.now)
        elif kind == "beat":
            run.fast += run.orders(run.jobs.heartbeat(JOB, what, run.now))
            run.naive.heartbeat(what, run.now)
        elif kind == "hello":
            run.fast += run.orders(run.jobs.opened(JOB, *what, run.now))
            run.naive.hello(*what, run.now)
        elif kind == "leave":
            run.fast += run.orders(run.jobs.leave(JOB, what, Leave("bye"), run.now))
            run.naive.leave(what, run.now)
        elif kind == "withdraw":
            run.fast += run.orders(run.jobs.withdraw(JOB, number - what, run.now))
            run.naive.withdraw(number - what, run.now)
        else:
            run.happens(kind, what)
        run.compare()
    for _ in range(15):
        run.wait()
        run.compare()


class Side:
    """Both lighthouses side by side; the fast one is woken only when it asks for that."""

    def __init__(self, config: QuorumConfig) -> None:
        self.jobs = RecordedJobs(config)
        self.naive = Naive(config)
        self.fast: list[tuple[Any, ...]] = []
        self.now = 0

    def wait(self) -> None:
        """One second passes; all times in these plays are whole seconds."""
        self.now += 1
        at = self.jobs.next_deadline()
        if at is not None and at <= self.now:
            self.fast += self.orders(self.jobs.tick(self.now))
        self.naive.time_passed(self.now)

    def happens(self, kind: str, what: Any) -> None:
        """What no group does."""
        if kind == "pass":
            for _ in range(what):
                self.wait()
        elif kind == "question":
            self.jobs.why(JOB, self.now)
        else:
            assert kind == "accept"
            try:
                self.fast += self.orders(self.jobs.accept_loss(JOB, self.now))
            except RequestRefused:
                self.fast.append(("nothing to accept",))
            self.naive.accept_loss(self.now)

    def compare(self) -> None:
        assert sorted(self.fast, key=repr) == sorted(self.naive.log, key=repr)
        self.fast.clear()
        self.naive.log.clear()
        at = self.jobs.next_deadline()
        assert at is None or at > self.now, "the lighthouse does not sleep"
        state = self.jobs._jobs.get(JOB)
        assert (state is not None) == bool(self.naive.groups)
        if state is None:
            return
        view, expected = state.members.view(self.now), self.naive.view(self.now)
        assert dict(view.waiting) == dict(expected.waiting)
        assert (set(view.living), view.groups) == (expected.living, expected.groups)
        assert (view.previous, view.committed_step) == (expected.previous, expected.committed_step)
        assert view.num_veterans == expected.num_veterans
        assert state.members.previous == self.naive.previous
        assert view.requested_min_replicas == expected.requested_min_replicas
        assert view.loss_accepted == expected.loss_accepted
        if any(view.groups[each] for each in SILENT):
            assert view.first == expected.first
        for each, at in view.first.items():
            assert state.members.first[each] <= at

    def orders(self, orders: tuple[Record, ...]) -> list[tuple[Any, ...]]:
        """These orders in the words of the naive one's log."""
        words = {"newer request": "superseded", "is taken": "taken", "is out": "out"}
        log: list[tuple[Any, ...]] = []
        for order in orders:
            if isinstance(order, AnswerQuorum):
                log.append(("quorum", self.now, order.quorum, order.callers, order.lost_from))
            elif isinstance(order, RefuseRequest):
                (word,) = [word for part, word in words.items() if part in str(order.error)]
                log.append(("refused", order.caller, word))
            elif isinstance(order, ReportLoss):
                log.append(("loss", order.replica_id))
        return log
