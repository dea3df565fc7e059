"""Tests of the event log: JSON lines that a thread writes, rotated, and never waited for."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from support.files import complete_lines
from support.running import command, eventually, lighthouse_process, line_to

from torchft_svc.core.quorum.lighthouse.incidents import Incident, IncidentKind
from torchft_svc.errors import ConfigError
from torchft_svc.lighthouse_server.event_log import EventLog


def incident(number: int, cause: str = "it died") -> Incident:
    return Incident(
        number=number,
        job="job",
        kind=IncidentKind.LOST,
        cause=cause,
        groups=("a:1",),
        at=1000.5,
        detected_after_s=0.25,
    )


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in complete_lines(path)]


def test_each_record_is_an_object_in_a_line(tmp_path: Path) -> None:
    events = EventLog(str(tmp_path / "events.jsonl"))
    events.write(incident(1))
    events.write(incident(2, "of\nseveral lines"))
    events.close()
    first, second = lines_of(tmp_path / "events.jsonl")
    assert first == incident(1).as_dict()
    assert first["kind"] == "lost"
    assert first["groups"] == ["a:1"]
    assert (first["decided_after_s"], second["cause"]) == (None, "of\nseveral lines")


def test_a_file_that_is_there_is_continued_and_rotated_by_size(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for first in (0, 10):
        events = EventLog(str(path), max_bytes=2000, num_old_files=20)
        for number in range(first, first + 10):
            events.write(incident(number))
        events.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert all(each.stat().st_size <= 2000 for each in files)
    numbers = sorted(line["number"] for each in files for line in lines_of(each))  # type: ignore[type-var]
    assert numbers == list(range(20))


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"event_log=.*missing.* No such file or directory"):
        EventLog(str(tmp_path / "missing" / "events.jsonl"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog("/dev/full")
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            events.write(incident(number))
        eventually(lambda: caplog.records)
        events.close()
    (warning,) = caplog.records
    assert "the event log /dev/full cannot be written" in warning.getMessage()
    assert "No space left on device" in warning.getMessage()


@pytest.mark.processes
def test_a_lighthouse_writes_what_happens_and_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with (
        lighthouse_process(f"--event-log={path}", "--heartbeat-timeout-ms=60000") as lighthouse,
        line_to(lighthouse.address) as line,
    ):
        line.quorum("a:1", job="trained").result()
        line.leave("a:1", "it is over", job="trained")
        at = ("--lighthouse", lighthouse.address, "--job-id=trained")
        shown = command("lighthouse_server", "incidents", *at, "--json")
        found = json.loads(shown.stdout)
        newest = found["incidents"][-1]["number"]
        eventually(lambda: newest in {each["number"] for each in lines_of(path)})
        last = {each["number"]: each for each in lines_of(path)}
        assert {each["number"]: each for each in found["incidents"]} == last
        assert [each["kind"] for each in found["incidents"]] == ["joined", "lost"]
        assert found["job"] == "trained"
        assert found["goodput"]["wall_s"] >= 0
        text = command("lighthouse_server", "incidents", *at).stdout
        assert text.startswith("job trained: 2 incidents\n  goodput ")
        assert "it is over" in text
        first = found["incidents"][0]["number"]
        after = command("lighthouse_server", "incidents", *at, "--json", f"--after={first}")
        assert len(json.loads(after.stdout)["incidents"]) == 1
        status = command("lighthouse_server", "status", *at).stdout
        assert "  goodput " in status
        unknown = command(
            "lighthouse_server", "incidents", "--lighthouse", lighthouse.address, "--job-id=nobody"
        )
        assert unknown.returncode == 4
        assert "this lighthouse has no records of a job 'nobody'" in unknown.stderr
        negative = command("lighthouse_server", "incidents", "--after=-1")
        assert negative.returncode == 2
        assert "Invalid value for '--after'" in negative.stderr


@pytest.mark.processes
def test_a_lighthouse_whose_event_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "events.jsonl"
    ended = command("lighthouse_server", "--bind=127.0.0.1:0", f"--event-log={missing}")
    assert ended.returncode not in (0, None)
    assert "event_log" in ended.stderr
    assert "No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr
