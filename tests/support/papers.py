"""Certificates and tokens for tests: what a cluster's operator would hand out."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import trustme

from torchft_svc.rpc.security import Security

TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - of these tests
LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True)
class Authority:
    """A CA of its own, which writes what it signs into a folder."""

    folder: Path
    ca: trustme.CA

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(
        self,
        *hosts: str,
        not_after: datetime.datetime | None = None,
        common_name: str | None = None,
    ) -> Security:
        """TLS for a party with these names, which trusts this CA."""
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        made = self.ca.issue_cert(*hosts, not_after=not_after, common_name=common_name)
        cert, key = folder / "cert.pem", folder / "key.pem"
        for number, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(str(cert), append=number > 0)
        made.private_key_pem.write_to_path(str(key))
        return Security(cert_file=str(cert), key_file=str(key), ca_file=self.ca_file)


def authority(folder: Path) -> Authority:
    """A new CA whose files are in ``folder``."""
    folder.mkdir()
    made = Authority(folder, trustme.CA())
    made.ca.cert_pem.write_to_path(made.ca_file)
    return made


@dataclass(frozen=True)
class Papers:
    """What the tests choose from; ``local`` are for this machine's loopback address."""

    ours: Authority
    theirs: Authority
    local: Security

    @property
    def without_ca(self) -> Security:
        return replace(self.local, ca_file=None)

    @property
    def only_ca(self) -> Security:
        return Security(ca_file=self.ours.ca_file)


def papers(folder: Path) -> Papers:
    ours, theirs = authority(folder / "ours"), authority(folder / "theirs")
    return Papers(ours, theirs, ours.issue("127.0.0.1", "localhost"))


def variables(security: Security) -> dict[str, str]:
    """``security`` as the environment of a process."""
    return {name: value for name, value in security.variables().items() if value is not None}
