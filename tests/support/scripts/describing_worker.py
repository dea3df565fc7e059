"""A worker that writes down what it finds in each of its attempts, and ends as END says.

``describing_worker.py FOLDER END``: if it was started cold, it waits to be killed; otherwise it
ends by END: a status, ``raise``, ``interrupt`` or ``wait``.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path

from torchft_svc.elastic import get_worker_info


class Picklable:
    """A class that belongs to the program."""


def described() -> dict[str, object]:
    main = sys.modules["__main__"]
    return {
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "command": sys.orig_argv[1:],
        "folder": os.getcwd(),
        "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
        "main": [main.__name__, main.__file__, main.__dict__ is globals()],
        "spec": getattr(main.__spec__, "name", None),
        "package": main.__package__,
        "path": sys.path,
        "pickles as": Picklable.__module__,
        "handlers": {name: str(signal.getsignal(name)) for name in (2, 15, 17)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "stdin": os.read(0, 10).decode(),
        "threads": [thread.name for thread in threading.enumerate()],
        "descriptors": sorted(map(descriptor, range(64))),
    }


def descriptor(number: int) -> str:
    """What is open there, but for its number."""
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""
    return re.sub(r"attempt_\d|\[\d+\]", "", target)


def drawn() -> list[float]:
    """Numbers drawn by generators of modules that were imported already: that takes no time."""
    found = [random.random()]
    if "numpy" in sys.modules:
        found.append(float(sys.modules["numpy"].random.rand()))
    if "torch" in sys.modules:
        found.append(float(sys.modules["torch"].rand(1)))
    return found


def fail() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    atexit.register(lambda: print("ended by", repr(sys.last_value)))
    record(raise_error)()


def raise_error() -> None:
    raise ValueError("a bad batch")


def main() -> None:
    folder, end = Path(sys.argv[1]), sys.argv[2]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    same = described()
    own = {"pid": os.getpid(), "parent": os.getppid(), "drawn": drawn()}
    text = json.dumps({"same": same, "own": own})
    part = folder / f"{attempt}.part"
    part.write_text(text)
    part.rename(folder / f"{attempt}.json")
    print(f"out {attempt}")
    print(f"err {attempt}", file=sys.stderr)
    get_worker_info()
    is_warm = "warm_start" in Path(f"/proc/{os.getppid()}/cmdline").read_text()
    if not is_warm or end == "wait":
        time.sleep(600)
    if end == "raise":
        fail()
    if end == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    sys.exit(int(end))


if __name__ == "__main__":
    main()
