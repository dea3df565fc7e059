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
# Interval at which a worker shows the others of its group that it still sends; and the word for the
# end of that.
_SHOW_S = 0.5
_DONE = "done"


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
            self._show(where, _DONE)
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
                self._show(where, str(now))
                shown_at = now
            time.sleep(min(_LOOK_S, left_s))

    def _await_others(self, began_at: float, where: str) -> None:
        """Wait until all others have shown at ``where`` that their receivers have everything."""
        ranks = range(self.place.group_world_size)
        others = [f"{where}/{rank}" for rank in ranks if rank != self.place.group_rank]
        seen, changed_at = [""], began_at
        while True:
            found = list(map(self.keys.find, others))
            now = time.monotonic()
            if found != seen:
                seen, changed_at = found, now
            if all(each == _DONE for each in found) or now >= self._until(began_at, changed_at):
                return
            time.sleep(_LOOK_S)

    def _until(self, began_at: float, moved_at: float) -> float:
        return lingers_until(began_at, moved_at, self.worker.draining_until())

    def _show(self, where: str, text: str) -> None:
        self.keys.write(f"{where}/{self.place.group_rank}", text)
