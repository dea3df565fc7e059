"""The addresses of etcd, and the credentials of this lighthouse there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from torchft_svc.core.limits import check_not_empty
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.address import split_addresses
from torchft_svc.host.setting_files import read_secret
from torchft_svc.rpc.tls import TlsFiles

PLAIN_SCHEME, TLS_SCHEME = "etcd://", "etcds://"
DEFAULT_PREFIX = "torchft"
# To etcd all keys below a name belong to that name's election: `x` would wait for who leads in
# `x/y`, and with `x/` as the other spelling of `x` both would be elected.
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,256}")
USER_NAME, PASSWORD_NAME = "TORCHFT_ETCD_USER", "TORCHFT_ETCD_PASSWORD"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAccess(TlsFiles):
    """The servers, and the user; ``url``: ``etcd[s]://host:port[,host:port...][/prefix]``.

    With TLS the servers are checked against ``ca_file`` (without one: against the system's CAs),
    and shown ``cert_file`` if there is one.

    Raises:
        ConfigError: not such a url; files without TLS; a password without a user, or the reverse;
            see also `TlsFiles`.
        AddressError: a server's address cannot be parsed.
    """

    setting: ClassVar[str] = "TORCHFT_ETCD"

    url: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        hosts, slash, prefix = self._parts()
        is_url = self.url.startswith((PLAIN_SCHEME, TLS_SCHEME))
        if not is_url or (slash and not _PREFIX.fullmatch(prefix)):
            expected = (
                f"use {PLAIN_SCHEME}host:2379[,host:2379][/prefix], or {TLS_SCHEME}... for TLS; "
                "the prefix is one word of letters, digits, '.', '_' and '-'"
            )
            raise ConfigError("leader_election", self.url, expected)
        split_addresses(hosts)
        TlsFiles.__post_init__(self)  # `super()` does not find the class that slots have made
        for name, value in ((self.ca_name, self.ca_file), (self.cert_name, self.cert_file)):
            if value is not None and not self.dials_tls:
                raise ConfigError(
                    name, value, f"it is for TLS: use {TLS_SCHEME}, not {PLAIN_SCHEME}"
                )
        for name, value in ((USER_NAME, self.user), (PASSWORD_NAME, self.password)):
            check_not_empty(name, value)
        if self.user is not None and self.password is None:
            raise ConfigError(USER_NAME, self.user, f"{PASSWORD_NAME} is needed with it")
        if self.password is not None and self.user is None:
            raise ConfigError(PASSWORD_NAME, "...", f"{USER_NAME} is needed with it")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The servers, in the order in which they are tried."""
        return split_addresses(self._parts()[0])

    @property
    def prefix(self) -> str:
        """The prefix of the keys of the election."""
        return self._parts()[2] or DEFAULT_PREFIX

    @property
    def dials_tls(self) -> bool:
        return self.url.startswith(TLS_SCHEME)

    def _parts(self) -> tuple[str, str, str]:
        return self.url.partition("://")[2].partition("/")


def resolve_etcd_access(
    environment: Environment,
    url: str,
    *,
    cert_file: str | None = None,
    key_file: str | None = None,
    ca_file: str | None = None,
    user: str | None = None,
    password_file: str | None = None,
) -> EtcdAccess:
    """Return the access by argument, else environment, else the system's CAs and no user.

    Raises:
        ConfigError: see `EtcdAccess`; also a password file that cannot be read, or two passwords.
        AddressError: see `EtcdAccess`.
    """
    return EtcdAccess(
        url=url,
        cert_file=environment.etcd_cert_file if cert_file is None else cert_file,
        key_file=environment.etcd_key_file if key_file is None else key_file,
        ca_file=environment.etcd_ca_file if ca_file is None else ca_file,
        user=environment.etcd_user if user is None else user,
        password=read_secret(
            PASSWORD_NAME,
            environment.etcd_password,
            environment.etcd_password_file,
            password_file,
        ),
    )
