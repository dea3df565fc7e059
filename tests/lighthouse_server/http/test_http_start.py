"""Tests how the dashboard is switched on, and that a lighthouse needs none of it."""

from __future__ import annotations

import signal
import socket
import ssl
import sys
from pathlib import Path

import httpx
import pytest
import trustme
from support.etcd_server import etcd_server, needs_etcd
from support.programs import Program
from support.running import eventually, run_fresh, steady_address

from torchft_svc.coordination import LighthouseServer
from torchft_svc.errors import AddressError
from torchft_svc.rpc.security import Security

pytestmark = pytest.mark.processes
COMMAND = [sys.executable, "-m", "torchft_svc.lighthouse_server", "--bind=127.0.0.1:0"]


def test_without_the_flag_it_says_how_to_switch_it_on() -> None:
    with Program(COMMAND) as program:
        program.wait_for("lighthouse listening on ")
        assert "--http-bind" in program.wait_for("dashboard off")


def test_with_the_flag_it_says_where_it_is_and_ends_with_the_lighthouse() -> None:
    with Program([*COMMAND, "--http-bind=127.0.0.1:0"]) as program:
        url = program.wait_for("dashboard on ").rpartition(" ")[2]
        with (
            httpx.stream("GET", f"{url}/api/v1/events", trust_env=False) as stream,
            httpx.Client(base_url=url, trust_env=False) as idle,
        ):
            lines = stream.iter_lines()
            assert next(lines) == "event: document"
            assert idle.get("/readyz").status_code == 200
            program.signal(signal.SIGTERM)
            list(lines)
        assert program.wait() == 0


def test_it_is_not_imported_without_the_flag() -> None:
    script = (
        "import sys, torchft_svc.lighthouse_server.cli, torchft_svc.coordination.lighthouse_server;"
        "print([name for name in ('starlette', 'uvicorn', 'anyio') if name in sys.modules])"
    )
    assert run_fresh([sys.executable, "-c", script], 60).stdout.strip() == "[]"


def test_without_the_extra_a_sentence_names_it() -> None:
    script = (
        "import sys; sys.modules['starlette'] = None\n"
        "from torchft_svc.lighthouse_server.cli import main\n"
        "main(['--bind=127.0.0.1:0', '--http-bind=127.0.0.1:0'])"
    )
    done = run_fresh([sys.executable, "-c", script], 60)
    assert done.returncode == 2
    assert "it needs starlette: pip install 'torchft-svc[dashboard]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--http-bind=localhost"], "has no port"),
        (["--http-bind="], "is empty"),
        (["--http-bind=127.0.0.1:0", "--http-host=http://x"], "without port or scheme"),
        (["--http-bind=192.0.2.1:80"], "cannot be bound"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], why: str) -> None:
    done = run_fresh([*COMMAND, *flags], 60)
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressError, match="cannot be bound"):
            LighthouseServer("127.0.0.1:0", 1, http_bind=address)
    with LighthouseServer("127.0.0.1:0", 1, http_bind=address):
        pass  # and the one before has left nothing behind


def test_other_names_are_given_by_a_flag() -> None:
    flags = ["--http-bind=127.0.0.1:0", "--http-host=jobs.example", "--http-host=*.lab.example"]
    with Program([*COMMAND, *flags]) as program:
        url = program.wait_for("dashboard on ").rpartition(" ")[2]
        expected = {"jobs.example": 200, "a.lab.example": 200, "lab.example": 400, "a.b": 400}
        for host, status in expected.items():
            response = httpx.get(f"{url}/healthz", headers={"host": host}, trust_env=False)
            assert response.status_code == status, host


def test_it_speaks_tls_as_the_other_port_does(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca, cert, key = (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    own = authority.issue_cert("127.0.0.1")
    own.cert_chain_pems[0].write_to_path(cert)
    own.private_key_pem.write_to_path(key)
    files = {"cert_file": str(cert), "key_file": str(key)}
    context = ssl.create_default_context(cafile=str(ca))
    security = Security(**files)
    with LighthouseServer("127.0.0.1:0", 1, security=security, http_bind="127.0.0.1:0") as server:
        url = server.http_address()
        assert url.startswith("https://")
        with httpx.Client(verify=context, trust_env=False) as client:
            assert client.get(f"{url}/readyz").status_code == 200
        plain = url.replace("https", "http")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain}/readyz", trust_env=False)
    mutual = Security(**files, ca_file=str(ca))
    with LighthouseServer("127.0.0.1:0", 1, security=mutual, http_bind="127.0.0.1:0") as server:
        url = server.http_address()
        with (
            httpx.Client(verify=context, trust_env=False) as stranger,
            pytest.raises(httpx.TransportError),
        ):
            stranger.get(f"{url}/readyz")
        context.load_cert_chain(cert, key)
        with httpx.Client(verify=context, trust_env=False) as client:
            assert client.get(f"{url}/readyz").status_code == 200


@needs_etcd
def test_only_the_leader_is_ready_and_the_other_one_names_it(tmp_path: Path) -> None:
    advertised = [steady_address() for _ in range(2)]
    with etcd_server(tmp_path) as etcd:
        election = [f"--leader-election=etcd://{etcd.address}/http", "--lease-ttl-s=2"]
        flags = [*election, "--http-bind=127.0.0.1:0"]
        first, second = ([*COMMAND[:-1], f"--bind={each}", *flags] for each in advertised)
        with Program(first) as leading:
            leader = leading.wait_for("dashboard on ").rpartition(" ")[2]
            eventually(lambda: httpx.get(f"{leader}/readyz", trust_env=False).status_code == 200)
            with (
                Program(second) as following,
                httpx.Client(trust_env=False) as client,
            ):
                other = following.wait_for("dashboard on ").rpartition(" ")[2]

                def error() -> dict[str, str]:
                    response = client.get(f"{other}/api/v1/jobs")
                    assert response.status_code == 503
                    found: dict[str, str] = response.json()["error"]
                    return found

                assert client.get(f"{other}/healthz").status_code == 200
                assert client.get(f"{other}/readyz").status_code == 503
                assert error()["code"] == "not_leader"
                eventually(lambda: error()["leader"] == advertised[0])
                assert client.get(f"{other}/api/v1/about").json()["leader"] == advertised[0]
                with client.stream("GET", f"{leader}/api/v1/events") as events:
                    leading.signal(signal.SIGTERM)
                    list(events.iter_lines())
                eventually(lambda: client.get(f"{other}/readyz").status_code == 200)
