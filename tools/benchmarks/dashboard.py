"""Measures the HTTP side of a lighthouse with a thousand groups: what it costs to be scraped and
read, and when the page is there."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx

from tools.benchmarks.fleet import Fleet, fleet
from tools.benchmarks.options import json_option
from tools.benchmarks.processes import START_TIMEOUT_S, start_lighthouse
from tools.benchmarks.table import Column, Result, Value, hand_over
from torchft_svc.core.quorum.types import DEFAULT_JOB

_PAUSE_S = 3.0
_NUM_REQUESTS = 20
_SCRAPE_S = 5.0
_PAINTED_MS = 30_000
_COLUMNS = (
    Column("groups", "groups", 0),
    Column("what", "what"),
    Column("cpu_percent", "lighthouse CPU %", 1),
    Column("cpu_ratio", "of that without HTTP", 2),
    Column("update_ms", "server ms an update", 1),
    Column("update_kb", "kB an update", 1),
    Column("median_ms", "median ms", 1),
    Column("worst_ms", "worst ms", 1),
)
# The page has painted something, and then all groups.
_PAINTS = """async (groups) => {
  const paint = () => performance.getEntriesByName('first-contentful-paint')[0]?.startTime;
  while (document.querySelectorAll('.map i').length < groups || !paint())
    await new Promise(requestAnimationFrame);
  return [paint(), performance.now()];
}"""


class _Reader(threading.Thread):
    """Reads the event stream of the job, and counts what comes."""

    def __init__(self, url: str) -> None:
        super().__init__(name="reader", daemon=True)
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=START_TIMEOUT_S)
        self.num_updates = 0
        self.num_bytes = 0

    def run(self) -> None:
        query = {"job": DEFAULT_JOB}
        with (
            contextlib.suppress(httpx.TransportError),
            self._client.stream("GET", "/api/v1/events", params=query) as response,
        ):
            for line in response.iter_lines():
                self.num_bytes += len(line)
                self.num_updates += line == "event: patch"

    def close(self) -> None:
        """End the stream with its connection, and the thread with that."""
        self._client.close()


def _readers(
    found: Fleet, url: str, count: int, seconds: float, idle_percent: float
) -> dict[str, object]:
    """Train with ``count`` readers, which cost what is above the CPU time without any."""
    readers = [_Reader(url) for _ in range(count)]
    for reader in readers:
        reader.start()
    time.sleep(_PAUSE_S)  # the whole document is there, once for each
    before = [(reader.num_updates, reader.num_bytes) for reader in readers]
    cpu_percent = found.train(seconds)["cpu_percent"]
    now = [(reader.num_updates, reader.num_bytes) for reader in readers]
    for reader in readers:
        reader.close()
    num_updates = sum(after[0] - first[0] for after, first in zip(now, before, strict=True))
    num_bytes = sum(after[1] - first[1] for after, first in zip(now, before, strict=True))
    looks = num_updates / max(1, count) / 2  # one for the overview, one for the job
    return {
        "what": f"{count} reader{'s' * (count != 1)}",
        "cpu_percent": cpu_percent,
        "update_ms": (cpu_percent - idle_percent) * 10 * seconds / looks if looks else None,
        "update_kb": num_bytes / 1000 / num_updates * 2 if num_updates else None,
    }


def _scraped(found: Fleet, url: str, seconds: float) -> float:
    """Train while the metrics and the whole job are read every few seconds; the CPU time in percent
    of a core."""
    is_over = threading.Event()

    def scrape() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=START_TIMEOUT_S) as client:
            while True:
                for path in ("/metrics", f"/api/v1/jobs/{DEFAULT_JOB}"):
                    client.get(path).raise_for_status()
                if is_over.wait(_SCRAPE_S):
                    return

    with ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            cpu_percent = found.train(seconds)["cpu_percent"]
        finally:
            is_over.set()
        scraping.result()
    return cpu_percent


def _without_http(groups: int, processes: int, flags: list[str], seconds: float) -> float:
    with (
        start_lighthouse(min_replicas=groups) as lighthouse,
        fleet(lighthouse, groups, processes, flags) as found,
    ):
        found.start()
        time.sleep(_PAUSE_S)
        return found.train(seconds)["cpu_percent"]


def _requests(url: str, path: str) -> dict[str, object]:
    times = []
    with httpx.Client(base_url=url, trust_env=False, timeout=START_TIMEOUT_S) as client:
        for _ in range(_NUM_REQUESTS):
            began_at = time.perf_counter()
            client.get(path).raise_for_status()
            times.append(1000 * (time.perf_counter() - began_at))
            time.sleep(0.1)
    return {
        "what": f"GET {path}",
        "median_ms": statistics.median(times),
        "worst_ms": max(times),
    }


def _paints(url: str, groups: int, repeat: int) -> Iterator[dict[str, object]]:
    """The times until a browser has painted the page, and all groups; none without a browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        return
    firsts, wholes = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repeat):
            page = browser.new_page()
            page.set_default_timeout(_PAINTED_MS)
            page.goto(f"{url}/#/job/{DEFAULT_JOB}")
            first, whole = page.evaluate(_PAINTS, groups)
            firsts.append(first)
            wholes.append(whole)
            page.close()
        browser.close()
    for what, times in (("first paint", firsts), ("all groups painted", wholes)):
        yield {"what": what, "median_ms": statistics.median(times), "worst_ms": max(times)}


