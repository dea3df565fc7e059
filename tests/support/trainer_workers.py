"""Workers of a trainer without the trainer: real processes that a test commands step by step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from support.files import complete_lines
from support.fork_server import Call, Forked
from torchft_svc.errors import ChannelClosed
from torchft_svc.trainer.context import TrainContext
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.messages import (
    Abandon,
    Answer,
    Command,
    End,
    Failed,
    Finished,
    GiveState,
    Joined,
    JoinWorld,
    Position,
    Progress,
    Started,
    StateHandle,
    StateOffered,
    StoreOpened,
    Train,
    Validate,
)
from torchft_svc.trainer.state import TrainingState, decode_state
from torchft_svc.trainer.worker import run_worker

DEADLINE_S = 60.0
_GRACE_S = 10.0
_KEY = b"trainer workers"
A = TypeVar("A")


class FileLink:
    """The worker's end of a connection on this machine; states are files."""

    host = "127.0.0.1"

    def __init__(self, connection: Connection, folder: Path, worker: int) -> None:
        self._connection, self._folder, self._worker = connection, folder, worker
        self._sending = threading.Lock()
        self._num_states = 0

    def send(self, answer: Answer) -> None:
        try:
            with self._sending:
                self._connection.send(answer)
        except OSError as error:
            raise ChannelClosed("to the test", str(error)) from error

    def receive(self, timeout_s: float | None) -> Command | None:
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError) as error:
            raise ChannelClosed("to the test", str(error)) from error

    def offer_state(self, position: Position, state: bytes) -> StateHandle:
        self._num_states += 1
        path = self._folder / f"state-{self._worker}-{self._num_states}"
        path.write_bytes(state)
        return StateHandle(position=position, where=str(path))

    def read_state(self, state: StateHandle) -> bytes:
        return Path(state.where).read_bytes()


def be_worker(address: tuple[str, int], worker: int, job: bytes, folder: Path) -> None:
    """What a process of `Workers` runs."""
    os.environ["TEST_WORKER"] = str(worker)
    connection = Client(address, authkey=_KEY)
    connection.send(worker)
    run_worker(FileLink(connection, folder, worker), worker, job)
    connection.close()


