"""Makes all checks of one trainer, and the plan for its load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.doctor import machine, network
from torchft_svc.doctor.findings import (
    Check,
    Diagnosis,
    found_nothing,
    run_checks,
)
from torchft_svc.doctor.lighthouse import LighthouseList, Look, check_lighthouses, leading_look
from torchft_svc.doctor.link_rate import CONNECT_S, MEASURE_S, LinkRate
from torchft_svc.doctor.settings import Settings
from torchft_svc.doctor.timeouts import CHECK as TIMEOUTS
from torchft_svc.doctor.timeouts import Load, SettingsPlan, check_order, make_plan
from torchft_svc.host.address import HostPort
from torchft_svc.rpc.security import Security

LINK_DEADLINE_S = 2 * CONNECT_S + 4 * MEASURE_S
_PLAN = "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """What the caller knows of the training, and the doctor to measure the link with.

    ``step_s``, ``state_bytes``, ``link_rate`` (bytes per second), ``num_groups``: None if not
    given.
    """

    peer: HostPort | None = None
    step_s: float | None = None
    state_bytes: float | None = None
    link_rate: float | None = None
    num_groups: int | None = None


class Examination:
    """The checks of one trainer; `make` runs them."""

    def __init__(self, settings: Settings, options: DoctorOptions) -> None:
        self._settings, self._options = settings, options
        self._looks: list[Look] = []
        self._links: list[LinkRate] = []
        self.plan: SettingsPlan | None = None

    def make(self) -> list[Diagnosis]:
        """Make all checks side by side; then those that compare what they found."""
        settings = self._settings
        findings = [*settings.findings]
        checks = [
            Check("open files", lambda: machine.check_files(self._options.num_groups or 1)),
            Check("shared memory", machine.check_shared_memory),
            Check("memory", lambda: machine.check_memory(self._options.state_bytes)),
            Check("versions", machine.check_versions),
        ]
        if settings.reported is not None:
            checks = [*self._network_checks(), *checks]
        security = settings.security
        if security is not None and settings.addresses:
            checks.insert(0, Check("lighthouse", lambda: self._check_lighthouses(security)))
        else:
            why = "the settings above cannot work, so no lighthouse was asked"
            findings.append(found_nothing("lighthouse", why))
        findings += run_checks(checks)
        findings += run_checks([Check("other groups", self._check_peers)])
        return [*findings, *self._compare()]

    def _check_lighthouses(self, security: Security) -> Iterator[Diagnosis]:
        settings = self._settings
        lighthouses = LighthouseList(settings.addresses, security, settings.job, settings.group)
        self._looks = lighthouses.look_at_all()
        return check_lighthouses(lighthouses, self._looks)

    def _network_checks(self) -> list[Check]:
        settings, reported, peer = self._settings, self._settings.reported, self._options.peer
        assert reported is not None
        checks = [
            Check("reported host", lambda: network.check_reported(reported, settings.addresses)),
            Check("services", lambda: network.check_services(settings.environment, reported)),
            Check("backends", lambda: network.check_backends(settings.environment, reported)),
        ]
        security = settings.security
        if security is None:
            return checks
        checks.insert(
            1, Check("own certificate", lambda: network.check_certificate(security, reported.host))
        )
        if peer is None:
            return [*checks, Check("link", lambda: network.check_no_peer(reported))]
        measure = Check(
            "link",
            lambda: network.check_link(peer, reported, security, self._links),
            LINK_DEADLINE_S,
        )
        return [*checks, measure]

    def _check_peers(self) -> Iterable[Diagnosis]:
        reported = self._settings.reported
        if reported is None or not self._looks:
            return ()
        return network.check_peers(self._job(), self._settings.group, reported)

    def _job(self) -> JobStatus | None:
        first = leading_look(self._looks)
        jobs = first.jobs if first is not None else []
        return next((job for job in jobs if job.job == self._settings.job), None)

    def _compare(self) -> Iterator[Diagnosis]:
        timeouts = self._settings.timeouts
        load = self._load()
        if timeouts is not None:
            first = leading_look(self._looks)
            about = first.about if first is not None else None
            if about is None:
                why = "those of the lighthouse are not known, so only the trainer's were compared"
                yield found_nothing(TIMEOUTS, why)
            yield from check_order(timeouts, about, load)
        if load is not None:
            self.plan = make_plan(load)
            return
        options = self._options
        if options.step_s is not None or options.state_bytes is not None:
            missing = [
                flag
                for flag, value in (
                    ("--step-time", options.step_s),
                    ("--state-size", options.state_bytes),
                    ("--link-rate (or --peer, to measure it)", self._rate()),
                    ("--groups", self._num_groups()),
                )
                if value is None
            ]
            yield found_nothing(_PLAN, f"no settings are proposed without {', '.join(missing)}")

    def _load(self) -> Load | None:
        options, rate, num_groups = self._options, self._rate(), self._num_groups()
        if (
            options.step_s is None
            or options.state_bytes is None
            or rate is None
            or num_groups is None
        ):
            return None
        place = self._settings.place
        return Load(
            step_s=options.step_s,
            state_bytes=options.state_bytes,
            link_rate=rate,
            num_groups=num_groups,
            num_workers=1 if place is None else place.group_world_size,
        )

    def _rate(self) -> float | None:
        """The rate that was given or measured, or else the speed of the interface."""
        if self._options.link_rate is not None:
            return self._options.link_rate
        if self._links:
            return self._links[0].slower
        reported = self._settings.reported
        interface = reported.interface if reported is not None else None
        speed_bps = interface.speed_bps if interface is not None else None
        return None if speed_bps is None else speed_bps / 8

    def _num_groups(self) -> int | None:
        """The number that was given, or that of the job."""
        if self._options.num_groups is not None:
            return self._options.num_groups
        job = self._job()
        return max(2, job.num_expected) if job is not None else None
