"""Tests the long run of faults as a whole, short: real groups, every kind of fault once."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from tempfile import mkdtemp

import pytest
from support.bounds import Late

from tools.chaos.__main__ import assign_groups, perform
from tools.chaos.cluster import Cluster, Lighthouse
from tools.chaos.faults import Kind, draw_faults
from tools.chaos.verdicts import judge, judge_bounds, judge_goodput
from tools.demo.promises import Outcome

pytestmark = pytest.mark.processes

# With it a worker is frozen, and all lines are cut, for longer than others wait; all else is over
# soon.
SEED = 6734
# A fraction of it is enough, but who shares the machine may take most of it.
MAX_S = 200.0
# What a busy machine may miss once.
TIMED = (judge_bounds, judge_goodput)


@pytest.mark.timeout(3 * MAX_S)
def test_everything_goes_wrong_and_every_promise_is_kept(tmp_path: Path) -> None:
    jobs, sizes = assign_groups(groups=3, pairs=0)
    folder = Path(mkdtemp(dir=tmp_path))
    run = perform(folder, MAX_S, SEED, jobs, sizes, max_faults=len(Kind))
    failed = [verdict for verdict in judge(run) if verdict.outcome is Outcome.FAIL]
    timed = [rule(run) for rule in TIMED]
    if failed and all(verdict in timed for verdict in failed):
        raise Late(str(failed))
    assert not failed
    assert {incident.fault.kind for incident in run.incidents} == set(Kind)


def test_a_lighthouse_that_is_away_knows_no_goodput(tmp_path: Path) -> None:
    """A run reads the goodput after each fault, also while the lighthouse is started again."""
    cluster = Cluster(tmp_path, {"one": []}, {}, 0, "")
    cluster.lighthouses.append(Lighthouse(tmp_path, "lighthouse"))
    assert cluster.goodput("one") is None


def test_the_seed_draws_the_faults() -> None:
    jobs, sizes = assign_groups(groups=3, pairs=2)
    first, again, other = (
        list(islice(draw_faults(seed, jobs, sizes, 1), 40)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {fault.kind for fault in first} == set(Kind)
    assert all(fault.worker < sizes[fault.group] for fault in first)
