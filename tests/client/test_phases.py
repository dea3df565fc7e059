"""Tests that the lighthouse knows what a trainer does, and reports one whose step stands still."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from running import Process, eventually, lighthouse_process

from torchft_svc.client.rounds import SharedStep
from torchft_svc.coordination.outgoing import Outgoing
from torchft_svc.core.step import Phase, StepMachine
from torchft_svc.proto import torchft_pb2 as pb

from .training import Trainer


@pytest.fixture
def lighthouse() -> Iterator[Process]:
    with lighthouse_process("--hang-timeout-ms=500") as process:
        yield process


def test_a_step_that_stands_still_is_reported_once_with_its_phase(lighthouse: Process) -> None:
    with Trainer(lighthouse.address, "a", 0) as trainer:
        trainer.steps(2)
        trainer.optimizer.zero_grad()  # and nothing follows
        eventually(lambda: "group hangs" in lighthouse.errors())
        trainer.loss().backward()
        assert trainer.optimizer.step()
        trainer.steps(20)
        trainer.backward()
        eventually(lambda: lighthouse.errors().count("group hangs") == 2)
    told = [line for line in lighthouse.errors().splitlines() if "group hangs" in line]
    assert "job=default replica=a:" in told[0]
    assert "phase=training step=2 for 0.5 s" in told[0]
    assert "phase=training step=23 for 0.5 s" in told[1]


def test_a_pause_between_two_steps_is_no_hang(lighthouse: Process) -> None:
    with Trainer(lighthouse.address, "idle", 0) as idle:
        idle.steps(2)
        with Trainer(lighthouse.address, "stuck", 0, job_id="other") as stuck:
            stuck.optimizer.zero_grad()  # later: what is due for the other one is told before
            eventually(lambda: "group hangs" in lighthouse.errors())
    (told,) = [line for line in lighthouse.errors().splitlines() if "group hangs" in line]
    assert "replica=stuck:" in told


def test_every_change_of_phase_is_heard() -> None:
    step = SharedStep(StepMachine(min_replica_size=1, max_retries=None))
    heard: list[tuple[Phase, int]] = []
    step.on_phase = lambda phase, number: heard.append((phase, number))
    with step.changing() as machine:
        machine.start()
    with step.changing() as machine:
        machine.latch(RuntimeError("changes no phase"))
    assert heard == [(Phase.QUORUM, 0)]


def test_only_the_latest_phase_is_told_and_goodbye_is_the_last_word() -> None:
    outgoing = Outgoing(pb.AttachHello(rank=1, worker_id="w"))
    messages = outgoing.messages()
    assert next(messages).hello.rank == 1
    for step in range(100):
        outgoing.tell(pb.AttachPhase(phase=pb.PHASE_TRAINING, step=step))
    assert next(messages).phase.step == 99
    told: list[pb.AttachRequest] = []
    reader = threading.Thread(target=lambda: told.extend(messages))
    reader.start()
    for step in range(100):
        outgoing.tell(pb.AttachPhase(phase=pb.PHASE_VOTING, step=step))
    outgoing.end(detaches=True)
    outgoing.end(detaches=False)
    reader.join(10.0)
    assert not reader.is_alive()
    assert [each.WhichOneof("kind") for each in told] == ["detach"], "too soon for another phase"
