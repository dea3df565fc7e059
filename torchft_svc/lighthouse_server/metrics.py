"""The metrics of a lighthouse, collected when they are asked for.

Needs prometheus-client (the extra ``dashboard``): import it only where metrics are served.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.launch.world import AgentStatus
from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.lighthouse.overview import GROUP_STATES, JobStatus
from torchft_svc.core.quorum.names import stable_name
from torchft_svc.errors import NotLeader, RequestRefused
from torchft_svc.host.tasks import in_turns
from torchft_svc.lighthouse_server.counts import IncidentCounts
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.rpc.health import ALWAYS_READY, Readiness
from torchft_svc.telemetry import catalog
from torchft_svc.telemetry.exposition import (
    Family,
    FamilyPart,
    build_info,
    durations,
    many_values,
    one_value,
    page_in_pieces,
    values,
)

JOB_STATES = ("alive", "finished", "lost")
_JOB_VALUES: tuple[tuple[catalog.Metric, Callable[[JobStatus], float]], ...] = (
    (catalog.GROUPS_EXPECTED, lambda job: job.num_expected),
    (catalog.MIN_GROUPS, lambda job: job.min_replicas),
    (catalog.COMMITTED_STEP, lambda job: job.committed_step),
    (catalog.SINCE_COMMIT, lambda job: job.stalled_s),
    (catalog.STATE_DIFFERENCES, lambda job: job.num_differences),
    (catalog.GROUPS_SLOW, lambda job: sum(group.slow for group in job.groups)),
    (catalog.PLACES, lambda job: job.num_places),
)


class LighthouseMetrics:
    """Collects the metrics of one lighthouse; for its event loop."""

    def __init__(self, driver: LighthouseDriver, readiness: Readiness = ALWAYS_READY) -> None:
        self._driver = driver
        self._readiness = readiness
        self._incidents: dict[str, IncidentCounts] = {}
        self._lost_s: dict[tuple[str, str], float] = {}

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The text for ``/metrics`` and its content type; ``accept``: the header of the request.

        A job of 1000 groups costs about 50 ms, a third of which is its status; in pieces.
        """
        jobs = await self._driver.gather_status("")
        return await in_turns(page_in_pieces(self._collect(jobs), accept))

    def _collect(self, jobs: list[JobStatus]) -> Iterator[Family | FamilyPart]:
        """All metrics of a moment."""
        driver = self._driver
        yield from build_info(catalog.Program.LIGHTHOUSE)
        yield one_value(catalog.LEADER, float(self._leads()))
        sessions = [(("manager",), driver.num_streams), (("agent",), driver.runs.num_streams)]
        yield values(catalog.SESSIONS, sessions)
        yield values(catalog.RPC_ERRORS, driver.rpc_errors.counts.items())
        states = Counter(map(_state_of_job, jobs))
        yield values(catalog.JOBS, [((state,), states[state]) for state in JOB_STATES])
        shown = [job for job in jobs if _state_of_job(job) != "finished"]
        yield from self._of_jobs(shown)
        yield from self._of_ledgers([job.job for job in shown])
        yield from self._of_goodputs({job.job: job.goodput for job in shown if job.goodput})
        yield from self._of_quorums({job.job for job in jobs})
        yield from self._of_runs(driver.runs.status(""))

    def _of_jobs(self, jobs: list[JobStatus]) -> Iterator[Family | FamilyPart]:
        by_state = []
        for job in jobs:
            states = Counter(group.state for group in job.groups)
            by_state += [((job.job, state), states[state]) for state in GROUP_STATES]
        yield values(catalog.GROUPS, by_state)
        yield values(catalog.SPARES, list(_spares(jobs)))
        for metric, read in _JOB_VALUES:
            yield values(metric, [((job.job,), read(job)) for job in jobs])
        yield from _copies(jobs)
        yield from many_values(catalog.GROUP_SILENCE, _silences(jobs))
        yield from _paces(jobs)

    def _of_ledgers(self, names: list[str]) -> Iterator[Family]:
        before, self._incidents = self._incidents, {}
        for name in names:
            counted = self._incidents[name] = before.get(name) or IncidentCounts()
            with contextlib.suppress(RequestRefused):  # nothing has happened to it
                counted.add(self._driver.incidents(name, counted.after))
        counts = self._incidents.items()
        yield values(
            catalog.STEPS_DISCARDED,
            [
                ((name, cause), num)
                for name, each in counts
                for cause, num in each.discarded.items()
            ],
        )
        yield values(
            catalog.HEALS,
            [((name, how), num) for name, each in counts for how, num in each.heals.items()],
        )
        yield values(catalog.HEAL_BYTES, [((name,), each.healed_bytes) for name, each in counts])

    def _of_goodputs(self, goodputs: Mapping[str, Goodput]) -> Iterator[Family]:
        yield values(catalog.GOODPUT, [((name,), each.ratio) for name, each in goodputs.items()])
        yield values(catalog.LOST, self._lost_seconds(goodputs).items())

    def _lost_seconds(self, goodputs: Mapping[str, Goodput]) -> dict[tuple[str, str], float]:
        """The lost seconds by job and cause. Time that is accounted for later may move from one
        cause to another; a counter waits until it has grown above what it has shown."""
        before = self._lost_s
        self._lost_s = {
            (name, cause): max(lost_s, before.get((name, cause), 0.0))
            for name, goodput in goodputs.items()
            for cause, lost_s in goodput.lost_s.items()
        }
        return self._lost_s

    def _of_quorums(self, names: set[str]) -> Iterator[Family]:
        counted = [(name, each) for name, each in self._driver.counts.jobs.items() if name in names]
        yield durations(
            catalog.QUORUM_DURATION, [((name,), each.durations) for name, each in counted]
        )
        yield values(
            catalog.QUORUM_CHANGES,
            [
                ((name, reason), number)
                for name, each in counted
                for reason, number in each.changes.items()
            ],
        )

    def _of_runs(self, runs: list[RunStatus]) -> Iterator[Family]:
        nodes = []
        for run in runs:
            states = Counter(node.status for node in run.nodes)
            nodes += [((run.run, state.value), states[state]) for state in AgentStatus]
        yield values(catalog.RUN_NODES, nodes)
        yield values(catalog.RUN_NODES_EXPECTED, [((run.run,), run.min_nodes) for run in runs])
        yield values(
            catalog.RUN_RESTARTS,
            [
                ((run, cause), number)
                for run, causes in self._driver.counts.runs.items()
                for cause, number in causes.items()
            ],
        )

    def _leads(self) -> bool:
        try:
            self._readiness.check()
        except NotLeader:
            return False
        return True


