"""An elastic launcher with soft restarts; here is what a worker imports from it.

Importing this starts nothing, and imports neither torch nor gRPC: it is done in every worker.
"""

from torchft_svc.elastic.runtime import (
    WorkerEvent,
    WorkerInfo,
    WorkerState,
    WorldChangeEvent,
    ack_worker_event,
    get_worker_event,
    get_worker_info,
    init_world,
    leave_world,
    on_worker_event,
    report_progress,
    wait_for_worker_event,
    world_changed,
)

__all__ = [
    "WorkerEvent",
    "WorkerInfo",
    "WorkerState",
    "WorldChangeEvent",
    "ack_worker_event",
    "get_worker_event",
    "get_worker_info",
    "init_world",
    "leave_world",
    "on_worker_event",
    "report_progress",
    "wait_for_worker_event",
    "world_changed",
]
