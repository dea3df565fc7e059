"""The program of a trainer's manager: `torchft-manager`, but its flags are not parsed from words.

A trainer waits until it serves, and click, which parses flags, would take a tenth of that time.
"""

from __future__ import annotations

import gc
import json
import sys


def main(settings: str, log_level: str, liveness_descriptor: str) -> None:
    """``settings``: the fields of a `ManagerConfig` as JSON, but its security, which is not for a
    command line: it is that of the environment."""
    # What is imported stays. The collector, which `run` switches on again, would look through it 77
    # times, and take a tenth of the start.
    gc.disable()
    from torchft_svc.core.types import Resumed
    from torchft_svc.env import Environment
    from torchft_svc.manager_server.config import ManagerConfig
    from torchft_svc.manager_server.process import run_as_process
    from torchft_svc.rpc.security import resolve_security

    fields = json.loads(settings)
    if fields["resumed"] is not None:
        fields["resumed"] = Resumed(**fields["resumed"])
    config = ManagerConfig(**fields, security=resolve_security(Environment()))
    run_as_process(config, log_level, int(liveness_descriptor))


if __name__ == "__main__":
    main(*sys.argv[1:])
