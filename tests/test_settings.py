"""Tests the settings: precedence, and timeouts that cannot work together."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from torchft_svc.client.runtime.bootstrap import _both
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.settings import (
    GroupPlace,
    Timeouts,
    resolve_place,
    resolve_services,
    resolve_timeouts,
)

NOTHING = Environment({})
ALL_SET = Environment(
    {
        "TORCHFT_TIMEOUT_SEC": "1",
        "TORCHFT_QUORUM_TIMEOUT_SEC": "2",
        "TORCHFT_CONNECT_TIMEOUT_SEC": "1.5",
        "RANK": "1",
        "WORLD_SIZE": "3",
        "TORCHFT_LIGHTHOUSE": "lighthouse:1",
        "TORCHFT_MANAGER_ADDR": "manager:2",
        "TORCHFT_MANAGER_PORT": "3",
        "TORCHFT_QUORUM_RETRIES": "4",
        "TORCHFT_JOB_ID": "job",
        "TORCHFT_MIN_REPLICAS": "5",
        "REPLICA_GROUP_ID": "group",
        "TORCHFT_FLIGHT_RECORDER": "/records",
    }
)


def timeouts(environment: Environment, **given: float) -> Timeouts:
    names = ("timeout", "quorum_timeout", "connect_timeout")
    return resolve_timeouts(
        environment,
        **{name: timedelta(seconds=given[name]) if name in given else None for name in names},
        heartbeat_interval=timedelta(seconds=given.get("heartbeat_interval", 0.1)),
    )


def test_the_public_release_s_defaults_work() -> None:
    assert timeouts(NOTHING) == Timeouts(
        collective_s=60, quorum_s=60, connect_s=60, heartbeat_interval_s=0.1
    )


@pytest.mark.parametrize("security", ["", {}])
def test_a_security_that_is_none_is_refused(security: Any) -> None:
    with pytest.raises(ConfigError, match="use a Security, or None"):
        services(NOTHING, security=security)


@pytest.mark.parametrize(
    "field", ["lighthouse_addr", "manager_addr", "job_id", "hostname", "flight_recorder"]
)
def test_an_argument_that_is_given_but_empty_is_not_taken_for_the_default(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=' ' cannot work: it is empty"):
        services(ALL_SET, **{field: " "})


def test_argument_beats_environment_beats_default() -> None:
    assert timeouts(ALL_SET) == Timeouts(collective_s=1, quorum_s=2, connect_s=1.5)
    assert timeouts(ALL_SET, timeout=0.5).collective_s == 0.5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quorum_timeout": 10}, (10, 10, 10)),
        ({"timeout": 10}, (10, 60, 60)),
        ({"timeout": 90}, (90, 90, 60)),
        ({"timeout": 10, "quorum_timeout": 30}, (10, 30, 30)),
    ],
)
def test_defaults_give_way_to_what_was_named(
    given: dict[str, float], expected: tuple[float, float, float]
) -> None:
    result = timeouts(NOTHING, **given)
    assert (result.collective_s, result.quorum_s, result.connect_s) == expected


@pytest.mark.parametrize(
    ("given", "both"),
    [
        ({"timeout": 30, "quorum_timeout": 10}, ("timeout='30 s'", "quorum_timeout=10 s")),
        (
            {"connect_timeout": 30, "quorum_timeout": 10},
            ("connect_timeout='30 s'", "quorum_timeout=10 s"),
        ),
        ({"heartbeat_interval": 6}, ("heartbeat_interval='6 s'", "5 s")),
    ],
)
def test_a_hierarchy_that_cannot_work_names_both_values(
    given: dict[str, float], both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        timeouts(NOTHING, **given)
    assert all(value in str(caught.value) for value in both)


@pytest.mark.parametrize("name", ["timeout", "quorum_timeout", "heartbeat_interval"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_time_at_all_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*above 0 seconds"):
        timeouts(NOTHING, **{name: value})


@pytest.mark.parametrize("name", ["timeout", "quorum_timeout", "connect_timeout"])
@pytest.mark.parametrize("value", [3e6, 1e13])
def test_more_time_than_can_be_waited_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.*24 days. at most"):
        timeouts(NOTHING, **{name: value})


def test_so_is_a_variable_with_a_number_beyond_all_clocks() -> None:
    endless = Environment({"TORCHFT_WATCHDOG_TIMEOUT_SEC": "1e300"})
    with pytest.raises(ConfigError, match=r"watchdog_timeout='1e\+300 s' cannot work"):
        timeouts(endless)


def test_the_place() -> None:
    assert resolve_place(NOTHING, None, None) == GroupPlace(group_rank=0, group_world_size=1)
    assert resolve_place(ALL_SET, None, None) == GroupPlace(group_rank=1, group_world_size=3)
    assert resolve_place(ALL_SET, 0, 2).leads
    with pytest.raises(ConfigError, match=r"rank=1.*world_size=1"):
        resolve_place(ALL_SET, None, 1)
    with pytest.raises(ConfigError, match="world_size=0"):
        resolve_place(NOTHING, 0, 0)


def services(environment: Environment, **given: object) -> object:
    names = (
        "lighthouse_addr",
        "manager_addr",
        "replica_id",
        "job_id",
        "port",
        "hostname",
        "quorum_retries",
        "min_replicas",
        "security",
        "flight_recorder",
    )
    options: dict[str, object] = dict.fromkeys(names)
    return resolve_services(environment, **{**options, "in_process": False, **given})  # type: ignore[arg-type]


def test_the_services() -> None:
    result = services(ALL_SET)
    assert result.lighthouse_address == "lighthouse:1"  # type: ignore[attr-defined]
    assert result.manager_address == "manager:2"  # type: ignore[attr-defined]
    assert (result.port, result.quorum_retries) == (3, 4)  # type: ignore[attr-defined]
    assert (result.replica_name, result.job_id) == ("group", "job")  # type: ignore[attr-defined]
    assert services(ALL_SET, lighthouse_addr="other:1").lighthouse_address == "other:1"  # type: ignore[attr-defined]
    assert result.min_replicas == 5  # type: ignore[attr-defined]
    assert services(ALL_SET, min_replicas=0).min_replicas == 0  # type: ignore[attr-defined]
    assert result.flight_recorder == "/records"  # type: ignore[attr-defined]
    assert services(ALL_SET, flight_recorder="/other").flight_recorder == "/other"  # type: ignore[attr-defined]
    # Who asks for a manager of his own does not get the environment's.
    assert services(ALL_SET, in_process=True).manager_address is None  # type: ignore[attr-defined]


def test_groups_without_a_name_get_different_ones() -> None:
    assert services(NOTHING).replica_name != services(NOTHING).replica_name  # type: ignore[attr-defined]


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"in_process=True.*already runs"):
        services(NOTHING, in_process=True, manager_addr="manager:2")
    with pytest.raises(ConfigError, match="quorum_retries=-1"):
        services(NOTHING, quorum_retries=-1)
    with pytest.raises(ConfigError, match="min_replicas=-1"):
        services(NOTHING, min_replicas=-1)


def test_a_store_address_that_is_given_but_empty_is_an_error() -> None:
    with pytest.raises(ConfigError, match="store_addr=' ' cannot work: it is empty"):
        _both("store_addr", " ", "store_port", 29500)