@click.command(context_settings={"show_default": True})
@click.option("--groups", type=click.IntRange(61, 5000), default=1000, help="Groups of the job.")
@click.option("--readers", type=click.IntRange(1, 200), multiple=True, default=(1, 20),
              help="Readers of the event stream; may be repeated.")  # fmt: skip
@click.option("--steps-per-s", type=click.FloatRange(0.1, 1000.0), default=10.0,
              help="How fast a group trains.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.1), default=15.0, help="Of each measurement.")
@click.option("--repeat", type=click.IntRange(1), default=5, help="How often the page is opened.")
@click.option("--load-processes", type=click.IntRange(1, 16), default=2,
              help="Processes that the groups are spread over.")  # fmt: skip
@json_option
def main(
    groups: int, readers: tuple[int, ...], steps_per_s: float, seconds: float, repeat: int,
    load_processes: int, json_file: Path | None,
) -> None:  # fmt: skip
    """A dashboard of a job with many groups, whose trainers are simulated."""
    settings: dict[str, Value] = {"steps_per_s": steps_per_s, "seconds": seconds, "repeat": repeat}
    result = Result("dashboard", "The dashboard of a job with many groups", _COLUMNS, settings)
    result.notes.append("trainers, readers and browser run on the same cores as the lighthouse")
    flags = [f"--step-s={1 / steps_per_s}", "--steady"]
    without = [_without_http(groups, load_processes, flags, seconds)]
    with (
        TemporaryDirectory() as folder,
        start_lighthouse(
            min_replicas=groups, http_bind="127.0.0.1:0", event_log=f"{folder}/events.jsonl"
        ) as lighthouse,
        fleet(lighthouse, groups, load_processes, flags) as found,
    ):
        url = lighthouse.read_line(START_TIMEOUT_S).rpartition(" ")[2]
        found.start()
        time.sleep(_PAUSE_S)
        scraped_percent = _scraped(found, url, seconds)
        idle_percent = found.train(seconds)["cpu_percent"]
        rows: list[dict[str, Any]] = [
            {"what": "no reader", "cpu_percent": idle_percent},
            *(_readers(found, url, count, seconds, idle_percent) for count in readers),
            *(_requests(url, path) for path in (f"/api/v1/jobs/{DEFAULT_JOB}", "/metrics")),
            *_paints(url, groups, repeat),
        ]
    without.append(_without_http(groups, load_processes, flags, seconds))
    off_percent = statistics.mean(without)  # before and after: a machine changes meanwhile
    scraped = {"what": f"scraped each {_SCRAPE_S:g} s", "cpu_percent": scraped_percent}
    rows = [{"what": "without HTTP", "cpu_percent": off_percent}, scraped, *rows]
    for row in rows[:3]:
        row["cpu_ratio"] = row["cpu_percent"] / off_percent
    result.rows += [{"groups": groups, **row} for row in rows]
    hand_over(result, json_file)


if __name__ == "__main__":
    main()
