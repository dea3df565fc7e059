"""Tests the checks of this machine with limits that are really too low."""

from __future__ import annotations

import importlib.metadata
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from torchft_svc.doctor import machine
from torchft_svc.doctor.findings import Level
from torchft_svc.doctor.machine import (
    check_files,
    check_memory,
    check_shared_memory,
    check_versions,
)


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
@pytest.mark.parametrize(("num_groups", "level"), [(1, Level.WARNING), (100, Level.PROBLEM)])
def test_too_few_open_files(num_groups: int, level: Level) -> None:
    (found,) = check_files(num_groups)
    assert found.level is level
    assert found.found.startswith("200 are allowed, about ")
    assert found.advice.startswith("ulimit -n ")


def test_enough_open_files() -> None:
    (found,) = check_files(1)
    assert found.level is Level.OK


def test_shared_memory() -> None:
    (found,) = check_shared_memory()
    expected = psutil.disk_usage("/dev/shm").free >= machine._LEAST_SHARED  # noqa: S108
    assert (found.level is Level.OK) is expected
    (missing,) = check_shared_memory(Path("/no/such/folder"))
    assert missing.level is Level.PROBLEM
    assert "No such file or directory" in missing.found


def test_a_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LEAST_SHARED", 1 << 60)
    (found,) = check_shared_memory()
    assert found.level is Level.WARNING
    assert "--shm-size" in found.advice


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    (unknown,) = check_memory(None)
    assert unknown.level is Level.OK
    (fits,) = check_memory(1.0)
    assert fits.level is Level.OK
    (too_large,) = check_memory(1e15)
    assert too_large.level is Level.PROBLEM
    assert "holds 1000 TB once more" in too_large.found
    monkeypatch.setattr(machine, "available_bytes", lambda: None)
    (not_reported,) = check_memory(1.0)
    assert not_reported.level is Level.UNCHECKED


def test_versions_of_what_is_installed() -> None:
    (found,) = check_versions()
    assert found.level is Level.OK
    assert f"torch {importlib.metadata.version('torch')}" in found.found


def test_an_environment_without_torch_or_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    true_version = importlib.metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.9.0rc1" if name == "grpcio" else true_version(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    old, missing = check_versions()
    assert old.level is Level.PROBLEM
    assert old.advice == "install a newer grpcio (at least 1.66)"
    assert missing.level is Level.UNCHECKED
    assert missing.check == "torch"
