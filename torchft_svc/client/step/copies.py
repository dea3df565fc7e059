"""Offers copies of this worker's state to other processes, and begins from one (rules B1 to B6)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torchft_svc import coordination
from torchft_svc.client.process.device_streams import TrainingStreams
from torchft_svc.client.step.round import Dependencies, RoundRules
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.state import counters_of_copy
from torchft_svc.core.quorum.lighthouse.copies import (
    LOOK_AGAIN_S,
    LOOK_UP_S,
    MAX_MEMBERS_ASKED,
    CopySearch,
    HeldCopy,
    Start,
)
from torchft_svc.errors import CheckpointError, PeerError, RequestRefused, TorchFTError

log = logging.getLogger(__name__)


class CopyOffers:
    """Offers this worker's state after each ``copy_every``-th step, if somebody waits for it.

    Called on the training thread. ``version()`` changes when a healed state is loaded.
    """

    def __init__(
        self,
        deps: Dependencies,
        rules: RoundRules,
        worker: SharedRound,
        version: Callable[[], int],
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._worker = worker
        self._version = version
        self._streams = TrainingStreams()
        self._is_on = rules.copy_every > 0 and deps.transport.can_copy
        self._thread: threading.Thread | None = None  # offers the last one

    def begin_step(self) -> None:
        """Offer the state of the step that begins, which is that of the last committed one.

        What the forward pass may change is copied here; all other bytes are read while it runs.
        """
        state = self._worker.state
        if not (self._is_on and state.is_copied(self._rules.copy_every)):
            return
        is_busy = self._thread is not None and self._thread.is_alive()
        if is_busy or not self._deps.transport.num_awaiting_copy(state.step):
            return
        try:
            timeout_s = self._rules.timeouts.collective_s
            mine = self._deps.registry.collect_copied(state.counters(), timeout_s)
        except Exception:
            log.exception("no copy of step %d is offered", state.step)
            return
        self._streams.record()
        key = state.epoch, state.step, self._version()
        self._thread = threading.Thread(
            target=self._offer, args=(key, mine), name="torchft-copy", daemon=True
        )
        self._thread.start()

    def _offer(self, key: tuple[int, int, int], mine: Any) -> None:
        """Offer ``mine`` unless it may have changed; on the thread."""
        try:
            with self._deps.registry.gate.reading(self._rules.timeouts.collective_s):
                state = self._worker.state
                if (state.epoch, state.step, self._version()) == key:
                    self._streams.wait()
                    self._deps.transport.offer_copy(state.step, mine)
        except TorchFTError as error:
            log.warning("no copy of step %d is offered: %s", key[1], error)
        except Exception:
            log.exception("no copy of step %d is offered", key[1])


@dataclass(frozen=True, slots=True)
class FetchedCopy:
    """A state from a holder, and what is logged of it."""

    state: Any
    copy: HeldCopy


def fetch_copy(deps: Dependencies, rules: RoundRules, own_step: int) -> FetchedCopy | None:
    """Fetch the newest copy of this worker's state, if that is newer than ``own_step``.

    Returns None if groups with a state live, or there is no such copy.

    Raises:
        PeerError: there are copies, and none can be fetched, or the lighthouse does not answer.
    """
    now, place = time.monotonic(), rules.place
    quorum_s = rules.timeouts.quorum_s
    search = CopySearch(place.group_rank, place.group_world_size, own_step, quorum_s, now)
    error: TorchFTError = RequestRefused("the lighthouse does not know all copies yet")  # the last
    while True:
        try:
            view = deps.client.members_and_copies(timedelta(seconds=LOOK_UP_S))
            start = search.choose_start(view, now)
            if start is Start.WITHOUT_COPY:
                return None
            if start is Start.ASK_MEMBERS and _is_one_alive(deps, rules, view.members.values()):
                return None
            if isinstance(start, HeldCopy):
                return FetchedCopy(_fetch(deps, rules, start), start)
        except RequestRefused as refusal:
            log.info("no copy is looked for: %s", refusal)
            return None
        except PeerError as failure:
            log.warning("no copy of the state was fetched yet: %s", failure)
            error = failure
        if search.is_over(now):
            raise error
        time.sleep(LOOK_AGAIN_S)
        now = time.monotonic()


def _is_one_alive(deps: Dependencies, rules: RoundRules, addresses: Iterable[str]) -> bool:
    """Whether the manager of a member answers, so that a living group has a state."""
    limit = timedelta(seconds=LOOK_UP_S)
    for address in list(addresses)[:MAX_MEMBERS_ASKED]:
        try:
            with coordination.ManagerClient(
                address, limit, security=deps.client.security
            ) as member:
                member._checkpoint_metadata(rules.place.group_rank, limit)
            return True
        except RequestRefused:
            return True
        except PeerError as error:
            log.info("the group at %s does not answer: %s", address, error)
    return False


def _fetch(deps: Dependencies, rules: RoundRules, copy: HeldCopy) -> Any:
    """Fetch a copy, and check that it is what its holder has reported.

    Raises:
        PeerError: it cannot be fetched, or is a copy of another state.
    """
    log.info("fetching a copy of step %d: no group with a state lives", copy.step)
    timeout = timedelta(seconds=rules.timeouts.collective_s)
    try:
        state = deps.transport.recv_checkpoint(0, copy.address, copy.step, timeout)
    except PeerError:
        raise
    except TorchFTError as error:  # the address is malformed, or the holder refuses the token
        raise CheckpointError(copy.holder, str(error)) from error
    counters = counters_of_copy(state, copy.holder)
    if (counters["step"], counters["quorum_id"]) != (copy.step, copy.step_quorum_id):
        reason = f"it has the state of step {counters['step']}, and was reported as one of step "
        raise CheckpointError(copy.holder, f"{reason}{copy.step}")
    deps.registry.check(state, copy.holder)
    return state
