"""The load of the quorum benchmark: many callers, each on its own connection, asking all at once.

Run as a process: it says ``ready``; for a line ``step STEP`` on standard input it makes the
requests and says ``set``; at the next line every caller asks once, and it answers with when the
first asked and the last had its answer (monotonic ns), and with the size of the smallest answer.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from typing import Any

import click
import grpc
import uvloop

from torchft_svc.proto import torchft_pb2 as pb

_OPTIONS = (
    # Without this, all channels of a process would share one connection.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_ROUND_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 60.0


class Caller:
    """One group's manager, as the lighthouse sees it, that asks over unary calls."""

    def __init__(self, address: str, number: int) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        # Bytes in, bytes out: the load should cost as little as it can.
        self._quorum = self.channel.unary_unary("/torchft.LighthouseService/Quorum", None, None)
        self.member = pb.QuorumMember(
            replica_id=f"group-{number:05}:{uuid.UUID(int=number)}",
            address=f"http://10.0.0.1:{20000 + number}",
            store_address=f"10.0.0.1:{40000 + number}",
            world_size=1,
        )

    async def connect(self) -> None:
        await asyncio.wait_for(self.channel.channel_ready(), _CONNECT_TIMEOUT_S)

    def request(self, step: int) -> bytes:
        self.member.step = step
        return pb.LighthouseQuorumRequest(requester=self.member).SerializeToString()

    async def ask(self, request: bytes) -> int:
        """The size of the answer."""
        answer = await self._quorum(request, timeout=_ROUND_TIMEOUT_S)
        return len(answer)


class SessionCaller(Caller):
    """The same over a session: one stream for all questions."""

    _stream: Any  # grpc.aio's stream call; its stubs lack reading and writing

    async def connect(self) -> None:
        await super().connect()
        invoke: Any = self.channel.stream_stream("/torchft.LighthouseService/Session", None, None)
        self._stream = invoke()
        hello = pb.SessionHello(replica_id=self.member.replica_id)
        await self._stream.write(pb.SessionRequest(hello=hello).SerializeToString())
        await asyncio.wait_for(self._stream.read(), _CONNECT_TIMEOUT_S)  # the welcome

    def request(self, step: int) -> bytes:
        self.member.step = step
        question = pb.SessionQuestion(
            requester=self.member, number=step, timeout_ms=int(_ROUND_TIMEOUT_S * 1000)
        )
        return pb.SessionRequest(question=question).SerializeToString()

    async def ask(self, request: bytes) -> int:
        await self._stream.write(request)
        return len(await self._stream.read())


KINDS = {"unary": Caller, "sessions": SessionCaller}


async def run(address: str, over: str, first: int, count: int) -> None:
    callers = [KINDS[over](address, number) for number in range(first, first + count)]
    for caller in callers:  # one by one: a storm of connections is another benchmark
        await caller.connect()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        step = int(line.split()[1])
        requests = [caller.request(step) for caller in callers]
        print("set", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        began_at = time.monotonic_ns()
        asks = [caller.ask(request) for caller, request in zip(callers, requests, strict=True)]
        sizes = await asyncio.gather(*asks)
        print(began_at, time.monotonic_ns(), min(sizes), flush=True)


@click.command()
@click.option("--address", required=True, help="The lighthouse, host:port.")
@click.option("--over", type=click.Choice(list(KINDS)), required=True, help="How they ask.")
@click.option("--first", type=int, required=True, help="Number of the first caller.")
@click.option("--count", type=int, required=True, help="How many callers this process has.")
def main(address: str, over: str, first: int, count: int) -> None:
    """Ask a lighthouse for quorums, with ``count`` callers."""
    uvloop.run(run(address, over, first, count))


if __name__ == "__main__":
    main()
