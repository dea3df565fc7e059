"""Serves states to the workers that heal from this one."""

from __future__ import annotations

import secrets
import time

from torchft_svc.client.checkpointing.http.connections import ConnectionServer
from torchft_svc.client.checkpointing.http.preview import Preview
from torchft_svc.client.checkpointing.http.requests import Admission, Conversation
from torchft_svc.client.checkpointing.http.served import OfferSlot, ServedState
from torchft_svc.client.checkpointing.http.wire import Wire
from torchft_svc.rpc.security import PLAIN, Security


class CheckpointServer:
    """Serves the states in ``slots`` by their names, and ``preview``, at one port with one secret.

    ``bind_host``: the address to listen at, ``""`` for all interfaces (IPv6, too, if available).

    Raises:
        AddressError: it cannot be bound.
        ConfigError: files in ``security`` cannot be read, or are not enough for a server.
    """

    def __init__(
        self,
        slots: dict[str, OfferSlot],
        preview: Preview,
        bind_host: str = "",
        port: int = 0,
        security: Security = PLAIN,
    ) -> None:
        self._security = security
        self.secret = secrets.token_urlsafe(16)
        self._slots = slots
        self._preview = preview
        self._connections = ConnectionServer(
            self._converse, "checkpoint", bind_host, port, security, pass_time=self._expire
        )
        self.port = self._connections.port
        preview.on_collected = self._connections.wake  # to look when it expires
        self._connections.start()

    def offer(self, name: str, state: ServedState) -> None:
        """Serve ``state`` under ``name`` instead of the previous one."""
        self._slots[name].offer(state)
        self._connections.wake()

    def close(self, wait: bool = True) -> None:
        """Cut all connections; with ``wait``, also join all threads. Idempotent."""
        for slot in self._slots.values():
            slot.close()
        self._preview.show(None)
        self._connections.close(wait)

    def _converse(self, wire: Wire, admission: Admission) -> None:
        Conversation(wire, self._slots, self._preview, self.secret, self._security, admission).run()

    def _expire(self) -> float | None:
        """Drop what nobody fetches any more; when to look again."""
        now = time.monotonic()
        times = [slot.expire(now) for slot in self._slots.values()]
        times.append(self._preview.expire(now))
        return min((at for at in times if at is not None), default=None)
