"""Tests which question of a manager the lighthouse's answer belongs to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.running import Process, line_to, manager_process
from support.scripted import Script

pytestmark = pytest.mark.processes


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.close()


@pytest.fixture
def manager(script: Script) -> Iterator[Process]:
    with manager_process(script.address) as manager:
        yield manager


def test_the_answer_to_a_question_that_was_given_up_is_not_taken_for_the_next_ones(
    script: Script, manager: Process
) -> None:
    with line_to(manager.address) as line:
        given_up = line.ask_manager(worker_id="w")
        first = script.next_request("question")
        given_up.cancel()
        assert script.next_request("withdrawal").number == first.number
        asked = line.ask_manager(worker_id="w")
        second = script.next_request("question")
        script.answer(first, quorum_id=7, answers=first.number)  # was published a moment before
        script.answer(second, quorum_id=8, answers=second.number)
        assert asked.result().quorum_id == 8


def test_a_question_that_is_given_up_at_once_costs_no_session(
    script: Script, manager: Process
) -> None:
    """The loop meets a question that is still being written, whose stream gRPC would cancel."""
    with line_to(manager.address) as line:
        for _ in range(50):
            given_up = line.ask_manager(worker_id="w")
            question = script.next_request("question")
            given_up.cancel()
            assert script.next_request("withdrawal").number == question.number


def test_a_lighthouse_that_does_not_number_its_answers_is_believed(
    script: Script, manager: Process
) -> None:
    with line_to(manager.address) as line:
        asked = line.ask_manager(worker_id="w")
        script.answer(script.next_request("question"), quorum_id=7, answers=0)
        assert asked.result().quorum_id == 7
