"""Moves state between groups: offers this group's, fetches another's."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.coordination import ManagerClient, QuorumResult, Security

# Who takes longer is no help.
_EXTRA_TIMEOUT = timedelta(seconds=5)
log = logging.getLogger(__name__)


def fetch_state(
    transport: CheckpointTransport[Any],
    quorum: QuorumResult,
    group_rank: int,
    timeout_s: float,
    security: Security,
) -> Any:
    """The state of ``quorum.max_step``, from the group that the quorum assigned, and others.

    ``timeout_s`` is the longest time without progress.

    Raises:
        PeerError: the source is gone, does not serve that step, or its data is damaged.
    """
    assert quorum.recover_src_replica_rank is not None
    timeout = timedelta(seconds=timeout_s)

    def look_up(address: str, timeout: timedelta) -> str:
        with ManagerClient(address, timeout, security=security) as source:
            return source._checkpoint_metadata(group_rank, timeout)

    metadata = look_up(quorum.recover_src_manager_address, timeout)
    log.info(
        "healing to step %d from replica rank %d at %s",
        quorum.max_step,
        quorum.recover_src_replica_rank,
        metadata,
    )
    source = quorum.recover_src_replica_rank
    if not (transport.can_stripe and quorum.recover_extra_src_manager_addresses):
        return transport.recv_checkpoint(source, metadata, quorum.max_step, timeout)
    extra_timeout = min(timeout, _EXTRA_TIMEOUT)
    extras = [
        partial(look_up, address, extra_timeout)
        for address in quorum.recover_extra_src_manager_addresses
    ]
    return transport.recv_striped(source, metadata, extras, quorum.max_step, timeout)
