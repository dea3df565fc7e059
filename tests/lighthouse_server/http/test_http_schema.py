"""Tests a lighthouse with a group in it against the schema that it ships, with drawn requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from support.agents import Agent
from support.dashboards import BEARER, Served, served

from torchft_svc.core.launch.world import AgentStatus
from torchft_svc.lighthouse_server.http.app import api_schema

pytestmark = pytest.mark.processes
# A stream without an end, which has tests of its own.
STREAM = "/api/v1/events"
SCHEMA = schemathesis.openapi.from_dict(api_schema())


@pytest.fixture(scope="module")
def busy() -> Iterator[Served]:
    """A lighthouse with a token, a group, and a node of a launched run."""
    with (
        served() as server,
        server.group("g", "j"),
        Agent(server.grpc, "n", run="r", security=server.security) as agent,
    ):
        agent.report(AgentStatus.JOINING)
        agent.work()
        yield server


@SCHEMA.exclude(path=STREAM).parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_every_answer_is_what_the_schema_says(case: Any, busy: Served) -> None:
    case.call_and_validate(base_url=busy.url, headers=BEARER)


@pytest.mark.parametrize(
    "path",
    [
        *("/healthz", "/readyz", "/api/v1/about", "/api/v1/jobs", "/api/v1/runs"),
        *(
            "/api/v1/jobs/j",
            "/api/v1/jobs/j/groups",
            "/api/v1/jobs/j/timeline",
            "/api/v1/jobs/j/incidents",
            "/api/v1/jobs/j/goodput",
            "/api/v1/runs/r",
        ),
    ],
)
def test_what_is_there_is_as_the_schema_says(busy: Served, path: str) -> None:
    """Drawn names lead to nothing."""
    template = path.replace("/jobs/j", "/jobs/{job}").replace("/runs/r", "/runs/{run}")
    response = busy.get(path)
    assert response.status_code == 200
    SCHEMA[template]["GET"].validate_response(response)
