"""Tests the command `lighthouse doctor`: its options, its output and its exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from support.examined import examine, named, only
from support.papers import TOKEN
from support.running import environment, refusing

from torchft_svc.coordination import LighthouseServer
from torchft_svc.doctor.findings import Check, Level, found_ok, run_checks
from torchft_svc.lighthouse_server.cli import main as lighthouse


@pytest.fixture
def address() -> Iterator[str]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1) as server:
        yield server.address().removeprefix("http://")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("TORCHFT_", "TORCH_LIGHTHOUSE", "REPLICA_", "RANK", "WORLD_", "GLOO_")):
            monkeypatch.delenv(name)


def doctor(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(lighthouse, ["doctor", *words], env=variables)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nonsense"], "No such option '--nonsense'"),
        (["--lighthouse=nonsense"], "address 'nonsense': has no port"),
        (["--lighthouse="], "is empty: give it a value"),
        (["--job-id=a\nb"], "contains characters that cannot be printed"),
        (["--step-time=0"], "0.0 is not in the range 0<x<=86400"),
        (["--step-time=soon"], "'soon' is not a valid float"),
        (["--state-size=big"], "'big' is not a size: write bytes, or a number with kB, MB"),
        (["--state-size=-1GB"], "'-1GB' is not a size"),
        (["--link-rate=fast"], "'fast' is not a rate: write a number with MB/s"),
        (["--link-rate=0GB/s"], "'0GB/s' is not a number above 0"),
        (["--groups=0"], "0 is not in the range"),
        (["--groups=many"], "'many' is not a valid integer"),
        (["--peer=nowhere"], "address 'nowhere': has no port"),
        (["--peer=:7"], "address ':7': has no host"),
        (["--bind=:7"], "--bind is the address of --serve"),
        (["--serve", "--bind=host"], "address 'host': has no port"),
        (["--serve", "--peer=a:1"], "--serve only serves: --peer is for the other doctor"),
        (["--serve", "--json"], "--serve only serves: --json is for the other doctor"),
        (["extra"], "Got unexpected extra argument (extra)"),
    ],
)
def test_bad_options_are_usage_errors(words: list[str], sentence: str) -> None:
    done = doctor(*words)
    assert done.exit_code == 2, done.output
    assert sentence in done.output


def test_an_address_where_it_cannot_serve() -> None:
    with refusing() as taken:
        done = doctor("--serve", f"--bind={taken}")
    assert done.exit_code == 1
    assert "cannot be bound" in done.output


def test_the_exit_status_is_for_scripts(address: str) -> None:
    fine = doctor(TORCHFT_LIGHTHOUSE=address, REPLICA_GROUP_ID="a")
    assert fine.exit_code == 0, fine.output
    assert "0 problems" in fine.output
    warned = doctor(TORCHFT_LIGHTHOUSE=address)
    assert warned.exit_code == 0, "warnings are no problems"
    assert "warning  group" in warned.output
    with refusing() as closed:
        broken = doctor(TORCHFT_LIGHTHOUSE=closed)
        other = doctor(f"--lighthouse={address}", "--job-id=j", TORCHFT_LIGHTHOUSE=closed)
    assert broken.exit_code == 1
    assert "PROBLEM  port" in broken.output
    assert other.exit_code == 0
    assert "j is new to the lighthouse" in other.output


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("TORCHFT_TIMEOUT_SEC", "soon", "use a finite number of seconds above 0"),
        ("TORCHFT_TOKEN", "", "it is empty: give it a value, or unset it"),
        ("TORCHFT_TOKEN", "short", "it has 5 characters"),
        ("TORCHFT_TLS_CA", "/no/such/file", "No such file"),
        ("TORCHFT_TIMEOUT_SEC", "100", ""),
        ("TORCHFT_MIN_REPLICAS", "-1", "use a whole number, 0 or more"),
        ("TORCHFT_ON_DIFFERENCE", "shout", "on_difference='shout'"),
        ("RANK", "7", "rank=7 cannot work"),
    ],
)
def test_bad_variables_are_findings(address: str, name: str, value: str, sentence: str) -> None:
    done = doctor(TORCHFT_LIGHTHOUSE=address, **{name: value})
    assert done.exit_code == (1 if sentence else 0), done.output
    assert "Traceback" not in done.output
    assert sentence in done.output


def test_a_refused_variable_is_one_finding_and_the_rest_is_checked_without_it(address: str) -> None:
    found = examine(TORCHFT_LIGHTHOUSE=address, TORCHFT_TIMEOUT_SEC="soon", TORCHFT_TLS_CA=" ")
    first, second = named(found, "settings")
    assert "TORCHFT_TIMEOUT_SEC='soon' cannot work" in first.found
    assert "TORCHFT_TLS_CA=' ' cannot work" in second.found
    assert "collective timeout 60 s" in only(found, "timeouts").found, "its default"
    assert only(found, "leader").level is Level.OK


def test_relations_of_variables_are_findings(address: str) -> None:
    both = {"TORCHFT_TIMEOUT_SEC": "90", "TORCHFT_QUORUM_TIMEOUT_SEC": "30"}
    done = doctor(TORCHFT_LIGHTHOUSE=address, **both)
    assert done.exit_code == 1
    assert "timeout='90 s' cannot work: it must not be above quorum_timeout=30 s" in done.output


def test_a_variable_with_a_slip(address: str) -> None:
    done = doctor(TORCHFT_LIGHTHOUSE=address, TORCHFT_LIGTHOUSE="x", TORCHFT_JOBID="y")
    assert "nobody reads TORCHFT_LIGTHOUSE -> TORCHFT_LIGHTHOUSE is the name" in done.output
    assert "nobody reads TORCHFT_JOBID -> TORCHFT_JOB_ID is the name" in done.output


def test_no_secret_is_shown(address: str) -> None:
    for words in ([], ["--json"]):
        done = doctor(*words, TORCHFT_LIGHTHOUSE=address, TORCHFT_TOKEN=TOKEN)
        assert TOKEN not in done.output


def test_it_proposes_settings(address: str) -> None:
    load = ["--step-time=0.8", "--state-size=14GB", "--link-rate=10Gbit/s", "--groups=8"]
    done = doctor(*load, TORCHFT_LIGHTHOUSE=address)
    assert (
        "Settings for 8 groups with steps of 0.8 s and a state of 14 GB per worker" in done.output
    )
    assert "  lighthouse --heal-timeout-ms" in done.output
    assert "  a worker is killed" in done.output
    less = doctor("--step-time=0.8", TORCHFT_LIGHTHOUSE=address)
    assert "no settings are proposed without --state-size" in less.output
    assert less.exit_code == 0


def test_programs_read_json(address: str) -> None:
    load = ["--step-time=0.8", "--state-size=14GB", "--link-rate=10Gbit/s", "--groups=8"]
    done = doctor("--json", *load, TORCHFT_LIGHTHOUSE=address)
    shown = json.loads(done.output)
    assert set(shown) == {"findings", "problems", "warnings", "plan"}
    assert {each["level"] for each in shown["findings"]} <= {each.value for each in Level}
    assert all(set(each) == {"check", "level", "found", "advice"} for each in shown["findings"])
    assert shown["problems"] == sum(each["level"] == "problem" for each in shown["findings"])
    assert shown["plan"]["load"]["num_groups"] == 8
    assert json.loads(doctor("--json", TORCHFT_LIGHTHOUSE=address).output)["plan"] is None


def test_a_check_that_fails_does_not_end_the_others() -> None:
    def fail() -> list[None]:
        raise RuntimeError("as the test says")

    first, second = run_checks(
        [Check("one", fail), Check("two", lambda: [found_ok("two", "fine")])]  # type: ignore[arg-type]
    )
    assert first.level is Level.PROBLEM
    assert first.found == "the check failed: RuntimeError: as the test says"
    assert second.level is Level.OK


@pytest.mark.processes
def test_two_doctors_on_the_command_line(address: str) -> None:
    command = [sys.executable, "-m", "torchft_svc.lighthouse_server", "doctor"]
    variables = environment(TORCHFT_LIGHTHOUSE=address, PYTHONUNBUFFERED="1")
    with subprocess.Popen(
        [*command, "--serve", "--bind=127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    ) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        peer = line.rpartition(" ")[2].strip()
        assert line == f"doctor serves on {peer}: lighthouse doctor --peer {peer}\n"
        done = doctor(f"--peer={peer}", TORCHFT_LIGHTHOUSE=address)
        assert "ok       link" in done.output
        assert "127.0.0.1 to" in done.output
        serving.send_signal(signal.SIGINT)
        rest = serving.stdout.read()
        assert serving.wait(20) == 0
    assert rest.startswith("127.0.0.1: 127.0.0.1:")
