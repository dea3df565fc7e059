"""Tests the order of timeouts, and the settings that are proposed for a load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.doctor.findings import Level
from torchft_svc.doctor.timeouts import Load, check_order, make_plan
from torchft_svc.rpc.about import About, about_from_wire, about_lighthouse, about_to_wire
from torchft_svc.settings import Timeouts

DEFAULT = about_lighthouse(QuorumConfig(startup_wait_s=1.0), 1e9, is_elected=False)
SHORT = {"quorum_s": 4, "collective_s": 4, "connect_s": 4}
LOAD = Load(step_s=1.0, state_bytes=10e9, link_rate=1e9, num_groups=4)


def test_what_a_lighthouse_reports_of_itself_travels() -> None:
    for about in (DEFAULT, replace(DEFAULT, hang_timeout_s=7.0, on_hang="kill", is_elected=True)):
        assert about_from_wire(about_to_wire(about)) == about


def test_the_defaults_are_in_order() -> None:
    (found,) = check_order(Timeouts(), DEFAULT, LOAD)
    assert found.level is Level.OK
    assert found.found.startswith("heartbeats each 0.1 s < heartbeat timeout 5 s < collective")


@pytest.mark.parametrize(
    ("timeouts", "about", "load", "level", "sentence", "advice"),
    [
        (
            {"heartbeat_interval_s": 4},
            {"heartbeat_timeout_s": 3},
            {},
            "problem",
            "counts as dead",
            "--heartbeat-timeout-ms of the lighthouse to 40000",
        ),
        ({"heartbeat_interval_s": 1}, {}, {}, "warning", "less than 10 heartbeats", "10000"),
        (
            {"quorum_s": 4, "collective_s": 4, "connect_s": 4},
            {"join_timeout_s": 3, "heal_timeout_s": 3},
            {},
            "problem",
            "all groups give up before a frozen one",
            "QUORUM_TIMEOUT_SEC to more than 5",
        ),
        (
            {"collective_s": 5},
            {},
            {},
            "warning",
            "before they know which one is frozen",
            "_TIMEOUT_SEC",
        ),
        (
            {},
            {"join_timeout_s": 90, "heal_timeout_s": 90},
            {},
            "warning",
            "the join timeout of",
            "90",
        ),
        ({}, {"heal_timeout_s": 600}, {}, "warning", "the heal timeout of", "to 600 or more"),
        (
            {},
            {"hang_timeout_s": 60},
            {},
            "warning",
            "before the group that hangs",
            "less than 60000",
        ),
        ({}, {"hang_timeout_s": 3}, {"step_s": 2}, "problem", "nearly counts as a hang", "10000"),
        ({}, {}, {"step_s": 20}, "warning", "a collective waits for the slowest", "to 120 or"),
        ({}, {}, {"step_s": 70}, "problem", "a collective waits for the slowest", "to 600 or"),
        ({}, {}, {"state_bytes": 40e9}, "warning", "starts its heal again", "to 90000 or"),
        ({}, {}, {"state_bytes": 400e9}, "problem", "starts its heal again", "to 900000 or"),
        (
            {},
            {"heal_timeout_s": 300},
            {"state_bytes": 90e9, "num_workers": 2},
            "problem",
            "waits 60 s for the others of its group",
            "TORCHFT_TIMEOUT_SEC to 180",
        ),
    ],
)
def test_what_is_out_of_order_is_named(
    timeouts: dict[str, float],
    about: dict[str, float],
    load: dict[str, float],
    level: str,
    sentence: str,
    advice: str,
) -> None:
    changed = replace(LOAD, **load)  # type: ignore[arg-type]
    found = list(
        check_order(Timeouts(**timeouts), replace(DEFAULT, **about), changed)  # type: ignore[arg-type]
    )
    fitting = [each for each in found if sentence in each.found]
    assert fitting, found
    assert fitting[0].level.value == level
    assert advice in fitting[0].advice
    assert all(each.level is not Level.OK for each in found)


def test_without_a_lighthouse_the_trainer_s_own_are_compared() -> None:
    (found,) = check_order(Timeouts(), None)
    assert found.found == ("heartbeats each 0.1 s < collective timeout 60 s <= quorum timeout 60 s")


def settings_of(load: Load) -> tuple[Timeouts, About]:
    """The settings that are proposed for a load, as a trainer and a lighthouse get them."""
    values = {each.setting: each.value for each in make_plan(load).choices}

    def seconds(name: str) -> float:
        return int(values[f"lighthouse --{name}-timeout-ms"]) / 1000

    config = QuorumConfig(
        join_timeout_s=seconds("join"),
        heal_timeout_s=seconds("heal"),
        heartbeat_timeout_s=seconds("heartbeat"),
        hang_timeout_s=seconds("hang"),
        on_hang="kill",
    )
    timeouts = Timeouts(
        collective_s=float(values["TORCHFT_TIMEOUT_SEC"]),
        quorum_s=float(values["TORCHFT_QUORUM_TIMEOUT_SEC"]),
        connect_s=float(values["TORCHFT_CONNECT_TIMEOUT_SEC"]),
    )
    return timeouts, about_lighthouse(config, 1e9, is_elected=False)


@given(
    st.builds(
        Load,
        step_s=st.floats(1e-3, 3600),
        state_bytes=st.floats(1, 1e13),
        link_rate=st.floats(1e7, 1e11),
        num_groups=st.integers(1, 2000),
        num_workers=st.integers(1, 64),
    )
)
def test_what_is_proposed_is_accepted_and_in_order(load: Load) -> None:
    timeouts, about = settings_of(load)  # the records refuse what cannot work
    (found,) = check_order(timeouts, about, load)
    assert found.level is Level.OK


def test_the_costs_are_those_of_the_load() -> None:
    costs = {each.event: each for each in make_plan(LOAD).costs}
    assert costs["a worker is killed"].stands_still_s == 1.25
    assert costs["a group comes back and heals"].stands_still_s == 9.0
    assert costs["a machine is frozen or cut off"].stands_still_s == 6.25
    assert costs["SIGTERM, or lighthouse drain"].steps_lost == 0
    assert costs["all groups are lost"].steps_lost is None
    many = {each.setting for each in make_plan(replace(LOAD, num_groups=100)).choices}
    assert "GLOO_ENABLE_STORE_V2_API" in many
