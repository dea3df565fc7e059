"""A lighthouse with a dashboard for the tests of its HTTP API, and groups with sessions."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx

from support.running import attach, manager_process
from torchft_svc.coordination import LighthouseServer, ManagerClient
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.rpc.security import Security

TOKEN = "correct-horse-battery"  # noqa: S105 - of tests
LONG = timedelta(seconds=20)
BEARER = {"authorization": f"Bearer {TOKEN}"}


@dataclass(frozen=True)
class Commanded:
    """The commands with which a group was ended; of a kill, the reason."""

    kills: queue.Queue[str] = field(default_factory=queue.Queue)
    drains: queue.Queue[Drain] = field(default_factory=queue.Queue)


@dataclass(frozen=True)
class Served:
    """A lighthouse with a dashboard: its addresses, and a client that shows its token."""

    grpc: str
    url: str
    client: httpx.Client
    security: Security

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.client.post(path, **{"json": {}, **options})

    @contextlib.contextmanager
    def group(self, name: str, job: str = "default", step: int = 3) -> Iterator[Commanded]:
        """A group in a quorum: its manager in a process of its own, and a worker that receives what
        it is commanded."""
        token = self.security.token
        variables = {"TORCHFT_JOB_ID": job} | ({"TORCHFT_TOKEN": token} if token else {})
        commanded = Commanded()
        with (
            manager_process(self.grpc, name=name, **variables) as manager,
            ManagerClient(manager.address, LONG, security=self.security) as client,
        ):
            attach(client, 0, on_kill=commanded.kills.put, on_drain=commanded.drains.put)
            client._quorum(0, step, "", shrink_only=False, timeout=LONG)
            yield commanded


@contextlib.contextmanager
def served(token: str | None = TOKEN, **settings: Any) -> Iterator[Served]:
    security = Security(token=token)
    with LighthouseServer(
        "127.0.0.1:0",
        1,
        heartbeat_timeout_ms=60_000,
        security=security,
        http_bind="127.0.0.1:0",
        **settings,
    ) as server:
        url = server.http_address()
        headers = BEARER if token else {}
        with httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False) as client:
            yield Served(server.address().removeprefix("http://"), url, client, security)
