"""A lighthouse inside an agent, for a run of one node."""

from __future__ import annotations

from torchft_svc.core.types import QuorumConfig
from torchft_svc.lighthouse_server.app import run_lighthouse
from torchft_svc.rpc.address import LOOPBACK, HostPort
from torchft_svc.rpc.loop import Background
from torchft_svc.rpc.security import PLAIN


class OwnLighthouse:
    """Only this machine reaches it; a context manager that stops it.

    It begins a run at once: no agent has been at a lighthouse before it.
    """

    def __init__(self) -> None:
        config, bind = QuorumConfig(), HostPort(LOOPBACK, 0)
        self._running = Background(run_lighthouse(config, bind, PLAIN, settle_in_s=0.0))

    def address(self) -> str:
        return str(self._running.value)

    def shutdown(self) -> None:
        """May be called twice."""
        self._running.close()

    def __enter__(self) -> OwnLighthouse:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
