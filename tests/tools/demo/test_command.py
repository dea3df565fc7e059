"""Tests the command ``python -m tools.demo``: its flags and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.demo.__main__ import main, num_kills


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--groups", "0"], "0 is not in the range 1<=x<=16"),
        (["--groups", "1", "--kills", "2"], "--kills needs --groups 2 or more"),
        (["--seconds", "10", "--steps", "10"], "--seconds and --steps both say when to stop"),
        (["--seconds", "soon"], "'soon' is not a valid float"),
        (["--steps", "0"], "0 is not in the range x>=1"),
        (["--kill-interval", "0"], "0.0 is not in the range x>=0.1"),
        (["--model-size", "huge"], "'huge' is not one of"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--report", "/no/such/folder/a.png"], "folder /no/such/folder does not exist"),
    ],
)
def test_bad_flags_are_refused_with_a_sentence(flags: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, flags)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_a_folder_with_the_events_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "group-0.0.jsonl").touch()
    result = CliRunner().invoke(main, ["--workdir", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds the events of a run" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("groups", "kills", "interval_s", "seconds", "expected"),
    [
        (3, None, 10.0, 60.0, 4),
        (3, None, 5.0, 60.0, 9),
        (3, None, 10.0, 10.0, 0),
        (3, None, 10.0, None, 3),
        (3, 7, 10.0, 60.0, 7),
        (3, 0, 10.0, 60.0, 0),
        (1, None, 10.0, 60.0, 0),
    ],
)
def test_number_of_kills(
    groups: int, kills: int | None, interval_s: float, seconds: float | None, expected: int
) -> None:
    assert num_kills(groups, kills, interval_s, seconds) == expected
