"""The command that decides whether this machine joins."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
from support.running import eventually, is_alive

from torchft_svc.errors import ConfigError, HealthCheckFailed
from torchft_svc.host.health_check import check_health

HANGS = "sh -c 'sleep 600 & echo $! >{file}; echo looking at the disk; wait'"


@pytest.mark.processes
def test_a_healthy_machine_joins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check_health("sh -c 'echo 8 GPUs; echo all well >&2'")
    assert "health check: 8 GPUs" in caplog.text
    assert "health check: all well" in caplog.text
    assert "health check passed in" in caplog.text


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("sh -c 'echo first; echo ECC errors; exit 3'", "ended with status 3: ECC errors"),
        ("false", "the health check 'false' ended with status 1"),
        ("sh -c 'kill -9 $$'", "was ended by signal 9"),
    ],
)
def test_a_failure_names_the_command_its_status_and_its_last_line(
    command: str, sentence: str
) -> None:
    with pytest.raises(HealthCheckFailed) as failed:
        check_health(command)
    assert str(failed.value).endswith(sentence)
    assert not failed.value.is_final, "another machine may pass it"


@pytest.mark.processes
@pytest.mark.parametrize("by", ["deadline", "caller"])
def test_a_command_that_hangs_is_killed_with_its_children(by: str, tmp_path: Path) -> None:
    file = tmp_path / "child"
    began_at = time.monotonic()
    with pytest.raises(HealthCheckFailed) as failed:
        check_health(
            HANGS.format(file=file),
            0.5 if by == "deadline" else 60.0,
            (lambda: False) if by == "deadline" else file.exists,
        )
    assert time.monotonic() - began_at < 10
    if by == "deadline":
        assert str(failed.value).endswith("did not end within 0.5 s: looking at the disk")
    eventually(lambda: not file.read_text() or not is_alive(int(file.read_text())))


@pytest.mark.processes
def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "child"
    check_health(f"sh -c 'sleep 600 & echo $! >{file}'")
    eventually(lambda: not is_alive(int(file.read_text())))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "it is empty"),
        ("sh -c 'unclosed", "No closing quotation"),
        (f"{os.sep}no-such-check", "it cannot be started: No such file"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(command: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_health(command)
