"""Why two sides do not agree on TLS, in words that say what to set."""

from __future__ import annotations

# What OpenSSL, BoringSSL and gRPC call the cause, and what it is. The first that fits counts.
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
        "its certificate is not signed by a CA that is trusted here: set TORCHFT_TLS_CA to the CA "
        "that signed it",
    ),
    (
        ("wrong_version_number", "wrong version number", "http_request"),
        "it does not speak TLS, and TLS is set here: give it TORCHFT_TLS_CERT and TORCHFT_TLS_KEY, "
        "or take the settings away here",
    ),
    (
        ("alert certificate", "alert unknown ca", "alert bad certificate", "alert unknown_ca"),
        "it does not take the certificate of this side: set TORCHFT_TLS_CERT and TORCHFT_TLS_KEY "
        "to one that its CA has signed",
    ),
)
# A server that does not like a greeting closes the connection, and gRPC hears no more than that.
_CLOSED = ("socket closed", "connection reset")


def tls_reason(details: str) -> str | None:
    """The sentence for what a TLS library has said; None if it was not about trust."""
    text = details.lower()
    for signs, reason in _REASONS:
        if any(sign in text for sign in signs):
            return reason
    return None


def closing_hint(details: str) -> str:
    """What to look at where gRPC found somebody who hung up at once; empty where it did not."""
    text = details.lower()
    if text.startswith("failed to connect") and any(sign in text for sign in _CLOSED):
        return (
            " (it hangs up at once: it may want TLS, or a certificate that its CA has signed; set "
            "TORCHFT_TLS_CA, TORCHFT_TLS_CERT and TORCHFT_TLS_KEY as there)"
        )
    return ""
