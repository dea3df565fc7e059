"""Tests the lines of JSON that all programs log if they are asked to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

import pytest
from support.fork_server import TORCH
from support.running import START_S, lighthouse_process, line_to, run_forked

from torchft_svc.host.exit_verdict import DO_NOT_REQUEUE
from torchft_svc.host.log_format import JsonFormatter, Speaker


def record(text: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("torchft_svc.x", logging.WARNING, "", 0, text, args, None)
    vars(made).update(extra)
    return made


def fields_of(line: str) -> dict[str, object]:
    assert "\n" not in line

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is no JSON")

    fields: dict[str, object] = json.loads(line, parse_constant=refuse)
    return fields


def test_a_line_has_the_fields_of_record_speaker_and_moment() -> None:
    step = 3
    speaker = Speaker("a", {"job": "j", "group": "a"}, lambda: {"step": step, "quorum_id": 7})
    made = record("lost %s", "b\nc", replica_id="b:1")
    fields = fields_of(JsonFormatter(speaker).format(made))
    at = datetime.fromisoformat(str(fields.pop("time")).replace("Z", "+00:00"))
    assert abs((datetime.now(timezone.utc) - at).total_seconds()) < 20
    assert fields == {
        "level": "warning",
        "logger": "torchft_svc.x",
        "message": "lost b\nc",
        "job": "j",
        "group": "a",
        "step": 3,
        "quorum_id": 7,
        "replica_id": "b:1",
    }


def test_an_exception_stays_in_its_line() -> None:
    made = record("failed")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        made.exc_info = sys.exc_info()
    exception = fields_of(JsonFormatter(Speaker()).format(made))["exception"]
    assert "ValueError: two\nlines" in str(exception)
    assert "test_log_format.py" in str(exception)


def test_what_json_does_not_know_is_text() -> None:
    odd = {"ratio": float("nan"), "error": ValueError("x"), "names": ("a", "b"), "map": {1: None}}
    fields = fields_of(JsonFormatter(Speaker()).format(record("odd", **odd)))
    shown = {name: fields[name] for name in odd}
    assert shown == {"ratio": "nan", "error": "x", "names": ["a", "b"], "map": {"1": None}}


@pytest.mark.processes
def test_a_lighthouse_logs_json() -> None:
    with lighthouse_process(TORCHFT_LOG_FORMAT="json") as lighthouse:
        with line_to(lighthouse.address) as line:
            line.quorum("a:1", step=4, job="j").result()
        assert lighthouse.end()[0] == 0
        lines = [fields_of(text) for text in lighthouse.errors().splitlines()]
    changed = [each for each in lines if "quorum changed" in str(each["message"])]
    assert [(each["job"], each["step"], each["level"]) for each in changed] == [("j", 4, "info")]
    assert isinstance(changed[0]["quorum_id"], int)


@pytest.mark.processes
def test_torchft_run_refuses_another_format() -> None:
    words = [sys.executable, "-m", "torchft_svc.elastic.run", "--nnodes=1", __file__]
    done = run_forked(words, TORCH, START_S, TORCHFT_LOG_FORMAT="xml")
    assert done.returncode == DO_NOT_REQUEUE
    assert "TORCHFT_LOG_FORMAT" in done.stderr
    assert "Traceback" not in done.stderr
