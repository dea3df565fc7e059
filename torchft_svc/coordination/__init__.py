"""Clients of the two services, and both services inside this process: for custom algorithms.

Names and arguments are those of the public release's ``torchft.coordination``, so that code written
for it runs by changing the import. Everything that waits takes a timeout and raises `TimeoutError`
(our `DeadlineExceeded`) when it is over; every other failure is an error of `torchft_svc.errors`.
"""

from torchft_svc.coordination.attachment import Listeners
from torchft_svc.coordination.lighthouse_client import LighthouseClient
from torchft_svc.coordination.manager_client import ManagerClient, ManagerLocator
from torchft_svc.coordination.servers import LighthouseServer, ManagerServer
from torchft_svc.coordination.types import Quorum, QuorumMember, QuorumResult, Timestamp
from torchft_svc.core.overview import GoneGroup, GroupStatus, JobStatus
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
