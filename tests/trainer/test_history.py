"""Tests what a run's incidents cost, and that its picture and its progress show them."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import pytest

from torchft_svc.errors import ConfigError
from torchft_svc.trainer import history as module
from torchft_svc.trainer.history import Incident, Point, RunHistory
from torchft_svc.trainer.messages import Position
from torchft_svc.trainer.picture import draw_run, summary
from torchft_svc.trainer.progress_bar import LINE_EVERY_S, progress_bar


def at(step: int) -> Position:
    return Position(step=step)


@pytest.fixture
def run() -> RunHistory:
    """Three workers, ten steps, one per second."""
    history = RunHistory(began_at=100.0, num_wanted=3)
    history.resumed(100.0, at(0), 3, "start")
    for step in range(1, 11):
        history.stepped(100.0 + step, at(step), 3)
    return history


def test_steps_are_kept_with_their_time_and_the_number_of_workers(run: RunHistory) -> None:
    assert run.points[:2] == [Point(0.0, 0, 3), Point(1.0, 1, 3)]
    assert len(run.points) == 11
    assert run.incidents == []
    assert run.costs() == {}


def test_a_restart_costs_the_time_until_the_next_step_and_no_step_of_a_peer(
    run: RunHistory,
) -> None:
    run.lost(110.5, 2, "killed by SIGKILL", "restart")
    run.lost(110.6, 1, "killed by SIGKILL", "restart")
    run.resumed(112.0, at(10), 2, "peer")
    run.stepped(112.5, at(11), 2)
    assert run.incidents == [
        Incident(
            rung="restart",
            at_s=10.5,
            until_s=12.5,
            reason="killed by SIGKILL",
            lost_workers=(2, 1),
            step=10,
            source="peer",
            num_workers=2,
        )
    ]
    assert run.as_dict()["lost_s"] == 2.0
    assert run.as_dict()["lost_steps"] == 0
    assert run.as_dict()["rungs"]["restart"]["lost_workers"] == 2


def test_steps_that_are_done_again_are_lost(run: RunHistory) -> None:
    run.lost(110.5, 2, "killed", "restart")
    run.resumed(112.0, at(4), 3, "checkpoint")
    run.stepped(112.5, at(5), 3)
    (incident,) = run.incidents
    assert (incident.lost_steps, incident.source) == (6, "checkpoint")


def test_a_step_of_a_worker_that_is_to_end_does_not_end_a_restart(run: RunHistory) -> None:
    run.lost(110.5, 2, "killed", "restart")
    run.stepped(110.6, at(11), 3)
    assert run.incidents[0].cost_s is None
    run.resumed(112.0, at(11), 3, "peer")
    run.stepped(113.0, at(12), 3)
    assert run.incidents[0].cost_s == 2.5
    assert run.incidents[0].lost_steps == 0


def test_the_others_train_on_when_a_worker_is_lost(run: RunHistory) -> None:
    run.lost(110.5, 2, "killed", "per-step")
    run.stepped(110.8, at(11), 2)
    (incident,) = run.incidents
    assert (incident.rung, incident.lost_steps) == ("per-step", 0)
    assert incident.cost_s == pytest.approx(0.3)


def test_too_few_workers_lead_to_the_next_rung_in_one_incident(run: RunHistory) -> None:
    run.lost(110.5, 2, "killed", "per-step")
    run.lost(110.6, 1, "killed", "restart")
    run.resumed(112.0, at(10), 3, "trainer")
    run.stepped(112.5, at(11), 3)
    (incident,) = run.incidents
    assert (incident.rung, incident.lost_workers) == ("restart", (2, 1))


def test_the_wait_for_resources_is_a_part_of_the_cost(run: RunHistory) -> None:
    run.lost(111.0, 2, "killed", "restart")
    run.waits(111.5)
    run.waits(113.0)
    run.resumed(115.5, at(10), 1, "peer")
    run.stepped(116.0, at(11), 1)
    (incident,) = run.incidents
    assert (incident.waited_s, incident.cost_s) == (4.0, 5.0)


def test_growth_loses_no_step_and_a_loss_during_it_is_an_incident(run: RunHistory) -> None:
    run.grows(110.5, "3 workers instead of 2")
    run.resumed(111.0, at(10), 3, "peer")
    run.stepped(111.5, at(11), 3)
    run.grows(112.0, "4 workers instead of 3")
    run.lost(112.1, 3, "killed", "restart")
    run.resumed(113.0, at(11), 3, "peer")
    run.stepped(113.5, at(12), 3)
    assert [incident.rung for incident in run.incidents] == ["growth", "restart"]


def test_long_runs_are_thinned_out_and_nothing_of_the_costs_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_POINTS", 50)
    monkeypatch.setattr(module, "MAX_INCIDENTS", 5)
    history = RunHistory(began_at=0.0, num_wanted=2)
    for step in range(1, 1000):
        history.lost(step - 0.5, 1, "killed", "per-step")
        history.stepped(float(step), at(step), 2)
        history.checkpointed(float(step), at(step))
    assert len(history.points) <= 50
    assert len(history.checkpoints) <= 50
    assert history.points[0].step == 1
    assert history.points[-1].step > 900
    assert len(history.incidents) == 5
    assert history.costs()["per-step"].incidents == 999
    assert history.costs()["per-step"].seconds == pytest.approx(499.5)


def test_the_picture_is_drawn(run: RunHistory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run.checkpointed(105.0, at(5))
    run.lost(110.5, 2, "killed", "restart")
    run.resumed(112.0, at(4), 2, "checkpoint")
    run.stepped(112.5, at(5), 2)
    run.lost(113.0, 2, "killed", "per-step")
    for name in ("run.png", "run.svg"):
        draw_run(run, tmp_path / name)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    words = (tmp_path / "run.svg").read_text()
    assert "restart: 1 incident, 2.0 s, 6 steps lost" in summary(run)
    assert "<svg" in words


def test_a_picture_of_a_run_that_did_not_begin_is_empty(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    history = RunHistory(began_at=0.0, num_wanted=1)
    draw_run(history, tmp_path / "run.png")
    assert summary(history) == "no step; no incident"


def test_a_kind_of_picture_that_is_not_known_is_an_error(run: RunHistory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="path"):
        draw_run(run, tmp_path / "run.doc")


def test_without_matplotlib_the_command_that_installs_it_is_reported(
    run: RunHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        draw_run(run, tmp_path / "run.png")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_lines_are_written_now_and_then() -> None:
    out = io.StringIO()
    with progress_bar("epoch 1", 0, 100, shown=True, out=out) as bar:
        for step in range(1, 101):
            bar.update(step * LINE_EVERY_S / 50, at(step), 2, {"loss": 0.5, "kind": "a"})
        bar.show_sentence("worker 1 is lost")
    lines = out.getvalue().splitlines()
    assert lines == [
        "epoch 1: step 1/100 2 workers loss 0.5",
        "epoch 1: step 51/100 2 workers loss 0.5",
        "epoch 1: step 100/100 2 workers loss 0.5",
        "epoch 1: worker 1 is lost",
    ]


def test_a_terminal_has_a_bar() -> None:
    pytest.importorskip("rich")
    out = _Terminal()
    with progress_bar("epoch 1", 0, 10, out=out) as bar:
        bar.update(0.0, at(5), 1, {"loss": 0.25})
        bar.show_sentence("worker 1 is lost")
    assert "worker 1 is lost" in out.getvalue()
    assert "5/10" in out.getvalue()


@pytest.mark.parametrize(("shown", "out"), [(None, io.StringIO()), (False, _Terminal())])
def test_nothing_is_written_unless_it_is_wanted(shown: bool | None, out: io.StringIO) -> None:
    with progress_bar("epoch 1", 0, None, shown=shown, out=out) as bar:
        bar.update(0.0, at(5), 1, {})
        bar.show_sentence("worker 1 is lost")
    assert out.getvalue() == ""


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else find(name)
    )


@pytest.mark.usefixtures("without_rich")
def test_a_terminal_without_rich_has_lines() -> None:
    out = _Terminal()
    with progress_bar("epoch 1", 0, None, out=out) as bar:
        bar.update(0.0, at(5), 1, {})
    assert out.getvalue() == "epoch 1: step 5 1 worker\n"


def test_what_others_did_before_they_noticed_is_lost_too(run: RunHistory) -> None:
    run.lost(110.5, 0, "killed by SIGKILL", "restart")
    run.stepped(110.6, at(11), 3)
    run.resumed(112.0, at(8), 3, "checkpoint")
    (incident,) = run.incidents
    assert (incident.step, incident.lost_steps) == (11, 3)


def test_a_second_attempt_does_not_forget_what_the_first_one_lost(run: RunHistory) -> None:
    run.lost(110.5, 0, "killed by SIGKILL", "restart")
    run.resumed(112.0, at(8), 3, "checkpoint")
    run.lost(112.1, 1, "killed by SIGKILL", "restart")
    run.resumed(113.0, at(6), 3, "checkpoint")
    run.stepped(113.5, at(7), 3)
    (incident,) = run.incidents
    assert (incident.step, incident.lost_steps, incident.cost_s) == (10, 4, 3.0)


def test_a_worker_whose_program_failed_is_replaced(run: RunHistory) -> None:
    run.failed(110.5, "ValueError", "per-step")
    run.stepped(110.75, at(11), 2)
    run.lost(111.0, 1, "killed by SIGKILL", "per-step")
    run.stepped(111.5, at(12), 2)
    assert [(each.rung, each.cost_s) for each in run.incidents] == [
        ("per-step", 0.25),
        ("per-step", 0.5),
    ]
