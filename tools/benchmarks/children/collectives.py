"""One member of two groups, one of them isolated; times sums on command (JSON lines on stdin).

Argument: where the members meet, ``host:port``, and this member's rank of two.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from torchft_svc.client import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo

TIMEOUT = timedelta(seconds=120)


def measure(group: ProcessGroup, num_bytes: int, repeat: int, *, shared: bool) -> list[float]:
    """Milliseconds for each sum of ``num_bytes`` of float32, after two that are not counted."""
    tensor = torch.ones(num_bytes // 4)
    if shared:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    times = []
    for _ in range(repeat + 2):
        began_at = time.perf_counter()
        group.allreduce([tensor]).wait(TIMEOUT)
        times.append(1000 * (time.perf_counter() - began_at))
    return times[2:]


def main() -> None:
    store, rank = sys.argv[1], int(sys.argv[2])
    isolated = ProcessGroupBabyGloo(TIMEOUT)
    groups: dict[str, ProcessGroup] = {
        "in process": ProcessGroupGloo(TIMEOUT),
        "isolated": isolated,
    }
    for number, group in enumerate(groups.values(), start=1):
        group.configure(f"{store}/torchft/{number}/0", str(rank), rank, 2, quorum_id=number)
    print(json.dumps({"pid": isolated.pid}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        group = groups[asked["group"]]
        times = measure(group, asked["bytes"], asked["repeat"], shared=asked["shared"])
        print(json.dumps(times), flush=True)
    for group in groups.values():
        group.shutdown()


main()
