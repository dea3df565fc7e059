"""Decoupled DiLoCo: learners train at their own pace, and merge what they have learned.

After Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, 2026 (arXiv
2604.21428). There a process of its own merges; here all learners do, by the sums of their managers:
see docs/design/decoupled-diloco.md.
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchft_svc.client.algorithms.agreed_weights import (
    DEFAULT_BUCKET_MB,
    AgreedWeights,
    BucketedAverage,
    Rounding,
)
from torchft_svc.client.algorithms.learner_workers import LearnerWorkers
from torchft_svc.client.algorithms.merge_rule import MergeRule
from torchft_svc.client.algorithms.merging import Fragment, Merger
from torchft_svc.client.algorithms.periodic_sync import (
    SyncedWeights,
    check_disjoint,
    check_fragments,
    check_is_plain,
    check_owns_steps,
    check_serves_one,
    check_trains,
)
from torchft_svc.errors import ConfigError, DeadlineExceeded, RequestRefused

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_CPU = torch.device("cpu")
# Workers of a learner apply a merge at almost the same moment.
_SETTLE_PAUSE_S = 0.005
_NO_FUNCTION = "a function is needed that makes an optimizer of the weights which it is given"
_ONLY_ON_DEVICES = (
    "the merged weights are on the CPU, where it sums nothing: give the manager ProcessGroupGloo"
)
_OTHER_WEIGHTS = "it was made without some of the weights that it is to train: give it all of them"


class DecoupledDiLoCo:
    """Trains at this learner's own pace; merges with the others happen beside training.

    A *learner* is a replica group. With ``n`` fragments it *delivers* one after each
    ``sync_every / n`` inner steps: a copy of what it has learned in that fragment since its last
    contribution. A thread of its own runs the manager's steps. In one of them the fragment is
    *merged*: when all living learners have delivered it, or a grace window after ``min_replicas``
    have. The deltas are averaged by the tokens that they stand for, and the outer optimizer applies
    the average to the merged weights. Between two inner steps, a learner adopts what the merge has
    changed, and keeps what it has learned since its own contribution: that, and what was delivered
    too late, is in its next contribution. So each token counts in exactly one merge.

    Training never waits: not for a merge, nor for a learner that is slow, frozen or dead, nor for
    the lighthouse. All learners have the merged weights and the outer optimizer, bitwise equal
    after each merge. Their own weights differ.

    A learner that joins has the merged weights before its first inner step. Its inner optimizer
    begins anew.

    In a learner of several workers each of them merges its own shards. Their world is that of
    ``torch.distributed``. They make the same inner steps; at those with a delivery they wait for
    one another, deliver and adopt. If one is lost, all of them end, and the group starts again.

    Args:
        manager: with ``use_async_quorum=False`` and a process group that sums on CPUs, such as
            gloo. Its state functions must not return the model: only merged weights are healed.
        model_fragments: disjoint parts of the model.
        inner_optimizer: applies the inner steps.
        outer_optimizer: makes the optimizer of the merged weights that it is given, which are on
            the CPU, such as ``lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9,
            nesterov=True)``; equal in all learners.
        sync_every: inner steps in which each fragment is delivered once; a multiple of the number
            of fragments. Learners may differ in it.
        min_replicas: how many learners must have delivered before the grace window begins; equal
            in all learners.
        grace: the grace window, as a multiple of the usual time between two deliveries; equal in
            all learners.
        bucket_cap_mb: how much is averaged at once, in MiB.
        should_quantize: average in 8-bit numbers, see `Manager.allreduce`; equal in all learners.
        error_feedback: with ``should_quantize``, add what rounding has left out of an average to
            the next one of the fragment; takes 4 bytes for each element. A learner that was away,
            or joins, begins without such errors.

    Raises:
        ConfigError: an argument is invalid, or the manager serves another algorithm.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        sync_every: int,
        *,
        min_replicas: int = 1,
        grace: float = 1.0,
        bucket_cap_mb: float = DEFAULT_BUCKET_MB,
        should_quantize: bool | str = False,
        error_feedback: bool = False,
    ) -> None:
        check_is_plain("inner_optimizer", inner_optimizer)
        check_fragments(manager, len(model_fragments), sync_every)
        manager._sums.check_reduces_on(_CPU, _ONLY_ON_DEVICES)
        if not callable(outer_optimizer):
            raise ConfigError("outer_optimizer", type(outer_optimizer).__name__, _NO_FUNCTION)
        rule = MergeRule(min_replicas, grace)
        rounding = Rounding.of(should_quantize, error_feedback=error_feedback)
        agreed = [AgreedWeights(each, _CPU, False) for each in model_fragments]
        check_disjoint(agreed)
        check_trains("inner_optimizer", inner_optimizer, agreed)
        rounding.check(agreed)
        check_serves_one(manager, type(self).__name__)
        self._manager = manager
        self._optimizer = inner_optimizer
        self._interval = sync_every // len(agreed)
        self._fragments = [
            Fragment(
                weights,
                outer_optimizer,
                BucketedAverage(manager, weights.values, bucket_cap_mb, rounding=rounding),
            )
            for weights in agreed
        ]
        for fragment in self._fragments:
            _check_outer(fragment)
        _check_not_healed(manager, agreed)
        layout = ", ".join(each.layout for each in agreed)
        outer = self._fragments[0].outer.defaults
        self._synced = SyncedWeights(
            f"DecoupledDiLoCo, min_replicas {min_replicas}, grace {grace:g}, outer {outer}, "
            f"{rounding}: {layout}",
            agreed,
        )
        timeouts = manager._rules.timeouts
        self._quorum_s = timeouts.quorum_s
        # A worker may wait for a quorum, and for a step after that, while another one is here.
        patience = timedelta(seconds=timeouts.quorum_s + timeouts.collective_s)
        self._workers = LearnerWorkers(manager.place_in_group()[1], patience)
        self._merger = Merger(manager, self._fragments, rule, self._workers)
        manager.register_reducer(self._synced)
        self._merges = 0  # that were adopted
        self._count = 0  # inner steps since the last delivery
        self._seen = 0  # tokens
        self._new_tokens = 0  # of the inner step that is under way
        self._delivered_at = 0.0
        self._is_entered = False
        self._hooks: list[RemovableHandle] = []

    @property
    def merges(self) -> int:
        """The number of merges of the job, each of one fragment, that this learner has adopted."""
        return self._merges

    @property
    def merged_tokens(self) -> int:
        """How many tokens of all learners are merged."""
        return self._merger.merged_tokens // len(self._fragments)

    @property
    def num_learners(self) -> int:
        """How many learners were alive in the manager's last step."""
        return self._merger.num_learners

    @property
    def tokens(self) -> int:
        """How many tokens this worker has seen."""
        return self._seen

    def add_tokens(self, count: int) -> None:
        """Count tokens of the present inner step; a step without this call counts as one token.

        In a learner of several workers, each counts those that it has seen itself.

        Raises:
            ConfigError: ``count`` is negative.
        """
        if count < 0:
            raise ConfigError("count", count, "use 0 or more")
        self._new_tokens += count

    def load_merged_weights(self) -> None:
        """Set the model to the merged weights, for example to evaluate or save it.

        What this learner has learned since its last contribution is lost. All workers of a learner
        call it at the same inner step, or after the block.
        """
        with self._settled():
            for fragment in self._fragments:
                fragment.restart()
            self._adopt()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of what a whole job can continue from.

        That is the merged weights, the outer optimizers and the number of merges; it is equal in
        all learners after the same merge. All workers of a learner call this at the same inner
        step; each gets its own shards.
        """
        with self._settled():
            return copy.deepcopy(self._merger.save_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, before the block is entered.

        Raises:
            RequestRefused: it was entered, so the other learners have other merged weights.
        """
        if self._is_entered:
            raise RequestRefused(
                "load it before the block: from then on the learners share the merged weights"
            )
        self._merger.load_state(state)
        self._merges = self._merger.merges

    def __enter__(self) -> DecoupledDiLoCo:
        """Join the learners, and begin to train; waits for the merged weights.

        Raises:
            PeerError: there was no quorum within the manager's ``quorum_timeout``.
            ConfigError: it was entered before, maybe without success.
        """
        if self._is_entered:
            raise ConfigError("DecoupledDiLoCo", "entered twice", "it is used once")
        check_owns_steps(self._manager, type(self).__name__)
        self._is_entered = True
        self._merger.start(self._quorum_s)
        with self._settled():
            self._adopt()
        self._delivered_at = time.monotonic()
        ref = weakref.ref(self)  # the optimizer must not keep this alive

        def after(*_: object) -> None:
            if (this := ref()) is not None:
                this._end_inner_step()

        self._hooks = [self._optimizer.register_step_post_hook(after)]
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        __: BaseException | None,
        ___: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._merger.stop()
        if not self._workers.are_several:  # several workers may not end together
            with self._merger.lock:
                self._adopt()

    def _adopt(self) -> None:
        """Apply what was merged to this worker's weights; needs the merger's lock."""
        for fragment in self._fragments:
            fragment.adopt(self._seen)
        self._merges = self._merger.merges

    def _have_equal_merges(self) -> bool:
        """Whether all workers of this learner have applied the same merges; needs the lock."""
        found = self._workers.gather_in_training([self._merger.merges])
        return all(each == found[0] for each in found)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Hold the merger's lock at a moment at which all workers have applied the same merges."""
        deadline = time.monotonic() + self._quorum_s
        while True:
            with self._merger.lock:
                if self._have_equal_merges():
                    yield
                    return
            if time.monotonic() > deadline:
                raise DeadlineExceeded("applying the same merges in all workers", self._quorum_s)
            time.sleep(_SETTLE_PAUSE_S)

    def _end_inner_step(self) -> None:
        """Adopt what was merged, and deliver the next fragment if it is time.

        It waits for nothing but the workers of the same learner, which come at the same time.
        """
        self._merger.raise_error()
        self._merger.trains = True
        self._seen += self._new_tokens or 1
        self._new_tokens = 0
        self._count += 1
        is_due = self._count >= self._interval
        are_several = self._workers.are_several
        if are_several and not is_due:
            return
        if not self._merger.lock.acquire(blocking=are_several):
            return  # a merge is being applied: the next inner step does this
        try:
            if not self._have_equal_merges():
                return  # a merge is being applied in one of them: the next inner step does this
            self._adopt()
            if is_due:
                now = time.monotonic()
                self._merger.next_fragment.deliver(self._seen, now)
                self._merger.pace_s = now - self._delivered_at
                self._count, self._delivered_at = 0, now
        finally:
            self._merger.lock.release()


def _check_outer(fragment: Fragment) -> None:
    check_is_plain("outer_optimizer", fragment.outer)
    held = {id(each) for group in fragment.outer.param_groups for each in group["params"]}
    if not held.issuperset(map(id, fragment.merged)):
        raise ConfigError("outer_optimizer", type(fragment.outer).__name__, _OTHER_WEIGHTS)


def _check_not_healed(manager: Manager, agreed: Sequence[AgreedWeights]) -> None:
    """Refuse state functions that return the model: a heal would replace it while it is trained."""
    parameters: list[torch.Tensor] = [each for one in agreed for each in one.parameters]
    if manager._registry.holds_any(parameters):
        reason = "it returns the model, which is trained while a heal loads it: leave that out"
        raise ConfigError("state_dict", "of the manager", reason)
