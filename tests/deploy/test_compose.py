"""Tests docker-compose.yml without containers: its very commands run here, on loopback."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import Program
from support.running import ROOT, eventually, steady_address

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
# Those of ours; the others are images that a profile adds.
SERVICES = {name: service for name, service in ALL.items() if "build" in service}
START_S = 60.0
PROMETHEUS = ROOT / "deploy" / "prometheus"


def local_text(text: str, ports: dict[str, str], folder: Path, ready: Path) -> str:
    """A command or value with hosts, ports and folders of this machine."""
    for name in SERVICES:
        text = re.sub(rf"(?<![\w-]){name}(?=:\d|$)", "127.0.0.1", text)
    text = re.sub(r"\b0\.0\.0\.0\b", "127.0.0.1", text)
    text = re.sub(r"\b29\d{3}\b", lambda match: ports[match[0]], text)
    text = re.sub(r"\blocalhost\b", "127.0.0.1", text)
    return text.replace("/checkpoints", str(folder)).replace("/tmp/ready", str(ready))  # noqa: S108


def free_ports() -> dict[str, str]:
    """A free port for each that the file names."""
    names = sorted(set(re.findall(r"\b29\d{3}\b", (ROOT / "docker-compose.yml").read_text())))
    ports: set[str] = set()
    while len(ports) < len(names):
        ports.add(steady_address().rpartition(":")[2])
    return dict(zip(names, ports, strict=True))


def in_order_of_need() -> list[str]:
    order: list[str] = []
    while len(order) < len(SERVICES):
        ready = [
            name
            for name, service in SERVICES.items()
            if name not in order and set(service.get("depends_on", ())) <= set(order)
        ]
        assert ready, "services depend on one another in a circle"
        order += ready
    return order


def test_there_is_a_lighthouse_three_trainers_and_one_manager_of_its_own() -> None:
    programs = {name: shlex.split(service["command"])[0] for name, service in SERVICES.items()}
    assert programs == {
        "lighthouse": "lighthouse",
        "trainer-0": "python",
        "trainer-1": "python",
        "manager-2": "torchft-manager",
        "trainer-2": "python",
    }


def test_every_file_that_the_image_copies_is_there() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignored, f"{name} does not reach the builder"


def test_services_run_from_the_image_without_torch() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert stages == ["base", "services", "trainer"], "the last one is the default"
    for service in SERVICES.values():
        program = shlex.split(service["command"])[0]
        small = {"context": ".", "target": "services"}
        assert service["build"] == ("." if program == "python" else small)


def test_the_services_image_has_the_extra_for_the_dashboard() -> None:
    lines = (ROOT / "requirements-dashboard.txt").read_text().splitlines()
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^dashboard = \[(.*)\]$", text, re.MULTILINE)
    assert found
    assert [line for line in lines if line[0] != "#"] == re.findall(r'"(.+?)"', found[1])


def test_every_service_has_a_health_check_that_others_wait_for() -> None:
    for name, service in ALL.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert set(service.get("depends_on", {})) <= ALL.keys()
        conditions = {each["condition"] for each in service.get("depends_on", {}).values()}
        assert conditions <= {"service_healthy"}
        for volume in service.get("volumes", []):
            place = volume.partition(":")[0]
            assert place in COMPOSE["volumes"] or (ROOT / place).exists(), place
    assert {name for name in ALL if name not in SERVICES} == {"prometheus", "grafana"}
    assert all(ALL[name]["profiles"] == ["monitoring"] for name in ("prometheus", "grafana"))


def test_prometheus_asks_the_lighthouse() -> None:
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (job,) = settings["scrape_configs"]
    assert job["honor_labels"], "our label `job` is that of a training"
    (target,) = [each for static in job["static_configs"] for each in static["targets"]]
    words = shlex.split(SERVICES["lighthouse"]["command"])
    assert words[words.index("--http-bind") + 1].partition(":")[2] == target.partition(":")[2]
    assert words[words.index("--http-host") + 1] == target.partition(":")[0]
    assert settings["rule_files"] == ["alerts*.yml"]  # none is no error


@pytest.mark.processes
def test_compose_understands_the_file() -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("needs docker-compose (Debian: apt-get install docker-compose)")
    command = [program, "--profile", "monitoring", "config", "--services"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == ALL.keys()


@pytest.mark.processes
def test_its_commands_train_together(tmp_path: Path) -> None:
    ports = free_ports()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    programs: dict[str, Program] = {}
    with ExitStack() as stack:
        for name in in_order_of_need():
            service = SERVICES[name]
            places = (ports, tmp_path, tmp_path / f"{name}-ready")
            environment = {
                key: local_text(value, *places)
                for key, value in service.get("environment", {}).items()
            }
            program, *arguments = shlex.split(service["command"])
            is_warm = program == "python"  # it imports torch
            command = [sys.executable if is_warm else program]
            command += [local_text(word, *places) for word in arguments]
            started = Program(command, environment | {"PATH": path}, warm=is_warm)
            programs[name] = stack.enter_context(started)
            if name in ("lighthouse", "manager-2"):
                check = healthy(service, environment, places)
                eventually(check, START_S, name)
        for name in ("trainer-0", "trainer-1", "trainer-2"):
            programs[name].wait_for("groups 3")
            places = (ports, tmp_path, tmp_path / f"{name}-ready")
            eventually(healthy(SERVICES[name], {}, places), START_S, name)
        programs["manager-2"].signal(signal.SIGKILL)
        programs["manager-2"].wait()
        places = (ports, tmp_path, tmp_path)
        assert not healthy(SERVICES["manager-2"], {}, places)()


def healthy(
    service: dict[str, Any], environment: dict[str, str], places: tuple[dict[str, str], Path, Path]
) -> Callable[[], bool]:
    """The health check of the service, on this machine."""
    words = [local_text(word, *places) for word in service["healthcheck"]["test"][1:]]
    if words[0] == "python":
        words[0] = sys.executable
    variables = {
        key: local_text(value, *places) for key, value in service.get("environment", {}).items()
    }

    def check() -> bool:
        return not subprocess.run(
            words,
            env=os.environ | variables | environment,
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode

    return check
