"""Trains one worker of a program's group as users' programs do, and kills itself on request.

The order of the calls is that of the documentation, so this is also a list of what has to work.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler as schedulers
from torch.utils._pytree import tree_map

from tools.chaos.forked import fork_first
from tools.chaos.options import WorkerOptions
from tools.chaos.trainer import Commands, group_store
from tools.demo.events import (
    Committed,
    Discarded,
    EventLog,
    Finished,
    Healed,
    Joined,
    Killed,
    PhaseBegan,
)
from tools.demo.fingerprint import fingerprint
from tools.demo.torch_wrapper import torch_data_parallel
from tools.matrix.model import INPUTS, Net, shared_part
from tools.matrix.program import Feature, Kill, Moment, Pg, Program, Transport, Wrapper, decode
from torchft_svc.client import (
    CheckpointTransport,
    DistributedDataParallel,
    ErrorSwallowingProcessGroupWrapper,
    HTTPTransport,
    Manager,
    OptimizerWrapper,
    PGTransport,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
    WorldSizeMode,
    ft_init_device_mesh,
    replicate_across_groups,
    sharded_state_dict,
)
from torchft_svc.client.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD, PeriodicSync
from torchft_svc.coordination import QuorumResult

TIMEOUT = timedelta(seconds=20)
QUORUM_TIMEOUT = timedelta(seconds=40)
# The exit status of a worker that has healed to something that was never anybody's state.
TORN_STATUS = 70
_BATCH = 4
_PARTS = 2  # of a batch, where gradients are accumulated


_STUMBLE_EVERY = 6  # steps
# Inner steps from one synchronization to the next, and those during which an average travels.
_INTERVAL, _DELAY = 2, 1
_ALPHA = 0.5


def make_scheduler(optimizer: torch.optim.Optimizer, seed: int) -> Any:
    """One of torch's schedulers, the same for a ``seed``."""
    kinds: list[Callable[[], Any]] = [
        lambda: schedulers.StepLR(optimizer, 5, 0.9),
        lambda: schedulers.MultiStepLR(optimizer, [2, 5, 5, 9], 0.8),
        lambda: schedulers.ExponentialLR(optimizer, 0.98),
        lambda: schedulers.ConstantLR(optimizer, 0.5, 4),
        lambda: schedulers.LinearLR(optimizer, 0.3, total_iters=8),
        lambda: schedulers.PolynomialLR(optimizer, 50),
        lambda: schedulers.CosineAnnealingLR(optimizer, 20),
        lambda: schedulers.CosineAnnealingWarmRestarts(optimizer, 4, 2),
        lambda: schedulers.CyclicLR(optimizer, 1e-3, 1e-2, 3, cycle_momentum=False),
        lambda: schedulers.OneCycleLR(optimizer, 1e-2, 100_000),
        lambda: schedulers.LambdaLR(optimizer, lambda step: 0.97**step),
        lambda: schedulers.MultiplicativeLR(optimizer, lambda _: 0.98),
        lambda: schedulers.ReduceLROnPlateau(optimizer, patience=2),
        lambda: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(optimizer, 0.5, 3), schedulers.ExponentialLR(optimizer, 0.97)]
        ),
        lambda: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.3), schedulers.MultiStepLR(optimizer, [2, 4])],
            [3],
        ),
    ]
    return kinds[seed % len(kinds)]()