class Workers:
    """The trainer's side: starts workers, commands them, and takes what they say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[int, Forked] = {}
        self.answers: dict[int, list[Answer]] = {}
        self._connections: dict[int, Connection] = {}
        self._listener = Listener(("127.0.0.1", 0), authkey=_KEY)
        self._num_worlds = self._num_commands = 0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.processes):
            self.kill(worker)
        self._listener.close()

    def start(self, job: WorkerJob, count: int) -> list[int]:
        """Start workers, and wait until they have created what they train."""
        pickled = cloudpickle.dumps(job)
        first = len(self.processes)
        numbers = list(range(first, first + count))
        for number in numbers:
            arguments = (self._listener.address, number, pickled, self.folder)
            log = self.folder / "log"
            self.processes[number] = Forked(Call(be_worker, arguments, {}, log))
            self.answers[number] = []
        for _ in numbers:
            connection = self._listener.accept()
            self._connections[connection.recv()] = connection
        for number in numbers:
            self.wait_for(number, Started)
        return numbers

    def send(self, worker: int, command: Command) -> None:
        with contextlib.suppress(OSError):
            self._connections[worker].send(command)

    def form(
        self,
        workers: Sequence[int],
        state: StateHandle | None = None,
        address: str = "",
        checkpoint: str = "",
    ) -> list[Joined]:
        """Send them to a new world; with an ``address``, that of a lighthouse."""
        self._num_worlds += 1
        world, size = self._num_worlds, len(workers)

        def join(rank: int, where: str) -> None:
            command = JoinWorld(
                world=world,
                rank=rank,
                world_size=size,
                address=where,
                state=state,
                checkpoint=checkpoint,
            )
            self.send(workers[rank], command)

        join(0, address)
        where = address or self.wait_for(workers[0], StoreOpened).address
        for rank in range(1, size):
            join(rank, where)
        return [self.wait_for(worker, Joined) for worker in workers]

    def join(
        self, worker: int, *, world: int, rank: int, world_size: int, address: str = ""
    ) -> None:
        """Send one worker to a world; without an ``address``, open its store."""
        command = JoinWorld(world=world, rank=rank, world_size=world_size, address=address)
        self.send(worker, command)
        if not address:
            self.wait_for(worker, StoreOpened)

    def train(
        self,
        workers: Sequence[int],
        epoch: int = 1,
        step: int | None = None,
        checkpoint_dir: str = "",
    ) -> None:
        """Make them train until then."""
        self._num_commands += 1
        command = Train(
            command=self._num_commands,
            until_epoch=epoch,
            until_step=step,
            checkpoint_dir=checkpoint_dir,
        )
        for worker in workers:
            self.send(worker, command)

    def finish(self, workers: Sequence[int]) -> list[Finished]:
        """Wait until they have done their command."""
        return [self.wait_for(worker, Finished) for worker in workers]

    def validate(self, workers: Sequence[int]) -> list[Finished]:
        self._num_commands += 1
        for part, worker in enumerate(workers):
            number = self._num_commands
            command = Validate(command=number, num_steps=None, part=part, num_parts=len(workers))
            self.send(worker, command)
        return self.finish(workers)

    def state(self, worker: int) -> TrainingState:
        """The whole state of a worker between two commands."""
        self._num_commands += 1
        self.send(worker, GiveState(command=self._num_commands))
        return self.read(self.wait_for(worker, Finished).result)

    def read(self, handle: StateHandle) -> TrainingState:
        return decode_state(Path(handle.where).read_bytes(), str(handle.where))

    def abandon(self, workers: Sequence[int]) -> list[StateHandle]:
        """Make them abandon their step; return the states that they offer."""
        for worker in workers:
            self.send(worker, Abandon(reason="a worker is lost"))
        return [self.wait_for(worker, StateOffered).state for worker in workers]

    def disconnect(self, worker: int) -> None:
        """Close the connection, as if the trainer had ended."""
        self._connections[worker].close()

    def position(self, worker: int) -> Position:
        """The position that ``worker`` reported last."""
        reported = [each.position for each in self.answers[worker] if isinstance(each, Progress)]
        return reported[-1] if reported else Position()

    def end(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self.send(worker, End())
        for worker in workers:
            assert self.processes[worker].wait(DEADLINE_S) == 0, self.log_tails()

    def wait_for_ends(self, workers: Sequence[int]) -> None:
        """Wait for workers that have abandoned their step; kill those that gloo holds."""
        for worker in workers:
            try:
                assert self.processes[worker].wait(_GRACE_S) == 0, self.log_tails()
            except TimeoutExpired:
                self.kill(worker)

    def kill(self, worker: int) -> None:
        """SIGKILL."""
        self.processes[worker].kill()
        self.processes[worker].wait(DEADLINE_S)
        if worker in self._connections:
            self._connections[worker].close()

    def wait_for(self, worker: int, kind: type[A]) -> A:
        """The next answer of this kind; others before it stay in `answers`."""
        found: list[A] = []

        def has_come() -> bool:
            mine = self.answers[worker]
            index = next((i for i, each in enumerate(mine) if isinstance(each, kind)), None)
            if index is not None:
                found.append(mine.pop(index))  # type: ignore[arg-type]
            own = [each for each in mine if isinstance(each, Failed) and not each.is_peers]
            assert found or not own, self.log_tails()
            return bool(found)

        self.until(has_come, f"{kind.__name__} of worker {worker}")
        return found[0]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Take what the workers say until ``holds``."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what} did not come; {self.log_tails()}"
            self._receive_answers(0.5)

    def _receive_answers(self, timeout_s: float) -> None:
        open_ = {
            connection: number
            for number, connection in self._connections.items()
            if not connection.closed
        }
        for ready in wait(list(open_), timeout_s):
            assert isinstance(ready, Connection)
            try:
                answer = ready.recv()
            except (EOFError, OSError):
                ready.close()
                continue
            self.answers[open_[ready]].append(answer)

    def log_tails(self) -> str:
        """Errors of the workers, and their output."""
        errors = [
            each.traceback
            for mine in self.answers.values()
            for each in mine
            if isinstance(each, Failed)
        ]
        log = self.folder / "log"
        return "\n".join([*errors, log.read_text() if log.exists() else ""])


@contextlib.contextmanager
def workers(folder: Path) -> Iterator[Workers]:
    with Workers(folder) as started:
        yield started


# -- what they train -----------------------------------------------------------------------------

SIZE, WIDTH = 96, 8


class Numbers(Dataset[Any]):
    """Samples that a linear model can learn; each also has its number."""

    def __init__(self, size: int = SIZE) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(size, WIDTH, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


def make_model(config: Any) -> nn.Module:
    return LosingModel(config)


def make_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def make_scheduler(optimizer: torch.optim.Optimizer, config: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)


def make_data(config: Any) -> Any:
    size = config.get("size", SIZE)
    return Numbers(size), Numbers(33)


class TooMuch(ValueError):
    """What the program of a test raises."""


# The step that the loss is computed for, and what this worker is: set by the functions below.
_calls: dict[str, int] = {}


def lose_at(config: Any) -> None:
    """End this worker, or raise, or hold it, at the step that ``config`` names."""
    step = _calls["step"] = _calls.get("step", 0) + 1
    number = int(os.environ["TEST_WORKER"])
    if config.get("lose") == (number, step - 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if config.get("fail") == (number, step - 1):
        raise TooMuch(f"in step {step}")
    if "hold" in config and Path(config["hold"]).exists():
        Path(config["hold"] + ".there").touch()
        time.sleep(DEADLINE_S)


class LosingModel(nn.Sequential):
    """A model with dropout and buffers: what resuming has to bring back."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
        )
        self._config = config

    def forward(self, inputs: Tensor) -> Any:
        if self.training:
            lose_at(self._config)
        return super().forward(inputs)


