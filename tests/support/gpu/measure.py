"""Measures what is promised for GPUs, on one GPU that all ranks share.

    PYTHONPATH=tests:. python -m support.gpu.measure [FILE [PART...]]

Sums go over loopback sockets, as between hosts, because every rank names a host of its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from support.gpu.healing import NUM_TENSORS, TENSOR_BYTES, make_state
from support.gpu.ranks import HERE, START_S, everyone, group_of, variables
from support.gpu.stepping import PHASES, SHAPES
from tools.benchmarks.processes import Child, lighthouse_address, start_lighthouse
from tools.benchmarks.step_time import free_port
from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.encoding.device_copies import DeviceCopies, pinned
from torchft_svc.client.checkpointing.encoding.memory import allocate
from torchft_svc.client.reduce import quantized
from torchft_svc.client.reduce.quantized import Quantization

REPEATS = 10
STEPS = {"small": 100, "17 MB": 40, "400 MB": 5}
BLOCKS = 4
KILLS = 5


def script(name: str, rank: str, *flags: str, **more: str) -> Child:
    command = [sys.executable, "-W", "ignore", str(HERE / name), *flags]
    return Child(command, variables(rank) | more)


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.1f} (from {low:.1f} to {high:.1f})"


def aborts() -> dict[str, str]:
    """Milliseconds, over `REPEATS` groups of two."""
    found: dict[str, list[float]] = {}
    with group_of(2) as group:
        for _ in range(REPEATS):
            for answer in group.configure():
                found.setdefault("configure", []).append(answer["ms"])
                found.setdefault("configure: interpreter held up", []).append(answer["stall_ms"])
            everyone(group.ranks, "allreduce", numel=1000, value=1.0)
            answer = group.ranks[0].call("hang", abort_after_s=0.2)
            for name in ("abort_ms", "released_ms", "idle_ms", "stall_ms"):
                found.setdefault(f"hung allreduce: {name}", []).append(answer[name])
    return {name: spread(values) for name, values in found.items()}


def isolation() -> dict[str, Any]:
    """Milliseconds of a sum in the trainer and in a process of its own; what the latter takes."""
    found: dict[str, Any] = {}
    with group_of(2) as plain, group_of(2, isolated=True) as isolated:
        plain.configure()
        before = isolated.ranks[0].call("memory")["free"]
        isolated.configure()
        for name, num_bytes, repeat in (("1 MB", 10**6, 50), ("100 MB", 10**8, 10)):
            times: dict[str, list[float]] = {"in the trainer": [], "isolated": []}
            for _ in range(BLOCKS):
                for kind, group in zip(times, (plain, isolated), strict=True):
                    answers = everyone(group.ranks, "timed", num_bytes=num_bytes, repeat=repeat)
                    times[kind] += answers[0]["ms"]
            found |= {f"{name} {kind}": spread(values) for kind, values in times.items()}
        taken = before - isolated.ranks[0].call("memory")["free"]
        found["MB that both processes and their segments take"] = round(taken / 1e6)
    return found


def sums_in_8_bits() -> dict[str, Any]:
    """Milliseconds of a sum of 100 MB: of float32, and in 8-bit numbers."""
    found: dict[str, Any] = {}
    with group_of(2) as group:
        group.configure()
        for _ in range(2):  # the first pass compiles kernels
            plain = everyone(group.ranks, "timed", num_bytes=10**8, repeat=8)[0]
            found["float32"] = spread(plain["ms"])
            for name in ("int8", "float8"):
                answer = everyone(
                    group.ranks, "timed_quantized", num_bytes=10**8, repeat=8, number_format=name
                )[0]
                found |= {
                    name: spread(answer["ms"]),
                    f"{name}: one and one": answer["end"],
                }
    return found


def trainer(lighthouse: str, name: int, *flags: str, **more: str) -> Child:
    options = [f"--lighthouse={lighthouse}", f"--name={name}", "--steps=1000000", *flags]
    return script("trainer.py", str(name), *options, **more)


def commit_of(child: Child) -> tuple[int, int]:
    """The step and the number of participants of the next commit."""
    while True:
        word, *rest = child.read_line(60.0).split()
        if word == "commit":
            return int(rest[0]), int(rest[1])


def recovery() -> dict[str, Any]:
    """Milliseconds from the kill of a group until the first of the others commits without it."""
    found: dict[str, list[float]] = {}
    for backend in ("nccl", "isolated"):
        with contextlib.ExitStack() as stack:
            lighthouse = stack.enter_context(start_lighthouse(min_replicas=1))
            where = lighthouse_address(lighthouse)
            children = [
                stack.enter_context(
                    trainer(where, name, f"--backend={backend}", *["--quiet"] * (name > 0))
                )
                for name in range(KILLS + 1)
            ]
            for child in children:
                assert child.read_line(START_S) == "ready"
            first = children[0]
            for left in range(KILLS + 1, 1, -1):
                while commit_of(first)[1] < left:
                    pass
                for _ in range(10):
                    commit_of(first)
                children.pop().kill()
                killed_at = time.perf_counter()
                while commit_of(first)[1] == left:
                    pass
                found.setdefault(backend, []).append(1000 * (time.perf_counter() - killed_at))
    return {backend: [round(value, 1) for value in values] for backend, values in found.items()}


def joining() -> dict[str, Any]:
    """Milliseconds: the longest steps of a group while another one joins, by the size of its state
    and by whether it catches up before, and the usual one."""
    found: dict[str, Any] = {}
    size = NUM_TENSORS * TENSOR_BYTES
    for num_bytes, catch_up in ((0, "0"), (size, "0"), (size, "1")):
        with contextlib.ExitStack() as stack:
            lighthouse = stack.enter_context(start_lighthouse(min_replicas=1))
            start = functools.partial(
                trainer, lighthouse_address(lighthouse), TORCHFT_CATCH_UP=catch_up
            )
            first = stack.enter_context(start(0, f"--ballast={num_bytes}"))
            assert first.read_line(START_S) == "ready"
            stack.enter_context(start(1, f"--ballast={num_bytes}", "--quiet"))
            at = [time.perf_counter()]
            together_at = 0
            while not together_at or len(at) < together_at + 100:
                num = commit_of(first)[1]
                at.append(time.perf_counter())
                together_at = together_at or (len(at) if num == 2 else 0)
            steps = [1000 * (end - start) for start, end in pairwise(at)]
            near = steps[max(0, together_at - 100) :]
            name = f"{num_bytes / 1e9:.2f} GB" + (", with catch-up" if catch_up == "1" else "")
            found[name] = {
                "longest": [round(value, 1) for value in sorted(near)[-4:]],
                "usual": round(statistics.median(steps), 1),
            }
    return found


def copies() -> dict[str, str]:
    """GB/s from the device into fresh memory of the host, by 64 MiB, in several ways."""
    source = make_state(1.0)
    size_gb = NUM_TENSORS * TENSOR_BYTES / 1e9
    staging = [torch.empty(TENSOR_BYTES // 8, pin_memory=True) for _ in range(2)]

    def staged() -> list[Any]:
        kept = []
        for tensor in source.values():
            memory = allocate(TENSOR_BYTES)
            target = torch.frombuffer(memory, dtype=torch.float32)
            events = [torch.cuda.Event(), torch.cuda.Event()]
            halves = list(zip(staging, tensor.chunk(2), target.chunk(2), events, strict=True))
            for buffer, half, _, event in halves:
                buffer.copy_(half, non_blocking=True)
                event.record()
            for buffer, _, place, event in halves:
                event.synchronize()
                place.copy_(buffer)
            kept.append(memory)
        return kept

    def straight_into_huge_pages() -> list[Any]:
        kept = [allocate(TENSOR_BYTES) for _ in source]
        for tensor, memory in zip(source.values(), kept, strict=True):
            torch.frombuffer(memory, dtype=torch.float32).copy_(tensor)
        return kept

    def as_a_heal_does() -> list[Any]:
        memory = allocate(NUM_TENSORS * TENSOR_BYTES)
        parts = [
            (number * TENSOR_BYTES, tensor.view(torch.uint8))
            for number, tensor in enumerate(source.values())
        ]
        DeviceCopies(parts, memory).run()
        return [memory]

    ways: dict[str, Callable[[], list[Any]]] = {
        "as a heal does": as_a_heal_does,
        "tensor.cpu()": lambda: [tensor.cpu() for tensor in source.values()],
        "copy_ into huge pages": straight_into_huge_pages,
        "through pinned memory into huge pages": staged,
        "into freshly pinned memory": lambda: [
            torch.empty(tensor.shape, pin_memory=True).copy_(tensor) for tensor in source.values()
        ],
    }
    found: dict[str, str] = {}
    for name, way in ways.items():
        rates = []
        for _ in range(3):
            began_at = time.perf_counter()
            kept = way()
            rates.append(size_gb / (time.perf_counter() - began_at))
            del kept
        found[name] = spread(rates)
    return found


def step_times() -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        pairs: dict[str, list[Child]] = {}
        for kind in ("plain", "synchronized", "ours"):
            where = f"--store-port={free_port()}"
            if kind == "ours":
                lighthouse = stack.enter_context(start_lighthouse(min_replicas=2))
                where = f"--lighthouse={lighthouse_address(lighthouse)}"
            flags = (f"--kind={kind}", where)
            pairs[kind] = [script("stepping.py", f"{r}", *flags, f"--rank={r}") for r in (0, 1)]
        for children in pairs.values():
            for child in children:
                stack.enter_context(child)
        for children in pairs.values():
            for child in children:
                assert child.read_line(START_S) == "ready"
        rows = []
        for name in SHAPES:
            rows += one_model(name, pairs)
            print(*map(json.dumps, rows[-len(pairs) :]), sep="\n", flush=True)
        return rows


def one_model(name: str, pairs: dict[str, list[Child]]) -> list[dict[str, Any]]:
    blocks: dict[str, list[dict[str, float]]] = {kind: [] for kind in pairs}
    for block in range(BLOCKS + 1):
        for kind in list(pairs)[:: 1 if block % 2 else -1]:
            for child in pairs[kind]:
                child.send(f"{name} {STEPS[name]}")
            answers = [json.loads(child.read_line(120.0)) for child in pairs[kind]]
            if block:  # the first one warms up
                blocks[kind].append({k: statistics.mean(a[k] for a in answers) for k in answers[0]})
    rows = []
    for kind, measured in blocks.items():
        ratios = [m["step"] / p["step"] for m, p in zip(measured, blocks["plain"], strict=True)]
        row: dict[str, Any] = {"gradients": name, "trainer": kind}
        row |= {k: round(statistics.median(m[k] for m in measured), 3) for k in ("step", *PHASES)}
        row |= {
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(r, 3) for r in ratios],
        }
        rows.append(row)
    return rows


def healing() -> dict[str, str]:
    """GB/s of each part, and of the whole."""
    size_gb = NUM_TENSORS * TENSOR_BYTES / 1e9
    found: dict[str, list[float]] = {}
    target = make_state(0.0)
    with script("healing.py", "source") as source:
        assert source.read_line(START_S) == "ready"
        for step in range(1, 6):
            source.send(str(step))
            offer_s, metadata = source.read_line(60.0).split()
            with HTTPTransport(timedelta(seconds=60), hostname="127.0.0.1") as transport:
                transport.expect_checkpoint(target)  # as a worker that waits for its first quorum
                transport.wait_until_prepared(timedelta(seconds=60))
                fetching_at = time.perf_counter()
                state = transport.recv_checkpoint(0, metadata, step, timedelta(seconds=60))
                loading_at = time.perf_counter()
                with pinned(state):
                    for key, tensor in target.items():
                        tensor.copy_(state[key])
            ended_at = time.perf_counter()
            assert all(bool((tensor == float(key)).all()) for key, tensor in target.items())
            for name, seconds in (
                ("offer (device to host)", float(offer_s)),
                ("fetch", loading_at - fetching_at),
                ("load (host to device)", ended_at - loading_at),
                ("whole", float(offer_s) + ended_at - fetching_at),
            ):
                found.setdefault(name, []).append(size_gb / seconds)
    return {name: spread(values) for name, values in found.items()}


def quantized_sums() -> dict[str, str]:
    """Milliseconds of what a member of two computes for a sum of 64 MB in 8-bit numbers."""
    values = torch.randn(16_000_000, device="cuda")
    chunk = quantized.chunk_length(values.numel(), 2)
    found: dict[str, str] = {}
    fused = quantized._fused
    for way in ("Triton", "torch"):
        if way == "torch":
            quantized._fused = lambda device, kind: None  # type: ignore[assignment]
        for kind in Quantization:
            if way == "Triton" and quantized._fused(values.device, kind) is None:
                found[f"{kind.value} {way}"] = "not installed, or it cannot compile"
                continue
            rows = quantized.encode_chunks(values, 2, kind)
            parts: dict[str, Callable[[], Any]] = {
                "encode": functools.partial(quantized.encode_chunks, values, 2, kind),
                "sum": functools.partial(quantized.sum_chunks, rows, chunk, kind),
                "decode": functools.partial(quantized.decode_chunks, rows, values, kind),
            }
            for name, part in parts.items():
                found[f"{kind.value} {way}: {name}"] = spread(on_device(part))
    quantized._fused = fused
    return found


def on_device(part: Callable[[], Any]) -> list[float]:
    """Milliseconds of ``part`` on the device, after one call that may compile."""
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        part()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[1:]


def main() -> None:
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("aborts", aborts),
        ("isolation", isolation),
        ("sums in 8 bits", sums_in_8_bits),
        ("recovery", recovery),
        ("joining", joining),
        ("healing", healing),
        ("copies", copies),
        ("quantized sums", quantized_sums),
        ("steps", step_times),
    ]
    chosen = sys.argv[2:]
    for name, measure in parts:
        if chosen and name not in chosen:
            continue
        began_at = time.monotonic()
        try:
            result[name] = measure()
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began_at
        print(f"{name} ({seconds:.0f} s)", json.dumps(result[name], indent=1), flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
