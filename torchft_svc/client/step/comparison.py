"""Exchanges fingerprints with the other groups, and finds which group's state differs (rule C3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchft_svc.client.reduce.collectives import Collectives
from torchft_svc.client.reduce.reduction import Reducing
from torchft_svc.client.step.fingerprint import (
    Fingerprint,
    pack_items,
    show_setting,
    take_fingerprint,
    unpack_items,
)
from torchft_svc.client.step.round import Dependencies
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.client.step.sums import StepSums
from torchft_svc.coordination import QuorumResult
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import DifferenceReport
from torchft_svc.core.quorum.worker.state_check import (
    ROW_LENGTH,
    CheckRules,
    Item,
    Part,
    Row,
    StateDifference,
    describe_difference,
    find_difference,
    find_item,
)
from torchft_svc.errors import StateDiverged

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The difference that the check of ``step`` in quorum ``quorum_id`` has found.

    ``sentence`` says what differs. ``groups``: the names of those that are not like the others;
    ``is_ours``: this group is one of them. ``is_news``: this group's check before has not found the
    same. ``last_equal``: the step of this group's last check without a difference (None: none yet).
    """

    sentence: str
    step: int
    quorum_id: int
    groups: tuple[str, ...]
    is_ours: bool
    is_news: bool
    last_equal: int | None

    def as_error(self) -> StateDiverged:
        """The difference as an error."""
        return StateDiverged(self.sentence, self.step, self.groups, self.last_equal)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of a check: ``finding`` is None if all states that were compared are equal.

    ``is_compared``: this group's state was one of them, and not the only one; a group that heals in
    the step has none yet.
    """

    finding: Finding | None
    is_compared: bool


class StateChecks:
    """Compares this group's state with the others' in the steps that do that (rule C1).

    ``optimizers`` returns those that update the models (empty: not known).
    """

    def __init__(
        self,
        deps: Dependencies,
        rules: CheckRules,
        worker: SharedRound,
        sums: StepSums,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._worker = worker
        self._sums = sums
        self._comparison = StateComparison(sums.reducers, optimizers)

    def compare_states(self) -> Finding | None:
        """Compare the states if the present step does that; returns the difference, if any."""
        round_, state = self._worker.round, self._worker.state
        if not round_.compares_states or not self._can_compare() or not self._sums.can_reduce():
            return None
        quorum, step = round_.quorum, round_.common_step
        assert quorum is not None
        is_whole = state.error is None and not state.unhealed and not state.spoiled
        result = self._comparison.compare(
            self._sums.collectives, quorum, step, round_.checks.since, is_compared=is_whole
        )
        finding = None if result is None else result.finding
        if finding is not None:
            self._handle_difference(finding)
        elif result is not None and result.is_compared and round_.checks.is_settled(step):
            with self._worker.changing() as round_:
                round_.step.confirm_state()
        return finding

    def _can_compare(self) -> bool:
        """Whether models are wrapped, and the process group sums exactly; equal in all groups."""
        has_sums = self._sums.collectives.has_device and bool(self._sums.reducers())
        return self._deps.pg.sums_exactly and has_sums

    def _handle_difference(self, finding: Finding) -> None:
        """Report a difference, and discard the step unless it is only to be logged.

        The members are not left: they find the same, maybe a moment later.
        """
        report = DifferenceReport(finding.quorum_id, finding.step, finding.sentence)
        self._deps.client.report_difference(report)
        if self._rules.on_difference == "warn":
            if finding.is_news:
                log.warning("%s", finding.sentence)
            return
        with self._worker.changing() as round_:
            round_.step.latch(finding.as_error())


class StateComparison:
    """Takes fingerprints and exchanges them; for the training thread.

    ``reducers`` returns the wrappers whose models are compared, ``optimizers`` what updates them
    (empty: not known).
    """

    def __init__(
        self,
        reducers: Callable[[], Sequence[Reducing]],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        self._reducers = reducers
        self._optimizers = optimizers
        self._last_equal: int | None = None
        self._last_found: tuple[object, ...] = ()

    def compare(
        self,
        sums: Collectives,
        quorum: QuorumResult,
        step: int,
        since: int,
        *,
        is_compared: bool,
    ) -> CheckResult | None:
        """Compare with the other members, which do the same, and wait for them.

        Returns None if the exchange failed; the error was latched then. ``is_compared``: this group
        has a state of ``step``; ``since``: see `CheckSchedule`.
        """
        if not sums.agree_on_states():
            return None
        fingerprint = self._fingerprint_state() if is_compared else None
        rank, num_groups = quorum.replica_rank, quorum.replica_world_size
        rows = [[0] * ROW_LENGTH for _ in range(num_groups)]
        if fingerprint is not None:
            rows[rank] = fingerprint.row(since).encode()
        summed = sums.sum_rows(rows)
        if summed is None:
            return None
        groups = [Row.decode(numbers) for numbers in summed]
        difference = find_difference(groups)
        if difference is None:
            has_others = sum(group.is_present for group in groups) > 1
            was_compared = fingerprint is not None and has_others
            if was_compared:
                self._last_equal, self._last_found = step, ()
            return CheckResult(None, was_compared)
        item = self._find_item(sums, difference, fingerprint, rank)
        finding = self._report(difference, item, fingerprint, quorum, step)
        return CheckResult(finding, fingerprint is not None)

    def _fingerprint_state(self) -> Fingerprint | None:
        """This group's fingerprint; None if it cannot be read: the others must not wait for it."""
        try:
            return take_fingerprint(self._reducers(), self._optimizers())
        except Exception:
            log.exception("this group's state cannot be compared with the others'")
            return None

    def _find_item(
        self,
        sums: Collectives,
        difference: StateDifference,
        fingerprint: Fingerprint | None,
        rank: int,
    ) -> Item | None:
        """The first item that differs: one group of each side sends all of the part's."""
        num = difference.num_items
        if not num:
            return None
        rows = [[0] * (2 * num) for _ in range(2)]
        for row, sender in enumerate((difference.first, difference.majority[0])):
            if rank == sender and fingerprint is not None:
                rows[row] = pack_items(fingerprint.items[difference.part], num)
        summed = sums.sum_rows(rows)
        if summed is None:
            return None
        return find_item(unpack_items(summed[0]), unpack_items(summed[1]))

    def _report(
        self,
        difference: StateDifference,
        item: Item | None,
        fingerprint: Fingerprint | None,
        quorum: QuorumResult,
        step: int,
    ) -> Finding:
        names = dict(enumerate(map(stable_name, quorum.replica_ids)))

        def name_item(part: Part, digest: int) -> str:
            return "" if fingerprint is None else fingerprint.name(part, digest)

        sentence = describe_difference(
            difference, item, name_item, show_setting, names, step, self._last_equal
        )
        groups = tuple(names[each] for each in difference.minority)
        found = (difference.part, groups, item and item.name)
        is_news, self._last_found = found != self._last_found, found
        return Finding(
            sentence=sentence,
            step=step,
            quorum_id=quorum.quorum_id,
            groups=groups,
            is_ours=quorum.replica_rank in difference.minority,
            is_news=is_news,
            last_equal=self._last_equal,
        )