def make_wide_model(config: Any) -> nn.Module:
    """A model so wide that the order in which three workers sum its weights shows in the bits."""
    return nn.Sequential(
        nn.Linear(WIDTH, 257), nn.ReLU(), nn.Linear(257, 255), nn.Tanh(), nn.Linear(255, 1)
    )


def loss_of(model: nn.Module, batch: Any, info: Any) -> Tensor:
    inputs, targets, _ = batch
    return nn.functional.mse_loss(model(inputs), targets)


def train_function(context: TrainContext) -> int:
    """A loop of the user; notes which samples were used in which step."""
    config = context.config
    model = LosingModel(config)
    optimizer = make_optimizer(model, config)
    plan = make_scheduler(optimizer, config)
    model, optimizer, plan = context.prepare(model, optimizer, plan)
    data = make_data(config)[0]
    for _ in range(context.position.epoch, config["epochs"]):
        for batch in context.batches(data, batch_size=4):
            optimizer.zero_grad()
            loss = loss_of(model, batch, None)
            loss.backward()
            applied = optimizer.step() is not False
            plan.step()
            if "notes" in config and applied:
                note(config["notes"], context.position.step, batch[2].tolist())
        context.report(loss=loss, rank=context.rank)
    return int(context.position.step)


def note(path: str, step: int, numbers: list[int]) -> None:
    """Record that this worker has used these samples in ``step``."""
    with open(path, "a") as file:
        file.write(f"{step} {' '.join(map(str, numbers))}\n")


def noted(path: Path) -> dict[int, list[int]]:
    """The samples of each step."""
    found: dict[int, list[int]] = {}
    for line in complete_lines(path):
        step, *numbers = map(int, line.split())
        found.setdefault(step, []).extend(numbers)
    return found


def job(**changes: Any) -> WorkerJob:
    """The states of the model and data above."""
    settings: dict[str, Any] = {
        "fault_tolerance": "restart",
        "model_creator": make_model,
        "data_creator": make_data,
        "optimizer_creator": make_optimizer,
        "scheduler_creator": make_scheduler,
        "scheduler_step": "step",
        "batch_loss": loss_of,
        "batch_size": 4,
        "seed": 3,
        "num_threads": 1,
        "join_timeout_s": 30.0,
        "timeout_s": 60.0,
    }
    return WorkerJob(**{**settings, **changes})


def digest(state: TrainingState) -> dict[str, Any]:
    """All that has to be equal, in a form that compares to the bit."""

    def bits(value: Any) -> Any:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
        if isinstance(value, dict):
            return {str(name): bits(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [bits(each) for each in value]
        return value

    return {"position": state.position, "parts": bits(dict(state.parts))}
