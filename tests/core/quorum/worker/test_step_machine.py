"""Tests I4 and I6 under any life of a trainer, as a state machine."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.worker.step import (
    MAX_FAILED_LOADS,
    Participation,
    StepMachine,
    StepState,
)
from torchft_svc.errors import RequestRefused, TornState

OOPS = RuntimeError("oops")
TORN = TornState("a source", "it hung up")


class Life(RuleBasedStateMachine):
    """A trainer's life; ``weights`` is what a real one would hold: the step that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = StepMachine()
        self.weights = 0
        self.before = StepState()
        self.arrived = False
        self.is_torn = False
        self.num_failed_loads = 0

    @property
    def phase(self) -> Phase:
        return self.machine.state.phase

    @precondition(lambda self: self.phase in (Phase.IDLE, Phase.TRAINING))
    @rule()
    def start(self) -> None:
        is_hopeless = self.num_failed_loads >= MAX_FAILED_LOADS
        if is_hopeless or (self.is_torn and not self.machine.state.unhealed):
            with pytest.raises(RequestRefused):
                self.machine.start()
            return
        self.machine.start()
        self.arrived = False
        self.before = self.machine.state

    @precondition(lambda self: self.phase is Phase.IDLE)
    @rule(step=st.integers(0, 9))
    def restore(self, step: int) -> None:
        self.weights = step
        self.is_torn = False
        self.machine.restore(step, 0)
        self.before = self.machine.state

    @precondition(lambda self: self.phase is Phase.QUORUM)
    @rule(ahead=st.integers(0, 3), num=st.integers(1, 4))
    def form(self, ahead: int, num: int) -> None:
        rank = 0 if ahead == 0 else None
        where = Participation(participating_rank=rank, num_participants=num)
        self.machine.form(where, self.weights + ahead if ahead else None)

    @precondition(lambda self: self.phase is Phase.QUORUM)
    @rule()
    def fail(self) -> None:
        self.machine.fail_quorum(OOPS)

    @precondition(lambda self: self.phase is Phase.HEALING)
    @rule()
    def receive(self) -> None:
        self.machine.receive_state()
        self.arrived = True

    @precondition(lambda self: self.phase is Phase.HEALING or self.arrived)
    @rule()
    def lose_the_heal(self) -> None:
        if self.phase in (Phase.HEALING, Phase.TRAINING):
            self.machine.fail_heal(OOPS)
            self.num_failed_loads += self.arrived
            self.arrived = False

    @precondition(lambda self: self.arrived and self.phase is Phase.TRAINING)
    @rule()
    def tear(self) -> None:
        self.machine.fail_heal(TORN)
        self.num_failed_loads += 1
        self.arrived = False
        self.is_torn = True

    @precondition(lambda self: self.arrived and self.phase is Phase.TRAINING)
    @rule(batches=st.integers(0, 100))
    def apply(self, batches: int) -> None:
        heal = self.machine.state.pending_heal
        assert heal is not None
        self.weights = heal.step
        self.is_torn = False
        self.num_failed_loads = 0
        self.machine.apply_heal(batches)
        self.arrived = False
        self.before = self.machine.state

    @rule()
    def error(self) -> None:
        self.machine.latch(OOPS)

    @precondition(lambda self: self.phase is Phase.TRAINING and not self.arrived)
    @rule(others_agree=st.booleans())
    def vote(self, others_agree: bool) -> None:
        vote = self.machine.begin_vote()
        assert not (vote and self.machine.state.error)
        assert not (vote and (self.is_torn or self.machine.state.unhealed))
        committed = vote and others_agree
        if not committed and self.num_failed_loads >= MAX_FAILED_LOADS:
            with pytest.raises(RequestRefused):
                self.machine.decide(False)
        else:
            self.machine.decide(committed)
        if committed:
            assert self.machine.state.failures == 0
        else:
            assert self.machine.state.failures == self.before.failures + 1
            # I6: a discarded step changes nothing.
            assert self.machine.state.step == self.before.step
            assert self.machine.state.batches_committed == self.before.batches_committed

    @precondition(lambda self: self.phase is Phase.APPLYING)
    @rule()
    def update(self) -> None:
        self.weights += 1
        self.machine.end_update()

    @precondition(lambda self: self.phase is Phase.APPLYING)
    @rule(is_begun=st.booleans())
    def lose_the_update(self, is_begun: bool) -> None:
        self.machine.lose_update("it ran out of memory" if is_begun else "")
        self.is_torn = is_begun

    @rule()
    def interrupt(self) -> None:
        self.machine.interrupt()
        assert self.phase not in (Phase.VOTING, Phase.APPLYING)

    @precondition(lambda self: self.phase is Phase.QUORUM)
    @rule(ahead=st.integers(0, 3))
    def put_the_heal_off(self, ahead: int) -> None:
        where = Participation(num_participants=1)
        self.machine.form(where, self.weights + ahead, may_heal=False)
        assert self.machine.state.unhealed

    @invariant()
    def i4_the_step_is_that_of_the_weights(self) -> None:
        begun = int(self.phase is Phase.APPLYING)
        assert self.machine.state.step == self.weights + begun

    @invariant()
    def no_vote_while_a_heal_is_owed(self) -> None:
        state = self.machine.state
        assert not (state.phase is Phase.APPLYING and (state.unhealed or state.spoiled))

    @invariant()
    def nothing_pending_outside_a_heal(self) -> None:
        state = self.machine.state
        if state.phase in (Phase.IDLE, Phase.QUORUM, Phase.VOTING):
            assert state.pending_heal is None


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
