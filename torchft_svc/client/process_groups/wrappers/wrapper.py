"""A process group that changes the behavior of another one."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

from torchft_svc.client.process_groups.base import ProcessGroup
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.recording.recorder import FlightRecorder


class ProcessGroupWrapper(ProcessGroup):
    """Forwards everything to ``pg``; subclasses override what they change."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg._timeout)
        self._pg = pg

    @property
    def parent(self) -> ProcessGroup:
        """The wrapped group."""
        return self._pg

    def _configure(self, members: Members) -> None:
        self._pg.configure(**dataclasses.asdict(members))

    def _launch(self, name: str, args: Any, kwargs: Any) -> Any:
        return self._pg._launch(name, args, kwargs)

    def prepare(self) -> None:
        """See `ProcessGroup.prepare`."""
        self._pg.prepare()

    def abort(self) -> None:
        """See `ProcessGroup.abort`."""
        self._pg.abort()

    def cut(self) -> None:
        """See `ProcessGroup.cut`."""
        self._pg.cut()

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

    def record_to(self, recorder: FlightRecorder) -> None:
        """See `ProcessGroup.record_to`."""
        self._pg.record_to(recorder)

    def save_record(self, reason: str) -> None:
        """See `ProcessGroup.save_record`."""
        self._pg.save_record(reason)

    def set_timeout(self, timeout: timedelta) -> None:
        """See `ProcessGroup.set_timeout`."""
        self._pg.set_timeout(timeout)

    def rank(self) -> int:
        """This member's index."""
        return self._pg.rank()

    def size(self) -> int:
        """How many members there are."""
        return self._pg.size()
