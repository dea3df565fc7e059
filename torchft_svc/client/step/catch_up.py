"""Fetches a preview of the others' state before this group joins, and shows this group's state."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.step.heal import look_up_source
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import StateRegistry
from torchft_svc.errors import PeerError, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.coordination import ManagerClient

log = logging.getLogger(__name__)

# Groups that start at once choose different sources; the program's own numbers are not touched.
_DICE = random.SystemRandom()
# A manager, or a lighthouse, that needs longer to answer does not help.
_LOOK_UP_S = 5.0
# The first timeout of a request; each retry doubles it. A spare whose place is free ends a look-up
# between two of them, and it may be at the group that was lost.
_FIRST_TIMEOUT_S = 0.2
# If the first sources are lost, others are asked; then this group heals as without a preview.
_MAX_SOURCES = 3


def fetch_preview(
    transport: CheckpointTransport[Any],
    client: ManagerClient,
    group_rank: int,
    timeout_s: float,
    check: Callable[[], None],
) -> bool:
    """Fetch what a member of the job shows of its state, for the heal that follows.

    Returns whether there was anything to fetch: not before the job has committed a step.

    ``timeout_s`` is the longest time without progress. ``check`` raises if this is not wanted any
    more.

    Raises:
        PeerError: no member shows its state, or all that were asked are lost.
        RequestRefused: from ``check``, or a lighthouse that does not know its members.
    """
    if not transport.can_preview:
        raise RequestRefused("this checkpoint transport cannot do that")
    limit = timedelta(seconds=min(timeout_s, _LOOK_UP_S))
    addresses, step = client.job_members(limit)
    if not addresses or step == 0:
        return False  # all begin together: there is nothing to catch up with
    failure: PeerError | None = None
    for address in _DICE.sample(addresses, min(_MAX_SOURCES, len(addresses))):
        check()
        try:
            metadata = look_up_source(
                address,
                group_rank,
                limit.total_seconds(),
                client.security,
                check,
                first_timeout_s=_FIRST_TIMEOUT_S,
            )
            log.info("fetching the state in advance from %s, which is at step %d", address, step)
            transport.recv_preview(metadata, timedelta(seconds=timeout_s), check)
            return True
        except PeerError as error:
            log.info("the state of %s cannot be fetched in advance: %s", address, error)
            failure = error
    assert failure is not None
    raise failure


class LiveState:
    """Reads a worker's state for groups that start; see `StateViewer`.

    ``is_whole``: the groups of this job heal before their steps, so nothing is deferred.
    """

    def __init__(
        self, registry: StateRegistry, worker: SharedRound, timeout_s: float, *, is_whole: bool
    ) -> None:
        self._registry = registry
        self._worker = worker
        self._timeout_s = timeout_s
        self._is_whole = is_whole

    def step(self) -> int:
        return self._worker.state.step

    def collect(self, *, is_deferred: bool) -> Any:
        registry, counters = self._registry, self._worker.state.counters()
        if self._is_whole:
            return {} if is_deferred else registry.collect(counters, self._timeout_s)
        if is_deferred:
            return registry.collect_deferred(counters, self._timeout_s)
        return registry.collect_early(self._timeout_s).state

    def reading(self) -> AbstractContextManager[None]:
        return self._registry.gate.reading(self._timeout_s)
