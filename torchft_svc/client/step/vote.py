"""Gets the group's decision on a step."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from torchft_svc.client.config import GroupPlace
from torchft_svc.coordination import ManagerClient
from torchft_svc.errors import CommitFailed, RequestRefused, TorchFTError, Unreachable

log = logging.getLogger(__name__)


def ask_decision(
    client: ManagerClient, place: GroupPlace, step: int, vote: bool, timeout_s: float
) -> bool:
    """Whether the group commits ``step``, given this worker's ``vote``.

    A group of one worker decides alone. A vote against needs no answer: it decides. Where no
    decision was made, nobody got a yes, so no is safe. A manager that is started anew is asked
    again: it finds out what the one before had decided.

    Raises:
        PeerError: a decision was made, or may have been made, and did not arrive here.
    """
    if place.group_world_size == 1:
        return vote
    deadline = time.monotonic() + timeout_s
    patience = client.patience(deadline)
    while True:
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            return client.should_commit(place.group_rank, step, vote, left)
        except CommitFailed as error:
            log.warning("step %d: %s", step, error)
            return False
        except Unreachable as error:
            if patience.pause(error):
                continue
            if vote:
                raise
            return False
        except TorchFTError as error:
            if vote:
                raise
            # Without a quorum there is no vote to take part in.
            level = logging.DEBUG if isinstance(error, RequestRefused) else logging.WARNING
            log.log(level, "step %d: the vote against it could not be sent: %s", step, error)
            return False
