"""Why two sides do not agree on TLS, in words that say what to set."""

from __future__ import annotations

from torchft_svc.rpc.tls import TlsFiles

# What OpenSSL, BoringSSL and gRPC call the cause, and what it is; {0} is what the settings begin
# with. The first that fits counts.
_REASONS = (
    (
        ("certificate has expired", "certificate is not yet valid"),
        "its certificate is not valid at this time: renew it, or set the clock",
    ),
    (
        ("hostname verification check failed", "hostname mismatch", "ip address mismatch"),
        "its certificate is not for this host: it needs the host name or IP address that is dialed "
        "among its subject alternative names (SAN)",
    ),
    (
        ("certificate_verify_failed",),
        "its certificate is not signed by a CA that is trusted here: set {0}_CA to the CA that "
        "signed it",
    ),
    (
        ("wrong_version_number", "wrong version number", "http_request"),
        "it does not use TLS, but TLS is set here: give it a certificate and its key, or "
        "remove the TLS settings here",
    ),
    (
        ("alert certificate", "alert unknown ca", "alert bad certificate", "alert unknown_ca"),
        "it does not accept the certificate of this side: set {0}_CERT and {0}_KEY to one that its "
        "CA has signed",
    ),
)
# A server that does not like a greeting closes the connection, and gRPC learns no more than that.
# The third is what it makes of an alert behind a handshake that went well on this side (TLS 1.3).
_CLOSED = ("socket closed", "connection reset", "tsi_data_corrupted")


def tls_reason(details: str, setting: str = TlsFiles.setting) -> str | None:
    """The sentence for what a TLS library has said; None if it was not about trust.

    ``setting``: what those that are to be looked at begin with.
    """
    text = details.lower()
    for signs, reason in _REASONS:
        if any(sign in text for sign in signs):
            return reason.format(setting)
    return None


def closing_hint(details: str, setting: str = TlsFiles.setting) -> str:
    """What to look at where gRPC found somebody who hung up at once; empty where it did not."""
    text = details.lower()
    if text.startswith("failed to connect") and any(sign in text for sign in _CLOSED):
        return (
            " (it closes the connection at once: it may require TLS, or a certificate that its CA "
            f"has signed; set {setting}_CA, {setting}_CERT and {setting}_KEY to match)"
        )
    return ""
