"""A lighthouse inside an agent, for a run of one node."""

from __future__ import annotations

from torchft_svc import coordination
from torchft_svc.host.address import LOOPBACK, HostPort
from torchft_svc.rpc.security import PLAIN


def own_lighthouse() -> coordination.LighthouseServer:
    """Start a lighthouse for this machine alone; it begins a run at once, being its first."""
    bind = str(HostPort(LOOPBACK, 0))
    return coordination.LighthouseServer(bind, min_replicas=1, settle_in_ms=0, security=PLAIN)
