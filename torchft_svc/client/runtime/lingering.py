"""Keeps a worker that ends until groups that heal from its group have the state (rule H12)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.runtime.bootstrap import SharedKeys
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.worker.linger import lingers_until
from torchft_svc.errors import Unreachable
from torchft_svc.settings import GroupPlace

log = logging.getLogger(__name__)

# Interval at which it is checked whether the receivers have everything, or are gone.
_LOOK_S = 0.01
# All workers of a group together ask its store 2,000 times a second.
_LOOK_S_PER_WORKER = 1e-3
# Interval at which a worker shows the others of its group that it still sends.
_SHOW_S = 0.5


@dataclass(frozen=True, slots=True)
class Lingering:
    """The end of ``worker``, whose state ``transport`` offers; ``keys``: those of its group."""

    worker: SharedRound
    transport: CheckpointTransport[Any]
    keys: SharedKeys
    place: GroupPlace

    def wait(self) -> None:
        """Wait for the receivers of this worker, then for those of the others of its group.

        As long as `lingers_until` says; not at all if no group of the last quorum heals from this
        one. The group is out of the quorum when its first worker leaves.
        """
        quorum_id = self.worker.serves_in()
        if quorum_id is None:
            return
        began_at = time.monotonic()
        if self.place.group_world_size == 1:
            self._serve(began_at, None)
            return
        where = f"served/{quorum_id}"
        try:
            self._serve(began_at, where)
            self.keys.add(f"{where}/workers", 1)
            self._await_others(began_at, where)
        except Unreachable as error:  # rank 0, which has it, is dead, or was the last one
            log.debug("does not wait for the other workers of the group: %s", error)

    def _serve(self, began_at: float, where: str | None) -> None:
        """Wait for the receivers of what this worker offers; show that at ``where``, if given."""
        named, shown_at = "", began_at - _SHOW_S
        while receivers := self.worker.receivers():
            sent_at = self.transport.last_sent_at()
            if sent_at is None:
                return
            if not named:
                named = ", ".join(map(stable_name, receivers))
                log.info("still sends its state to %s before it leaves", named)
            now = time.monotonic()
            left_s = self._until(began_at, sent_at) - now
            if left_s <= 0:
                log.warning("leaves although %s may not have the whole state", named)
                return
            if where is not None and now - shown_at >= _SHOW_S:
                self.keys.add(f"{where}/signs", 1)
                shown_at = now
            time.sleep(min(_LOOK_S, left_s))

    def _await_others(self, began_at: float, where: str) -> None:
        """Wait until all have shown at ``where`` that their receivers have everything.

        They count there: with a key for each, a large group would keep its store busy.
        """
        num_workers = self.place.group_world_size
        seen, changed_at = (0, 0), began_at
        while True:
            found = self.keys.add(f"{where}/workers", 0), self.keys.add(f"{where}/signs", 0)
            now = time.monotonic()
            if found != seen:
                seen, changed_at = found, now
            if found[0] >= num_workers or now >= self._until(began_at, changed_at):
                return
            time.sleep(max(_LOOK_S, num_workers * _LOOK_S_PER_WORKER))

    def _until(self, began_at: float, moved_at: float) -> float:
        return lingers_until(began_at, moved_at, self.worker.draining_until())
