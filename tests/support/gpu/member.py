"""A process that is one member of a group over NCCL, and obeys lines on its standard input.

Each line is ``COMMAND JSON-ARGUMENTS``; the answer is one line of JSON, ``{"error": ...}`` if the
command failed. Milliseconds are measured here, with the device idle at both ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from support.collective_calls import Calls
from torchft_svc.client import ProcessGroup, ProcessGroupBabyNCCL, ProcessGroupNCCL
from torchft_svc.client.process.watchdog import Watchdog
from torchft_svc.client.reduce.quantized import (
    Quantization,
    chunk_length,
    decode_chunks,
    encode_chunks,
    sum_chunks,
)
from torchft_svc.client.reduce.reduction import Reduction
from torchft_svc.client.reduce.wait_times import WaitTimes
from torchft_svc.errors import TorchFTError

DEVICE = torch.device("cuda", 0)
LIMIT = timedelta(seconds=20)
Answer = dict[str, Any]


def ms_since(began_at: float) -> float:
    return 1000 * (time.monotonic() - began_at)


class Ticker:
    """The longest time for which the interpreter's other threads could not run."""

    def __enter__(self) -> Ticker:
        self.longest_ms = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(0.001):
            now = time.monotonic()
            self.longest_ms = max(self.longest_ms, 1000 * (now - before))
            before = now

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Member:
    def __init__(self) -> None:
        self.pg: ProcessGroup | None = None
        self.errors: list[str] = []

    def make(self, timeout_s: float = 30.0, *, isolated: bool = False, **options: Any) -> Answer:
        torch.zeros(1, device=DEVICE)
        kind = ProcessGroupBabyNCCL if isolated else ProcessGroupNCCL
        self.pg = kind(timedelta(seconds=timeout_s), device=DEVICE, **options)
        return {}

    def configure(self, store: str, rank: int, size: int, quorum: int) -> Answer:
        began_at = time.monotonic()
        with Ticker() as ticker:
            try:
                self.group.configure(store, f"member {rank}", rank, size, quorum_id=quorum)
            except TorchFTError as error:
                error_text = f"{type(error).__name__}: {error}"
                return {"error": error_text, "stall_ms": ticker.longest_ms}
        return {"ms": ms_since(began_at), "stall_ms": ticker.longest_ms}

    def allreduce(self, numel: int, value: float, op: str = "SUM") -> Answer:
        """Reduce in the manager's way; the answer has the first and last element."""
        tensor = torch.full((numel,), value, device=DEVICE)
        began_at = time.monotonic()
        ok = self._reduction(tensor, getattr(ReduceOp, op)).wait()
        took_ms = ms_since(began_at)
        return {"ok": ok, "ends": [tensor[0].item(), tensor[-1].item()], "ms": took_ms}

    def hang(self, abort_after_s: float, numel: int = 1 << 20) -> Answer:
        """Reduce what nobody else reduces, until it is aborted from another thread."""
        tensor = torch.ones(numel, device=DEVICE)
        torch.cuda.synchronize()
        reduction = self._reduction(tensor, ReduceOp.SUM)
        found: Answer = {}

        def abort() -> None:
            began_at = time.monotonic()
            self.group.abort()
            found["abort_ms"] = ms_since(began_at)

        timer = threading.Timer(abort_after_s, abort)
        launched_at = time.monotonic()
        with Ticker() as ticker:
            timer.start()
            found["ok"] = reduction.wait()
            found["released_ms"] = ms_since(launched_at + abort_after_s)
            torch.cuda.synchronize()
            found["idle_ms"] = ms_since(launched_at + abort_after_s)
            timer.join()
        found["stall_ms"] = ticker.longest_ms
        found["errors"] = self.errors
        return found

    def lose(self, quorum: int, numel: int = 1 << 20) -> Answer:
        """Reduce with a member that is dead; its loss is reported as the manager does it."""
        reduction = self._reduction(torch.ones(numel, device=DEVICE), ReduceOp.SUM)
        began_at = time.monotonic()
        self.group.lose_member(quorum, "a member is gone")
        ok = reduction.wait()
        waited_ms = ms_since(began_at)
        self.group.abort()
        aborted_ms = ms_since(began_at)
        torch.cuda.synchronize()
        found = {"ok": ok, "waited_ms": waited_ms, "aborted_ms": aborted_ms}
        return {**found, "idle_ms": ms_since(began_at), "errors": self.errors}

    def forget(self, numel: int = 1 << 20) -> Answer:
        """Reduce alone and hold up the stream only: torch's watchdog has to end it."""
        tensor = torch.ones(numel, device=DEVICE)
        began_at = time.monotonic()
        work = self.group.allreduce([tensor])
        work.wait()
        torch.cuda.synchronize()
        idle_ms = ms_since(began_at)
        try:
            work.wait(timedelta(seconds=1))
        except TorchFTError as error:
            return {"idle_ms": idle_ms, "error": str(error), "errored": str(self.group.errored())}
        return {"idle_ms": idle_ms, "error": "success"}

    def every_collective(self) -> Answer:
        """What each collective gives, as lists."""
        return Calls(self.group, DEVICE).all()

    def ordered(self, rounds: int) -> Answer:
        """Fill, reduce and read on streams, without waiting on the CPU in between."""
        rank, wrong = self.group.rank(), 0
        matrix = torch.randn(2048, 2048, device=DEVICE)
        for number in range(rounds):
            busy = matrix @ matrix  # keeps the stream behind the CPU
            tensor = torch.zeros(1 << 20, device=DEVICE) + busy.flatten()[0] * 0 + number + rank
            work = self.group.allreduce([tensor])
            work.wait()
            expected = sum(number + other for other in range(self.group.size()))
            wrong += int((tensor != expected).any().item())
        return {"wrong": wrong}

    def timed(self, num_bytes: int, repeat: int) -> Answer:
        """Milliseconds of each sum, until it is over on the device; the first two are left out."""
        tensor, times = torch.ones(num_bytes // 4, device=DEVICE), []
        for _ in range(repeat + 2):
            torch.cuda.synchronize()
            began_at = time.monotonic()
            self.group.allreduce([tensor]).wait(timedelta(seconds=20))
            torch.cuda.synchronize()
            times.append(ms_since(began_at))
        return {"ms": times[2:]}

    def capture(self) -> Answer:
        """Sum while a CUDA graph is captured, and then once more."""
        tensor, error_text = torch.ones(4, device=DEVICE), ""
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                self.group.allreduce([tensor])
        except (RuntimeError, TorchFTError) as error:
            error_text = f"{type(error).__name__}: {error}"
        return {"error": error_text, **self.allreduce(numel=10, value=1.0)}

    def timed_quantized(self, num_bytes: int, repeat: int, number_format: str) -> Answer:
        """Milliseconds of each sum in 8-bit numbers, as `timed`; ``end``: one of the first sum."""
        kind, pg = Quantization(number_format), self.group
        values = torch.ones(num_bytes // 4, device=DEVICE)
        chunk = chunk_length(values.numel(), pg.size())
        times, ends = [], []
        for _ in range(repeat + 2):
            torch.cuda.synchronize()
            began_at = time.monotonic()
            sent = encode_chunks(values, pg.size(), kind)
            received = torch.empty_like(sent)
            pg.alltoall_base(received.view(-1), sent.view(-1), [], []).wait(LIMIT)
            mine = sum_chunks(received, chunk, kind)
            pg.allgather([list(sent.unbind())], [mine]).wait(LIMIT)
            decode_chunks(sent, values, kind)
            torch.cuda.synchronize()
            times.append(ms_since(began_at))
            ends.append(values[-1].item())
        return {"ms": times[2:], "end": ends[0]}

    def memory(self) -> Answer:
        """Bytes: free on the device, and in use by this process' own tensors."""
        self.group.tidy()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(DEVICE)
        return {"free": free, "allocated": torch.cuda.memory_allocated(DEVICE)}

    def kill_the_process(self, after_s: float, numel: int = 1 << 24) -> Answer:
        """Kill what carries a sum that nobody else takes part in, so long after its launch."""
        pg = self.group
        assert isinstance(pg, ProcessGroupBabyNCCL)
        assert pg.pid is not None
        work = pg.allreduce([torch.ones(numel, device=DEVICE)])
        time.sleep(after_s)
        began_at = time.monotonic()
        os.kill(pg.pid, signal.SIGKILL)
        error_text = ""
        try:
            work.wait(timedelta(seconds=10))
        except (RuntimeError, TorchFTError) as error:
            error_text = str(error)
        error_ms = ms_since(began_at)
        pg.abort()
        torch.cuda.synchronize()
        return {"error": error_text, "error_ms": error_ms, "idle_ms": ms_since(began_at)}

    def leave_a_sum(self, numel: int = 1 << 20) -> Answer:
        """Leave during a sum that nobody else takes part in, and wait for the whole device."""
        self.group.allreduce([torch.ones(numel, device=DEVICE)])
        began_at = time.monotonic()
        self.group.abort()
        torch.cuda.synchronize()
        return {"idle_ms": ms_since(began_at)}

    def shutdown(self) -> Answer:
        self.group.shutdown()
        self.group.shutdown()
        return {}

    @property
    def group(self) -> ProcessGroup:
        assert self.pg is not None
        return self.pg

    def _reduction(self, tensor: torch.Tensor, op: Any) -> Reduction:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.errors = []
        return Reduction(
            tensor,
            self.group.allreduce([tensor], options),
            20.0,
            on_error=lambda error: self.errors.append(str(error)),
            pg=self.group,
            on_wait=lambda _: None,
            watchdog=Watchdog(None),
            times=WaitTimes(),
        )


def main() -> None:
    member = Member()
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, arguments = line.strip().partition(" ")
        try:
            answer = getattr(member, command)(**json.loads(arguments or "{}"))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
