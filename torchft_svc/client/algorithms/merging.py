"""Merges what the learners have delivered, on a thread of its own: `Merger`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from torchft_svc.client.algorithms.agreed_weights import AgreedWeights, BucketedAverage
from torchft_svc.client.algorithms.learner_workers import LearnerWorkers
from torchft_svc.client.algorithms.merge_rule import LearnerReport, MergeRule, usual_pace_s
from torchft_svc.errors import DeadlineExceeded, PeerError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

log = logging.getLogger(__name__)

_STATE_KEY = "DecoupledDiLoCo"
# The learners look so often within a usual pace whether a fragment is to be merged.
_LOOKS_PER_PACE = 20
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# After an error of the network.
_RETRY_PAUSE_S = 0.5
# A step takes milliseconds where nothing is wrong.
_STOP_S = 1.0
_FIELDS = 3  # of a report
# The first inner step may compile the model.
_FIRST_STEP_S = 120.0
_NO_STEP = (
    "no inner step since this learner joined %.0f s ago: nothing of it is merged until the program "
    "calls step() of the optimizer that DecoupledDiLoCo was given"
)


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a learner has learned in a fragment since its last contribution to a merge.

    ``number``: of this fragment's deliveries, from 1 on. ``deltas``: the merged weights minus its
    own. ``tokens``: how many it has seen since its last contribution; ``seen``: how many in all.
    ``since``: when its first delivery since then was made (monotonic). ``num_restarts``: how often
    the learner had begun anew with the merged weights.
    """

    number: int
    deltas: list[torch.Tensor]
    tokens: int
    seen: int
    since: float
    num_restarts: int


@dataclass(frozen=True, slots=True)
class Offer:
    """What a learner offers in one look: a delivery, whose tokens are those of all its workers.

    ``waiting_s`` and ``pace_s``: see `LearnerReport`; those of its first worker.
    """

    delivery: Delivery | None
    waiting_s: float
    pace_s: float

    def report(self) -> LearnerReport:
        if self.delivery is None:
            return LearnerReport(0.0, 0.0, self.pace_s)
        return LearnerReport(float(self.delivery.tokens), self.waiting_s, self.pace_s)


class Fragment:
    """A part of the model: its merged weights, its outer optimizer, and what is to be merged.

    The merged weights and the optimizer are bitwise equal in all learners after each merge. All
    methods need the `Merger`'s lock.
    """

    def __init__(
        self,
        weights: AgreedWeights,
        make_outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        average: BucketedAverage,
    ) -> None:
        self.weights = weights
        self.average = average
        self.merged: list[torch.Tensor] = [torch.nn.Parameter(each) for each in weights.values]
        self.outer = make_outer(self.merged)
        self.delivery: Delivery | None = None
        self._seen = 0  # tokens whose progress is merged
        self._shift: list[torch.Tensor] | None = None  # what `adopt` adds to its own weights
        self._is_restarting = False  # `adopt` replaces its own weights by the merged ones
        self._num_restarts = 0  # how often it did that
        self._num_delivered = 0

    def restart(self) -> None:
        """Begin anew with the merged weights in the next `adopt`."""
        self._is_restarting = True

    @torch.no_grad()
    def adopt(self, seen: int) -> None:
        """Apply the merges since the last call to the learner's own weights.

        They keep what it has learned since its last contribution. Called on the thread that trains.
        ``seen``: how many tokens the learner has seen.
        """
        if self._is_restarting:
            self.weights.restore()
            self._seen, self.delivery, self._shift = seen, None, None
            self._is_restarting = False
            self._num_restarts += 1
        elif self._shift is not None:
            for own, change in zip(self.weights.local_tensors(), self._shift, strict=True):
                own.add_(change.to(own.device))
            self._shift = None

    @torch.no_grad()
    def deliver(self, seen: int, now: float) -> None:
        """Deliver what was learned since the last contribution, in place of an earlier delivery.

        Called right after `adopt`.
        """
        tokens = seen - self._seen
        if tokens <= 0:
            return
        own = self.weights.local_tensors()
        deltas = [
            value - each.to(value.device)
            for value, each in zip(self.weights.values, own, strict=True)
        ]
        since = now if self.delivery is None else self.delivery.since
        self._num_delivered += 1
        self.delivery = Delivery(
            self._num_delivered, deltas, tokens, seen, since, self._num_restarts
        )

    @torch.no_grad()
    def merge(self, averages: Sequence[torch.Tensor], contribution: Delivery | None) -> None:
        """Apply ``averages`` by the outer optimizer; ``contribution``: this learner's part."""
        before = [value.clone() for value in self.weights.values]
        for parameter, average in zip(self.merged, averages, strict=True):
            parameter.grad = average
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self._shift_from(before, contribution)

    @torch.no_grad()
    def heal(self, state: dict[str, Any], *, keeps_progress: bool, sent: Delivery | None) -> None:
        """Load the merged weights of another learner.

        ``keeps_progress``: this learner has only missed merges, and keeps what it has learned since
        its last contribution. ``sent``: its contribution to a merge whose result it does not know,
        and others may have. That counts as merged, so that nothing is merged twice.
        """
        before = [value.clone() for value in self.weights.values]
        self.average.reset_errors()
        self.weights.load_state_dict(state["merged_weights"])
        self.outer.load_state_dict(state["outer_optimizer"])
        if keeps_progress:
            self._shift_from(before, sent)
        else:
            self.restart()

    def state_dict(self) -> dict[str, Any]:
        """What a learner heals by."""
        return {
            "outer_optimizer": self.outer.state_dict(),
            "merged_weights": self.weights.state_dict(),
        }

    def _shift_from(self, before: list[torch.Tensor], contribution: Delivery | None) -> None:
        """Let `adopt` move the own weights as the merged ones have moved since ``before``.

        What this learner has contributed is in them already.
        """
        shift = [
            value - earlier for value, earlier in zip(self.weights.values, before, strict=True)
        ]
        if contribution is not None and contribution.num_restarts == self._num_restarts:
            torch._foreach_add_(shift, contribution.deltas)
            self._seen = contribution.seen
            self.delivery = None  # a newer one holds what was merged now
        if self._shift is not None:
            torch._foreach_add_(shift, self._shift)
        self._shift = shift


