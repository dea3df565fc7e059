"""Checks the lighthouses of a trainer: names, ports, TLS, token, leader, clock and job."""

from __future__ import annotations

import contextlib
import difflib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from google.protobuf.message import Message

from torchft_svc.core.limits import check_name
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.doctor.findings import (
    Diagnosis,
    Running,
    found_nothing,
    found_ok,
    found_problem,
    found_warning,
)
from torchft_svc.doctor.network import CERTIFICATE_WARNING_S
from torchft_svc.errors import (
    DeadlineExceeded,
    NotLeader,
    RequestRefused,
    TorchFTError,
    Unauthorized,
)
from torchft_svc.host.address import HostPort, parse_address
from torchft_svc.host.quantities import show_seconds
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.about import About, about_from_wire
from torchft_svc.rpc.codec_status import status_from_wire
from torchft_svc.rpc.commands import Answer, ask_one
from torchft_svc.rpc.security import Security
from torchft_svc.version import VERSION

# For a name, for a connection, and for each call: together below the deadline of a check.
NAME_S, CONNECT_S, CALL_S = 1.5, 1.0, 1.5
# Logs and incidents of machines are compared by their clocks.
MAX_CLOCK_DIFFERENCE_S = 1.0
_LIKE = 0.75  # how similar the name of a job is that was meant


@dataclass(kw_only=True)
class Look:
    """What was found at one address of the list, as far as that went.

    ``error``: what the lighthouse has answered instead of ``about``. ``clock_s``: how far its wall
    clock is ahead of ours, at most ``clock_error_s`` wrong. ``is_open``: it answers without our
    token.
    """

    address: str
    hosts: tuple[str, ...] = ()
    name_error: str = ""
    connect_s: float | None = None
    connect_error: str = ""
    error: TorchFTError | None = None
    about: About | None = None
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    is_open: bool = False
    certificate_ends_at: float | None = None
    jobs: list[JobStatus] = field(default_factory=list)

    @property
    def where(self) -> HostPort:
        return parse_address(self.address)

    @property
    def leads(self) -> bool:
        """Whether it takes requests; a release that has no `About` does."""
        return self.about is not None or isinstance(self.error, RequestRefused)


@dataclass(frozen=True, slots=True)
class LighthouseList:
    """A trainer's list of lighthouses, what protects its calls, and its job and group."""

    addresses: tuple[str, ...]
    security: Security
    job: str
    group: str | None

    def look_at_all(self) -> list[Look]:
        """Look at all addresses at once; none takes longer than the deadline of a check."""
        looks = [Look(address=address) for address in self.addresses]
        running = [Running(each.address, self._look_at, each) for each in looks]
        deadline = time.monotonic() + NAME_S + CONNECT_S + 2 * CALL_S
        for thread in running:
            with contextlib.suppress(TimeoutError):
                thread.wait(deadline - time.monotonic())
        return looks

    def _look_at(self, look: Look) -> None:
        where = look.where
        try:
            look.hosts = Running(look.address, resolve_host, where).wait(NAME_S)
        except TimeoutError:
            look.name_error = f"the name server does not answer within {NAME_S:g} s"
            return
        except (OSError, UnicodeError) as error:
            look.name_error = getattr(error, "strerror", None) or str(error)
            return
        began_at = time.monotonic()
        try:
            socket.create_connection((where.host, where.port), timeout=CONNECT_S).close()
        except TimeoutError:
            look.connect_error = f"no answer within {CONNECT_S:g} s"
            return
        except OSError as error:
            look.connect_error = error.strerror or str(error)
            return
        look.connect_s = time.monotonic() - began_at
        self._ask_about(look)
        look.certificate_ends_at = _certificate_end(where, self.security)
        if look.error is None and self.security.token is not None:
            look.is_open = self._answers_without_token(look)
        if look.leads:
            with contextlib.suppress(TorchFTError):
                request = pb.LighthouseStatusRequest()
                answer = self._ask(look, request, pb.LighthouseStatusResponse, self.security)
                look.jobs = status_from_wire(answer)

    def _ask_about(self, look: Look) -> None:
        asked_at, began_at = time.time(), time.monotonic()
        try:
            request = pb.LighthouseAboutRequest()
            answer = self._ask(look, request, pb.LighthouseAboutResponse, self.security)
        except TorchFTError as error:
            look.error = error
            return
        # Without a connection that is open already, most of this is spent before the answer.
        look.clock_error_s = time.monotonic() - began_at
        look.about = about_from_wire(answer)
        look.clock_s = look.about.unix_s - (asked_at + look.clock_error_s / 2)

    def _answers_without_token(self, look: Look) -> bool:
        try:
            request = pb.LighthouseAboutRequest()
            self._ask(look, request, pb.LighthouseAboutResponse, replace(self.security, token=None))
        except TorchFTError:
            return False
        return True

    def _ask(
        self, look: Look, request: Message, answer: type[Answer], security: Security
    ) -> Answer:
        # A name that cannot travel is another finding.
        job = DEFAULT_JOB if _flaw_of_job(self.job) else self.job
        return ask_one("lighthouse", look.address, security, job, request, answer, CALL_S)


