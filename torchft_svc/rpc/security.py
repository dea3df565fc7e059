"""TLS files and the shared token, which decide who may call whom (rule S1).

With a certificate and key, servers speak TLS; with a CA too, they want a certificate of that CA
from whoever calls (mutual TLS). Clients speak TLS where there is a CA or a certificate of their
own, check the server against the CA (without one: against the system's), and show their
certificate. The token travels with every call. Files are read once, when a `Security` is made.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.setting_files import read_secret
from torchft_svc.rpc.tls import TlsFiles

TOKEN_KEY = "authorization"  # noqa: S105 - the name of a header
_SCHEME = "bearer"
# Sixteen random characters cannot be guessed over a network.
MIN_TOKEN_LENGTH = 16
# It travels with every call; gRPC takes 8 KB of metadata in all.
MAX_TOKEN_LENGTH = 1024

TOKEN_NAME, TOKEN_FILE_NAME = "TORCHFT_TOKEN", "TORCHFT_TOKEN_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security(TlsFiles):
    """``cert_file``, ``key_file``, ``ca_file``: see `TlsFiles`; ``token``: the secret that every
    call must carry.

    Raises:
        ConfigError: see `TlsFiles`; or the token cannot travel, or is too short.
    """

    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        TlsFiles.__post_init__(self)  # `super()` does not find the class that slots have made
        flaw = None if self.token is None else _flaw(self.token)
        if flaw is not None:
            raise ConfigError(TOKEN_NAME, "...", flaw)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return () if self.token is None else ((TOKEN_KEY, self.authorization),)

    @property
    def authorization(self) -> str:
        """The token as the value of a header; there must be one."""
        assert self.token is not None
        return f"Bearer {self.token}"

    def refusal(self, shown: str | None) -> str | None:
        """Why a caller that shows ``shown`` as its authorization may not call; None: it may.

        Takes as long for a token that is nearly right as for one that is all wrong.
        """
        if self.token is None:
            return None
        scheme, _, token = (shown or "").strip().partition(" ")
        if not token or scheme.lower() != _SCHEME:
            return f"this service requires a token: set {TOKEN_NAME} or {TOKEN_FILE_NAME}"
        if not hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.token.encode()):
            return (
                f"the token differs from that of this service: set {TOKEN_NAME} or "
                f"{TOKEN_FILE_NAME} to the same value everywhere"
            )
        return None

    def variables(self) -> dict[str, str | None]:
        """The environment of a child that is to have the same; None: the variable is not set."""
        return {
            self.cert_name: self.cert_file,
            self.key_name: self.key_file,
            self.ca_name: self.ca_file,
            TOKEN_NAME: self.token,
            TOKEN_FILE_NAME: None,
        }


PLAIN = Security()


def resolve_security(
    environment: Environment,
    *,
    cert_file: str | None = None,
    key_file: str | None = None,
    ca_file: str | None = None,
    token_file: str | None = None,
) -> Security:
    """Argument, else environment, else neither TLS nor token.

    Raises:
        ConfigError: see `Security`; also a token file that cannot be read, or two tokens.
    """
    return Security(
        cert_file=environment.tls_cert_file if cert_file is None else cert_file,
        key_file=environment.tls_key_file if key_file is None else key_file,
        ca_file=environment.tls_ca_file if ca_file is None else ca_file,
        token=read_secret(TOKEN_NAME, environment.token, environment.token_file, token_file, _flaw),
    )


def security_or_environment(
    security: Security | None, environment: Environment | None = None
) -> Security:
    """What an argument ``security`` stands for; None: what the environment says.

    Raises:
        ConfigError: it is something else, or see `resolve_security`.
    """
    if security is None:
        return resolve_security(environment or Environment())
    if not isinstance(security, Security):
        kind = type(security).__name__  # a secret may have been given
        raise ConfigError("security", f"<{kind}>", "use a Security, or None for the environment")
    return security


def _flaw(token: str) -> str | None:
    """Why it cannot be used; never names the token, because that is going to be logged."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        return "use printable ASCII characters without spaces"
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        return f"it has {len(token)} characters; use {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH}"
    return None
