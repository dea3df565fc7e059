"""Decides a worker's round: ask for the quorum, meet its members, offer or fetch state, vote.

    begin ─> ask ─> [unanswered] ─> answered ─> [entered] ─> met ─> [fetched] ─> vote ─> voted
      └─ goes on in the same quorum (rule E1) ─> summed ─────────────────────────────^

Each input returns orders, to be carried out one after the other; what comes of one is the next
input. Whatever fails on the way to the vote is `failed`, and becomes an input of the step machine:
there is no quorum, no heal, or no step that can be committed. Client and simulator drive it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.quorum.activity import Activity, Phase, PhaseReport
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish, fate
from torchft_svc.core.quorum.types import Resumed, Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember, Peers
from torchft_svc.core.quorum.worker.round_orders import (
    AskDecision,
    AskManager,
    BeginTraining,
    Decide,
    EnterQuorum,
    ExpectNoState,
    FetchState,
    LeaveMembers,
    LoseDecision,
    MeetMembers,
    OfferState,
    Order,
    RefuseState,
    Warn,
)
from torchft_svc.core.quorum.worker.state_check import NEVER, CheckRules, CheckSchedule
from torchft_svc.core.quorum.worker.step import StepMachine, participation
from torchft_svc.core.route import DECISION_PATIENCE_S, MANAGER_PATIENCE_S, CallRetry
from torchft_svc.errors import (
    CommitFailed,
    ConfigError,
    Drained,
    GivenUp,
    GroupLeft,
    OperationsDiffer,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unauthorized,
)

# So long after its last question or vote, a worker listens to its manager before it decides alone.
LISTEN_AFTER_S = 0.5
# The phases in which a step ends by a vote, or by being given up.
UNDER_WAY = (Phase.TRAINING, Phase.HEALING)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRules:
    """The settings that are the same in all rounds of a worker.

    ``num_wanted``: how many groups contribute at most (None: all). ``patience_s``: a manager that
    cannot be reached for so long is gone for good. ``is_steady``: steps may begin without a
    question, if all groups can do that. ``checks``: when the members compare their states.
    """

    group_rank: int = 0
    group_world_size: int = 1
    use_async_quorum: bool = True
    init_sync: bool = True
    num_wanted: int | None = None
    patience_s: float = MANAGER_PATIENCE_S
    is_steady: bool = False
    checks: CheckRules = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """What may differ between rounds; ``layout``: what this worker sums (empty: not known)."""

    allow_heal: bool = True
    shrink_only: bool = False
    timeout_s: float
    layout: str = ""


class Round:
    """A worker's rounds, one after the other, with its ``step`` and its ``peers``.

    ``quorum``, ``error`` (why there is no quorum), ``has_connected`` (the members are not those of
    the round before), ``waits_for_heal`` (a healed state is loaded before the step begins) and
    ``goes_on`` (the quorum is that of the step before, and nobody is asked) belong to the present
    round. ``drain_reason`` is set once, for good.
    """

    def __init__(self, rules: WorkerRules, step: StepMachine) -> None:
        self.step = step
        self.peers: Peers = Peers()
        self.quorum: QuorumResult | None = None
        self.error: Exception | None = None
        self.has_connected = False
        self.waits_for_heal = False
        self.drain_reason: str | None = None
        self.checks = CheckSchedule(rules.checks.check_every)
        self._rules = rules
        self._request = RoundRequest(timeout_s=0.0)
        self._last_at = 0.0  # when it asked or voted last
        self._leaves_for: str | None = None  # why this worker has to end, if it has said so
        self._retries = CallRetry(0.0, 0.0)
        self._vote = False
        self.goes_on = False
        self._fate = Fate.BREAKS_OFF  # of the last step
        self._step_due = 0  # after the last one, if that was committed
        self._agreed = False  # all members of the last quorum ask before this step
        self._wishes: float | None = None  # their sum in this step
        self._is_sum_shared = True  # all members have seen the same
        self._asked_for_in = 0  # the quorum whose end news have asked for since the last question
        self._term_ends: TermEnds | None = None  # the last news that one is over

    # -- the quorum ------------------------------------------------------------------------------

    def begin(self, request: RoundRequest, broken: Exception | None = None) -> int:
        """A step begins; returns its epoch. Its quorum is to be asked for, unless it `goes_on`.

        ``broken``: why the connections with the members do not work, if they do not.

        Raises: RequestRefused: this worker may begin none; nothing has changed.
        """
        why_not = self._why_not_on(request, broken)
        is_alone = self._rules.group_world_size == 1
        goes_on = self._fate is Fate.GOES_ON and not (is_alone and why_not)
        waits_for_heal = not goes_on and self.will_wait_for_heal(request.allow_heal)
        epoch = self.step.go_on() if goes_on else self.step.start()
        self._agreed = self._fate is Fate.ENDS
        self._fate, self._wishes, self._is_sum_shared = Fate.BREAKS_OFF, None, True
        self._request, self.waits_for_heal, self.goes_on = request, waits_for_heal, goes_on
        self.error = self._leaves_for = None
        self.has_connected = False
        if not goes_on:
            self.quorum = None
            self._asked_for_in = 0
        elif why_not is not None:
            self.step.latch(why_not)
        return epoch

    def go_on(self) -> tuple[Order, ...]:
        """Instead of `ask`, if this step `goes_on`: the program continues at once."""
        error = self.step.state.error
        return () if error is None else (LeaveMembers(error),)

    @property
    def awaits_losses(self) -> bool:
        """Whether news that a member has left would let this step be summed in another quorum
        (rule E9): otherwise there is no reason to wait for them.

        Not in a group of several workers, which may be in a collective of the group, nor if this
        group is out itself.
        """
        is_alone = self._rules.group_world_size == 1
        quorum, in_pass = self.quorum, self.step.state.phase is Phase.TRAINING
        if quorum is None or not (is_alone and self.goes_on and in_pass and not self.drain_reason):
            return False
        try:
            self.peers.check_own(quorum)
        except QuorumFailed:
            return False
        return True

    def may_sum_again(self) -> bool:
        """Whether the sums of the present step, none of which is over, may be made in another
        quorum instead of being given up: it `awaits_losses`, and a member of the term has left."""
        quorum = self.quorum
        if quorum is None or not self.awaits_losses:
            return False
        return self._why_in_vain(quorum) is not None

    def sum_again(self) -> int:
        """The present step, which `may_sum_again`, needs another quorum, which is to be asked for;
        returns its new epoch.

        Raises: RequestRefused: see `StepMachine.start`.
        """
        epoch = self.step.start()
        self.goes_on = self.has_connected = self._agreed = False
        self.quorum = self.error = self._leaves_for = self._wishes = None
        self._is_sum_shared, self._asked_for_in = True, 0
        return epoch

    def _why_not_on(self, request: RoundRequest, broken: Exception | None) -> Exception | None:
        """Why this worker cannot take part in another step of its quorum.

        One of several workers goes on nevertheless, as the group has decided, and votes no: the
        others would wait for it in a collective of the group, and it for them in the next quorum.
        """
        if self._fate is not Fate.GOES_ON:
            return None
        quorum, state = self.quorum, self.step.state
        assert quorum is not None
        broken = broken or self._why_in_vain(quorum)
        if broken is None and (state.step != self._step_due or state.unhealed or state.spoiled):
            broken = QuorumFailed("the weights of this worker are not those of the last step")
        if broken is None and request.layout != self._request.layout:
            broken = QuorumFailed("what this worker sums has changed")
        return broken

    def _why_in_vain(self, quorum: QuorumResult) -> QuorumFailed | None:
        """Why the present step of ``quorum`` cannot be committed, if that is known."""
        try:
            self.peers.check_losses(quorum)
            self._check_term(quorum)
        except QuorumFailed as error:
            return error
        return None

    def _check_term(self, quorum: QuorumResult) -> None:
        """Raise `QuorumFailed` if the term of ``quorum`` is over."""
        if self._term_ends is not None and self._is_over(self._term_ends, quorum):
            raise QuorumFailed(self._term_ends.reason)

    def _is_over(self, ends: TermEnds, quorum: QuorumResult) -> bool:
        """Whether the present step of ``quorum`` is in vain; until its members are met, this worker
        may show the step of before."""
        state = self.step.state
        step = quorum.max_step if state.phase is Phase.QUORUM else state.step
        return ends.is_over_at(quorum.quorum_id, step)

    def will_wait_for_heal(self, allow_heal: bool) -> bool:
        """Whether a step that begins now waits for the state if this worker has to heal."""
        return allow_heal and (self._is_fresh or not self._rules.use_async_quorum)

    @property
    def wants_question(self) -> bool:
        """Whether this worker wants all members to ask before the next step: its part in the sum of
        wishes. A spare, or a group that heals, may want it, too."""
        is_told = self.quorum is not None and self.quorum.quorum_id == self._asked_for_in
        return is_told or self.peers.num_waiting > 0 or self.drain_reason is not None

    def summed(self, wishes: float, is_shared: bool = True) -> None:
        """One more sum of all members' wishes; ``is_shared``: the others may have seen the same."""
        self._wishes = wishes + (self._wishes or 0.0)
        self._is_sum_shared &= is_shared

    @property
    def wish(self) -> Wish:
        """What this worker has seen of the wishes in this step."""
        is_steady = self.quorum is not None and self.quorum.steady
        if not is_steady or self._wishes != 0.0:
            return Wish.SOME
        return Wish.NONE if self._is_sum_shared else Wish.ALONE

    @property
    def waits_for_quorum(self) -> bool:
        """Whether the program waits for the quorum before it continues with the step.

        One of several workers that have to end continues until all know that: the others may be in
        a collective of the group, which fails if this worker leaves.
        """
        is_alone = self._rules.group_world_size == 1
        ends_alone = self.drain_reason is not None and is_alone
        return self._is_fresh or ends_alone or not self._rules.use_async_quorum

    @property
    def _is_fresh(self) -> bool:
        return self._rules.init_sync and self.step.state.step == 0

    @property
    def heals_first(self) -> bool:
        """Whether groups that are behind heal before the step, and contribute to it.

        At step 0 there is no other way to begin with equal weights.
        """
        if not self._request.allow_heal:
            return False
        is_first = self.quorum is not None and self.quorum.max_step == 0 and self._rules.init_sync
        return is_first or not self._rules.use_async_quorum

    def ask(self, now: float) -> tuple[Order, ...]:
        self.peers.asks(now)
        self._last_at = now
        deadline = now + self._request.timeout_s
        self._retries = CallRetry(deadline, self._rules.patience_s)
        return (AskManager(0.0, deadline),)

    def question(self, checkpoint_address: str, *, are_connections_broken: bool) -> WorkerRequest:
        """The question for the manager; it may differ when it is asked again."""
        state, request = self.step.state, self._request
        self._leaves_for = self.drain_reason
        # A group without its connections needs new ones, and only a new quorum id brings them.
        must_reconnect = self.peers.quorum is not None and are_connections_broken
        return WorkerRequest(
            group_rank=self._rules.group_rank,
            step=state.step,
            checkpoint_address=checkpoint_address,
            shrink_only=request.shrink_only,
            commit_failures=max(state.failures, int(must_reconnect)),
            init_sync=self._rules.init_sync,
            drain_reason=self._leaves_for or "",
            unhealed=state.unhealed,
            question=state.epoch,
            layout=request.layout,
            step_quorum_id=state.quorum_id,
            steady=self._rules.is_steady,
            agreed=self._agreed,
        )

    def unanswered(
        self, error: Exception, now: float, *, is_manager_over: bool = False
    ) -> tuple[Order, ...]:
        """The question failed; a manager that is being restarted is asked again."""
        pause_s = self._retries.pause_s(error, now, is_manager_over)
        if pause_s is None:
            return self.failed(error)
        return (AskManager(pause_s, self._retries.deadline),)

    def answered(self, quorum: QuorumResult) -> tuple[Order, ...]:
        self.quorum = quorum
        self.peers.answered(quorum)
        if self.peers.fits(quorum):
            return (MeetMembers(anew=False),)
        self.has_connected = True
        self.peers.enter(quorum)
        return (EnterQuorum(),)

    def entered(self) -> tuple[Order, ...]:
        """The manager knows that this worker waits for the members, and reports losses from now
        on; one that was reported before the quorum counts, too."""
        assert self.quorum is not None
        why = self._why_in_vain(self.quorum)
        return (MeetMembers(anew=True),) if why is None else self.met(why)

    def met(self, problem: Exception | None) -> tuple[Order, ...]:
        """The members are connected, unless there is a ``problem``.

        Connections may have broken since this worker asked. The others keep theirs, and would not
        meet it again under this id: it reports that with its next question, which brings another
        id.
        """
        quorum, may_heal = self.quorum, self._request.allow_heal
        assert quorum is not None
        # News may have come while they were connected; or before the answer, if that keeps the id.
        problem = problem or self._why_in_vain(quorum) or self._began_too_early(quorum)
        heals = quorum.heal and may_heal
        some_heal = quorum.max_world_size < quorum.replica_world_size
        is_new = self.has_connected or some_heal
        self.checks.begin_quorum(quorum.max_step, heals=quorum.heal, is_new=is_new)
        before = self.step.state.step
        place = participation(
            quorum, heals_first=self.heals_first, num_wanted=self._rules.num_wanted
        )
        self.step.form(place, quorum.max_step if quorum.heal else None, may_heal=may_heal)
        if problem is not None:
            self.step.latch(problem)
        broken = self.step.state.error
        orders: list[Order] = [] if heals else [ExpectNoState()]
        if quorum.heal and before > quorum.max_step:
            orders.append(Warn(_not_believed(before, quorum.max_step)))
        if broken is not None and quorum.heal and not heals:
            orders.append(Warn(f"step {before} cannot be committed: {broken}"))
        # A group that postpones its heal and does not contribute does no harm to the others.
        is_awaited = self._contributes or heals or not quorum.heal or problem is not None
        if broken is not None and is_awaited:
            orders.append(LeaveMembers(broken))
        orders.append(BeginTraining())
        if may_heal:
            orders += self._offer(quorum)
        if heals:
            orders.append(FetchState())
        return tuple(orders)

    def _began_too_early(self, quorum: QuorumResult) -> QuorumFailed | None:
        """Whether this worker may have begun its forward pass with weights that are not the job's,
        although the others count on its gradients.

        Its step is above 0, so it did not wait for a heal; but that step is not believed.
        """
        if not quorum.heal or not self.heals_first or self.waits_for_heal:
            return None
        step = self.step.state.step
        return QuorumFailed(f"the step began with the weights of step {step}, the job is at step 0")

    def _offer(self, quorum: QuorumResult) -> tuple[Order, ...]:
        receivers = quorum.recover_dst_replica_ranks
        extras = quorum.recover_extra_dst_replica_ranks
        if not receivers and not extras:
            return ()
        try:
            self.step.check_whole()
        except RequestRefused as error:
            return (RefuseState(receivers, error),)
        return (OfferState(receivers, extras, self.heals_first),)

    def fetched(self) -> None:
        """The state has arrived, and waits to be applied."""
        self.step.receive_state()

    @property
    def compares_states(self) -> bool:
        """Whether the members compare their states in this step; equal on all of them (rule C1)."""
        quorum = self.quorum
        if quorum is None or quorum.replica_world_size < 2:
            return False
        if self.common_step == 0 and not self._rules.init_sync:
            return False  # no group could heal yet
        return self.checks.is_due(self.common_step)

    @property
    def common_step(self) -> int:
        """The step of the job that the members take part in; a group that heals is behind it."""
        if self.goes_on or self.quorum is None:
            return self._number
        return self.quorum.max_step

    # -- what goes wrong -------------------------------------------------------------------------

    def failed(self, error: Exception) -> tuple[Order, ...]:
        """There is no quorum, or no heal, or the step cannot be committed."""
        phase = self.step.state.phase
        if phase is Phase.QUORUM:
            self.error = error
            self.step.fail_quorum(error)
        elif phase is Phase.HEALING:
            self.step.fail_heal(error)
        else:
            self.step.latch(error)
        has_missed = self.error is not None and self.peers.quorum is not None
        if isinstance(error, GroupLeft) or not (self._contributes or has_missed):
            return ()
        # Others count on this group's gradients, or may do so in the quorum that it has missed:
        # they must learn now that none will come.
        return (LeaveMembers(error),)

    def withdraw(self, error: Exception) -> None:
        """The round will not take place, because of ``error``: nobody was asked."""
        self.error = error
        phase = self.step.state.phase
        if phase is Phase.QUORUM:
            self.step.fail_quorum(error)
        elif phase in UNDER_WAY:  # it goes on, and may sum nothing now
            self.step.latch(error)

    def broke(self, error: Exception, epoch: int) -> tuple[Order, ...]:
        """A collective or the program failed in the step with this ``epoch``."""
        if not self.step.latch(error, epoch) or self.step.state.phase not in UNDER_WAY:
            return ()
        # Other groups wait for this group's gradients: they must learn now that none will come.
        # Where operations differ, they do not wait for what this group would launch next.
        is_awaited = self._contributes or isinstance(error, OperationsDiffer)
        return (LeaveMembers(error),) if is_awaited else ()

    def give_up(self) -> tuple[Order, ...]:
        """A step under way ends without a vote, for example because its backward pass raised.

        Other groups may wait for collectives that this worker will not launch, and it for their
        request.
        """
        if self.step.state.phase not in UNDER_WAY:
            return ()
        return (LeaveMembers(QuorumFailed("the step was given up")),)

    @property
    def may_reduce(self) -> bool:
        """Whether collectives are launched; those of a healing group continue if its heal fails.

        Without a quorum they are not: the members of the last one may wait as well, or use the data
        as this group's gradients.
        """
        return self.error is None and self.step.state.phase in UNDER_WAY

    @property
    def _contributes(self) -> bool:
        return self.step.state.participation.participating_rank is not None

    def check_left(self) -> None:
        """Raise `Drained` if the group has to end, and need not wait for anybody.

        The manager has said so; or this worker has said that it has to end, and its manager or
        another worker is frozen or gone. Otherwise the worker asks again: another one may wait for
        it.
        """
        if isinstance(self.error, GroupLeft):
            raise Drained(str(self.error))
        if self._leaves_for and isinstance(self.error, PeerError):
            raise Drained(f"{self._leaves_for}; it could not leave: {self.error}")

    def check_next(self) -> None:
        """After a step that is not committed, raise an error that a further step would not mend.

        A worker that has trained before retries if it is not authorized: the service may be
        restarted with other settings.
        """
        was_never_in = self.peers.quorum is None
        if isinstance(self.error, Unauthorized) and was_never_in:
            raise self.error
        if isinstance(self.error, ConfigError | RequestRefused | GivenUp):
            raise self.error
        self.step.check_healable()

    # -- news ------------------------------------------------------------------------------------

    def drain(self, reason: str) -> bool:
        """Returns whether that is new."""
        is_news = self.drain_reason is None
        self.drain_reason = self.drain_reason or reason
        return is_news

    def term_ends(self, news: TermEnds) -> LoseMember | None:
        """The term of a quorum is to end, or is over (rule E4); returns what to give up, if a step
        under way is in vain."""
        if news.step is None:
            self._asked_for_in = news.quorum_id
            return None
        known = self._term_ends
        is_known = known is not None and known.is_over_at(news.quorum_id, news.step)
        self._term_ends = known if is_known else news
        quorum = self.quorum
        in_step = self.step.state.phase in (*UNDER_WAY, Phase.QUORUM)
        if quorum is None or not in_step or not self._is_over(news, quorum):
            return None
        return LoseMember(quorum.quorum_id, news.reason)

    def line_broke(self) -> LoseMember | None:
        """The stream to the manager has broken, and is opened again; returns what to give up:
        nothing in a term (rule E7)."""
        is_steady = self.quorum is not None and self.quorum.steady
        return None if is_steady else self.peers.cut()

    def resumed(self) -> Resumed | None:
        """As which member of its quorum another manager of this group continues (rule E7); None:
        as a new incarnation."""
        quorum, state = self.quorum, self.step.state
        if quorum is None or not quorum.steady:
            return None
        # What the other workers have reached, they tell the manager themselves.
        is_alone = self._rules.group_world_size == 1
        reached = Activity(state.phase, state.step, 0.0).reached if is_alone else 0
        return Resumed(
            replica_id=quorum.replica_ids[quorum.replica_rank],
            quorum_id=quorum.quorum_id,
            step=max(quorum.max_step, reached),
            num_groups=quorum.replica_world_size,
        )

    # -- the vote --------------------------------------------------------------------------------

    def listens(self, now: float) -> bool:
        """Whether to receive all that the manager has sent before the `vote`: this worker decides
        alone, and may have stood still while the others gave the step up (rule E3)."""
        is_alone = self._rules.group_world_size == 1
        return is_alone and self.quorum is not None and now - self._last_at >= LISTEN_AFTER_S

    def vote(self, now: float, timeout_s: float) -> tuple[Order, ...]:
        """The step is over; a group of one worker decides alone."""
        if self.quorum is not None and self.listens(now):
            try:
                self.peers.check_own(self.quorum)
                self._check_term(self.quorum)
            except QuorumFailed as error:
                self.step.latch(error)
        self._last_at = now
        self._vote = self.step.begin_vote()
        if self._rules.group_world_size == 1:
            return (Decide(self._vote, fate=fate(self._vote, (self.wish,))),)
        patience_s = max(self._rules.patience_s, DECISION_PATIENCE_S if self._vote else 0.0)
        self._retries = CallRetry(now + timeout_s, patience_s)
        return (AskDecision(0.0, self._retries.deadline),)

    def ballot(self) -> Vote:
        return Vote(
            group_rank=self._rules.group_rank,
            step=self._number,
            should_commit=self._vote,
            wish=self.wish,
        )

    def voted(self, committed: bool, fate: Fate) -> tuple[Order, ...]:
        return (Decide(committed, fate=fate),)

    def vote_failed(
        self, error: TorchFTError, now: float, *, is_manager_over: bool = False
    ) -> tuple[Order, ...]:
        """There is no answer to the vote.

        A no needs none: it decides. If no decision was made, nobody received a yes, so no is safe.
        A manager that is restarted is asked again: it finds out what the one before had decided.
        """
        if isinstance(error, CommitFailed):
            return (Decide(False, error),)
        pause_s = self._retries.pause_s(error, now, is_manager_over)
        if pause_s is not None:
            return (AskDecision(pause_s, self._retries.deadline),)
        return (LoseDecision(error),) if self._vote else (Decide(False, error),)

    def report(self, phase: Phase | None = None) -> PhaseReport:
        """For the manager, or for the next one (`Group.reported`); ``phase``: if the worker waits
        for others meanwhile."""
        state = self.step.state
        return PhaseReport(phase or state.phase, state.step, self._went_on_to)

    @property
    def _went_on_to(self) -> int:
        if self._fate is Fate.GOES_ON:  # between two steps
            return self._step_due
        in_step = self.step.state.phase in (Phase.TRAINING, Phase.VOTING)
        return self._number if self.goes_on and in_step else 0

    @property
    def _number(self) -> int:
        """The step that the group is in; one of several workers may have lost the last update."""
        return self._step_due if self.goes_on else self.step.state.step

    def decide(self, decided: Decide) -> None:
        """See `StepMachine.decide`."""
        self._fate, self._step_due = decided.fate, self._number + 1
        self.step.decide(decided.committed, self.quorum.quorum_id if self.quorum else 0)


def _not_believed(step: int, max_step: int) -> str:
    return (
        f"step {step} of this group is not believed: the job is at step {max_step}, and trains on "
        "from there; this group heals from it, and its own state is given up"
    )
