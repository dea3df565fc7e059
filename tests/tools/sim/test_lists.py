"""Ways in which a list of lighthouses could split a job (rule F4), each with a seed that shows it.

With the rule nobody trains alone; without it, the simulator finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tools.sim.explore import describe
from tools.sim.fleet import Fleet
from tools.sim.scenario import Fault, Scenario, draw_ordinary
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLink

Plant = Callable[[pytest.MonkeyPatch], None]


def moving(seed: int, *faults: Fault) -> Scenario:
    """Three groups that go on at the second lighthouse at 8 s, and back when the first is back."""
    drawn = draw_ordinary(seed, num_groups=3)
    config = replace(
        drawn.config,
        min_replicas=1,
        join_timeout_s=5.0,
        heal_timeout_s=None,
        startup_timeout_s=None,
        heartbeat_timeout_s=5.0,
        hang_timeout_s=None,
    )
    trainer = replace(
        drawn.trainer,
        min_replica_size=1,
        quorum_s=15.0,
        collective_s=2.0,
        train_s=0.1,
        shrink_only_rate=0.0,
        num_wanted=None,
        mean_copy_s=0.05,
        is_steady=False,
    )
    return replace(
        drawn,
        config=config,
        trainer=trainer,
        num_jobs=1,
        group_world_size=1,
        is_lockstep=False,
        num_lighthouses=2,
        is_elected=False,
        clock_skews_s=(0.0, 0.0),
        is_clock_honest=True,
        requested_min_replicas=0,
        unary_every=0,
        start_spread_s=0.0,
        connect_timeout_s=10.0,
        faults=faults,
    )


def fault(at: float, kind: str, target: int, seconds: float) -> Fault:
    return Fault(at=at, kind=kind, target=target, seconds=seconds, value=0.0)


AWAY = fault(8.0, "lighthouse_crash", 0, 8.5)
# Two groups ask at the second lighthouse and wait for the third one.
WAITING = fault(12.6, "hang", 1, 6.0)

FROZEN = moving(1, AWAY, WAITING, fault(15.5, "freeze", 0, 7.0))
NEWCOMER = moving(3, replace(AWAY, seconds=6.0), fault(13.1, "crash", 0, 1.0))


def nobody_looks_back(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ManagerLink, "_has_looked", lambda self, connection, now: True)


def newcomers_ask_at_once(plant: pytest.MonkeyPatch) -> None:
    plant.setattr(ManagerLink, "_is_newcomer", lambda self, question: False)


@pytest.mark.parametrize(
    ("scenario", "without"),
    [(FROZEN, nobody_looks_back), (NEWCOMER, newcomers_ask_at_once)],
    ids=["frozen", "newcomer"],
)
def test_f4_nobody_trains_alone(
    scenario: Scenario, without: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Fleet(scenario).run()
    assert outcome.fell is None, describe(outcome)
    without(monkeypatch)
    assert Fleet(scenario).run().fell == "F4"
