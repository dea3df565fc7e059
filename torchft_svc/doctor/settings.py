"""Checks the variables of a trainer: bad values, relations, and names that nobody reads."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from torchft_svc import env
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.doctor.findings import (
    Diagnosis,
    Running,
    found_nothing,
    found_ok,
    found_problem,
    found_warning,
)
from torchft_svc.doctor.network import ReportedHost, reported_host
from torchft_svc.env import Environment
from torchft_svc.errors import ConfigError, UsageError
from torchft_svc.host.address import split_addresses
from torchft_svc.rpc.security import Security, resolve_security
from torchft_svc.settings import (
    DEFAULT_HEARTBEAT_INTERVAL,
    LOCAL_LIGHTHOUSE,
    GroupPlace,
    Timeouts,
    resolve_checks,
    resolve_place,
    resolve_timeouts,
)

T = TypeVar("T")

_OURS = "TORCHFT_"
# A name that is so similar to one of ours was probably meant to be it.
_LIKE = 0.85
# How long the route to the lighthouse may be looked for.
ROUTE_S = 1.5


class _Recorder(dict[str, str]):
    """Variables that remember which names were asked for."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.asked: set[str] = set()

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a trainer would use; None where its settings cannot work.

    ``environment`` has the variables whose values are accepted.
    """

    environment: Environment
    addresses: tuple[str, ...]
    job: str
    group: str | None
    security: Security | None
    timeouts: Timeouts | None
    place: GroupPlace | None
    reported: ReportedHost | None
    findings: tuple[Diagnosis, ...] = ()


def read_settings(
    environment: Environment, lighthouse: str | None = None, job: str | None = None
) -> Settings:
    """Read all settings of a trainer; what is wrong with them is in the findings.

    ``lighthouse``, ``job``: replace those of the environment.
    """
    findings: list[Diagnosis] = []
    known = environment.variables
    variables = _Recorder(env.for_child({}) if known is None else known)
    accepted = _accept(variables, findings)
    text = lighthouse or accepted.lighthouse_address or LOCAL_LIGHTHOUSE
    addresses = _attempt(lambda: split_addresses(text), findings) or ()
    timeouts = _attempt(
        lambda: resolve_timeouts(
            accepted,
            timeout=None,
            quorum_timeout=None,
            connect_timeout=None,
            heartbeat_interval=DEFAULT_HEARTBEAT_INTERVAL,
        ),
        findings,
    )
    settings = Settings(
        environment=accepted,
        addresses=addresses,
        job=job or accepted.job_id or DEFAULT_JOB,
        group=accepted.replica_group_id,
        security=_attempt(lambda: resolve_security(accepted), findings),
        timeouts=timeouts,
        place=_attempt(lambda: resolve_place(accepted, None, None), findings),
        reported=_attempt(lambda: _find_reported(accepted, addresses, findings), findings),
    )
    _attempt(lambda: resolve_checks(accepted, None, None), findings)
    findings += _check_names(variables)
    if not findings:
        ours = sorted(variables.asked & variables.keys())
        findings.append(found_ok("settings", ", ".join(ours) or "all have their defaults"))
    return replace(settings, findings=tuple(findings))


def _accept(variables: _Recorder, findings: list[Diagnosis]) -> Environment:
    """The variables without those whose value is refused, each of which is a problem."""
    environment = Environment(variables)
    for name, member in vars(Environment).items():
        if isinstance(member, property):
            try:
                getattr(environment, name)
            except ConfigError as error:
                findings.append(_refused(error))
                variables.pop(error.field, None)
    return environment


def _find_reported(
    environment: Environment, addresses: tuple[str, ...], findings: list[Diagnosis]
) -> ReportedHost | None:
    """The host that would be reported: its route may need a name that nobody resolves in time."""
    try:
        return Running("route", reported_host, environment, addresses).wait(ROUTE_S)
    except TimeoutError:
        why = "the name of the lighthouse is not resolved, so its route is not known"
        findings.append(found_nothing("reported host", why))
        return None


def _attempt(make: Callable[[], T], findings: list[Diagnosis]) -> T | None:
    try:
        return make()
    except UsageError as error:
        findings.append(_refused(error))
        return None


def _refused(error: UsageError) -> Diagnosis:
    return found_problem("settings", str(error), "correct it: a trainer ends with this error")


def _check_names(variables: _Recorder) -> Iterator[Diagnosis]:
    """Find variables that nobody reads, but whose name is nearly that of one of ours."""
    known = {name for name in variables.asked if name.startswith(_OURS)}
    for name in sorted(variables.keys() - known):
        if not name.startswith(_OURS[:-2]):
            continue
        for meant in difflib.get_close_matches(name, known, 1, _LIKE):
            yield found_warning(
                "settings", f"nobody reads {name}", f"{meant} is the name of a setting: rename it"
            )
