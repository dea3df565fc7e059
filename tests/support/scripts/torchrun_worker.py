"""A worker that records the ranks that it was given, without torch; a file ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

RECORDED = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
)


def main(folder: Path) -> int:
    agent, pid = os.getppid(), os.getpid()
    record = {name: os.environ.get(name) for name in RECORDED}
    text = json.dumps({**record, "pid": pid, "agent": agent})
    unfinished = folder / f"{pid}.part"
    unfinished.write_text(text)
    unfinished.rename(folder / f"{pid}.json")
    while os.getppid() == agent:  # torchrun leaves orphans
        for order, status in (("end", 0), (f"fail-{pid}", 3)):
            if (folder / order).exists():
                return status
        time.sleep(0.02)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
