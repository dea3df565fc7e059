"""The public release's services; run as a script, by a python that has it, by test_interop.py.

`lighthouse`: starts one, prints its port, serves until stdin ends. `member ADDRESS NAME HANDLE`:
joins the quorum of the lighthouse there through the release's own manager, as group NAME, with the
handle that a nightly's process groups connect by, and prints the answer.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

from torchft.coordination import LighthouseServer, ManagerClient, ManagerServer

TIMEOUT = timedelta(seconds=20)


def lighthouse() -> None:
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=200, heartbeat_timeout_ms=1000
    )
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.read()
    server.shutdown()


def member(address: str, name: str = "public", handle: str = "") -> None:
    server = ManagerServer(
        replica_id=name,
        lighthouse_addr=address,
        hostname="127.0.0.1",
        bind="[::]:0",
        store_addr="127.0.0.1:1",
        world_size=1,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=TIMEOUT,
        quorum_retries=0,
    )
    client = ManagerClient("http://127.0.0.1:" + server.address().rpartition(":")[2], TIMEOUT)
    result = client._quorum(
        group_rank=0,
        step=7,
        checkpoint_metadata="",
        shrink_only=False,
        init_sync=False,
        commit_failures=0,
        timeout=TIMEOUT,
        reconfigure_handle=handle,
    )
    answer = {
        "quorum_id": result.quorum_id,
        "replica_ids": result.replica_ids,
        "replica_rank": result.replica_rank,
        "replica_world_size": result.replica_world_size,
        "store_address": result.store_address,
        "max_step": result.max_step,
        "heal": result.heal,
        "reconfigure_handles": getattr(result, "reconfigure_handles", None),  # of nightlies
    }
    print(json.dumps(answer), flush=True)
    sys.stdin.read()
    server.shutdown()


lighthouse() if sys.argv[1] == "lighthouse" else member(*sys.argv[2:])
