"""Each flag with values that nobody means, and outputs that cannot be written: one sentence, and no
traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.running import ROOT, environment, line_to, refusing, steady_address

from torchft_svc.lighthouse_server import cli as lighthouse_cli
from torchft_svc.lighthouse_server.cli import main as lighthouse
from torchft_svc.lighthouse_server.operator_commands import OPERATOR_COMMANDS as LIGHTHOUSE_COMMANDS
from torchft_svc.manager_server import cli as manager_cli
from torchft_svc.manager_server.cli import main as manager
from torchft_svc.manager_server.operator_commands import OPERATOR_COMMANDS as MANAGER_COMMANDS

NEEDED = {
    "--lighthouse": "127.0.0.1:1",
    "--replica-name": "g",
    "--store-address": "127.0.0.1:1",
}
ODD = {
    "empty": "",
    "blank": " ",
    "bytes": "x\udcff",  # as Python has an argument that is no text
    "lines": "a\nb\x1b[2J",
    "not ASCII": "h\N{LATIN SMALL LETTER O WITH CIRCUMFLEX}st:1",
    "23 digits": "9" * 23,
    "23 digits below zero": "-" + "9" * 23,
    "400 digits below zero": "-" + "9" * 400,
    "5000 digits": "9" * 5000,
    "long": "x" * 5000,
    "no number": "nan",
}


def flags_of(command: click.Command) -> list[str]:
    return [
        each.opts[0]
        for each in command.params
        if isinstance(each, click.Option) and not each.is_flag
    ]


def output_of(command: click.Command, arguments: list[str]) -> str:
    """What is printed, in an ending that click knows, not by an exception of ours."""
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def unserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before a service starts is looked at."""

    def serve_not(*_: Any, **__: Any) -> None:
        """The service would run until it is stopped."""

    monkeypatch.setattr(lighthouse_cli, "run", serve_not)
    monkeypatch.setattr(manager_cli, "run_as_process", serve_not)


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("main", [lighthouse, manager])
def test_each_flag_of_a_service(main: click.Command, value: str, unserved: None) -> None:
    election = ["--leader-election=etcd://127.0.0.1:1"] if main is lighthouse else []
    needed = [f"{flag}={given}" for flag, given in NEEDED.items()] if main is manager else []
    for flag in flags_of(main):
        for more in ([], election) if flag.startswith(("--etcd", "--lease", "--adv")) else ([],):
            output_of(main, [*needed, *more, f"{flag}={value}"])


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_each_flag_of_an_operator_command(value: str) -> None:
    with refusing() as address:
        for main, commands in ((lighthouse, LIGHTHOUSE_COMMANDS), (manager, MANAGER_COMMANDS)):
            for command in commands:
                where = "--lighthouse" if main is lighthouse else "--manager"
                needed = [command.name or "", f"{where}={address}"]
                if "--replica" in flags_of(command):
                    needed.append("--replica=a")
                for flag in flags_of(command):
                    output = output_of(main, [*needed, f"{flag}={value}"])
                    assert "a" in output


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize("main", [lighthouse, manager])
def test_each_flag_that_is_given_but_empty_is_an_error(main: click.Command, value: str) -> None:
    """An empty value is refused even where it would not count, such as `--advertise`."""
    commands = LIGHTHOUSE_COMMANDS if main is lighthouse else MANAGER_COMMANDS
    for command, words in ((main, []), *((each, [each.name or ""]) for each in commands)):
        for flag in flags_of(command):
            output = output_of(main, [*words, f"{flag}={value}"])
            sentence = f"Invalid value for '{flag}'"
            assert sentence in output, output
            assert f"{value!r} is empty: give it a value, or leave it out" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["kill", "--replica", "x\udcff"], "'x\\udcff' contains characters that cannot be printed"),
        (["kill", "--replica=a", "--job-id=\N{SNOWMAN}"], "is not ASCII"),
        (["drain", "--replica=a", "--reason=a\nb"], "contains characters that cannot be printed"),
        (["--min-replicas=" + "9" * 23], "cannot work: use 1000000 at most"),
        (
            ["--leader-election=etcd://a:1", "--advertise=h\N{SNOWMAN}st:1"],
            "is not ASCII: write its name as DNS has it (xn--...)",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], sentence: str, unserved: None) -> None:
    assert sentence in output_of(lighthouse, arguments)


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")


@needs_dev_full
@pytest.mark.processes
@pytest.mark.parametrize("output", ["/dev/full", "closed"])
@pytest.mark.parametrize("module", ["lighthouse_server", "manager_server"])
def test_a_service_works_where_nothing_can_be_printed(module: str, output: str) -> None:
    address = steady_address()
    flags = [f"{flag}={given}" for flag, given in NEEDED.items()] if "manager" in module else []
    command = [sys.executable, "-m", f"torchft_svc.{module}", f"--bind={address}", *flags]
    to = ">&-" if output == "closed" else ">/dev/full"
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$@" {to}', "sh", *command],
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        with line_to(address):
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors
    if output == "/dev/full":
        assert b"could not be printed: No space left on device" in errors


@needs_dev_full
@pytest.mark.processes
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--nonsense"]])
def test_an_order_whose_output_cannot_be_written(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torchft_svc.lighthouse_server", *arguments],
        stdout=os.open("/dev/full", os.O_WRONLY),
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    assert "Traceback" not in result.stderr
    if arguments != ["--nonsense"]:
        expected = "Error: the output cannot be written: No space left on device\n"
        assert (result.returncode, result.stderr) == (1, expected)
