"""Simulated trainers for the fleet benchmark: each is a group with a connection of its own.

They say what managers say, with the codec of `torchft_svc.rpc`, and compute nothing. Quorums are
parsed once for all trainers of a process, which managers do on a machine of their own each. For
each line on standard input (JSON) there is a line of output:

``{"do": "start"}``: connect and ask; answered at once with the instant at which it was begun.
``{"do": "wait", "groups": N}``: answered when all trainers here are in a quorum of N groups.
``{"do": "report"}``: the steps of all so far.

Answers have instants in monotonic seconds: ``quorum_at`` when the last trainer here had its quorum,
``lost_at`` when the last of the ``num_informed`` that were informed of a loss was, since the last
``wait``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import click
import uvloop

from tools.benchmarks.simulated_fleet import group_member, group_tally
from torchft_svc.core.link import beat_together
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.session_messages import Beat, Hello, Question, SessionMessage
from torchft_svc.core.quorum.types import NO_QUORUM, Member
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel
from torchft_svc.rpc.client_stream import EOF
from torchft_svc.rpc.codec_session import session_message_to_wire

_QUESTION_TIMEOUT_S = 60.0
# As managers have it; a lighthouse with many groups asks for less.
_BEAT_INTERVAL_S = 0.1
# Longer news are quorums, which are parsed once.
_LONG_BYTES = 1000
# The end of a quorum says which question it answers.
_ANSWERS_BYTES = 16
_MAX_CONNECTING = 20


class Fleet:
    """What the trainers of this process have in common, and what they have received."""

    def __init__(self, address: str, step_s: float, *, steady: bool, deaf: bool) -> None:
        self.address = address
        self.step_s = step_s
        self.steady = steady
        self.deaf = deaf
        self.sizes: Counter[int] = Counter()  # of the quorums that the trainers are in
        self.quorum_at = self.lost_at = 0.0
        self.num_informed = 0
        self.connecting = asyncio.Semaphore(_MAX_CONNECTING)
        self._changed = asyncio.Event()
        self._parsed: dict[bytes, tuple[int, int]] = {}

    async def all_in(self, groups: int, num_trainers: int) -> None:
        """Return when all trainers here are in a quorum of so many groups."""
        while self.sizes[groups] != num_trainers:
            self._changed.clear()
            await self._changed.wait()

    def now_in(self, groups: int, before: int) -> None:
        """A trainer has a quorum of so many groups."""
        self.quorum_at = time.monotonic()
        self.sizes[before] -= 1
        self.sizes[groups] += 1
        self._changed.set()

    def parse(self, news: bytes) -> tuple[int, int]:
        """Return how many groups a quorum has, and its step."""
        key = news[:_LONG_BYTES] if len(news) > _LONG_BYTES else news[:-_ANSWERS_BYTES]
        if key not in self._parsed:
            quorum = pb.SessionNews.FromString(news).quorum
            steps = [each.step for each in quorum.participants]
            self._parsed = {key: (len(steps), max(steps))}
        return self._parsed[key]


class Trainer:
    """One group, in a step of ``step_s`` unless it waits for a quorum."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        member = group_member(number, 0, random.getrandbits(32))
        self._member = replace(member, steady=fleet.steady)
        self._question = 0
        self._size = 0
        self._asks = True
        self._step = 0
        self._step_at = 0.0  # when that step began
        self._sent: asyncio.Queue[SessionMessage] = asyncio.Queue()
        self._stream: Any = None
        self._next: asyncio.TimerHandle | None = None
        self._interval_s = _BEAT_INTERVAL_S

    @property
    def step(self) -> int:
        """The committed step; within a term one follows the other without a message."""
        if self._asks or not self._fleet.steady:
            return self._step
        return self._step + int((time.monotonic() - self._step_at) / self._fleet.step_s)

    async def run(self) -> None:
        """Hold a session, and train; ends with the process."""
        async with self._fleet.connecting:
            channel = open_aio_channel(self._fleet.address)
            await channel.channel_ready()
            invoke: Any = channel.stream_stream("/torchft.LighthouseService/Session", None, None)
            self._stream = invoke()
            await self._send(Hello(self._member.replica_id, NO_QUORUM))
            welcome = pb.SessionNews.FromString(await self._stream.read()).welcome
        self._welcomed(welcome)
        self._ask()
        sending = asyncio.create_task(self._keep_sending())
        beating = asyncio.create_task(self._keep_beating())
        while (news := await self._stream.read()) is not EOF:
            self._receive(news)
            if self._fleet.deaf and self._size:
                self._step += 1
                self._ask(1)  # behind this step, as if all had agreed on it
                await asyncio.Event().wait()
        raise SystemExit(f"the lighthouse ended a session: {sending} {beating}")

    async def _send(self, message: Hello | SessionMessage) -> None:
        await self._stream.write(session_message_to_wire(message).SerializeToString())

    async def _keep_sending(self) -> None:
        while True:
            await self._send(await self._sent.get())

    def _welcomed(self, welcome: pb.SessionWelcome) -> None:
        self._interval_s = max(_BEAT_INTERVAL_S, welcome.min_interval_ms / 1000)

    async def _keep_beating(self) -> None:
        await asyncio.sleep(self._interval_s * random.random())
        while True:
            phase = Phase.QUORUM if self._asks else Phase.TRAINING
            lasts_s = (time.monotonic() - self._step_at) % self._fleet.step_s
            tally = group_tally(self.step, self._fleet.step_s)
            self._sent.put_nowait(Beat(phase, self.step, lasts_s, tally=tally))
            now = time.time()
            wait_s = self._interval_s * random.uniform(0.9, 1.0)
            await asyncio.sleep(beat_together(now, wait_s, self._interval_s, 0.0) - now)

    def _receive(self, news: bytes) -> None:
        short = pb.SessionNews() if len(news) > _LONG_BYTES else pb.SessionNews.FromString(news)
        kind = short.WhichOneof("kind") or "quorum"
        now = time.monotonic()
        if kind == "quorum":
            size, step = self._fleet.parse(news)
            self._fleet.now_in(size, self._size)
            self._size, self._asks = size, False
            self._step, self._step_at = max(step, self._step), now
            if not self._fleet.steady:
                self._plan(now + self._fleet.step_s)
        elif kind == "welcome":
            self._welcomed(short.welcome)
        elif kind == "lost":
            self._fleet.num_informed += 1
            self._fleet.lost_at = now
            self._ask()  # the step is discarded
        elif kind == "term_ends" and short.term_ends.HasField("step"):
            self._ask()
        elif kind in ("term_ends", "waiting"):  # the sum of this step says so to all
            self._plan(self._step_at + (self.step - self._step + 1) * self._fleet.step_s)
        elif kind == "refusal":
            self._asks = False
            self._plan(now + self._fleet.step_s)

    def _plan(self, at: float) -> None:
        """Ask at ``at``, the end of a step."""
        if self._next is not None:
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(max(0.0, at - time.monotonic()), self._ask, 1)

    def _ask(self, num_steps: int = 0) -> None:
        """Ask, in a term that ends or behind ``num_steps`` more."""
        if self._question and self._asks:
            return
        if self._next is not None:
            self._next.cancel()
        if self._question:
            self._step = self.step if self._fleet.steady else self._step + num_steps
        self._question += 1
        self._asks = True
        self._member = group_member_at(self._member, self._step)
        agreed = num_steps > 0 and self._fleet.steady
        question = Question(self._question, self._member, _QUESTION_TIMEOUT_S, agreed)
        self._sent.put_nowait(question)


