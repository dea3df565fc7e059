"""Clients of the two services, and both services inside this process: for custom algorithms.

Names and arguments are those of the public release's ``torchft.coordination``, so that code written
for it runs by changing the import. Everything that waits takes a timeout and raises `TimeoutError`
(our `DeadlineExceeded`) when it is over; every other failure is an error of `torchft_svc.errors`.
"""

from typing import TYPE_CHECKING

from torchft_svc.lazy_names import lazy_names

if TYPE_CHECKING:
    from torchft_svc.coordination.attachment import Listeners
    from torchft_svc.coordination.lighthouse_client import LighthouseClient
    from torchft_svc.coordination.lighthouse_server import LighthouseServer
    from torchft_svc.coordination.manager_client import ManagerClient
    from torchft_svc.coordination.manager_server import ManagerServer
    from torchft_svc.coordination.types import (
        ManagerLocator,
        Quorum,
        QuorumMember,
        Timestamp,
    )
    from torchft_svc.core.quorum.assignment import QuorumResult
    from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
    from torchft_svc.rpc.security import Security

__all__ = [
    "GoneGroup",
    "GroupStatus",
    "JobStatus",
    "LighthouseClient",
    "LighthouseServer",
    "Listeners",
    "ManagerClient",
    "ManagerLocator",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
    "QuorumResult",
    "Security",
    "Timestamp",
]

# A trainer needs one of the clients, and seldom a service.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GoneGroup": "torchft_svc.core.quorum.lighthouse.overview",
        "GroupStatus": "torchft_svc.core.quorum.lighthouse.overview",
        "JobStatus": "torchft_svc.core.quorum.lighthouse.overview",
        "LighthouseClient": ".lighthouse_client",
        "LighthouseServer": ".lighthouse_server",
        "Listeners": ".attachment",
        "ManagerClient": ".manager_client",
        "ManagerLocator": ".types",
        "ManagerServer": ".manager_server",
        "Quorum": ".types",
        "QuorumMember": ".types",
        "QuorumResult": "torchft_svc.core.quorum.assignment",
        "Security": "torchft_svc.rpc.security",
        "Timestamp": ".types",
    },
)