def _state_of_job(job: JobStatus) -> str:
    if job.ended_s is None:
        return "alive"
    return "finished" if job.finished else "lost"


def _spares(jobs: list[JobStatus]) -> Iterator[tuple[tuple[str, str], float]]:
    for job in jobs:
        num_ready = sum(each.asks for each in job.prepared_spares)
        yield (job.job, "ready"), num_ready
        yield (job.job, "starting"), len(job.prepared_spares) - num_ready


def _copies(jobs: list[JobStatus]) -> Iterator[Family]:
    """The copies of the jobs of which a process has ever held one."""
    held = [job for job in jobs if job.copy_age_s is not None]
    yield values(catalog.COPY_HOLDERS, [((job.job,), job.num_holders) for job in held])
    yield values(catalog.COPY_STEP, [((job.job,), job.copy_step) for job in held])
    yield values(catalog.SINCE_COPY, [((job.job,), job.copy_age_s or 0.0) for job in held])


def _silences(jobs: list[JobStatus]) -> Iterator[tuple[tuple[str, str], float]]:
    """The silence of each group; of several with one name, one of which is about to be forgotten,
    the shortest."""
    for job in jobs:
        silent_s: dict[str, float] = {}
        for group in job.groups:
            name = stable_name(group.replica_id)
            silent_s[name] = min(group.silent_s, silent_s.get(name, group.silent_s))
        for name, value in silent_s.items():
            yield (job.job, name), value


def _paces(jobs: list[JobStatus]) -> Iterator[FamilyPart]:
    """The own work of each group; of several with one name, one of which is about to be forgotten,
    the last one counts."""
    known = {
        (job.job, stable_name(group.replica_id)): group.paces
        for job in jobs
        for group in job.groups
        if group.paces
    }
    yield from many_values(
        catalog.GROUP_OWN_WORK,
        (((*whose, pace.phase), pace.seconds) for whose, paces in known.items() for pace in paces),
    )
    ratios = (
        ((*whose, to), value)
        for whose, (step, *_) in known.items()
        for to, value in (("best", step.to_best), ("own_best", step.to_own_best))
    )
    yield from many_values(catalog.GROUP_SLOWDOWN, ratios)
