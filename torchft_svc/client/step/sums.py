"""Sums over the groups in the present step: which models are summed, in turn, and what was not."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp

from torchft_svc.client.process_groups.operations import CompletedWork
from torchft_svc.client.reduce.bucket_hook import BucketHook
from torchft_svc.client.reduce.collectives import Collectives, check_arguments
from torchft_svc.client.reduce.operations import Kind, LaunchOrder, Mismatch
from torchft_svc.client.reduce.quantized import Quantization
from torchft_svc.client.reduce.reduction import Again, Launching, Reducing, Reduction
from torchft_svc.client.reduce.wait_times import WaitTimes
from torchft_svc.client.step.round import Dependencies, RoundRules, RoundRunner
from torchft_svc.client.step.shared_round import SharedRound
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.layout import describe_layout
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.worker.step import Participation, StepState
from torchft_svc.errors import ConfigError, OperationsDiffer, QuorumFailed, RequestRefused

log = logging.getLogger(__name__)

# The beginning of gloo's messages: the source file that raised, or what an operation gets whose
# connection another one has closed, by a timeout.
_GLOO = re.compile(r"\[[^\]]*gloo[^\]]*\]|Application timeout caused pair closure")
BETWEEN_STEPS = (Phase.IDLE, Phase.APPLYING)
# Between two steps a group may wait for one that waits for it in the next quorum. That wait must
# end long before the lighthouse continues without the group.
_BETWEEN_STEPS_S = 5.0
_NOTHING_REDUCED = (
    "no gradient was averaged across groups in this step: each group has to call backward() once "
    "outside of no_sync() before step(), also where it has nothing to learn from (a loss of zero)"
)
_NEW_PARAMETER = (
    "the module has got this parameter, or has begun to train it, after it was wrapped, so nothing "
    "averages its gradient: wrap the module again, in the same step on all groups, and give the "
    "optimizer the new parameters"
)
_UNSUMMED = (
    "nothing averages the gradients of %d parameters (the first one's shape is %s) that an "
    "optimizer updates: they will differ between groups. Wrap the module that they belong to, such "
    "as a loss with weights, together with the rest, or call Manager.allreduce for them"
)


class StepSums:
    """The sums of one step after the other; for the training thread.

    A wrapper of a model registers with `add_reducer`. In its backward pass it waits for its turn
    (`take_turn`), asks for the `scale` of its gradients, launches their sums (`launch_sum`), and
    may launch them again in another quorum (`sum_again`).
    """

    def __init__(
        self, deps: Dependencies, rules: RoundRules, worker: SharedRound, runner: RoundRunner
    ) -> None:
        self._deps = deps
        self._rules = rules
        self._common = rules.common(deps.pg)
        self._worker = worker
        self._runner = runner
        self._order = LaunchOrder(lambda: self._state.settled, lambda: self._state.num_commits)
        timeout_s = rules.timeouts.collective_s
        self._wait_times = WaitTimes()
        self.collectives = self._make_collectives(
            timeout_s, self._latch_sum_error, wish=lambda: worker.round.wants_question
        )
        # For reductions between two steps, whose errors fail no step.
        self._reports = self._make_collectives(
            min(timeout_s, _BETWEEN_STEPS_S), self._latch_report_error, between_steps=True
        )
        self.bucket_hook = BucketHook(self._allreduce_bucket)
        self._turn: weakref.ref[Launching] | None = None
        self._reducers: list[weakref.ref[Reducing]] = []
        self._layout: tuple[list[str], str] | None = None  # of these parts, see `layout`
        self._has_warned = False  # about gradients that are not summed
        self._updated: list[int] = []  # identities of the parameters that optimizers update
        self._apart: list[torch.Tensor] = []  # those of them that no reducer sums
        self.has_begun = False  # whether no exception has ended the beginning of the step
        self._sum_error: Exception | None = None  # of a sum, or of the way to the members
        self._has_shown_members = False  # in this step, to the program
        self._has_reduced = False  # in this step, by a call of the program, also if it is alone
        # This group's part of the samples of this step, and which loader has set it.
        self._part: tuple[str, float] | None = None
        # Why the step is not to be summed: its samples were not all read (rule D8).
        self.check_data: Callable[[], Exception | None] = lambda: None
        # For a loader that can divide its step anew among the groups that are left (rule D11):
        # whether it can divide now, and the division, which returns whether further passes are due.
        self.may_divide: Callable[[], bool] = lambda: True
        self.divide_anew: Callable[[], bool] = lambda: False

    def _make_collectives(
        self,
        timeout_s: float,
        latch: Callable[[Exception, int], None],
        *,
        between_steps: bool = False,
        wish: Callable[[], bool] | None = None,
    ) -> Collectives:
        return Collectives(
            self._deps.pg,
            timeout_s,
            latch,
            self._report_wait,
            self._deps.watchdog,
            order=self._order,
            times=self._wait_times,
            checks_all=self._rules.checks_collectives,
            between_steps=between_steps,
            wish=wish,
            on_mismatch=self._record_mismatch,
        )

    def count_waits(self) -> None:
        """Add the waits for sums since the last call to the time of the step."""
        self._worker.time_use.record_wait(self._wait_times.pop_seconds())

    @property
    def _state(self) -> StepState:
        return self._worker.round.step.state

    # -- wrappers of models ----------------------------------------------------------------------

    def add_reducer(self, reducer: Reducing) -> None:
        """See `Manager.register_reducer`."""
        self._reducers = [weakref.ref(each) for each in (*self.reducers(), reducer)]
        self._updated = []  # it may sum what was apart

    def remove_reducer(self, reducer: Reducing) -> None:
        """Call ``reducer`` no more; idempotent."""
        self._reducers = [weakref.ref(each) for each in self.reducers() if each is not reducer]

    def reducers(self) -> list[Reducing]:
        """The registered reducers that are alive, in the order of registration."""
        return [reducer for ref in self._reducers if (reducer := ref()) is not None]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are summed."""
        return [each for reducer in self.reducers() for each in reducer.parameters]

    def layout(self, others: Sequence[str] = ()) -> str:
        """What must be equal in all groups: the known layouts, ``others``, the common settings."""
        reducers = self.reducers()
        parts = [*(reducer.layout for reducer in reducers if reducer.layout), *others]
        if self._layout is None or self._layout[0] != parts:
            names = [name for reducer in reducers for name in reducer.names]
            self._layout = parts, describe_layout(parts, self._common, names)
        return self._layout[1]

    def take_turn(self, reducer: Launching, *, is_last: bool) -> bool:
        """Whether ``reducer`` may launch the sums of its pass now, or has to wait for another one.

        The sums of two wrappers must not interleave, and their passes must begin in the same order
        in all groups. ``is_last``: the pass has ended; the previous wrapper's pass has ended, too,
        or encloses this one.
        """
        reducers = self.reducers()
        holder = None if self._turn is None else self._turn()
        if len(reducers) < 2:
            return True
        if holder is not None and holder is not reducer and holder.is_launching():
            if not is_last:
                return False
            holder.flush_buckets(reducer.graph)
        self._turn = weakref.ref(reducer)
        if self.can_reduce():
            wrapper = next(i for i, each in enumerate(reducers) if each is reducer)
            self.collectives.agree(reducer.first, wrapper)
        return True

    def scale(self) -> float | None:
        """See `Manager.reduction_scale`."""
        if not self.can_reduce() or not self._has_read_data():
            return None
        participation = self._state.participation
        if participation.participating_rank is None:
            return 0.0
        return 1.0 / participation.num_participants if self._weight is None else self._weight

    @property
    def _weight(self) -> float | None:
        """This group's part of the samples of this step (None: no loader has set it)."""
        return None if self._part is None else self._part[1]

    def _has_read_data(self) -> bool:
        """Whether the samples of the step were read; otherwise its error is latched.

        Before anything is summed: the other groups would commit a sum without these samples.
        """
        error = self.check_data()
        if error is not None:
            self._runner.fail_step(error)
        return error is None

    def set_part(self, name: str, part: float) -> float:
        """See `Manager.set_part`."""
        if self._part is None or self._part[0] == name:
            self._part = name, part
            load = part * self._state.participation.num_participants
            if load:  # without a sample a group makes a pass of some, too
                self._worker.time_use.record_load(load)
        return self._part[1]

    def holds_sums(self) -> bool:
        """See `Manager.holds_sums`."""
        return self._has_reduced or any(each.has_averaged for each in self.reducers())

    def is_alone(self) -> bool:
        """Whether this group is the only member of the quorum: then a sum changes nothing."""
        return self._deps.pg.size() == 1

    def check_reduces_on(self, device: torch.device, reason: str) -> None:
        """Raise `ConfigError`, with the ``reason``, if the process group cannot sum there."""
        pg = self._deps.pg
        if not pg.reduces_on(device):
            raise ConfigError("pg", type(pg).__name__, reason)

    def launch_sum(
        self, tensor: torch.Tensor, carrier: torch.Tensor | None = None
    ) -> Reduction | None:
        """Start summing ``tensor`` in place; None: it failed (latched).

        ``carrier``: the part of the tensor that carries the wish for a question, see
        `Collectives.launch`.
        """
        return self.collectives.launch(tensor, carrier=carrier)

    def average_gradients(self, tensor: torch.Tensor) -> dist.Work:
        """Reduce as `allreduce`, for a wrapper that sums its tensors in a fixed order."""
        return self.allreduce(tensor, False, ReduceOp.AVG, Kind.GRADIENTS)

    def average_of(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of ``parameters`` that were averaged in this step, and are still there."""
        owners: dict[int, list[Reducing]] = {}
        for reducer in self.reducers():
            for each in reducer.parameters:
                owners.setdefault(id(each), []).append(reducer)
        found = []
        for parameter in parameters:
            known = owners.get(id(parameter), [])
            if known and not any(reducer.has_averaged for reducer in known):
                continue  # what is there is of an earlier step, or of this group alone
            averages = [parameter.grad, *(reducer.average_of(parameter) for reducer in known)]
            found += [each for each in averages if each is not None][:1]
        return found

    # -- summing a step again (rule E9) ----------------------------------------------------------

    def sum_again(self, num_launched: int) -> Again:
        """Whether all sums of this step are to be launched again, among the groups that are left.

        ``num_launched``: how many the caller has launched. None of them is over, and it still has
        the values that it has put into them. Waits for the quorum.
        """
        if num_launched != self.collectives.num_launched or not self._may_sum_again():
            return Again.NO
        log.info("step %d is summed in another quorum: %s", self._state.step, self._why_again())
        self.collectives.give_up()
        if self._deps.pg.errored() is None:
            self._deps.leave_members(QuorumFailed("another quorum follows"))
        try:
            with self._worker.changing() as round_:
                now = time.monotonic()
                ready = round_.sum_again(now)
            self._worker.time_use.sum_again(now)
            self._begin_sums()
            self._runner.begin_round(ready)
        except BaseException as error:
            reason = f"the sums were not begun again ({error!r})"
            self._runner.cancel_round(QuorumFailed(reason))
            raise
        self._runner.wait_until_ready()
        return Again.LATER if self.divide_anew() else Again.NOW

    def _may_sum_again(self) -> bool:
        """Whether this step may be summed among the groups that are left.

        That a sum has failed must be its only error, and the program must not have seen who the
        members are.
        """
        error = self._state.error
        is_of_sums = error is self._sum_error and not isinstance(error, OperationsDiffer)
        if not (self._worker.round.may_sum_again and is_of_sums) or self._has_shown_members:
            return False
        return len(self.reducers()) <= 1 and self._runner.is_over and self.may_divide()

    def _why_again(self) -> str:
        return self._worker.who_is_lost() or shown_reason(str(self._state.error))

    def show_participation(self) -> Participation:
        """Return who contributes in this step; the program's step may depend on it then."""
        self._has_shown_members = True
        return self.wait_for_members()

    def wait_for_members(self) -> Participation:
        """Return who contributes in this step, to what can divide it anew if that changes."""
        self._runner.wait_until_ready()
        return self._state.participation

    def exchange_rows(self, row: Sequence[int]) -> list[list[int]] | None:
        """See `Manager.exchange_shares`."""
        if not self.can_reduce() or not self._worker.round.has_connected:
            return None
        participation = self._state.participation
        rows = [[0] * len(row) for _ in range(participation.num_participants)]
        if participation.participating_rank is not None:
            rows[participation.participating_rank] = list(row)
        return self.collectives.exchange_rows(rows, self._device())

    # -- reductions of the program ---------------------------------------------------------------

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | str,
        op: ReduceOp.RedOpType,
        kind: Kind = Kind.AVERAGE,
        errors: torch.Tensor | None = None,
    ) -> dist.Work:
        """See `Manager.allreduce`; ``errors``: see `Collectives.allreduce_quantized`."""
        quantization = check_arguments(tensor, should_quantize, op)
        if self.is_between_steps():
            return self._report(tensor, op)
        return self._allreduce(tensor, op, kind, quantization, errors)

    def _allreduce_bucket(self, bucket: torch.Tensor, kind: Kind) -> dist.Work:
        """See `Manager.allreduce_grad`; ``kind``: which pass of torch's wrapper it belongs to."""
        check_arguments(bucket, False, ReduceOp.AVG)
        return self._allreduce(bucket, ReduceOp.AVG, kind)

    def _allreduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp.RedOpType,
        kind: Kind,
        quantization: Quantization | None = None,
        errors: torch.Tensor | None = None,
    ) -> dist.Work:
        self._has_reduced |= kind is not Kind.NUMBERS
        if not self.can_reduce() or not self._has_read_data():
            return CompletedWork(tensor)
        participation = self._state.participation
        if quantization is None:
            return self.collectives.allreduce(tensor, op, participation, kind, part=self._weight)
        return self.collectives.allreduce_quantized(
            tensor, op, participation, quantization, part=self._weight, errors=errors
        )

    def sum_numbers(self, numbers: Sequence[float | torch.Tensor]) -> list[float] | None:
        """The sums of ``numbers`` over the groups that contribute; None: a group did not get them.

        That is so after an error of the step, and after a step that was discarded.
        """
        state = self._state
        if state.error is not None or (self.is_between_steps() and state.failures):
            return None
        row = torch.empty(len(numbers), dtype=torch.float64, device=self._device())
        for place, number in zip(row, numbers, strict=True):
            place.copy_(number) if isinstance(number, torch.Tensor) else place.fill_(number)
        self.allreduce(row, False, ReduceOp.SUM, Kind.NUMBERS).wait()
        if self._state.error is not None or self._deps.pg.errored() is not None:
            return None
        summed: list[float] = row.tolist()
        return summed

    def _device(self) -> torch.device:
        """The device on which this worker sums."""
        known = self.parameters() or self._deps.registry.updated_parameters()
        return known[0].device if known else torch.device("cpu")

    def launches_here(self) -> bool:
        """Whether a backward pass launches its sums on the thread that calls it.

        Autograd runs on threads of its own on a device. While such a thread waits, the program's
        main thread handles no signal. One parameter on a device is enough for that; if none is
        known, as with torch's own wrapper and a bare optimizer, a device may be in use.
        """
        known = [*self.parameters(), *self._deps.registry.updated_parameters()]
        if not known:
            return not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return all(each.device.type == "cpu" for each in known)

    def is_between_steps(self) -> bool:
        """Whether a step is over, and the next one has not begun."""
        state = self._state
        return state.epoch > 0 and state.phase in BETWEEN_STEPS

    def _report(self, tensor: torch.Tensor, op: ReduceOp.RedOpType) -> dist.Work:
        """Reduce among the members of the last quorum, if they are still connected."""
        participation = self._state.participation
        if self._deps.pg.errored() is not None or not participation.num_participants:
            return CompletedWork(tensor)
        return self._reports.allreduce(tensor, op, participation)

    def can_reduce(self) -> bool:
        """See `Round.may_reduce`; broken connections are an error of the step."""
        self.check_under_way()
        self._runner.wait_until_ready()
        may_reduce = self._worker.round.may_reduce
        broken = self._deps.pg.errored() if may_reduce else None
        if broken is not None and self._state.error is None:
            self._latch_sum_error(broken, self._state.epoch)
        return may_reduce and broken is None

    def check_under_way(self) -> None:
        """Raise `RequestRefused` if there is no step under way."""
        if self._state.phase in BETWEEN_STEPS:
            raise RequestRefused(
                "there is no step under way: begin it with zero_grad or start_quorum"
            )

    # -- a step ----------------------------------------------------------------------------------

    def clear_averages(self) -> None:
        """Record that nothing is averaged in the next step yet."""
        for reducer in self.reducers():
            reducer.begin_step()

    def begin_step(self) -> None:
        """Begin the sums of a step that has just begun, or asks for its quorum."""
        self._has_shown_members, self._has_reduced, self._part = False, False, None
        self._begin_sums()
        self._reports.begin_step(self._state.epoch)

    def _begin_sums(self) -> None:
        self._sum_error = None
        self._order.begin_step(lambda: self._worker.round.has_connected, self._state.step)
        self.collectives.begin_step(self._state.epoch)
        self.has_begun = True

    def abandon_step(self) -> None:
        """Wait for no sum of the step any more; an unfinished pass ends with it."""
        for reducer in self.reducers():
            reducer.settle_step()
        self.collectives.give_up()

    def finish_reports(self) -> None:
        """Wait for the reductions since the last step."""
        self._reports.finish()

    def settle_step(self) -> None:
        """Latch an error if no gradients, or not all, were averaged.

        Raises:
            ConfigError: a wrapped module trains a parameter that nothing sums.
        """
        self._has_read_data()
        reducers = self.reducers()
        problems = [reducer.settle_step() for reducer in reducers]
        for error in filter(None, [*problems, self.collectives.unfinished()]):
            self._runner.fail_step(error)
        self._check_new_parameters(reducers)
        if reducers and not self.collectives.launched and self._state.error is None:
            self._runner.fail_step(RequestRefused(_NOTHING_REDUCED))
        if not self.collectives.has_averages:
            self._warn_of_unsummed(reducers)

    def _check_new_parameters(self, reducers: list[Reducing]) -> None:
        found = [each for reducer in reducers for each in reducer.unsummed()]
        if not found:
            return
        summed = {id(each) for reducer in reducers for each in reducer.parameters}
        names = [name for name, parameter in found if id(parameter) not in summed]
        if not names:  # the module was wrapped again, and the wrapper before still lives
            return
        error = ConfigError(names[0], f"one of {len(names)} new parameters", _NEW_PARAMETER)
        if not self.collectives.has_averages:
            self._runner.fail_step(error)
            raise error
        if not self._has_warned:  # the program may average it by hand
            self._has_warned = True
            log.warning("%s", error)

    def _warn_of_unsummed(self, reducers: list[Reducing]) -> None:
        """Warn, once, about gradients that are not averaged, so that groups would differ."""
        if self._has_warned or not reducers or not all(each.parameters for each in reducers):
            return  # it is not known what is summed
        updated = self._deps.registry.updated_parameters()
        present = list(map(id, updated))
        if present != self._updated or self._worker.round.has_connected:
            summed = {id(each) for reducer in reducers for each in reducer.parameters}
            self._updated = present
            self._apart = [each for each in updated if id(each) not in summed]
        apart = [each for each in self._apart if each.grad is not None]
        if apart:
            self._has_warned = True
            log.warning(_UNSUMMED, len(apart), str(tuple(apart[0].shape)))

    # -- errors ----------------------------------------------------------------------------------

    def _latch_sum_error(self, error: Exception, epoch: int) -> None:
        """Latch an error of the sums, not of the program."""
        if epoch == self._state.epoch and self._sum_error is None:
            self._sum_error = error
        self._runner.latch_error(error, epoch)

    def _latch_report_error(self, error: Exception, epoch: int) -> None:
        """Reconnect the members, because not all took part; no step is discarded."""
        with self._worker.changing() as round_:
            if not round_.step.latch(error, epoch):
                return
        log.warning("a reduction between two steps failed, its tensor stays as it was: %s", error)
        self._deps.leave_members(error)

    def _record_mismatch(self, found: Mismatch) -> None:
        """Log that this group and another one were at different operations of an earlier step."""
        quorum = self._worker.round.quorum
        names = [] if quorum is None else quorum.replica_ids
        other = stable_name(names[found.member]) if found.member < len(names) else "another group"
        reason = (
            f"in step {found.step} the groups were at different operations. Here: {found.mine}. "
            f"In group {other}: {found.theirs}"
        )
        log.warning("%s. Call them in the same order and with the same sizes everywhere", reason)
        if found.is_misfit:
            with self._worker.changing() as round_:
                round_.step.record_misfit(reason)

    def _report_wait(self, waits: bool) -> None:
        """Report to the manager that this worker waits for other groups, and has not hung."""
        self._worker.report_phase(Phase.QUORUM if waits else self._state.phase)


def shown_reason(reason: str) -> str:
    """``reason``, or a sentence in place of gloo's message."""
    return "the connection to another group has ended" if _GLOO.match(reason) else reason
