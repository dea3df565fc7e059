"""Decides a worker's round: ask for the quorum, meet its members, offer or fetch state, vote.

    begin_step ─> [prepared] ─> [preview_fetched] ─> [question_failed] ─> quorum_received ─┐
      │                                                   members_met <─ [quorum_entered] <┘
      │                                                     │
      │                                 [state_fetched] <───┤
      │                                        └────────────┤
      └───────────── the quorum is kept (rule E1) ──────────┴─> begin_vote ─> vote_decided,
                                                                              vote_failed

Each input returns one `Ready`: what to do at once, and `Ready.then`, the slow action whose outcome
is the next input. Inputs in brackets are left out in some steps. What fails on the way to the vote
goes to `record_failure`, which records in the step machine that there is no quorum, no heal, or
nothing to commit. The vote has outputs of its own (`VoteOutput`). The client
(`client/step/round.py`) and the simulator (`tools/sim/trainer_actor.py`) execute all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchft_svc.core.quorum.activity import Activity, Phase, PhaseReport
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.tally import GroupEvent
from torchft_svc.core.quorum.term import Fate, TermEnds, Wish, fate
from torchft_svc.core.quorum.types import Resumed, Vote, WorkerRequest
from torchft_svc.core.quorum.worker.peers import LoseMember, Peers
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

# A worker that decides alone receives its news first if its last question or vote is this old.
NEWS_AFTER_S = 0.5
# How long a prepared spare waits for a place in one question: as long as a call may take. Then its
# step fails, and the next one waits again.
STAND_BY_S = 24 * 3600.0
# The phases in which a step ends by a vote, or by being abandoned.
UNDER_WAY = (Phase.TRAINING, Phase.HEALING)


# -- outputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Prepare what the first quorum needs, then call `Round.prepared`.

    ``expects_state``: a state may come, because a worker that has just started is usually behind.
    """

    expects_state: bool


@dataclass(frozen=True, slots=True)
class FetchPreview:
    """Fetch what others show of their states (rule K1), then call `Round.preview_fetched`.

    Nobody waits for this worker yet.
    """


@dataclass(frozen=True, slots=True)
class AskManager:
    """Send `Round.question` to the manager after ``pause_s``, and wait until ``deadline``.

    The outcome is `Round.quorum_received` or `Round.question_failed`.
    """

    pause_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class EnterQuorum:
    """Report to the manager that this worker waits for others, then call `Round.quorum_entered`.

    The quorum has other members, or other connections, than the one before: see
    `Peers.describe_change`.
    """


@dataclass(frozen=True, slots=True)
class MeetMembers:
    """Connect with the members of the quorum, then call `Round.members_met`.

    Not ``anew``: they are connected already, so only check that the connections still exist.
    """

    anew: bool


@dataclass(frozen=True, slots=True)
class FetchState:
    """Get the state that the quorum assigns, then call `Round.state_fetched`."""


SlowAction = Prepare | FetchPreview | AskManager | EnterQuorum | MeetMembers | FetchState


@dataclass(frozen=True, slots=True)
class OfferState:
    """Serve the state to the replica ranks ``receivers``, which heal from here, and to ``extras``.

    The latter may fetch a part of it. ``at_once``: all of it, before the passes of the step;
    otherwise what the passes may change follows after them.
    """

    receivers: tuple[int, ...]
    extras: tuple[int, ...]
    at_once: bool


