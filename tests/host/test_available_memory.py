"""How much memory a process may still use."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from torchft_svc.host import available_memory
from torchft_svc.host.available_memory import available_bytes, total_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not report it")


def test_it_is_below_what_the_machine_has() -> None:
    available = available_bytes()
    assert available is not None
    total = total_bytes()
    assert total is not None
    assert 0 < available < total <= psutil.virtual_memory().total


def test_a_container_has_no_more_than_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("1000000\n")
    used.write_text("400000\n")
    monkeypatch.setattr(available_memory, "_CONTAINER_LIMITS", ((limit, used),))
    assert available_bytes() == 600_000
    assert total_bytes() == 1_000_000
    used.write_text("1400000\n")
    assert available_bytes() == 0
    limit.write_text("max\n")
    unlimited = available_bytes()
    assert unlimited is not None
    assert unlimited > 600_000


def test_a_system_that_does_not_report_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(available_memory, "_MEMINFO", tmp_path / "none")
    assert available_bytes() is None
    assert total_bytes() is None
