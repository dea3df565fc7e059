"""Tests docker-compose.yml without containers: its very commands run here, on loopback."""

from __future__ import annotations

import os
import re
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.programs import Program
from support.running import ROOT, steady_address

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def local_text(text: str, ports: dict[str, str], folder: Path) -> str:
    """A command or value with hosts, ports and folders of this machine."""
    for name in SERVICES:
        text = re.sub(rf"(?<![\w-]){name}(?=:\d|$)", "127.0.0.1", text)
    text = re.sub(r"\b0\.0\.0\.0\b", "127.0.0.1", text)
    text = re.sub(r"\b29\d{3}\b", lambda match: ports[match[0]], text)
    return text.replace("/checkpoints", str(folder))


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


@pytest.mark.processes
def test_its_commands_train_together(tmp_path: Path) -> None:
    ports = free_ports()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    programs: dict[str, Program] = {}
    with ExitStack() as stack:
        for name in in_order_of_need():
            service = SERVICES[name]
            environment = {
                key: local_text(value, ports, tmp_path)
                for key, value in service.get("environment", {}).items()
            }
            program, *arguments = shlex.split(service["command"])
            is_warm = program == "python"  # it imports torch
            command = [sys.executable if is_warm else program]
            command += [local_text(word, ports, tmp_path) for word in arguments]
            started = Program(command, environment | {"PATH": path}, warm=is_warm)
            programs[name] = stack.enter_context(started)
            if name in ("lighthouse", "manager-2"):
                programs[name].wait_for("listening on")
        for name in ("trainer-0", "trainer-1", "trainer-2"):
            programs[name].wait_for("groups 3")
