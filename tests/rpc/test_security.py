"""Tests what is read into a `Security`: every bad file and token is an error that names it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from support.papers import TOKEN, Papers, papers

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.coordination import LighthouseClient, LighthouseServer, ManagerClient
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError
from torchft_svc.host.setting_files import MAX_FILE_BYTES
from torchft_svc.rpc.security import PLAIN, Security, resolve_security

SECOND = timedelta(seconds=1)
VARIABLES = (
    "TORCHFT_TLS_CERT",
    "TORCHFT_TLS_KEY",
    "TORCHFT_TLS_CA",
    "TORCHFT_TOKEN",
    "TORCHFT_TOKEN_FILE",
)


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


def test_nothing_is_set() -> None:
    assert resolve_security(Environment({})) == PLAIN
    assert (PLAIN.serves_tls, PLAIN.dials_tls, PLAIN.metadata) == (False, False, ())
    assert PLAIN.refusal(None) is None
    assert PLAIN.server_credentials() is PLAIN.channel_credentials() is None
    assert PLAIN.server_context() is PLAIN.client_context() is None


def test_argument_beats_environment(some: Papers, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    named = some.local.variables() | {"TORCHFT_TOKEN": "the-token-of-the-environment"}
    environment = Environment({name: value for name, value in named.items() if value})
    assert resolve_security(environment) == replace(
        some.local,
        token="the-token-of-the-environment",  # noqa: S106
    )
    other = some.ours.issue("elsewhere")
    assert resolve_security(
        environment, cert_file=other.cert_file, key_file=other.key_file, token_file=str(file)
    ) == replace(other, token=TOKEN)
    assert resolve_security(Environment({"TORCHFT_TOKEN_FILE": str(file)})).token == TOKEN


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("text", ["", "  "])
def test_a_variable_that_is_set_but_empty_is_not_taken_for_no_security(
    name: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{text}' cannot work: it is empty"):
        resolve_security(Environment({name: text}))


@pytest.mark.parametrize(
    "empty",
    [
        {"cert_file": "", "key_file": ""},
        {"ca_file": ""},
        {"token_file": ""},
        {"cert_file": "", "key_file": "", "ca_file": "", "token_file": ""},
        {"token_file": " "},
    ],
    ids=str,
)
def test_an_argument_that_is_given_but_empty_is_not_taken_for_no_security(
    empty: dict[str, str], some: Papers
) -> None:
    with pytest.raises(ConfigError, match="it is empty: name a file"):
        resolve_security(Environment({}), **empty)
    named = {name: value for name, value in some.local.variables().items() if value}
    with pytest.raises(ConfigError, match="it is empty: name a file"):
        resolve_security(Environment(named), **empty)


def test_empty_members_of_a_security_are_errors() -> None:
    for empty in ({"cert_file": "", "key_file": ""}, {"ca_file": ""}, {"token": ""}):
        with pytest.raises(ConfigError):
            Security(**empty)


@pytest.mark.parametrize("wrong", ["", {}, False, "some-token-of-16-characters"], ids=repr)
def test_what_is_no_security_is_refused_without_being_quoted(wrong: Any) -> None:
    for made in (
        lambda: LighthouseClient("127.0.0.1:1", SECOND, security=wrong),
        lambda: ManagerClient("127.0.0.1:1", SECOND, security=wrong),
        lambda: LighthouseServer("127.0.0.1:0", 1, security=wrong),
        lambda: HTTPTransport(SECOND, security=wrong),
    ):
        with pytest.raises(ConfigError, match="use a Security, or None") as caught:
            made()
        assert "some-token" not in str(caught.value)


def test_a_copy_for_another_process_reads_the_files_itself(some: Papers) -> None:
    known = replace(some.local, token=TOKEN)
    copy = pickle.loads(pickle.dumps(known))  # noqa: S301 - our own bytes
    assert copy == known
    assert copy.server_credentials() is not None


@pytest.mark.parametrize("field", ["cert_file", "key_file"])
def test_a_certificate_and_its_key_need_each_other(some: Papers, field: str) -> None:
    with pytest.raises(ConfigError, match=r"TORCHFT_TLS_(CERT|KEY) is needed with it"):
        replace(some.local, **{field: None})


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("cert_file", "TORCHFT_TLS_CERT"),
        ("key_file", "TORCHFT_TLS_KEY"),
        ("ca_file", "TORCHFT_TLS_CA"),
    ],
)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it cannot be read: No such file or directory"),
        (b"", "the file holds no "),
        (b"\0\1\2 garbage", "the file holds no "),
        (b"x" * (MAX_FILE_BYTES + 1), f"it has more than {MAX_FILE_BYTES} bytes"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ""),
    ],
)
def test_a_file_that_is_not_what_it_should_be(
    some: Papers, tmp_path: Path, field: str, name: str, content: bytes | None, reason: str
) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        replace(some.local, **{field: str(file)})
    assert str(caught.value).startswith(f"{name}='{file}' cannot work: {reason}")


def test_a_key_of_another_certificate(some: Papers) -> None:
    other = some.ours.issue("elsewhere")
    with pytest.raises(ConfigError, match=r"TORCHFT_TLS_KEY=.* it is not the key of TORCHFT_TLS"):
        replace(some.local, key_file=other.key_file)


def test_an_encrypted_key_is_refused_instead_of_asking_the_terminal(
    some: Papers, tmp_path: Path
) -> None:
    assert some.local.key_file is not None
    plain = serialization.load_pem_private_key(Path(some.local.key_file).read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match="the key is encrypted"):
        replace(some.local, key_file=str(locked))


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "it has 0 characters"),
        ("short", "it has 5 characters; use 16 to 1024"),
        ("x" * 1025, "it has 1025 characters"),
        ("ä" * 20, "printable ASCII"),
        ("two words of a token", "without spaces"),
        ("a-token\nwith-a-newline", "printable ASCII"),
    ],
)
def test_a_token_that_cannot_work_is_refused_and_never_shown(token: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Security(token=token)
    assert reason in str(caught.value)
    assert "TORCHFT_TOKEN='...'" in str(caught.value)


def test_the_token_is_not_in_the_repr() -> None:
    assert TOKEN not in repr(Security(token=TOKEN))


def test_two_tokens_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TORCHFT_TOKEN is set too"):
        resolve_security(Environment({"TORCHFT_TOKEN": TOKEN, "TORCHFT_TOKEN_FILE": "/some"}))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "it cannot be read: No such file"),
        (b"\xff" * 20, "the file holds no text"),
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"short\n", "it has 5 characters; use 16 to 1024"),
        (b"the-first-of-two\ntokens\n", "printable ASCII"),
    ],
)
def test_a_token_file_that_cannot_work(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_security(Environment({}), token_file=str(file))
    assert f"TORCHFT_TOKEN_FILE='{file}'" in str(caught.value)
    assert "the-first-of-two" not in str(caught.value)


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (f"Bearer {TOKEN}", None),
        (f"bearer  {TOKEN} ", None),
        (None, "requires a token: set TORCHFT_TOKEN or TORCHFT_TOKEN_FILE"),
        ("", "requires a token"),
        (TOKEN, "requires a token"),
        (f"Basic {TOKEN}", "requires a token"),
        ("Bearer", "requires a token"),
        (f"Bearer {TOKEN[:-1]}", "differs from that of this service"),
        (f"Bearer {TOKEN}x", "differs from that of this service"),
        (f"Bearer {TOKEN.upper()}", "differs from that of this service"),
        ("Bearer \udcff\N{SNOWMAN}", "differs from that of this service"),
    ],
)
def test_who_may_call(shown: str | None, reason: str | None) -> None:
    refusal = Security(token=TOKEN).refusal(shown)
    if reason is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert reason in refusal
        assert TOKEN not in refusal


def test_a_server_with_a_ca_needs_a_certificate(some: Papers) -> None:
    with pytest.raises(ConfigError, match="a server needs TORCHFT_TLS_CERT and TORCHFT_TLS_KEY"):
        some.only_ca.server_credentials()
    assert some.only_ca.channel_credentials() is not None
