"""Tests what the HTTP API answers, also to requests that are wrong."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import quote, urlsplit

import httpx
import pytest
from support.agents import Agent
from support.dashboards import BEARER, Served, served
from support.running import Line, eventually, members

from torchft_svc.core.launch.world import AgentStatus, RunClosed
from torchft_svc.lighthouse_server.http import commands, connection

pytestmark = pytest.mark.processes

OPEN = ("/", "/app.js", "/style.css", "/icon.svg", "/healthz", "/readyz", "/api/v1/openapi.json")
API = "/api/v1"
# With a job that is there, and a group that is not.
READS = (
    "/metrics",
    "/status",
    *(f"{API}/{path}" for path in ("about", "events", "jobs", "runs", "runs/nothing")),
    *(f"{API}/jobs/j{path}" for path in ("", "/groups", "/timeline", "/incidents", "/goodput")),
)
COMMANDS = (
    f"{API}/jobs/j/groups/g/drain",
    f"{API}/jobs/j/groups/g/kill",
    f"{API}/jobs/j/accept-loss",
    f"{API}/runs/j/nodes/n/drain",
    "/replica/g/kill",
)


@pytest.fixture(scope="module")
def open_lighthouse() -> Iterator[Served]:
    """A lighthouse without a token."""
    with served(token=None) as server:
        yield server


def error_of(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    error: dict[str, str] = response.json()["error"]
    assert set(error) >= {"code", "message"}
    return error


def exchange(url: str, request: bytes, timeout_s: float = 20.0) -> bytes:
    """What the server says to raw bytes, until it hangs up."""
    address = urlsplit(url)
    assert address.hostname
    with socket.create_connection((address.hostname, address.port or 0), timeout_s) as raw:
        raw.sendall(request)
        answer = b""
        try:
            while more := raw.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


# -- what is read ----------------------------------------------------------------------------------


def test_a_job_is_shown_as_status_shows_it(lighthouse: Served, line: Line) -> None:
    name = "team/run 7%"
    line.quorum("g:1", step=3, job=name).result()
    path = f"{API}/jobs/{quote(name, safe='')}"
    whole = lighthouse.get(path).json()
    assert (whole["job"], whole["committed_step"]) == (name, 3)
    (group,) = whole["groups"]
    assert (group["replica_id"], group["in_quorum"], group["step"]) == ("g:1", True, 3)
    listed = lighthouse.get(f"{path}/groups").json()
    assert listed["groups"][0]["replica_id"] == "g:1"
    assert (listed["gone"], listed["prepared_spares"]) == ([], [])
    (summary,) = [job for job in lighthouse.get(f"{API}/jobs").json()["jobs"] if job["job"] == name]
    assert (summary["num_groups"], summary["num_in_quorum"]) == (1, 1)
    assert (
        summary.items()
        >= {
            key: whole[key]
            for key in ("quorum_id", "committed_step", "num_expected", "waiting_for")
        }.items()
    )
    assert "team/run 7%" in lighthouse.get("/status").text


def test_a_timeline_grows(lighthouse: Served, line: Line) -> None:
    line.quorum("g:1", step=3, job="timed").result()
    path = f"{API}/jobs/timed/timeline"
    eventually(lambda: bool(lighthouse.get(path).json()["points"]), 20.0)
    point = lighthouse.get(path).json()["points"][0]
    assert (point["committed_step"], point["num_in_quorum"]) == (3, 1)
    assert abs(point["at"] - time.time()) < 60


def test_incidents_are_read_from_a_number_on(lighthouse: Served, line: Line) -> None:
    path = f"{API}/jobs/ledger/incidents"
    line.quorum("a:1", step=3, job="ledger").result()
    line.leave("a:1", "it has crashed", job="ledger")
    answer = lighthouse.get(path).json()
    kinds = {each["kind"]: each for each in answer["incidents"]}
    assert "it has crashed" in kinds["lost"]["cause"]
    assert kinds["lost"]["groups"] == ["a:1"]
    numbers = [each["number"] for each in answer["incidents"]]
    assert answer["next_after"] == numbers[-1]
    rest = lighthouse.get(path, params={"after": numbers[0]}).json()["incidents"]
    assert [each["number"] for each in rest] == numbers[1:]
    assert lighthouse.get(path, params={"after": numbers[-1]}).json()["incidents"] == []
    for wrong in ("x", "-1", "1.5", "9" * 30, "\u0663"):
        assert "after=" in error_of(lighthouse.get(path, params={"after": wrong}), 400)["message"]


def test_the_goodput_of_a_job_is_read(lighthouse: Served, line: Line) -> None:
    line.quorum("a:1", step=3, job="good").result()
    goodput = lighthouse.get(f"{API}/jobs/good/goodput").json()["goodput"]
    lost_s = sum(goodput["lost_s"].values())
    assert goodput["committed_s"] + lost_s == pytest.approx(goodput["wall_s"], abs=1e-3)


def test_metrics_are_read(lighthouse: Served, line: Line) -> None:
    line.quorum("a:1", step=3, job="measured").result()
    response = lighthouse.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert 'torchft_committed_step{job="measured"} 3.0' in response.text
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert lighthouse.get("/metrics", headers=accept).text.endswith("# EOF\n")


def test_a_launched_run_is_shown(open_lighthouse: Served) -> None:
    with Agent(open_lighthouse.grpc, "n1", run="r/1") as agent:
        agent.report(AgentStatus.JOINING)
        world = agent.work()
        run = open_lighthouse.get(f"{API}/runs/r%2F1").json()
        assert (run["run"], run["phase"]) == ("r/1", "running")
        assert run["nodes"][0]["node_id"] == world.nodes[0].node_id
        assert [each["run"] for each in open_lighthouse.get(f"{API}/runs").json()["runs"]] == [
            "r/1"
        ]


def test_it_says_whether_it_leads_and_what_it_needs(
    lighthouse: Served, open_lighthouse: Served
) -> None:
    for server, has_token in ((lighthouse, True), (open_lighthouse, False)):
        about = server.get(f"{API}/about").json()
        assert about["leads"]
        assert (about["needs_token"], about["accepts_commands"]) == (has_token, has_token)
        assert server.get("/readyz").json() == {"ready": True}
        assert server.get("/healthz").json() == {"ready": True}


def test_the_page_and_probes_need_no_token(lighthouse: Served) -> None:
    with httpx.Client(base_url=lighthouse.url, trust_env=False) as stranger:
        for path in OPEN:
            response = stranger.get(path)
            assert response.status_code == 200
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in response.headers


def test_an_unchanged_page_is_not_sent_again(lighthouse: Served) -> None:
    first = lighthouse.get("/app.js")
    again = lighthouse.get("/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


# -- the token -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", [None, "Bearer wrong-wrong-wrong", "Basic dTpw", "Bearer", "é"])
def test_reading_needs_the_token(lighthouse: Served, shown: str | None) -> None:
    headers = {} if shown is None else {"authorization": shown.encode()}
    with httpx.Client(base_url=lighthouse.url, headers=headers, trust_env=False) as stranger:
        for path in READS:
            response = stranger.get(path)
            assert error_of(response, 401)["code"] == "unauthorized"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "TORCHFT_TOKEN" in response.text
        for path in COMMANDS:
            error_of(stranger.post(path, json={}), 401)


def test_without_a_token_there_are_no_commands(open_lighthouse: Served) -> None:
    """A page of another site could else give them, as soon as its name leads to this address."""
    for path in COMMANDS:
        error = error_of(open_lighthouse.post(path, headers=BEARER), 403)
        assert error["code"] == "commands_off"
        assert "--token-file" in error["message"]


# -- names that are not there ----------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/groups", "/timeline", "/incidents", "/goodput"])
def test_a_job_that_is_not_there(lighthouse: Served, path: str) -> None:
    error = error_of(lighthouse.get(f"{API}/jobs/nothing{path}"), 404)
    assert error["code"] == "no_such_job"
    assert "'nothing'" in error["message"]


@pytest.mark.parametrize("what", ["drain", "kill"])
def test_a_group_that_is_not_there(lighthouse: Served, line: Line, what: str) -> None:
    line.quorum("g:1", job="j").result()
    error = error_of(lighthouse.post(f"{API}/jobs/nothing/groups/g/{what}"), 404)
    assert error["code"] == "no_such_job"
    error = error_of(lighthouse.post(f"{API}/jobs/j/groups/h/{what}"), 404)
    assert error["code"] == "no_such_group"
    error = error_of(lighthouse.post(f"{API}/jobs/j/groups/g/{what}"), 409)
    assert "it only sends heartbeats" in error["message"]


def test_a_job_that_has_gone(lighthouse: Served, line: Line) -> None:
    line.quorum("g:1", job="gone", step=4).result()
    line.leave("g:1", job="gone")
    assert lighthouse.get(f"{API}/jobs/gone").json()["ended_s"] is not None
    error = error_of(lighthouse.post(f"{API}/jobs/gone/groups/g:1/kill"), 404)
    assert error["code"] == "no_such_group"


def test_a_run_and_a_node_that_are_not_there(lighthouse: Served) -> None:
    assert error_of(lighthouse.get(f"{API}/runs/nothing"), 404)["code"] == "no_such_run"
    error = error_of(lighthouse.post(f"{API}/runs/nothing/nodes/n/drain"), 404)
    assert error["code"] == "no_such_run"


def test_a_loss_that_nobody_waits_to_accept(lighthouse: Served, line: Line) -> None:
    line.quorum("g:1", job="whole").result()
    error = error_of(lighthouse.post(f"{API}/jobs/whole/accept-loss"), 409)
    assert "whole" in error["message"]
    assert error_of(lighthouse.post(f"{API}/jobs/nothing/accept-loss"), 404)


@pytest.mark.parametrize("path", ["/nothing", f"{API}/", f"{API}/jobs/", "/metrics/x", "/../x"])
def test_a_path_that_is_not_there(lighthouse: Served, path: str) -> None:
    assert "/api/v1/openapi.json" in error_of(lighthouse.get(path), 404)["message"]


def test_a_name_that_is_no_text(lighthouse: Served) -> None:
    assert "UTF-8" in error_of(lighthouse.get(f"{API}/jobs/%ff%fe"), 400)["message"]


# -- commands --------------------------------------------------------------------------------------


def test_groups_are_killed_and_drained(lighthouse: Served) -> None:
    with lighthouse.group("g", "commanded") as group:
        path = f"{API}/jobs/commanded/groups"
        (shown,) = lighthouse.get(path).json()["groups"]

        def post(name: str, what: str, **body: object) -> None:
            answer = lighthouse.post(f"{path}/{name}/{what}", json=body)
            assert answer.status_code == 202
            assert answer.json()["target"] == name

        post("g", "drain")
        drain = group.drains.get(timeout=20)
        assert (drain.reason, drain.within_s) == (commands.DRAINED, None)
        post("g", "drain", reason="a test", within_s=60)
        drain = group.drains.get(timeout=20)
        assert drain.reason == "a test"
        assert drain.within_s == pytest.approx(60, abs=5)
        post(shown["replica_id"], "kill", reason="another")
        assert "another" in group.kills.get(timeout=20)


@pytest.mark.parametrize("within_s", ["60", 0, -1, True, 1e300, [], {}])
def test_a_deadline_that_cannot_be_one(lighthouse: Served, line: Line, within_s: object) -> None:
    line.quorum("g:1", job="j").result()
    body = {"within_s": within_s}
    response = lighthouse.post(f"{API}/jobs/j/groups/g/drain", json=body)
    assert "within_s has to be a number" in error_of(response, 400)["message"]
    response = lighthouse.post(f"{API}/jobs/j/groups/g/kill", json={"within_s": 60})
    assert "not a field of this command" in error_of(response, 400)["message"]


def test_the_public_release_has_a_command_of_its_own(lighthouse: Served) -> None:
    with lighthouse.group("classic") as group:
        (shown,) = lighthouse.get(f"{API}/jobs/default/groups").json()["groups"]
        answer = lighthouse.client.post(f"/replica/{shown['replica_id']}/kill")
        assert answer.status_code == 202
        assert commands.KILLED in group.kills.get(timeout=20)
    error_of(lighthouse.client.post("/replica/nobody/kill"), 404)


def test_a_node_is_drained(lighthouse: Served) -> None:
    with Agent(lighthouse.grpc, "n1", run="r", security=lighthouse.security) as agent:
        agent.report(AgentStatus.JOINING)
        node = agent.work().nodes[0].node_id
        error_of(lighthouse.post(f"{API}/runs/r/nodes/other/drain"), 404)
        assert lighthouse.post(f"{API}/runs/r/nodes/{node}/drain").status_code == 202
        agent.await_news(RunClosed, lambda news: news.drained)


def test_an_accepted_loss_lets_a_job_go_on(lighthouse: Served, line: Line) -> None:
    path = f"{API}/jobs/lossy"
    for replica_id in ("a:1", "b:1"):
        line.beat(replica_id, job="lossy")
    behind = line.quorum("b:1", step=5, job="lossy")
    line.quorum("a:1", step=7, job="lossy").result()
    behind.result()
    line.leave("a:1", job="lossy")
    waiting = line.quorum("b:1", step=5, job="lossy", timeout_s=60)
    eventually(lambda: "accept-loss" in lighthouse.get(path).json()["waiting_for"])
    answer = lighthouse.post(f"{path}/accept-loss")
    assert answer.json() == {"job": "lossy", "committed_step": 7}
    assert members(waiting.result()) == ["b:1"]


# -- malformed requests ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 4000, "not JSON"),
        (b"[]", "a JSON object"),
        (b"null", "a JSON object"),
        (b'{"reason": 3}', "has to be a text"),
        (b'{"reason": "a\\nb"}', "cannot be printed"),
        (b'{"why": ""}', "'why' is not a field"),
        (json.dumps({"reason": "x" * 1001}).encode(), "1000 are allowed"),
    ],
)
def test_a_body_that_cannot_be_used(
    lighthouse: Served, line: Line, content: bytes, why: str
) -> None:
    line.quorum("g:1", job="j").result()
    headers = {"content-type": "application/json"}
    path = f"{API}/jobs/j/groups/g/kill"
    response = lighthouse.client.post(path, content=content, headers=headers)
    assert why in error_of(response, 400)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_a_form_is_no_command(lighthouse: Served, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = lighthouse.client.post(COMMANDS[0], content=b"{}", headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


def test_a_huge_body_is_not_read(lighthouse: Served) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 100_000

    headers = {"content-type": "application/json"}
    try:
        response = lighthouse.client.post(COMMANDS[0], content=pieces(), headers=headers)
    except httpx.TransportError:
        pass  # it hangs up on whoever does not listen
    else:
        error_of(response, 413)
    large = json.dumps({"reason": "x" * commands.MAX_BODY_BYTES}).encode()
    response = lighthouse.client.post(COMMANDS[0], content=large, headers=headers)
    assert error_of(response, 413)["code"] == "content_too_large"


def test_a_body_that_does_not_come(lighthouse: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "BODY_S", 0.2)
    head = (
        f"POST {COMMANDS[0]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: "
        f"{BEARER['authorization']}\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
    )
    answer = exchange(lighthouse.url, head.encode())
    assert b"408" in answer.split(b"\r\n")[0]
    assert b"did not arrive within" in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_a_method_that_is_not_allowed(lighthouse: Served, method: str) -> None:
    for path in (*OPEN, *READS):
        response = lighthouse.client.request(method, path)
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert "GET" in response.headers["allow"]


def test_a_command_is_not_read(lighthouse: Served) -> None:
    for path in COMMANDS:
        response = lighthouse.get(path)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_command_from_another_site(lighthouse: Served, headers: dict[str, str]) -> None:
    for path in COMMANDS:
        assert error_of(lighthouse.post(path, headers=headers), 403)["code"] == "cross_site"


def test_a_command_from_the_page_itself(lighthouse: Served) -> None:
    headers = {"origin": lighthouse.url, "sec-fetch-site": "same-origin"}
    error_of(lighthouse.post(f"{API}/jobs/nothing/groups/g/kill", headers=headers), 404)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
def test_another_host_than_this_one(open_lighthouse: Served, host: str) -> None:
    error = error_of(open_lighthouse.get("/healthz", headers={"host": host}), 400)
    assert error["code"] == "bad_host"
    assert f"--http-host {host.partition(':')[0]}" in error["message"]


@pytest.mark.parametrize("host", ["a b", "x/y", "[::1", "@", "a:b", "ü", ":80"])
def test_a_host_that_is_none(open_lighthouse: Served, host: str) -> None:
    request = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer = exchange(open_lighthouse.url, request.encode())
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.2", "[::1]:80", "10.1.2.3"])
def test_addresses_and_this_machine_are_its_own(open_lighthouse: Served, host: str) -> None:
    assert open_lighthouse.get("/healthz", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /" + b"x" * 400_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 400_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_garbage_gets_an_answer_and_harms_nobody(lighthouse: Served, request_: bytes) -> None:
    assert exchange(lighthouse.url, request_).startswith(b"HTTP/1.1 40")
    assert lighthouse.get("/healthz").status_code == 200


def test_an_upgrade_to_a_websocket_is_an_ordinary_request(lighthouse: Served) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x"}
    assert lighthouse.get("/healthz", headers=headers).status_code == 200


def test_a_connection_without_a_request_is_ended(
    lighthouse: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.LimitedConnection._await_request, "__defaults__", (0.2,))
    began_at = time.monotonic()
    assert exchange(lighthouse.url, b"GET / HT") == b""
    assert time.monotonic() - began_at < 10


def test_connections_beyond_the_limit_are_ended(
    lighthouse: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 0)
    assert exchange(lighthouse.url, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    monkeypatch.undo()
    with httpx.Client(base_url=lighthouse.url, trust_env=False) as client:
        assert client.get("/healthz").status_code == 200