@dataclass(frozen=True, slots=True)
class RefuseState:
    """Report to the groups that would heal from here that they need not wait, and the reason."""

    receivers: tuple[int, ...]
    reason: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Actions that follow an input, in the order of the fields; what is not set is not done.

    ``expects_no_state``: no state comes, so what was prepared for a heal is not needed.
    ``warnings``: sentences to log. ``leave``: why the connections are closed at once, so that the
    others do not wait. ``begins_training``: the members are known, and connected if possible, so
    the program may continue. ``then``: the slow action whose outcome is the next input.
    """

    expects_no_state: bool = False
    warnings: tuple[str, ...] = ()
    leave: Exception | None = None
    begins_training: bool = False
    offer: OfferState | None = None
    refusal: RefuseState | None = None
    then: SlowAction | None = None


NOTHING = Ready()


@dataclass(frozen=True, slots=True)
class AskDecision:
    """Send `Round.ballot` to the manager after ``pause_s``, and wait until ``deadline``.

    The outcome is `Round.vote_decided` or `Round.vote_failed`.
    """

    pause_s: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Decide:
    """The group's decision, and how its next step begins: for `Round.apply_decision`.

    With ``error`` there is no decision, which counts as no.
    """

    committed: bool
    error: TorchFTError | None = None
    fate: Fate = Fate.ABORTED


@dataclass(frozen=True, slots=True)
class LoseDecision:
    """A decision may have been made, and did not arrive, so this worker cannot continue."""

    error: TorchFTError


VoteOutput = AskDecision | Decide | LoseDecision


# -- settings --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRules:
    """The settings that are the same in all rounds of a worker.

    ``num_wanted``: how many groups contribute at most (None: all). ``patience_s``: a manager that
    cannot be reached for this long is gone for good. ``is_steady``: steps may begin without a
    question, if all groups can do that. ``checks``: when the members compare their states.
    ``catches_up``: fetch what does not change of the others' state before the first question.
    ``is_spare``: the first question waits until a place in the job is free (rule G1).
    """

    group_rank: int = 0
    group_world_size: int = 1
    use_async_quorum: bool = True
    init_sync: bool = True
    num_wanted: int | None = None
    patience_s: float = MANAGER_PATIENCE_S
    is_steady: bool = False
    checks: CheckRules = NEVER
    catches_up: bool = False
    is_spare: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRequest:
    """The settings that may differ between rounds.

    ``layout``: what is summed (empty: unknown). ``may_compute_ahead``: a prepared spare need not
    wait for its place before it computes, since it waits in its first sum (rule G7).
    """

    allow_heal: bool = True
    shrink_only: bool = False
    timeout_s: float
    layout: str = ""
    may_compute_ahead: bool = False


# -- the machine -----------------------------------------------------------------------------------


class Round:
    """A worker's rounds, one after the other, with its ``step`` and its ``peers``.

    ``quorum``, ``error`` (why there is no quorum), ``has_connected`` (the members are not those of
    the round before), ``waits_for_heal`` (a healed state is loaded before the step begins),
    ``computes_ahead`` (a prepared spare does not wait for its place before it computes) and
    ``keeps_quorum`` (the quorum is that of the step before, and nobody is asked) belong to the
    present round. ``drain_reason`` is set once, for good.
    """

    def __init__(self, rules: WorkerRules, step: StepMachine) -> None:
        self.step = step
        self.peers = Peers()
        self.quorum: QuorumResult | None = None
        self.error: Exception | None = None
        self.has_connected = False
        self.waits_for_heal = False
        self.computes_ahead = False
        self.keeps_quorum = False
        self.drain_reason: str | None = None
        self.drain_until = math.inf
        self.checks = CheckSchedule(rules.checks.check_every)
        self._rules = rules
        self._request = RoundRequest(timeout_s=0.0)
        self._last_call_at = 0.0  # of the last question or vote
        self._leaves_for: str | None = None  # the drain reason in the last question
        self._retries = CallRetry(0.0, 0.0)
        self._vote = False
        self._fate = Fate.ABORTED  # of the last step
        self._step_due = 0  # the one after the last step, if that was committed
        self._agreed = False  # all members of the last quorum ask before this step
        self._wishes: float | None = None  # the sum of the members' wishes in this step
        self._is_sum_shared = True  # all members have seen the same sum
        self._asked_for_in = 0  # the quorum whose end was requested since the last question
        self._term_end: TermEnds | None = None  # the last news of the end of a term
        self._receivers: tuple[str, ...] = ()  # who heals from this worker in the last quorum
        self._serves_in: int | None = None  # that quorum, if some heal from this group

    # -- the quorum ------------------------------------------------------------------------------

    def begin_step(
        self, request: RoundRequest, now: float, broken: Exception | None = None
    ) -> Ready:
        """Begin a step: ask for its quorum, or keep the one of the step before (`keeps_quorum`).

        ``broken``: why the connections with the members do not work, if they do not. The first
        quorum is asked for when it is `prepared`.

        Raises:
            RequestRefused: this worker may begin none; nothing has changed.
        """
        why_not = self._why_not_kept(request, broken)
        is_alone = self._rules.group_world_size == 1
        keeps_quorum = self._fate is Fate.CONTINUES and not (is_alone and why_not)
        computes_ahead = self._will_compute_ahead(request)
        waits_for_heal = (
            not keeps_quorum and not computes_ahead and self.will_wait_for_heal(request.allow_heal)
        )
        if keeps_quorum:
            self.step.start_in_term()
        else:
            self.step.start()
        self._agreed = self._fate is Fate.ENDS
        self._fate, self._wishes, self._is_sum_shared = Fate.ABORTED, None, True
        self._request, self.waits_for_heal = request, waits_for_heal
        self.computes_ahead = computes_ahead
        self.keeps_quorum = keeps_quorum
        self.error = self._leaves_for = None
        self.has_connected = False
        if keeps_quorum:
            if why_not is None:
                return NOTHING
            self.step.latch(why_not)
            return Ready(leave=why_not)
        self.quorum = None
        self._asked_for_in = 0
        if self.peers.quorum is None:
            return Ready(then=Prepare(request.allow_heal))
        return self._ask(now)

    def prepared(self, now: float) -> Ready:
        """Ask for the first quorum, or fetch a preview first.

        The deadline starts with the question: nobody waits for this worker before.
        """
        if self._rules.catches_up and self._request.allow_heal and not self.stands_by:
            return Ready(then=FetchPreview())
        return self._ask(now)

    def preview_fetched(self, now: float) -> Ready:
        """Ask for the first quorum; what is not in the preview comes with the heal."""
        return self._ask(now)

    def _ask(self, now: float) -> Ready:
        self._receivers = self.peers.without_lost(self._receivers)
        self.peers.begin_question(now)
        self._last_call_at = now
        deadline = now + (STAND_BY_S if self.stands_by else self._request.timeout_s)
        self._retries = CallRetry(deadline, self._rules.patience_s)
        return Ready(then=AskManager(0.0, deadline))

    @property
    def stands_by(self) -> bool:
        """Whether this worker's group is a prepared spare that was in no quorum yet."""
        return self._rules.is_spare and self.peers.quorum is None

    @property
    def follows(self) -> bool:
        """Whether this worker fetches what others show of their states while it stands by."""
        return self.stands_by and self._rules.catches_up and self._request.allow_heal

    @property
    def may_sum_again(self) -> bool:
        """Whether the sums of this step, none of which is over, may be made in another quorum.

        Why they failed need not be known (rule E9). They may not be made again

        * in a group of several workers, which may be in a collective of the group,
        * if this group is out of the quorum itself, or has to end,
        * where groups heal before the passes of a step: this group's passes have changed what it
          would have to offer.
        """
        if self.will_wait_for_heal(self._request.allow_heal):
            return False
        is_alone = self._rules.group_world_size == 1
        quorum, in_pass = self.quorum, self.step.state.phase is Phase.TRAINING
        if quorum is None or not (
            is_alone and self.keeps_quorum and in_pass and not self.drain_reason
        ):
            return False
        try:
            self.peers.check_own(quorum)
        except QuorumFailed:
            return False
        return True

    def sum_again(self, now: float) -> Ready:
        """Ask for another quorum for the present step, if it `may_sum_again`.

        Raises:
            RequestRefused: see `StepMachine.start`.
        """
        self.step.start()
        self.keeps_quorum = self.has_connected = self._agreed = False
        self.quorum = self.error = self._leaves_for = self._wishes = None
        self._is_sum_shared, self._asked_for_in = True, 0
        return self._ask(now)

    def _why_not_kept(self, request: RoundRequest, broken: Exception | None) -> Exception | None:
        """Why this worker cannot take part in another step of its quorum.

        One of several workers keeps the quorum nevertheless, as the group has decided, and votes
        no: the others would wait for it in a collective of the group, and it for them in the next
        quorum.
        """
        if self._fate is not Fate.CONTINUES:
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
        if self._term_end is not None and self._is_over(self._term_end, quorum):
            raise QuorumFailed(self._term_end.reason)

    def _is_over(self, ends: TermEnds, quorum: QuorumResult) -> bool:
        """Whether ``ends`` ends the present step of ``quorum``, too.

        Until the members are met, the step machine may still be at the step before.
        """
        state = self.step.state
        step = quorum.max_step if state.phase is Phase.QUORUM else state.step
        return ends.is_over_at(quorum.quorum_id, step)

    def will_wait_for_heal(self, allow_heal: bool) -> bool:
        """Whether a step that begins now waits for the state if this worker has to heal."""
        return allow_heal and (self._is_fresh or not self._rules.use_async_quorum)

    @property
    def wants_question(self) -> bool:
        """Whether this worker wants all members to ask before the next step.

        This is its part in the sum of wishes. A spare, or a group that heals, may want it, too.
        """
        is_asked_for = self.quorum is not None and self.quorum.quorum_id == self._asked_for_in
        return is_asked_for or self.peers.num_waiting > 0 or self.drain_reason is not None

    def record_wishes(self, wishes: float, is_shared: bool = True) -> None:
        """Add one more sum of all members' wishes.

        ``is_shared``: the others have seen the same.
        """
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
        is_new = self._is_fresh and not self.computes_ahead
        return is_new or ends_alone or not self._rules.use_async_quorum

    def _will_compute_ahead(self, request: RoundRequest) -> bool:
        """Whether a step that begins now computes while its group stands by (rule G7).

        Not in a group of several workers: its collectives would run, and could fail, at any time.
        """
        is_alone = self._rules.group_world_size == 1
        is_asked = request.may_compute_ahead and request.allow_heal
        return is_asked and is_alone and self.stands_by and self._rules.use_async_quorum

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

    def question_failed(
        self, error: Exception, now: float, *, is_manager_over: bool = False
    ) -> Ready:
        """Ask again if the manager is being restarted; otherwise there is no quorum."""
        pause_s = self._retries.pause_s(error, now, is_manager_over)
        if pause_s is None:
            return self.record_failure(error)
        return Ready(then=AskManager(pause_s, self._retries.deadline))

    def quorum_received(self, quorum: QuorumResult) -> Ready:
        """Enter ``quorum``, which answers the question, unless this worker is in it already."""
        self.quorum = quorum
        self.peers.record_answer(quorum)
        if self.peers.fits(quorum):
            return Ready(then=MeetMembers(anew=False))
        self.has_connected = True
        self.peers.enter_quorum(quorum)
        return Ready(then=EnterQuorum())

    def quorum_entered(self) -> Ready:
        """Meet the members, unless the loss of one was reported before the quorum came.

        Later losses are reported while this worker meets them: the manager knows that it waits.
        """
        assert self.quorum is not None
        why = self._why_in_vain(self.quorum)
        return Ready(then=MeetMembers(anew=True)) if why is None else self.members_met(why)

    def members_met(self, problem: Exception | None) -> Ready:
        """Begin the training: the members are connected, unless there is a ``problem``.

        One may be that connections have broken since this worker asked. The others keep theirs, and
        would not meet it again under this quorum id. So its next question reports the failure, and
        the next quorum has another id.
        """
        quorum, may_heal = self.quorum, self._request.allow_heal
        assert quorum is not None
        # News may have come while they connected, or before an answer that keeps the quorum id.
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
        warnings = []
        if quorum.heal and before > quorum.max_step:
            warnings.append(_not_believed(before, quorum.max_step))
        if broken is not None and quorum.heal and not heals:
            warnings.append(f"step {before} cannot be committed: {broken}")
        # The others do not wait for a group that postpones its heal, and does not contribute.
        is_awaited = self._contributes or heals or not quorum.heal or problem is not None
        offer, refusal = self._offer(quorum) if may_heal else (None, None)
        ranks = () if offer is None else (*offer.receivers, *offer.extras)
        self._receivers = tuple(quorum.replica_ids[rank] for rank in ranks)
        # From which of several sources they heal differs between the workers of a group.
        serves = bool(ranks) or (some_heal and not quorum.heal)
        self._serves_in = quorum.quorum_id if serves else None
        return Ready(
            expects_no_state=not heals,
            warnings=tuple(warnings),
            leave=broken if is_awaited else None,
            begins_training=True,
            offer=offer,
            refusal=refusal,
            then=FetchState() if heals else None,
        )

    def _began_too_early(self, quorum: QuorumResult) -> QuorumFailed | None:
        """Why the step is in vain, if this worker began it before a heal that it needs.

        This worker's step was above 0, or it has computed ahead, so its forward pass did not wait
        for a heal. But that step is not believed, or there was a place at once: the job is at step
        0, and the others count on its gradients.
        """
        if not quorum.heal or not self.heals_first or self.waits_for_heal:
            return None
        step = self.step.state.step
        return QuorumFailed(
            f"the step began before its heal, with this group's weights of step {step}; the job is "
            "at step 0"
        )

    def _offer(self, quorum: QuorumResult) -> tuple[OfferState | None, RefuseState | None]:
        receivers = tuple(quorum.recover_dst_replica_ranks)
        extras = tuple(quorum.recover_extra_dst_replica_ranks)
        if not receivers and not extras:
            return None, None
        try:
            self.step.check_whole()
        except RequestRefused as error:
            return None, RefuseState(receivers, error)
        return OfferState(receivers, extras, self.heals_first), None

    @property
    def serves_in(self) -> int | None:
        """The last quorum, if groups may still heal from this group, which ends now (rule H12).

        None within a step, too: the others wait for this group then.
        """
        is_between = self.step.state.phase in (Phase.IDLE, Phase.APPLYING) or self.error is not None
        return self._serves_in if is_between else None

    @property
    def receivers(self) -> tuple[str, ...]:
        """The groups that heal from this worker in that quorum, but for those that are gone."""
        return self.peers.without_lost(self._receivers)

    def state_fetched(self) -> Ready:
        """Record that the state has arrived, and waits to be applied."""
        self.step.receive_state()
        return NOTHING

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
        if self.keeps_quorum or self.quorum is None:
            return self._group_step
        return self.quorum.max_step

    # -- what goes wrong -------------------------------------------------------------------------

    def record_failure(self, error: Exception) -> Ready:
        """Record that there is no quorum, or no heal, or that the step cannot be committed."""
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
            return NOTHING
        # Others count on this group's gradients, or may do so in the quorum that it has missed:
        # they must learn now that none will come.
        return Ready(leave=error)

    def cancel_round(self, error: Exception) -> None:
        """Record that the round will not take place, because of ``error``: nobody was asked."""
        self.error = error
        phase = self.step.state.phase
        if phase is Phase.QUORUM:
            self.step.fail_quorum(error)
        elif phase in UNDER_WAY:  # it goes on, and may sum nothing now
            self.step.latch(error)

    def record_error(self, error: Exception, epoch: int) -> Ready:
        """Record that a collective or the program failed in the step with this ``epoch``."""
        if not self.step.latch(error, epoch) or self.step.state.phase not in UNDER_WAY:
            return NOTHING
        # Other groups wait for this group's gradients: they must learn now that none will come.
        # Where operations differ, they do not wait for what this group would launch next.
        is_awaited = self._contributes or isinstance(error, OperationsDiffer)
        return Ready(leave=error) if is_awaited else NOTHING

    def abandon_step(self) -> Ready:
        """End a step under way without a vote, for example because its backward pass raised.

        Other groups may wait for collectives that this worker will not launch, and it for their
        request.
        """
        if self.step.state.phase not in UNDER_WAY:
            return NOTHING
        return Ready(leave=QuorumFailed("the step was given up"))

    @property
    def may_reduce(self) -> bool:
        """Whether collectives are launched; those of a healing group continue if its heal fails.

        Without a quorum they are not: the members of the last quorum might use the data as this
        group's gradients, or wait with it.
        """
        return self.error is None and self.step.state.phase in UNDER_WAY

    @property
    def _contributes(self) -> bool:
        return self.step.state.participation.participating_rank is not None

    def check_left(self) -> None:
        """Raise `Drained` if the group has to end, and nobody waits for this worker.

        So it is if the manager has ordered the end; or if this worker has reported that it has to
        end, and its manager or another worker is frozen or gone. Otherwise the worker asks again,
        because another worker may wait for it.
        """
        if isinstance(self.error, GroupLeft):
            self.drain(self.error.reason)
            raise Drained(str(self.error))
        if self._leaves_for and isinstance(self.error, PeerError):
            raise Drained(f"{self._leaves_for}; it could not leave: {self.error}")

    def check_next(self) -> None:
        """Raise the error of a step that was not committed, if no further step would mend it.

        A worker that has trained before retries even if it is not authorized: the service may be
        restarted with other settings.
        """
        was_never_in = self.peers.quorum is None
        if isinstance(self.error, Unauthorized) and was_never_in:
            raise self.error
        if isinstance(self.error, ConfigError | RequestRefused | GivenUp):
            raise self.error
        self.step.check_healable()

    # -- news ------------------------------------------------------------------------------------

    def drain(self, reason: str, until: float = math.inf) -> bool:
        """Record why the group has to end after its step; returns whether that is new.

        ``until``: when its processes are killed, as far as that is known; the earliest one counts.
        """
        is_news = self.drain_reason is None
        self.drain_reason = self.drain_reason or reason
        self.drain_until = min(self.drain_until, until)
        return is_news

    def record_term_end(self, news: TermEnds) -> LoseMember | None:
        """Record that the term of a quorum is to end, or is over (rule E4).

        Returns what to give up, if a step under way is in vain.
        """
        if news.step is None:
            self._asked_for_in = news.quorum_id
            return None
        known = self._term_end
        is_known = known is not None and known.is_over_at(news.quorum_id, news.step)
        self._term_end = known if is_known else news
        quorum = self.quorum
        in_step = self.step.state.phase in (*UNDER_WAY, Phase.QUORUM)
        if quorum is None or not in_step or not self._is_over(news, quorum):
            return None
        return LoseMember(quorum.quorum_id, news.reason)

    def stream_lost(self) -> LoseMember | None:
        """Record that the stream to the manager has broken, and is opened again.

        Returns what to give up: nothing in a term (rule E7).
        """
        is_steady = self.quorum is not None and self.quorum.steady
        return None if is_steady else self.peers.stream_ended()

    def membership_to_resume(self) -> Resumed | None:
        """The membership that a replacement manager may continue (rule E7).

        None if it must start a new incarnation.
        """
        quorum, state = self.quorum, self.step.state
        if quorum is None or not quorum.steady:
            return None
        # Of several workers, each reports to the manager itself what it has reached.
        is_alone = self._rules.group_world_size == 1
        reached = Activity(state.phase, state.step, 0.0).reached if is_alone else 0
        return Resumed(
            replica_id=quorum.replica_ids[quorum.replica_rank],
            quorum_id=quorum.quorum_id,
            step=max(quorum.max_step, reached),
            num_groups=quorum.replica_world_size,
        )

    # -- the vote --------------------------------------------------------------------------------

    def needs_news(self, now: float) -> bool:
        """Whether to receive all that the manager has sent before `begin_vote`.

        This worker decides alone, and may have stood still while the others gave the step up (rule
        E3).
        """
        is_alone = self._rules.group_world_size == 1
        return is_alone and self.quorum is not None and now - self._last_call_at >= NEWS_AFTER_S

    def begin_vote(self, now: float, timeout_s: float) -> Decide | AskDecision:
        """End the step: a group of one worker decides alone, another one asks its manager."""
        if self.quorum is not None and self.needs_news(now):
            try:
                self.peers.check_own(self.quorum)
                self._check_term(self.quorum)
            except QuorumFailed as error:
                self.step.latch(error)
        self._last_call_at = now
        self._vote = self.step.begin_vote()
        if self._rules.group_world_size == 1:
            return Decide(self._vote, fate=fate(self._vote, (self.wish,)))
        patience_s = max(self._rules.patience_s, DECISION_PATIENCE_S if self._vote else 0.0)
        self._retries = CallRetry(now + timeout_s, patience_s)
        return AskDecision(0.0, self._retries.deadline)

    def ballot(self) -> Vote:
        """This worker's vote on the present step, which `begin_vote` has made."""
        return Vote(
            group_rank=self._rules.group_rank,
            step=self._group_step,
            should_commit=self._vote,
            wish=self.wish,
        )

    def vote_decided(self, committed: bool, fate: Fate) -> Decide:
        """The group's decision, as the manager has sent it."""
        return Decide(committed, fate=fate)

    def vote_failed(
        self, error: TorchFTError, now: float, *, is_manager_over: bool = False
    ) -> VoteOutput:
        """Ask again, or decide without an answer.

        A manager that is restarted is asked again, because it finds out what the one before had
        decided. A vote of no needs no answer: it decides. After a vote of yes the decision is lost,
        unless none was made (`CommitFailed`): then nobody has received a yes, and no is safe.
        """
        if isinstance(error, CommitFailed):
            return Decide(False, error)
        pause_s = self._retries.pause_s(error, now, is_manager_over)
        if pause_s is not None:
            return AskDecision(pause_s, self._retries.deadline)
        return LoseDecision(error) if self._vote else Decide(False, error)

    def report(self, phase: Phase | None = None) -> PhaseReport:
        """Return what this worker reports to its manager, or the next one: `Group.phase_reported`.

        ``phase``: in place of the step machine's, while the worker waits for others.
        """
        state = self.step.state
        return PhaseReport(phase or state.phase, state.step, self._went_on_to)

    @property
    def _went_on_to(self) -> int:
        """The step that the group is in, or begins next, without a question (0: there is none)."""
        if self._fate is Fate.CONTINUES:  # between two steps
            return self._step_due
        in_step = self.step.state.phase in (Phase.TRAINING, Phase.VOTING)
        return self._group_step if self.keeps_quorum and in_step else 0

    @property
    def _group_step(self) -> int:
        """The step that the group is in; a worker that has lost the last update is behind it."""
        return self._step_due if self.keeps_quorum else self.step.state.step

    def apply_decision(self, decided: Decide) -> None:
        """End the vote: see `StepMachine.decide`."""
        self._fate, self._step_due = decided.fate, self._group_step + 1
        self.step.decide(decided.committed, self.quorum.quorum_id if self.quorum else 0)


