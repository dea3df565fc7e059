"""A worker of a simulated world: the real step machine, driven as `client/stepper.py` drives it.

Weights are one number, a hash chain over all updates, so different histories can be told apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torchft_svc.core.assignment import Assignment
from torchft_svc.core.requests import Vote, WorkerRequest
from torchft_svc.core.step import (
    Participation,
    Phase,
    Standing,
    StepMachine,
    StepState,
    participation,
)
from torchft_svc.errors import (
    CommitFailed,
    PeerError,
    QuorumFailed,
    TorchFTError,
    Unreachable,
    UsageError,
)
from torchft_svc.sim.call import Call, Enter
from torchft_svc.sim.manager_actor import ManagerActor, Part, WorkerAnswer
from torchft_svc.sim.offers import Fetched, Offers
from torchft_svc.sim.shared import Home, Shared
from torchft_svc.sim.sums import Result, Seat, State
from torchft_svc.sim.world import Event, Process

MAX_LOSSES = 256
RETRY_S = 0.05
# A user's loop that catches a failed quorum tries again after a moment.
PAUSE_S = 0.01
_TRAINING = (Phase.TRAINING, Phase.HEALING)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRules:
    """How the workers of a run train; durations in seconds."""

    collective_s: float
    quorum_s: float
    train_s: float
    min_replica_size: int
    use_async_quorum: bool
    num_wanted: int | None


class WorkerActor:
    """One life of a worker."""

    def __init__(
        self,
        process: Process,
        home: Home,
        group_rank: int,
        rules: TrainerRules,
        shared: Shared,
    ) -> None:
        self.process = process
        self.home = home
        self.group_rank = group_rank
        self._rules = rules
        self._shared = shared
        self.machine = StepMachine(min_replica_size=rules.min_replica_size)
        self.weights = process.chance.getrandbits(32)
        self.offers = Offers(process)
        self.hung_until = 0.0
        self.is_broken = False  # the next collective raises
        self._losses: deque[str] = deque(maxlen=MAX_LOSSES)
        self._part: Assignment | None = None
        self._seat: Seat | None = None
        self._step = _Step(epoch=0)

    # -- start -----------------------------------------------------------------------------------

    def restore(self, state: State, batches_committed: int) -> None:
        self.machine.restore(state.step, batches_committed)
        self.weights = state.weights

    def attach(self) -> None:
        """Open the line to the manager."""
        manager = self.home.manager
        if manager is not None and not manager.process.is_dead:
            manager.process.after(self._latency(), self._attached, manager)

    def _attached(self, manager: ManagerActor) -> None:
        if self.process.is_dead:
            return
        try:
            manager.attach(self.group_rank, self.process.name, self._hear_loss)
        except TorchFTError:
            self.process.after(RETRY_S, self.attach)

    def begin_step(self) -> None:
        """`zero_grad`: ask for a quorum, and go forward unless the quorum is needed first."""
        if self._is_hanging(self.begin_step):
            return
        self.machine.start()
        state = self.machine.state
        step = self._step = _Step(epoch=state.epoch)
        step.is_sync = state.step == 0 or not self._rules.use_async_quorum
        self._losses.clear()
        must_reconnect = self._seat is not None and self._seat.error is not None
        request = WorkerRequest(
            group_rank=self.group_rank,
            step=state.step,
            checkpoint_address=self.process.name,
            commit_failures=max(state.failures, int(must_reconnect)),
            worker_id=self.process.name,
        )
        self._call(
            self._rules.quorum_s,
            lambda manager, left_s, reply: manager.quorum(request, left_s, reply),
            lambda answer: self._on_quorum(step, answer),
        )
        if not step.is_sync:
            self._go_forward(step)

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
        if not isinstance(answer, Part):
            assert isinstance(answer, TorchFTError)
            if isinstance(answer, UsageError):  # to repeat it would not help
                self.process.kill()
                self.home.worker_failed(f"its request was refused: {answer}")
                return
            self._fail(answer)
            if step.is_sync:
                self._shared.story.tell(self.process.name, f"no quorum: {answer}")
                self.process.after(PAUSE_S, self.begin_step)
                return
            step.is_ready = True
            self._reduce_if_ready(step)
            return
        step.part, step.round = answer.assignment, answer.round
        self._form(step, answer.assignment)

    def _form(self, step: _Step, part: Assignment) -> None:
        problem = self._meet(part)
        heals = part.heal_source is not None
        self.machine.form(self._participation(step, part), part.max_step if heals else None)
        if problem is not None:
            self.machine.latch(problem)
        if self.machine.state.error is not None and self._seat is not None:
            self._seat.abort()
        step.is_ready = True
        if part.heal_targets:
            state = self.machine.state
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
        return participation(standing, heals_first=heals_first, num_wanted=self._rules.num_wanted)

    def _meet(self, part: Assignment) -> PeerError | None:
        if self._seat is not None:
            if self._seat.quorum_id == part.quorum_id and self._seat.error is None:
                return None
            self._seat.leave()
        self._part = part
        lost = [each for each in self._losses if each in self._others(part)]
        me = part.replica_ids[part.replica_rank]
        key = (self.home.job, part.quorum_id, self.group_rank)
        self._seat = self._shared.sums.join(key, part.replica_ids, me, self.process)
        if lost:
            return QuorumFailed(f"{lost[0]} is gone")
        return self._seat.error

    def _fetch(self, step: _Step, part: Assignment) -> None:
        def received(outcome: Fetched | PeerError) -> None:
            self.process.after(self._latency(), self._fetched, step, outcome)

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
            self._decide(step)

    def _fail(self, error: TorchFTError) -> None:
        phase = self.machine.state.phase
        if phase is Phase.QUORUM:
            self.machine.fail_quorum(error)
        elif phase is Phase.HEALING:
            self.machine.fail_heal(error)
        else:
            self.machine.latch(error)
        if self.machine.state.participation.participating_rank is not None and self._seat:
            self._seat.abort()

    # -- the sum ---------------------------------------------------------------------------------

    def _reduce_if_ready(self, step: _Step) -> None:
        if not (step.is_ready and step.is_forward_done) or step.is_reduced or step.is_reducing:
            return
        if self.is_broken:
            self.is_broken = False
            self._hear_error(QuorumFailed("an exception in a collective"), step)
        broken = self._seat.error if self._seat is not None else QuorumFailed("no process group")
        if broken is not None:
            self._hear_error(broken, step)
        if broken is not None or self.machine.state.phase not in _TRAINING:
            self._reduced(step, broken or QuorumFailed("there is no step to sum up"))
            return
        assert self._seat is not None
        step.is_reducing = True
        contributes = self.machine.state.participation.participating_rank is not None
        step.expiry = self.process.after(
            self._rules.collective_s, self._reduce_expired, step, self._seat
        )
        state = self._state() if contributes else None
        self._seat.reduce(state, lambda result: self._reduced(step, result))

    def _reduce_expired(self, step: _Step, seat: Seat) -> None:
        if step is self._step and step.is_reducing:
            seat.abort()

    def _reduced(self, step: _Step, result: Result) -> None:
        if step is not self._step or step.is_reduced:
            return
        step.is_reducing, step.is_reduced = False, True
        if step.expiry is not None:
            step.expiry.cancelled = True
        if isinstance(result, PeerError):
            self._hear_error(result, step)
        else:
            step.result = result
        if not step.is_fetching:
            self.process.after(0.0, self._decide, step)

    def _hear_error(self, error: PeerError, step: _Step) -> None:
        if not self.machine.latch(error, step.epoch):
            return
        state = self.machine.state
        contributes = state.participation.participating_rank is not None
        if contributes and state.phase in _TRAINING and self._seat is not None:
            self._seat.abort()

    def _hear_loss(self, replica_id: str, reason: str) -> None:
        self.process.after(self._latency(), self._lose, replica_id)

    def _lose(self, replica_id: str) -> None:
        self._losses.append(replica_id)
        if self._part is not None and replica_id in self._others(self._part) and self._seat:
            self._seat.abort()

    # -- the decision ----------------------------------------------------------------------------

    def _decide(self, step: _Step) -> None:
        if self._is_hanging(self._decide, step) or step is not self._step:
            return
        self._apply_heal(step)
        vote = self.machine.begin_vote()
        if self.home.group_world_size == 1:
            self._decided(step, vote)
            return
        self._vote(step, vote, self.process.world.now + self._rules.collective_s)

    def _vote(self, step: _Step, should_commit: bool, deadline: float) -> None:
        vote = Vote(
            group_rank=self.group_rank,
            step=self.machine.state.step,
            should_commit=should_commit,
            round=step.round,
            worker_id=self.process.name,
        )
        self._call(
            max(0.001, deadline - self.process.world.now),
            lambda manager, left_s, reply: manager.vote(vote, left_s, reply),
            lambda answer: self._on_decision(step, should_commit, deadline, answer),
        )

    def _on_decision(self, step: _Step, vote: bool, deadline: float, answer: WorkerAnswer) -> None:
        if isinstance(answer, bool):
            self._decided(step, answer)
        elif isinstance(answer, CommitFailed) or not vote:
            self._decided(step, False)
        elif isinstance(answer, Unreachable) and self.process.world.now + RETRY_S < deadline:
            self.process.after(RETRY_S, self._vote, step, vote, deadline)
        else:
            self._decided(step, False)
            self.process.kill()
            self.home.worker_failed(f"no decision on its vote: {answer}")

    def _decided(self, step: _Step, committed: bool) -> None:
        before = self.machine.state
        self.machine.decide(committed)
        after = self.machine.state
        self._shared.invariants.discards.decided(self.process.name, before, after, committed)
        if committed:
            self._commit(step, before)
        self.process.after(PAUSE_S * self.process.chance.random(), self.begin_step)

    def _commit(self, step: _Step, before: StepState) -> None:
        assert step.part is not None
        self.weights = hash((self.weights, step.result))
        key = (self.home.job, self.group_rank, step.part.quorum_id, before.step)
        self._shared.invariants.identity.committed(key, self.process.name, self.weights)
        self._shared.count_commit(self.home.job, step.part.quorum_id, before.step)
        self.home.save(self.group_rank, self._state(), self.machine.state.batches_committed)

    def _apply_heal(self, step: _Step) -> None:
        fetched, step.fetched = step.fetched, None
        if fetched is not None:
            self.machine.apply_heal(fetched.batches_committed)
            self.weights = fetched.state.weights

    # -- inside ----------------------------------------------------------------------------------

    def _state(self) -> State:
        return State(self.machine.state.step, self.weights)

    def _others(self, part: Assignment) -> set[str]:
        return {name for rank, name in enumerate(part.replica_ids) if rank != part.replica_rank}

    def _latency(self) -> float:
        return self._shared.network.latency(self.process)

    def _is_hanging(self, then: Callable[..., None], *args: object) -> bool:
        """The main thread is stuck: go on with ``then`` when it is not any more."""
        if self.hung_until <= self.process.world.now:
            return False
        self.process.after(self.hung_until - self.process.world.now, then, *args)
        return True

    def _call(
        self,
        timeout_s: float,
        enter: Enter,
        done: Callable[[WorkerAnswer], None],
    ) -> None:
        """One RPC to the manager, which ends by its deadline whatever happens there."""
        manager = self.home.manager
        Call(self.process, self._shared.network, manager, timeout_s, done).start(enter)


@dataclass(slots=True)
class _Step:
    """What a step has come to."""

    epoch: int
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
    expiry: Event | None = None
