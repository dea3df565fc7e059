"""Tests that both services run with what `requirements-services.txt` installs: without torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.programs import Program
from support.running import ROOT
from support.source_copy import copy_sources

from torchft_svc.coordination import ManagerClient
from torchft_svc.rpc.channel import open_channel

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
REQUIREMENTS = ROOT / "requirements-services.txt"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
# From a registry that answers slowly.
INSTALL_S = 400.0
CALL_S = 20.0
# What pip says if it could not even connect to a registry.
UNREACHABLE = "after connection broken by"
# The package under test must be the installed one, and nothing of the tests' environment.
ALONE = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that has what the services' image has."""
    folder = tmp_path_factory.mktemp("services")
    venv.create(folder / "image", with_pip=False)
    python = str(folder / "image" / "bin" / "python")
    _skip_without_registry(folder / "one")
    for words in (
        [*CONSTRAINTS, "-r", str(REQUIREMENTS)],
        ["--no-deps", str(copy_sources(folder / "sources"))],
    ):
        done = _pip("--python", python, "install", *words)
        assert done.returncode == 0, done.stdout
    return folder / "image"


def _skip_without_registry(folder: Path) -> None:
    """Skip if no registry can be reached; any other failure of pip is a failure of the test."""
    words = ["--no-cache-dir", "--no-deps", "--retries", "1", "--timeout", "30"]
    done = _pip("download", *words, "--dest", str(folder), "click")
    if done.returncode and UNREACHABLE in done.stdout:
        pytest.skip("no package registry can be reached")


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pip", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )


def ask(image: Path, script: str) -> str:
    """What a new interpreter of the image says to ``script``."""
    done = subprocess.run(
        [image / "bin" / "python", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | ALONE,
        cwd=image,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def required() -> list[str]:
    """The lines of the file, without its comments."""
    lines = REQUIREMENTS.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_it_asks_for_what_the_package_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert found
    assert set(required()) <= set(re.findall(r'"(.+)"', found[1]))


def test_it_has_what_the_services_import_and_no_more(image: Path) -> None:
    script = """
import importlib.metadata, importlib.util, sys
import torchft_svc.lighthouse_server.cli, torchft_svc.manager_server.cli
assert torchft_svc.__file__.startswith(sys.prefix), torchft_svc.__file__
print(*[name for name in ("torch", "numpy") if importlib.util.find_spec(name)], end="; ")
homes = importlib.metadata.packages_distributions()
loaded = {name.split(".")[0] for name in sys.modules} | {
    ".".join(name.split(".")[:2]) for name in sys.modules
}
print(*sorted({each for name in loaded for each in homes.get(name, ())}))
"""
    too_much, _, imported = ask(image, script).partition("; ")
    assert not too_much
    names = {re.split(r"[<>=]", line)[0] for line in required()}
    assert names <= set(imported.split()), "each requirement is imported by a service"


def test_its_size_is_what_the_documents_say(image: Path) -> None:
    (packages,) = image.glob("lib/python*/site-packages")
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 1e6
    found = re.search(
        r"all that they need: (\d+) MB", (ROOT / "docs" / "operations.md").read_text()
    )
    assert found
    assert 0.5 * float(found[1]) < size < 1.5 * float(found[1]), f"{size:.0f} MB"


@pytest.fixture
def services(image: Path) -> Iterator[tuple[str, str, Path]]:
    """The addresses of a lighthouse and a manager of the image, and the folder of its commands."""
    commands = image / "bin"
    with ExitStack() as stack:

        def start(*words: str) -> str:
            command = [str(commands / words[0]), *words[1:]]
            program = stack.enter_context(Program(command, ALONE))
            return program.wait_for("listening on ").rpartition(" ")[2]

        lighthouse = start("lighthouse", "--bind", "127.0.0.1:0", "--min-replicas", "1")
        group = ["--replica-name", "small", "--store-address", "127.0.0.1:1"]
        manager = start(
            "torchft-manager", "--lighthouse", lighthouse, "--bind", "127.0.0.1:0", *group
        )
        yield lighthouse, manager, commands


def test_both_services_start_and_answer(services: tuple[str, str, Path]) -> None:
    lighthouse, manager, commands = services
    for address in (lighthouse, manager):
        with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    limit = timedelta(seconds=CALL_S)
    with ManagerClient(manager, limit) as client:
        quorum = client._quorum(0, 0, "", shrink_only=False, timeout=limit)
        assert (quorum.replica_rank, quorum.replica_world_size) == (0, 1)
        assert client.should_commit(0, 0, should_commit=True, timeout=limit)
    status = subprocess.run(
        [commands / "lighthouse", "status", "--lighthouse", lighthouse],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | ALONE,
        check=False,
    )
    assert status.returncode == 0, status.stderr
    assert "1 in the quorum" in status.stdout
    assert "small:" in status.stdout
    doctor = subprocess.run(
        [commands / "lighthouse", "doctor", "--lighthouse", lighthouse],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | ALONE,
        check=False,
    )
    assert "torch          it is not installed" in doctor.stdout, doctor.stdout + doctor.stderr
    assert "ok       leader" in doctor.stdout
