"""Gets the group's decision on a step."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from torchft_svc.client.step.shared_round import Orders, SharedRound
from torchft_svc.coordination import ManagerClient
from torchft_svc.core.round import AskDecision, Decide, LoseDecision
from torchft_svc.errors import CommitFailed, RequestRefused, TorchFTError, Unreachable

log = logging.getLogger(__name__)


def ask_decision(client: ManagerClient, worker: SharedRound, orders: Orders) -> bool:
    """Whether the group commits the step; ``orders`` are those of `Round.vote`.

    Raises:
        PeerError: a decision was made, or may have been made, and did not arrive here.
    """
    (order,) = orders
    while isinstance(order, AskDecision):
        time.sleep(order.pause_s)
        with worker.changing() as round_:
            ballot = round_.ballot()
        timeout = timedelta(seconds=max(0.001, order.deadline - time.monotonic()))
        try:
            committed = client.vote(ballot, timeout)
        except TorchFTError as error:
            is_over = client.is_over(error)
            with worker.changing() as round_:
                now = time.monotonic()
                (order,) = round_.vote_failed(error, now, is_manager_over=is_over)
        else:
            with worker.changing() as round_:
                (order,) = round_.voted(committed)
    if isinstance(order, LoseDecision):
        raise order.error
    assert isinstance(order, Decide)
    if order.error is not None:
        _log_no_answer(worker.state.step, order.error)
    return order.committed


def _log_no_answer(step: int, error: TorchFTError) -> None:
    if isinstance(error, CommitFailed):
        log.warning("step %d: %s", step, error)
    elif not isinstance(error, Unreachable):
        # Without a quorum there is no vote to take part in.
        level = logging.DEBUG if isinstance(error, RequestRefused) else logging.WARNING
        log.log(level, "step %d: the vote against it could not be sent: %s", step, error)
