"""Who may talk to whom: TLS files and the shared token, checked when they are read.

With a certificate and key, servers speak TLS; with a CA too, they want a certificate of that CA
from whoever calls (mutual TLS). Clients speak TLS where there is a CA or a certificate of their
own, check the server against the CA (without one: against the system's), and show their
certificate. The token travels with every call. Files are read when a service starts, and when a
client connects.
"""

from __future__ import annotations

import hmac
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc

from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError

TOKEN_KEY = "authorization"  # noqa: S105 - the name of a header
_SCHEME = "bearer"
# Sixteen random characters cannot be guessed over a network.
MIN_TOKEN_LENGTH = 16
# It travels with every call; gRPC takes 8 KB of metadata in all.
MAX_TOKEN_LENGTH = 1024
# Certificate bundles are some 200 KB; more is not one.
MAX_FILE_BYTES = 4 << 20

CERT_NAME, KEY_NAME, CA_NAME = "TORCHFT_TLS_CERT", "TORCHFT_TLS_KEY", "TORCHFT_TLS_CA"
TOKEN_NAME, TOKEN_FILE_NAME = "TORCHFT_TOKEN", "TORCHFT_TOKEN_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """``cert_file`` and ``key_file``: this party's certificate (PEM, with its intermediates) and
    key; ``ca_file``: who signs the others'; ``token``: the secret that every call must carry.

    Raises:
        ConfigError: a file cannot be read, is not PEM, the key is not the certificate's, one of the
            two is missing, or the token cannot travel or is too short.
    """

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, value, other_name, other in (
            (CERT_NAME, self.cert_file, KEY_NAME, self.key_file),
            (KEY_NAME, self.key_file, CERT_NAME, self.cert_file),
        ):
            if value is not None and other is None:
                raise ConfigError(name, value, f"{other_name} is needed with it")
        if self.cert_file is not None:
            self._add_own_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        if self.ca_file is not None:
            self._add_ca(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        if self.token is not None:
            _check_token(self.token)

    @property
    def serves_tls(self) -> bool:
        """Whether servers speak TLS; raises `ConfigError` if a CA is all that there is."""
        if self.ca_file is not None and self.cert_file is None:
            raise ConfigError(CA_NAME, self.ca_file, f"a server needs {CERT_NAME} and {KEY_NAME}")
        return self.cert_file is not None

    @property
    def dials_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self.ca_file is not None or self.cert_file is not None

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
            return f"this service wants a token: set {TOKEN_NAME} or {TOKEN_FILE_NAME}"
        if not hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.token.encode()):
            return (
                f"the token is not that of this service: set {TOKEN_NAME} or {TOKEN_FILE_NAME} to "
                "the same value everywhere"
            )
        return None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a gRPC server; None: it speaks without TLS."""
        if not self.serves_tls:
            return None
        assert self.cert_file is not None
        assert self.key_file is not None
        pair = (_read(KEY_NAME, self.key_file), _read(CERT_NAME, self.cert_file))
        ca = None if self.ca_file is None else _read(CA_NAME, self.ca_file)
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a gRPC channel; None: it speaks without TLS."""
        if not self.dials_tls:
            return None
        roots = self.ca_file or ssl.get_default_verify_paths().cafile
        return grpc.ssl_channel_credentials(
            None if roots is None else _read(CA_NAME, roots),
            None if self.key_file is None else _read(KEY_NAME, self.key_file),
            None if self.cert_file is None else _read(CERT_NAME, self.cert_file),
        )

    def server_context(self) -> ssl.SSLContext | None:
        """For a server on plain sockets; None: it speaks without TLS."""
        if not self.serves_tls:
            return None
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes a session
        self._add_own_certificate(context)
        if self.ca_file is not None:
            self._add_ca(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext | None:
        """For a client on plain sockets, which checks the server's name too; None: without TLS."""
        if not self.dials_tls:
            return None
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca_file is None:
            context.load_default_certs()
        else:
            self._add_ca(context)
        if self.cert_file is not None:
            self._add_own_certificate(context)
        return context

    def variables(self) -> dict[str, str | None]:
        """The environment of a child that is to have the same; None: the variable is not set."""
        return {
            CERT_NAME: self.cert_file,
            KEY_NAME: self.key_file,
            CA_NAME: self.ca_file,
            TOKEN_NAME: self.token,
            TOKEN_FILE_NAME: None,
        }

    def _add_own_certificate(self, context: ssl.SSLContext) -> None:
        assert self.cert_file is not None
        assert self.key_file is not None
        cert, key = _read(CERT_NAME, self.cert_file), _read(KEY_NAME, self.key_file)
        if b"-----BEGIN CERTIFICATE-----" not in cert:
            raise ConfigError(
                CERT_NAME, self.cert_file, "the file holds no certificate in PEM form"
            )
        if b"PRIVATE KEY-----" not in key:
            raise ConfigError(KEY_NAME, self.key_file, "the file holds no private key in PEM form")
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=self._refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = f"it is not the key of {CERT_NAME}={self.cert_file!r}"
                raise ConfigError(KEY_NAME, self.key_file, reason) from None
            reason = f"it cannot be used with {KEY_NAME}={self.key_file!r}: {error}"
            raise ConfigError(CERT_NAME, self.cert_file, reason) from None

    def _refuse_password(self) -> NoReturn:
        """Instead of asking for one on the terminal."""
        raise ConfigError(KEY_NAME, self.key_file, "the key is encrypted; a plain one is needed")

    def _add_ca(self, context: ssl.SSLContext) -> None:
        assert self.ca_file is not None
        _read(CA_NAME, self.ca_file)
        try:
            context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            reason = f"the file holds no certificate in PEM form ({error.reason})"
            raise ConfigError(CA_NAME, self.ca_file, reason) from None


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
        cert_file=cert_file or environment.tls_cert_file,
        key_file=key_file or environment.tls_key_file,
        ca_file=ca_file or environment.tls_ca_file,
        token=_token(environment, token_file),
    )


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _token(environment: Environment, token_file: str | None) -> str | None:
    variable, path = environment.token, token_file or environment.token_file
    if token_file is None and variable is not None:
        if path is not None:
            raise ConfigError(TOKEN_FILE_NAME, path, f"{TOKEN_NAME} is set too: leave out one")
        return variable
    if path is None:
        return None
    content = _read(TOKEN_FILE_NAME, path)
    try:
        return content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(TOKEN_FILE_NAME, path, "the token is not ASCII text") from None


def _check_token(token: str) -> None:
    """Never names the token: the error is going to be logged."""
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(TOKEN_NAME, "...", "use printable ASCII characters without spaces")
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH:
        raise ConfigError(
            TOKEN_NAME,
            "...",
            f"it has {len(token)} characters; use {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH}",
        )


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(name, path, f"it cannot be read: {reason}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(name, path, f"it has more than {MAX_FILE_BYTES} bytes")
    return content