def group_member_at(member: Member, step: int) -> Member:
    """The same group, in a later step."""
    return replace(member, step=step, has_history=step > 0)


async def serve(fleet: Fleet, trainers: list[Trainer]) -> None:
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    running: list[asyncio.Task[None]] = []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        answer: dict[str, Any] = {"at": time.monotonic()}
        if asked["do"] == "start":
            running += [asyncio.create_task(trainer.run()) for trainer in trainers]
        elif asked["do"] == "wait":
            await fleet.all_in(asked["groups"], len(trainers))
            answer["quorum_at"] = fleet.quorum_at
            answer |= {"lost_at": fleet.lost_at, "num_informed": fleet.num_informed}
            fleet.num_informed = 0
        else:
            answer["steps"] = sum(trainer.step for trainer in trainers)
        print(json.dumps(answer), flush=True)


@click.command()
@click.option("--address", required=True, help="The lighthouse, host:port.")
@click.option("--first", type=int, required=True, help="Number of the first group.")
@click.option("--count", type=int, required=True, help="How many groups this process has.")
@click.option("--step-s", type=float, required=True, help="How long a step takes.")
@click.option("--steady", is_flag=True, help="Ask only when the membership changes.")
@click.option(
    "--deaf", is_flag=True, help="Ask once more after the first quorum, and read nothing."
)
def main(address: str, first: int, count: int, step_s: float, steady: bool, deaf: bool) -> None:
    """Simulate ``count`` trainers, each a group of its own."""

    async def run() -> None:
        fleet = Fleet(address, step_s, steady=steady, deaf=deaf)
        await serve(fleet, [Trainer(fleet, first + each) for each in range(count)])

    uvloop.run(run())


if __name__ == "__main__":
    main()
