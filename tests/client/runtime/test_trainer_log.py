"""Tests the log of trainers on stderr; a program's own logging configuration wins."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from support.running import environment, lighthouse_process, steady_address
from support.training import in_step, lighthouse, together, trainers
from support.warm import Warm

from torchft_svc.client.checkpointing.http.source import Source
from torchft_svc.errors import AddressError
from torchft_svc.host.log_format import Speaker, make_formatter
from torchft_svc.rpc.security import PLAIN

pytestmark = pytest.mark.processes

# A manager that leads a group of one; what the program says of logging comes before or after.
PROGRAM = """
import logging, sys, torch
{before}
from torchft_svc import Manager
where = {{"lighthouse_addr": {address!r}, "replica_id": "a"}}
manager = Manager(state_dict=dict, load_state_dict=print, **where)
{after}
manager.start_quorum()
manager.allreduce(torch.ones(1)).wait()
manager.should_commit()
manager.shutdown()
"""
JOINS, QUORUM, LEAVES = (
    "joins job default",
    "quorum N from step 0: 1 group: a",
    "leaves after step 1",
)
FORMAT = 'format="mine %(levelname)s %(message)s"'


def messages(lines: str, start: str = r"[\d-]+ [\d:,]+ INFO torchft_svc\[a\] ") -> list[str]:
    """The lines that begin with ``start``, without what differs from run to run."""
    found = [line for line in lines.splitlines() if re.match(start, line)]
    plain = [re.sub(r"quorum \d+", "quorum N", re.sub(start, "", line)) for line in found]
    return [re.sub(" default at 127.*", " default", line) for line in plain]


def errors_of(tmp_path: Path, before: str = "", after: str = "", **variables: str) -> str:
    """What the program writes to stderr."""
    with lighthouse_process() as lighthouse:
        program = PROGRAM.format(before=before, after=after, address=lighthouse.address)
        file = tmp_path / "program.py"
        file.write_text(program)
        command = [sys.executable, str(file)]
        with Warm(
            command, env=environment(**variables), stderr=subprocess.PIPE, text=True
        ) as process:
            errors: str = process.stderr.read()
            assert process.wait() == 0, errors
            return errors


def test_a_trainer_speaks_without_configuration(tmp_path: Path) -> None:
    errors = errors_of(tmp_path)
    assert messages(errors) == [JOINS, QUORUM, LEAVES]
    assert len(errors.splitlines()) == 3, errors


@pytest.mark.parametrize("level", ["warning", "off"])
def test_the_environment_names_the_level(tmp_path: Path, level: str) -> None:
    assert errors_of(tmp_path, TORCHFT_LOG=level) == ""


def test_at_debug_there_is_more(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, TORCHFT_LOG="debug")
    assert messages(errors) == [JOINS, QUORUM, LEAVES]
    assert " DEBUG torchft_svc[a] " in errors
    assert " INFO torchft_svc[a manager] " in errors  # of its own process


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_the_programs_own_configuration_wins(tmp_path: Path, where: str, level: str) -> None:
    own = f"logging.basicConfig(level=logging.{level}, {FORMAT})"
    errors = errors_of(tmp_path, **{where: own})
    expected = [QUORUM, LEAVES] if where == "after" else [JOINS, QUORUM, LEAVES]
    assert messages(errors, "mine INFO ") == (expected if level == "INFO" else [])
    assert len(messages(errors)) == (where == "after"), "a line came twice, or against its level"


def test_a_handler_for_this_package_wins(tmp_path: Path) -> None:
    own = 'log = logging.getLogger("torchft_svc"); log.addHandler(logging.NullHandler())'
    assert errors_of(tmp_path, before=own) == ""


def test_importing_configures_nothing() -> None:
    script = (
        "import logging, torchft_svc.client; log = logging.getLogger('torchft_svc');"
        "assert not log.handlers and not logging.root.handlers and log.propagate and not log.level"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=environment())


def test_a_line_stays_one_line() -> None:
    text = "a\nb\x1b[31m\x9b"
    record = logging.LogRecord("torchft_svc.x", logging.INFO, "", 0, text, (), None)
    line = make_formatter("text", Speaker("50%")).format(record)
    assert line.endswith(" INFO torchft_svc[50%] a\\nb\\x1b[31m\\x9b")


def test_heals_quorums_and_lost_groups_are_logged_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "torchft_svc")
    with lighthouse() as address, trainers(address, 2) as (a, b):
        in_step(2, a, b)

        def leave() -> None:
            b.optimizer.zero_grad()
            b.manager.wait_quorum()
            b.manager.shutdown()

        committed, _ = together(a.step, leave)
        assert committed
        a.until(3)
        secrets = [each.manager._runtime.deps.transport._server.secret for each in (a, b)]
    records = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    for pattern in (
        r"quorum \d+ from step \d: 2 groups: a, b",
        r"healing to step \d from group [ab]",
        r"healed to step \d from group [ab]: [\d.]+ k?B in \d\.\d\d s",
        r"group [ab] heals to step \d from this group",
        r"step \d is summed in another quorum: lost group b: .*",
        r"quorum \d+ from step \d: 1 group: a; gone: b \(.*\)",
        r"leaves after step \d",
    ):
        assert any(re.fullmatch(pattern, line) for line in records), (pattern, records)
    assert "gloo" not in "".join(records)
    assert not any(secret in caplog.text for secret in secrets)


def test_a_step_in_vain_is_reported_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with (
        lighthouse(min_replicas=2, join_timeout_ms=3000) as address,
        trainers(address, 2) as (a, b),
    ):
        together(lambda: a.until(4), lambda: b.until(4))
        a.optimizer.zero_grad()
        assert a.manager.num_participants() == 2  # so it is not summed in another quorum
        a.backward()
        assert not a.optimizer.step()
    records = [record.getMessage() for record in caplog.records]
    why = r"step 4 is discarded: b:\S+ did not begin step 4 in time"
    assert any(re.fullmatch(why, line) for line in records), records


@pytest.mark.parametrize("url", ["http://host:99999/S3CRET/x", "host:1/S3CRET", "ftp://h:1/S3CRET"])
def test_no_error_shows_the_secret_of_a_source(url: str) -> None:
    with pytest.raises(AddressError) as caught:
        Source(url, 1.0, PLAIN)
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))


LONELY = """
from datetime import timedelta
from torchft_svc import Manager
manager = Manager(
    state_dict=dict, load_state_dict=print, replica_id="a",
    lighthouse_addr="127.0.0.1:1", connect_timeout=timedelta(seconds=7),
)
manager.start_quorum()
"""


def test_a_lighthouse_that_cannot_be_reached_is_named_until_the_end(tmp_path: Path) -> None:
    """Every few seconds, and then in the last line of a short traceback."""
    (tmp_path / "lonely.py").write_text(LONELY)
    command = [sys.executable, str(tmp_path / "lonely.py")]
    with Warm(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        errors: str = process.stderr.read()
        assert process.wait() == 1
    why = "lighthouse at 127.0.0.1:1 cannot be reached: Connection refused"
    lines = errors.splitlines()
    assert messages(errors, r"[\d-]+ [\d:,]+ WARNING torchft_svc\[a manager\] ")[:2] == [
        f"there is no lighthouse: {why}",
        f"no lighthouse for 5 s: {why}",
    ]
    # What comes before are frames of the fork server, which a program of its own has not.
    (begins,) = [number for number, line in enumerate(lines) if "lonely.py" in line]
    ends = lines.index(f"torchft_svc.errors.Unreachable: {why}")
    assert lines[:begins].count("Traceback (most recent call last):") == 1
    assert ends - begins <= 11, errors


@pytest.mark.parametrize("own", ["", f"logging.basicConfig({FORMAT})"])
def test_a_trainer_that_waits_for_others_says_so(tmp_path: Path, own: str) -> None:
    sooner = f"{own}\nfrom torchft_svc.core.quorum.worker import peers; peers._LOG_AFTER_S = 0.5"
    with lighthouse_process("--min-replicas=2") as lighthouse:
        (tmp_path / "lonely.py").write_text(
            PROGRAM.format(before=sooner, after="", address=lighthouse.address)
        )
        command = [sys.executable, str(tmp_path / "lonely.py")]
        with Warm(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if "no quorum" in line)
            process.kill()
    start = "mine" if own else r"[\d-]+ [\d:,]+"
    who = "" if own else r"torchft_svc\[a\] "
    why = r"no quorum for \d s: 1 of at least 2 groups ask \(--min-replicas\)\n"
    assert re.fullmatch(f"{start} WARNING {who}{why}", line), line


def test_a_trainer_that_does_not_shut_down_says_after_which_step(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, after="manager.shutdown = lambda: None")
    assert messages(errors) == [JOINS, QUORUM, LEAVES]


def test_a_program_without_torch_is_informed_what_is_missing(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None; "
    script = hide + "from torchft_svc import Manager"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    why = "torchft_svc.Manager needs PyTorch, which is not installed here: pip install torch"
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {why}"


def test_a_group_of_two_workers_ends_without_warnings(tmp_path: Path) -> None:
    """The manager goes with rank 0, whatever rank 1 still does."""
    waits = "import sys; end = manager.shutdown; manager.shutdown = lambda: (input(), end())"
    host, _, port = steady_address().rpartition(":")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port}
    with lighthouse_process() as lighthouse, contextlib.ExitStack() as stack:
        workers = []
        for rank, after in enumerate(["", waits]):
            file = tmp_path / f"worker{rank}.py"
            file.write_text(PROGRAM.format(before="", after=after, address=lighthouse.address))
            worker = Warm(
                [sys.executable, str(file)],
                env=environment(RANK=str(rank), **shared),
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            workers.append(stack.enter_context(worker))
        errors = workers[0].stderr.read()
        workers[1].stdin.write("\n")
        workers[1].stdin.flush()
        errors += workers[1].stderr.read()
        assert [worker.wait() for worker in workers] == [0, 0], errors
    assert "WARNING" not in errors, errors
    assert "ends for good: the process of group rank 0, which had started it, has shut" in errors


def test_a_trainer_logs_json(tmp_path: Path) -> None:
    errors = errors_of(tmp_path, TORCHFT_LOG_FORMAT="json", TORCHFT_LOG="debug")
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {(line["job"], line["group"]) for line in lines} == {("default", "a")}
    trainers = [line for line in lines if line.get("rank") == 0]
    assert len(trainers) < len(lines)  # the others are of the manager's process
    leaves = [line for line in trainers if line["message"] == LEAVES]
    assert [line["step"] for line in leaves] == [1]
    assert leaves[0]["quorum_id"] > 0


def test_a_format_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    program = (
        "import torchft_svc\n"
        "try:\n    torchft_svc.Manager(state_dict=dict, load_state_dict=print)\n"
        "except torchft_svc.errors.ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=environment(TORCHFT_LOG_FORMAT="xml"),
    )
    assert "TORCHFT_LOG_FORMAT" in done.stdout
    assert "'xml'" in done.stdout
