"""Tests the metrics of a manager, of a real process beside a real lighthouse."""

from __future__ import annotations

import re
import urllib.request

import pytest
from support.metrics import Page
from support.running import command, eventually, lighthouse_process, line_to, manager_process

from torchft_svc.manager_server.counts import ManagerCounts
from torchft_svc.proto import torchft_pb2 as pb

pytestmark = pytest.mark.processes
LABELS = {"job": "j", "group": "group"}


def test_a_manager_serves_its_metrics() -> None:
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address, "--metrics-bind=127.0.0.1:0", "--job-id=j") as manager,
    ):
        found = eventually(lambda: re.search(r"served at (127\S+)", manager.errors()))

        def page() -> Page:
            with urllib.request.urlopen(f"http://{found[1]}/metrics", timeout=10) as answer:
                return Page(answer.read())

        eventually(lambda: page().value("torchft_manager_connected", **LABELS) == 1)
        assert page().value("torchft_manager_workers", **LABELS) == 0
        with line_to(manager.address) as line:
            asks = pb.ManagerQuorumRequest(rank=0, step=4, worker_id="w")
            line.call("ManagerService/Quorum", asks, 10.0, None).result()
        shown = page()
        assert shown.value("torchft_manager_quorums_total", **LABELS, outcome="formed") == 1
        assert shown.value("torchft_manager_quorum_duration_seconds_count", **LABELS) == 1
        lighthouse.end()
        eventually(lambda: page().value("torchft_manager_connected", **LABELS) == 0)


def test_an_address_that_is_taken_is_named() -> None:
    with lighthouse_process() as lighthouse:
        flags = (f"--lighthouse={lighthouse.address}", "--replica-name=a", "--bind=127.0.0.1:0")
        taken = f"--metrics-bind={lighthouse.address}"
        done = command("manager_server", *flags, "--store-address=127.0.0.1:1", taken)
    assert done.returncode == 2
    assert "cannot be bound for metrics" in done.stderr


def test_questions_are_counted_once() -> None:
    counts = ManagerCounts()
    counts.record_outcome(1.0, is_formed=True)  # nobody has asked
    counts.record_question(2.0)
    counts.record_question(3.0)
    counts.record_outcome(5.0, is_formed=False)
    counts.record_question(6.0)
    counts.drop_question()
    counts.record_outcome(7.0, is_formed=True)
    assert (counts.num_formed, counts.num_failed, counts.durations.sum_s) == (0, 1, 3.0)
