"""Trains one worker of a replica group, logs events, and misbehaves on command."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from tools.chaos.groups import OnPurpose, device_of, make_group
from tools.chaos.options import WorkerOptions
from tools.chaos.reading import WIDTH, CountedReader, batches_of
from tools.demo.events import (
    Committed,
    Discarded,
    EventLog,
    Finished,
    Healed,
    Joined,
    PhaseBegan,
)
from tools.demo.fingerprint import fingerprint
from torchft_svc.client import (
    DistributedDataParallel,
    HTTPTransport,
    Manager,
    OptimizerWrapper,
    WorldSizeMode,
)

# Weights that nothing but healing could make equal, and gradients that differ between groups.
_STORE_WAIT_S = 20.0
_DEFAULT_TIMEOUT_S = 20.0
_LOOK_S = 0.005


class Commands:
    """The commands that this worker has not executed yet; never blocks."""

    def __init__(self, options: WorkerOptions) -> None:
        # Opened for both directions, so that it is never without a writer, and never at its end.
        self._pipe = os.open(options.commands, os.O_RDWR | os.O_NONBLOCK)
        self._left: list[str] = []

    def pop_command(self, what: str) -> str | None:
        """Return the arguments of the next command called ``what``, if there is one."""
        with suppress(BlockingIOError):
            self._left += os.read(self._pipe, 65536).decode().splitlines()
        for command in self._left:
            word, _, rest = command.partition(" ")
            if word == what:
                self._left.remove(command)
                return rest
        return None


class Transport(HTTPTransport[Any]):
    """The transport over HTTP, which writes down when it begins to serve and to fetch."""

    def __init__(self, log: EventLog, host: str) -> None:
        super().__init__(timedelta(seconds=_DEFAULT_TIMEOUT_S), hostname=host)
        self._log = log

    def send_striped(
        self,
        dst_ranks: list[int],
        extra_dst_ranks: list[int],
        step: int,
        state_dict: Any,
        timeout: timedelta | None = None,
    ) -> None:
        super().send_striped(dst_ranks, extra_dst_ranks, step, state_dict, timeout)
        self._log.write(PhaseBegan, step=step, phase="serve")

    def recv_striped(
        self,
        src_rank: int,
        metadata: str,
        extras: Sequence[Callable[[], str]],
        step: int,
        timeout: timedelta,
    ) -> Any:
        self._log.write(PhaseBegan, step=step, phase="fetch")
        return super().recv_striped(src_rank, metadata, extras, step, timeout)


class State:
    """A small model with Adam and some ballast; ``loaded`` is called after a heal."""

    def __init__(self, options: WorkerOptions, loaded: Callable[[], None]) -> None:
        own = 100 * options.group + options.incarnation
        self.model, self.adam = make_model(1000 * options.seed + own)
        if batches_of(options) is not None:  # exact enough to be compared with another run
            self.model, self.adam = make_model(1000 * options.seed)
            self.model.double()
        self.device = device_of(options.process_group)
        self.model.to(self.device)
        self._ballast = torch.zeros(options.ballast, dtype=torch.uint8, device=self.device)
        self._loaded = loaded

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "adam": self.adam.state_dict(),
            "ballast": self._ballast,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        self._loaded()

    def digest(self) -> str:
        return fingerprint(self.model.state_dict(), self.adam.state_dict())


def make_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model with weights by ``seed``, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def run(options: WorkerOptions) -> None:
    """Train until ``options.steps`` updates are committed, or this process is ended."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s", level=logging.INFO)
    torch.set_num_threads(1)
    log = EventLog(options.events, options.group, options.incarnation, options.worker)
    commands = Commands(options)
    state = State(options, lambda: log.write(Healed))
    with _manager(options, state, log, commands) as manager:
        optimizer = OptimizerWrapper(manager, state.adam)
        model = DistributedDataParallel(manager, state.model)
        log.write(Joined)
        data = None if batches_of(options) is None else CountedReader(options, manager, log)

        def pause() -> None:
            time.sleep(options.step_s)
            _hang(commands, "hang_inside")

        while (step := manager.current_step()) < options.steps:
            _obey(commands)
            log.write(PhaseBegan, step=step, phase="forward")
            optimizer.zero_grad()
            if data is None:
                loss = _backward(model, _inputs(options, step).to(state.device), pause)
            else:
                loss = data.backward(model, pause)
            _finish(manager, optimizer, state, log, loss)
        torch.save(state.model.cpu().state_dict(), options.weights)
        log.write(Finished, step=manager.current_step())


