"""The short version of `quorum_load`: a heavy job beside a training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from support.bounds import Late
from support.hostile import Training, Usage, training
from support.quorum_load import JOB, MAX_LEFT_MB, MAX_PEAK_MB, load
from support.running import eventually, line_to

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def steady() -> Iterator[Training]:
    with training() as steady:
        yield steady


def check_none_was_silent(reasons: Iterable[str]) -> None:
    """A machine that is too busy delays questions, and nothing else, for the heartbeat timeout."""
    silent = [each for each in reasons if "no sign of life" in each]
    if silent:
        raise Late(silent[0])


def test_i7_two_hundred_groups_with_a_large_quorum(steady: Training) -> None:
    result = load(steady, groups=200, num_bytes=8 * 1024)
    assert all(isinstance(each, int) and each > 1_600_000 for each in result.outcomes), (
        result.outcomes
    )
    result.check()


def test_i7_two_hundred_groups_with_more_than_a_quorum_may_have(steady: Training) -> None:
    result = load(steady, groups=200, num_bytes=31 * 1024)
    refused = {each for each in result.outcomes if isinstance(each, str)}
    assert refused
    limit = "the limit of this lighthouse is 4194304 (--max-quorum-bytes)"
    check_none_was_silent(refused)
    assert all(limit in each for each in refused), refused
    result.check()


def test_i7_groups_that_do_not_read_their_large_quorum(steady: Training) -> None:
    """The groups lose their streams, if not by their silence then after `HEAVY_WRITE_S`.

    Those that break off while they are answered leave no traceback.
    """
    for _ in range(3):
        load(steady, groups=0, deaf=100, num_bytes=15 * 1024).check()
    assert "Traceback" not in steady.lighthouse.errors()


def test_i7_jobs_that_ask_on_and_read_no_answer(steady: Training) -> None:
    """Each has less unread than one may have, all together have more; and what they send behind
    the end of their streams is not kept."""
    load(steady, jobs=100, questions=400, num_bytes=31 * 1024).check()
    assert "all together may leave 33554432 unread" in steady.lighthouse.errors()


def test_i7_the_same_quorum_for_callers_without_a_session(steady: Training) -> None:
    usage = Usage(steady.lighthouse)
    data = "x" * 16_000
    with line_to(steady.lighthouse.address) as line:
        asked = [
            line.quorum(f"unary{n}:1", 60, JOB, address="a:1", store_address="a:2", data=data)
            for n in range(100)
        ]
        errors = [each.exception() for each in asked]
        check_none_was_silent(error.details() for error in errors if error is not None)
        sizes = [each.result().ByteSize() for each in asked]
        assert usage.grown_mb() < MAX_PEAK_MB
    assert max(sizes) > 1_500_000
    eventually(lambda: usage.grown_mb() < MAX_LEFT_MB, 10, f"{usage.grown_mb():.0f} MB are left")
    steady.goes_on_in_time()
