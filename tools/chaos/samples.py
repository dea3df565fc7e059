"""Decides whether each sample of an epoch was in exactly one committed step: pure arithmetic.

The ledger of a job: what each group had read in a step, written down before it is summed, and which
steps were committed in which quorum. A group that died in a step has written what it read if the
others can have summed it; what another group has committed with it shows that it counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.demo.events import Committed, Event, SamplesRead

# What the workers of a run read: the length of the data set, and the global batch size.
PROGRAM = {"samples": 400, "batch": 12}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """The indices in the data set that one of ``size`` contributing groups read for a step.

    The step is the one after ``step``. ``rank`` is None if the group does not contribute.
    """

    step: int
    quorum_id: int
    rank: int | None
    size: int
    epoch: int
    indices: tuple[int, ...]


@dataclass(slots=True)
class SampleLedger:
    """The samples of a job over ``num_samples``, ``batch`` of them in a step, in short last steps.

    A step that was committed in two quorums is counted in the last one: the group that committed it
    in the other one was alone, and died or healed (see `verdicts.lone_ends`).
    """

    num_samples: int
    batch: int
    _parts: dict[tuple[int, int], dict[int, ReadPart]] = field(default_factory=dict)
    _quorums: dict[int, int] = field(default_factory=dict)  # by the step before it

    def add_read(self, part: ReadPart) -> None:
        """Record what a group has read until now; the last record of a quorum's step holds."""
        if part.rank is not None:
            key = part.step, part.quorum_id
            self._parts.setdefault(key, {})[part.rank] = part

    def add_commit(self, step: int, quorum_id: int) -> None:
        """Record that the step after ``step`` was committed."""
        self._quorums[step] = max(quorum_id, self._quorums.get(step, 0))

    @property
    def num_steps(self) -> int:
        return len(self._quorums)

    def faults(self) -> list[str]:
        """What was lost or used twice, in words; none if every sample was used once.

        The ledger may begin at any step. Epochs are complete if all of their steps are in it.
        """
        found: list[str] = []
        used: dict[int, Counter[int]] = defaultdict(Counter)
        steps = sorted(self._quorums)
        if steps != list(range(steps[0], steps[-1] + 1) if steps else ()):
            found.append(f"commits are missing between {steps[0]} and {steps[-1]}")
        for step in steps:
            parts = list(self._parts.get((step, self._quorums[step]), {}).values())
            found += self._faults_of_step(step, parts)
            for part in parts:
                used[step // self._steps_of_epoch].update(part.indices)
        whole = Counter(step // self._steps_of_epoch for step in steps)
        for epoch, counts in used.items():
            is_whole = whole[epoch] == self._steps_of_epoch
            found += self._faults_of_epoch(epoch, counts, is_whole=is_whole)
        return found

    @property
    def _steps_of_epoch(self) -> int:
        return -(-self.num_samples // self.batch)

    def _faults_of_step(self, step: int, parts: Sequence[ReadPart]) -> Iterable[str]:
        if not parts:
            yield f"step {step}: nobody has read anything"
            return
        size = parts[0].size
        missing = {*range(size)} - {part.rank for part in parts}
        if missing:
            yield f"step {step}: ranks {sorted(missing)} of {size} have read nothing"
        epoch, number = divmod(step, self._steps_of_epoch)
        if any(part.epoch != epoch for part in parts):
            yield f"step {step}: in epochs {sorted({part.epoch for part in parts})}, not {epoch}"
        num = sum(len(part.indices) for part in parts)
        wanted = min(self.batch, self.num_samples - number * self.batch)
        if num != wanted:
            yield f"step {step}: {num} samples instead of {wanted}"

    def _faults_of_epoch(self, epoch: int, used: Counter[int], *, is_whole: bool) -> Iterable[str]:
        twice = sorted(index for index, num in used.items() if num > 1)
        if twice:
            yield f"epoch {epoch}: used more than once: {twice[:10]}"
        if is_whole and (lost := sorted({*range(self.num_samples)} - {*used})):
            yield f"epoch {epoch}: never used: {lost[:10]}"


def ledger_of(events: Sequence[Event], num_samples: int, batch: int) -> SampleLedger:
    """What the workers of a job have used, by the events of all of them."""
    num_workers = 1 + max((event.worker for event in events), default=0)
    ledger = SampleLedger(num_samples, batch)
    for event in events:
        if isinstance(event, SamplesRead) and event.rank is not None:
            ledger.add_read(
                ReadPart(
                    step=event.step,
                    quorum_id=event.quorum_id,
                    rank=event.rank * num_workers + event.worker,
                    size=event.num_participants * num_workers,
                    epoch=event.epoch,
                    indices=tuple(map(int, event.indices.split())),
                )
            )
        elif isinstance(event, Committed):
            ledger.add_commit(event.step - 1, event.quorum_id)
    return ledger
