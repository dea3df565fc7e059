"""The lighthouse as one thing that starts and stops."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from torchft_svc.core.types import QuorumConfig
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.rpc.address import HostPort
from torchft_svc.rpc.security import PLAIN, Security
from torchft_svc.rpc.serving import serve


@contextlib.asynccontextmanager
async def run_lighthouse(
    config: QuorumConfig, bind: HostPort, security: Security = PLAIN
) -> AsyncIterator[HostPort]:
    """Serve until the block is left; gives the address that was bound.

    Raises:
        AddressError: nothing can be bound there.
    """
    driver = LighthouseDriver(config)
    try:
        async with serve(lambda _: lighthouse_service(driver), bind, security) as bound:
            yield bound
    finally:
        driver.close()
