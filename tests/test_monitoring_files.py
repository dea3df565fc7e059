"""Tests the alert rules and the dashboard that ship as files, and the names of all metrics, against
a real lighthouse with a real group that trains and heals."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from support.dashboards import served
from support.metrics import Page
from support.running import ROOT, eventually
from support.training import Trainer, in_step, trainers

from torchft_svc.telemetry.catalog import METRICS, Metric, MetricKind, Program

ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "torchft.json"
_NAME = re.compile(r"\btorchft_[a-z_]+\b")
_LABELS = re.compile(r"(torchft_[a-z_]+)\{([^}]*)\}")
_SUFFIXES = ("_bucket", "_count", "_sum")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """All expressions of alert rules and panels."""
    board = json.loads(DASHBOARD.read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [each["query"] for each in board["templating"]["list"]]
    queries = [each["query"] for each in variables if isinstance(each, dict)]
    return [*(rule["expr"] for rule in rules()), *targets, *queries]


def metric_of(name: str) -> Metric:
    """The metric that a name in an expression means; KeyError: there is none."""
    by_name = {metric.name: metric for metric in METRICS}
    if name in by_name:
        return by_name[name]
    for suffix in _SUFFIXES:
        found = by_name.get(name.removesuffix(suffix))
        if found is not None and found.kind is MetricKind.HISTOGRAM:
            return found
    raise KeyError(name)


def test_every_name_and_label_is_in_the_code() -> None:
    found = expressions()
    assert len(found) > 25
    for expression in found:
        names = set(_NAME.findall(expression))
        assert names, expression
        labels = {label for name in names for label in metric_of(name).labels} | {"le"}
        for name, matchers in _LABELS.findall(expression):
            used = set(re.findall(r"([a-z_]+)\s*=~?", matchers))
            assert used <= set(metric_of(name).labels), expression
        for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert set(grouping.replace(" ", "").split(",")) <= labels, expression


def test_every_rule_has_what_an_operator_needs() -> None:
    for rule in rules():
        assert re.fullmatch(r"Torchft[A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        metrics = [metric_of(name) for name in _NAME.findall(rule["expr"])]
        shown = set(re.findall(r"\$labels\.([a-z_]+)", json.dumps(rule["annotations"])))
        assert shown <= {label for metric in metrics for label in metric.labels}, rule["alert"]
        assert rule["annotations"]["summary"].rstrip(".")


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_help_are_as_promtool_wants_them(metric: Metric) -> None:
    assert re.fullmatch(r"torchft_[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
    assert not metric.name.endswith(_SUFFIXES)
    assert not re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|percent)(_|$)", metric.name)
    assert not re.search(r"_(gauge|counter|histogram)(_|$)", metric.name)
    if metric.kind is MetricKind.HISTOGRAM:
        assert metric.name.endswith("_seconds")
    assert len(metric.labels) <= 4
    assert len(set(metric.labels)) == len(metric.labels)
    assert not {"le", "quantile", "instance"} & set(metric.labels)
    assert metric.help.endswith(".")
    assert len(metric.help) < 120


def test_no_name_is_there_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)


class _Shown:
    """Pages of a lighthouse and of trainers, after a training with a heal and a discarded step."""

    def __init__(self, lighthouse: Page, trainer: Page) -> None:
        self.pages = {Program.LIGHTHOUSE: lighthouse, Program.TRAINER: trainer}


@pytest.fixture(scope="module")
def shown() -> Iterator[_Shown]:
    registry = CollectorRegistry()
    with served(None) as where, trainers(where.grpc, 1, metrics_registry=registry) as (a,):
        a.until(2)
        with Trainer(where.grpc, "b", 1) as b:
            in_step(4, a, b)
            a.manager.start_quorum()
            a.manager.report_error(ValueError("of the program"))
            thread = threading.Thread(target=b.step)
            thread.start()
            a.manager.should_commit()
            thread.join()
            in_step(8, a, b)
            assert where.get("/metrics").headers["content-type"].startswith("text/plain")

            def page() -> Page | None:
                page = Page(where.get("/metrics").content)
                is_complete = page.value("torchft_committed_step", job="default") >= 7
                return page if is_complete and "torchft_heals_total" in page.names() else None

            yield _Shown(eventually(page), Page(generate_latest(registry)))


@pytest.mark.parametrize("program", [Program.LIGHTHOUSE, Program.TRAINER])
def test_a_page_is_what_the_catalog_says(shown: _Shown, program: Program) -> None:
    page = shown.pages[program]
    expected = {metric.family: metric for metric in METRICS if program in metric.programs}
    families = {family.name: family for family in page.families}
    assert families.keys() == expected.keys()
    for name, family in families.items():
        metric = expected[name]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)


def test_a_training_is_shown_with_its_heal_and_its_discarded_step(shown: _Shown) -> None:
    page = shown.pages[Program.LIGHTHOUSE]
    job = {"job": "default"}
    assert page.value("torchft_groups", **job, state="in_quorum") == 2
    assert page.value("torchft_groups_expected", **job) == 2
    assert page.value("torchft_committed_step", **job) >= 7
    assert page.value("torchft_quorum_changes_total", **job, reason="joined") == 1
    assert page.value("torchft_heals_total", **job, outcome="healed") == 1
    assert page.value("torchft_heal_bytes_total", **job) > 0
    discarded = [
        value for (name, _), value in page.samples.items() if name.startswith("torchft_steps_dis")
    ]
    assert sum(discarded) >= 1
    assert 0 < page.value("torchft_goodput_ratio", **job) <= 1
    assert {"a", "b"} == {
        dict(labels)["group"] for name, labels in page.samples if "group_silence" in name
    }
