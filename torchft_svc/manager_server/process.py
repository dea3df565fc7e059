"""Runs a manager as a process of its own, until it has to stop, or its owner ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from torchft_svc.host.log_format import Speaker
from torchft_svc.manager_server.app import RunningManager, run_manager
from torchft_svc.manager_server.config import ManagerConfig
from torchft_svc.manager_server.liveness_pipe import write_signs
from torchft_svc.manager_server.parent_watch import STOP_SIGNAL, end_parent, watch_parent
from torchft_svc.rpc.running import run
from torchft_svc.telemetry.exporting import exporting


def run_as_process(
    config: ManagerConfig, log_level: str, liveness_descriptor: int | None = None
) -> None:
    """Serve, then exit; ``liveness_descriptor``: see `write_signs` (None: nobody reads them)."""
    running: list[RunningManager] = []

    async def serve(stop: asyncio.Event) -> int:
        with exporting("manager", fields):
            return await _serve(config, stop, liveness_descriptor, running.append)

    def describe() -> Mapping[str, object]:
        return running[0].describe_position() if running else {}

    fields = {"job": config.job_id, "group": config.replica_name}
    run(
        serve,
        log_level,
        stop_signal=None if config.owner_pid is None else STOP_SIGNAL,
        speaker=Speaker(f"{config.replica_name} manager", fields, describe),
    )


async def _serve(
    config: ManagerConfig,
    stop: asyncio.Event,
    liveness_descriptor: int | None,
    on_start: Callable[[RunningManager], None],
) -> int:
    with contextlib.ExitStack() as stack:
        if config.owner_pid is not None:
            stack.enter_context(watch_parent(config.owner_pid, stop.set))
        if liveness_descriptor is not None:
            stack.callback(asyncio.create_task(write_signs(liveness_descriptor)).cancel)
        async with run_manager(config) as manager:
            on_start(manager)
            print(f"manager listening on {manager.address}", flush=True)
            ends = [asyncio.create_task(event.wait()) for event in (stop, manager.killed)]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
        if not manager.killed.is_set():
            return 0
        if config.owner_pid is not None:
            await end_parent(config.owner_pid, stop)
        return 1
