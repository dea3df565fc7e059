"""Tests that the groups connect again after a loss; `peers.py` decides what a loss means."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from support.running import eventually
from support.training import (
    TIMEOUT,
    Trainer,
    assert_identical,
    in_step,
    lighthouse,
    together,
    trainers,
)

from torchft_svc.client import ProcessGroupGloo
from torchft_svc.client.step.sums import shown_reason
from torchft_svc.core.quorum.worker.round import NEWS_AFTER_S


class Endless(dist.Work):
    """An operation as gloo leaves it behind if its peers die while it sends to them."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is not None
        time.sleep(timeout.total_seconds())
        raise RuntimeError("it has not ended")

    def is_completed(self) -> bool:
        return False


class Gloo(ProcessGroupGloo):
    """gloo, whose sums end for the others only while ``is_stuck``."""

    is_stuck = False

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        work = super().allreduce(tensors, opts)
        return Endless() if self.is_stuck else work


def test_a_group_that_asks_because_of_a_loss_known_to_it_alone_informs_the_others() -> None:
    """The sums have ended before, so its step counts; the others begin the next one, in vain."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        in_step(3, a, b)

        def learns_of_a_loss() -> bool:
            a.backward()
            quorum = a.manager.last_quorum()
            assert quorum is not None
            a.manager._worker.record_loss(quorum.replica_ids[1], "made up", quorum.quorum_id)
            eventually(a.manager._stepper._deps.pg.errored)
            return a.optimizer.step()

        assert together(learns_of_a_loss, b.step) == [True, True]

        before = b.manager.last_quorum()
        assert together(a.step, b.step) == [True, True], "it is summed in the next quorum"
        after = b.manager.last_quorum()
        assert before is not None
        assert after is not None
        assert after.quorum_id > before.quorum_id
        in_step(a.manager.current_step() + 1, a, b)
        assert_identical([a, b])


def test_a_group_whose_session_broke_is_met_again() -> None:
    """The incarnation was only cut off, so the news of its loss is about an earlier quorum."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        assert together(a.step, b.step) == [True, True]
        quorum = a.manager.last_quorum()
        assert quorum is not None
        others = [
            name for rank, name in enumerate(quorum.replica_ids) if rank != quorum.replica_rank
        ]
        a.manager._worker.record_loss(others[0], "its session ended", quorum.quorum_id)

        def fails() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("so the next quorum has another id"))
            return a.optimizer.step()

        together(fails, b.step)
        in_step(3, a, b)
        later = a.manager.last_quorum()
        assert later is not None
        assert later.quorum_id > quorum.quorum_id


def test_a_straggler_gives_its_step_up_when_the_others_go_on_without_it() -> None:
    """A straggler would wait for the timeout of its collective, whose members have moved on."""
    stuck = Gloo(TIMEOUT)
    with (
        lighthouse(min_replicas=1, join_timeout_ms=1000) as address,
        Trainer(address, "a", 0) as a,
        Trainer(address, "b", 1, pg=stuck) as b,
    ):
        together(lambda: a.meets(2), lambda: b.meets(2))
        in_step(3, a, b)  # the steps before compare the states of both at their end
        stuck.is_stuck = True
        began = time.monotonic()
        # The second one goes on, and waits for the other group.
        together(lambda: a.steps(3), b.backward)
        stuck.is_stuck = False
        assert time.monotonic() - began < TIMEOUT.total_seconds() / 2
        assert not b.optimizer.step()
        in_step(a.manager.current_step() + 1, a, b)
        assert_identical([a, b])


def test_who_comes_late_to_the_vote_does_not_commit_a_step_that_the_others_repeat() -> None:
    """The late one's sums are complete, as after a freeze; nobody votes for its step."""
    with (
        lighthouse(min_replicas=1, join_timeout_ms=500) as address,
        Trainer(address, "a", 0) as a,
        Trainer(address, "b", 1) as b,
    ):
        together(lambda: a.meets(2), lambda: b.meets(2))
        in_step(2, a, b)
        step = a.manager.current_step()

        def gives_up() -> bool:
            a.backward()
            a.manager.report_error(RuntimeError("it cannot apply this update"))
            return a.optimizer.step()

        assert together(gives_up, b.backward)[0] is False
        time.sleep(NEWS_AFTER_S)
        a.steps(2)
        assert not b.optimizer.step()
        assert b.manager.current_step() == step
        in_step(a.manager.current_step() + 1, a, b)
        assert_identical([a, b])


@pytest.mark.parametrize(
    "words",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "Application timeout caused pair closure",
    ],
)
def test_gloos_words_are_shown_as_a_sentence(words: str) -> None:
    assert shown_reason(words) == "the connection to another group has ended"
