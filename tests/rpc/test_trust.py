"""Tests who may talk to a service: TLS, mutual TLS and the token, on every kind of call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.bounds import raises_in_time
from support.papers import LONG_AGO, TOKEN, Papers, authority, papers, variables
from support.running import (
    Process,
    attach,
    command,
    eventually,
    lighthouse_process,
    line_to,
    manager_process,
)

from torchft_svc.coordination import LighthouseClient, LighthouseServer, ManagerClient
from torchft_svc.errors import TorchFTError, Unauthorized, Unreachable
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.security import PLAIN, Security

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=10)
OTHER_TOKEN = "a-token-of-another-cluster"  # noqa: S105 - of these tests


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return papers(tmp_path_factory.mktemp("papers"))


def complaint(address: str, client: Security) -> TorchFTError | None:
    """The error of a client that beats; None if the lighthouse accepts it."""
    with LighthouseClient(address, TIMEOUT, security=client) as asking:
        try:
            asking.heartbeat("group", TIMEOUT)
        except TorchFTError as error:
            return error
    return None


def test_tls_without_client_certificates(some: Papers) -> None:
    with LighthouseServer("127.0.0.1:0", 1, security=some.without_ca) as server:
        address = server.address()
        assert complaint(address, some.only_ca) is None
        assert complaint(address, some.local) is None
        error = complaint(address, PLAIN)
        assert isinstance(error, Unreachable)
        assert "it may require TLS" in str(error)


def test_mutual_tls(some: Papers) -> None:
    with LighthouseServer("127.0.0.1:0", 1, security=some.local) as server:
        address = server.address()
        assert complaint(address, some.local) is None
        assert complaint(address, some.ours.issue("any.name.at.all")) is None
        stranger = replace(some.theirs.issue("127.0.0.1"), ca_file=some.ours.ca_file)
        expired = some.ours.issue("127.0.0.1", not_after=LONG_AGO)
        for client in (some.only_ca, stranger, expired):
            error = complaint(address, client)
            assert isinstance(error, Unreachable)
            assert "a certificate that its CA has signed" in str(error)


def test_a_client_checks_the_server(some: Papers) -> None:
    for server, client, reason in (
        (some.local, Security(ca_file=some.theirs.ca_file), "set TORCHFT_TLS_CA to the CA"),
        (some.ours.issue("elsewhere.example"), some.local, "is not for this host"),
        (some.ours.issue("127.0.0.1", not_after=LONG_AGO), some.local, "renew it"),
        (some.local, replace(some.local, ca_file=None), "set TORCHFT_TLS_CA to the CA"),
        (PLAIN, some.local, "it does not use TLS, but TLS is set here"),
    ):
        with LighthouseServer("127.0.0.1:0", 1, security=server) as running:
            error = complaint(running.address(), client)
            assert isinstance(error, Unauthorized), error
            assert reason in str(error)
            assert "lighthouse at http://127.0.0.1:" in str(error)


@pytest.fixture
def guarded(some: Papers) -> Iterator[Process]:
    """A lighthouse that requires a token, without TLS."""
    with Process(
        "lighthouse_server", "--bind=127.0.0.1:0", "--join-timeout-ms=100", TORCHFT_TOKEN=TOKEN
    ) as lighthouse:
        yield lighthouse


WRONG = pytest.mark.parametrize(
    ("client", "reason"),
    [
        (PLAIN, "this service requires a token: set TORCHFT_TOKEN"),
        (Security(token=OTHER_TOKEN), "the token differs from that of this service"),
    ],
    ids=["none", "wrong"],
)


@WRONG
def test_a_lighthouse_refuses_who_does_not_know_the_token(
    guarded: Process, client: Security, reason: str
) -> None:
    with LighthouseClient(guarded.address, TIMEOUT, security=client) as asking:
        for ask in (
            lambda: asking.quorum("group", TIMEOUT),
            lambda: asking.heartbeat("group"),
            lambda: asking.leave("group"),
        ):
            with pytest.raises(Unauthorized, match=reason):
                ask()
    with line_to(guarded.address) as line:
        session = line.channel.stream_stream(
            "/torchft.LighthouseService/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionNews.FromString,
        )
        # Not a word is read: the refusal comes before the hello.
        said_nothing = threading.Event()
        silent = iter(lambda: said_nothing.wait(30) or None, None)
        with pytest.raises(grpc.RpcError) as caught:
            next(session(silent, metadata=client.metadata, timeout=10))
        said_nothing.set()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert reason in caught.value.details()


def test_the_right_token_is_taken(guarded: Process) -> None:
    with LighthouseClient(guarded.address, TIMEOUT, security=Security(token=TOKEN)) as client:
        assert client.quorum("group", TIMEOUT).participants[0].replica_id == "group"


def test_health_is_for_all_and_reflection_is_not(guarded: Process) -> None:
    with line_to(guarded.address) as line:
        health = health_pb2_grpc.HealthStub(line.channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(line.channel)
        question = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with pytest.raises(grpc.RpcError) as caught:
            next(reflection.ServerReflectionInfo(iter(question), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known = Security(token=TOKEN).metadata
        answers = reflection.ServerReflectionInfo(iter(question), metadata=known, timeout=10)
        assert next(answers).list_services_response.service


def test_the_log_names_a_refused_peer_once(guarded: Process) -> None:
    for _ in range(50):
        assert isinstance(complaint(guarded.address, PLAIN), Unauthorized)
    eventually(lambda: "refused" in guarded.errors())
    lines = [line for line in guarded.errors().splitlines() if "refused" in line]
    assert len(lines) == 1, lines
    assert "'/torchft.LighthouseService/Heartbeat' from ipv4:127.0.0.1" in lines[0]
    warnings = [line for line in guarded.errors().splitlines() if "travels unencrypted" in line]
    assert len(warnings) == 1
    assert TOKEN not in guarded.errors()


@WRONG
def test_a_manager_refuses_who_does_not_know_the_token(
    guarded: Process, client: Security, reason: str
) -> None:
    with (
        manager_process(guarded.address, TORCHFT_TOKEN=TOKEN) as manager,
        ManagerClient(manager.address, TIMEOUT, security=client) as worker,
    ):
        for ask in (
            lambda: worker._quorum(0, 0, "", False, TIMEOUT),
            lambda: worker._checkpoint_metadata(0, TIMEOUT),
            lambda: worker.should_commit(0, 0, True, TIMEOUT),
            lambda: worker.kill("by nobody"),
        ):
            with pytest.raises(Unauthorized, match=reason):
                ask()
        with line_to(manager.address) as line:
            attach = line.channel.stream_stream("/torchft.ManagerService/Attach")
            with pytest.raises(grpc.RpcError) as caught:
                next(attach(iter([b""]), metadata=client.metadata, timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert manager.is_running()
        with ManagerClient(manager.address, TIMEOUT, security=Security(token=TOKEN)) as known:
            assert known._quorum(0, 0, "", False, TIMEOUT).replica_world_size == 1
            known.kill("by somebody who knows the token")
        assert manager.wait() == 1


def test_no_call_of_either_service_is_open(guarded: Process) -> None:
    """Whatever the wire knows, orders such as Kill and AcceptLoss, and streams among it."""
    with manager_process(guarded.address, TORCHFT_TOKEN=TOKEN) as manager:
        for service, address in (
            ("LighthouseService", guarded.address),
            ("ManagerService", manager.address),
        ):
            with line_to(address) as line:
                for method in pb.DESCRIPTOR.services_by_name[service].methods:
                    call = line.channel.stream_stream(f"/torchft.{service}/{method.name}")
                    for client in (PLAIN, Security(token=OTHER_TOKEN)):
                        with pytest.raises(grpc.RpcError) as caught:
                            next(call(iter([b""]), metadata=client.metadata, timeout=10))
                        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        assert manager.is_running()


def test_a_manager_wants_certificates_too(some: Papers) -> None:
    settings = variables(some.local)
    with (
        lighthouse_process(**settings) as lighthouse,
        manager_process(lighthouse.address, **settings) as manager,
    ):
        for client in (
            some.only_ca,
            replace(some.theirs.issue("127.0.0.1"), ca_file=some.ours.ca_file),
        ):
            with (
                ManagerClient(manager.address, TIMEOUT, security=client) as stranger,
                pytest.raises(Unreachable, match="a certificate that its CA has signed"),
            ):
                stranger.kill("by nobody")
        with ManagerClient(manager.address, TIMEOUT, security=some.local) as worker:
            assert worker._quorum(0, 0, "", False, TIMEOUT).replica_world_size == 1


def test_a_manager_that_the_lighthouse_refuses_informs_its_workers_at_once(
    guarded: Process, some: Papers
) -> None:
    with LighthouseServer("127.0.0.1:0", 1, security=some.local) as tls:
        for lighthouse, settings, reason in (
            (guarded.address, {"TORCHFT_TOKEN": OTHER_TOKEN}, "from that of this service: set"),
            (guarded.address, {}, "this service requires a token"),
            (
                tls.address(),
                variables(Security(ca_file=some.theirs.ca_file))
                | variables(some.theirs.issue("127.0.0.1")),
                "set TORCHFT_TLS_CA to the CA that signed it",
            ),
        ):
            own = Security(
                cert_file=settings.get("TORCHFT_TLS_CERT"),
                key_file=settings.get("TORCHFT_TLS_KEY"),
                ca_file=settings.get("TORCHFT_TLS_CA"),
                token=settings.get("TORCHFT_TOKEN"),
            )
            with (
                manager_process(lighthouse, "--connect-timeout-ms=60000", **settings) as manager,
                ManagerClient(manager.address, TIMEOUT, security=own) as worker,
                pytest.raises(Unauthorized, match=reason) as caught,
            ):
                worker._quorum(0, 0, "", False, 2 * TIMEOUT)
            assert "lighthouse at " in str(caught.value)


def test_a_manager_whose_certificate_is_not_taken_says_so_within_the_connect_timeout(
    some: Papers,
) -> None:
    stranger = replace(some.theirs.issue("127.0.0.1"), ca_file=some.ours.ca_file)
    with (
        LighthouseServer("127.0.0.1:0", 1, security=some.local) as server,
        manager_process(
            server.address(), "--connect-timeout-ms=500", **variables(stranger)
        ) as manager,
        ManagerClient(
            manager.address, TIMEOUT, security=replace(some.local, ca_file=some.theirs.ca_file)
        ) as worker,
        raises_in_time(Unreachable, "a certificate that its CA has signed") as caught,
    ):
        worker._quorum(0, 0, "", False, TIMEOUT)
    assert "lighthouse at " in str(caught.value)


def test_the_flags(some: Papers, tmp_path_factory: pytest.TempPathFactory) -> None:
    token_file = tmp_path_factory.mktemp("flags") / "token"
    token_file.write_text(f"{TOKEN}\n")
    flags = [
        f"--tls-cert={some.local.cert_file}",
        f"--tls-key={some.local.key_file}",
        f"--tls-ca={some.local.ca_file}",
        f"--token-file={token_file}",
    ]
    known = replace(some.local, token=TOKEN)
    with (
        lighthouse_process(*flags) as lighthouse,
        manager_process(lighthouse.address, *flags) as manager,
        ManagerClient(manager.address, TIMEOUT, security=known) as worker,
    ):
        assert worker._quorum(0, 0, "", False, TIMEOUT).replica_world_size == 1
        assert isinstance(complaint(lighthouse.address, some.local), Unauthorized)
        assert isinstance(complaint(lighthouse.address, Security(token=TOKEN)), Unreachable)
        assert "unencrypted" not in lighthouse.errors()


@pytest.mark.parametrize(
    ("flags", "settings", "sentence"),
    [
        (["--tls-cert=/nowhere.pem"], {}, "TORCHFT_TLS_KEY is needed with it"),
        (["--token-file=/nowhere"], {}, "TORCHFT_TOKEN_FILE='/nowhere' cannot work"),
        (["--token-file", ""], {}, "Invalid value for '--token-file': '' is empty: give it a"),
        (["--tls-cert", "", "--tls-key", ""], {}, "Invalid value for '--tls-"),
        ([], {"TORCHFT_TOKEN": ""}, "TORCHFT_TOKEN='' cannot work: it is empty"),
        ([], {"TORCHFT_TLS_CA": ""}, "TORCHFT_TLS_CA='' cannot work: it is empty"),
        ([], {"TORCHFT_TOKEN": "short"}, "TORCHFT_TOKEN='...' cannot work: it has 5 characters"),
    ],
)
@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("lighthouse_server", []),
        (
            "manager_server",
            ["--lighthouse=127.0.0.1:1", "--replica-name=g", "--store-address=127.0.0.1:1"],
        ),
    ],
)
def test_a_mistake_in_the_settings_ends_a_service_at_once(
    module: str, needed: list[str], flags: list[str], settings: dict[str, str], sentence: str
) -> None:
    result = command(module, *needed, *flags, **settings)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_ca_alone_does_not_make_a_server(some: Papers) -> None:
    result = command("lighthouse_server", "--bind=127.0.0.1:0", f"--tls-ca={some.ours.ca_file}")
    assert result.returncode == 2
    assert "a server needs TORCHFT_TLS_CERT and TORCHFT_TLS_KEY" in result.stderr


def test_files_that_are_being_renewed_are_not_missed(tmp_path: Path) -> None:
    """Whoever opens a connection just then, or begins to serve, goes by what it has read before."""
    held = authority(tmp_path / "own").issue("127.0.0.1")
    for name in (held.cert_file, held.key_file, held.ca_file):
        Path(str(name)).unlink()
    with LighthouseServer("127.0.0.1:0", 1, security=held) as server:
        assert complaint(server.address(), held) is None


def test_a_client_that_follows_a_manager_goes_on_with_tls(some: Papers) -> None:
    known = replace(some.local, token=TOKEN)
    with (
        LighthouseServer("127.0.0.1:0", 1, 100, security=known) as server,
        manager_process(server.address(), name="one", **variables(known)) as first,
        manager_process(server.address(), name="two", **variables(known)) as second,
        ManagerClient(first.address, TIMEOUT, security=known) as worker,
    ):
        worker._move(second.address)
        assert worker._quorum(0, 0, "", False, TIMEOUT).replica_ids[0].startswith("two")


def test_calls_over_tls_carry_the_token(some: Papers) -> None:
    known = replace(some.local, token=TOKEN)
    with (
        LighthouseServer("127.0.0.1:0", 1, security=known) as server,
        line_to(server.address(), known) as line,
    ):
        line.beat("one")


def test_news_come_to_who_knows_the_token(some: Papers) -> None:
    known = replace(some.local, token=TOKEN)
    lost = threading.Event()
    with (
        LighthouseServer("127.0.0.1:0", 2, security=known) as server,
        manager_process(server.address(), name="one", **variables(known)) as stays,
        manager_process(server.address(), name="two", **variables(known)) as dies,
        ManagerClient(stays.address, TIMEOUT, security=known) as worker,
        ManagerClient(dies.address, TIMEOUT, security=known) as other,
        ThreadPoolExecutor() as pool,
    ):
        attach(worker, 0, on_loss=lambda *_: lost.set())
        asked = pool.submit(other._quorum, 0, 0, "", False, TIMEOUT)
        assert worker._quorum(0, 0, "", False, TIMEOUT).replica_world_size == 2
        asked.result()
        dies.kill()
        assert lost.wait(10)
