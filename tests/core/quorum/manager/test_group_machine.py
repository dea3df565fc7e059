"""A group's barriers under any sequence of inputs: all workers get one answer or one error (I5)."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.core.barriers import AwaitOwner, BarrierOrder, TimelessGroup
from support.core.scenes import member, quorum

from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import AnswerWorker, StopAsking
from torchft_svc.core.quorum.manager.lives import GroupLives
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import GroupRequest, Vote, WorkerRequest
from torchft_svc.errors import GroupLeft, QuorumFailed, RequestRefused

BUSY = [HealthCheck.too_slow]  # on a busy machine, slow is no sign of a fault
ranks = st.integers(0, 3)  # one more than there can be
steps = st.sampled_from([1, 1, 1, 1, 2])
workers = st.sampled_from(["", "", "", "new"])


class Barriers(RuleBasedStateMachine):
    """Workers ask, vote, repeat themselves, give up; the lighthouse answers, fails, or is late."""

    def __init__(self) -> None:
        super().__init__()
        self.caller = 0
        self.asking: dict[int, WorkerRequest] = {}  # callers that wait, by number
        self.held: dict[int, tuple[int, WorkerRequest]] = {}  # callers and questions, by rank
        self.suspects: list[AwaitOwner] = []
        self.voting: dict[int, Vote] = {}
        self.answered: set[int] = set()
        self.question: GroupRequest | None = None
        self.last_round = 0
        self.votes: dict[int, bool] = {}  # that were taken in this round, by group rank
        self.decisions: set[bool] = set()
        self.over = False  # the commit barrier, because somebody asked again or was lost
        self.streams: dict[int, str] = {}
        self.known: dict[int, str] = {}  # the worker that was last met at each rank
        self.lives = GroupLives()
        self.is_draining = False
        self.is_all_gone = False  # since the drain: who comes then, and is not known, begins anew
        self.is_new = False  # whether another one has been met since the last question

    @initialize(world_size=st.integers(1, 3))
    def begin_group(self, world_size: int) -> None:
        self.group = TimelessGroup(world_size)

    @rule(
        rank=ranks,
        step=steps,
        worker_id=workers,
        shrink_only=st.booleans(),
        commit_failures=st.integers(0, 2),
        drain_reason=st.sampled_from([""] * 9 + ["SIGTERM"]),
    )
    def worker_asks(self, rank: int, step: int, **fields: Any) -> None:
        self.caller += 1
        request = WorkerRequest(group_rank=rank, step=step, **fields)
        is_own = self.group.belongs_to(rank, request.worker_id)
        if rank < self.group.world_size:
            self.lives.record_arrival(rank, request.worker_id)
        try:
            orders = self.group.quorum_requested(request, self.caller)
        except RequestRefused:
            assert rank >= self.group.world_size or not is_own
            return
        if is_own:
            self.enters(request, self.caller)
        self.check_orders(orders)
        if not is_own:
            self.held[rank] = self.caller, request

    def enters(self, request: WorkerRequest, caller: int) -> None:
        """The barrier, of the worker that the rank belongs to from now on."""
        rank = request.group_rank
        self.over = True
        before = {self.known.get(rank), self.streams.get(rank)}
        is_new = not before <= {None, request.worker_id}
        self.is_new |= is_new
        is_requested = bool(request.drain_reason)
        self.is_draining = is_requested or (self.is_draining and not is_new)
        self.asking[caller] = request
        self.known[rank] = request.worker_id
        self.lives.admit_worker(rank, request.worker_id)

    def succeeds(self, rank: int, orders: tuple[BarrierOrder, ...]) -> None:
        """The question of the successor is held, now that the rank belongs to nobody else."""
        if rank in self.held:
            caller, request = self.held.pop(rank)
            self.enters(request, caller)
        self.check_orders(orders)

    @rule(data=st.data())
    def owner_was_silent(self, data: st.DataObject) -> None:
        if not self.suspects:
            return
        suspect = data.draw(st.sampled_from(self.suspects))
        self.suspects.remove(suspect)
        orders = self.group.owner_was_silent(suspect.group_rank, suspect.number)
        if suspect.group_rank in self.streams:
            assert orders == (), "its stream shows when it is dead"
        held = self.held.get(suspect.group_rank)
        if held and self.group.belongs_to(suspect.group_rank, held[1].worker_id):
            self.succeeds(suspect.group_rank, orders)
        else:
            assert orders == (), "the owner lives, or nobody waits for its rank"

    @rule(
        rank=ranks,
        step=steps,
        yes=st.booleans(),
        age=st.sampled_from([0, 0, 0, 1, None]),
        is_own=st.sampled_from([True, True, True, False]),
    )
    def worker_votes(self, rank: int, step: int, yes: bool, age: int | None, is_own: bool) -> None:
        self.caller += 1
        number = 0 if age is None else self.last_round - age
        worker_id = self.streams.get(rank, self.known.get(rank, "")) if is_own else "stranger"
        fields = {"group_rank": rank, "step": step, "should_commit": yes, "round": number}
        vote = Vote(**fields, worker_id=worker_id)
        belongs = self.group.belongs_to(rank, worker_id)
        try:
            orders = self.group.vote_received(vote, self.caller)
        except RequestRefused:
            return
        assert belongs, "a stranger has no vote"
        if rank in self.held:
            refused, *orders_left = orders
            self.check_orders((refused,))
            orders = tuple(orders_left)
        if self.over:
            self.check_late_answer(vote, orders)
            return
        assert number in (0, self.last_round)
        assert self.question is None, "no vote counts while a new quorum is due"
        assert self.votes.setdefault(rank, yes) == yes, "a vote can not be changed"
        self.voting[self.caller] = vote
        self.check_orders(orders)

    def check_late_answer(self, vote: Vote, orders: tuple[BarrierOrder, ...]) -> None:
        """A late voter receives the decision, or that there was none; it decides nothing. A no
        has no part in a yes."""
        (order,) = orders
        assert order.caller == self.caller
        found = {order.should_commit} if isinstance(order, AnswerVote) else set()
        assert found == {each and vote.should_commit for each in self.decisions}
        assert found or isinstance(order, RefuseWorker)

    @rule(data=st.data())
    def worker_gives_up(self, data: st.DataObject) -> None:
        held = {caller: rank for rank, (caller, _) in self.held.items()}
        waiting = sorted({*self.asking, *self.voting, *held})
        if not waiting:
            return
        caller = data.draw(st.sampled_from(waiting))
        if caller in held:
            del self.held[held[caller]]
            assert self.group.call_withdrawn(caller) == ()
            return
        is_asking = caller in self.asking
        self.over |= not is_asking
        del (self.asking if is_asking else self.voting)[caller]
        self.check_orders(self.group.call_withdrawn(caller))
        assert not (self.asking if is_asking else self.voting), "it releases the others"

    @rule(late=st.booleans(), max_step=st.integers(1, 2))
    def lighthouse_answers(self, late: bool, max_step: int) -> None:
        number = self.last_round - late
        seen = quorum(number, member("a", max_step))
        waiting = dict(self.asking)
        orders = self.group.lighthouse_answered(number, seen)
        if self.question is None or late:
            assert orders == ()
            return
        steps = {each.step for each in waiting.values()}
        answers = [order for order in orders if isinstance(order, AnswerWorker)]
        if len(steps) > 1 and max(steps) > max_step:
            assert not answers, "nobody can say which worker is right"
            self.question = None
            self.check_orders(orders)
            assert not self.asking, "every rank gets the error"
            return
        assert len(answers) == len(orders)
        for each in answers:
            part = assign(seen, "a", each.request.group_rank, each.request.init_sync)
            assert (each.assignment, each.round) == (part, number)
        assert {each.caller: each.request for each in answers} == waiting
        self.question = None
        self.votes, self.decisions, self.over = {}, set(), False
        self.check_orders(orders)
        assert not self.asking, "all ranks get one answer"

    @rule(late=st.booleans())
    def lighthouse_fails(self, late: bool) -> None:
        error = QuorumFailed("no route")
        orders = self.group.lighthouse_answered(self.last_round - late, error)
        if self.question is None or late:
            assert orders == ()
            return
        for order in orders:
            assert isinstance(order, RefuseWorker)
            assert isinstance(order.error, GroupLeft) if self.is_draining else order.error is error
        self.question = None
        self.check_orders(orders)
        assert not self.asking, "all ranks get one error"

    @rule()
    def an_operator_drains_while_they_wait(self) -> None:
        if self.question is not None:  # else the workers that ask drain it
            self.is_draining, self.is_all_gone = True, False
            self.check_orders(self.group.drain("maintenance"))

    @rule(rank=ranks, worker_id=workers)
    def worker_attaches(self, rank: int, worker_id: str) -> None:
        if rank < self.group.world_size:
            self.lives.record_arrival(rank, worker_id)
        try:
            self.group.worker_attached(rank, worker_id)
        except RequestRefused:
            assert rank >= self.group.world_size or not self.group.belongs_to(rank, worker_id)
            return
        if self.is_all_gone and not self.streams and not self.lives.is_known(rank, worker_id):
            self.is_draining = False
        self.lives.admit_worker(rank, worker_id)
        self.streams[rank] = worker_id

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        if not self.streams:
            return
        rank = data.draw(st.sampled_from(sorted(self.streams)))
        self.over = True
        worker_id = self.streams.pop(rank)
        waiting = [each.group_rank for each in self.asking.values()]
        is_awaited = self.lives.is_awaited(rank, worker_id, waiting)
        self.known.setdefault(rank, worker_id)
        self.is_all_gone = not self.streams
        orders = self.group.worker_detached(rank, worker_id, "killed")
        leaves = next(at for at, each in enumerate(orders) if isinstance(each, Leave))
        self.check_orders(orders[: leaves + 1])
        assert not (self.asking and is_awaited), "its death releases those of its life"
        assert not self.voting, "its death releases the others"
        assert self.question is None
        self.is_new = True
        self.succeeds(rank, orders[leaves + 1 :])

    def check_orders(self, orders: tuple[BarrierOrder, ...]) -> None:
        for order in orders:
            if isinstance(order, GroupRequest):
                self.check_question(order)
            elif isinstance(order, StopAsking):
                assert self.question is not None
                assert order.round == self.question.round
                self.question = None
            elif isinstance(order, Leave):
                if order.between_steps:
                    assert self.is_draining
                    assert not (self.voting or self.votes) or self.over, "it finishes its step"
                else:
                    assert order == orders[-1], "it leaves after everyone has an answer"
            elif isinstance(order, AwaitOwner):
                assert order.group_rank not in self.streams
                self.suspects.append(order)
            else:
                assert order.caller not in self.answered, "nobody is answered twice"
                self.answered.add(order.caller)
                held = [rank for rank, (each, _) in self.held.items() if each == order.caller]
                if held:
                    assert isinstance(order, RefuseWorker)
                    del self.held[held[0]]
                elif isinstance(order, AnswerVote):
                    del self.voting[order.caller]
                    self.decisions.add(order.should_commit)
                elif isinstance(order, AnswerWorker) or order.caller in self.asking:
                    del self.asking[order.caller]
                else:
                    del self.voting[order.caller]

    def check_question(self, question: GroupRequest) -> None:
        assert self.question is None, "one question at a time"
        assert not self.is_draining, "it takes part in no quorum any more"
        assert question.round == self.last_round + 1
        self.question, self.last_round = question, question.round
        self.lives.join_workers({each.group_rank: each.worker_id for each in self.asking.values()})
        assert question.new_incarnation == self.is_new
        self.is_new = False
        asking = list(self.asking.values())
        assert [each.group_rank for each in sorted(asking, key=lambda each: each.group_rank)] == (
            list(range(self.group.world_size))
        )
        assert min(each.step for each in asking) == question.step
        assert question.shrink_only == any(each.shrink_only for each in asking)
        assert question.commit_failures == max(each.commit_failures for each in asking)

    @invariant()
    def i5_nobody_waits_for_nothing(self) -> None:
        world_size = self.group.world_size if hasattr(self, "group") else 0
        if self.question is None:
            assert len(self.asking) < max(world_size, 1), "all have asked, and nothing happens"
        assert not (self.asking and self.voting), "one barrier at a time"
        ranks = [each.group_rank for each in self.voting.values()]
        assert len(ranks) == len(set(ranks)), "one call of each rank waits"
        assert len(ranks) < max(world_size, 1)

    @invariant()
    def one_decision_in_a_round(self) -> None:
        assert len(self.decisions) <= 1
        if True in self.decisions:
            assert set(self.votes.values()) == {True}
            assert len(self.votes) == self.group.world_size
        elif False in self.decisions:
            assert False in self.votes.values()
            assert not self.voting


TestBarriers = Barriers.TestCase
TestBarriers.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=BUSY
)


class Lockstep(RuleBasedStateMachine):
    """Workers that meet in a collective of their own in each step, as those of a sharded model do.

    Each asks for the quorum, goes on with an answer or with an error, and then waits for the others
    in the collective. Answers get lost, workers give up, and lines break while both ends live.
    """

    def __init__(self) -> None:
        super().__init__()
        self.caller = 0
        self.number = 0  # of the lighthouse's next answer
        self.is_asked = False

    @initialize(world_size=st.integers(2, 3))
    def begin_group(self, world_size: int) -> None:
        self.group = TimelessGroup(world_size)
        self.step = [1] * world_size  # of each worker's program
        self.waits = [0] * world_size  # the caller that waits for the quorum
        self.is_in_collective = [False] * world_size
        self.loses_answer = [False] * world_size
        for rank in range(world_size):
            self.group.worker_attached(rank, f"w{rank}")

    @rule(rank=st.integers(0, 2))
    def worker_asks(self, rank: int) -> None:
        """The worker asks, again if the answer was lost."""
        if rank >= len(self.step) or self.waits[rank] or self.is_in_collective[rank]:
            return
        self.caller += 1
        self.waits[rank] = self.caller
        request = WorkerRequest(
            group_rank=rank, step=5, worker_id=f"w{rank}", question=self.step[rank]
        )
        self.check_orders(self.group.quorum_requested(request, self.caller))

    @rule(rank=st.integers(0, 2))
    def next_answer_gets_lost(self, rank: int) -> None:
        if rank < len(self.step):
            self.loses_answer[rank] = True

    @rule(rank=st.integers(0, 2))
    def worker_gives_up(self, rank: int) -> None:
        if rank >= len(self.step) or not self.waits[rank]:
            return
        caller, self.waits[rank] = self.waits[rank], 0
        self.is_in_collective[rank] = True
        self.check_orders(self.group.call_withdrawn(caller))

    @rule(rank=st.integers(0, 2))
    def line_breaks_and_is_opened_again(self, rank: int) -> None:
        if rank < len(self.step):
            self.check_orders(self.group.worker_detached(rank, f"w{rank}", "no sign of life"))
            self.group.worker_attached(rank, f"w{rank}")

    @rule(fails=st.booleans())
    def lighthouse_answers(self, fails: bool) -> None:
        if self.is_asked:
            self.is_asked = False
            self.check_orders(
                self.group.lighthouse_answered(self.number, QuorumFailed("no route"))
                if fails
                else self.group.lighthouse_answered(
                    self.number, quorum(self.number, member("a", 5)), "a"
                )
            )

    @rule()
    def collective_is_over(self) -> None:
        if all(self.is_in_collective) and len(set(self.step)) == 1:
            self.is_in_collective = [False] * len(self.step)
            self.step = [step + 1 for step in self.step]

    def check_orders(self, orders: tuple[BarrierOrder, ...]) -> None:
        for order in orders:
            if isinstance(order, GroupRequest):
                self.is_asked, self.number = True, order.round
            elif isinstance(order, StopAsking):
                self.is_asked = False
            elif isinstance(order, AnswerWorker | RefuseWorker):
                rank = self.waits.index(order.caller)
                self.waits[rank] = 0
                self.is_in_collective[rank] = not self.loses_answer[rank]
                self.loses_answer[rank] = False

    @invariant()
    def i5_no_worker_waits_for_one_that_waits_for_it(self) -> None:
        for rank, caller in enumerate(getattr(self, "waits", ())):
            others = [
                other
                for other, is_in in enumerate(self.is_in_collective)
                if is_in and self.step[other] == self.step[rank]
            ]
            assert not (caller and others), f"{rank} waits in the quorum, {others} for it elsewhere"


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=BUSY
)
