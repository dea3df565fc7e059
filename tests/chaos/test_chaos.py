"""Tests the long run of faults as a whole, short: real groups, every kind of fault once."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import pytest
from bounds import Late

from chaos.__main__ import cast, perform
from chaos.faults import Kind, draw_faults
from chaos.verdicts import judge, judge_bounds
from demo.promises import Outcome

pytestmark = pytest.mark.processes


@pytest.mark.timeout(240)
def test_everything_goes_wrong_and_every_promise_is_kept(tmp_path: Path) -> None:
    jobs, sizes = cast(groups=2, pairs=0)
    run = perform(Path(mkdtemp(dir=tmp_path)), 20.0, 5, jobs, sizes)
    failed = [verdict for verdict in judge(run) if verdict.outcome is Outcome.FAIL]
    if failed == [judge_bounds(run)]:
        raise Late(str(failed))
    assert not failed
    if len({incident.fault.kind for incident in run.incidents}) < 5:
        raise Late("too few faults for the time")


def test_the_seed_draws_the_faults() -> None:
    sizes = {0: 1, 1: 2}
    first, again, other = (list(islice(draw_faults(seed, sizes, 1), 40)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.kind for fault in first} == set(Kind)
    assert all(fault.worker < sizes[fault.group] for fault in first)
