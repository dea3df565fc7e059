"""How several lighthouses elect one: the settings."""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.limits import check_length
from torchft_svc.errors import ConfigError
from torchft_svc.host.address import parse_address
from torchft_svc.lighthouse_server.etcd_access import EtcdAccess
from torchft_svc.lighthouse_server.leadership import MIN_LEASE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """The settings; ``advertise``: where managers are sent if this lighthouse leads
    (None: the one that it is bound to).

    Raises:
        ConfigError: the lease is too short.
        AddressError: ``advertise`` cannot be parsed.
    """

    etcd: EtcdAccess
    lease_ttl_s: int = 5
    advertise: str | None = None

    def __post_init__(self) -> None:
        if self.advertise is not None:
            parse_address(self.advertise)
        if self.lease_ttl_s < MIN_LEASE_S:
            raise ConfigError("lease_ttl_s", self.lease_ttl_s, f"use {MIN_LEASE_S} seconds or more")
        check_length("lease_ttl_s", self.lease_ttl_s)
