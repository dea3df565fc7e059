"""Runs a fixed set of drawn programs, in which every choice meets nearly every other one."""

from __future__ import annotations

import pytest
from support.bounds import Late

from tools.demo.promises import Outcome
from tools.matrix.program import draw, pairs
from tools.matrix.runner import ProgramRunner
from tools.matrix.verdicts import judge, judge_stalls, report_failure

# Mostly `covering(map(draw, range(1500)), 24)`: what shows the most pairs of choices for its time.
SEEDS = (321, 550, 1451, 729, 1175, 802, 188, 306, 1057, 253, 292, 1045)
SEEDS += (1187, 710, 1140, 632, 291, 492, 125, 189, 862, 728, 1275, 543)
_ENOUGH = 0.7
# Each of its parts has less time, on a busy machine.
_LIMIT_S = 240


@pytest.mark.processes
@pytest.mark.timeout(_LIMIT_S)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_with_kills_keeps_its_promises(seed: int, runner: ProgramRunner) -> None:
    run = runner.run(draw(seed))
    failed = judge(run)
    if failed == [verdict for verdict in [judge_stalls(run)] if verdict.outcome is Outcome.FAIL]:
        if failed:
            raise Late(report_failure(run))
        return
    pytest.fail(f"{run.program}\n{report_failure(run)}\nagain: make programs SECONDS=0 SEED={seed}")


def test_the_programs_show_nearly_all_pairs_of_choices() -> None:
    possible = set().union(*(pairs(draw(seed)) for seed in range(1500)))
    shown = set().union(*(pairs(draw(seed)) for seed in SEEDS))
    assert len(shown) > _ENOUGH * len(possible), sorted(possible - shown)
    assert {name for pair in shown for name in pair} == {name for pair in possible for name in pair}
