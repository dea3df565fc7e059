"""A process group that changes what another one does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torchft_svc.client.process_groups.base import ProcessGroup


class ProcessGroupWrapper(ProcessGroup):
    """Hands everything to ``pg``; subclasses change what they are about."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg._timeout)
        self._pg = pg

    @property
    def parent(self) -> ProcessGroup:
        """The wrapped group."""
        return self._pg

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """See `ProcessGroup.configure`."""
        self._pg.configure(
            store_addr,
            replica_id,
            rank,
            world_size,
            quorum_id,
            group_rank,
            group_world_size,
            global_ranks,
        )

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._pg._launch(name, args, kwargs)

    def abort(self) -> None:
        """See `ProcessGroup.abort`."""
        self._pg.abort()

    def errored(self) -> Exception | None:
        """See `ProcessGroup.errored`."""
        return self._pg.errored()

    def shutdown(self) -> None:
        """See `ProcessGroup.shutdown`."""
        self._pg.shutdown()

    def lose_member(self, quorum_id: int, reason: str) -> None:
        """See `ProcessGroup.lose_member`."""
        self._pg.lose_member(quorum_id, reason)

    def interrupt(self) -> None:
        """See `ProcessGroup.interrupt`."""
        self._pg.interrupt()

    def tidy(self) -> None:
        """See `ProcessGroup.tidy`."""
        self._pg.tidy()

    def set_timeout(self, timeout: timedelta) -> None:
        """See `ProcessGroup.set_timeout`."""
        self._pg.set_timeout(timeout)

    def rank(self) -> int:
        """This member's index."""
        return self._pg.rank()

    def size(self) -> int:
        """How many members there are."""
        return self._pg.size()
