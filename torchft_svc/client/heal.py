"""Moves state between groups: offers this group's, fetches another's."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.coordination import ManagerClient, QuorumResult, Security

log = logging.getLogger(__name__)


def fetch_state(
    transport: CheckpointTransport[Any],
    quorum: QuorumResult,
    group_rank: int,
    timeout_s: float,
    security: Security,
) -> Any:
    """The state of ``quorum.max_step``, from the group that the quorum assigned.

    ``timeout_s`` is the longest time without progress.

    Raises:
        PeerError: the source is gone, does not serve that step, or its data is damaged.
    """
    assert quorum.recover_src_replica_rank is not None
    timeout = timedelta(seconds=timeout_s)
    with ManagerClient(quorum.recover_src_manager_address, timeout, security=security) as source:
        metadata = source._checkpoint_metadata(group_rank, timeout)
    log.info(
        "healing to step %d from replica rank %d at %s",
        quorum.max_step,
        quorum.recover_src_replica_rank,
        metadata,
    )
    return transport.recv_checkpoint(
        src_rank=quorum.recover_src_replica_rank,
        metadata=metadata,
        step=quorum.max_step,
        timeout=timeout,
    )
