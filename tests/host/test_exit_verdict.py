"""The exit status of programs that an error ends, and what they record for who restarts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchft_svc.env import PROGRESS_VARIABLE, VERDICT_VARIABLE
from torchft_svc.errors import ConfigError, Unreachable, WorkerFailed
from torchft_svc.host.exit_verdict import is_final
from torchft_svc.host.progress_file import ProgressFile, highest_step

PROGRAM = """
import atexit, os, sys
from torchft_svc.errors import *
from torchft_svc.host.exit_verdict import give_verdicts
from torchft_svc.host.progress_file import open_progress
atexit.register(lambda: print(type(sys.last_value).__name__))
give_verdicts()
progress = open_progress(os.environ.get("TORCHFT_PROGRESS_FILE"))
{body}
"""
FAILS = "raise ConfigError('min_replicas', 0, 'use more')"


def run(body: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VERDICT_VARIABLE: "93", **variables}
    return subprocess.run(
        [sys.executable, *options, "-c", PROGRAM.format(body=body)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.processes
def test_an_error_that_no_restart_mends_ends_the_program_with_the_verdict() -> None:
    done = run(FAILS)
    assert done.returncode == 93
    assert "ConfigError: min_replicas=0 cannot work: use more" in done.stderr
    assert done.stderr.endswith("torchft: a restart cannot mend this error: exit status 93\n")
    assert done.stdout == "ConfigError\n"  # the clean-up at exit is made, and knows the error


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "variables", "status"),
    [
        (FAILS, {VERDICT_VARIABLE: "17"}, 17),
        (FAILS, {VERDICT_VARIABLE: ""}, 1),
        ("raise Unreachable('lighthouse', 'a:1', 'nobody answers')", {}, 1),
        ("raise RequestRefused('the name is taken')", {}, 1),
        ("raise GroupDiffers('another model')", {}, 93),
        ("sys.exit(3)", {}, 3),
        (f"try: {FAILS}\nexcept ConfigError: sys.exit(5)", {}, 5),
        ("sys.excepthook = lambda *_: print('mine')\n" + FAILS, {}, 1),
    ],
)
def test_other_ends_stay_as_they_are(body: str, variables: dict[str, str], status: int) -> None:
    done = run(body.replace("sys.exit", "sys.last_value = ''; sys.exit"), **variables)
    assert done.returncode == status, done.stderr


@pytest.mark.processes
def test_a_hook_of_the_program_is_called_first() -> None:
    hooked = PROGRAM.replace("\ngive", "\nsys.excepthook = lambda *_: print('mine')\ngive")
    done = subprocess.run(
        [sys.executable, "-c", hooked.format(body=FAILS)],
        env={**os.environ, VERDICT_VARIABLE: "93"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (93, "mine\nConfigError\n")


@pytest.mark.processes
@pytest.mark.parametrize("value", ["0", "256", "none"])
def test_a_status_that_is_none_is_refused(value: str) -> None:
    done = run("pass", **{VERDICT_VARIABLE: value})
    assert done.returncode == 1
    assert f"{VERDICT_VARIABLE}='{value}' cannot work: use " in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("first", "then", "status"),
    [
        ("progress.record_step(7); fail('a')", "fail('b')", 93),  # another message
        ("progress.record_step(7); fail('a')", "progress.record_step(8); fail('a')", 1),
        ("progress.record_step(7); fail('a')", "raise ValueError('a')", 1),  # another place
        ("progress.record_step(7); fail('a')", "fail('a', KeyError)", 1),
        ("fail('a')", "fail('a')", 1),  # it reports no steps
        (
            "progress.record_step(7); fail('gloo: closed', RuntimeError)",
            "fail('gloo: closed', RuntimeError)",
            1,
        ),
        ("progress.record_step(7); fail('a', TimeoutError)", "fail('a', TimeoutError)", 1),
    ],
)
def test_the_same_error_at_the_same_step_is_final(
    first: str, then: str, status: int, tmp_path: Path
) -> None:
    fail = "def fail(text, kind=ValueError): raise kind(text)\n"
    path = str(tmp_path / "progress")
    assert run(fail + first, **{PROGRESS_VARIABLE: path}).returncode == 1
    done = run(fail + then, **{PROGRESS_VARIABLE: path})
    assert done.returncode == status, done.stderr
    if status == 93:
        assert "the same error ended it at step 7 before the restart" in done.stderr


@pytest.mark.processes
def test_the_step_of_a_killed_worker_is_known(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    done = run(
        "import os\nprogress.record_step(41); progress.record_step(42)\nos.kill(os.getpid(), 9)",
        **{PROGRESS_VARIABLE: str(path)},
    )
    assert done.returncode == -signal.SIGKILL
    assert ProgressFile(path).step == 42
    ProgressFile(f"{path}.1").record_step(43)
    (tmp_path / "progress.2").write_text("something else")
    assert highest_step(path) == 43
    assert highest_step(tmp_path / "nothing") is None


def test_a_drain_that_is_over_is_not_known(tmp_path: Path) -> None:
    file, same = ProgressFile(tmp_path / "progress"), ProgressFile(tmp_path / "progress")
    assert same.drain_until is None
    until = time.monotonic() + 60
    file.record_drain(until)
    assert same.drain_until == until
    file.record_drain(time.monotonic() - 1)
    assert same.drain_until is None
    file.record_drain(time.monotonic() + 1e9)  # of before the machine was booted
    assert same.drain_until is None
    file.record_drain(None)
    assert same.drain_until is None


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be opened: No such file"):
        ProgressFile(tmp_path / "missing" / "progress")
    nowhere = ProgressFile(None)
    nowhere.record_step(1)
    assert nowhere.step is None
    assert not nowhere.record_failure("ValueError")
    nowhere.close()


def test_an_error_of_a_trainer_is_judged_by_its_cause() -> None:
    error = ValueError("of the user's program")
    error.__cause__ = WorkerFailed("ValueError", 3, True, "", is_final=True)
    assert is_final(error)
    error.__cause__ = WorkerFailed("ValueError", 3, False, "")
    assert not is_final(error)
    assert not is_final(Unreachable("store", "a:1", "closed"))
