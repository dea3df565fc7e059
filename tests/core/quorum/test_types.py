"""Limits of what a member and a config may hold, each at its edge."""

from __future__ import annotations

import math
import select
from datetime import timedelta
from typing import Any

import pytest
from support.core.scenes import member, quorum

from torchft_svc.core.limits import (
    MAX_ADDRESS_LENGTH,
    MAX_DURATION_MS,
    MAX_DURATION_S,
    MAX_INT64,
    MAX_NAME_LENGTH,
    check_length,
    check_name,
    limited_s,
)
from torchft_svc.core.quorum.types import MAX_DATA_LENGTH, MAX_WORLD_SIZE, QuorumConfig
from torchft_svc.errors import ConfigError, RequestRefused

AT_THE_LIMIT: list[dict[str, Any]] = [
    {"replica_id": "x" * MAX_NAME_LENGTH},
    {"address": "x" * MAX_ADDRESS_LENGTH},
    {"store_address": "x" * MAX_ADDRESS_LENGTH},
    {"address": "", "store_address": ""},
    {"data": "x" * MAX_DATA_LENGTH},
    {"data": '{"line":\n1}'},
    {"step": MAX_INT64},
    {"commit_failures": MAX_INT64},
    {"seen_quorum_id": MAX_INT64 // 2},
    {"last_num_groups": 20_000},
    {"world_size": MAX_WORLD_SIZE},
    {"world_size": 0},
]
ABOVE_IT: list[tuple[dict[str, Any], str]] = [
    ({"replica_id": ""}, "replica_id is empty"),
    ({"replica_id": "x" * 257}, "replica_id has 257 characters, 256 are allowed"),
    ({"replica_id": "a\nb"}, "replica_id 'a\\nb' contains characters that cannot be printed"),
    ({"address": "x" * 513}, "address has 513 characters, 512 are allowed"),
    ({"address": "\x1b[2J"}, "address '\\x1b[2J' contains characters that cannot be printed"),
    ({"store_address": "x" * 513}, "store_address has 513 characters, 512 are allowed"),
    ({"data": "x" * 16385}, "data has 16385 bytes, 16384 are allowed"),
    ({"step": -1}, "step is -1, must be 0 or more"),
    ({"commit_failures": -1}, "commit_failures is -1, must be 0 or more"),
    ({"last_num_groups": -1}, "last_num_groups is -1, must be 0 to 1000000"),
    ({"seen_quorum_id": -1}, "seen_quorum_id is -1, must be 0 or more"),
    ({"seen_quorum_id": MAX_INT64 // 2 + 1}, f"seen_quorum_id {2**62} was never issued"),
    ({"world_size": MAX_WORLD_SIZE + 1}, "world_size is 1000001, must be 0 to 1000000"),
    ({"world_size": -1}, "world_size is -1, must be 0 to 1000000"),
    ({"min_replicas": MAX_WORLD_SIZE + 1}, "min_replicas is 1000001, must be 0 to 1000000"),
    ({"min_replicas": -1}, "min_replicas is -1, must be 0 to 1000000"),
]


@pytest.mark.parametrize("fields", AT_THE_LIMIT, ids=str)
def test_a_member_at_its_limits_is_let_in(fields: dict[str, Any]) -> None:
    member(**{"replica_id": "a", **fields}).check()


@pytest.mark.parametrize(("fields", "sentence"), ABOVE_IT, ids=[text for _, text in ABOVE_IT])
def test_a_member_above_its_limits_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        member(**{"replica_id": "a", **fields}).check()
    assert str(refused.value) == sentence


@pytest.mark.parametrize("field", ["step", "commit_failures"])
def test_more_than_an_int64_is_refused(field: str) -> None:
    with pytest.raises(RequestRefused, match=field):
        member("a", **{field: MAX_INT64 + 1}).check()


def test_a_refusal_of_a_long_name_stays_short() -> None:
    with pytest.raises(RequestRefused) as refused:
        check_name("job", "\n" * MAX_NAME_LENGTH)
    assert len(str(refused.value)) < 200


def test_max_step_is_the_highest_of_the_members() -> None:
    assert quorum(1, member("a", 3), member("b", 7), member("c", 0)).max_step == 7


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"min_replicas": 0}, "min_replicas=0 cannot work: a quorum needs at least one group"),
        (
            {"join_timeout_s": -1.0},
            "join_timeout_s=-1.0 cannot work: a timeout is a finite number of seconds, 0 or more",
        ),
        (
            {"startup_timeout_s": math.inf},
            "startup_timeout_s=inf cannot work: a timeout is a finite number of seconds, 0 or more",
        ),
        (
            {"heartbeat_timeout_s": math.nan},
            "heartbeat_timeout_s=nan cannot work: "
            "a timeout is a finite number of seconds, 0 or more",
        ),
        (
            {"heartbeat_timeout_s": 0.0},
            "heartbeat_timeout_s=0 cannot work: every group would be dead at once",
        ),
        (
            {"join_timeout_s": 1e12},
            "join_timeout_s='1e+12 s' cannot work: use 2073600 s (24 days) at most, which is as "
            "good as no limit",
        ),
        (
            {"hang_timeout_s": 3e6},
            "hang_timeout_s='3e+06 s' cannot work: use 2073600 s (24 days) at most, which is as "
            "good as no limit",
        ),
        (
            {"on_step_regression": "ignore"},
            "on_step_regression='ignore' cannot work: use auto, hold or warn",
        ),
        ({"max_jobs": 0}, "max_jobs=0 cannot work: a limit is at least 1"),
        ({"max_quorum_bytes": 0}, "max_quorum_bytes=0 cannot work: a limit is at least 1"),
        (
            {"max_quorum_bytes": 2**27},
            "max_quorum_bytes=134217728 cannot work: use 67108864 at most",
        ),
        ({"max_jobs": 10**9}, "max_jobs=1000000000 cannot work: use 1000000 at most"),
        (
            {"min_replicas": 10**22},
            "min_replicas=10000000000000000000000 cannot work: use 1000000 at most",
        ),
        ({"max_members_per_job": 0}, "max_members_per_job=0 cannot work: a limit is at least 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        QuorumConfig(**fields)
    assert str(refused.value) == sentence


def test_the_startup_timeout_is_the_join_timeout_by_default() -> None:
    assert QuorumConfig(join_timeout_s=7.0).newcomer_timeout_s == 7.0
    assert QuorumConfig(join_timeout_s=7.0, startup_timeout_s=0.0).newcomer_timeout_s == 0.0


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 60.0, MAX_DURATION_S])
def test_what_can_be_waited_is_accepted(seconds: float) -> None:
    check_length("timeout", seconds)


def test_a_setting_beyond_is_named_with_the_limit() -> None:
    with pytest.raises(ConfigError) as refused:
        check_length("timeout", 1e300)
    assert str(refused.value) == (
        "timeout='1e+300 s' cannot work: use 2073600 s (24 days) at most, which is as good as "
        "no limit"
    )


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (timedelta(seconds=-5), -5.0),
        (timedelta(), 0.0),
        (timedelta(microseconds=1), 1e-6),
        (timedelta(days=24), MAX_DURATION_S),
        (timedelta(days=25), MAX_DURATION_S),
        (timedelta.max, MAX_DURATION_S),
    ],
)
def test_a_call_waits_no_longer_than_can_be_waited(timeout: timedelta, seconds: float) -> None:
    assert limited_s(timeout) == seconds


def test_the_limit_is_what_the_system_can_wait() -> None:
    assert MAX_DURATION_MS == 1000 * MAX_DURATION_S
    poll = select.poll()
    poll.register(1, 0)
    with pytest.raises(OverflowError):
        poll.poll(MAX_DURATION_MS + 86_400_000)
