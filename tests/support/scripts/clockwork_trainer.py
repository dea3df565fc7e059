"""A trainer that needs no others: all commit by the clock, so groups agree without talking.

It stands in where the demo's own machinery is under test, and misbehaves on request: its last
argument is ``well``, or the name of a fault.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tools.demo.events import Committed, EventLog, Finished, Joined, PhaseBegan

STEP_S = 0.025
_stop = False


def _on_sigterm(*_: object) -> None:
    global _stop
    _stop = True


def main(group: int, incarnation: int, events: Path, fault: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if fault == "deaf" else _on_sigterm)
    if fault == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = EventLog(events, group, incarnation)
    log.write(Joined)
    if fault == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    first = step = int(time.monotonic() / STEP_S)
    # Who stood still does the missed steps at once, also after it was asked to leave: all groups
    # that leave together have steps in common.
    while not _stop or (step + 1) * STEP_S < time.monotonic():
        for fifth, phase in enumerate(("forward", "backward", "commit"), 2):
            log.write(PhaseBegan, step=step, phase=phase)
            _sleep_until((step + fifth / 5) * STEP_S)
        if fault == "dies" and step >= first + 10:
            sys.exit(3)
        _sleep_until((step + 1) * STEP_S)
        step += 1
        differs = fault == "differs" and group == 1 and step >= first + 10
        log.write(
            Committed,
            step=step,
            loss=4.6 / (1 + 0.05 * (step - first)),
            digest=f"{step}{'!' * differs}",
            num_participants=1,
            participating=True,
        )
        log.write(PhaseBegan, step=step, phase="record")
        _sleep_until((step + 1 / 5) * STEP_S)
    log.write(Finished, step=step)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.monotonic()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