class Merger:
    """Runs the manager's steps on a thread of its own, and merges fragments in some of them.

    In each step all living learners report whether they have delivered the next fragment. All of
    them compute from the same reports whether it is merged. Training never waits for this thread.

    All workers of a learner look at the same time: they exchange what each of them has delivered,
    and their manager counts their votes, so they merge the same delivery, or none.

    ``lock`` protects the fragments. Where a learner has one worker, the thread that trains never
    waits for it. Whoever holds it waits for nothing, except for the learner's other workers, which
    come to the same point.
    """

    def __init__(
        self,
        manager: Manager,
        fragments: Sequence[Fragment],
        rule: MergeRule,
        workers: LearnerWorkers,
    ) -> None:
        self.lock = threading.Lock()
        self.pace_s = 0.0  # of this learner; 0: unknown
        self.merges = 0
        self.merged_tokens = 0  # of all learners, in all fragments
        self.num_learners = 0
        self.trains = False  # whether an inner step was made
        self._manager = manager
        self._fragments = fragments
        self._rule = rule
        self._workers = workers
        self._error: BaseException | None = None
        self._num_heals = 0
        self._is_in_phase = False  # this learner's weights follow from the merged ones
        self._sent: tuple[Fragment, Delivery] | None = None  # to a merge whose result is unknown
        self._pause_s = _SHORTEST_PAUSE_S
        self._last_reason = ""  # of an error of the network
        self._stopping = threading.Event()
        self._begun = threading.Event()
        self._begun_at = math.inf  # infinity: not yet, or it was warned of what follows
        self._thread = threading.Thread(target=self._run, name="torchft-merger", daemon=True)
        manager.register_state_dict_fn(_STATE_KEY, self.load_state, self.save_state)

    @property
    def next_fragment(self) -> Fragment:
        """The fragment that is merged next."""
        return self._fragments[self.merges % len(self._fragments)]

    def start(self, timeout_s: float) -> None:
        """Start the thread, and wait until this learner has the merged weights.

        A prepared spare waits without that limit until it has a place (rule G1).

        Raises:
            PeerError: there was no quorum within ``timeout_s``.
        """
        self._thread.start()
        stands_by = True
        while stands_by and not self._begun.is_set():
            stands_by = self._manager._worker.round.stands_by
            self._begun.wait(timeout_s)
        self.raise_error()
        if not self._begun.is_set():
            self._stopping.set()
            raise DeadlineExceeded("joining the learners", timeout_s, self._last_reason)

    def stop(self) -> None:
        """End the thread after the step that is under way; waits a moment for that.

        A step that waits for other learners is ended by `Manager.shutdown`.
        """
        self._stopping.set()
        self._thread.join(_STOP_S)

    def raise_error(self) -> None:
        """Raise what has ended the thread, if something has."""
        if self._error is not None:
            raise self._error

    def save_state(self) -> dict[str, Any]:
        """What a learner heals by; live tensors."""
        return {
            "merges": self.merges,
            "merged_tokens": self.merged_tokens,
            "fragments": [each.state_dict() for each in self._fragments],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the merged weights and the outer optimizers."""
        with self.lock:
            self._num_heals += 1
            sent, self._sent = self._sent, None
            if state["merges"] == self.merges:
                sent = None  # no learner has committed that merge
            for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
                fragment.heal(
                    saved,
                    keeps_progress=self._is_in_phase,
                    sent=sent[1] if sent is not None and sent[0] is fragment else None,
                )
            self.merges, self.merged_tokens = state["merges"], state["merged_tokens"]

    def _run(self) -> None:
        try:
            while self._run_look():
                pass
        except BaseException as error:  # noqa: BLE001 - raised on the thread that trains
            self._error = error
        self._begun.set()

    def _run_look(self) -> bool:
        """Run a step of the manager after a pause, and return whether another one follows.

        An error of the network is only logged.
        """
        self._stopping.wait(self._pause_s if self._begun.is_set() else 0.0)
        self._warn_without_steps()
        with self.lock:
            heals, delivery = self._num_heals, self.next_fragment.delivery
        offer = self._exchange_offers(delivery)
        if offer is None:
            return False
        try:
            self._run_step(offer, heals)
        except PeerError as error:
            reason = str(error)
            if reason != self._last_reason:
                log.warning("no merges for now, training goes on: %s", reason)
            self._last_reason = reason
            self._stopping.wait(_RETRY_PAUSE_S)
        return True

    def _warn_without_steps(self) -> None:
        """Warn, once, if the program seems to step another optimizer."""
        waited_s = time.monotonic() - self._begun_at
        if not self.trains and waited_s > _FIRST_STEP_S:
            self._begun_at = math.inf
            log.warning(_NO_STEP, waited_s)

    def _exchange_offers(self, delivery: Delivery | None) -> Offer | None:
        """Return what this learner offers, equal in all of its workers (None: one of them ends)."""
        # All workers must be at one step, too: one that has lost a decision heals before it
        # contributes again, and the others do not.
        mine = [float(self._manager.current_step()), 0.0]
        tokens, waiting_s = 0, 0.0
        if delivery is not None:
            mine[1] = delivery.number
            tokens, waiting_s = delivery.tokens, time.monotonic() - delivery.since
        is_stopping = self._stopping.is_set()
        found = self._workers.gather_in_merger([*mine, is_stopping, tokens, waiting_s, self.pace_s])
        if any(each[2] for each in found):
            return None
        *_, waiting_s, pace_s = found[0]
        if delivery is None or any(each[:2] != mine for each in found):
            return Offer(None, 0.0, pace_s)  # not all workers have delivered it
        tokens = sum(int(each[3]) for each in found)
        return Offer(replace(delivery, tokens=tokens), waiting_s, pace_s)

    def _run_step(self, offer: Offer, heals: int) -> None:
        """Merge the next fragment, if the learners' offers make it due.

        ``heals``: how many heals there were when the offer was made. A later one may have merged
        the offer, or made another fragment the next one.
        """
        self._manager.start_quorum()
        contributes = self._manager.is_participating()  # a spare is not
        with self.lock:
            fragment = self.next_fragment
            if not contributes or heals != self._num_heals:
                offer = replace(offer, delivery=None)
        delivery = offer.delivery
        reports = self._exchange_reports(offer)
        is_due = self._rule.is_due(reports)
        if is_due:
            self._sent = None if delivery is None else (fragment, delivery)
            launch_average(fragment, delivery, reports)
        with self._manager.commit() as committed:
            if committed and is_due:
                with self.lock:
                    fragment.merge(fragment.average.pop_averages(), delivery)
                    self.merges += 1
                    self.merged_tokens += int(sum(each.tokens for each in reports))
        if not committed:
            fragment.average.drop_averages()
            self._last_reason = str(self._manager.errored() or self._last_reason)
            return
        self._sent = None
        self._last_reason = ""
        if is_due:
            self._log_merge(reports)
        self.num_learners = len(reports)
        if not self._is_in_phase:
            self._is_in_phase, self._begun_at = True, time.monotonic()
        pause_s = usual_pace_s(reports) / _LOOKS_PER_PACE
        self._pause_s = min(max(pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
        self._begun.set()

    def _exchange_reports(self, offer: Offer) -> list[LearnerReport]:
        """Return the reports of all learners, bitwise equal in all of them.

        Empty after an error, which discards the step.
        """
        own = self._manager.participating_rank()
        numbers: list[float] = [0.0] * (_FIELDS * self._manager.num_participants())
        if own is not None:
            numbers[_FIELDS * own : _FIELDS * (own + 1)] = astuple(offer.report())
        sums = self._manager._sums.sum_numbers(numbers)
        if sums is None:
            return []
        return [
            LearnerReport(*sums[first : first + _FIELDS]) for first in range(0, len(sums), _FIELDS)
        ]

    def _log_merge(self, reports: list[LearnerReport]) -> None:
        delivered = [each for each in reports if each.tokens > 0]
        log.info(
            "merge %d: %d of %d learners, %d tokens",
            self.merges,
            len(delivered),
            len(reports),
            sum(each.tokens for each in delivered),
        )


def launch_average(
    fragment: Fragment, delivery: Delivery | None, reports: Sequence[LearnerReport]
) -> None:
    """Average the deltas, weighted by tokens; a learner that has not delivered sums zeros."""
    total = sum(each.tokens for each in reports)
    # The average divides by the number of learners.
    share = 0.0 if delivery is None else delivery.tokens * len(reports) / total

    def fill(index: int, out: torch.Tensor) -> None:
        if delivery is None:
            out.zero_()
        else:
            torch.mul(delivery.deltas[index], share, out=out)

    fragment.average.launch(fill)
    fragment.average.wait()
