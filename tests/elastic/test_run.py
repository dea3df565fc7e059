"""The command: the same as torchrun with the hard policy, and one sentence about bad input."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import LAUNCH_S, OURS, TORCHS, agents
from support.programs import Program
from support.running import SCRIPTS, eventually, refusing, steady_address

from torchft_svc.elastic import run
from torchft_svc.elastic.launcher import RestartPolicy
from torchft_svc.env import PROGRESS_VARIABLE, VERDICT_VARIABLE
from torchft_svc.errors import ConfigError
from torchft_svc.host.exit_verdict import DO_NOT_REQUEUE

SCRIPT = str(SCRIPTS / "recording_worker.py")
NO_WAIT = ("--rdzv-conf=is_host=0,read_timeout=1", "--nnodes=2")


@dataclass(frozen=True)
class Case:
    """Arguments of each agent (``{rank}`` of a node, ``{port}``); what is appended to all."""

    options: tuple[str, ...]
    script: tuple[str, ...] = (SCRIPT, "{folder}")
    num_agents: int = 1
    status: int = 0


CASES = {
    "single node": Case(("--nproc-per-node=2",)),
    "standalone": Case(("--standalone", "--nproc_per_node", "2", "--tee=3", "--role=trainer")),
    "console": Case(("--nproc-per-node=2", "--local-ranks-filter=1", "-t", "3")),
    "many nodes": Case(
        ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=many"),
        num_agents=2,
    ),
    "elastic range": Case(
        (
            "--nnodes=1:2",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=range",
            "--rdzv-conf=join_timeout=50",
        ),
        num_agents=2,
    ),
    "static rank": Case(
        (
            "--nnodes=2",
            "--node-rank={rank}",
            "--master-addr=127.0.0.1",
            "--master-port={port}",
        ),
        num_agents=2,
    ),
    "no python": Case(
        ("--nproc-per-node=2", "--no-python"), (sys.executable, SCRIPT, "{folder}", "0")
    ),
    "module": Case(
        ("-m",), ("tests.support.scripts.recording_worker", "{folder}", "0", "${{local_rank}}")
    ),
    "restarts": Case(
        ("--nproc-per-node=2", "--max-restarts=2", "--redirects=0:1,1:2"),
        (SCRIPT, "{folder}", "7", "1"),
    ),
    "failure": Case(
        ("--nproc-per-node=2", "--redirects=3", "--max-restarts=1"),
        (SCRIPT, "{folder}", "7"),
        status=1,
    ),
    "function": Case(("--run-path", "--start-method=fork", "--redirects=3")),
}


def launched(case: Case, of: str, folder: Path) -> dict[str, Any]:
    """What can be observed of the agents of a case, and of their workers."""
    port = steady_address().partition(":")[2]
    records = folder / "records"
    records.mkdir(parents=True)
    lines = []
    for rank in range(case.num_agents):
        logs = f"--log-dir={folder / f'logs{rank}'}"
        texts = [logs, "--monitor-interval=0.05", *case.options, *case.script]
        lines.append([text.format(rank=rank, port=port, folder=records) for text in texts])
    with agents(*lines, of=of) as started:
        statuses = [each.wait(LAUNCH_S) for each in started]
        output = sorted(line for each in started for line in worker_lines(each))
    return {
        "statuses": statuses,
        "output": output,
        "workers": {each.name: worker(each, folder) for each in sorted(records.glob("*.json"))},
        "logs": {
            plain(str(each.relative_to(folder))): plain(each.read_text())
            for each in sorted(folder.glob("logs*/**/*"))
            if each.is_file() and each.name != "error.json"
        },
        "errors": sorted(plain(str(each)) for each in folder.glob("logs*/**/error.json")),
    }


def worker_lines(program: Program) -> list[str]:
    return [line for line in program.lines if re.search(r"rank \d (was started|complains)$", line)]


def worker(path: Path, folder: Path) -> dict[str, Any]:
    """How a worker was started; without what is different in each run."""
    record = json.loads(path.read_text().replace(str(folder), "FOLDER"))
    variables = record["environment"]
    for name in (PROGRESS_VARIABLE, VERDICT_VARIABLE):  # what torchft-run adds
        variables.pop(name, None)
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        if name in variables:
            variables[name] = plain(variables[name])
    return record


def plain(text: str) -> str:
    """``text`` without random names and numbers."""
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "UUID", text)
    text = re.sub(r"(logs\d/[^/]+)_.{8}(?=/)", r"\1_RANDOM", text)
    return re.sub(r"\b\d{4,5}\b", "PORT", text)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_the_hard_policy_does_what_torchrun_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with ThreadPoolExecutor(2) as both:
        programs = ((TORCHS, tmp_path / "torchrun"), (OURS, tmp_path / "ours"))
        theirs, ours = both.map(lambda program: launched(case, *program), programs)
    assert ours["statuses"] == [case.status] * case.num_agents
    assert ours["workers"]
    assert ours["workers"].keys() == theirs["workers"].keys()
    assert not _differences(_same_place(ours), _same_place(theirs))


BAD = {
    "policy": (["--restart-policy", "medium", SCRIPT], "use one of hard, soft, soft-no-replace"),
    "nodes": (["--nnodes", "3:1", SCRIPT], "--nnodes='3:1' cannot work: 1 <= min <= max"),
    "no nodes": (["--nnodes", "two", SCRIPT], "--nnodes='two' cannot work"),
    "no script": (["/nowhere/train.py"], "script='/nowhere/train.py' cannot work: there is no"),
    "no program": (["--no-python", "nowhere"], "entrypoint='nowhere' cannot work"),
    "no workers": (["--nproc-per-node", "0", SCRIPT], "--nproc-per-node='0' cannot work"),
    "barrier": (["--exit-barrier-timeout", "-1", SCRIPT], "--exit-barrier-timeout=-1.0 cannot"),
    "ready": (["--soft_ready_timeout=inf", SCRIPT], "--soft-ready-timeout=inf cannot work"),
    "restarts": (["--max-restarts=-1", SCRIPT], "--max-restarts=-1 cannot work"),
    "interval": (["--monitor-interval=0", SCRIPT], "--monitor-interval=0.0 cannot work"),
    "streams": (["--redirects=7", SCRIPT], "--redirects='7' cannot work"),
    "ranks": (["--local-ranks-filter=a", SCRIPT], "--local_ranks_filter must be"),
    "back end": (["--rdzv-backend=pigeon", SCRIPT], "rdzv_backend='pigeon' cannot work"),
    "settings": (["--rdzv-backend=c10d", "--rdzv-conf=x", SCRIPT], "option 'x'"),
    "no lighthouse": (
        ["--restart-policy=soft", "--nnodes=2", SCRIPT],
        "up to 2 nodes have to meet: name host:port of a lighthouse",
    ),
}
if not torch.cuda.is_available():
    BAD["no GPU"] = (["--numa-binding=node", SCRIPT], "and torch finds none: leave it out")


@pytest.fixture(autouse=True)
def _temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a directory for logs, also for arguments that are refused then."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, sentence = BAD[name]
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert ended.value.code == DO_NOT_REQUEUE
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("torchft-run: error: ")
    assert sentence in said


def test_a_store_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with refusing() as address, pytest.raises(SystemExit) as ended:
        run.main(["--rdzv-backend=c10d", f"--rdzv-endpoint={address}", *NO_WAIT, SCRIPT])
    assert ended.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("torchft-run: error: The connection to the C10d store has failed.")
    assert "inner exception" not in said
    assert address.partition(":")[2] in said


@pytest.mark.parametrize("back_end", ["etcd", "etcd-v2"])
def test_an_etcd_that_is_not_there_is_named(
    back_end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_installed = importlib.util.find_spec("etcd") is not None
    expected = "the connection to etcd has failed" if is_installed else "pip install python-etcd"
    with refusing() as address, pytest.raises(SystemExit) as ended:
        run.main([f"--rdzv-backend={back_end}", f"--rdzv-endpoint={address}", *NO_WAIT, SCRIPT])
    assert ended.value.code == (1 if is_installed else DO_NOT_REQUEUE)
    assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("policy", ["hard", "soft"])
def test_a_lighthouse_that_is_not_there_is_named(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing() as address, pytest.raises(SystemExit) as ended:
        run.main(
            [
                f"--restart-policy={policy}",
                "--rdzv-backend=lighthouse",
                f"--rdzv-endpoint={address}",
                "--rdzv-conf=connect_timeout=0.5",
                SCRIPT,
            ]
        )
    assert ended.value.code == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("torchft-run: error: ")
    assert address in said


@pytest.mark.processes
def test_two_agents_with_rank_0_of_a_static_rendezvous(tmp_path: Path) -> None:
    port = steady_address().partition(":")[2]
    options = ["--nnodes=2", "--node-rank=0", f"--master-port={port}", f"--log-dir={tmp_path}"]
    with agents([*options, SCRIPT, str(tmp_path)], [*options, SCRIPT, str(tmp_path)]) as started:
        assert 1 in _first_statuses(started)
        said = [line for each in started for line in each.read_so_far() if "error: " in line]
    assert "EADDRINUSE" in said[0]


def _first_statuses(started: list[Program]) -> list[int]:
    """The statuses of those that have ended first; the others wait for a second node."""

    def statuses() -> list[int]:
        return [status for each in started if (status := each.poll()) is not None]

    return eventually(statuses, LAUNCH_S)


def test_a_script_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main([str(tmp_path)])
    assert "there is no __main__.py in this folder" in capsys.readouterr().err


def test_a_missing_program_leaves_no_directory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit):
        run.main(["--standalone", "--restart-policy=soft", "--no-python", "no-such-program"])
    assert list(tmp_path.iterdir()) == []


def test_arguments_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RESTART_POLICY", "soft")
    monkeypatch.setenv("PET_SOFT_READY_TIMEOUT", "7")
    monkeypatch.setenv("PET_EXIT_BARRIER_TIMEOUT", "8")
    monkeypatch.setenv("PET_NNODES", "2:3")
    config, command, arguments = run.config_from_args(run.parse_args([SCRIPT, "--more"]))
    assert config.restart_policy is RestartPolicy.SOFT
    assert (config.soft_ready_timeout, config.exit_barrier_timeout) == (7.0, 8.0)
    assert (config.min_nodes, config.max_nodes) == (2, 3)
    assert (command, arguments) == (sys.executable, ["-u", SCRIPT, "--more"])


def test_the_environment_cannot_name_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_RESTART_POLICY", "medium")
    with pytest.raises(ConfigError, match="medium"):
        run.parse_args([SCRIPT])


BACK_ENDS = [
    ([], "c10d", "localhost:0"),
    (["--standalone"], "c10d", "localhost:0"),
    (["--nnodes=2"], "static", "127.0.0.1:29500"),
    (["--master-port=1"], "static", "127.0.0.1:1"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=h:1"], "etcd", "h:1"),
    (["--restart-policy=soft"], "lighthouse", ""),
    (["--restart-policy=soft", "--standalone"], "lighthouse", ""),
    (["--restart_policy=soft-replace", "--nnodes=2", "--rdzv-endpoint=h"], "lighthouse", "h"),
    (["--restart-policy=soft", "--rdzv-backend=c10d", "--rdzv-endpoint=h"], "c10d", "h"),
    (["--restart-policy=soft", "--rdzv-backend=static"], "c10d", "localhost:0"),
]


@pytest.mark.parametrize(("arguments", "back_end", "endpoint"), BACK_ENDS)
def test_the_back_end_follows_from_the_policy(
    arguments: list[str], back_end: str, endpoint: str
) -> None:
    config, *_ = run.config_from_args(run.parse_args([*arguments, SCRIPT]))
    assert (config.rdzv_backend, config.rdzv_endpoint) == (back_end, endpoint)


def test_a_standalone_run_has_one_node_of_its_range() -> None:
    arguments = ["--restart-policy=soft", "--standalone", "--nnodes=1:4", SCRIPT]
    config, *_ = run.config_from_args(run.parse_args(arguments))
    assert (config.min_nodes, config.max_nodes) == (1, 1)


def test_a_node_rank_is_for_the_lighthouse_too() -> None:
    soft = ["--restart-policy=soft", "--nnodes=2", "--rdzv-endpoint=h:1"]
    config, *_ = run.config_from_args(run.parse_args([*soft, "--node-rank=0", SCRIPT]))
    assert config.rdzv_configs["rank"] == 0
    config, *_ = run.config_from_args(run.parse_args([*soft, SCRIPT]))
    assert "rank" not in config.rdzv_configs


def _same_place(observed: dict[str, Any]) -> dict[str, Any]:
    return json.loads(re.sub(r"/(torchrun|ours)/", "/", json.dumps(observed)))


def _differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Each place at which two nested values differ."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs else [f"{where}: {ours!r} instead of {theirs!r}"]
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        found += _differences(ours.get(key), theirs.get(key), f"{where}/{key}")
    return found
