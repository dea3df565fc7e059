"""Settings of the dashboard and the HTTP API; needs nothing of the extra ``dashboard``."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from torchft_svc.errors import ConfigError
from torchft_svc.host.address import HostPort

EXTRA = "pip install 'torchft-svc[dashboard]'"
_NEEDED = ("starlette", "uvicorn", "prometheus_client")
# Names of machines; with `*.` in front, all names below one.
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]{0,253}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """``bind``: where to listen; ``hosts``: names under which browsers reach it, beside the
    addresses and the name of this machine.

    Raises:
        ConfigError: the extra is not installed, or a name cannot be one.
    """

    bind: HostPort
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            reason = f"it needs {', '.join(missing)}: {EXTRA}"
            raise ConfigError("--http-bind", str(self.bind), reason)
        for host in self.hosts:
            if not _NAME.fullmatch(host):
                reason = "give a host name without port or scheme, such as jobs.example"
                raise ConfigError("--http-host", host, reason)
