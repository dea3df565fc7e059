"""How several lighthouses elect one: the settings, and their flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchft_svc.core.types import check_length
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.lighthouse_server.etcd_access import EtcdAccess, resolve_etcd_access
from torchft_svc.lighthouse_server.leadership import MIN_LEASE_S
from torchft_svc.rpc.address import parse_address
from torchft_svc.rpc.cli import Text, option, telling_usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Election:
    """``advertise`` is the address that managers are told to go to, if this lighthouse leads
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


def election_options(main: Callable[..., None]) -> Callable[..., None]:
    """The flags of the election, handed to ``main`` as one argument, ``election`` (None: no flag).

    The password itself has no flag: everybody on the machine can read a command line.
    """

    @option(
        "--leader-election",
        default=None,
        help="Of several lighthouses only the elected one answers: "
        "etcd://host:2379[,host:2379][/prefix], or etcds://... with TLS.",
    )
    @option(
        "--lease-ttl-s", type=int, default=5, help="A dead leader is replaced within this time."
    )
    @option(
        "--advertise",
        default=None,
        metavar="HOST:PORT",
        show_default="the bound one",
        help="Address under which managers reach this lighthouse, if it leads.",
    )
    @option("--etcd-ca", help="CA that signs etcd's certificates, PEM.  [env: TORCHFT_ETCD_CA]")
    @option("--etcd-cert", help="Certificate to show to etcd, PEM.  [env: TORCHFT_ETCD_CERT]")
    @option("--etcd-key", help="That certificate's private key, PEM.  [env: TORCHFT_ETCD_KEY]")
    @option("--etcd-user", type=Text(), help="The user at etcd.  [env: TORCHFT_ETCD_USER]")
    @option(
        "--etcd-password-file",
        help="File with that user's password; the password itself is taken from "
        "TORCHFT_ETCD_PASSWORD only, because a command line is not secret.  "
        "[env: TORCHFT_ETCD_PASSWORD_FILE]",
    )
    @functools.wraps(main)
    def elected(
        *,
        leader_election: str | None,
        lease_ttl_s: int,
        advertise: str | None,
        **others: Any,
    ) -> None:
        etcd = {flag: others.pop(f"etcd_{flag}") for flag in ("user", "password_file")}
        etcd |= {f"{flag}_file": others.pop(f"etcd_{flag}") for flag in ("ca", "cert", "key")}
        election = None
        with telling_usage():
            if leader_election is not None:
                access = resolve_etcd_access(Environment(), leader_election, **etcd)
                election = Election(etcd=access, lease_ttl_s=lease_ttl_s, advertise=advertise)
        main(election=election, **others)

    return elected
