"""A launched worker that works in whatever world it is sent, until a file says that it is to end.

``patient_worker.py FOLDER [TRAIT ...]``: it notes each event as a line of JSON in
``FOLDER/PID.events``. It ends well when ``FOLDER/finish`` or ``FOLDER/finish-PID`` is there, and
with status 5 for ``FOLDER/fail-PID``; it leaves its world for ``FOLDER/leave-PID``. Traits are
``stubborn``: it ignores that it is to end; ``silent``: it calls nothing of the runtime;
``first-silent``: the first worker of a node does not; ``cut-off``: in its first life, it removes
its channel before it says that it is in a world; others do so for ``FOLDER/cut-PID``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from torchft_svc.elastic import (
    WorkerEvent,
    WorkerState,
    ack_worker_event,
    get_worker_event,
    get_worker_info,
    leave_world,
    wait_for_worker_event,
)
from torchft_svc.errors import WorkerEnding

_LOOK_S = 0.05


def main() -> None:
    folder, traits = Path(sys.argv[1]), sys.argv[2:]
    if "stubborn" in traits:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, {"rank": int(os.environ["RANK"]), "attempt": attempt()})
    is_first = os.environ["LOCAL_RANK"] == "0"
    if "silent" in traits or ("first-silent" in traits and is_first):
        while not has_ended(folder):
            time.sleep(_LOOK_S)
    event: WorkerEvent | None = get_worker_event()
    while not has_ended(folder):
        if event is not None:
            info = event.worker_info
            place = {"rank": info.rank, "world_size": info.world_size, "round": info.round}
            note(folder, {"state": event.worker_state.value, "attempt": attempt(), **place})
            if event.worker_state is WorkerState.HEALTHY:
                if "cut-off" in traits and attempt() == 0:
                    be_cut_off(folder)
                ack_worker_event()
        if (folder / f"cut-{os.getpid()}").exists():
            be_cut_off(folder)
            return
        if (folder / f"leave-{os.getpid()}").exists():
            (folder / f"leave-{os.getpid()}").unlink()
            leave_world()
            get_worker_info()  # which waits for another one
            event = get_worker_event()
        else:
            event = wait_for_event(is_stubborn="stubborn" in traits)


def wait_for_event(*, is_stubborn: bool) -> WorkerEvent | None:
    try:
        return wait_for_worker_event(_LOOK_S)
    except WorkerEnding:
        if not is_stubborn:
            raise
        time.sleep(_LOOK_S)
        return None


def be_cut_off(folder: Path) -> None:
    shutil.rmtree(os.environ["TORCHFT_WORKER_CHANNEL"])
    while not has_ended(folder):
        time.sleep(_LOOK_S)


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def note(folder: Path, what: dict[str, object]) -> None:
    with (folder / f"{os.getpid()}.events").open("a") as events:
        events.write(json.dumps({"node": os.environ.get("NODE", ""), **what}) + "\n")


def has_ended(folder: Path) -> bool:
    if (folder / f"fail-{os.getpid()}").exists():
        sys.exit(5)
    return (folder / "finish").exists() or (folder / f"finish-{os.getpid()}").exists()


if __name__ == "__main__":
    main()
