"""Tests when what the learners have delivered is merged."""

from __future__ import annotations

import pytest

from torchft_svc.client.algorithms.merge_rule import LearnerReport, MergeRule, usual_pace_s
from torchft_svc.errors import ConfigError


def delivered(waiting_s: float, pace_s: float = 1.0) -> LearnerReport:
    return LearnerReport(tokens=10, waiting_s=waiting_s, pace_s=pace_s)


def not_delivered(pace_s: float = 1.0) -> LearnerReport:
    return LearnerReport(tokens=0, waiting_s=0.0, pace_s=pace_s)


RULE = MergeRule(min_replicas=2, grace=1.0)


@pytest.mark.parametrize(
    ("reports", "is_due"),
    [
        ([], False),
        ([not_delivered()], False),
        # All who live have delivered: also where they are fewer than min_replicas.
        ([delivered(0.0)], True),
        ([delivered(0.0), delivered(0.0), delivered(0.0)], True),
        # Fewer than min_replicas, however long they wait.
        ([delivered(100.0), not_delivered()], False),
        # The window begins with the second delivery, and lasts for the usual pace.
        ([delivered(5.0), delivered(0.9), not_delivered()], False),
        ([delivered(5.0), delivered(1.0), not_delivered()], True),
        ([delivered(5.0, 3.0), delivered(1.0, 3.0), not_delivered(3.0)], False),
        ([delivered(5.0, 0.5), delivered(0.5, 0.5), not_delivered(0.5)], True),
        # A slow learner, or one whose pace nobody knows, does not make it longer.
        ([delivered(5.0), delivered(1.0), not_delivered(60.0)], True),
        ([delivered(5.0), delivered(1.0), not_delivered(0.0)], True),
    ],
)
def test_when_a_fragment_is_merged(reports: list[LearnerReport], is_due: bool) -> None:
    assert RULE.is_due(reports) is is_due
    assert RULE.is_due(reports[::-1]) is is_due


def test_without_grace_the_fewest_are_enough() -> None:
    assert MergeRule(1, 0.0).is_due([delivered(0.0), not_delivered(), not_delivered()])


def test_the_usual_pace() -> None:
    assert usual_pace_s([]) == usual_pace_s([not_delivered(0.0)]) == 0.0
    assert usual_pace_s([not_delivered(pace) for pace in (9.0, 1.0)]) == 1.0
    assert usual_pace_s([not_delivered(pace) for pace in (9.0, 1.0, 2.0, 0.0)]) == 2.0


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="min_replicas"):
        MergeRule(0, 1.0)
    for grace in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="grace"):
            MergeRule(1, grace)
