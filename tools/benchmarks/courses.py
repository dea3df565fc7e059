"""A course of kills: a job is hit again and again, and started again where a kill has ended it."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import click

from tools.benchmarks.processes import ChildError

# Jobs that end before they are hit; more of them in a row, and the course is given up.
_MAX_IN_VAIN = 3

J = TypeVar("J")


@dataclass(slots=True)
class Course(ABC, Generic[J]):
    """What is hit is a job ``J``; all ``num_kills`` count, also those that end it."""

    num_kills: int
    num_hits: int = field(default=0, init=False)
    num_ended: int = field(default=0, init=False)

    @property
    @abstractmethod
    def name(self) -> str:
        """The course's name in lines of progress."""

    @abstractmethod
    def start(self) -> contextlib.AbstractContextManager[J]:
        """A job that is ready to be hit."""

    @abstractmethod
    def wait(self, job: J) -> None:
        """Wait for a moment at which to hit the job."""

    @abstractmethod
    def hit(self, job: J) -> str:
        """Kill a part of it; what was measured, in words, once it has recovered."""

    def run(self) -> None:
        """Hit jobs until all kills are done."""
        num_in_vain = 0
        while self.num_hits < self.num_kills and num_in_vain < _MAX_IN_VAIN:
            num_in_vain += 1
            try:
                with self.start() as job:
                    while self.num_hits < self.num_kills:
                        self.wait(job)
                        num_in_vain = 0
                        self.num_hits += 1
                        outcome = self.hit(job)
                        click.echo(f"{self.name}: kill {self.num_hits}: {outcome}", err=True)
            except ChildError as error:
                self.num_ended += 1
                reason = str(error)[:300]
                click.echo(f"{self.name}: kill {self.num_hits} ended the job: {reason}", err=True)
