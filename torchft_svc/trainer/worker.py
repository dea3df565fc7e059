"""A worker of a trainer: executes its commands, and offers its state when a peer is lost.

The main thread creates, joins and trains. Another one receives: it must be able to end a step that
waits for a lost worker, and to offer the state meanwhile. A third one sends signs of life.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from torchft_svc.errors import ChannelClosed, CheckpointError, ConfigError
from torchft_svc.host.exit_verdict import is_final, is_peers_error, place_of
from torchft_svc.trainer.backend import Link
from torchft_svc.trainer.checkpoint import load_checkpoint
from torchft_svc.trainer.context import FunctionProgram
from torchft_svc.trainer.held_state import HeldState, StepAbandoned
from torchft_svc.trainer.interface import use_interface_of
from torchft_svc.trainer.job import WorkerJob
from torchft_svc.trainer.loop import CreatorLoop
from torchft_svc.trainer.messages import (
    BEAT_S,
    Abandon,
    BareError,
    Command,
    End,
    Failed,
    Finished,
    GiveState,
    Joined,
    JoinWorld,
    Progress,
    Started,
    StateHandle,
    StateOffered,
    Train,
    Validate,
)
from torchft_svc.trainer.state import TrainingState, decode_state, encode_state
from torchft_svc.trainer.steps import Steps
from torchft_svc.trainer.world import TorchWorld, TrainingWorld

log = logging.getLogger(__name__)

# A worker whose program has failed waits so long for the trainer to ask for its state.
LINGER_S = 10.0
# Its threads end within a beat.
_JOIN_S = 4 * BEAT_S


def run_worker(link: Link, worker: int, job: bytes) -> None:
    """Execute the commands of the trainer at the other end of ``link``, until it sends `End`.

    ``job`` is a `WorkerJob`, pickled by cloudpickle. Errors of the program are sent to the trainer,
    never raised.
    """
    _Worker(link, worker).run(job)


class _Worker:
    def __init__(self, link: Link, worker: int) -> None:
        self._link, self._worker = link, worker
        self._held = HeldState()
        self._commands: queue.SimpleQueue[Command | Exception | None] = queue.SimpleQueue()
        self._world: TrainingWorld | None = None
        self._program: CreatorLoop | FunctionProgram | None = None
        self._steps: Steps | None = None
        self._offered = False
        self._has_joined = False
        self._leaves_at_once = False  # when the program fails: the others are not to wait for it
        self._num_pending = 0  # commands that have not been done
        self._counting = threading.Lock()
        self._offers = True  # unless the trainer has ended, or needs no state any more
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"torchft-trainer-{name}", daemon=True)
            for name, target in (("link", self._receive), ("beats", self._beat))
        ]

    def run(self, job: bytes) -> None:
        for thread in self._threads:
            thread.start()
        try:
            with contextlib.suppress(StepAbandoned, ChannelClosed):
                self._serve(job)
            self._end()
        finally:
            self._ended.set()
            self._leave()
            for thread in self._threads:
                thread.join(_JOIN_S)

    def _serve(self, pickled: bytes) -> None:
        try:
            job = self._create(pickled)
            self._link.send(Started(pid=os.getpid(), host=self._link.host))
            for command in self._each_command():
                self._execute(command, job)
        except (StepAbandoned, ChannelClosed):
            raise
        except BaseException as error:  # noqa: BLE001 - it is the trainer's to judge
            if not self._held.abandoned:
                self._fail(error)

    def _create(self, pickled: bytes) -> WorkerJob:
        job: WorkerJob = cloudpickle.loads(pickled)
        self._leaves_at_once = job.fault_tolerance == "per-step"
        if job.num_threads is not None:
            torch.set_num_threads(job.num_threads)
        if job.use_gpu:
            self._held.device = _first_gpu()
        if job.setup is not None:
            job.setup(job.config)
        if job.train_fn is None:
            self._program = CreatorLoop(job, self._held)
        else:
            self._program = FunctionProgram(self._link, job, self._held)
        return job

    def _each_command(self) -> Iterator[Command]:
        while (command := self._commands.get()) is not None and not isinstance(command, End):
            if isinstance(command, Exception):
                raise command
            yield command

    def _execute(self, command: Command, job: WorkerJob) -> None:
        self._held.check()
        program = self._program
        assert program is not None
        if isinstance(command, JoinWorld):
            self._join(command, job)
            return
        if isinstance(command, Train):
            assert self._steps is not None, "no world was joined"
            self._steps.checkpoints.use_directory(command.checkpoint_dir)
            result = program.train(command)
        elif isinstance(command, Validate):
            assert isinstance(program, CreatorLoop), "a training function validates by itself"
            result = program.validate(command)
        elif isinstance(command, GiveState):
            state = self._held.whole()
            result = None if state is None else self._offer_state(state)
        else:
            raise AssertionError(f"not a command for the main thread: {command}")
        self._count(-1)
        position = self._held.position
        self._link.send(Finished(command=command.command, position=position, result=result))

    def _count(self, change: int) -> int:
        with self._counting:
            self._num_pending += change
            return self._num_pending

    def _join(self, command: JoinWorld, job: WorkerJob) -> None:
        held = self._held
        self._leave()
        state = self._state_for(command)
        if state is not None:
            held.begin_with(state)
        world: TrainingWorld
        if job.fault_tolerance == "per-step":
            name = f"worker-{self._worker}"
            world = _per_step().PerStepWorld(name, job, held.device, held)
        else:
            world = TorchWorld(self._link, job, held.device)
        self._world = world
        use_interface_of(self._link.host)
        held.check()  # from here on the other thread ends what waits for others
        world.join(command, held.position)
        self._steps = Steps(self._link, job, held, world)
        assert self._program is not None
        self._program.enter_world(world, self._steps)
        self._has_joined = True
        self._count(-1)
        self._link.send(Joined(world=command.world, position=held.position))

    def _state_for(self, command: JoinWorld) -> TrainingState | None:
        try:
            if command.state is not None:
                return decode_state(self._link.read_state(command.state), "another worker")
            if command.checkpoint:
                return load_checkpoint(command.checkpoint)
        except CheckpointError:
            self._held.is_refused = True
            raise
        return None

    # -- the end ---------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Report the error, and wait until the trainer asks for the state."""
        log.debug("the program failed", exc_info=error)
        if self._leaves_at_once:
            self._leave()
        self._link.send(_describe_error(error, self._held))
        give_up_at = time.monotonic() + LINGER_S
        while not self._held.abandoned:
            try:
                command = self._commands.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                return
            if command is None or isinstance(command, End):
                return

    def _end(self) -> None:
        if not self._held.abandoned:
            if self._steps is not None:
                self._steps.checkpoints.end()
        elif self._offers:
            try:
                self._offer(by_main=True)
            except ChannelClosed:
                pass
            except Exception as error:
                log.warning("the state cannot be offered: %s", error, exc_info=error)

    def _offer(self, *, by_main: bool) -> None:
        """Offer the last whole state, once; no update begins meanwhile."""
        with self._held.holding():
            if self._offered or not self._has_joined:
                return
            state = self._held.whole(by_main=by_main)
            if state is None:
                if by_main:
                    log.warning("no state is offered: the update of a step is not complete")
                return
            self._offered = True
            handle = self._offer_state(state)
        self._link.send(StateOffered(state=handle))

    def _offer_state(self, state: TrainingState) -> StateHandle:
        return self._link.offer_state(state.position, encode_state(state))

    def _leave(self) -> None:
        if self._world is not None:
            self._world.leave()

    # -- other threads ---------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._ended.is_set():
            try:
                command = self._link.receive(BEAT_S)
            except ChannelClosed as error:
                self._offers = False
                self._abandon(str(error))
                return
            except Exception as error:  # noqa: BLE001 - it holds objects of the user
                self._commands.put(error)
                continue
            if isinstance(command, Abandon):
                self._abandon(command.reason)
                return
            if isinstance(command, End) and self._count(0):
                # The main thread may wait for workers that have ended.
                self._offers = False
                self._abandon("the trainer ends")
                return
            if command is not None:
                self._count(1)
                self._commands.put(command)
            if isinstance(command, End):
                return

    def _abandon(self, reason: str) -> None:
        self._held.abandon(reason)
        if self._world is not None:
            self._world.abandon(reason)
        if self._offers:
            try:
                self._offer(by_main=False)
            except ChannelClosed:
                pass
            except Exception as error:
                log.warning("the state cannot be offered: %s", error, exc_info=error)
        self._commands.put(None)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with contextlib.suppress(ChannelClosed):  # the other thread notices it, too
                self._link.send(Progress(position=self._held.position))


def _per_step() -> Any:
    """Imported where it is needed."""
    return importlib.import_module("torchft_svc.trainer.per_step")


def _first_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("use_gpu", True, "this worker sees no CUDA device")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def _describe_error(error: BaseException, held: HeldState) -> Failed:
    kind = type(error)
    return Failed(
        kind=f"{kind.__module__}.{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        pickled=_pickled(error),
        position=held.position,
        is_peers=is_peers_error(error),
        place=place_of(error, error.__traceback__),
        is_final=is_final(error),
        refuses_state=held.is_refused,
    )


def _pickled(error: BaseException) -> bytes:
    """Empty if it cannot be pickled, or not be read again."""
    for form in (error, BareError(error)):
        try:
            pickled: bytes = cloudpickle.dumps(form)
            pickle.loads(pickled)  # noqa: S301 - our own
        except Exception:  # noqa: BLE001, S112 - the user's classes may do anything
            continue
        return pickled
    return b""