def _backward(model: nn.Module, inputs: torch.Tensor, pause: Callable[[], None]) -> float:
    """Make the pass of a step; its loss."""
    loss = model(inputs).square().mean()
    pause()
    torch.autograd.backward(loss)
    return float(loss.item())


def warm_up() -> None:
    """Load what torch and we load at the first use, which takes seconds; starts no thread."""
    import torchft_svc.preload  # noqa: F401

    if not torch.cuda.is_available():  # where it is, a step asks CUDA, which no fork could use then
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.zeros(2)
        torch.optim.Adam([weight]).step()


def _manager(options: WorkerOptions, state: State, log: EventLog, commands: Commands) -> Manager:
    given: dict[str, Any] = {
        name.removesuffix("_s"): timedelta(seconds=value) if name.endswith("_s") else value
        for name, value in options.manager.items()
    }
    if "world_size_mode" in given:
        given["world_size_mode"] = WorldSizeMode[given["world_size_mode"]]
    timeout_s = options.manager.get("timeout_s", _DEFAULT_TIMEOUT_S)
    settings: dict[str, Any] = {
        "timeout": timedelta(seconds=timeout_s),
        "quorum_timeout": timedelta(seconds=max(timeout_s, _DEFAULT_TIMEOUT_S)),
        "lighthouse_addr": options.lighthouse,
        "job_id": options.job,
        "replica_id": options.name,
        "rank": options.worker,
        "world_size": options.num_workers,
    }
    if options.num_workers > 1:
        settings |= {"store_addr": "localhost", "store_port": group_store(options)}
    return Manager(
        state_dict=state.state_dict,
        load_state_dict=state.load_state_dict,
        pg=make_group(options.process_group, timeout_s, options.life, commands, log),
        checkpoint_transport=Transport(log, options.host or "127.0.0.1"),
        **(settings | given),
    )


_stores: list[TCPStore] = []  # for as long as this process lives


def group_store(options: WorkerOptions) -> int:
    """The port of the group's store, which its first worker hosts, as a launcher would."""
    if options.worker == 0:
        _stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        beside = options.store_port.with_suffix(".new")
        beside.write_text(str(_stores[0].port))
        beside.replace(options.store_port)
    deadline = time.monotonic() + _STORE_WAIT_S
    while not options.store_port.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{options.store_port} was not written in {_STORE_WAIT_S:g} s")
        time.sleep(_LOOK_S)
    return int(options.store_port.read_text())


def _inputs(options: WorkerOptions, step: int) -> torch.Tensor:
    """A function of the step and the group: a discarded step draws the same again."""
    dice = torch.Generator().manual_seed(100 * step + options.group)
    return torch.randn(4, WIDTH, generator=dice)


def _obey(commands: Commands) -> None:
    """What a training loop may do to itself between two steps."""
    _hang(commands, "hang")
    if commands.pop_command("raise") is not None:
        raise OnPurpose("this loop ends on purpose")


def _hang(commands: Commands, command: str) -> None:
    """Hang for the seconds that the command names, or until the command ``wake``."""
    hang_s = commands.pop_command(command)
    if hang_s is None:
        return
    until = time.monotonic() + float(hang_s)
    while time.monotonic() < until and commands.pop_command("wake") is None:
        time.sleep(_LOOK_S)


def _finish(
    manager: Manager, optimizer: OptimizerWrapper, state: State, log: EventLog, loss: float
) -> None:
    """The vote, and what came out of it."""
    participating, num_participants = manager.is_participating(), manager.num_participants()
    committed = optimizer.step()
    quorum = manager.last_quorum()
    if not committed or quorum is None:
        reason = str(manager.errored() or "")
        log.write(Discarded, step=manager.current_step(), digest=state.digest(), reason=reason)
        return
    log.write(
        Committed,
        step=manager.current_step(),
        loss=loss,
        digest=state.digest(),
        num_participants=num_participants,
        participating=participating,
        quorum_id=quorum.quorum_id,
        members=" ".join(quorum.replica_ids),
    )
