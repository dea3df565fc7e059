"""Tests the loggers with the public release's records, and the ranges in profiles."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from support.training import Trainer, in_step, lighthouse, trainers
from torch.profiler import ProfilerActivity, profile

from torchft_svc.client.step.event_streams import COMMITS, ERRORS, QUORUMS

STREAMS = (QUORUMS, COMMITS, ERRORS)
FIELDS = {"job_id", "replica_id", "rank", "quorum_id"}


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    handler = _Records()
    for logger in STREAMS:
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "propagate", False)
        logger.setLevel(logging.INFO)
    yield handler.records
    for logger in STREAMS:
        logger.setLevel(logging.NOTSET)


def fields_of(record: logging.LogRecord, *more: str) -> dict[str, object]:
    assert record.getMessage() == ""
    return {name: getattr(record, name) for name in (*FIELDS, *more)}


def test_each_vote_and_each_new_quorum_is_a_record(records: list[logging.LogRecord]) -> None:
    with lighthouse() as address, trainers(address, 1) as (a,):
        a.until(3)
        quorum = a.manager.last_quorum()
        assert quorum is not None
        expected = {
            "job_id": "default",
            "replica_id": a.manager.replica_id(),
            "rank": 0,
            "quorum_id": quorum.quorum_id,
        }
        quorums = [fields_of(each, "step") for each in records if each.name == QUORUMS.name]
        assert quorums == [{**expected, "step": 0}]
        votes = [each for each in records if each.name == COMMITS.name]
        commits = [fields_of(each, "step", "commit_result") for each in votes]
        assert commits == [
            {**expected, "step": step, "commit_result": True}
            for step in range(a.manager.current_step())
        ]
        assert not [each for each in records if each.name == ERRORS.name]
        step = a.manager.current_step()
        a.manager.start_quorum()
        a.manager.report_error(ValueError("of the program"))
        assert not a.manager.should_commit()
        failed = fields_of(records[-1], "step", "commit_result")
        assert failed == {**expected, "step": step, "commit_result": False}
        error = next(each for each in records if each.name == ERRORS.name)
        assert fields_of(error, "error") == {**expected, "error": "of the program"}


def test_without_a_level_nothing_is_recorded() -> None:
    assert not any(logger.isEnabledFor(logging.INFO) for logger in STREAMS)


def test_a_profile_shows_the_parts_of_a_step() -> None:
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with (
        lighthouse() as address,
        trainers(address, 1) as (a,),
        profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as shown,
    ):
        a.until(2)
        with Trainer(address, "b", 1) as b:
            in_step(4, a, b)
    names = {event.key for event in shown.key_averages()}
    parts = ("start_quorum", "allreduce", "reconfigure", "heal", "should_commit")
    assert {f"torchft::{part}" for part in parts} <= names
