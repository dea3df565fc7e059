"""Starts a real etcd, with or without TLS and users."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from support.running import eventually, steady_address
from torchft_svc.rpc.security import PLAIN, Security

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="needs etcd (Debian: apt-get install etcd-server)"
)
START_S = 20.0
ROOT_PASSWORD = "only-of-this-server"  # noqa: S105 - of these tests


class EtcdServer:
    """One that runs at ``address``."""

    def __init__(self, address: str, pid: int, security: Security) -> None:
        self.address = address
        self._pid = pid
        self._security = security
        self._root_token = ""

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def enable_users(self, **passwords: str) -> None:
        """Require a password from now on; all of these users may use keys below ``torchft/``."""
        self._administer("role/add", name="root")
        self._administer("role/add", name="elector")
        permission = {
            "permType": "READWRITE",
            "key": _key("torchft/"),
            "range_end": _key("torchft0"),
        }
        self._administer("role/grant", name="elector", perm=permission)
        for user, password in {"root": ROOT_PASSWORD, **passwords}.items():
            self.add_user(user, password)
            self._administer("user/grant", user=user, role="root" if user == "root" else "elector")
        self._administer("enable")
        answer = self._administer("authenticate", name="root", password=ROOT_PASSWORD)
        self._root_token = answer["token"]

    def add_user(self, user: str, password: str) -> None:
        """One who may do nothing."""
        self._administer("user/add", name=user, password=password)

    def change_password(self, user: str, password: str) -> None:
        """Change the password of ``user``, whose tokens are worth nothing after that."""
        self._administer("user/changepw", name=user, password=password)

    def forget(self, prefix: str) -> None:
        """Delete all keys below ``prefix``; the leases live on."""
        self._post("kv/deleterange", key=_key(f"{prefix}/"), range_end=_key(f"{prefix}0"))

    def serves(self) -> bool:
        """Whether it answers; its port is open some time before."""
        try:
            return self._request("GET", "/health")[0] == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False

    def _administer(self, what: str, **body: Any) -> Any:
        return self._post(f"auth/{what}", **body)

    def _post(self, what: str, **body: Any) -> Any:
        status, answer = self._request("POST", f"/v3/{what}", json.dumps(body))
        assert status == http.HTTPStatus.OK, answer
        return json.loads(answer)

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        context = self._security.client_context()
        with contextlib.closing(
            http.client.HTTPConnection(self.address, timeout=START_S)
            if context is None
            else http.client.HTTPSConnection(self.address, timeout=START_S, context=context)
        ) as connection:
            headers = {"Authorization": self._root_token} if self._root_token else {}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()


@contextlib.contextmanager
def etcd_server(
    folder: Path,
    *,
    address: str | None = None,
    peers: str | None = None,
    security: Security = PLAIN,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[EtcdServer]:
    """``folder`` is what it remembers over a restart at the same addresses. With a certificate it
    wants one from every client, too. ``flags``: further ones."""
    address, peers = address or steady_address(), peers or steady_address()
    scheme = "https" if security.serves_tls else "http"
    all_flags = {
        "data-dir": folder,
        "listen-client-urls": f"{scheme}://{address}",
        "advertise-client-urls": f"{scheme}://{address}",
        "listen-peer-urls": f"http://{peers}",
        "initial-advertise-peer-urls": f"http://{peers}",
        "initial-cluster": f"default=http://{peers}",
        "log-level": "error",
        **flags,
    }
    if security.serves_tls:
        all_flags |= {
            "cert-file": security.cert_file,
            "key-file": security.key_file,
            "trusted-ca-file": security.ca_file,
            "client-cert-auth": "true",
        }
    command = [str(ETCD), *(f"--{name}={value}" for name, value in all_flags.items())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            started = EtcdServer(address, server.pid, security)
            eventually(started.serves, START_S)
            yield started
        finally:
            server.kill()


def _key(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
