"""The dashboard and the HTTP API: one ASGI application, which starts and stops as one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.host.address import HostPort
from torchft_svc.host.tasks import Tasks
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.http.answers import encoded
from torchft_svc.lighthouse_server.http.commands import CommandRoutes, describe_commands
from torchft_svc.lighthouse_server.http.connection import TRANSPORT
from torchft_svc.lighthouse_server.http.differences import Document
from torchft_svc.lighthouse_server.http.documents import Clock, ShownPaces, job_document, overview
from torchft_svc.lighthouse_server.http.events import EventStream, Hub, Reader
from torchft_svc.lighthouse_server.http.public_status import status_html
from torchft_svc.lighthouse_server.http.refusals import HANDLERS
from torchft_svc.lighthouse_server.http.resources import Resources, describe_resources
from torchft_svc.lighthouse_server.http.schema import READ_ONE, Schema
from torchft_svc.lighthouse_server.http.server import serve_http
from torchft_svc.lighthouse_server.http.settings import HttpSettings
from torchft_svc.lighthouse_server.http.static import page_routes
from torchft_svc.lighthouse_server.http.timelines import Timelines
from torchft_svc.lighthouse_server.http.trust import Trust
from torchft_svc.lighthouse_server.metrics import LighthouseMetrics
from torchft_svc.rpc.guard import Refusals
from torchft_svc.rpc.health import Readiness
from torchft_svc.rpc.security import Security

# On a page; the API has all of them.
MAX_INCIDENTS_SHOWN = 50


class Dashboard:
    """What is served, and what it needs while the lighthouse runs."""

    def __init__(self, driver: LighthouseDriver, readiness: Readiness, security: Security) -> None:
        self._driver = driver
        self._readiness = readiness
        self._timelines = Timelines(driver)
        self._resources = Resources(driver, readiness, security, self._timelines)
        self._commands = CommandRoutes(driver, self._resources)
        self._metrics = LighthouseMetrics(driver, readiness)
        self._looked_at = 0.0
        self._jobs: dict[str, JobStatus] = {}
        self.hub = Hub(Clock.start())

    def application(self, security: Security, own_hosts: Iterable[str]) -> ASGIApp:
        """Return the application; ``own_hosts``: the names under which browsers reach it."""
        schema = encoded(api_schema())

        async def describe(_: Request) -> Response:
            return Response(schema, media_type="application/json")

        app = Starlette(
            routes=[
                *page_routes(),
                *self._resources.routes(),
                *self._commands.routes(),
                Route("/api/v1/events", self._events),
                Route("/api/v1/openapi.json", describe),
                Route("/metrics", self._show_metrics),
                Route("/status", self._status),
            ],
            exception_handlers=HANDLERS,
        )
        app.router.redirect_slashes = False  # it would build the address from the header Host
        return Trust(app, security, own_hosts, Refusals())

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        """Sample timelines while the block runs, and end the event streams with it."""
        async with Tasks() as tasks:
            tasks.start(self._timelines.sample_forever(), "timelines")
            try:
                yield
            finally:
                self.hub.close()

    async def _events(self, request: Request) -> Response:
        self._readiness.check()
        self.hub.check_room()
        job = request.query_params.get("job")
        if job is not None:
            self._resources.status(job)  # there has to be one
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        reader = Reader(request.scope["state"][TRANSPORT])
        try:
            self.hub.subscribe(reader, "", self._overview)
            if job is not None:
                self.hub.subscribe(reader, job, partial(self._job_document, job, ShownPaces()))
        except BaseException:  # it would take up a place for ever
            self.hub.remove(reader)
            raise
        return EventStream(reader, self.hub.remove)

    def _overview(self, now: float) -> Document:
        self._readiness.check()
        return overview(self._jobs_at(now).values(), self._driver.runs.status(""), now)

    def _job_document(self, job: str, shown: ShownPaces, now: float) -> Document:
        self._readiness.check()
        status = self._jobs_at(now).get(job) or self._driver.status(job, with_paces=False)[0]
        ids = [group.replica_id for group in status.groups]
        paces = shown.update(ids, partial(self._driver.paces, job))
        incidents = self._driver.incidents(job)[-MAX_INCIDENTS_SHOWN:]
        return job_document(status, now, self._timelines.last_point(job), incidents, paces)

    def _jobs_at(self, now: float) -> dict[str, JobStatus]:
        """All jobs, looked at once for all channels that are updated ``now``."""
        if now != self._looked_at:
            self._looked_at = now
            jobs = self._driver.status("", with_paces=False)
            self._jobs = {status.job: status for status in jobs}
        return self._jobs

    async def _show_metrics(self, request: Request) -> Response:
        """Answer on any lighthouse: whether it leads is a metric, too."""
        content, media_type = await self._metrics.page(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": media_type})

    async def _status(self, _: Request) -> Response:
        self._readiness.check()
        jobs = await self._driver.gather_status("", with_paces=False)
        return HTMLResponse(status_html(jobs))


def api_schema() -> dict[str, Any]:
    """Return the OpenAPI schema of all that programs may ask for."""
    schema = Schema()
    describe_resources(schema)
    describe_commands(schema)
    schema.add_read(
        "/api/v1/events",
        "Server-sent events: documents of all jobs and of one, and merge patches to them.",
        "text/event-stream",
        READ_ONE,
        {"job": {"type": "string"}},
    )
    return schema.document()


@contextlib.asynccontextmanager
async def run_dashboard(
    driver: LighthouseDriver,
    readiness: Readiness,
    security: Security,
    settings: HttpSettings,
    other_hosts: Iterable[str] = (),
) -> AsyncIterator[HostPort]:
    """Serve until the block is left; gives the address that was bound.

    ``other_hosts``: further names of this lighthouse.

    Raises:
        AddressError: nothing can be bound there.
    """
    dashboard = Dashboard(driver, readiness, security)
    own_hosts = {settings.bind.host, *settings.hosts, *other_hosts}
    app = dashboard.application(security, own_hosts)
    async with serve_http(app, settings.bind, security) as bound, dashboard.runs():
        yield bound
