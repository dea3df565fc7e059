"""Tests the metrics of trainers: real training, read at a port and in a program's registry."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from support.metrics import Page
from support.running import environment
from support.training import Trainer, in_step, lighthouse, together, trainers

from torchft_svc.client.manager import Manager
from torchft_svc.errors import AddressError, ConfigError

NEEDED = {"state_dict": dict, "load_state_dict": print}


def fetch(port: int) -> Page:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return Page(answer.read())


def test_a_programs_registry_shows_its_trainers() -> None:
    registry = CollectorRegistry(auto_describe=True)
    Gauge("mine", "Something of the program.", registry=registry).set(7)
    with (
        lighthouse() as address,
        trainers(address, 2, metrics_registry=registry) as (a, b),
    ):
        in_step(3, a, b)
        page = Page(generate_latest(registry))
        labels = [{"job": "default", "group": name, "rank": "0"} for name in "ab"]
        for each, trainer in zip(labels, (a, b), strict=True):
            assert page.value("torchft_trainer_step", **each) == trainer.manager.current_step()
            assert page.value("torchft_trainer_contributing_groups", **each) == 2
            steps = page.value("torchft_trainer_steps_total", **each, outcome="committed")
            assert steps >= 3
            assert page.value("torchft_phase_seconds_total", **each, phase="committed") > 0
            assert page.value("torchft_phase_seconds_total", **each, phase="waiting") > 0
        assert page.value("mine") == 7
        together(b.manager.shutdown)
        page = Page(generate_latest(registry))
        assert page.value("torchft_trainer_step", **labels[0]) >= 3
        with pytest.raises(KeyError):
            page.value("torchft_trainer_step", **labels[1])
    assert Page(generate_latest(registry)).names() == {"mine"}


def test_a_heal_is_counted() -> None:
    registry = CollectorRegistry()
    with lighthouse() as address, trainers(address, 1) as (a,):
        a.until(2)
        with Trainer(address, "b", 1, metrics_registry=registry) as b:
            in_step(4, a, b)
            page = Page(generate_latest(registry))
            labels = {"job": "default", "group": "b", "rank": "0"}
            assert page.value("torchft_trainer_heals_total", **labels) == 1
            assert page.value("torchft_trainer_heal_bytes_total", **labels) > 0
            assert page.value("torchft_phase_seconds_total", **labels, phase="healing") > 0


def test_a_port_serves_the_metrics_and_is_free_afterwards(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHFT_METRICS_PORT", "0")
    caplog.set_level("INFO", "torchft_svc")
    with lighthouse() as address, trainers(address, 2) as (a, b):
        in_step(2, a, b)
        port = int(re.findall(r"metrics are served at port (\d+)", caplog.text)[0])
        page = fetch(port)
        groups = [dict(labels)["group"] for name, labels in page.samples if name.endswith("_step")]
        assert sorted(groups) == ["a", "b"]  # one server for the process
        monkeypatch.setenv("TORCHFT_METRICS_PORT", str(port))
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(AddressError, match="cannot be bound for metrics"):
            Manager(lighthouse_addr=address, replica_id="c", in_process=True, **NEEDED)
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("value", ["nonsense", "-1", "65536"])
def test_a_port_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCHFT_METRICS_PORT", value)
    with (
        lighthouse() as address,
        pytest.raises(ConfigError, match=f"TORCHFT_METRICS_PORT='{value}'"),
    ):
        Manager(lighthouse_addr=address, replica_id="c", in_process=True, **NEEDED)


@pytest.mark.processes
def test_nothing_is_imported_unless_it_is_switched_on() -> None:
    program = """
import sys
from torchft_svc import Manager
import torchft_svc.lighthouse_server.cli, torchft_svc.manager_server.cli
from torchft_svc.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
manager = Manager(
    state_dict=dict, load_state_dict=print, lighthouse_addr=server.address(), in_process=True
)
manager.start_quorum()
assert manager.should_commit()
manager.shutdown()
server.shutdown()
foreign = ("prometheus_client", "opentelemetry", "starlette")
print([name for name in sys.modules if name.partition(".")[0] in foreign])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.stdout == "[]\n"
