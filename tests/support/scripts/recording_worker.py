"""A launched worker that writes down how it was started, and ends as its arguments say.

``recording_worker.py FOLDER [STATUS [NUM_FAILURES]]``: it exits with STATUS in its first
NUM_FAILURES attempts (default: in all).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    folder, *more = sys.argv[1:]
    status, num_failures = [*more, *("0", "1000")[len(more) :]][:2]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = os.environ["RANK"]
    record = {
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "folder": os.getcwd(),
        "leads_session": os.getsid(0) == os.getpid(),
    }
    name = Path(folder) / f"{attempt}-{rank}.json"
    name.with_suffix(".part").write_text(json.dumps(record))
    name.with_suffix(".part").rename(name)
    sys.stdout.write(f"rank {rank} was started\n")  # in one piece, others write there, too
    sys.stderr.write(f"rank {rank} complains\n")
    if attempt < int(num_failures):
        wait_for_all(Path(folder), attempt)  # or the agent ends others before they could record it
        sys.exit(int(status))


def wait_for_all(folder: Path, attempt: int) -> None:
    deadline = time.monotonic() + 30.0
    names = [f"{attempt}-{rank}.json" for rank in range(int(os.environ["WORLD_SIZE"]))]
    while not all((folder / name).exists() for name in names) and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
