"""Thousands of quorum rounds with members that come, leave and crash: what do the services hold?

PYTHONPATH=tests:. python -m support.soak_rounds --rounds 20000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

import grpc

from support.hostile import Usage
from support.running import eventually, lighthouse_process, manager_process
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel

# What caches and the allocator settle at is reached by then.
WARM_UP_ROUNDS = 500
NUM_MEMBERS = 6
# A member comes, leaves or crashes in one round of so many.
CHANGE_EVERY = 10
ROUND_S = 20.0
# Above what was held after the warm-up; measured after 20,000 rounds: 1.2 MB (the lighthouse, with
# a thousand sessions that came and went), 0.5 MB (the manager). A leak of 1 KB a round: 20 MB.
MAX_GROWTH_MB = 2.0
MAX_MORE_DESCRIPTORS = 3
# gRPC starts some threads late, a few for each core.
MAX_MORE_THREADS = 6


class Member:
    """A group with a session of its own; it asks once in every round."""

    def __init__(self, address: str, number: int) -> None:
        self.replica_id = f"group{number}:{number}"
        self._channel = open_aio_channel(address)
        self._stream: Any = self._channel.stream_stream("/torchft.LighthouseService/Session")()
        self._number = 0
        self.answer: asyncio.Task[pb.SessionNews] | None = None

    async def join(self) -> None:
        await self._send(hello=pb.SessionHello(replica_id=self.replica_id))
        assert (await self._news()).WhichOneof("kind") == "welcome"

    async def ask(self, step: int) -> None:
        """Ask, unless the last question still waits."""
        if self.answer is not None:
            return
        self._number += 1
        requester = pb.QuorumMember(replica_id=self.replica_id, step=step, address="127.0.0.1:1")
        await self._send(
            question=pb.SessionQuestion(
                requester=requester, number=self._number, timeout_ms=int(ROUND_S * 1000)
            )
        )
        self.answer = asyncio.create_task(self._quorum())

    async def leave(self, *, crashes: bool) -> None:
        if crashes:
            self._stream.cancel()
        else:
            await self._send(leave=pb.SessionLeave(reason="it has had enough"))
        if self.answer is not None:
            await asyncio.gather(self.answer, return_exceptions=True)
        while not crashes and await self._stream.read() is not grpc.aio.EOF:
            pass  # gRPC holds the end back until all that came before it is read
        await self._channel.close()

    async def _quorum(self) -> pb.SessionNews:
        while True:
            news = await self._news()
            assert news.WhichOneof("kind") != "refusal", news
            if news.WhichOneof("kind") == "quorum":
                return news

    async def _send(self, **kind: Any) -> None:
        await self._stream.write(pb.SessionRequest(**kind).SerializeToString())

    async def _news(self) -> pb.SessionNews:
        raw = await self._stream.read()
        assert raw is not grpc.aio.EOF, f"{self.replica_id}: {await self._stream.details()}"
        return pb.SessionNews.FromString(raw)


class Worker:
    """The only worker of a real manager; it asks and votes in every round."""

    def __init__(self, address: str) -> None:
        self._channel = open_aio_channel(address)
        self._quorum: Any = self._channel.unary_unary("/torchft.ManagerService/Quorum")
        self._vote: Any = self._channel.unary_unary("/torchft.ManagerService/ShouldCommit")

    async def step(self, step: int) -> pb.ManagerQuorumResponse:
        """The quorum as its manager answers it."""
        request = pb.ManagerQuorumRequest(step=step, worker_id="w").SerializeToString()
        answer = pb.ManagerQuorumResponse.FromString(await self._quorum(request, timeout=ROUND_S))
        vote = pb.ShouldCommitRequest(
            should_commit=True, step=step, round=answer.round, worker_id="w"
        )
        raw = await self._vote(vote.SerializeToString(), timeout=ROUND_S)
        assert pb.ShouldCommitResponse.FromString(raw).should_commit
        return answer

    async def close(self) -> None:
        await self._channel.close()


@dataclass
class Rounds:
    """The members, and what they have seen."""

    address: str
    worker: Worker
    chance: random.Random
    members: list[Member]
    num_started: int = 0
    last_id: int = 0

    async def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            if self.chance.randrange(CHANGE_EVERY) == 0:
                await asyncio.wait_for(self._change(), ROUND_S)
            await asyncio.wait_for(self._round(step), ROUND_S)

    async def _round(self, step: int) -> None:
        """Check that former members are in this quorum; newcomers may have to wait for the next."""
        for member in self.members:
            await member.ask(step)
        quorum = await self.worker.step(step)
        assert quorum.quorum_id >= self.last_id, "ids grow"
        self.last_id = quorum.quorum_id
        for member in self.members:
            if member.replica_id in quorum.replica_ids:
                assert member.answer is not None
                assert (await member.answer).quorum.quorum_id == quorum.quorum_id
                member.answer = None

    async def _change(self) -> None:
        if len(self.members) >= NUM_MEMBERS:
            member = self.members.pop(self.chance.randrange(len(self.members)))
            await member.leave(crashes=self.chance.random() < 0.5)
        else:
            await self.grow()

    async def grow(self) -> None:
        self.num_started += 1
        member = Member(self.address, self.num_started)
        await member.join()
        self.members.append(member)

    async def end(self) -> None:
        for member in self.members:
            await member.leave(crashes=True)
        await self.worker.close()


def soak(num_rounds: int, seed: int = 0) -> str:
    """Run them, and check what both services hold at the end; returns it in words."""
    with (
        lighthouse_process() as lighthouse,
        manager_process(lighthouse.address, name="worker") as manager,
    ):

        async def all_rounds() -> None:
            chance = random.Random(seed)
            rounds = Rounds(lighthouse.address, Worker(manager.address), chance, [])
            for _ in range(NUM_MEMBERS):
                await rounds.grow()
            await rounds.run(1, WARM_UP_ROUNDS)
            usages = [Usage(lighthouse), Usage(manager)]
            await rounds.run(WARM_UP_ROUNDS, num_rounds + 1)
            findings.append(f"{rounds.num_started} sessions")
            for usage in usages:
                findings.append(check(usage))
            await rounds.end()

        findings: list[str] = []
        began_at = time.monotonic()
        asyncio.run(all_rounds())
        assert "Traceback" not in lighthouse.errors() + manager.errors()
        return f"{num_rounds} rounds in {time.monotonic() - began_at:.0f} s: {'; '.join(findings)}"


def check(usage: Usage) -> str:
    """Fails if the process holds more than its bounds allow."""
    now = usage.now()
    more_mb = usage.grown_mb()
    finding = f"RSS {now[0] / 1e6:.1f} MB ({more_mb:+.1f}), descriptors and threads {now[1:]}"
    finding += f", after the warm-up {usage.before[1:]}"
    assert more_mb < MAX_GROWTH_MB, finding
    # That of a member which has just crashed is still to be closed.
    eventually(lambda: usage.descriptors_are_back(MAX_MORE_DESCRIPTORS), what=finding)
    assert now[2] <= usage.before[2] + MAX_MORE_THREADS, finding
    return finding


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(soak(options.rounds, options.seed))
