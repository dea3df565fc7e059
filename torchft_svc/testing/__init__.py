"""Tools for users' tests: faults on demand, and a contract for checkpoint transports."""

from torchft_svc.testing.faults import FakeProcessGroupWrapper
from torchft_svc.testing.proxy import Proxy
from torchft_svc.testing.transport_contract import InMemoryTransport, TransportContract

__all__ = ["FakeProcessGroupWrapper", "InMemoryTransport", "Proxy", "TransportContract"]
