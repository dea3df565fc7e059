"""Tests that the lighthouse knows the phase of a trainer, and reports a step that stands still."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.bounds import check
from support.endings import Program, running
from support.running import Process, eventually, lighthouse_process
from support.training import DEADLINE_S, TIMEOUT, Trainer
from torch import nn

from tools.chaos.bounds import NEWS_S
from torchft_svc.client import (
    DistributedDataParallel,
    Manager,
    OptimizerWrapper,
    ProcessGroupDummy,
)
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.coordination.outgoing import Outgoing
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.worker.round import WorkerRules
from torchft_svc.core.quorum.worker.step import Participation, StepMachine
from torchft_svc.proto import torchft_pb2 as pb

HANG_S = 1.0


@pytest.fixture
def lighthouse() -> Iterator[Process]:
    with lighthouse_process("--hang-timeout-ms=500") as process:
        yield process


@pytest.mark.processes
def test_a_step_that_stands_still_is_reported_once_with_its_phase(lighthouse: Process) -> None:
    with Trainer(lighthouse.address, "a", 0) as trainer:
        trainer.steps(2)
        trainer.optimizer.zero_grad()  # and nothing follows
        eventually(lambda: "step=2 " in lighthouse.errors())
        trainer.loss().backward()
        assert trainer.optimizer.step()
        trainer.steps(20)
        trainer.backward()
        eventually(lambda: "step=23" in lighthouse.errors())
    lines = lighthouse.errors()
    assert "group hangs job=default replica=a:" in lines
    assert [lines.count(f" phase=training step={step} for ") for step in (2, 23)] == [1, 1]


@pytest.mark.processes
def test_a_pause_between_two_steps_is_no_hang(lighthouse: Process) -> None:
    with Trainer(lighthouse.address, "idle", 0) as idle:
        idle.steps(2)
        with Trainer(lighthouse.address, "stuck", 0, job_id="other") as stuck:
            stuck.optimizer.zero_grad()  # later: what is due for the other one is sent before
            eventually(lambda: "replica=stuck:" in lighthouse.errors())
    lines = [line for line in lighthouse.errors().splitlines() if "replica=idle:" in line]
    assert not [line for line in lines if "step=2 " in line]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "status"),
    [("hangs", 1), ("hangs_with_the_lock", -signal.SIGKILL), ("hangs", None)],
    ids=["ended", "ended although it keeps the lock", "left out"],
)
def test_the_others_of_a_trainer_that_hangs_go_on(program: str, status: int | None) -> None:
    on_hang = "evict" if status is None else "kill"
    with (
        lighthouse_process(
            f"--hang-timeout-ms={HANG_S * 1000:.0f}", f"--on-hang={on_hang}"
        ) as lighthouse,
        running(program, lighthouse.address) as hung,
        Manager(lighthouse_addr=lighthouse.address, replica_id="other", timeout=TIMEOUT) as other,
    ):
        model = nn.Linear(4, 2)  # as in endings.py
        other.set_state_dict_fns(lambda _: None, lambda: {"model": model.state_dict()})
        parallel = DistributedDataParallel(other, model)
        optimizer = OptimizerWrapper(other, torch.optim.SGD(model.parameters(), lr=0.1))

        def step() -> bool:
            optimizer.zero_grad()
            parallel(torch.ones(3, 4)).sum().backward()
            return optimizer.step()

        deadline = time.monotonic() + DEADLINE_S
        longest_s = 0.0
        has_met = False
        while not has_met or other.num_participants() == 2 or lives(hung, status):
            began_at = time.monotonic()
            step()
            if other.num_participants() == 2:
                has_met = True
                longest_s = max(longest_s, time.monotonic() - began_at)
            assert time.monotonic() < deadline
        check("a group hangs inside a step: the other goes on", longest_s, HANG_S + NEWS_S)
        hung.read_until("training")
        if status is None:
            assert hung.process.poll() is None
        else:
            assert hung.process.wait() == status, hung.errors()
            hung.check_children()
        assert [step() for _ in range(3)] == [True] * 3


def lives(hung: Program, status: int | None) -> bool:
    """Whether a program has yet to be ended, with ``status``."""
    return status is not None and hung.process.poll() is None


@pytest.mark.processes
def test_a_group_that_waits_to_join_is_counted_until_the_next_quorum() -> None:
    with lighthouse_process() as lighthouse, Trainer(lighthouse.address, "a", 0) as a:
        a.steps(2)
        a.backward()
        assert a.manager.num_replicas_waiting() == 0
        with Trainer(lighthouse.address, "b", 1) as b, ThreadPoolExecutor(1) as thread:
            joins = thread.submit(b.backward)
            eventually(lambda: a.manager.num_replicas_waiting() == 1)
            a.optimizer.step()
            a.backward()
            assert a.manager.num_replicas_waiting() == 0
            joins.result()


def test_every_change_of_phase_is_reported() -> None:
    worker = SharedRound(WorkerRules(), StepMachine(), ProcessGroupDummy())
    reported: list[tuple[Phase, int]] = []
    worker.on_phase = lambda report: reported.append((report.phase, report.step))
    with worker.changing() as round_:
        round_.step.start()
    with worker.changing() as round_:
        round_.step.form(Participation(participating_rank=0, num_participants=1), None)
    with worker.changing() as round_:
        round_.step.latch(RuntimeError("changes no phase"))
    assert reported == [(Phase.TRAINING, 0)]


def test_only_the_latest_phase_is_sent_and_nothing_after_the_end() -> None:
    outgoing = Outgoing(pb.AttachHello(rank=1, worker_id="w"))
    messages = outgoing.messages()
    assert next(messages).hello.rank == 1
    for step in range(100):
        outgoing.report_phase(PhaseReport(Phase.TRAINING, step, went_on_to=step + 1))
    first_phase = next(messages).phase
    assert (first_phase.step, first_phase.went_on_to) == (99, 100)
    sent: list[pb.AttachRequest] = []
    reader = threading.Thread(target=lambda: sent.extend(messages))
    reader.start()
    for step in range(100):
        outgoing.report_phase(PhaseReport(Phase.VOTING, step))
    outgoing.end(pb.AttachDetach())
    outgoing.end()
    reader.join(10.0)
    assert not reader.is_alive()
    assert [each.WhichOneof("kind") for each in sent] == ["detach"], "too soon for another phase"
