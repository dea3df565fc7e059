"""Measures what a lighthouse holds, and how long, for many groups of a job, or many jobs.

PYTHONPATH=tests:. python -m support.quorum_load --groups 200 --kilobytes 8 --rounds 20
PYTHONPATH=tests:. python -m support.quorum_load --jobs 100 --questions 400 --rounds 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from support.bounds import check
from support.hostile import Training, Usage, call_head, frame, packed, training
from support.running import Process, eventually, line_to
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import open_aio_channel
from torchft_svc.rpc.codec import JOB_KEY

JOB = "load"
ROUND_S = 60.0
# A field that no version knows, 15 KB: ``data`` may have no more than 16.
UNKNOWN = b"\xfa\x7f\x80\x78" + bytes(15 * 1024)
# Before there were bounds: 3.9 GB, and nobody was served for 8 s.
MAX_PEAK_MB, MAX_LEFT_MB, MAX_GAP_S = 150.0, 25.0, 0.5
# The jobs are looked at so often: each look is a load of its own.
_LOOK_S = 0.2
# So much is taken from a client that does not read, as long as gRPC does not make its window wider.
_NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1))


def question(number: int, num_bytes: int) -> pb.SessionRequest:
    """The question of group ``number``, with so many bytes of data."""
    asker = pb.QuorumMember(replica_id=f"load{number}:1", address="a:1", store_address="a:2")
    asker.data = "x" * min(num_bytes, 16 * 1024)
    if num_bytes > len(asker.data):
        asker.MergeFromString(UNKNOWN)
    wait_ms = int(ROUND_S * 1000)
    return pb.SessionRequest(question={"requester": asker, "number": 1, "timeout_ms": wait_ms})


def hello(number: int) -> pb.SessionRequest:
    return pb.SessionRequest(hello={"replica_id": f"load{number}:1"})


class Group:
    """One that reads what it gets."""

    def __init__(self, address: str, number: int, num_bytes: int) -> None:
        self._number, self._num_bytes = number, num_bytes
        self._channel = open_aio_channel(address)
        metadata = ((JOB_KEY, JOB),)
        path = "/torchft.LighthouseService/Session"
        self._stream: Any = self._channel.stream_stream(path)(metadata=metadata)

    async def join(self) -> None:
        await self._stream.write(hello(self._number).SerializeToString())
        await self._stream.read()

    async def ask(self) -> int | str:
        """The bytes of the answer, or why there is none."""
        asked = question(self._number, self._num_bytes)
        await self._stream.write(asked.SerializeToString())
        while True:
            raw = await self._stream.read()
            assert raw is not grpc.aio.EOF, await self._stream.details()
            if len(raw) > 64 * 1024:
                return len(raw)
            news = pb.SessionNews.FromString(raw)
            if news.WhichOneof("kind") == "refusal":
                return str(news.refusal.reason)
            if news.WhichOneof("kind") == "quorum":
                return len(raw)

    async def end(self) -> None:
        self._stream.cancel()
        await self._channel.close()


async def _rounds(lighthouse: Process, count: int, num_bytes: int, rounds: int) -> list[int | str]:
    groups = [Group(lighthouse.address, number, num_bytes) for number in range(count)]
    try:
        for group in groups:
            await group.join()
        for _ in range(rounds):
            outcomes = await asyncio.gather(*(group.ask() for group in groups))
        return outcomes
    finally:
        await asyncio.gather(*(group.end() for group in groups))


@contextlib.contextmanager
def deaf_groups(lighthouse: Process, count: int, num_bytes: int) -> Iterator[None]:
    """Groups that ask, half of them without a session, and read nothing at all.

    They take gRPC's first window, and in the end they break off.
    """
    with contextlib.ExitStack() as stack:
        streams, calls = [], []
        for number in range(count):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", lighthouse.port), 10))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # Its end breaks the connection, with all that is under way.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if number % 2 == 0:
                raw.sendall(_head("Session", lighthouse) + frame(0, 0, 1, packed(hello(number))))
                streams.append((number, raw))
            else:
                raw.sendall(_head("Quorum", lighthouse))
                calls.append((number, raw))
        # All that live are waited for: the last of the sessions to ask makes the quorum.
        for number, raw in calls:
            asker = question(number, num_bytes).question.requester
            _say(raw, packed(pb.LighthouseQuorumRequest(requester=asker)), ends=True)
        for number, raw in streams:
            _say(raw, packed(question(number, num_bytes)))
        yield


async def _ask_on(lighthouse: Process, jobs: int, questions: int, num_bytes: int) -> None:
    """A group in each of so many jobs, of which it is the quorum, asks on and reads no answer,
    until the lighthouse has put all of them out."""
    calls, channels = [], []
    try:
        for number in range(jobs):
            channels.append(grpc.aio.insecure_channel(lighthouse.address, options=_NARROW))
            metadata = ((JOB_KEY, f"{JOB}-{number}"),)
            path = "/torchft.LighthouseService/Session"
            calls.append(channels[-1].stream_stream(path)(metadata=metadata))
            await calls[-1].write(hello(number).SerializeToString())
            await calls[-1].read()  # the welcome
        asked = question(0, num_bytes)
        asked.question.requester.min_replicas = 1
        asking = [
            asyncio.create_task(_write_on(call, number, asked, questions))
            for number, call in enumerate(calls)
        ]
        await asyncio.to_thread(_await_end_of_all, lighthouse)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*(channel.close() for channel in channels))


async def _write_on(call: Any, number: int, asked: pb.SessionRequest, questions: int) -> None:
    mine = pb.SessionRequest.FromString(asked.SerializeToString())
    mine.question.requester.replica_id = f"load{number}:1"
    raw = mine.SerializeToString()
    for _ in range(questions):
        await call.write(raw)


def _await_end_of_all(lighthouse: Process) -> None:
    deadline = time.monotonic() + ROUND_S
    while _num_living(lighthouse):
        assert time.monotonic() < deadline, "some jobs are not put out"
        time.sleep(_LOOK_S)


def _num_living(lighthouse: Process) -> int:
    """The groups of `_ask_on`."""
    with line_to(lighthouse.address) as line:
        status = line.call("LighthouseService/Status", pb.LighthouseStatusRequest(), ROUND_S, None)
        jobs = [job for job in status.result().jobs if job.job.startswith(f"{JOB}-")]
    return sum(len(job.groups) for job in jobs)


def _head(method: str, lighthouse: Process) -> bytes:
    return call_head(f"/torchft.LighthouseService/{method}", lighthouse.port, torchft_job=JOB)


def _say(raw: socket.socket, said: bytes, *, ends: bool = False) -> None:
    for start in range(0, len(said), 16_000):
        is_last = ends and start + 16_000 >= len(said)
        raw.sendall(frame(0, int(is_last), 1, said[start : start + 16_000]))


@dataclass(frozen=True)
class Load:
    """What the lighthouse held at the most, and held in the end, in MB above what it held before;
    the longest step of a training beside it; and what the groups got in the last round."""

    peak_mb: float
    left_mb: float
    worst_step_s: float
    outcomes: list[int | str]

    def check(self) -> None:
        assert self.peak_mb < MAX_PEAK_MB, f"{self.peak_mb:.0f} MB more under load"
        assert self.left_mb < MAX_LEFT_MB, f"{self.left_mb:.0f} MB more after the load"
        check("a step beside the load", self.worst_step_s, MAX_GAP_S)


class _Peak:
    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._over = threading.Event()
        self.mb = 0.0
        self._thread = threading.Thread(target=self._watch, name="memory watch")
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.mb = max(self.mb, self._usage.grown_mb())

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self.mb


def load(
    steady: Training,
    *,
    groups: int = 0,
    num_bytes: int,
    rounds: int = 1,
    deaf: int = 0,
    jobs: int = 0,
    questions: int = 0,
) -> Load:
    """Put it on the lighthouse of a training."""
    steady.goes_on_in_time()
    usage = Usage(steady.lighthouse)
    peak = _Peak(usage)
    outcomes: list[int | str] = []
    try:
        if deaf:
            with deaf_groups(steady.lighthouse, deaf, num_bytes):
                published = f"job={JOB} id="
                eventually(lambda: published in steady.lighthouse.errors(), ROUND_S)
                steady.goes_on()
        if groups:
            outcomes = asyncio.run(_rounds(steady.lighthouse, groups, num_bytes, rounds))
        for _ in range(rounds if jobs else 0):
            asyncio.run(_ask_on(steady.lighthouse, jobs, questions, num_bytes))
        steady.goes_on()
    finally:
        mb = peak.end()
    with contextlib.suppress(AssertionError):  # the number says more
        eventually(lambda: usage.grown_mb() < MAX_LEFT_MB / 2, 10)
    worst_s, steady.worst_s = steady.worst_s, 0.0
    return Load(mb, usage.grown_mb(), worst_s, outcomes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--kilobytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=0, help="instead of groups of one job")
    parser.add_argument("--questions", type=int, default=400, help="of each, with 31 KB")
    options = parser.parse_args()
    began_at = time.monotonic()
    with training() as steady:
        if options.jobs:
            result = load(
                steady,
                jobs=options.jobs,
                questions=options.questions,
                num_bytes=31 * 1024,
                rounds=options.rounds,
            )
        else:
            result = load(
                steady,
                groups=options.groups,
                num_bytes=options.kilobytes * 1024,
                rounds=options.rounds,
            )
    print(f"{time.monotonic() - began_at:.0f} s: {result.outcomes[:1]}")
    print(f"{result.peak_mb=:.0f} {result.left_mb=:.0f} {result.worst_step_s=:.2f}")
    result.check()
