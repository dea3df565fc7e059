"""Serves a page of metrics on a thread, for programs that have no HTTP server of their own.

Needs prometheus-client: import it only where metrics are switched on.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from prometheus_client import CollectorRegistry, start_http_server

from torchft_svc.errors import AddressError
from torchft_svc.host.address import HostPort

_WAKE_S = 0.2


class MetricsServer:
    """Serves ``registry`` at ``bind`` until `close`; ``address`` is what was bound.

    Raises:
        AddressError: nothing can be bound there.
    """

    def __init__(self, bind: HostPort, registry: CollectorRegistry) -> None:
        host = bind.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")
        try:
            self._server, self._thread = start_http_server(bind.port, host, registry)
        except OSError as error:
            raise AddressError(str(bind), f"cannot be bound for metrics: {error}") from None
        self._host = bind.host or "localhost"
        self.address = HostPort(bind.host, self._server.server_port)

    def close(self) -> None:
        """Stop to serve; may be called twice."""
        if not self._thread.is_alive():
            return
        ending = threading.Thread(target=self._server.shutdown, name="torchft-metrics-end")
        ending.start()
        # It would look half a second later, unless somebody comes.
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.address.port), _WAKE_S).close()
        ending.join()
        self._thread.join()
        self._server.server_close()
