"""Tests the questions that wait: when one is too old, and that looking early costs nothing."""

from __future__ import annotations

import asyncio
import math

from torchft_svc.lighthouse_server.questions import Outcome, Question, Questions


def never(_: Outcome) -> None:
    """Only the driver tells."""
    raise AssertionError


def no_reason(_: str) -> str:
    return ""


async def _life() -> None:
    questions = Questions(no_reason)
    assert questions.look_at == math.inf
    late, early, answered = (
        questions.open(Question("job", 1.0, at, never)) for at in (9.0, 5.0, 3.0)
    )
    assert questions.look_at == 3.0
    assert questions.close(answered) is not None
    assert questions.close(answered) is None, "it is closed once"
    assert questions.expired(2.9) == {}
    assert questions.expired(3.0) == {}, "it was answered in time"
    assert questions.look_at == 5.0
    assert list(questions.expired(5.0)) == [early]
    assert questions.close(early) is not None
    assert questions.look_at == 9.0, "who is left is looked at again"
    assert list(questions.expired(9.0)) == [late]
    assert [each.expires_at for each in questions.close_all()] == [9.0]
    assert questions.close_all() == []


def test_a_question_expires_at_its_own_time() -> None:
    asyncio.run(_life())
