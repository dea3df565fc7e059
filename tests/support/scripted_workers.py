"""Workers of a trainer that follow a script instead of training, on any backend."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import cloudpickle

from torchft_svc.trainer.backend import Backend, Link, Lost, Received
from torchft_svc.trainer.messages import (
    Answer,
    End,
    Finished,
    JoinWorld,
    Position,
    Reported,
    StateOffered,
    Train,
)

WAIT_S = 60.0
STATE = random.Random(0).randbytes(3_000_000)
GIVEN = STATE[:1_000_000]  # with a report
FROM = Position(epoch=1, step=7, num_samples=56)
A = TypeVar("A")
Script = Callable[[Link, int], None]


def say(link: Link, **metrics: Any) -> None:
    """Report something to the trainer."""
    link.send(Reported(position=Position(), metrics=metrics))


def play(link: Link, worker: int, job: bytes) -> None:
    """The program of the workers: the job is a script."""
    cloudpickle.loads(job)(link, worker)


def describe(link: Link) -> None:
    say(link, pid=os.getpid())


def obey(link: Link, worker: int) -> None:
    """Repeat what is asked, until the end."""
    describe(link)
    while not isinstance(command := link.receive(30.0), End):
        assert isinstance(command, Train)
        say(link, number=command.command)
    say(link, last=worker)


def sleep(link: Link, worker: int) -> None:
    describe(link)
    time.sleep(60.0)


def leave(link: Link, worker: int) -> None:
    say(link, leaving=True)
    time.sleep(0.5)  # what a process says in its last moment may be lost
    os._exit(3)


def fail(link: Link, worker: int) -> None:
    raise ArithmeticError("planted")


def offer(link: Link, worker: int) -> None:
    describe(link)
    link.receive(30.0)
    link.send(StateOffered(state=link.offer_state(FROM, STATE)))
    say(link, offered=True)
    time.sleep(60.0)


def offer_and_end(link: Link, worker: int) -> None:
    given = link.offer_state(FROM, GIVEN)
    link.send(Reported(position=FROM, metrics={"given": True}, state=given))
    handle = link.offer_state(FROM, STATE)
    link.send(Finished(command=1, position=FROM, result=handle))


def take(link: Link, worker: int) -> None:
    while isinstance(command := link.receive(30.0), JoinWorld):
        assert command.state is not None
        state = link.read_state(command.state)
        say(link, hash=hashlib.sha256(state).hexdigest(), position=command.state.position)


class Listener:
    """Starts workers on a backend, and collects its events."""

    _numbers = itertools.count(1)

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.answers: dict[int, list[Answer]] = {}
        self.lost: dict[int, str] = {}
        self._started: list[int] = []

    def start(self, script: Script, resources: Mapping[str, float] | None = None) -> int:
        """The number of the worker."""
        worker = next(self._numbers)
        self._started.append(worker)
        self.backend.start(worker, cloudpickle.dumps(script), resources or {})
        return worker

    def close(self) -> None:
        """End all that have not ended."""
        for worker in self._started:
            self.backend.kill(worker)
        self.wait_for_loss(*self._started)

    def wait_for(self, holds: Callable[[], A], within_s: float = WAIT_S) -> A:
        deadline = time.monotonic() + within_s
        while not (found := holds()):
            assert time.monotonic() < deadline, f"received {self.answers}, lost {self.lost}"
            self._look()
        return found

    def wait_for_loss(self, *workers: int) -> None:
        self.wait_for(lambda: set(workers) <= set(self.lost))

    def said(self, worker: int, key: str) -> list[Any]:
        """All that the worker has said of ``key``."""
        reports = [one for one in self.answers.get(worker, []) if isinstance(one, Reported)]
        return [report.metrics[key] for report in reports if key in report.metrics]

    def wait_for_word(self, worker: int, key: str) -> Any:
        """The first thing that the worker says of ``key``."""
        return self.wait_for(lambda: self.said(worker, key))[0]

    def _look(self) -> None:
        for event in self.backend.wait(0.1):
            if isinstance(event, Received):
                assert event.worker not in self.lost, f"{event} after it was lost"
                self.answers.setdefault(event.worker, []).append(event.answer)
            else:
                assert isinstance(event, Lost)
                assert event.worker not in self.lost, f"{event} again"
                self.lost[event.worker] = event.reason
