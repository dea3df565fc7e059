"""A trainer's manager: quorum, averages, commit and heal behind a few calls in every step."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft_svc.client.checkpointing.transport import CheckpointTransport
from torchft_svc.client.process.deadlines import guard_future
from torchft_svc.client.process.driven import DrivenManager
from torchft_svc.client.process.profiling import profiled
from torchft_svc.client.reduce.collectives import uncompiled
from torchft_svc.client.reduce.reduction import Reducing, Reduction
from torchft_svc.client.runtime.runtime import CallerParts, Runtime, start_runtime
from torchft_svc.client.step.data_positions import DataPosition, Divisible, EnteredStep
from torchft_svc.client.step.round import RoundRules
from torchft_svc.client.step.state import DEFAULT_KEY, StateRegistry
from torchft_svc.client.step.stepper import Stepper, Update
from torchft_svc.coordination import QuorumResult, Security
from torchft_svc.core.limits import limited_s
from torchft_svc.core.quorum.worker.round import RoundRequest
from torchft_svc.core.quorum.worker.state_check import OnDifference
from torchft_svc.core.quorum.worker.step import StepMachine
from torchft_svc.env import Environment
from torchft_svc.errors import Drained, TorchFTError
from torchft_svc.host.exit_verdict import give_verdicts
from torchft_svc.rpc.descriptors import TRAINER_DESCRIPTORS, require_descriptors
from torchft_svc.settings import (
    DEFAULT_HEARTBEAT_INTERVAL,
    DEFAULT_SPARE_REFRESH_S,
    WorldSizeMode,
    resolve_checks,
    resolve_copies,
    resolve_place,
    resolve_services,
    resolve_timeouts,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

T = TypeVar("T")


class Manager:
    """Keeps one worker training while other replica groups join and leave.

    Only ``state_dict`` and ``load_state_dict`` are required. Other arguments default to the
    environment, then to the defaults below. With ``TORCHFT_DO_NOT_REQUEUE_EXIT_CODE`` an uncaught
    error that a restart cannot mend ends the program with that status (`sys.excepthook`).

    Args:
        pg: carries the collectives between groups: a process group, or the name of one for which
            `register_process_group` was called (default: gloo). Or torch's own one, from 2.14 on,
            if it was made with ``enable_reconfigure=True``.
        load_state_dict, state_dict: load and return all state that a joining group needs, usually
            the model's and the optimizer's. `register_state_dict_fn` adds more.
        min_replica_size: a step with fewer contributing groups is discarded.
        use_async_quorum: form the quorum while the forward pass runs. Otherwise `start_quorum`
            waits, and a group that was behind contributes at once.
        timeout: longest time for a collective or a vote, and longest idle time of a heal.
        quorum_timeout, connect_timeout: longest wait for a quorum, and for a service.
        rank, world_size: this worker in its group (``RANK``, ``WORLD_SIZE``; default: 0 of 1).
        world_size_mode: whether more than ``min_replica_size`` groups may contribute.
        store_addr, store_port: the group's TCPStore (``MASTER_ADDR``, ``MASTER_PORT``; default: a
            group of one worker hosts its own).
        lighthouse_addr: ``host:port``, or several with commas between (``TORCHFT_LIGHTHOUSE``;
            default: this machine, port 29510).
        replica_id: the group's stable name (``REPLICA_GROUP_ID``; default: a new one).
        port, hostname: where the group's manager listens, and the host to advertise.
        heartbeat_interval: time between the manager's heartbeats.
        checkpoint_transport: transfers the state of groups that heal (default: HTTP).
        init_sync: give every group the same weights at step 0.
        max_retries: how many steps in a row may be discarded (default: any number).
        quorum_retries: how often the manager retries a failed quorum.
        job_id: the training run, on a lighthouse that serves several (``TORCHFT_JOB_ID``).
        min_replicas: the fewest groups that the job trains with, sent to the lighthouse
            (``TORCHFT_MIN_REPLICAS``; default: the lighthouse's). Below it training pauses; below
            ``min_replica_size`` it continues, and discards its steps.
        manager_addr: a running manager (``TORCHFT_MANAGER_ADDR``).
        in_process: run the manager in this process instead of a child process.
        watchdog_timeout: end the process, with a traceback, if a collective neither ends nor can be
            abandoned so long after its deadline (``TORCHFT_WATCHDOG_TIMEOUT_SEC``; default: never).
        security: TLS files and token (``TORCHFT_TLS_CERT``, ``TORCHFT_TLS_KEY``,
            ``TORCHFT_TLS_CA``, ``TORCHFT_TOKEN`` or ``TORCHFT_TOKEN_FILE``; default: neither).
        handle_sigterm: let SIGTERM drain the group, unless the program handles it already or this
            is not the main thread. A second SIGTERM ends the process as usual.
        steady_steps: let steps begin in the quorum of the step before, without a question, while
            nobody comes, goes or fails (``TORCHFT_STEADY_STEPS``; default: yes).
        catch_up: fetch the part of the state that does not change before this group joins, while
            the others train on, and show this group's state to others that start
            (``TORCHFT_CATCH_UP``; default: no). For states of which much is frozen, behind slow
            links. ``state_dict`` may be called at any time between updates, for each worker alone.
        buddy_every: after every so many steps, offer the state to processes that hold copies of it
            (`torchft-buddy`), and begin from such a copy if no group with a state lives
            (``TORCHFT_BUDDY_EVERY``; default: 0, never). Equal in all groups.
        spare: be a prepared spare: the first step waits until a place in the job is free, for up to
            a day, and in no quorum before (``TORCHFT_SPARE``; default: no). With
            ``catch_up`` in all groups it follows the part of their state that does not change.
        check_every: in every so many steps, and after each heal, the groups compare a fingerprint
            of their wrapped parameters and optimizers (``TORCHFT_CHECK_EVERY``; default: 500; 0:
            never). Equal in all groups.
        on_difference: what follows if they differ: ``"heal"``, the minority heals (default);
            ``"warn"``, it is logged; ``"stop"``, `should_commit` raises `StateDiverged` in all
            groups (``TORCHFT_ON_DIFFERENCE``). Equal in all groups.
        flight_recorder: a directory for records of the collectives of each quorum that ended with
            an error (``TORCHFT_FLIGHT_RECORDER``; default: nothing is recorded).
        metrics_registry: the program's registry of prometheus-client, such as ``REGISTRY``, in
            which this manager shows its metrics (``TORCHFT_METRICS_PORT`` serves them at a port;
            default: neither).

    Raises:
        ConfigError: a value, or a pair of values, is invalid; or ``state_dict`` returns a value
            that cannot be sent (if it raises, that is noticed in the first step).
        PeerError: the group's store, or its manager, cannot be reached; or this machine has not
            passed the health check (`HealthCheckFailed`).
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | str | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta = DEFAULT_HEARTBEAT_INTERVAL,
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        *,
        job_id: str | None = None,
        min_replicas: int | None = None,
        manager_addr: str | None = None,
        in_process: bool = False,
        watchdog_timeout: timedelta | None = None,
        security: Security | None = None,
        handle_sigterm: bool = True,
        flight_recorder: str | None = None,
        steady_steps: bool | None = None,
        catch_up: bool | None = None,
        buddy_every: int | None = None,
        spare: bool | None = None,
        check_every: int | None = None,
        on_difference: OnDifference | None = None,
        metrics_registry: CollectorRegistry | None = None,
    ) -> None:
        environment = _give_exit_statuses(self._read_environment())
        timeouts = resolve_timeouts(
            environment,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            heartbeat_interval=heartbeat_interval,
            watchdog_timeout=watchdog_timeout,
        )
        self._rules = RoundRules(
            place=resolve_place(environment, rank, world_size),
            timeouts=timeouts,
            mode=world_size_mode,
            min_replica_size=min_replica_size,
            use_async_quorum=use_async_quorum,
            init_sync=init_sync,
            checks_collectives=environment.checks_collectives,
            is_steady=environment.steady_steps if steady_steps is None else steady_steps,
            catches_up=environment.catches_up if catch_up is None else catch_up,
            copy_every=resolve_copies(environment, buddy_every),
            checks=resolve_checks(environment, check_every, on_difference),
            is_spare=environment.is_spare if spare is None else spare,
            spare_refresh_s=environment.spare_refresh_s or DEFAULT_SPARE_REFRESH_S,
        )
        services = resolve_services(
            environment,
            lighthouse_addr=lighthouse_addr,
            manager_addr=manager_addr,
            replica_id=replica_id,
            job_id=job_id,
            port=port,
            hostname=hostname,
            quorum_retries=quorum_retries,
            min_replicas=min_replicas,
            in_process=in_process,
            security=security,
            flight_recorder=flight_recorder,
            spare=spare,
        )
        self._registry = StateRegistry(load_state_dict, state_dict)
        given = CallerParts(
            pg=pg,
            transport=checkpoint_transport,
            registry=self._registry,
            step=StepMachine(min_replica_size=min_replica_size, max_retries=max_retries),
            handles_term=handle_sigterm,
            store=(store_addr, store_port),
            metrics_registry=metrics_registry,
        )
        run = self._runtime = _start(self._rules, services, environment, given)
        stepper = self._stepper = Stepper(run.deps, self._rules, run.worker, run.thread)
        self._worker, self._sums, self._weights = run.worker, stepper.sums, stepper.weights
        self._driven = _driven(services.job_id, services.replica_name, run)
        self._finalizer = _close_at_exit(self, run, self._rules.place.leads)

    @staticmethod
    def _read_environment() -> Environment:
        """Return what configures this worker besides the arguments."""
        return Environment()

    # -- a step ----------------------------------------------------------------------------------

    @uncompiled
    @profiled("torchft::start_quorum")
    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step: request a quorum.

        Returns at once with ``use_async_quorum``; without it, and at step 0, when this worker is
        ready. A prepared spare on a CPU returns at once, too: it waits for its place in its
        first sum (rule G7).

        Args:
            allow_heal: whether a group that is behind may heal in this step; equal on all groups. A
                group that would have to heal, and may not, commits nothing.
            shrink_only: keep new groups out of this quorum.
            timeout: longest wait for the quorum (default: the manager's).

        Raises:
            PeerError: there is no quorum (only where this waits for it).
            ConfigError: this thread trains the group in another job, too.
            Drained: the group was drained: a SystemExit with status 0. `wait_quorum` and
                `should_commit` may raise it, too; then their step is not applied.
        """
        self._driven.begin_step()
        limit = self._rules.timeouts.quorum_s if timeout is None else limited_s(timeout)
        request = RoundRequest(
            allow_heal=allow_heal,
            shrink_only=shrink_only,
            timeout_s=limit,
            layout=self._sums.layout(self._stepper.data.layouts()),
            may_compute_ahead=self._rules.is_spare and self._sums.launches_here(),
        )
        try:
            self._stepper.start(request)
        except TorchFTError as error:
            raise _shortened(error) from None

    @uncompiled
    def wait_quorum(self) -> None:
        """Wait until the members of this step are connected; returns at once between two steps.

        Raises:
            PeerError: there is no quorum; the step can only be discarded.
        """
        try:
            self._stepper.wait_for_quorum()
        except TorchFTError as error:
            raise _shortened(error) from None

    @uncompiled
    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | str = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> dist.Work:
        """Reduce ``tensor`` in place over the groups that contribute in this step.

        All groups make the same calls in the same order: on CPUs that is checked first, and a call
        that does not match is an error of the step. Groups that do not contribute receive the
        result as well. After an error of the step this does nothing; the error is latched, never
        raised.

        Between two steps, for example for logging, it reduces among the members of the last quorum,
        if all of them make the same call before they begin the next step. If one does not, or after
        an error of the last step, the tensor stays unchanged, and the call ends within 5 seconds;
        `errored` returns the error until the next step begins, which is not affected.

        Args:
            tensor: of any shape.
            should_quantize: send 8-bit numbers with a scale for each 256 of them, a quarter of the
                bytes of float32; equal in all groups. True or ``"int8"``, or ``"float8"`` (e4m3).
                All groups get the same bits. Wait for such works at the same places between the
                other calls in all groups: a second collective begins there.
                Between two steps nothing is quantized.
            reduce_op: the operation; a sum or an average if it is quantized.

        Raises:
            ValueError: an average of integers, an operation that does not exist, or a tensor that
                cannot be quantized.
        """
        return self._sums.allreduce(tensor, should_quantize, reduce_op)

    @uncompiled
    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the mean of ``value`` over the groups that contribute in this step.

        Each counts by its ``weight``, such as its number of samples: then the mean does not jump
        when groups come and go. All groups call it at the same place, and get the same number: in a
        step, or after its vote. It waits for the other groups, so call it where you log.

        NaN after an error of the step, after a discarded step, or if all weights are 0. In a group
        of several workers the ``value`` is that of the group; compute that first.
        """
        sums = self._sums.sum_numbers([value * weight, weight])
        return math.nan if sums is None or sums[1] == 0.0 else sums[0] / sums[1]

    @uncompiled
    def sum(self, value: float | torch.Tensor) -> float:
        """Return the sum of ``value`` over the groups that contribute; see `mean`."""
        sums = self._sums.sum_numbers([value])
        return math.nan if sums is None else sums[0]

    @uncompiled
    def allreduce_grad(self, grad: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Average ``grad`` in place over the groups that contribute.

        For a communication hook of torch's own ``DistributedDataParallel``. In a backward pass it
        returns at once, and the future is complete when the pass ends; elsewhere it waits. The
        future always gets ``grad`` as its value: after an error of the step the tensor stays
        unchanged, and the error is latched, never raised.

        Torch changes the order of gradients in its buckets after its first backward pass. So the
        first step of a group that joins is discarded on all groups, and it heals in the next one.
        On devices that is not checked: give torch's wrapper ``find_unused_parameters=True`` there,
        and it keeps its order. `torchft_svc.DistributedDataParallel` has neither cost.

        Raises:
            ConfigError: ``grad`` consists of whole numbers.
            RequestRefused: no step is under way.
        """
        return self._sums.bucket_hook.average(grad)

    @uncompiled
    @profiled("torchft::should_commit")
    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step; returns whether its update is to be applied.

        Waits for the step's collectives, loads a healed state, and votes: against the step if a
        model was wrapped and not all of its gradients were averaged in this step. After True the
        state must not be read until `allow_state_dict_read` or the next `start_quorum`, and the
        caller has to apply the update. `commit` also handles a failure of the update.

        Args:
            timeout: longest wait for the other workers of the group (default: the manager's).

        Raises:
            CommitFailed: more than ``max_retries`` steps in a row were discarded.
            Unauthorized: this worker was never authorized; the message says what to set.
            PeerError: the group's decision was lost; this worker must not continue.
            StateDiverged: the groups' states differ, with ``on_difference="stop"``.
        """
        limit = self._rules.timeouts.collective_s if timeout is None else limited_s(timeout)
        return self._stepper.decide(limit)

    def commit(self, timeout: timedelta | None = None) -> Update:
        """Vote as `should_commit` does, for a block that applies the update::

            with manager.commit() as committed:
                if committed:
                    adam.step()
                    muon.step()

        A block that is ended by an exception, including KeyboardInterrupt, has not applied the
        update: the step does not count here, no step continues with these weights, and this worker
        heals in the next one. If no group is ahead of it then, `start_quorum` is refused until
        `load_state_dict`. After the block the state may be read again.
        """
        limit = self._rules.timeouts.collective_s if timeout is None else limited_s(timeout)
        return Update(self._stepper, limit)

    @uncompiled
    def reduction_scale(self) -> float | None:
        """The factor for this group's gradients before they are summed; waits for the quorum.

        0.0: the group does not contribute, and sums zeros. None: the step has failed, and nothing
        is to be summed. For custom wrappers of a model, with `launch_sum`.
        """
        return self._sums.scale()

    @uncompiled
    def launch_sum(self, tensor: torch.Tensor) -> Reduction | None:
        """Start summing ``tensor`` in place over all groups; None: it failed (latched)."""
        return self._sums.launch_sum(tensor)

    def register_reducer(self, reducer: Reducing) -> None:
        """Call ``reducer`` before each vote to check that its backward pass was finished.

        For custom wrappers of a model. The manager keeps a weak reference.
        """
        self._sums.add_reducer(reducer)

    # -- data ------------------------------------------------------------------------------------

    def register_data(
        self, name: str, position: DataPosition, divisible: Divisible | None = None
    ) -> None:
        """Move ``position`` with the committed steps, and let groups heal by it.

        `ElasticDataLoader` calls this; it is for loaders of your own. Every group registers the
        same names. ``divisible``: a loader whose step is divided anew if a group is lost in it.

        Raises:
            ConfigError: another loader has this name; or the step of a ``divisible`` loader could
                never be divided anew.
        """
        if divisible is not None:
            self._rules.check_summing_again()
        self._stepper.data.add(name, position, divisible)

    @uncompiled
    def enter_step(self, read_in: int) -> EnteredStep:
        """Return the step that is under way, or begin one; waits until its members are known.

        A group that was alone in the step before does not wait: it goes on as such, and the step is
        discarded if another one has joined.

        For loaders. ``read_in``: the number of the step for which the caller has read last. A step
        that has failed is given up for another one. A group of which another one leaves in this
        step discards it, as after `participating_rank`, unless the loader can divide it anew.

        Raises:
            RequestRefused: all samples of the present step were read, and it was not voted on.
            PeerError, Drained: as from `start_quorum`.
        """
        if self._stepper.needs_another_step(read_in):
            self.start_quorum()
        return self._stepper.enter_for_loader()

    def exchange_shares(self, row: Sequence[int]) -> list[list[int]] | None:
        """Return the ``row`` of each group that contributes to the first step of a quorum.

        For a divisible loader (`register_data`), in all groups at the same place. None: the members
        are those of the step before, or the exchange has failed, which is an error of the step.
        """
        return self._sums.exchange_rows(row)

    def set_part(self, name: str, part: float) -> float:
        """Weight this group's gradients, and what it averages, by ``part`` in the present step.

        For the loader ``name``: ``part`` is the group's part of the samples of the step; those of
        all groups add up to 1. Returns the part that counts: that of the first loader in this step.
        A group that was dealt a larger part than others is not slow because it works longer.
        """
        return self._sums.set_part(name, part)

    def sum_kept(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sum ``tensors``, gradients that a loader has kept apart until all were computed."""
        self._stepper.sum_kept(tensors)

    def holds_sums(self) -> bool:
        """Whether something was reduced in the present step, also if this group is alone.

        Numbers of `mean` and `sum` do not count.
        """
        return self._sums.holds_sums()

    def committed_step(self) -> int:
        """Return the number of committed steps, also while a state is healed; for any thread."""
        return self._worker.state.step

    def place_in_group(self) -> tuple[int, int]:
        """This worker's group rank, and the number of workers in its group."""
        place = self._rules.place
        return place.group_rank, place.group_world_size

    def weights_version(self) -> int:
        """Return a number that grows when the weights are replaced by another group's.

        It also grows at the beginning of the first step in which that may happen: then the graph of
        an earlier forward pass is stale.
        """
        return self._weights.version

    def heals_during_steps(self) -> bool:
        """Whether a group that was behind gets its state only at the end of its first step.

        That is after the backward pass (``use_async_quorum``).
        """
        return self._rules.use_async_quorum

    def has_ended(self) -> bool:
        """Whether the manager was shut down: models wrapped for it are not averaged any more."""
        return self._runtime.closed

    def has_fresh_step(self) -> bool:
        """Whether a step is under way, and nothing was reduced in it so far."""
        return self._stepper.is_fresh()

    def _continues_step(self, site: Hashable) -> bool:
        """Whether ``zero_grad()``, called at ``site``, belongs to the step that is under way."""
        return self._stepper.continues_step(site)

    def report_error(self, e: Exception) -> None:
        """Latch an error of this step, which will be discarded; only the first error is kept."""
        self._stepper.latch_error(e, self._worker.state.epoch)

    def report_spoiled_update(self, e: BaseException) -> None:
        """Report that the update of a committed step was not applied completely, because of ``e``.

        For callers of `should_commit`; `commit` does it itself. No step continues with such
        weights: this worker heals in the next one, or, if there is no source, `start_quorum` is
        refused until `load_state_dict`.

        Raises:
            RequestRefused: the next step has begun already.
        """
        self._weights.report_spoiled(e)

    def errored(self) -> Exception | None:
        """The first error of this step, or None."""
        return self._worker.state.error

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails: after an error, or ``timeout``, it holds ``default``.

        The error is latched.
        """
        limit_s = self._rules.timeouts.collective_s if timeout is None else limited_s(timeout)
        epoch = self._worker.state.epoch
        return guard_future(
            fut,
            default,
            limit_s,
            lambda error: self._stepper.latch_error(error, epoch),
            self._runtime.timer,
        )

    # -- state -----------------------------------------------------------------------------------

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[Any], None] | None,
        state_dict: Callable[[], Any] | None,
    ) -> None:
        """Add a piece of state that groups heal by; every group must register the same keys.

        Raises:
            ConfigError: ``state_dict`` returns a value that cannot be sent; the message names it.
        """
        self._registry.register(key, load_state_dict, state_dict)

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Declare that the state of ``optimizer`` changes only in its step, not in a forward pass.

        `Optimizer` calls this. While a group heals, the rest of the state is copied; see "State
        that heals" in docs/training-loops.md. It holds as long as the program keeps ``optimizer``,
        which is not kept alive.
        """
        self._registry.own(optimizer)

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Set the functions that were not given at construction."""
        self.register_state_dict_fn(DEFAULT_KEY, load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Allow reads: the state is consistent again."""
        self._weights.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Wait for readers, and block new ones: the state is about to change."""
        self._registry.gate.shut(self._rules.timeouts.collective_s)

    @contextlib.contextmanager
    def consistent_state(self, timeout: timedelta | None = None) -> Iterator[None]:
        """Return a block in which the weights and `state_dict` are those of one step::

            with manager.consistent_state():
                saved = copy.deepcopy(model.state_dict()), manager.state_dict()

        For any thread, such as one that saves checkpoints. On another thread than the training one
        it waits while an update, or a healed state, is being applied. Inside the block nothing of
        this is begun: the training thread waits in its vote, and the other groups wait for its next
        sums. So copy in the block, and write to a disk after it: after the manager's ``timeout``
        the training thread discards its step. Forward passes go on, and may change buffers.

        On the training thread the block belongs between two steps, or before the vote: what was
        applied after `should_commit` counts as complete with it.

        Args:
            timeout: longest wait for the block to begin (default: the manager's).

        Raises:
            DeadlineExceeded: the state was being changed for longer than ``timeout``.
            RequestRefused: the weights are not those of a step. Or the training thread calls this
                while it changes the state (in the block of `commit`, in a hook of the optimizer),
                or begins or votes on a step inside the block.
        """
        limit = self._rules.timeouts.collective_s if timeout is None else limited_s(timeout)
        self._weights.prepare_to_read()
        with self._registry.gate.reading(limit):
            self._weights.check_whole()
            yield

    def state_dict(self) -> dict[str, int]:
        """The manager's own state; store it in every periodic checkpoint.

        The step, the number of batches in it, and the id of the quorum in which it was committed,
        which distinguishes checkpoints of the same step.

        A function that the manager itself calls for a heal may call this, also the ``state_dict``
        of a `PGTransport`: it gets the counters of before the heal if the weights are spoiled.

        Raises:
            RequestRefused: the weights are not those of a step.
        """
        self._weights.find_lost_update()
        self._weights.check_whole()
        return self._worker.state.counters()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a periodic checkpoint; call it before a step begins."""
        with self._worker.changing() as round_:
            round_.step.restore(
                state_dict["step"], state_dict["batches_committed"], state_dict.get("quorum_id", 0)
            )

    # -- who and where ---------------------------------------------------------------------------

    def current_step(self) -> int:
        """The number of updates in the weights, including one that is being applied.

        In a step in which this group heals, it is the healed step during the update (hooks of the
        optimizer's step, the block of `commit`), when the healed weights are loaded, and before
        that on the training thread once something was reduced, as after a backward pass. Until then
        it is the group's own step.
        """
        return self._stepper.shown_step()

    def batches_committed(self) -> int:
        """The number of groups' batches in the weights; those of a heal once it is loaded."""
        return self._worker.state.batches_committed

    def participating_rank(self) -> int | None:
        """This group's index among those that contribute in this step; None: it does not.

        A step that has shown this to the program is discarded if a group leaves in it.
        """
        return self._sums.show_participation().participating_rank

    def num_participants(self) -> int:
        """How many groups contribute in this step."""
        return self._sums.show_participation().num_participants

    def is_participating(self) -> bool:
        """Whether this group contributes in this step."""
        return self.participating_rank() is not None

    def last_quorum(self) -> QuorumResult | None:
        """The quorum that this worker is, or was last, connected in; None before the first one."""
        return self._worker.round.peers.quorum

    def replica_id(self) -> str:
        """This group's ``name:incarnation``, or the name alone before the first quorum."""
        quorum = self.last_quorum()
        if quorum is None:
            return self._runtime.services.replica_name
        return quorum.replica_ids[quorum.replica_rank]

    def num_replicas_waiting(self) -> int:
        """How many groups are known to wait to join, since the last quorum request."""
        return self._worker.round.peers.num_waiting

    def is_draining(self) -> bool:
        """Whether this worker's group has to end after its step."""
        return self._worker.round.drain_reason is not None

    def draining_until(self) -> float | None:
        """The instant at which this process will be killed; None while no drain is under way.

        On the clock of `time.monotonic`, which a change of the wall clock does not move: the time
        that is left is ``draining_until() - time.monotonic()``. `math.inf` where a drain is under
        way, and nobody has said how long it may take. SIGTERM says it by ``TORCHFT_GRACE_SEC``, an
        operator by ``--within``.
        """
        return self._worker.draining_until()

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """Leave the quorum and end everything that was started; idempotent.

        Call it between two steps: then the other groups mostly lose no step, see "Preemption" in
        docs/operations.md. Within a step they discard that. ``wait``: until the threads that serve
        this group's state have ended.
        """
        if not self._runtime.closed:
            _log_leaving(self.current_step(), self._rules.place.leads)
        self._finalizer.detach()
        self._runtime.close(wait)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a manager belongs to its process: it can be neither copied nor pickled")

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _shortened(error: TorchFTError) -> TorchFTError:
    """Return ``error`` without its internal traceback.

    So a user's traceback ends at the call of the manager.
    """
    log.debug("raised to the program", exc_info=error)
    return error.with_traceback(None)


def _give_exit_statuses(environment: Environment) -> Environment:
    """Give this program the exit statuses that its ``environment`` asks for; returns that."""
    give_verdicts()
    Drained.exit_code = environment.drained_exit_code or 0
    return environment


def _start(*parts: Any) -> Runtime:
    try:
        require_descriptors(TRAINER_DESCRIPTORS, "a trainer")
        return start_runtime(*parts)
    except TorchFTError as error:
        raise _shortened(error) from None


def _driven(job: str, group: str, run: Runtime) -> DrivenManager:
    return DrivenManager(
        job,
        group,
        is_over=lambda: run.closed,
        has_others=lambda: len(getattr(run.worker.round.peers.quorum, "replica_ids", ())) > 1,
    )


def _log_leaving(step: int, leads: bool) -> None:
    log.log(logging.INFO if leads else logging.DEBUG, "leaves after step %d", step)


def _close_at_exit(manager: Manager, run: Runtime, leads: bool) -> weakref.finalize[Any, Manager]:
    return weakref.finalize(manager, _close_in, os.getpid(), run, leads)


def _close_in(pid: int, runtime: Runtime, leads: bool) -> None:
    """Shut down at exit, or when a manager is garbage collected without a shutdown.

    A forked child must not end its parent's services. A collection may happen on any thread, even
    on one that the shutdown would wait for.
    """
    if os.getpid() != pid:
        return
    if not runtime.closed:
        _log_leaving(runtime.worker.state.step, leads)
    if threading.current_thread() is threading.main_thread():
        runtime.close(False)
    else:
        threading.Thread(target=runtime.close, args=(False,), name="torchft-close").start()
