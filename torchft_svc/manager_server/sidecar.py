"""The program of a trainer's manager: `torchft-manager`, but its flags are not parsed from words.

A trainer waits until it serves, and click, which parses flags, would take a tenth of that time.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
from typing import Any

from torchft_svc.host.process_end import ProcessEnd

# How often a process that waits for its settings checks at least that its trainer lives. The end of
# the pipe does not always show that: forked children of the trainer hold it open.
_LOOK_S = 1.0


def main(fields: str, liveness_descriptor: str) -> None:
    """Run a manager with these ``fields`` of a `ManagerConfig` and ``log_level``, as JSON.

    The security is not among them, because it is not for a command line: it is that of the
    environment. If there is nothing but ``owner_pid``, the rest is the first line of standard input
    (`start_manager_early`).
    """
    settings = json.loads(fields)
    is_early = settings.keys() == {"owner_pid"}
    if is_early:
        for number in (signal.SIGTERM, signal.SIGINT):  # as later, see `run` and rule M12
            signal.signal(number, signal.SIG_IGN)
    # What is imported stays. The collector, which `run` switches on again, would look through it 77
    # times, and take a tenth of the start.
    gc.disable()
    from torchft_svc.core.quorum.types import Resumed
    from torchft_svc.env import Environment
    from torchft_svc.manager_server.config import ManagerConfig
    from torchft_svc.manager_server.process import run_as_process
    from torchft_svc.rpc.security import resolve_security

    if is_early:
        settings |= _settings_of(settings["owner_pid"])
    if settings["resumed"] is not None:
        settings["resumed"] = Resumed(**settings["resumed"])
    log_level = settings.pop("log_level")
    config = ManagerConfig(**settings, security=resolve_security(Environment()))
    run_as_process(config, log_level, int(liveness_descriptor))


def _settings_of(owner_pid: int) -> dict[str, Any]:
    """Read what process ``owner_pid`` writes to standard input; exit if it ends without that."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(sys.stdin, selectors.EVENT_READ)
        owner = stack.enter_context(contextlib.closing(ProcessEnd(owner_pid)))
        if owner.descriptor is not None:
            selector.register(owner.descriptor, selectors.EVENT_READ)
        while all(key.fileobj is not sys.stdin for key, _ in selector.select(_LOOK_S)):
            if os.getppid() != owner_pid:
                sys.exit()
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        sys.exit()
    settings: dict[str, Any] = json.loads(line)
    return settings


if __name__ == "__main__":
    main(*sys.argv[1:])
