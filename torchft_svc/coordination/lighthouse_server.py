"""A lighthouse inside this process."""

from __future__ import annotations

from typing import Any, Literal

from torchft_svc.coordination.server import Server
from torchft_svc.core.launch.rendezvous import SETTLE_IN_S
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.host.address import HostPort, parse_address, reachable_host
from torchft_svc.host.loop import Background
from torchft_svc.lighthouse_server.app import run_lighthouse
from torchft_svc.lighthouse_server.http.settings import HttpSettings
from torchft_svc.rpc.security import Security, security_or_environment


class LighthouseServer(Server):
    """A lighthouse inside this process, for tests and small jobs.

    ``bind`` is ``host:port`` (``:0``: any free port on every interface). Durations are
    milliseconds. ``quorum_tick_ms`` is accepted and has no effect: nothing polls. A group whose
    step stands still for ``hang_timeout_ms`` (None: however long) is reported; it is ended if
    ``on_hang`` is ``kill``, and left out until it asks again if that is ``evict``. One whose own
    work takes ``slow_factor`` times that of the best group for ``slow_after_ms`` is reported, and
    drained if ``on_slow`` is ``evict``. A group that
    heals is waited for up to ``heal_timeout_ms`` (None: as for any other, the join timeout).
    A cold start waits for ``startup_wait_ms`` after the first request for groups that are started
    together (the command's default is a second).
    ``settle_in_ms``: how long after its first agent it begins no launched run anew (rule L13).
    ``security``: TLS files and token (default: those of the environment).
    ``http_bind``: where the dashboard and the HTTP API are served (None: nowhere).

    Raises:
        AddressError: nothing can be bound there.
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        *,
        startup_timeout_ms: int | None = None,
        startup_wait_ms: int = 0,
        heal_timeout_ms: int | None = None,
        hang_timeout_ms: int | None = None,
        on_hang: Literal["report", "kill", "evict"] = "report",
        slow_factor: float = 1.5,
        slow_after_ms: int = 60_000,
        on_slow: Literal["report", "evict"] = "report",
        settle_in_ms: int = round(SETTLE_IN_S * 1000),
        security: Security | None = None,
        http_bind: str | None = None,
    ) -> None:
        given_ms = {
            "join_timeout_s": join_timeout_ms,
            "heartbeat_timeout_s": heartbeat_timeout_ms,
            "startup_timeout_s": startup_timeout_ms,
            "startup_wait_s": startup_wait_ms,
            "heal_timeout_s": heal_timeout_ms,
            "hang_timeout_s": hang_timeout_ms,
            "slow_after_s": slow_after_ms,
        }
        durations: dict[str, Any] = {
            field: value / 1000 for field, value in given_ms.items() if value is not None
        }
        config = QuorumConfig(
            min_replicas=min_replicas,
            on_hang=on_hang,
            slow_factor=slow_factor,
            on_slow=on_slow,
            **durations,
        )
        where = parse_address(bind, may_bind=True)
        http = None
        if http_bind is not None:
            http = HttpSettings(bind=parse_address(http_bind, may_bind=True))
        trust = security_or_environment(security)
        self._scheme = "https" if trust.serves_tls else "http"
        self._running = Background(
            run_lighthouse(config, where, trust, settle_in_s=settle_in_ms / 1000, http=http)
        )

    def address(self) -> str:
        """``http://host:port``, to be given to managers."""
        bound = self._running.value.grpc
        return f"http://{HostPort(reachable_host(bound), bound.port)}"

    def http_address(self) -> str:
        """The address of the dashboard; empty if it is off."""
        bound = self._running.value.http
        if bound is None:
            return ""
        return f"{self._scheme}://{HostPort(reachable_host(bound), bound.port)}"
