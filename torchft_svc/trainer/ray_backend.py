"""Runs the workers of a trainer as Ray actors. Imported only by those who ask for Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from torchft_svc.errors import ConfigError
from torchft_svc.trainer.backend import Lost, Received, WorkerProgram
from torchft_svc.trainer.messages import (
    BEAT_S,
    Answer,
    Command,
    Finished,
    JoinWorld,
    Position,
    Reported,
    StateHandle,
    StateOffered,
)

try:
    import ray
except ImportError as error:
    raise ConfigError(
        "backend", "ray", "Ray is not installed: pip install 'torchft-svc[ray]'"
    ) from error

import ray.util.client
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from torchft_svc.trainer.ray_actor import POLL_S, RayProcess, RayWorkerActor, as_array, fetch_state
from torchft_svc.trainer.ray_slots import RaySlots

_log = logging.getLogger(__name__)

# How long a worker may wait for room before it is reported as lost.
PLACEMENT_TIMEOUT_S = 10.0
# How long a killed worker may live for Ray before it is reported as lost.
KILL_TIMEOUT_S = 5.0
# Ray asks an actor to end, and kills its process after 5 s: so long a frozen one keeps its place.
FROZEN_AFTER_S = 0.3
# A worker that lives says something more often.
SILENT_S = 4 * BEAT_S
_LOOK_S = 1.0
# One caller's commands and polls are carried out in order, beside the worker's program.
_GROUPS = {"commands": 1, "answers": 1, "states": 1}


@dataclass(eq=False, kw_only=True, slots=True)
class _RayWorker:
    """The record of a worker that has not ended."""

    worker: int
    actor: Any
    run: Any  # ready when the worker's program has ended
    poll: Any  # its next answers
    process: Any  # a `RayProcess`
    placed_by: float | None  # until when it has to have room; None: it has
    state: Any = None  # the state that the first of `held` offers is on its way
    held: deque[Answer] = field(default_factory=deque)
    has_ended: bool = False
    killed_at: float | None = None
    answered_at: float | None = None

    def references(self) -> list[Any]:
        return [ref for ref in (self.run, self.poll, self.state) if ref is not None]


class RayBackend:
    """Workers are Ray actors in placement groups. See `Backend`.

    It joins the Ray that is there: the one of this program (``ray.init``), of the job or task that
    it runs in, or that of ``RAY_ADDRESS``; else it starts one, which ends with it.

    Args:
        strategy: ``PACK`` (the workers on few nodes) or ``SPREAD`` (on many); a wish, no condition.
        runtime_env: Ray's, for the workers.
        program: what a worker runs (default: `run_worker`, which trains).
    """

    def __init__(
        self,
        *,
        strategy: str = "PACK",
        runtime_env: Mapping[str, Any] | None = None,
        program: WorkerProgram | None = None,
    ) -> None:
        if strategy not in ("PACK", "SPREAD"):
            raise ConfigError("strategy", strategy, "it is PACK or SPREAD")
        if ray.util.client.ray.is_connected():
            reason = "Ray Client cannot carry a trainer: submit the program as a Ray job"
            raise ConfigError("backend", "ray", reason)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            ray.init(logging_level=logging.WARNING)
        self._slots = RaySlots(strategy)
        self._program = b"" if program is None else cloudpickle.dumps(program)
        self._node = ray.get_runtime_context().get_node_id()
        self._runtime_env = dict(runtime_env or {})
        self._killer = ray.remote(num_cpus=0, max_retries=0, num_returns=0)(RayProcess.kill)
        self._actor_class = ray.remote(concurrency_groups=_GROUPS)(RayWorkerActor)
        self._to_start: list[tuple[int, bytes, dict[str, float]]] = []
        self._requested: tuple[int, dict[str, float]] | None = None
        self._workers: dict[int, _RayWorker] = {}
        self._dying: list[tuple[RayProcess, float]] = []  # and until when by themselves
        self._events: list[Received | Lost] = []
        self._states: dict[int, Any] = {}
        self._state_ids = itertools.count()
        self._job: tuple[bytes, Any] | None = None  # as it was last stored
        self._is_closed = False

    def num_startable(self, resources_per_worker: Mapping[str, float]) -> int:
        self._start_all()
        return self._slots.num_free(_needed(resources_per_worker))

    def request(self, num_workers: int, resources_per_worker: Mapping[str, float]) -> None:
        """Takes effect with the next `wait`: those that are started before come first."""
        self._requested = (num_workers, _needed(resources_per_worker))

    def start(self, worker: int, job: bytes, resources: Mapping[str, float]) -> None:
        """Start a worker; those started between two calls of `wait` are placed together."""
        self._to_start.append((worker, job, _needed(resources)))

    def send(self, worker: int, command: Command) -> None:
        self._start_all()
        running = self._workers.get(worker)
        if running is None:
            return
        if isinstance(command, JoinWorld) and command.state is not None:
            state = dataclasses.replace(command.state, where=self._states.get(command.state.where))
            command = dataclasses.replace(command, state=state)
        running.actor.send_command.options(num_returns=0).remote(command)

    def wait(self, timeout_s: float) -> list[Received | Lost]:
        deadline = time.monotonic() + timeout_s
        while True:
            self._start_all()
            if self._requested is not None:
                self._slots.ask_for(*self._requested)
                self._requested = None
            self._look_at_deadlines()
            remaining = deadline - time.monotonic()
            if self._events or remaining <= 0.0:
                self._collect(0.0)
                break
            self._collect(min(remaining, FROZEN_AFTER_S if self._dying else _LOOK_S))
        events, self._events = self._events, []
        return events

    def kill(self, worker: int) -> None:
        self._start_all()
        running = self._workers.get(worker)
        if running is not None and running.killed_at is None:
            running.killed_at = time.monotonic()
            if (
                running.answered_at is not None
                and running.killed_at > running.answered_at + SILENT_S
            ):
                self._slots.suspect(running.worker)  # Ray reports its end without seeing it
            _kill(running.actor)
            self._note_killed(running)

    def read_state(self, state: StateHandle) -> bytes:
        return fetch_state(self._states.get(state.where))

    def write_state(self, position: Position, state: bytes) -> StateHandle:
        return self._keep_state(position, ray.put(as_array(state)))

    def drop_state(self, state: StateHandle) -> None:
        self._states.pop(state.where, None)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._to_start.clear()
        if not ray.is_initialized():  # the program has ended it
            return
        for worker in list(self._workers):
            self.kill(worker)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while self._workers and time.monotonic() < deadline:
            self._collect(_LOOK_S)
        self._end_frozen(math.inf)
        self._workers.clear()
        self._events.clear()
        self._states.clear()
        self._job = None
        self._slots.close()
        if self._owns_ray:
            ray.shutdown()

    # Starting

    def _start_all(self) -> None:
        """Start the workers that wait for it; if that fails, those without an actor are lost."""
        if not self._to_start:
            return
        starting, self._to_start = self._to_start, []
        try:
            # Workers with equal resources, which is all of them, share a placement group.
            for _, same in itertools.groupby(starting, key=lambda item: item[2]):
                self._start_together(list(same))
        except BaseException:  # the trainer would wait for workers that nobody starts
            for worker in [each for each, _, _ in starting if each not in self._workers]:
                self._slots.give_back(worker)
                self._events.append(Lost(worker=worker, reason="it was not started"))
            raise

    def _start_together(self, batch: list[tuple[int, bytes, dict[str, float]]]) -> None:
        slots = self._slots.reserve([worker for worker, _, _ in batch], batch[0][2])
        for (worker, job, resources), slot in zip(batch, slots, strict=True):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=slot.group, placement_group_bundle_index=slot.bundle
            )
            actor = self._actor_class.options(
                scheduling_strategy=strategy,
                runtime_env=self._runtime_env or None,
                **_options(resources),
            ).remote()
            self._workers[worker] = _RayWorker(
                worker=worker,
                actor=actor,
                run=actor.run.remote(worker, self._stored(job), self._program, list(sys.path)),
                process=actor.process.remote(),
                poll=actor.answers.remote(POLL_S),
                placed_by=time.monotonic() + PLACEMENT_TIMEOUT_S,
            )

    def _stored(self, job: bytes) -> Any:
        """Store the job in Ray once, because all workers have the same."""
        if self._job is None or self._job[0] is not job:
            self._job = (job, ray.put(job))
        return self._job[1]

    # What happens

    def _collect(self, timeout_s: float) -> None:
        """Wait for an event, and return all that have happened."""
        owners = {
            ref: running for running in self._workers.values() for ref in running.references()
        }
        if not owners:
            time.sleep(timeout_s)  # there is nothing that anything could come from
            return
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0)
        for ref in ready:
            running = owners[ref]
            if running.worker not in self._workers:
                continue  # it was reported as lost by another of its references
            try:
                self._receive_result(running, ref)
            except RayError as error:
                if isinstance(error, ActorUnavailableError):
                    self._slots.suspect(running.worker)
                self._lose(running, _reason(error))

    def _receive_result(self, running: _RayWorker, ref: Any) -> None:
        if ref == running.run:
            ray.get(ref)
            running.run = None
        elif ref == running.state:
            running.state = None
            self._pass_offer(running, ref)
        else:
            answers, running.has_ended = ray.get(ref)
            running.placed_by = None
            running.answered_at = time.monotonic()
            running.poll = None
            if not running.has_ended:
                running.poll = running.actor.answers.remote(POLL_S)
            running.held.extend(answers)
        self._pass_on(running)
        if running.has_ended and not running.held and running.run is None:
            self._lose(running, "its program has ended")

    def _pass_on(self, running: _RayWorker) -> None:
        """Return messages of a worker, up to a state that the trainer does not have yet."""
        while running.held and running.state is None:
            offered = _offered(running.held[0])
            if offered is not None:
                # The result of a call belongs to the trainer: it outlives the worker.
                running.state = running.actor.take_state.remote(offered.where)
            else:
                self._events.append(Received(worker=running.worker, answer=running.held.popleft()))

    def _pass_offer(self, running: _RayWorker, ref: Any) -> None:
        answer = running.held.popleft()
        offered = _offered(answer)
        assert offered is not None
        handle = self._keep_state(offered.position, ref)
        if isinstance(answer, Finished):
            answer = dataclasses.replace(answer, result=handle)
        else:
            assert isinstance(answer, StateOffered | Reported)
            answer = dataclasses.replace(answer, state=handle)
        self._events.append(Received(worker=running.worker, answer=answer))

    def _lose(self, running: _RayWorker, reason: str) -> None:
        del self._workers[running.worker]
        self._slots.give_back(running.worker)
        _kill(running.actor)
        reason = "it was killed" if running.killed_at is not None else reason
        self._events.append(Lost(worker=running.worker, reason=reason))

    def _note_killed(self, running: _RayWorker) -> None:
        if ray.wait([running.process], timeout=0, fetch_local=False)[0]:
            with contextlib.suppress(RayError):  # it never came so far
                self._dying.append((ray.get(running.process), time.monotonic() + FROZEN_AFTER_S))

    def _end_frozen(self, at: float) -> None:
        """Kill for good what has been asked to end, and cannot even do that."""
        due = [process for process, until in self._dying if until <= at]
        self._dying = [(process, until) for process, until in self._dying if until > at]
        for process in due:
            if process.node == self._node:
                process.kill()
            else:
                there = NodeAffinitySchedulingStrategy(process.node, soft=False)
                self._killer.options(scheduling_strategy=there).remote(process)

    def _look_at_deadlines(self) -> None:
        now = time.monotonic()
        self._end_frozen(now)
        for running in list(self._workers.values()):
            if running.killed_at is not None and now > running.killed_at + KILL_TIMEOUT_S:
                self._slots.suspect(running.worker)
                self._lose(running, "it was killed")
            elif running.placed_by is not None and now > running.placed_by:
                running.placed_by = None
                if not self._slots.is_placed(running.worker):
                    self._lose(running, "others took its place before it could start")

    def _keep_state(self, position: Position, ref: Any) -> StateHandle:
        number = next(self._state_ids)
        self._states[number] = ref
        return StateHandle(position=position, where=number)


def _offered(answer: Answer) -> StateHandle | None:
    """The state that is offered with the answer."""
    if isinstance(answer, StateOffered | Reported):
        return answer.state
    if isinstance(answer, Finished) and isinstance(answer.result, StateHandle):
        return answer.result
    return None


def _needed(resources: Mapping[str, float]) -> dict[str, float]:
    """The resources to reserve: a CPU if none are given, because Ray needs some."""
    return {name: float(amount) for name, amount in resources.items() if amount} or {"CPU": 1.0}


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """The resources as the options of an actor."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {names[name]: amount for name, amount in resources.items() if name in names}
    options["resources"] = {name: amount for name, amount in resources.items() if name not in names}
    return options


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError):  # it cannot even be created: that is its end
        ray.kill(actor)


def _reason(error: RayError) -> str:
    """Describe the end of a worker in a line, as far as Ray knows it."""
    if isinstance(error, RayTaskError):
        return f"its program raised {error.cause!r}"
    text = str(error)
    if isinstance(error, ActorUnavailableError):
        return "its node or its process cannot be reached"
    if "node has died" in text:
        return "its node has died"
    if isinstance(error, OutOfMemoryError) or "NODE_OUT_OF_MEMORY" in text:
        return "its node ran out of memory"
    found = re.search(r"Worker exit detail: ([^.]*)", text) or re.search(r"(The actor .*)", text)
    return f"its process has ended ({found[1] if found else type(error).__name__})"
