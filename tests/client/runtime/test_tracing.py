"""Tests what trainers and a lighthouse export to a collector, which is a real HTTP server."""

from __future__ import annotations

import logging
import random
import time
import warnings

import pytest
from support.bounds import again_if_late, check
from support.otlp import Collector, attributes, collecting
from support.running import eventually, lighthouse_process, refusing
from support.training import Trainer, in_step, trainers

from torchft_svc.telemetry.exporting import exporting
from torchft_svc.telemetry.otel import FLUSH_S, Telemetry
from torchft_svc.telemetry.trace_ids import change_span_id, trace_id

pytestmark = pytest.mark.processes


def parent_of(span: object, collector: Collector) -> str:
    """The name of the span above."""
    above = {each.span_id: each.name for _, each in collector.spans}
    return above[span.parent_span_id]  # type: ignore[attr-defined]


def test_a_quorum_change_is_one_trace_of_all_programs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchft_svc")
    caplog.set_level(logging.INFO, "torchft_commits")
    with collecting() as collector:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
        with lighthouse_process(**endpoint) as lighthouse:
            monkeypatch.setenv(*next(iter(endpoint.items())))
            with trainers(lighthouse.address, 1) as (a,):
                a.until(2)
                with Trainer(lighthouse.address, "b", 1) as b:
                    in_step(6, a, b)
                    quorum = b.manager.last_quorum()
                    assert quorum is not None
            assert lighthouse.end()[0] == 0
        change = trace_id("default", quorum.quorum_id).to_bytes(16, "big")
        trace = [(program, span) for program, span in collector.spans if span.trace_id == change]
        names = [(program["service.name"], span.name) for program, span in trace]
        assert names.count(("torchft-lighthouse", "torchft.quorum_change")) == 1
        assert names.count(("torchft-trainer", "torchft.round")) == 2
        assert ("torchft-trainer", "torchft.reconfigure") in names
        assert names.count(("torchft-trainer", "torchft.heal")) == 1
        for _, span in trace:
            assert span.start_time_unix_nano <= span.end_time_unix_nano
            if span.name == "torchft.quorum_change":
                assert not span.parent_span_id
                id_ = change_span_id("default", quorum.quorum_id)
                assert span.span_id == id_.to_bytes(8, "big")
                assert attributes(span)["torchft.reason"] == "joined"
            elif span.name == "torchft.round":
                assert parent_of(span, collector) == "torchft.quorum_change"
            else:
                assert parent_of(span, collector) == "torchft.round"
        heal = next(span for _, span in trace if span.name == "torchft.heal")
        assert attributes(heal)["torchft.group"] == "b"
        assert attributes(heal)["torchft.heal_bytes"] > 0
        bodies = [log.body.string_value for _, log in collector.logs]
        assert any("quorum changed" in body for body in bodies)
        assert any("healing to step" in body for body in bodies)
        commits = [attributes(log) for _, log in collector.logs if not log.body.string_value]
        assert any(each.get("commit_result") is True for each in commits)
        assert any("commit_result" not in each and each.get("step") for each in commits)


def test_exporters_open_in_a_program_that_makes_errors_of_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Telemetry("trainer", {}).close()


@again_if_late
def test_a_collector_that_is_down_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing() as nowhere, lighthouse_process() as lighthouse:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{nowhere}")
        with trainers(lighthouse.address, 2) as (a, b):
            in_step(5, a, b)
            began_at = time.monotonic()
        check("the end of two trainers", time.monotonic() - began_at, 2 * FLUSH_S + 1.0)
        package = logging.getLogger("torchft_svc")
        assert not [each for each in package.handlers if hasattr(each, "is_exporter")]


def test_a_lighthouse_whose_collector_is_down_ends_in_time() -> None:
    with refusing() as nowhere:
        where = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{nowhere}"}
        with lighthouse_process(**where) as lighthouse:
            eventually(lambda: lighthouse.address)
            status, took_s = lighthouse.end()
            assert status == 0
            check("the end of a lighthouse", took_s, FLUSH_S + 1.0)


def test_an_export_draws_none_of_the_random_numbers_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        before = random.getstate()
        with exporting("trainer", {"job": "default"}) as telemetry:
            assert telemetry is not None
            logging.getLogger("torchft_svc").warning("a record")
            telemetry.add_change("default", 1, 0, 1, {})
        assert collector.spans
        assert collector.logs
        assert random.getstate() == before
