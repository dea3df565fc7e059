"""A worker of a simulated world: the real round and step, executed as `client/step/` does it.

Weights are one number, a hash chain over all updates, so different histories differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.sim.copies import SearchActor, is_copy_missed, look_up
from tools.sim.invariants import must
from tools.sim.line_actor import LineActor
from tools.sim.offers import Fetched, Offers
from tools.sim.scenario import MEAN_COPY_S, TrainerRules
from tools.sim.shared import Home, Shared
from tools.sim.sums import Contribution, Result, Seat, State
from tools.sim.terms import CommittedStep, NewcomerPatience, TermStep
from tools.sim.world import Event, Process
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.lighthouse.copies import CHECK_S, MembersAndCopies
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote
from torchft_svc.core.quorum.manager.group import AnswerWorker, SentNews
from torchft_svc.core.quorum.session_messages import Drain, Kill, Lost, NewcomerWaits
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.worker.peers import LoseMember
from torchft_svc.core.quorum.worker.round import (
    AskDecision,
    AskManager,
    Decide,
    EnterQuorum,
    FetchPreview,
    FetchState,
    LoseDecision,
    MeetMembers,
    Prepare,
    Ready,
    Round,
    RoundRequest,
    SlowAction,
    VoteOutput,
    WorkerRules,
)
from torchft_svc.core.quorum.worker.step import StepMachine, StepState
from torchft_svc.core.route import MANAGER_PATIENCE_S, RETRY_S
from torchft_svc.errors import (
    Drained,
    GroupLeft,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
)

PAUSE_S = 0.01  # until a loop that catches a failed quorum tries again
WAITS_LOOK_S = 1.0
ROUNDING_S = 1e-6
CHANGED_SHARE = 0.1  # of a state, since a prepared spare has looked at it last
NO_STEP = -1  # of weights that an update has spoiled


class WorkerActor:
    """One life of a worker."""

    def __init__(
        self, process: Process, home: Home, group_rank: int, rules: TrainerRules, shared: Shared
    ) -> None:
        self.process = process
        self.home = home
        self.group_rank = group_rank
        self._rules = rules
        self._shared = shared
        self.machine = StepMachine(min_replica_size=rules.min_replica_size)
        self.round: Round = Round(
            WorkerRules(
                group_rank=group_rank,
                group_world_size=home.group_world_size,
                use_async_quorum=rules.use_async_quorum,
                num_wanted=rules.num_wanted,
                is_steady=rules.is_steady,
                catches_up=rules.mean_preview_s > 0.0,
                is_spare=home.is_spare,
            ),
            self.machine,
        )
        self.weights = process.chance.getrandbits(32)
        self._step_of_weights = 0
        # A group that cannot heal in time never trains, so slow copies are a fault like any other.
        self.offers = Offers(process, lambda: MEAN_COPY_S if shared.is_calm else rules.mean_copy_s)
        self.hung_until = 0.0
        self.is_broken = False  # the next collective raises
        self.vote_stalls_s = 0.0  # how much longer the next vote is on its way
        self.puts_heals_off_until = 0.0  # `start_quorum(allow_heal=False)`
        self.loses_update: str | None = None  # the next one ends by an exception, or by what spoils
        self.hangs_between_s = 0.0  # the next two steps
        self.dies_with_sum = False  # with the next one
        self.is_drained = False  # it has ended in good order
        self._num_commits_draining = 0
        self._newcomers = NewcomerPatience()
        news = self._receive, self._cut
        self.line = LineActor(process, home, group_rank, shared.network, self.round, *news)
        self._seat: Seat | None = None  # its process group
        # Of the copy that it has begun from: the step, and its quorum.
        self.origin: tuple[int, int] | None = None
        self._has_followed = False  # a prepared spare: it has most of what it will heal
        self._step = _Step(0, 0.0)

    # -- start -----------------------------------------------------------------------------------

    def restore(self, saved: Fetched, *, is_copy: bool = False) -> None:
        restore = self.machine.begin_from_copy if is_copy else self.machine.restore
        restore(saved.state.step, saved.batches_committed, saved.quorum_id)
        self.weights, self._step_of_weights = saved.state.weights, saved.state.step

    def begin_step(self, has_looked: bool = False) -> None:
        """Begin a step (`zero_grad`): ask for a quorum, and go forward unless that has to wait.

        ``has_looked``: for a copy to begin from.
        """
        if self._is_hanging(self.begin_step, has_looked):
            return
        self._execute(self._step, self.round.abandon_step())
        if not has_looked and self._looks_for_copy:
            self._step = _Step(self.machine.state.epoch, self.process.world.now)
            SearchActor(self, self._rules.quorum_s, self._shared, self._begin_from)
            return
        now, has_to_end = self.process.world.now, self.home.collective is not None
        request = RoundRequest(
            allow_heal=self.puts_heals_off_until <= now,
            shrink_only=self.process.chance.random() < self._rules.shrink_only_rate,
            timeout_s=self._shared.question_s(self._rules.quorum_s, has_to_end=has_to_end),
        )
        broken = self._seat.error if self._seat is not None else None
        is_alone = self.home.group_world_size == 1
        try:
            ready = self.round.begin_step(request, now, broken)
        except RequestRefused as error:  # its weights are those of no step
            self._end(error)
            return
        state, epoch = self.machine.state, self.machine.state.epoch
        if not (state.spoiled and state.unhealed):
            name = self.process.name
            self._shared.invariants.discards.began(name, state.step, self._step_of_weights)
        self._offer_copy()
        keeps_quorum = self.round.keeps_quorum
        in_vain = keeps_quorum and is_alone and broken is not None
        must(not in_vain, "I5", f"{self.process.name} begins a step without its connections")
        self._newcomers.began(self.process.name, goes_on=keeps_quorum)
        if keeps_quorum:
            before = self._step
            step = _Step(epoch, before.asked_at, part=before.part, round=before.round)
            step.began_at, step.keeps_quorum = now, True
            self._step = step
            self._check_newcomers()
            self._shared.companions.began(self.home.name, self.group_rank, state.step, None)
            self._execute(step, ready)
            self._begin_training(step)
            self._go_forward(step)
            return
        step = self._step = _Step(epoch, now, is_sync=self.round.waits_for_quorum)
        step.allows_heal = request.allow_heal
        step.began_at = now
        self._shared.invariants.newcomers.asks(self.process.name)
        self._shared.companions.began(self.home.name, self.group_rank, state.step, now)
        self._execute(step, ready)
        if not step.is_sync:
            self._go_forward(step)

    # -- copies ----------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether it was in a quorum, and has another state than that of a copy."""
        state = self.machine.state
        is_copy = self.origin == (state.step, state.quorum_id)
        return self.round.peers.quorum is not None and state.step > 0 and not is_copy

    @property
    def _looks_for_copy(self) -> bool:
        """Whether this worker begins from a copy if no group with a state lives (rule B5)."""
        state, now = self.machine.state, self.process.world.now
        is_wanted = self._rules.copy_every > 0 and self.puts_heals_off_until <= now
        return is_wanted and state.may_begin_from_copy

    def _begin_from(self, found: Fetched | TorchFTError | None) -> None:
        if isinstance(found, TorchFTError):
            self._end(found)
            return
        if found is not None:
            self._shared.trace.record(self.process.name, f"begins from {found.state}")
            self.restore(found, is_copy=True)
            self.origin = found.state.step, found.quorum_id
        self.begin_step(has_looked=True)

    def _offer_copy(self) -> None:
        """Offer the state of each so many steps to the holders that wait for it (rule B3)."""
        if self.machine.state.is_copied(self._rules.copy_every):
            self.offers.offer_copy(self._to_offer())

    def _check_no_copy(self, step: _Step) -> bool:
        """Look whether the first step of a job that begins anew has to be discarded, because a copy
        is held, and go forward then; whether that has begun."""
        part, state = step.part, self.machine.state
        is_first = part is not None and part.max_step == 0 == state.step
        is_wanted = self._rules.copy_every > 0 and step.allows_heal
        if step.has_checked_copies or not (is_wanted and is_first):
            return False
        step.has_checked_copies = True

        def receive(view: MembersAndCopies | None) -> None:
            if step is self._step:
                error = is_copy_missed(view, self.group_rank, self.home.group_world_size)
                if error is not None:
                    self._execute(step, self.round.record_error(error, step.epoch))
                self._go_forward(step)

        look_up(self.process, self.home, self._shared, CHECK_S, receive)
        return True

    def _check_copies(self, step: _Step, before: StepState) -> None:
        """A step is committed: a job that begins anew has no copy, and a group has one state."""
        self._shared.copies.committed(self.home.job, self._to_offer())
        self.home.check_origins()
        if before.step == 0 and self._rules.copy_every > 0 and step.allows_heal:
            self._shared.copies.begins_anew(self.home.job, self.home.name, step.began_at)

    def _check_newcomers(self) -> None:
        it, companions = self._in_term(self._step), self._shared.companions
        part, now = self._step.part, self.process.world.now
        assert part is not None

        def settled_since(newcomer: str) -> float:
            return companions.settled_since([*it.groups(), newcomer.partition(":")[0]])

        newcomers = self._shared.invariants.newcomers
        me = part.replica_ids[part.replica_rank]
        newcomers.began(self.home.job, me, self.process.name, now, settled_since)

    def _in_term(self, step: _Step) -> TermStep:
        assert step.part is not None
        return TermStep(
            group=self.home.name,
            group_rank=self.group_rank,
            members=step.part.replica_ids,
            step=self.round.ballot().step,
            waits_since=step.waits_since,
            asked_at=step.asked_at,
        )

    def _go_forward(self, step: _Step) -> None:
        train_s = self._rules.train_s * self.process.chance.uniform(0.9, 1.1)
        self.process.after(train_s, self._forward_done, step)

    def _forward_done(self, step: _Step) -> None:
        if not self._is_hanging(self._forward_done, step) and step is self._step:
            step.is_forward_done = True
            self._reduce_if_ready(step)

    # -- the round -------------------------------------------------------------------------------

    def _execute(self, step: _Step, ready: Ready) -> None:
        """Do what an input of the machine leads to, as `RoundRunner._execute` does."""
        for warning in ready.warnings:
            self._shared.trace.record(self.process.name, warning)
        if ready.leave is not None:
            self._leave_members()
        if ready.begins_training:
            self._begin_training(step)
        if ready.offer is not None:
            assert step.part is not None
            self.offers.offer(step.part.max_step, self._to_offer())
        if ready.then is not None:
            self._await(step, ready.then)

    def _await(self, step: _Step, action: SlowAction) -> None:
        """Do what takes time, as `RoundRunner._await` does; its end is an input of the machine."""
        match action:
            case Prepare():
                self._execute(step, self.round.prepared(self.process.world.now))
            case FetchPreview():
                mean_s = MEAN_COPY_S if self._shared.is_calm else self._rules.mean_preview_s
                takes_s = self.process.chance.expovariate(1 / mean_s)
                self.process.after(takes_s, self._preview_fetched, step)
            case AskManager(pause_s, deadline):
                self._after(pause_s, self._ask, step, deadline)
            case EnterQuorum():
                self._report_phase(Phase.QUORUM)
                self._execute(step, self.round.quorum_entered())
            case MeetMembers(anew):
                self._execute(step, self.round.members_met(self._meet(anew)))
            case FetchState():
                self._fetch(step)

    def _execute_vote(self, step: _Step, output: VoteOutput) -> None:
        """Do what an input to the vote leads to, as `ask_decision` does."""
        match output:
            case AskDecision(pause_s, deadline):
                self._after(pause_s, self._ask_decision, step, deadline)
            case Decide():
                self._decided(step, output)
            case LoseDecision(error):
                self._decided(step, Decide(False))
                self._end(error)

    def _after(self, pause_s: float, action: Callable[..., None], *args: object) -> None:
        if pause_s:
            self.process.after(pause_s, action, *args)
        else:
            action(*args)

    def _begin_training(self, step: _Step) -> None:
        self._report_phase()
        step.is_ready = True

    def _preview_fetched(self, step: _Step) -> None:
        if step is self._step:
            self._execute(step, self.round.preview_fetched(self.process.world.now))

    def _ask(self, step: _Step, deadline: float) -> None:
        if step is not self._step:
            return
        broken = self._seat is not None and self._seat.error is not None
        request = self.round.question(self.process.name, are_connections_broken=broken)
        step.deadline = deadline
        if self.home.collective is not None:
            self.home.collective.asks(self.process)
        if self.round.follows:
            takes_s = self.process.chance.expovariate(1 / self._rules.mean_preview_s)
            self.process.after(takes_s, self._state_followed, step)
        timeout_s = max(0.001, deadline - self.process.world.now)
        self.line.ask(request, timeout_s, lambda answer: self._on_answer(step, answer))

    def _state_followed(self, step: _Step) -> None:
        """Most of the state is at hand, if the place is not free before (rule G3)."""
        self._has_followed |= step is self._step and self.round.stands_by

    def _on_answer(self, step: _Step, answer: AnswerWorker | TorchFTError) -> None:
        if step is not self._step:
            return
        if isinstance(answer, TorchFTError):
            is_over = self.home.is_manager_over()
            now = self.process.world.now
            ready = self.round.question_failed(answer, now, is_manager_over=is_over)
            asks_again = isinstance(ready.then, AskManager)
            self._check_patience(step, answer, asks_again=asks_again, is_vote=False)
        else:
            step.part, step.round = answer.assignment, answer.round
            ready = self.round.quorum_received(answer.assignment)
            self._shared.companions.answered(self.home.name, self.group_rank)
            self._newcomers.met(answer.assignment.replica_ids)
        if isinstance(ready.then, AskManager):
            self._execute(step, ready)
            return
        if self.home.collective is not None:
            self.home.collective.is_answered(self.process)
        self._execute(step, ready)
        if self.round.error is not None:
            self._continue_without_quorum(step, self.round.error)
        elif step.is_sync and not (step.is_fetching and self.round.heals_first):
            if not self._check_no_copy(step):
                self._go_forward(step)
        else:
            self._reduce_if_ready(step)

    def _check_patience(
        self, step: _Step, error: TorchFTError, *, asks_again: bool, is_vote: bool
    ) -> None:
        """Check that a manager that is gone is asked again, and not for too long (rule M3).

        A vote of yes may be sent for longer (M5).
        """
        is_lost = isinstance(error, Unreachable) and error.peer == "manager"
        if not is_lost or self.home.is_manager_over():
            return
        now = self.process.world.now
        step.lost_at = now if step.lost_at is None else step.lost_at
        left_s = min(step.deadline, step.lost_at + MANAGER_PATIENCE_S) - now - RETRY_S
        if not asks_again:
            is_over = left_s <= ROUNDING_S
            must(is_over, "I5", f"{self.process.name} does not ask its manager again")
        elif not is_vote:
            is_due = left_s > -ROUNDING_S
            must(is_due, "I5", f"{self.process.name} still asks a manager that is gone")

    def _continue_without_quorum(self, step: _Step, error: Exception) -> None:
        try:
            self.round.check_left()
        except Drained:
            if self._seat is not None:
                self._seat.depart()
            self.is_drained = isinstance(error, GroupLeft)
            self.process.kill()
            self.home.worker_drained(has_left=self.is_drained)
            return
        # Where workers need one another, a program must not ask once more on its own: its peers
        # may have had the answer, and wait for it in the collective.
        has_to_end = self.home.collective is not None or isinstance(error, RequestRefused)
        if not step.is_sync:
            step.is_ready = True
            self._reduce_if_ready(step)
        elif has_to_end:
            self._end(error)
        else:
            self._shared.trace.record(self.process.name, f"no quorum: {error}")
            self.process.after(PAUSE_S, self.begin_step)

    def _meet(self, anew: bool) -> PeerError | None:
        """Join the process group of the quorum; returns why that is not possible."""
        if anew:
            if self._seat is not None:
                self._seat.leave()
            part = self._step.part
            assert part is not None
            key = (self.home.job, part.store_address, part.quorum_id, self.group_rank)
            me = part.replica_ids[part.replica_rank]
            self._seat = self._shared.sums.join(key, part.replica_ids, me, self.process)
        assert self._seat is not None
        return self._seat.error

    def _leave_members(self) -> None:
        if self._seat is not None:
            self._seat.abort()

    def _fetch(self, step: _Step) -> None:
        def received(outcome: Fetched | PeerError) -> None:
            latency_s = self._shared.network.latency(self.process)
            self.process.after(latency_s, self._fetched, step, outcome)

        assert step.part is not None
        step.is_fetching = True
        late = QuorumFailed("the fetch took too long")
        self.process.after(self._rules.collective_s, self._fetched, step, late)
        share = CHANGED_SHARE if self._has_followed else 1.0
        self._has_followed = False
        self._shared.fetch(self.process, step.part, self.group_rank, received, share)

    def _fetched(self, step: _Step, outcome: Fetched | PeerError) -> None:
        if step is not self._step or not step.is_fetching:
            return
        step.is_fetching = False
        if isinstance(outcome, Fetched):
            step.fetched = outcome
            self.round.state_fetched()
        else:
            self._execute(step, self.round.record_failure(outcome))
        if step.is_sync and self.round.heals_first:
            self._apply_heal(step)
            if not self._check_no_copy(step):
                self._go_forward(step)
        elif step.is_reduced:
            self._end_backward(step)

    # -- the sum ---------------------------------------------------------------------------------

    def _reduce_if_ready(self, step: _Step) -> None:
        if not (step.is_ready and step.is_forward_done) or step.is_reduced or step.is_reducing:
            return
        if self.is_broken:
            self.is_broken = False
            self._trouble()
            error = QuorumFailed("an exception in a collective")
            self._execute(step, self.round.record_error(error, step.epoch))
        seat = self._seat
        broken = seat.error if seat is not None else QuorumFailed("no process group")
        if broken is not None or not self.round.may_reduce:
            self._reduced(step, broken or QuorumFailed("there is no quorum to sum with"))
            return
        assert seat is not None
        step.is_reducing = True
        self._report_phase(Phase.QUORUM)  # it waits for others
        contributes = self.machine.state.participation.participating_rank is not None
        step.expiry = self.process.after(self._rules.collective_s, self._reduce_expired, step, seat)
        part = Contribution(
            state=self._state() if contributes else None,
            num_groups=self._num_groups(),
            wish=float(self.round.wants_question),
        )
        seat.reduce(part, lambda result: self._reduced(step, result))
        if step.part is not None and step.part.steady:
            step.waits_since = self.process.world.now
            self._check_wait(step)

    def _check_wait(self, step: _Step) -> None:
        if step is self._step and step.is_reducing:
            self._shared.companions.check_wait(self._in_term(step), self.process.world.now)
            self.process.after(WAITS_LOOK_S, self._check_wait, step)

    def _reduce_expired(self, step: _Step, seat: Seat) -> None:
        if step is self._step and step.is_reducing:
            seat.abort()

    def _reduced(self, step: _Step, result: Result) -> None:
        if step is not self._step or step.is_reduced:
            return
        step.is_reducing, step.is_reduced = False, True
        self._report_phase()
        if step.expiry is not None:
            step.expiry.cancelled = True
        if isinstance(result, PeerError):
            self._execute(step, self.round.record_error(result, step.epoch))
            if step.keeps_quorum:
                self._try_again(step)
                return
        else:
            if self.dies_with_sum and not self._shared.is_calm:
                self._end("it dies with a sum")
                return
            step.result = result.digest
            self.round.record_wishes(result.wishes)
        if not step.is_fetching:
            self.process.after(0.0, self._end_backward, step)

    def _num_groups(self) -> int:
        """The number of groups by which gradients are divided before they are summed."""
        return self.machine.state.participation.num_participants

    def _try_again(self, step: _Step) -> None:
        """Sum again if that is possible (E9): the sum of a step that asked nobody has failed."""
        if step is not self._step or self._is_hanging(self._try_again, step):
            return
        if self.round.may_sum_again:
            self._sum_again(step)
        else:
            self._end_backward(step)

    def _sum_again(self, step: _Step) -> None:
        """Ask for another quorum, after which the same gradients are summed again."""
        if self._seat is not None and self._seat.error is None:
            self._leave_members()
        now = self.process.world.now
        try:
            ready = self.round.sum_again(now)
        except RequestRefused as error:
            self._end(error)
            return
        epoch = self.machine.state.epoch
        again = self._step = _Step(epoch, now, began_at=now, is_forward_done=True)
        self._newcomers.began(self.process.name, goes_on=False)
        self._shared.invariants.newcomers.asks(self.process.name)
        step_number = self.machine.state.step
        self._shared.companions.began(self.home.name, self.group_rank, step_number, now)
        self._execute(again, ready)

    def _end_backward(self, step: _Step) -> None:
        """Wait for the other workers of the group, as in the second half of a backward pass."""
        collective = self.home.collective
        if collective is None:
            self._decide(step)
            return
        if self._is_hanging(self._end_backward, step) or step is not self._step:
            return
        collective.arrive(
            self.process,
            lambda: self._decide(step),
            lambda: self._end(QuorumFailed("a worker of this group is gone")),
        )

    def drain(self, reason: str) -> None:
        """End the group after this step, as SIGTERM does."""
        self.round.drain(reason)
        self.line.ask_to_drain(reason)

    def _receive(self, news: SentNews) -> None:
        if isinstance(news, Lost):
            self._lose(self.round.peers.record_loss(news.replica_id, news.reason, news.quorum_id))
        elif isinstance(news, NewcomerWaits):
            self.round.peers.record_newcomer(news.replica_id)
            self._newcomers.announced(news.replica_id)
        elif isinstance(news, TermEnds):
            self._lose(self.round.record_term_end(news))
        elif isinstance(news, Drain):
            self.round.drain(news.reason)
        elif isinstance(news, Kill):
            self.process.kill()
            self.home.worker_failed(news.reason)

    # -- the decision ----------------------------------------------------------------------------

    def _decide(self, step: _Step) -> None:
        if self._is_hanging(self._decide, step) or step is not self._step:
            return
        self._apply_heal(step)
        step.lost_at = None
        output = self.round.begin_vote(self.process.world.now, self._rules.collective_s)
        self._report_phase()
        self._execute_vote(step, output)

    def _ask_decision(self, step: _Step, deadline: float) -> None:
        stalls_s, self.vote_stalls_s = self.vote_stalls_s, 0.0
        self._shared.invariants.hangs.trouble(self.home.name, stalls_s)
        if stalls_s:
            self._trouble(stalls_s)
        step.deadline = deadline
        timeout_s = max(0.001, deadline - self.process.world.now)
        ballot = self.round.ballot()
        self.line.vote(ballot, timeout_s, lambda answer: self._on_decision(step, answer), stalls_s)

    def _on_decision(self, step: _Step, answer: AnswerVote | TorchFTError) -> None:
        if isinstance(answer, TorchFTError):
            if isinstance(answer, RequestRefused):
                self._share_fate(step, committed=False, group=self.home.name)
            is_over = self.home.is_manager_over()
            now = self.process.world.now
            output = self.round.vote_failed(answer, now, is_manager_over=is_over)
            asks_again = isinstance(output, AskDecision)
            self._check_patience(step, answer, asks_again=asks_again, is_vote=True)
        else:
            output = self.round.vote_decided(answer.should_commit, answer.fate)
        if isinstance(output, Decide):
            assert step.part is not None or not output.committed
            self._share_fate(step, output.committed, self.line.manager_name())
            if output.committed:
                self._share_fate(step, output.committed, self.home.name)
        self._execute_vote(step, output)

    def _share_fate(self, step: _Step, committed: bool, group: str) -> None:
        identity = self._shared.invariants.identity
        identity.shared_fate((group, step.round, self.round.ballot().step), self.process, committed)

    def _decided(self, step: _Step, decided: Decide) -> None:
        before, committed = self.machine.state, decided.committed
        self.round.apply_decision(decided)
        after = self.machine.state
        self._shared.invariants.discards.decided(self.process.name, before, after, committed)
        if committed:
            self._commit(step, before)
        else:
            if step.keeps_quorum:
                self._shared.companions.discarded(self._in_term(step), self.process.world.now)
            try:
                self.round.check_next()
            except TorchFTError as error:
                self._end(error)
        self._report_phase()
        if self.hangs_between_s:
            self.hung_until = self.process.world.now + self.hangs_between_s
            self._trouble(self.hangs_between_s)
            self.hangs_between_s = 0.0
        self.process.after(PAUSE_S * self.process.chance.random(), self.begin_step)

    def _commit(self, step: _Step, before: StepState) -> None:
        assert step.part is not None
        name, discards = self.process.name, self._shared.invariants.discards
        due = before.step if step.keeps_quorum else step.part.max_step
        discards.updates(name, before.step, self._step_of_weights, due)
        spoiled_by, self.loses_update = self.loses_update, None
        if spoiled_by is not None:
            self._shared.companions.misses(self.home.name, before.step + 1, self.process.world.now)
            self.machine.lose_update(spoiled_by)
            if spoiled_by:
                self.weights = self.process.chance.getrandbits(32)
                self._step_of_weights = NO_STEP
            return
        self.weights = hash((self.weights, step.result))
        self._step_of_weights += 1
        self.machine.end_update()
        if self.round.drain_reason is not None:
            self._num_commits_draining += 1
            discards.drained(name, self._num_commits_draining)
        part = step.part
        key = (self.home.job, self.group_rank, part.quorum_id, part.replica_ids, before.step)
        self._shared.invariants.identity.committed(key, name, self.weights)
        committed = CommittedStep(
            job=self.home.job,
            me=part.replica_ids[part.replica_rank],
            group_rank=self.group_rank,
            quorum_id=part.quorum_id,
            members=part.replica_ids,
            step=before.step,
            began_at=step.began_at,
            goes_on=step.keeps_quorum,
        )
        self._shared.terms.committed(committed, self.process.world.now)
        self._shared.histories.committed(committed, self.process.world.now)
        self._check_copies(step, before)
        self._shared.count_commit(self.home.job, step.part.quorum_id, before.step)
        self.home.save(self.group_rank, self._to_offer())

    def _apply_heal(self, step: _Step) -> None:
        fetched, step.fetched = step.fetched, None
        if fetched is not None:
            self.offers.retract()
            self.machine.apply_heal(fetched.batches_committed, fetched.quorum_id)
            self.weights, self._step_of_weights = fetched.state.weights, fetched.state.step
            self.origin = None

    # -- inside ----------------------------------------------------------------------------------

    def _state(self) -> State:
        return State(self.machine.state.step, self.weights)

    def _to_offer(self) -> Fetched:
        state = self.machine.state
        return Fetched(self._state(), state.batches_committed, state.quorum_id)

    def _report_phase(self, phase: Phase | None = None) -> None:
        reports = self._rules.reports_phases or self._rules.is_steady
        if reports or self.home.collective is not None:
            self.line.report_phase(self.round.report(phase))

    def _trouble(self, seconds: float = 0.0) -> None:
        until = self.process.world.now + seconds
        self._shared.companions.trouble(self.home.name, until, is_reachable=True)

    def _cut(self) -> None:
        self._trouble()
        self._leave_members()

    def _lose(self, loss: LoseMember | None) -> None:
        if loss is not None:
            self._leave_members()

    def _end(self, error: object) -> None:
        self.process.kill()
        self.home.worker_failed(str(error))

    def _is_hanging(self, then: Callable[..., None], *args: object) -> bool:
        """Whether the main thread is stuck; then ``then`` is called when it moves again."""
        if self.hung_until <= self.process.world.now:
            return False
        self.process.after(self.hung_until - self.process.world.now, then, *args)
        return True


@dataclass(slots=True)
class _Step:
    """The progress of one step."""

    epoch: int
    asked_at: float  # when the quorum was asked for
    began_at: float = 0.0
    waits_since: float = 0.0  # for the sum
    keeps_quorum: bool = False
    is_sync: bool = False
    is_ready: bool = False
    is_forward_done: bool = False
    is_fetching: bool = False
    is_reducing: bool = False
    is_reduced: bool = False
    allows_heal: bool = True
    has_checked_copies: bool = False  # whether one is held from which the job begins
    part: QuorumResult | None = None
    round: int = 0  # to vote in
    fetched: Fetched | None = None
    result: int | None = None
    deadline: float = 0.0  # of the call to the manager
    lost_at: float | None = None  # since when that does not answer
    expiry: Event | None = None