class WorkerCalls:
    """Adds to a worker's calls and reports what a restarted manager has to know.

    ``worker_id`` is new at every start of its process.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._round = self._round_before = 0  # of the last quorum, and of the one before
        self._last_question = 0  # its number
        self._num_asked = 0  # questions since the last quorum
        self._last_quorum_id = self._last_num_groups = 0  # of the quorum with the highest id
        self._num_events = 0

    def sign_question(self, request: WorkerRequest) -> WorkerRequest:
        """Add to ``request`` who asks, and what it knows of the last quorum."""
        self._num_asked += request.question != self._last_question
        self._last_question = request.question
        return replace(
            request,
            worker_id=self.worker_id,
            last_quorum_id=self._last_quorum_id,
            last_num_groups=self._last_num_groups,
            last_round=self.last_round if request.question else 0,
        )

    @property
    def last_round(self) -> int:
        """The round of the last quorum (0: none, or a question was given up since)."""
        return self._round if self._num_asked <= 1 else 0

    def record_answer(self, quorum_id: int, num_groups: int, round_: int) -> None:
        """Record that a question has brought this quorum, to vote on in ``round_``."""
        self._round_before, self._round, self._num_asked = self._round, round_, 0
        if quorum_id >= self._last_quorum_id:
            self._last_quorum_id, self._last_num_groups = quorum_id, num_groups

    def sign_report(self, report: PhaseReport) -> PhaseReport:
        """Add to ``report`` the round before the present one."""
        return replace(report, round_before=self._round_before)

    def sign_event(self, event: GroupEvent) -> GroupEvent:
        """Add to ``event`` who reports it, and its number."""
        self._num_events += 1
        return replace(event, source=self.worker_id, number=self._num_events)

    def sign_ballot(self, vote: Vote) -> Vote:
        """Add to ``vote`` who votes, and in which round."""
        return replace(vote, worker_id=self.worker_id, round=self._round)


def _not_believed(step: int, max_step: int) -> str:
    return (
        f"step {step} of this group is not believed: the job is at step {max_step}, and trains on "
        "from there; this group heals from it, and its own state is given up"
    )
