"""Decides whether each sample of an epoch was in exactly one committed step: pure arithmetic.

The ledger of a job: what each group had read in a step, written down before its vote, and which
steps were committed in which quorum. A group that died after its vote has written both, or what it
read at least; what another group has committed with it shows that it counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """What one group, of ``size`` that contribute, had read when it voted on the step after
    ``step``: the indices in the data set. ``rank`` is None if it does not contribute."""

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
        """Record what a group has read; in one quorum a step is voted on once."""
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
        """What was lost or used twice, in words; none if every sample was used once."""
        found: list[str] = []
        used: dict[int, Counter[int]] = defaultdict(Counter)
        steps = sorted(self._quorums)
        if steps != list(range(len(steps))):
            found.append(f"commits are missing: {sorted({*range(len(steps))} - {*steps})}")
        for step in steps:
            parts = self._parts.get((step, self._quorums[step]), {})
            found += self._faults_of_step(step, list(parts.values()))
            for part in parts.values():
                used[part.epoch].update(part.indices)
        for number, epoch in enumerate(sorted(used)):
            found += self._faults_of_epoch(epoch, used[epoch], is_over=number < len(used) - 1)
        return found

    def _faults_of_step(self, step: int, parts: Sequence[ReadPart]) -> Iterable[str]:
        if not parts:
            yield f"step {step}: nobody has read anything"
            return
        size = parts[0].size
        missing = {*range(size)} - {part.rank for part in parts}
        if missing:
            yield f"step {step}: ranks {sorted(missing)} of {size} have read nothing"
        if len({part.epoch for part in parts}) > 1:
            yield f"step {step}: in epochs {sorted({part.epoch for part in parts})}"
        num = sum(len(part.indices) for part in parts)
        whole, rest = divmod(self.num_samples, self.batch)
        is_last = rest and step % (whole + 1) == whole
        wanted = rest if is_last else self.batch
        if num != wanted:
            yield f"step {step}: {num} samples instead of {wanted}"

    def _faults_of_epoch(self, epoch: int, used: Counter[int], *, is_over: bool) -> Iterable[str]:
        twice = sorted(index for index, num in used.items() if num > 1)
        if twice:
            yield f"epoch {epoch}: used more than once: {twice[:10]}"
        if is_over and (lost := sorted({*range(self.num_samples)} - {*used})):
            yield f"epoch {epoch}: never used: {lost[:10]}"
