"""An etcd with TLS and users: who comes in, and what error those get who do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.etcd_server import EtcdServer, etcd_server, needs_etcd
from support.papers import Papers, papers
from support.running import eventually, lighthouse_process

from torchft_svc.env import Environment
from torchft_svc.errors import AddressError, ConfigError, Unauthorized, Unreachable, UsageError
from torchft_svc.lighthouse_server.etcd import Etcd
from torchft_svc.lighthouse_server.etcd_access import EtcdAccess, resolve_etcd_access

PASSWORD = "of-the-lighthouses"  # noqa: S105 - of these tests
SOON_S = 20.0  # on a busy machine


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def guarded(some: Papers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """An etcd that wants a certificate and a password."""
    with etcd_server(tmp_path_factory.mktemp("etcd"), security=some.local) as server:
        server.add_user("nobody", PASSWORD)
        server.enable_users(lighthouse=PASSWORD)
        yield server


@pytest.fixture
def access(some: Papers, guarded: EtcdServer) -> EtcdAccess:
    """The access that is right for the guarded etcd."""
    return EtcdAccess(
        url=f"etcds://{guarded.address}",
        ca_file=some.local.ca_file,
        cert_file=some.local.cert_file,
        key_file=some.local.key_file,
        user="lighthouse",
        password=PASSWORD,
    )


def complaint(access: EtcdAccess) -> Exception | None:
    """The error that a lighthouse gets that campaigns; None: it is elected."""

    async def campaign() -> None:
        etcd = Etcd(access)
        try:
            lease, _ = await etcd.grant(60, SOON_S)
            await asyncio.wait_for(etcd.campaign(lease, "here:1"), SOON_S)
            assert await etcd.leader(SOON_S) == (lease, "here:1")
            assert await etcd.renew(lease, SOON_S) == 60
            await etcd.revoke(lease, SOON_S)
        finally:
            await etcd.close()

    try:
        asyncio.run(campaign())
    except (Unauthorized, Unreachable) as error:
        return error
    return None


@needs_etcd
@pytest.mark.processes
def test_with_the_right_papers_and_password_it_is_elected(access: EtcdAccess) -> None:
    assert complaint(access) is None


@needs_etcd
@pytest.mark.processes
def test_a_certificate_can_name_the_user(access: EtcdAccess, some: Papers) -> None:
    def named(user: str) -> EtcdAccess:
        own = some.ours.issue(f"{user}.example", common_name=user)
        return replace(
            access, user=None, password=None, cert_file=own.cert_file, key_file=own.key_file
        )

    assert complaint(named("lighthouse")) is None
    error = complaint(named("nobody"))
    assert isinstance(error, Unauthorized)
    assert "the user that the certificate names may not do that: grant it a role" in str(error)


@needs_etcd
@pytest.mark.processes
def test_who_is_not_trusted_is_informed_what_to_set(
    access: EtcdAccess, some: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    plain = EtcdAccess(url=access.url.replace("etcds", "etcd"), user="a", password=PASSWORD)
    for wrong, kind, reason in (
        (replace(access, ca_file=some.theirs.ca_file), Unauthorized, "set TORCHFT_ETCD_CA to the"),
        (replace(access, ca_file=None), Unauthorized, "set TORCHFT_ETCD_CA to the"),
        (
            replace(access, cert_file=None, key_file=None),
            Unreachable,
            "set TORCHFT_ETCD_CA, TORCHFT_ETCD_CERT and TORCHFT_ETCD_KEY to match",
        ),
        (plain, Unreachable, "it may require TLS; use etcds://"),
        (
            replace(access, password="wrong"),  # noqa: S106
            Unauthorized,
            "it does not accept user 'lighthouse' with this password: set TORCHFT_ETCD_USER and",
        ),
        (
            replace(access, user="nobody"),
            Unauthorized,
            "reads and writes the keys below 'torchft/'",
        ),
        (
            replace(access, url=f"{access.url}/elsewhere"),
            Unauthorized,
            "user 'lighthouse' may not do that: grant it a role that reads and writes the keys "
            "below 'elsewhere/'",
        ),
    ):
        error = complaint(wrong)
        assert isinstance(error, kind), error
        assert reason in str(error)
        assert f"etcd at {access.addresses[0]}" in str(error)
    assert "the password for etcd travels unencrypted" in caplog.text
    assert PASSWORD not in caplog.text


@needs_etcd
@pytest.mark.processes
def test_a_lighthouse_takes_all_that_from_its_command_line_and_environment(
    access: EtcdAccess, some: Papers, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    flags = (
        f"--leader-election={access.url}",
        f"--etcd-cert={access.cert_file}",
        f"--etcd-key={access.key_file}",
        "--etcd-user=lighthouse",
        f"--etcd-password-file={file}",
    )
    with (
        lighthouse_process(*flags, TORCHFT_ETCD_CA=str(access.ca_file)) as right,
        lighthouse_process(*flags, f"--etcd-ca={some.theirs.ca_file}") as wrong,
    ):
        eventually(lambda: "this lighthouse leads now" in right.errors(), SOON_S)
        eventually(lambda: "set TORCHFT_ETCD_CA to the CA that signed it" in wrong.errors(), SOON_S)
        assert wrong.is_running()
        assert PASSWORD not in right.errors()


@needs_etcd
@pytest.mark.processes
def test_a_token_that_is_not_known_any_more_is_replaced(tmp_path: Path) -> None:
    async def ask(etcd: Etcd) -> None:
        assert await etcd.leader(SOON_S) == (0, "")

    async def story(server: EtcdServer) -> None:
        url = f"etcd://{server.address}"
        etcd = Etcd(EtcdAccess(url=url, user="lighthouse", password=PASSWORD))
        nobody = Etcd(EtcdAccess(url=url))
        try:
            await ask(etcd)  # nobody is asked for a password yet
            await asyncio.to_thread(server.enable_users, lighthouse=PASSWORD)
            await ask(etcd)
            await asyncio.to_thread(server.change_password, "lighthouse", PASSWORD)
            await ask(etcd)
            with pytest.raises(Unauthorized, match="it requires a user: set TORCHFT_ETCD_USER"):
                await ask(nobody)
        finally:
            await etcd.close()
            await nobody.close()

    with etcd_server(tmp_path) as server:
        asyncio.run(story(server))


@pytest.mark.parametrize(
    ("url", "addresses", "prefix", "dials_tls"),
    [
        ("etcd://a:1", ("a:1",), "torchft", False),
        ("etcds://a:1,[::1]:2/jobs", ("a:1", "[::1]:2"), "jobs", True),
        ("etcds://a:1/all-jobs.2", ("a:1",), "all-jobs.2", True),
    ],
)
def test_what_a_url_says(
    url: str, addresses: tuple[str, ...], prefix: str, dials_tls: bool
) -> None:
    access = EtcdAccess(url=url)
    assert (access.addresses, access.prefix, access.dials_tls) == (addresses, prefix, dials_tls)
    assert (access.channel_credentials() is not None) == dials_tls


@pytest.mark.parametrize(
    ("wrong", "kind", "sentence"),
    [
        ({"url": "a:1"}, ConfigError, "use etcd://host:2379"),
        ({"url": "https://a:1"}, ConfigError, "or etcds://... for TLS"),
        ({"url": "etcd://a:1/"}, ConfigError, "use etcd://host:2379"),
        ({"url": "etcd://a:1/x/"}, ConfigError, "the prefix is one word"),
        ({"url": "etcd://a:1//x"}, ConfigError, "the prefix is one word"),
        ({"url": "etcd://a:1/x/y"}, ConfigError, "the prefix is one word"),
        ({"url": "etcd://"}, AddressError, "has no port"),
        ({"url": "etcd://a:1,a:1"}, AddressError, "names one host and port twice"),
        ({"url": "etcd://a:1", "ca_file": "{ca}"}, ConfigError, "it is for TLS: use etcds://"),
        ({"url": "etcds://a:1", "ca_file": "/none"}, ConfigError, "TORCHFT_ETCD_CA='/none' cannot"),
        ({"url": "etcds://a:1", "cert_file": "/c"}, ConfigError, "TORCHFT_ETCD_KEY is needed"),
        ({"url": "etcds://a:1", "ca_file": ""}, ConfigError, "TORCHFT_ETCD_CA='' cannot work"),
        ({"url": "etcd://a:1", "user": ""}, ConfigError, "TORCHFT_ETCD_USER='' cannot work"),
        ({"url": "etcd://a:1", "password": ""}, ConfigError, "TORCHFT_ETCD_PASSWORD='' cannot"),
        ({"url": "etcd://a:1", "user": "x"}, ConfigError, "TORCHFT_ETCD_PASSWORD is needed"),
        ({"url": "etcd://a:1", "password": PASSWORD}, ConfigError, "TORCHFT_ETCD_USER is needed"),
    ],
)
def test_what_cannot_work_is_refused(
    some: Papers, wrong: dict[str, str], kind: type[UsageError], sentence: str
) -> None:
    wrong = {name: value.replace("{ca}", some.ours.ca_file) for name, value in wrong.items()}
    with pytest.raises(kind) as caught:
        EtcdAccess(**wrong)
    assert sentence in str(caught.value)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("name", ["ca_file", "user", "password_file"])
def test_an_argument_that_is_given_but_empty_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="='' cannot work: it is empty"):
        resolve_etcd_access(Environment({}), "etcds://a:1", **{name: ""})


def test_argument_beats_environment(some: Papers, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("in-a-file\n")
    environment = Environment(
        {
            "TORCHFT_ETCD_CA": some.theirs.ca_file,
            "TORCHFT_ETCD_CERT": str(some.local.cert_file),
            "TORCHFT_ETCD_KEY": str(some.local.key_file),
            "TORCHFT_ETCD_USER": "one",
            "TORCHFT_ETCD_PASSWORD": PASSWORD,
        }
    )
    expected = EtcdAccess(
        url="etcds://a:1",
        ca_file=some.theirs.ca_file,
        cert_file=some.local.cert_file,
        key_file=some.local.key_file,
        user="one",
        password=PASSWORD,
    )
    assert resolve_etcd_access(environment, "etcds://a:1") == expected
    assert PASSWORD not in repr(expected)
    assert resolve_etcd_access(
        environment,
        "etcds://a:1",
        ca_file=some.ours.ca_file,
        user="two",
        password_file=str(file),
    ) == replace(expected, ca_file=some.ours.ca_file, user="two", password="in-a-file")  # noqa: S106
