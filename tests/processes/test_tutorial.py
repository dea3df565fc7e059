"""Tests the tutorial: every block of it, in its order, from an empty folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.documents import Page
from support.programs import Program
from support.running import ROOT

pytest.importorskip("starlette", reason="the extra `dashboard` is not installed")
pytestmark = pytest.mark.processes

# Two trainers import torch at the same time, on few cores that may be busy.
OUTPUT_S = 110.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    grpc, http = free_port(), free_port()
    # A reader wants to watch; the steps must still last until a trainer has imported torch.
    changes = {"29510": str(grpc), "29580": str(http), "sleep(0.05)": "sleep(0.02)"}
    # On a busy machine one of two trainers is ready long before the other one.
    changes["--min-replicas 1"] = "--min-replicas 1 --startup-wait-ms 5000"
    page = Page(ROOT / "docs" / "tutorial.md", tmp_path, changes)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    looks = {"7. See what it has cost": lambda: check_ledger(f"localhost:{grpc}", http)}
    with Program(page.command, {"PATH": path, "REPLICA_GROUP_ID": ""}) as shell:
        assert page.follow(shell, OUTPUT_S, looks) > 8
        assert shell.wait(OUTPUT_S) == 0, shell.lines


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_ledger(lighthouse: str, http: int) -> None:
    """Terminal, JSON, metrics and dashboard show the same numbers."""
    whole = json.loads(ask_lighthouse(lighthouse, "--json"))
    records = whole["incidents"]
    assert [record["kind"] for record in records] == ["joined", "lost", "joined"]
    served = json.loads(fetch(http, "/api/v1/jobs/default/incidents"))
    assert served["incidents"] == records
    check_metrics(fetch(http, "/metrics"), records, whole["goodput"]["ratio"])
    rows = [line for line in ask_lighthouse(lighthouse).splitlines() if ":" in line][2:]
    for row, record in zip(rows, records, strict=False):
        assert record["cause"] in row
        for part in ("decided_after_s", "first_commit_after_s"):
            assert f" {record[part]:.2f} " in row
    if CHROMIUM is not None:
        check_dashboard(http, records)


def ask_lighthouse(lighthouse: str, *flags: str) -> str:
    command = [sys.executable, "-m", "torchft_svc.lighthouse_server", "incidents"]
    command += ["--lighthouse", lighthouse, *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def fetch(http: int, path: str) -> str:
    with urllib.request.urlopen(f"http://localhost:{http}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def check_metrics(text: str, records: list[Mapping[str, Any]], goodput: float) -> None:
    def total(name: str) -> float:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    assert total("torchft_steps_discarded_total") == sum(r["steps_discarded"] for r in records)
    assert total("torchft_heals_total") > 0
    assert total("torchft_heals_total") == sum(r["healed_s"] is not None for r in records)
    assert total("torchft_heal_bytes_total") == sum(r["healed_bytes"] or 0 for r in records)
    # The job trains on between both questions.
    assert total("torchft_goodput_ratio") == pytest.approx(goodput, abs=0.05)


def check_dashboard(http: int, records: list[Mapping[str, Any]]) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://localhost:{http}/#/job/default")
        page.wait_for_selector("ul.incidents li")
        shown = page.locator("ul.incidents > li").all_inner_texts()
        browser.close()
    assert len(shown) == len(records)
    for text, record in zip(reversed(shown), records, strict=True):
        assert record["cause"] in text
        assert seconds_after("deciding", text) == pytest.approx(
            record["decided_after_s"], rel=0.1, abs=0.0006
        )
        is_discarded = re.search(r"(\d+) steps? discarded", text)
        assert int(is_discarded[1] if is_discarded else 0) == record["steps_discarded"]


def seconds_after(word: str, text: str) -> float:
    found = re.search(rf"{word} ([\d.]+) (ms|s)\b", text)
    assert found is not None, text
    return float(found[1]) / (1000 if found[2] == "ms" else 1)
