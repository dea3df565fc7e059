"""Makes spans of the rounds in which a worker's quorum changes, or it heals."""

from __future__ import annotations

import time

from torchft_svc.client.step.round import RoundTracer
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.quorum.worker.time_use import RoundWork
from torchft_svc.telemetry.otel import Span, Telemetry

_NAMES = {
    RoundWork.WAITING: "torchft.quorum",
    RoundWork.RECONFIGURING: "torchft.reconfigure",
    RoundWork.HEALING: "torchft.heal",
}


class OtelTracer(RoundTracer):
    """The spans of one worker; for its background thread."""

    def __init__(self, telemetry: Telemetry, job: str, group: str, group_rank: int) -> None:
        self._telemetry = telemetry
        self._job = job
        self._fields: dict[str, str | int] = {
            "torchft.job": job,
            "torchft.group": group,
            "torchft.rank": group_rank,
        }
        self._changes: list[tuple[int, RoundWork | None]] = []
        self._quorum_id = 0

    def change_work(self, work: RoundWork | None) -> None:
        """Record what the round does from now on."""
        self._changes.append((time.time_ns(), work))

    def end_round(self, quorum: QuorumResult | None, healed_bytes: int) -> None:
        """Export the spans of the round, if it has changed something."""
        changes, self._changes = self._changes, []
        done = {work for _, work in changes}
        if quorum is None or not changes:
            return
        is_new = quorum.quorum_id != self._quorum_id
        self._quorum_id = quorum.quorum_id
        if not (is_new or done & {RoundWork.RECONFIGURING, RoundWork.HEALING}):
            return
        fields = {
            **self._fields,
            "torchft.quorum_id": quorum.quorum_id,
            "torchft.step": quorum.max_step,
        }
        ends = [at for at, _ in changes[1:]] + [changes[-1][0]]
        spans: list[Span] = [("torchft.round", changes[0][0], changes[-1][0], fields)]
        for (began_ns, work), ended_ns in zip(changes, ends, strict=True):
            if work is not None:
                own = {"torchft.heal_bytes": healed_bytes} if work is RoundWork.HEALING else {}
                spans.append((_NAMES[work], began_ns, ended_ns, {**fields, **own}))
        self._telemetry.add_spans(self._job, quorum.quorum_id, spans)
