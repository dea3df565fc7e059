"""Tests the metrics of a lighthouse: what a page shows, and what it costs."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from support.bounds import again_if_late, check
from support.metrics import Page

from torchft_svc.core.launch.launched_run import Cause, ReportRunClosed, ReportWorld
from torchft_svc.core.launch.world import Node, World
from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy
from torchft_svc.core.quorum.lighthouse.incidents import Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.jobs import ReportEviction, ReportLoss, ReportStraggler
from torchft_svc.core.quorum.lighthouse.lighthouse import Publish
from torchft_svc.core.quorum.types import Member, Quorum, QuorumConfig
from torchft_svc.errors import NotLeader, RequestRefused
from torchft_svc.lighthouse_server.counts import AGAIN, FIRST, Counts, IncidentCounts
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.metrics import LighthouseMetrics
from torchft_svc.rpc.health import Readiness
from torchft_svc.telemetry import catalog
from torchft_svc.telemetry.exposition import (
    SAMPLES_AT_ONCE,
    Family,
    many_values,
    page_in_pieces,
    values,
)
from torchft_svc.telemetry.histogram import DurationHistogram

MAX_SCRAPE_S = 0.1


def member(name: str, **fields: int) -> Member:
    return Member(replica_id=name, address="h:1", store_address="h:2", **fields)


def quorum(quorum_id: int, *names: str) -> Publish:
    members = tuple(member(name) for name in names)
    return Publish("j", Quorum(quorum_id=quorum_id, participants=members))


async def _trained(num_groups: int) -> LighthouseDriver:
    """A lighthouse whose job has one quorum of so many groups."""
    driver = LighthouseDriver(QuorumConfig(min_replicas=num_groups, join_timeout_s=30.0))
    asking = [driver.quorum("j", member(f"g{n:04}:1", step=7), 20.0) for n in range(num_groups)]
    await asyncio.gather(*asking)
    return driver


def test_a_page_shows_the_copies_of_jobs_that_have_some() -> None:
    async def run() -> tuple[Page, Page]:
        driver = await _trained(2)
        before, _ = await LighthouseMetrics(driver).page()
        copies = tuple(HeldCopy(step=5, group_rank=r, group_world_size=2) for r in range(2))
        driver.record_copies("j", "holder", copies)
        driver.record_copies("j", "another", ())
        after, _ = await LighthouseMetrics(driver).page()
        driver.close()
        return Page(before), Page(after)

    before, after = asyncio.run(run())
    assert not {name for name in before.names() if "_copy" in name}
    assert after.value("torchft_copy_holders", job="j") == 2
    assert after.value("torchft_copy_step", job="j") == 5
    assert 0 <= after.value("torchft_seconds_since_copy", job="j") < 20


def test_a_page_shows_jobs_and_groups() -> None:
    async def run() -> Page:
        driver = await _trained(2)
        for name in ("s:1", "s:2"):
            driver._core.jobs.opened_by_spare("j", name, time.monotonic())
        driver._core.jobs.request("j", member("s:2"), 99, time.monotonic())
        driver.rpc_errors.know_methods(["Quorum"])
        driver.rpc_errors.count("Quorum", "ABORTED")
        driver.rpc_errors.count("../etc/passwd", "UNIMPLEMENTED")
        page, content_type = await LighthouseMetrics(driver).page()
        assert content_type.startswith("text/plain")
        driver.close()
        return Page(page)

    shown = asyncio.run(run())
    assert shown.value("torchft_groups", job="j", state="in_quorum") == 2
    assert shown.value("torchft_groups", job="j", state="hung") == 0
    assert shown.value("torchft_groups_expected", job="j") == 2
    assert shown.value("torchft_spares", job="j", state="ready") == 1
    assert shown.value("torchft_spares", job="j", state="starting") == 1
    assert shown.value("torchft_places", job="j") == 2
    assert shown.value("torchft_committed_step", job="j") == 7
    assert shown.value("torchft_seconds_since_commit", job="j") < 20
    assert shown.value("torchft_group_silence_seconds", job="j", group="g0000") < 20
    assert shown.value("torchft_quorum_changes_total", job="j", reason=FIRST) == 1
    assert shown.value("torchft_quorum_duration_seconds_count", job="j") == 1
    assert 0 <= shown.value("torchft_goodput_ratio", job="j") <= 1
    assert shown.value("torchft_lost_seconds_total", job="j", cause="startup") >= 0
    assert 0 < shown.value("torchft_quorum_duration_seconds_sum", job="j") < 20
    assert shown.value("torchft_leader") == 1
    assert shown.value("torchft_rpc_errors_total", method="Quorum", code="ABORTED") == 1
    assert shown.value("torchft_rpc_errors_total", method="unknown", code="UNIMPLEMENTED") == 1


@again_if_late
def test_a_page_of_a_thousand_groups_is_made_in_time() -> None:
    async def run() -> tuple[float, int]:
        driver = await _trained(1000)
        metrics = LighthouseMetrics(driver)
        began_at = time.perf_counter()
        page, _ = await metrics.page()
        took_s = time.perf_counter() - began_at
        driver.close()
        return took_s, page.count(b"\ntorchft_group_silence_seconds{")

    took_s, num_groups = asyncio.run(run())
    assert num_groups == 1000
    check("a page of 1000 groups", took_s, MAX_SCRAPE_S)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_page_in_pieces_is_what_prometheus_makes_at_once(accept: str) -> None:
    values_of = (0.1, 1e-9, 123456789.0, 1e17, math.inf, -math.inf, math.nan, -0.0)
    numbers = [(("j", f"g{number}"), float(number)) for number in range(2 * SAMPLES_AT_ONCE)]
    numbers += [(('a\\n"b"\n# TYPE', f"\u00fc{value}"), value) for value in values_of]
    odd = [(("# HELP", "a\n# TYPE"), 1.0)] * 2

    class All(Collector):
        def collect(self) -> list[Family]:
            families = [values(catalog.GROUP_SILENCE, numbers), values(catalog.RPC_ERRORS, odd)]
            return [*families, values(catalog.JOBS, []), values(catalog.LOST, odd)]

    registry = CollectorRegistry()
    registry.register(All())
    encode, content_type = choose_encoder(accept)
    parts = list(many_values(catalog.GROUP_SILENCE, numbers))
    assert len(parts) == 3
    parts = [*parts, values(catalog.RPC_ERRORS, odd), *many_values(catalog.JOBS, [])]
    parts += many_values(catalog.LOST, odd)
    pieces = page_in_pieces(parts, accept)
    for _ in parts:
        next(pieces)
    assert finish(pieces) == (encode(registry), content_type)


def test_only_the_leader_says_so() -> None:
    class Follower(Readiness):
        def check(self) -> None:
            raise NotLeader("other:1")

    async def run() -> Page:
        driver = LighthouseDriver(QuorumConfig())
        return Page((await LighthouseMetrics(driver, Follower()).page())[0])

    assert asyncio.run(run()).value("torchft_leader") == 0


def test_changes_are_counted_by_their_reason() -> None:
    counts = Counts(10)
    a, b, c, d = (f"{name}:1" for name in "abcd")
    counts.record_report(ReportLoss("j", a, "before any quorum"))
    counts.record_quorum(quorum(1, a, b, c), 1.0)
    counts.record_quorum(quorum(1, a, b, c), 1.0)
    counts.record_quorum(quorum(2, a, b, c), 1.0)
    counts.record_report(ReportLoss("j", a, "gone"))
    counts.record_quorum(quorum(3, b, c), 1.0)
    counts.record_report(ReportLoss("j", b, "drained", is_orderly=True))
    counts.record_quorum(quorum(4, c, a), 1.0)  # one left, one joined
    counts.record_quorum(quorum(5, c, a, d), 1.0)
    counts.record_report(ReportEviction("j", d, "it hangs"))
    counts.record_quorum(quorum(6, c, a), 1.0)
    counts.record_report(ReportStraggler("j", a, 6, (a,)))
    counts.record_quorum(quorum(7, c), 1.0)
    counts.record_quorum(quorum(8, d), 1.0)  # nobody has reported the loss of c
    changes = {FIRST: 1, AGAIN: 1, "lost": 2, "left": 1, "joined": 1, "evicted": 1, "left_out": 1}
    assert counts.jobs["j"].changes == changes
    assert dict(counts.jobs["j"].durations.buckets())["+Inf"] == 9


def test_the_worlds_of_a_run_after_the_first_one_are_restarts() -> None:
    counts = Counts(10)
    node = Node(node_id="n", host="h", num_workers=1)
    for round_, cause in enumerate((Cause.START, Cause.LOSS, Cause.LOSS, Cause.JOIN), 1):
        counts.record_run_report(ReportWorld("r", World(round_, (node,), 1), cause))
    assert counts.runs == {"r": {"node_lost": 2, "node_joined": 1}}
    counts.record_run_report(ReportRunClosed("r", "done", failed=False))
    assert counts.runs == {}


def test_only_so_many_jobs_are_counted() -> None:
    counts = Counts(3)
    for number in range(10):
        published = Publish(f"j{number}", quorum(1, "a:1").quorum)
        counts.record_quorum(published, 1.0)
    assert list(counts.jobs) == ["j7", "j8", "j9"]
    counts.forget()
    assert not counts.jobs


def test_records_are_added_up_once_while_they_grow() -> None:
    def record(number: int, kind: IncidentKind, **fields: Any) -> Incident:
        return Incident(number=number, job="j", kind=kind, cause="", groups=(), at=0.0, **fields)

    counts = IncidentCounts()
    lost, joined = IncidentKind.LOST, IncidentKind.JOINED
    counts.add([record(5, lost, is_open=True, steps_discarded=1), record(6, joined)])
    assert counts.after == 4
    counts.add([record(5, lost, is_open=True, steps_discarded=1), record(6, joined)])
    counts.add([record(5, lost, steps_discarded=2), record(7, joined, is_open=True)])
    assert counts.after == 6
    counts.add([record(7, joined, healed_s=1.5, healed_bytes=10)])
    counts.add([record(8, IncidentKind.HEAL_FAILED, steps_discarded=1)])
    assert counts.after == 8
    assert counts.discarded == {"lost": 2, "heal_failed": 1}
    assert counts.heals == {"healed": 1, "failed": 1}
    assert counts.healed_bytes == 10


def test_a_histogram_counts_what_is_at_most_so_long() -> None:
    histogram = DurationHistogram()
    for duration_s in (0.0005, 0.001, 0.3, 1e6):
        histogram.observe(duration_s)
    assert dict(histogram.buckets()) | {"0.001": 2, "0.25": 2, "0.5": 3, "+Inf": 4} == dict(
        histogram.buckets()
    )
    assert histogram.sum_s == pytest.approx(1e6 + 0.3015)


def test_an_unknown_job_is_no_metric() -> None:
    driver = LighthouseDriver(QuorumConfig())
    with pytest.raises(RequestRefused):
        driver.status("nobody")
    assert b'job="' not in asyncio.run(LighthouseMetrics(driver).page())[0]
