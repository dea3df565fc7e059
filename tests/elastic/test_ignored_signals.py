"""Launchers that are started with signals ignored, as by nohup, shells and some schedulers."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from support.launched import LAUNCH_S, OURS
from support.programs import Program

pytestmark = pytest.mark.processes

# In a fork of a process that has imported torch, before anything of the launcher runs.
IGNORES = f"""
import runpy, signal, sys
signal.signal(signal.Signals[sys.argv.pop(1)], signal.SIG_IGN)
runpy.run_module("{OURS}", run_name="__main__", alter_sys=True)
"""
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
WAITS = (
    "import pathlib, sys, time\n"
    "from torchft_svc.elastic import get_worker_info\n"
    "get_worker_info()\n"
    "print('waits', flush=True)\n"
    "while not pathlib.Path(sys.argv[1]).exists():\n"
    "    time.sleep(0.05)\n"
)


def launcher(ignored: str, policy: str, script: Path, *arguments: str) -> Program:
    """A launcher of one worker, whose parent has had ``ignored`` ignored."""
    begin = script.with_name("ignores.py")
    begin.write_text(IGNORES)
    line = ["--standalone", f"--restart-policy={policy}", "--monitor-interval=0.05"]
    command = [sys.executable, str(begin), f"SIG{ignored}", *line, str(script), *arguments]
    return Program(command, warm=True)


@pytest.mark.parametrize("policy", ["hard", "soft"])
def test_a_killed_worker_has_failed_where_sigchld_is_ignored(policy: str, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    with launcher("CHLD", policy, script) as program:
        assert program.wait(LAUNCH_S) == 1
    output = "\n".join(program.lines)
    assert "exitcode  : -9" in output, output
    assert "SIGCHLD was ignored" in output, output


@pytest.mark.parametrize(
    ("policy", "name"), [("hard", "HUP"), ("soft", "HUP"), ("soft", "INT"), ("hard", "QUIT")]
)
def test_an_ignored_signal_does_not_end_a_launcher(policy: str, name: str, tmp_path: Path) -> None:
    """A signal is ignored under ``nohup``, and in what a shell script starts in the background."""
    script, end = tmp_path / "waits.py", tmp_path / "end"
    script.write_text(WAITS)
    with launcher(name, policy, script, str(end)) as program:
        program.wait_for("waits")
        program.signal(signal.Signals[f"SIG{name}"])
        end.touch()
        assert program.wait(LAUNCH_S) == 0, program.lines


@pytest.mark.parametrize("policy", ["hard", "soft"])
def test_sigterm_ends_every_launcher(policy: str, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with launcher("TERM", policy, script, str(tmp_path / "never")) as program:
        program.wait_for("waits")
        program.signal(signal.SIGTERM)
        assert program.wait(LAUNCH_S) == 1