class Bomb:
    """The kills of this life of this worker."""

    def __init__(self, program: Program, options: WorkerOptions, log: EventLog) -> None:
        place = options.group, options.incarnation, options.worker
        self._left = [
            kill for kill in program.kills if (kill.group, kill.life, kill.worker) == place
        ]
        self._log = log
        self._num_groups = program.num_groups
        self._quorum_id = 0
        self._step = 0

    def count(self, quorum: QuorumResult) -> None:
        """Count a committed step. It counts if all groups have committed the one before in the
        same quorum: then the others have a state to go on with."""
        is_whole = len(quorum.replica_ids) == self._num_groups
        self._step += is_whole and quorum.quorum_id == self._quorum_id
        self._quorum_id = quorum.quorum_id

    def at(self, moment: Moment) -> None:
        """Kill this worker if it is to die at ``moment``, which is now; on any thread."""
        for kill in self._left:
            if kill.moment is moment and self._step >= kill.step:
                self._left.remove(kill)
                if not kill.delay_ms:
                    self._explode(kill)
                timer = threading.Timer(kill.delay_ms / 1000, self._explode, [kill])
                timer.daemon = True
                timer.start()
                return

    def _explode(self, kill: Kill) -> None:
        self._log.write(Killed, whole_group=kill.with_manager)
        if kill.with_manager:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def _marked(kind: type[CheckpointTransport[Any]], bomb: Bomb) -> type[CheckpointTransport[Any]]:
    """The transport, which reports to the bomb when it begins to send and to receive."""

    def reporting(name: str, moment: Moment) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            bomb.at(moment)
            return getattr(kind, name)(self, *args, **kwargs)

        return call

    calls = {"send_checkpoint": Moment.SERVE, "recv_checkpoint": Moment.HEAL}
    if kind.can_stripe:
        calls = {"send_striped": Moment.SERVE, "recv_striped": Moment.HEAL}
    return type(kind.__name__, (kind,), {name: reporting(name, at) for name, at in calls.items()})


