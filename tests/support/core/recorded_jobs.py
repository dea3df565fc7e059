"""The lighthouse's `Jobs` as a function: each input returns what it leads to, as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.quorum.lighthouse.jobs import JobReport, Jobs, ReportHang, ReportPace
from torchft_svc.core.quorum.session_messages import Drain, Kill, Lost, NewcomerWaits, News
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum, QuorumConfig
from torchft_svc.errors import TorchFTError


@dataclass(frozen=True, slots=True)
class AnswerQuorum:
    """`Outputs.publish`."""

    job: str
    callers: tuple[int, ...]
    quorum: Quorum
    lost_from: int | None = None
    begins_anew: bool = False


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """`Outputs.refuse`."""

    caller: int
    error: TorchFTError


@dataclass(frozen=True, slots=True)
class EndTerm:
    """`Outputs.send` of the end of a term."""

    job: str
    news: TermEnds
    recipients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """`Outputs.send` of a newcomer, to the living members of the last quorum."""

    job: str
    replica_id: str


Record = AnswerQuorum | RefuseRequest | EndTerm | Announce | JobReport

_INPUTS = {
    "request",
    "withdraw",
    "opened",
    "heartbeat",
    "leave",
    "went_silent",
    "record_report",
    "accept_loss",
    "tick",
}


class Recorder:
    """The `Outputs` of a `RecordedJobs`."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def pop_records(self) -> tuple[Record, ...]:
        records, self._records = self._records, []
        return tuple(records)

    def send(self, job: str, replica_ids: Iterable[str], news: News) -> None:
        """Record news; a loss and a kill are recorded already, by the report that precedes them."""
        if isinstance(news, TermEnds):
            self._records.append(EndTerm(job, news, tuple(replica_ids)))
        elif isinstance(news, NewcomerWaits):
            self._records.append(Announce(job, news.replica_id))
        elif isinstance(news, Lost):
            report: Any = self._records[-1]
            sent = (news.replica_id, news.reason, news.quorum_id, tuple(replica_ids))
            assert sent == (report.replica_id, report.reason, report.quorum_id, report.recipients)
        elif isinstance(news, Drain):
            report = self._records[-1]
            assert isinstance(report, ReportPace)
            assert (report.evict, tuple(replica_ids)) == (True, (report.replica_id,))
        else:
            assert isinstance(news, Kill)
            hang = self._records[-1]
            assert isinstance(hang, ReportHang)
            assert (hang.kill, tuple(replica_ids)) == (True, (hang.replica_id,))

    def publish(
        self,
        job: str,
        callers: tuple[int, ...],
        quorum: Quorum,
        lost_from: int | None,
        begins_anew: bool,
    ) -> None:
        self._records.append(AnswerQuorum(job, callers, quorum, lost_from, begins_anew))

    def refuse(self, caller: int, error: TorchFTError) -> None:
        self._records.append(RefuseRequest(caller, error))

    def await_quorum(self, caller: int, now: float) -> None:
        """Record nothing: the report of the place precedes it."""

    def await_place(self, caller: int) -> None:
        """Record nothing: the caller waits on."""

    def report(self, report: JobReport) -> None:
        self._records.append(report)


class RecordedJobs:
    """`Jobs`, whose inputs return records; one that is refused leads to nothing."""

    def __init__(
        self, config: QuorumConfig, first_id: int = 0, id_stride: int = 1, *, now: float = 0.0
    ) -> None:
        self._recorder = Recorder()
        self._recorded = Jobs(config, self._recorder, first_id, id_stride, now=now)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._recorded, name)
        if name not in _INPUTS:
            return found

        def feed(*what: Any, **how: Any) -> tuple[Record, ...]:
            try:
                found(*what, **how)
            except Exception:
                assert not self._recorder.pop_records()
                raise
            return self._recorder.pop_records()

        return feed
