"""A worker of a simulated world: the real step machine, driven as by `client/step/stepper.py`.

Weights are one number, a hash chain over all updates, so different histories can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.assignment import Assignment
from torchft_svc.core.step import (
    Participation,
    Phase,
    Standing,
    StepMachine,
    StepState,
    participation,
)
from torchft_svc.core.types import Vote, WorkerRequest
from torchft_svc.errors import (
    CommitFailed,
    GroupLeft,
    PeerError,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
    Unreachable,
)
from torchft_svc.sim.line_actor import RETRY_S, LineActor
from torchft_svc.sim.manager_actor import Part, WorkerAnswer
from torchft_svc.sim.offers import Fetched, Offers
from torchft_svc.sim.peers import Peers
from torchft_svc.sim.scenario import MEAN_COPY_S, TrainerRules
from torchft_svc.sim.shared import Home, Shared
from torchft_svc.sim.sums import Result, Seat, State
from torchft_svc.sim.world import Event, Process

# A user's loop that catches a failed quorum tries again after a moment.
PAUSE_S = 0.01
_TRAINING = (Phase.TRAINING, Phase.HEALING)
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
        self.weights = process.chance.getrandbits(32)
        self._step_of_weights = 0
        # Who cannot heal in time never trains with the others, so that is a fault like any other.
        self.offers = Offers(process, lambda: MEAN_COPY_S if shared.is_calm else rules.mean_copy_s)
        self.hung_until = 0.0
        self.is_broken = False  # the next collective raises
        self.vote_stalls_s = 0.0  # how much longer the next vote is on its way
        self.puts_heals_off_until = 0.0  # `start_quorum(allow_heal=False)`
        self.loses_update: str | None = None  # the next one ends by an exception, or by what spoils
        self.is_draining = False
        self._num_commits_draining = 0
        self.line = LineActor(process, home, group_rank, shared.network, self._hear)
        self._peers = Peers(process, shared.sums, home.job, group_rank)
        self._step = _Step(epoch=0)

    # -- start -----------------------------------------------------------------------------------

    def restore(self, state: State, batches_committed: int) -> None:
        self.machine.restore(state.step, batches_committed)
        self.weights = state.weights
        self._step_of_weights = state.step

    def begin_step(self) -> None:
        """`zero_grad`: ask for a quorum, and go forward unless the quorum is needed first."""
        if self._is_hanging(self.begin_step):
            return
        try:
            self.machine.start()
        except RequestRefused as error:  # its weights are those of no step
            self._end(error)
            return
        self._peers.ask()
        state = self.machine.state
        if not (state.spoiled and state.unhealed):
            name = self.process.name
            self._shared.invariants.discards.began(name, state.step, self._step_of_weights)
        step = self._step = _Step(epoch=state.epoch, leaves=self.is_draining)
        step.may_heal = self.puts_heals_off_until <= self.process.world.now
        # One of several workers that is to end goes on as those do that have not heard of it yet.
        ends_alone = self.is_draining and self.home.group_world_size == 1
        step.is_sync = state.step == 0 or ends_alone or not self._rules.use_async_quorum
        request = WorkerRequest(
            group_rank=self.group_rank,
            step=state.step,
            checkpoint_address=self.process.name,
            shrink_only=self.process.chance.random() < self._rules.shrink_only_rate,
            commit_failures=max(state.failures, int(self._peers.must_reconnect)),
            worker_id=self.process.name,
            draining=self.is_draining,
            unhealed=state.unhealed,
            last_quorum_id=self._peers.last_quorum_id,
            question=state.epoch,
        )
        if self.home.collective is not None:
            self.home.collective.asks(self.process)
        self._ask(step, request, self.process.world.now + self._rules.quorum_s)
        if not step.is_sync:
            self._go_forward(step)

    def _ask(self, step: _Step, request: WorkerRequest, deadline: float) -> None:
        """The same question again, while its answer does not come because of the way."""

        def heard(answer: WorkerAnswer) -> None:
            is_gone = isinstance(answer, Unreachable) and not self.home.is_manager_over()
            if is_gone and self.process.world.now + RETRY_S < deadline and step is self._step:
                self.process.after(RETRY_S, self._ask, step, request, deadline)
            else:
                self._on_quorum(step, answer)

        self.line.call(
            max(0.001, deadline - self.process.world.now),
            lambda manager, left_s, reply: manager.quorum(request, left_s, reply),
            heard,
        )

    def _go_forward(self, step: _Step) -> None:
        train_s = self._rules.train_s * self.process.chance.uniform(0.9, 1.1)
        self.process.after(train_s, self._forward_done, step)

    def _forward_done(self, step: _Step) -> None:
        if not self._is_hanging(self._forward_done, step) and step is self._step:
            step.is_forward_done = True
            self._reduce_if_ready(step)

    # -- the round -------------------------------------------------------------------------------

    def _on_quorum(self, step: _Step, answer: WorkerAnswer) -> None:
        if step is not self._step:
            return
        if self.home.collective is not None:
            self.home.collective.is_answered(self.process)
        if not isinstance(answer, Part):
            assert isinstance(answer, TorchFTError)
            # A manager that is gone is mostly followed by another, which lets this group leave.
            may_come = isinstance(answer, Unreachable) and not self.home.is_manager_over()
            gives_up = step.leaves and isinstance(answer, PeerError) and not may_come
            if isinstance(answer, GroupLeft) or gives_up:
                self._peers.depart()
                self.process.kill()
                self.home.worker_drained()
                return
            self._fail(answer)
            # Where workers need one another, a program must not ask once more on its own: its
            # peers may have had the answer, and wait for it in the collective.
            has_to_end = self.home.collective is not None or isinstance(answer, RequestRefused)
            if step.is_sync and has_to_end:
                self._end(answer)
                return
            if isinstance(answer, RequestRefused):
                step.refused = answer
            if step.is_sync:
                self._shared.trace.record(self.process.name, f"no quorum: {answer}")
                self.process.after(PAUSE_S, self.begin_step)
                return
            step.is_ready = True
            self._reduce_if_ready(step)
            return
        step.part, step.round = answer.assignment, answer.round
        self._form(step, answer.assignment)

    def _form(self, step: _Step, part: Assignment) -> None:
        problem = self._peers.meet(part)
        has_to_heal = part.heal_source is not None
        heals = has_to_heal and step.may_heal
        place = self._participation(step, part)
        heal_to = part.max_step if has_to_heal else None
        self.machine.form(place, heal_to, may_heal=step.may_heal)
        if problem is not None:
            self.machine.latch(problem)
        # Whoever puts a heal off and contributes nothing does the others no harm.
        contributes = place.participating_rank is not None
        is_awaited = contributes or heals or not has_to_heal or problem is not None
        if self.machine.state.error is not None and is_awaited:
            self._peers.abort()
        self._tell_phase()
        step.is_ready = True
        state = self.machine.state
        if part.heal_targets and step.may_heal and not state.spoiled:
            self.offers.offer(part.max_step, Fetched(self._state(), state.batches_committed))
        if heals:
            step.is_fetching = True
            self._fetch(step, part)
        elif step.is_sync:
            self._go_forward(step)
            return
        self._reduce_if_ready(step)

    def _participation(self, step: _Step, part: Assignment) -> Participation:
        standing = Standing(
            replica_rank=part.replica_rank,
            replica_world_size=part.replica_world_size,
            max_rank=part.max_replica_rank,
            max_world_size=part.max_world_size,
        )
        heals_first = part.max_step == 0 or not self._rules.use_async_quorum
        heals_first = heals_first and step.may_heal
        return participation(standing, heals_first=heals_first, num_wanted=self._rules.num_wanted)

    def _fetch(self, step: _Step, part: Assignment) -> None:
        def received(outcome: Fetched | PeerError) -> None:
            latency_s = self._shared.network.latency(self.process)
            self.process.after(latency_s, self._fetched, step, outcome)

        late = QuorumFailed("the fetch took too long")
        self.process.after(self._rules.collective_s, self._fetched, step, late)
        self._shared.fetch(self.process, part, self.group_rank, received)

    def _fetched(self, step: _Step, outcome: Fetched | PeerError) -> None:
        if step is not self._step or not step.is_fetching:
            return
        step.is_fetching = False
        if isinstance(outcome, Fetched):
            step.fetched = outcome
            self.machine.receive_state()
        else:
            self._fail(outcome)
        if step.is_sync:
            self._apply_heal(step)
            self._go_forward(step)
        elif step.is_reduced:
            self._end_backward(step)

    def _fail(self, error: TorchFTError) -> None:
        phase = self.machine.state.phase
        if phase is Phase.QUORUM:
            self.machine.fail_quorum(error)
            self._peers.abort()  # it sums nothing in this step, and the others must not wait
        elif phase is Phase.HEALING:
            self.machine.fail_heal(error)
        else:
            self.machine.latch(error)
        if self.machine.state.participation.participating_rank is not None:
            self._peers.abort()

    # -- the sum ---------------------------------------------------------------------------------

    def _reduce_if_ready(self, step: _Step) -> None:
        if not (step.is_ready and step.is_forward_done) or step.is_reduced or step.is_reducing:
            return
        if self.is_broken:
            self.is_broken = False
            self._hear_error(QuorumFailed("an exception in a collective"), step)
        seat = self._peers.seat
        broken = seat.error if seat is not None else QuorumFailed("no process group")
        if broken is not None:
            self._hear_error(broken, step)
        if broken is not None or self.machine.state.phase not in _TRAINING:
            self._reduced(step, broken or QuorumFailed("there is no step to sum up"))
            return
        assert seat is not None
        step.is_reducing = True
        self._tell_phase(Phase.QUORUM)  # it waits for others
        contributes = self.machine.state.participation.participating_rank is not None
        step.expiry = self.process.after(self._rules.collective_s, self._reduce_expired, step, seat)
        state = self._state() if contributes else None
        seat.reduce(state, lambda result: self._reduced(step, result))

    def _reduce_expired(self, step: _Step, seat: Seat) -> None:
        if step is self._step and step.is_reducing:
            seat.abort()

    def _reduced(self, step: _Step, result: Result) -> None:
        if step is not self._step or step.is_reduced:
            return
        step.is_reducing, step.is_reduced = False, True
        self._tell_phase()
        if step.expiry is not None:
            step.expiry.cancelled = True
        if isinstance(result, PeerError):
            self._hear_error(result, step)
        else:
            step.result = result
        if not step.is_fetching:
            self.process.after(0.0, self._end_backward, step)

    def _end_backward(self, step: _Step) -> None:
        """In the other half of the pass the group's workers need each other."""
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

    def _hear_error(self, error: PeerError, step: _Step) -> None:
        if not self.machine.latch(error, step.epoch):
            return
        state = self.machine.state
        contributes = state.participation.participating_rank is not None
        if contributes and state.phase in _TRAINING:
            self._peers.abort()

    def drain(self, reason: str) -> None:
        """SIGTERM: the group ends after this step."""
        self.is_draining = True
        self.line.ask_to_drain(reason)

    def _hear(self, kind: str, *what: Any) -> None:
        if kind == "lost":
            self._peers.lose(*what)
        elif kind == "cut":
            self._peers.cut()
        elif kind == "drain":
            self.is_draining = True
        elif kind == "kill":
            self.process.kill()
            self.home.worker_failed("it was told to")

    # -- the decision ----------------------------------------------------------------------------

    def _decide(self, step: _Step) -> None:
        if self._is_hanging(self._decide, step) or step is not self._step:
            return
        self._apply_heal(step)
        vote = self.machine.begin_vote()
        self._tell_phase()
        if self.home.group_world_size == 1:
            self._decided(step, vote)
        else:
            self._vote(step, vote, self.process.world.now + self._rules.collective_s)

    def _vote(self, step: _Step, should_commit: bool, deadline: float) -> None:
        vote = Vote(
            group_rank=self.group_rank,
            step=self.machine.state.step,
            should_commit=should_commit,
            round=step.round,
            worker_id=self.process.name,
        )
        stalls_s, self.vote_stalls_s = self.vote_stalls_s, 0.0
        self._shared.invariants.hangs.trouble(self.home.name, stalls_s)
        self.line.call(
            max(0.001, deadline - self.process.world.now),
            lambda manager, left_s, reply: manager.vote(vote, left_s, reply),
            lambda answer: self._on_decision(step, should_commit, deadline, answer),
            stalls_s,
        )

    def _on_decision(self, step: _Step, vote: bool, deadline: float, answer: WorkerAnswer) -> None:
        if isinstance(answer, bool | CommitFailed) or not vote:
            barrier = (self.line.manager_name(), step.round)
            self._shared.invariants.identity.shared_fate(barrier, self.process, answer is True)
            self._decided(step, answer is True)
        elif isinstance(answer, Unreachable) and self.process.world.now + RETRY_S < deadline:
            self.process.after(RETRY_S, self._vote, step, vote, deadline)
        else:
            self._decided(step, False)
            self._end(answer)

    def _decided(self, step: _Step, committed: bool) -> None:
        before = self.machine.state
        self.machine.decide(committed)
        after = self.machine.state
        self._shared.invariants.discards.decided(self.process.name, before, after, committed)
        if committed:
            self._commit(step, before)
        self._tell_phase()
        if step.refused is not None:
            self._end(step.refused)
        self.process.after(PAUSE_S * self.process.chance.random(), self.begin_step)

    def _commit(self, step: _Step, before: StepState) -> None:
        assert step.part is not None
        name, discards = self.process.name, self._shared.invariants.discards
        discards.updates(name, before.step, self._step_of_weights, step.part.max_step)
        spoiled_by, self.loses_update = self.loses_update, None
        if spoiled_by is not None:
            self.machine.lose_update(spoiled_by)
            if spoiled_by:
                self.weights = self.process.chance.getrandbits(32)
                self._step_of_weights = NO_STEP
            return
        self.weights = hash((self.weights, step.result))
        self._step_of_weights += 1
        self.machine.end_update()
        if self.is_draining:
            self._num_commits_draining += 1
            discards.drained(name, self._num_commits_draining)
        part = step.part
        key = (self.home.job, self.group_rank, part.quorum_id, part.replica_ids, before.step)
        self._shared.invariants.identity.committed(key, name, self.weights)
        self._shared.count_commit(self.home.job, step.part.quorum_id, before.step)
        self.home.save(self.group_rank, self._state(), self.machine.state.batches_committed)

    def _apply_heal(self, step: _Step) -> None:
        fetched, step.fetched = step.fetched, None
        if fetched is not None:
            self.offers.retract()
            self.machine.apply_heal(fetched.batches_committed)
            self.weights, self._step_of_weights = fetched.state.weights, fetched.state.step

    # -- inside ----------------------------------------------------------------------------------

    def _state(self) -> State:
        return State(self.machine.state.step, self.weights)

    def _tell_phase(self, phase: Phase | None = None) -> None:
        if self._rules.tells_phases:
            state = self.machine.state
            self.line.tell_phase(phase or state.phase, state.step)

    def _end(self, error: WorkerAnswer) -> None:
        """The training loop raises."""
        self.process.kill()
        self.home.worker_failed(str(error))

    def _is_hanging(self, then: Callable[..., None], *args: object) -> bool:
        """The main thread is stuck: go on with ``then`` when it is not any more."""
        if self.hung_until <= self.process.world.now:
            return False
        self.process.after(self.hung_until - self.process.world.now, then, *args)
        return True


@dataclass(slots=True)
class _Step:
    """What a step has come to."""

    epoch: int
    leaves: bool = False  # it is told to end, and has said so
    may_heal: bool = True
    is_sync: bool = False
    is_ready: bool = False
    is_forward_done: bool = False
    is_fetching: bool = False
    is_reducing: bool = False
    is_reduced: bool = False
    round: int = 0
    part: Assignment | None = None
    fetched: Fetched | None = None
    result: int | None = None
    refused: RequestRefused | None = None
    expiry: Event | None = None