def resolve_host(where: HostPort) -> tuple[str, ...]:
    """Return the IP addresses of a host, the preferred one first.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def _certificate_end(where: HostPort, security: Security) -> float | None:
    """Return when the certificate of a service ends (None: no TLS, or it is not trusted)."""
    context = security.client_context()
    if context is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        with (
            socket.create_connection((where.host, where.port), timeout=CONNECT_S) as plain,
            context.wrap_socket(plain, server_hostname=where.host) as wrapped,
        ):
            ends = (wrapped.getpeercert() or {}).get("notAfter")
        return ssl.cert_time_to_seconds(ends) if isinstance(ends, str) else None
    return None


def check_lighthouses(lighthouses: LighthouseList, looks: Sequence[Look]) -> Iterator[Diagnosis]:
    """Report what was found at each address, and whether the list as a whole works."""
    for look in looks:
        yield from _check_address(look)
    yield from _check_leader(looks)
    yield from _check_security(lighthouses.security, looks)
    yield from _check_clocks(looks)
    yield from check_job(lighthouses, looks)


def _check_address(look: Look) -> Iterator[Diagnosis]:
    where = look.where
    if look.name_error:
        yield found_problem(
            "name",
            f"{where.host} cannot be resolved: {look.name_error}",
            "correct TORCHFT_LIGHTHOUSE, or the name server of this machine",
        )
        return
    if look.hosts and look.hosts != (where.host,):
        yield found_ok("name", f"{where.host} is {', '.join(look.hosts)}")
    if look.connect_error:
        yield found_problem(
            "port",
            f"{look.address} cannot be reached: {look.connect_error}",
            "start the lighthouse, correct TORCHFT_LIGHTHOUSE, or open the port in the firewall",
        )
        return
    if look.connect_s is None:
        yield found_problem("port", f"{look.address} has not answered", "look at the network")
        return
    yield found_ok("port", f"{look.address} connects in {1000 * look.connect_s:.1f} ms")
    if look.error is not None and not isinstance(look.error, NotLeader | Unauthorized):
        if isinstance(look.error, RequestRefused):
            yield found_warning(
                "lighthouse",
                f"{look.address} does not report its settings: {look.error}",
                f"run version {VERSION} of the lighthouse, too, or check the port",
            )
        else:
            late = isinstance(look.error, DeadlineExceeded)
            found = f"{look.address} does not answer: {look.error}" if late else str(look.error)
            yield found_problem("lighthouse", found, "check port and TLS")
    if look.about is not None and look.about.version != VERSION:
        yield found_warning(
            "lighthouse",
            f"{look.address} has version {look.about.version}, this is {VERSION}",
            "install the same version in all places",
        )


def _check_leader(looks: Sequence[Look]) -> Iterator[Diagnosis]:
    leading = [look for look in looks if look.leads]
    standing_by = [look for look in looks if isinstance(look.error, NotLeader)]
    if leading:
        first = leading[0]
        elected = first.about is not None and first.about.is_elected
        how = "leads by election" if elected else "answers"
        others = [look.address for look in standing_by]
        found = f"{first.address} {how}"
        if others:
            found += f"; {', '.join(others)} would replace it"
        if standing_by and not elected:
            yield found_warning(
                "leader",
                f"{first.address} answers without an election, and {', '.join(others)} takes part "
                "in one: groups that cannot reach the first go to another job",
                "start all lighthouses of the list with the same --leader-election, or none",
            )
            return
        more = [look.address for look in leading[1:]]
        if more:
            found += f"; {', '.join(more)} answer, too (no election: the first of the list counts)"
        yield found_ok("leader", found)
        return
    if standing_by:
        known = {look.error.leader for look in standing_by if isinstance(look.error, NotLeader)}
        names = ", ".join(sorted(known - {""}))
        yield found_problem(
            "leader",
            f"the leader is {names}, which is not in the list and does not answer"
            if names
            else "there is no leader",
            "add it to TORCHFT_LIGHTHOUSE; its --advertise must be what trainers can reach"
            if names
            else "look at the log of the lighthouses: etcd may be away",
        )
        return
    yield found_problem(
        "leader", "no lighthouse of the list answers this trainer", "see the findings above"
    )


def _check_security(security: Security, looks: Sequence[Look]) -> Iterator[Diagnosis]:
    distrusting = [look for look in looks if isinstance(look.error, Unauthorized)]
    for look in distrusting:
        is_token = "token" in str(look.error)
        advice = (
            "set TORCHFT_TOKEN or TORCHFT_TOKEN_FILE to the token of the lighthouse"
            if is_token
            else "see Security in docs/operations.md"
        )
        yield found_problem("token" if is_token else "tls", str(look.error), advice)
    answering = [look for look in looks if look.about is not None or look.leads]
    if not answering:
        if not distrusting:
            yield found_nothing("token", "no lighthouse answers, so it was not checked")
        return
    if security.token is None:
        yield found_ok("token", "none is set, and the lighthouse asks for none")
    elif not any(look.about for look in answering):
        yield found_nothing("token", "this version of the lighthouse cannot be asked about it")
    elif any(look.is_open for look in answering):
        yield found_warning(
            "token",
            "a token is set here, but the lighthouse answers without one, too",
            "give the lighthouse the token (--token-file), or everybody can end this training",
        )
    else:
        yield found_ok("token", "the lighthouse accepts it, and nobody without it")
    if security.token is not None and not security.dials_tls:
        yield found_warning(
            "tls",
            "the token travels without TLS and can be read",
            "set TORCHFT_TLS_CA",
        )
    elif security.dials_tls:
        yield from _check_certificates(answering)
    else:
        yield found_ok("tls", "off, here and at the lighthouse")


def _check_certificates(looks: Sequence[Look]) -> Iterator[Diagnosis]:
    for look in looks:
        if look.certificate_ends_at is None:
            continue
        left_s = look.certificate_ends_at - time.time()
        ends = f"the certificate of {look.address} ends in {left_s / 86_400:.0f} days"
        if left_s < CERTIFICATE_WARNING_S:
            yield found_warning("tls", ends, "renew it, and restart that lighthouse")
        else:
            yield found_ok("tls", f"both sides trust each other; {ends}")


def _check_clocks(looks: Sequence[Look]) -> Iterator[Diagnosis]:
    for look in looks:
        if look.about is None:
            continue
        difference_s, error_s = abs(look.clock_s), look.clock_error_s / 2
        ahead = "behind" if look.clock_s > 0 else "ahead of"
        found = (
            f"this clock is {difference_s:.2f} s {ahead} that of {look.address} "
            f"(+- {show_seconds(max(error_s, 0.001))})"
        )
        if difference_s - error_s > MAX_CLOCK_DIFFERENCE_S:
            yield found_warning(
                "clock",
                found,
                "synchronize both (chrony, NTP): logs, incidents and certificates go by them",
            )
        else:
            yield found_ok("clock", found)


def check_job(lighthouses: LighthouseList, looks: Sequence[Look]) -> Iterator[Diagnosis]:
    """Check the names of the job and the group, and what the lighthouse knows of them."""
    name = lighthouses.job
    if flaw := _flaw_of_job(name):
        yield found_problem("job", flaw, "use a short name of printable ASCII characters")
        return
    answering = leading_look(looks)
    if answering is None:
        yield found_nothing("job", f"{name}: no lighthouse answers, so nothing is known of it")
        return
    jobs = {job.job: job for job in answering.jobs}
    job = jobs.get(name)
    if job is None:
        alike = difflib.get_close_matches(name, jobs, 1, _LIKE)
        if alike:
            yield found_warning(
                "job",
                f"the lighthouse knows no job {name}, but {alike[0]}",
                f"set TORCHFT_JOB_ID={alike[0]} if that is meant",
            )
        else:
            yield found_ok("job", f"{name} is new to the lighthouse, which has {len(jobs)} jobs")
    elif job.ended_s is None:
        waits = f"; it waits: {job.waiting_for}" if job.waiting_for else ""
        yield found_ok(
            "job", f"{name}: {len(job.groups)} groups, committed step {job.committed_step}{waits}"
        )
    else:
        yield found_ok("job", f"{name}: its last group is gone for {show_seconds(job.ended_s)}")
    yield from _check_group(lighthouses.group, job)


def _flaw_of_job(name: str) -> str:
    """Return why this name of a job cannot be sent; empty: it can."""
    try:
        check_name("TORCHFT_JOB_ID", name)
    except RequestRefused as error:
        return str(error)
    return "" if name.isascii() else f"TORCHFT_JOB_ID {name!r} is not ASCII"


def _check_group(group: str | None, job: JobStatus | None) -> Iterator[Diagnosis]:
    if group is None:
        yield found_warning(
            "group",
            "REPLICA_GROUP_ID is not set: the group gets a new random name at each start",
            "set a name that is the same after a restart",
        )
        return
    living = [each for each in job.groups if stable_name(each.replica_id) == group] if job else []
    if living:
        yield found_warning(
            "group",
            f"{living[0].replica_id} lives: another group with the name {group} would be refused",
            "fine if this is that group; otherwise set another REPLICA_GROUP_ID",
        )
    else:
        yield found_ok("group", f"no living group has the name {group}")


def leading_look(looks: Sequence[Look]) -> Look | None:
    """The first lighthouse of the list that takes requests."""
    return next((look for look in looks if look.leads), None)
