"""What is read over HTTP: jobs, groups, timelines, launched runs, and whether this lighthouse is
ready."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from torchft_svc.core.launch.launched_run import RunStatus
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.core.quorum.lighthouse.timeline import SAMPLE_S
from torchft_svc.errors import NotLeader, RequestRefused
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.http.answers import (
    GoodputAnswer,
    GroupList,
    HealthAnswer,
    IncidentList,
    JobList,
    JobSummary,
    LighthouseAnswer,
    RunList,
    TimelineAnswer,
    json_answer,
    long_json_answer,
)
from torchft_svc.lighthouse_server.http.refusals import HttpRefusal
from torchft_svc.lighthouse_server.http.schema import READ, READ_ONE, Schema
from torchft_svc.lighthouse_server.http.timelines import Timelines
from torchft_svc.rpc.health import Readiness
from torchft_svc.rpc.security import Security
from torchft_svc.version import VERSION

# More are no number of a record, and would take long to be read.
MAX_DIGITS = 18

T = TypeVar("T")


def segment(request: Request, name: str) -> str:
    """The part of the path that the route calls ``name``."""
    try:
        return unquote_to_bytes(request.path_params[name]).decode()
    except UnicodeDecodeError:
        raise HttpRefusal(400, "bad_request", f"the {name} in the path is not UTF-8") from None


class Resources:
    """Answers requests that change nothing."""

    def __init__(
        self,
        driver: LighthouseDriver,
        readiness: Readiness,
        security: Security,
        timelines: Timelines,
    ) -> None:
        self._driver = driver
        self._readiness = readiness
        self._security = security
        self._timelines = timelines

    def routes(self) -> list[Route]:
        """The paths that are served."""
        return [
            Route("/healthz", self._health),
            Route("/readyz", self._ready),
            *(
                Route(f"/api/v1/{path}", endpoint)
                for path, endpoint in {
                    "about": self._about,
                    "jobs": self._jobs,
                    "jobs/{job}": self._one_job,
                    "jobs/{job}/groups": self._groups,
                    "jobs/{job}/timeline": self._timeline,
                    "jobs/{job}/incidents": self._incidents,
                    "jobs/{job}/goodput": self._goodput,
                    "runs": self._runs,
                    "runs/{run}": self._one_run,
                }.items()
            ),
        ]

    def status(self, job: str) -> JobStatus:
        """The status of ``job``, without the groups' paces.

        Raises:
            HttpRefusal: there is no such job.
            NotLeader: another lighthouse leads.
        """
        self._readiness.check()
        (status,) = found("job", lambda: self._driver.status(job, with_paces=False), job)
        return status

    async def _whole_status(self, job: str) -> JobStatus:
        """The status of ``job`` with the groups' paces; raises as `status` does."""
        self._readiness.check()
        with _finding("job", job):
            (status,) = await self._driver.gather_status(job)
        return status

    def run_status(self, run: str) -> RunStatus:
        """The status of a launched run; raises as `status` does."""
        self._readiness.check()
        (status,) = found("run", lambda: self._driver.runs.status(run), run)
        return status

    async def _health(self, _: Request) -> Response:
        return json_answer(HealthAnswer(ready=self._leader() is None))

    async def _ready(self, _: Request) -> Response:
        self._readiness.check()
        return json_answer(HealthAnswer(ready=True))

    async def _about(self, _: Request) -> Response:
        leader = self._leader()
        has_token = self._security.token is not None
        return json_answer(
            LighthouseAnswer(
                version=VERSION,
                leads=leader is None,
                leader=leader or "",
                needs_token=has_token,
                accepts_commands=has_token,
            )
        )

    def _leader(self) -> str | None:
        """The address of the lighthouse that leads, if it is known (None: this one does)."""
        try:
            self._readiness.check()
        except NotLeader as error:
            return error.leader
        return None

    async def _jobs(self, _: Request) -> Response:
        self._readiness.check()
        jobs = map(JobSummary.summarize, await self._driver.gather_status("", with_paces=False))
        return json_answer(JobList(jobs=tuple(jobs)))

    async def _one_job(self, request: Request) -> Response:
        return await long_json_answer(await self._whole_status(segment(request, "job")))

    async def _groups(self, request: Request) -> Response:
        status = await self._whole_status(segment(request, "job"))
        return await long_json_answer(
            GroupList(
                job=status.job,
                groups=status.groups,
                gone=status.gone,
                prepared_spares=status.prepared_spares,
            )
        )

    async def _timeline(self, request: Request) -> Response:
        job = self.status(segment(request, "job")).job
        points = self._timelines.points(job)
        return json_answer(TimelineAnswer(job=job, interval_s=SAMPLE_S, points=points))

    async def _incidents(self, request: Request) -> Response:
        self._readiness.check()
        job, after = segment(request, "job"), _number(request, "after")
        incidents = tuple(found("job", lambda: self._driver.incidents(job, after), job))
        last = incidents[-1].number if incidents else after
        return json_answer(IncidentList(job=job, incidents=incidents, next_after=last))

    async def _goodput(self, request: Request) -> Response:
        self._readiness.check()
        job = segment(request, "job")
        goodput = found("job", lambda: self._driver.goodput(job), job)
        return json_answer(GoodputAnswer(job=job, goodput=goodput))

    async def _runs(self, _: Request) -> Response:
        self._readiness.check()
        return json_answer(RunList(runs=tuple(self._driver.runs.status(""))))

    async def _one_run(self, request: Request) -> Response:
        return json_answer(self.run_status(segment(request, "run")))


def describe_resources(schema: Schema) -> None:
    """Add what is read to the schema."""
    schema.add_read("/healthz", "Whether the process runs.", HealthAnswer, (400,))
    schema.add_read("/readyz", "Whether it takes requests: it leads.", HealthAnswer, (400, 503))
    api = "/api/v1"
    schema.add_read(f"{api}/about", "This lighthouse.", LighthouseAnswer, (400, 401))
    schema.add_read(f"{api}/jobs", "All jobs, without their groups.", JobList, READ)
    one = f"{api}/jobs/{{job}}"
    schema.add_read(one, "One job with its groups.", JobStatus, READ_ONE)
    schema.add_read(f"{one}/groups", "The groups of a job.", GroupList, READ_ONE)
    schema.add_read(f"{one}/timeline", "A job's last hour.", TimelineAnswer, READ_ONE)
    after = {"after": {"type": "integer", "minimum": 0}}
    schema.add_read(f"{one}/incidents", "A job's ledger.", IncidentList, READ_ONE, after)
    schema.add_read(f"{one}/goodput", "A job's goodput.", GoodputAnswer, READ_ONE)
    schema.add_read(f"{api}/runs", "All launched runs.", RunList, READ)
    schema.add_read(f"{api}/runs/{{run}}", "One launched run.", RunStatus, READ_ONE)


def _number(request: Request, name: str) -> int:
    """The number that the query calls ``name``; 0 if it does not name one."""
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise HttpRefusal(400, "bad_request", f"{name}={text[:40]!r} in the query is no number")
    return int(text)


def found(kind: str, read: Callable[[], T], name: str) -> T:
    """Return what ``read`` finds of the ``kind`` that is called ``name``, or refuse the request."""
    with _finding(kind, name):
        return read()


@contextlib.contextmanager
def _finding(kind: str, name: str) -> Iterator[None]:
    """Return a block that looks for the ``kind`` that is called ``name``, or refuse the request."""
    if not name:
        raise HttpRefusal(400, "bad_request", f"the path names no {kind}")
    try:
        yield
    except RequestRefused as error:
        raise HttpRefusal(404, f"no_such_{kind}", str(error)) from None