class Training:
    """All that a program trains with; made in the order that the documentation shows."""

    def __init__(self, options: WorkerOptions, program: Program, log: EventLog) -> None:
        self.program = program
        self.log = log
        self.bomb = Bomb(program, options, log)
        # Nothing but healing could make the weights of groups, and of lives, equal.
        torch.manual_seed(1000 * options.seed + 10 * options.group + options.incarnation)
        self.net = Net(program)
        # Only then is there something to load into; FSDP replaces the parameters before.
        if program.wrapper is Wrapper.FSDP:
            _shard(self.net, program, init_device_mesh("cpu", (options.num_workers,)))
        self.manager = self._make_manager(options)
        self.model = self._wrap(options)
        self.optimizers = self._make_optimizers()
        # By hand there are both: a wrapped optimizer, and the calls that it consists of.
        self.writes_calls = program.has(Feature.PUBLIC_LOOP) or (
            program.wrapper is Wrapper.BY_HAND and len(self.optimizers) > 1
        )
        self.number_format: bool | str = False
        if program.has(Feature.QUANTIZED):
            self.number_format = ("int8", "float8")[program.seed % 2]
        self.outer: list[torch.optim.Optimizer] = []
        self.algorithm = self._make_algorithm()
        self.learner = self._make_learner()
        if self.writes_calls:
            for optimizer in self.optimizers:
                self.manager.register_optimizer(optimizer)
        elif not program.trains_alone:
            self.optimizer = OptimizerWrapper(self.manager, self.optimizers)
        self.scheduler = make_scheduler(self.optimizers[0], program.seed)
        # Grows until gradients are infinite, which has to be survived.
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=2.0**10,
            growth_factor=2.0**20,
            growth_interval=3,
            enabled=program.has(Feature.GRAD_SCALER),
        )
        self._has_healed = False  # and not reported it yet
        self._stumbles = updates_fail(program, options)
        self.is_spoiled = False  # an update has failed, and no state was loaded since
        self._num_extra = 1 + options.group % 2  # passes that the other groups need not make
        self.optimizers[-1].register_step_pre_hook(lambda *_: self._stumble())
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.bomb.at(Moment.UPDATE))
        self.net.block.register_forward_hook(self._pass_block)

    def _stumble(self) -> None:
        """Fail in an update now and then; only if the others have it."""
        quorum = self.manager.last_quorum()
        is_whole = quorum is not None and len(quorum.replica_ids) == self.program.num_groups
        if self._stumbles and is_whole and self.manager.current_step() % _STUMBLE_EVERY == 0:
            raise Stumbled

    def _pass_block(self, _: nn.Module, __: Any, hidden: Tensor) -> None:
        self.bomb.at(Moment.FORWARD)
        if hidden.requires_grad:
            backward = Moment.BACKWARD
            hidden.register_hook(lambda _: self.bomb.at(backward))  # type: ignore[no-untyped-call]

    # -- how it is built -------------------------------------------------------------------------

    def _make_manager(self, options: WorkerOptions) -> Manager:
        program = self.program
        pg = _make_pg(program)
        if program.transport is Transport.HTTP:
            kind = _marked(HTTPTransport, self.bomb)
            transport = kind(TIMEOUT, hostname="127.0.0.1")  # type: ignore[call-arg]
        else:
            state = self._whole_state if program.transport is Transport.IN_PLACE else None
            kind = _marked(PGTransport, self.bomb)
            transport = kind(pg, TIMEOUT, state_dict=state)  # type: ignore[call-arg]
        settings: dict[str, Any] = {}
        if options.num_workers > 1 or program.is_sharded:
            settings = {"store_addr": "localhost", "store_port": int(os.environ["MASTER_PORT"])}
        manager = Manager(
            pg=pg,
            min_replica_size=program.min_replica_size,
            use_async_quorum=program.use_async_quorum,
            world_size_mode=WorldSizeMode[program.mode.name],
            timeout=TIMEOUT,
            quorum_timeout=QUORUM_TIMEOUT,
            rank=options.worker,
            world_size=options.num_workers,
            lighthouse_addr=options.lighthouse,
            job_id=options.job,
            replica_id=options.name,
            checkpoint_transport=transport,
            check_every=2,  # programs are short, and their groups must never seem to differ
            **settings,
        )
        if not program.is_decoupled:  # of which only what is merged is healed
            manager.set_state_dict_fns(self.load_state_dict, self.state_dict)
        if program.has(Feature.PIECES):
            manager.register_state_dict_fn("rest", self._load_rest, self._rest)
        return manager

    def _wrap(self, options: WorkerOptions) -> nn.Module:
        manager, net = self.manager, self.net
        match self.program.wrapper:
            case Wrapper.DDP:
                return DistributedDataParallel(manager, net)
            case Wrapper.TORCH_DDP:
                return torch_data_parallel(manager, net)
            case Wrapper.FSDP:
                replicate_across_groups(manager, net)
            case Wrapper.HSDP:
                mesh = ft_init_device_mesh(
                    device_type="cpu",
                    mesh_shape=(self.program.num_groups, options.num_workers),
                    mesh_dim_names=("replicate", "shard"),
                    replicate_dim=0,
                    manager=manager,
                )
                _shard(net, self.program, mesh)
        return net

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        trained = _trained(self.net)
        if not self.program.has(Feature.TWO_OPTIMIZERS):
            return [torch.optim.Adam(trained, lr=1e-2)]
        half = len(trained) // 2
        return [
            torch.optim.Adam(trained[:half], lr=1e-2),
            torch.optim.SGD(trained[half:], lr=1e-2, momentum=0.9),
        ]

    def _make_algorithm(self) -> PeriodicSync | None:
        program = self.program
        if not program.trains_alone or program.is_decoupled:
            return None
        (inner,) = self.optimizers
        if program.wrapper is Wrapper.LOCAL_SGD:
            return LocalSGD(self.manager, self.net, inner, _INTERVAL)
        streams = program.wrapper is Wrapper.STREAMING
        fragments = self.net.fragments() if streams else [self.net]
        self.outer = [_outer_optimizer(_trained(each)) for each in fragments]
        return DiLoCo(
            self.manager,
            fragments,
            inner,
            self.outer,
            _INTERVAL * len(fragments),
            should_quantize=self.number_format,
            error_feedback=bool(self.number_format),
            fragment_sync_delay=_DELAY if streams else 0,
            fragment_update_alpha=_ALPHA if streams else 0.0,
        )

    def _make_learner(self) -> DecoupledDiLoCo | None:
        if not self.program.is_decoupled:
            return None
        (inner,) = self.optimizers
        fragments = self.net.fragments()
        return DecoupledDiLoCo(
            self.manager,
            fragments,
            inner,
            _outer_optimizer,
            _INTERVAL * len(fragments),
            should_quantize=self.number_format,
            error_feedback=bool(self.number_format),
        )

    # -- its state -------------------------------------------------------------------------------

    def _model_state(self) -> dict[str, Any]:
        return sharded_state_dict(self.net) if self.program.is_sharded else self.net.state_dict()

    def _rest(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        rest = {} if self.program.has(Feature.PIECES) else self._rest()
        return {"model": self._model_state(), **rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"], assign=self.program.has(Feature.ASSIGN))
        if not self.program.has(Feature.PIECES):
            self._load_rest(state)
        torn = self.net.memory and self.net.memory.check()
        if torn:
            print(torn, file=sys.stderr, flush=True)
            os._exit(TORN_STATUS)
        self._has_healed = True
        self.is_spoiled = False

    def _load_rest(self, state: dict[str, Any]) -> None:
        for optimizer, part in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(part)
        self.scheduler.load_state_dict(state["scheduler"])
        self.scaler.load_state_dict(state["scaler"])

    def _whole_state(self) -> dict[str, Any]:
        """What the manager heals by, for a transport that receives in place."""
        pieces = {"rest": self._rest()} if self.program.has(Feature.PIECES) else {}
        return {"default": self.state_dict(), **pieces, "torchft": self.manager.state_dict()}

    def digest(self) -> str:
        """Digest of all that must be equal in groups that have committed the same step."""
        if self.program.wrapper is Wrapper.STREAMING:  # whose groups keep a part of their weights
            assert self.algorithm is not None
            agreed = [each.state_dict() for each in self.algorithm._agreed]
            outer = [each.state_dict() for each in self.outer]
            return self._digest_with({"agreed": agreed, "outer": outer})
        return self._digest_with(shared_part(self._model_state(), self.program))

    def whole_digest(self) -> str:
        """Digest of all that a group heals by: equal to the source's, right after a heal.

        Empty where the inner steps of a source are not seen from outside.
        """
        return "" if self.program.trains_alone else self._digest_with(self._model_state())

    def _digest_with(self, model: dict[str, Any]) -> str:
        whole = {"model": model, "manager": self.manager.state_dict()}
        if not self.program.trains_alone:  # else each group's own
            whole |= self._rest()
        return fingerprint(tree_map(_local, whole))

    def _report_heal(self, *, is_whole: bool) -> None:
        """``is_whole``: this is the moment at which it has what the source has."""
        if self._has_healed:
            self._has_healed = False
            whole = self.whole_digest() if is_whole else ""
            self.log.write(Healed, step=self.manager.current_step(), whole=whole)

    # -- a step ----------------------------------------------------------------------------------

    def update(self, inputs: list[Tensor]) -> tuple[bool, float]:
        """One step: whether it was committed, and its loss."""
        if self.algorithm is not None:
            return self._train_alone(inputs, self.algorithm)
        self._begin_step()
        self._report_heal(is_whole=True)  # with that it goes forward, as the source does
        self.bomb.at(Moment.QUORUM)
        loss = self._pass(inputs)
        if self.program.has(Feature.CLEARS_TWICE):
            inputs = [part + 0.1 * _sign(part.grad) for part in inputs]
            for clearing in self.optimizers if self.writes_calls else [self.optimizer]:
                clearing.zero_grad()
            loss = self._pass(inputs)
        if self.program.wrapper is Wrapper.BY_HAND:
            works = [
                self.manager.allreduce(parameter.grad, self.number_format)
                for parameter in self.net.parameters()
                if parameter.grad is not None
            ]
            for work in works:
                work.wait()
        self.bomb.at(Moment.VOTE)
        committed = self._end()
        if committed and self.program.has(Feature.SCHEDULER):
            if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
                self.scheduler.step(1.0)  # a loss that is equal in all groups, and gets no better
            else:
                self.scheduler.step()
        self._report_heal(is_whole=committed)  # it came at the end of the step
        return committed, loss

    def _train_alone(self, inputs: list[Tensor], algorithm: PeriodicSync) -> tuple[bool, float]:
        """Inner steps up to the next synchronization: whether it was committed, and a loss."""
        before = self.manager.current_step()
        streams = self.program.wrapper is Wrapper.STREAMING
        is_over = False
        while not is_over:
            left = _INTERVAL - algorithm.inner_steps
            moments = [Moment.QUORUM] * (left == 1 + _DELAY * streams) + [Moment.VOTE] * (left == 1)
            loss, inputs = self.inner_step(inputs, *moments)
            is_over = algorithm.inner_steps == 0
        self._report_heal(is_whole=False)
        return self.manager.current_step() > before, loss

    def inner_step(self, inputs: list[Tensor], *moments: Moment) -> tuple[float, list[Tensor]]:
        """An update of this group alone, and the next inputs; ``moments``: right before it."""
        (inner,) = self.optimizers
        inner.zero_grad()
        loss = self._pass(inputs)
        if self.program.has(Feature.CLEARS_TWICE):
            inputs = [part + 0.1 * _sign(part.grad) for part in inputs]
            inner.zero_grad()
            loss = self._pass(inputs)
        for moment in moments:
            self.bomb.at(moment)
        inner.step()
        return loss, [part.detach() for part in inputs]

    def _pass(self, inputs: list[Tensor]) -> float:
        loss = 0.0
        for number, part in enumerate(inputs):
            with self._syncing(is_last=number == len(inputs) - 1):
                loss += self._backward(part.requires_grad_()) / len(inputs)
        return loss

    def differentiate(self, inputs: Tensor) -> None:
        """The gradients of the inputs alone, which nobody averages."""
        own = inputs.detach().requires_grad_()
        # Torch's wrapper does not allow it.
        model = self.net if self.program.wrapper is Wrapper.TORCH_DDP else self.model
        self.net.eval()
        for _ in range(self._num_extra):
            torch.autograd.grad(model(own).sum(), own)
        self.net.train()

    def _begin_step(self) -> None:
        if not self.writes_calls:
            self.optimizer.zero_grad()
            return
        self.manager.start_quorum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    @contextlib.contextmanager
    def _syncing(self, *, is_last: bool) -> Iterator[None]:
        """Gradients are averaged only with the last part."""
        if self.program.is_sharded:
            self.net.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            yield
        elif is_last or self.program.trains_alone or self.program.wrapper is Wrapper.BY_HAND:
            yield
        else:
            with self.model.no_sync():  # type: ignore[operator]
                yield

    def _backward(self, inputs: Tensor) -> float:
        target = inputs.sum(1, keepdim=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.program.has(Feature.AUTOCAST)):
            outputs = self.model(inputs)
            loss = (outputs - target).square().mean()
            if self.program.has(Feature.PENALTY):
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                loss = loss + 0.01 * slope.square().mean()
        if self.program.has(Feature.FORCES):
            self.differentiate(inputs)
        self.scaler.scale(loss).backward()
        return float(loss.item())

    def _end(self) -> bool:
        committed = False
        try:
            if self.program.has(Feature.PUBLIC_LOOP):
                if self.manager.should_commit():
                    for optimizer in self.optimizers:
                        self.scaler.step(optimizer)
                    committed = True
            elif self.writes_calls:
                with self.manager.commit() as committed:
                    if committed:
                        for optimizer in self.optimizers:
                            self.scaler.step(optimizer)
            else:
                committed = bool(self.scaler.step(self.optimizer))
        except Stumbled:  # the loop goes on, as many do
            self.is_spoiled = True
        if self.program.has(Feature.GRAD_SCALER):
            self.scaler.update(None if committed else self.scaler.get_scale())
        return committed


class Stumbled(Exception):
    """An update that fails."""


def updates_fail(program: Program, options: WorkerOptions) -> bool:
    """Whether updates of this life fail now and then: in one worker of the group that was killed,
    when it is back, because the others have the newest state then."""
    if not program.has(Feature.PUBLIC_LOOP) or not program.kills:
        return False
    is_back = options.group == program.kills[0].group and options.incarnation > 0
    return is_back and options.worker == 0


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _outer_optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def _sign(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.nan_to_num().sign()


def _make_pg(program: Program) -> ProcessGroup:
    if program.pg is Pg.ISOLATED:
        return ProcessGroupBabyGloo(TIMEOUT)
    gloo = ProcessGroupGloo(TIMEOUT)
    return ErrorSwallowingProcessGroupWrapper(gloo) if program.pg is Pg.SWALLOWING else gloo


def _shard(net: Net, program: Program, mesh: Any) -> None:
    """Shard as users of FSDP2 do: parts first, the whole last; checkpointing around the parts."""
    if program.has(Feature.CHECKPOINTING):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        net.block = checkpoint_wrapper(net.block)
    for part in net.shardable(program):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def warm_up() -> None:
    """Load what torch and we load at the first use, which takes seconds; starts no thread."""
    import torch._dynamo  # the first optimizer imports it
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper  # noqa: F401

    import torchft_svc.preload  # noqa: F401

    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.optim.Adam([weight]).step()


def run(options: WorkerOptions) -> None:
    """Train until the step that the command ``last`` names is committed, or until killed."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    torch.set_num_threads(1)
    program = decode(options.program)
    if program.pg is Pg.ISOLATED:
        fork_first("torchft_svc.client.process_groups.isolated.child")
    log = EventLog(options.events, options.group, options.incarnation, options.worker)
    commands = Commands(options)
    if options.num_workers > 1 or program.is_sharded:
        os.environ |= {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(group_store(options)),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is there already
        }
    if program.is_sharded or (program.is_decoupled and options.num_workers > 1):
        dist.init_process_group(
            "gloo", rank=options.worker, world_size=options.num_workers, timeout=TIMEOUT
        )
    training = Training(options, program, log)
    if training.learner is not None:
        _run_learner(training, training.learner, options, commands)
        return
    with training.manager as manager, training.algorithm or contextlib.nullcontext():
        log.write(Joined)
        last = options.steps
        while manager.current_step() < last:
            last = int(commands.pop_command("last") or last)
            _one_step(training, options, log)
        log.write(Finished, step=manager.current_step())


def _run_learner(
    training: Training, learner: DecoupledDiLoCo, options: WorkerOptions, commands: Commands
) -> None:
    """Train until so many merges as the command ``last`` names; each of them is a commit.

    The learner's thread merges while this one is anywhere in an inner step, so the phase that
    begins is its whole life: it must not go back behind what was merged before that.
    """
    manager, log = training.manager, training.log
    log.write(PhaseBegan, step=0, phase="forward")
    with manager, learner:
        log.write(Joined)
        last, shown = options.steps, learner.merges
        for number in itertools.count():
            last = int(commands.pop_command("last") or last)
            parts = range(_PARTS if training.program.has(Feature.ACCUMULATION) else 1)
            inputs = [_inputs(options, number, part) for part in parts]
            loss, _ = training.inner_step(inputs, Moment.QUORUM, Moment.VOTE)
            quorum = manager.last_quorum()
            if learner.merges > shown and quorum is not None:
                state = learner.state_dict()
                shown = state["merges"]
                training.bomb.at(Moment.AFTER)
                training.bomb.count(quorum)
                log.write(
                    Committed,
                    step=shown,
                    loss=loss,
                    digest=fingerprint(state),
                    num_participants=learner.num_learners,
                    participating=True,
                    quorum_id=quorum.quorum_id,
                    members=" ".join(quorum.replica_ids),
                )
            if shown >= last:
                break
            time.sleep(options.step_s)
        log.write(Finished, step=shown)


def _one_step(training: Training, options: WorkerOptions, log: EventLog) -> None:
    manager, program = training.manager, training.program
    step = manager.current_step()
    whole = "" if training.is_spoiled else training.whole_digest()
    log.write(PhaseBegan, step=step, phase="forward", whole=whole)
    num_parts = _PARTS if program.has(Feature.ACCUMULATION) else 1
    committed, loss = training.update([_inputs(options, step, part) for part in range(num_parts)])
    quorum = manager.last_quorum()
    if committed and quorum is not None:
        training.bomb.at(Moment.AFTER)
        training.bomb.count(quorum)
        log.write(
            Committed,
            step=manager.current_step(),
            loss=loss,
            digest=training.digest(),
            num_participants=manager.num_participants(),
            participating=manager.is_participating(),
            quorum_id=quorum.quorum_id,
            members=" ".join(quorum.replica_ids),
        )
    elif not training.is_spoiled:  # else these are the weights of no step
        reason = str(manager.errored() or "")
        log.write(Discarded, step=manager.current_step(), digest=training.digest(), reason=reason)
    if program.has(Feature.FORCES):
        training.differentiate(_inputs(options, step, 0))
    time.sleep(options.step_s)


def _inputs(options: WorkerOptions, step: int, part: int) -> Tensor:
    """A function of the step and the worker: a discarded step draws the same again."""
    place = 10 * options.group + options.worker
    dice = torch.Generator().manual_seed(1000 * step + 10 * place + part)
    return torch.randn(_BATCH, INPUTS, generator=dice)
