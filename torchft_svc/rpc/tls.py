"""The files of TLS: checked when they are read, and made into what gRPC and sockets want."""

from __future__ import annotations

import dataclasses
import functools
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torchft_svc.errors import ConfigError
from torchft_svc.host.setting_files import read_file

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What the files held, of which None are not set; for sockets, ready to be used.

    ``roots`` are the system's where there is no CA; None: gRPC has its own.
    """

    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    roots: bytes | None
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """``cert_file`` and ``key_file``: this party's certificate (PEM, with its intermediates) and
    key; ``ca_file``: who signs the others'.

    Read here, once: while files are replaced they may be missing or half written, and whoever
    connects again in that moment must not fail.

    Raises:
        ConfigError: a file cannot be read, is not PEM, the key is not the certificate's, or one of
            the two is missing.
    """

    # What the environment variables that name the files begin with; errors name them.
    setting: ClassVar[str] = "TORCHFT_TLS"

    cert_file: str | None = None
    key_file: str | None = None
    ca_file: str | None = None

    _content: _Content = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value, other_name, other in (
            (self.cert_name, self.cert_file, self.key_name, self.key_file),
            (self.key_name, self.key_file, self.cert_name, self.cert_file),
        ):
            if value is not None and other is None:
                raise ConfigError(name, value, f"{other_name} is needed with it")
        roots = self.ca_file
        if roots is None and self.dials_tls:
            roots = ssl.get_default_verify_paths().cafile
        content = _Content(
            cert=_read(self.cert_name, self.cert_file),
            key=_read(self.key_name, self.key_file),
            ca=_read(self.ca_name, self.ca_file),
            roots=_read(self.ca_name, roots),
            server=None if self.cert_file is None else self._make_server_context(),
            client=self._make_client_context() if self.dials_tls else None,
        )
        object.__setattr__(self, "_content", content)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as for another process, reads the files itself."""
        named = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init
        }
        return functools.partial(type(self), **named), ()

    @property
    def cert_name(self) -> str:
        return f"{self.setting}_CERT"

    @property
    def key_name(self) -> str:
        return f"{self.setting}_KEY"

    @property
    def ca_name(self) -> str:
        return f"{self.setting}_CA"

    @property
    def serves_tls(self) -> bool:
        """Whether servers speak TLS; raises `ConfigError` if a CA is all that there is."""
        if self.ca_file is not None and self.cert_file is None:
            raise ConfigError(
                self.ca_name, self.ca_file, f"a server needs {self.cert_name} and {self.key_name}"
            )
        return self.cert_file is not None

    @property
    def dials_tls(self) -> bool:
        """Whether clients speak TLS."""
        return self.ca_file is not None or self.cert_file is not None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """The credentials of a gRPC server (None: without TLS)."""
        if not self.serves_tls:
            return None
        key, cert, ca = self._content.key, self._content.cert, self._content.ca
        assert key is not None
        assert cert is not None
        import grpc  # only here, because a trainer reads its settings before it needs gRPC

        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of a gRPC channel (None: without TLS)."""
        if not self.dials_tls:
            return None
        import grpc  # see above

        return grpc.ssl_channel_credentials(
            self._content.roots, self._content.key, self._content.cert
        )

    def server_context(self) -> ssl.SSLContext | None:
        """The context of a server on plain sockets (None: without TLS)."""
        return self._content.server if self.serves_tls else None

    def client_context(self) -> ssl.SSLContext | None:
        """The context of a client on plain sockets, which checks the server (None: no TLS)."""
        return self._content.client

    def _make_server_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # nobody resumes a session
        self._add_own_certificate(context)
        if self.ca_file is not None:
            self._add_ca(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _make_client_context(self) -> ssl.SSLContext:
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca_file is None:
            context.load_default_certs()
        else:
            self._add_ca(context)
        if self.cert_file is not None:
            self._add_own_certificate(context)
        return context

    def _add_own_certificate(self, context: ssl.SSLContext) -> None:
        assert self.cert_file is not None
        assert self.key_file is not None
        cert, key = (
            read_file(self.cert_name, self.cert_file),
            read_file(self.key_name, self.key_file),
        )
        if b"-----BEGIN CERTIFICATE-----" not in cert:
            raise ConfigError(
                self.cert_name, self.cert_file, "the file holds no certificate in PEM form"
            )
        if b"PRIVATE KEY-----" not in key:
            raise ConfigError(
                self.key_name, self.key_file, "the file holds no private key in PEM form"
            )
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=self._refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = f"it is not the key of {self.cert_name}={self.cert_file!r}"
                raise ConfigError(self.key_name, self.key_file, reason) from None
            reason = f"it cannot be used with {self.key_name}={self.key_file!r}: {error}"
            raise ConfigError(self.cert_name, self.cert_file, reason) from None

    def _refuse_password(self) -> NoReturn:
        """Refuse an encrypted key; OpenSSL would ask for the password on the terminal."""
        raise ConfigError(
            self.key_name, self.key_file, "the key is encrypted; a plain one is needed"
        )

    def _add_ca(self, context: ssl.SSLContext) -> None:
        assert self.ca_file is not None
        read_file(self.ca_name, self.ca_file)
        try:
            context.load_verify_locations(self.ca_file)
        except ssl.SSLError as error:
            reason = f"the file holds no certificate in PEM form ({error.reason})"
            raise ConfigError(self.ca_name, self.ca_file, reason) from None


def _read(name: str, path: str | None) -> bytes | None:
    return None if path is None else read_file(name, path)


def _context(protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context
