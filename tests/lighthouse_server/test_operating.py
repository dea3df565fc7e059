"""Tests the commands with which people look at a lighthouse and give orders through it."""

from __future__ import annotations

import json
import signal
import sys
import threading
from subprocess import PIPE, Popen

import pytest
from support.agents import Agent
from support.running import (
    Line,
    Process,
    command,
    environment,
    lighthouse_process,
    members,
    steady_address,
)

from torchft_svc.core.launch.world import AgentStatus, RunWaiting
from torchft_svc.core.pieces import finish
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.core.quorum.types import DEFAULT_JOB
from torchft_svc.lighthouse_server.table import MAX_ROWS, status_json, status_text
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.channel import MAX_CONNECTING_MS
from torchft_svc.rpc.codec_status import status_from_wire, status_to_wire
from torchft_svc.rpc.commands import ask
from torchft_svc.rpc.security import PLAIN

pytestmark = pytest.mark.processes


def order(*words: str, **variables: str) -> tuple[int, str]:
    """The exit status of `lighthouse WORDS`, and what it says."""
    done = command("lighthouse_server", *words, **variables)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, (done.stdout + done.stderr).strip()


def test_the_exit_status_shows_how_a_job_is(lighthouse: Process, line: Line) -> None:
    line.quorum("s:1", step=3, job="stalls").result()
    line.quorum("f:1", step=3, job="finished").result()
    left = pb.LighthouseLeaveRequest(replica_id="f:1", reason="done", between_steps=True, ends=True)
    line.call("LighthouseService/Leave", left, 10.0, "finished").result()
    where = f"--lighthouse={lighthouse.address}"
    expected = {"stalls": {0: 3, 3600: 0}, "finished": {0: 0}, "nobody": {0: 4}}
    for job, statuses in expected.items():
        for stalled_after, status in statuses.items():
            flags = [where, f"--job-id={job}", f"--stalled-after={stalled_after}"]
            assert order("status", *flags)[0] == status, (job, stalled_after)
    assert order("status", "--lighthouse=127.0.0.1:1", "--job-id=stalls")[0] == 1


def test_status_is_shown_again_while_it_is_watched(lighthouse: Process, line: Line) -> None:
    line.quorum("w:1", step=7, job="watched").result()
    command = [sys.executable, "-m", "torchft_svc.lighthouse_server", "status", "--watch"]
    where = [f"--lighthouse={lighthouse.address}", "--job-id=watched"]
    with Popen([*command, *where], stdout=PIPE, text=True, env=environment()) as watching:
        assert watching.stdout is not None
        try:
            assert any("committed step 7" in shown for shown in watching.stdout)
            line.quorum("w:1", step=8, job="watched").result()
            assert any("committed step 8" in shown for shown in watching.stdout)
        finally:
            watching.kill()


def test_status_shows_what_has_happened() -> None:
    gone = (
        GoneGroup(replica_id="b:1", reason="its session\x1b[31m ended", gone_s=12.0),
        GoneGroup(replica_id="c:1", reason="it has shut down", orderly=True, gone_s=20.0),
        GoneGroup(replica_id="a:0", reason="its session ended", gone_s=30.0),
    )
    job = JobStatus(
        job="j",
        groups=(GroupStatus(replica_id="a:1"),),
        num_expected=3,
        num_discarded=2,
        num_heals=4,
        stalled_s=5.0,
        gone=gone,
    )
    text = status_text([job])
    assert "at least 1 train, 3 are expected" in text
    assert "4 heals, 2 steps discarded; its step last rose 5 s ago" in text
    assert "  lost 12 s ago: b:1: its session\\x1b[31m ended" in text
    assert "  left 20 s ago: c:1: it has shut down" in text
    assert "a:0" not in text, "it is back"


def test_status_shows_how_far_a_heal_is() -> None:
    heals = GroupStatus(
        replica_id="b:1", phase=Phase.HEALING, received_bytes=3_000_000, state_bytes=4_000_000
    )
    (job,) = status_from_wire(finish(status_to_wire([JobStatus(job="j", groups=(heals,))])))
    assert "  healing 75% of 4 MB  " in status_text([job])
    assert '"received_bytes": 3000000' in status_json([job])


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (
            JobStatus(job="j", num_holders=1, copy_step=7, copy_age_s=2.0, committed_step=8),
            "  1 process holds copies of the state of step 7, 1 step back",
        ),
        (
            JobStatus(
                job="j",
                num_holders=2,
                copy_step=5,
                copy_age_s=2.0,
                committed_step=8,
                ended_s=3.0,
            ),
            "  2 processes hold copies of the state of step 5, 3 steps back",
        ),
        (
            JobStatus(job="j", num_holders=1, copy_age_s=2.0, committed_step=8),
            "  1 process for copies of the state holds none as a whole yet",
        ),
        (
            JobStatus(job="j", copy_age_s=2.0, committed_step=8),
            "  no process holds copies of the state any more",
        ),
    ],
)
def test_status_shows_how_far_back_the_copies_are(job: JobStatus, line: str) -> None:
    (job,) = status_from_wire(finish(status_to_wire([job])))
    assert line in status_text([job]).splitlines()
    assert "copies" not in status_text([JobStatus(job="j", committed_step=8)])


@pytest.mark.parametrize(
    ("spares", "line"),
    [
        (
            (PreparedSpare("d:1", asks=True, silent_s=0.25),),
            "  1 spare stands by for 3 places, 1 ready: d:1 (last sign 0.2 s ago)",
        ),
        (
            (PreparedSpare("d:1", silent_s=1.0), PreparedSpare("e:1", asks=True, silent_s=9.0)),
            "  2 spares stand by for 3 places, 1 ready: d:1 (starting, last sign 1.0 s ago), "
            "e:1 (last sign 9.0 s ago)",
        ),
    ],
)
def test_status_shows_who_stands_by(spares: tuple[PreparedSpare, ...], line: str) -> None:
    job = JobStatus(job="j", prepared_spares=spares, num_places=3)
    (job,) = status_from_wire(finish(status_to_wire([job])))
    assert line in status_text([job]).splitlines()
    assert "spare" not in status_text([JobStatus(job="j", num_places=3)])


@pytest.mark.parametrize("ended_s", [None, 3.0])
def test_status_shows_that_states_differ(ended_s: float | None) -> None:
    sentence = "in the check of step 4, they\x1b[31m differ"
    job = JobStatus(job="j", num_differences=2, last_difference=sentence, ended_s=ended_s)
    (job,) = status_from_wire(finish(status_to_wire([job])))
    line = "  2 checks found states that differ; the last one: in the check of step 4, they?[31m"
    assert line in status_text([job])
    assert '"num_differences": 2' in status_json([job])
    assert "differ" not in status_text([JobStatus(job="j", ended_s=ended_s)])


def test_status_shows_launched_runs(lighthouse: Process) -> None:
    where = f"--lighthouse={lighthouse.address}"
    with (
        Agent(lighthouse.address, "node-a", run="launched", max_nodes=1) as a,
        Agent(lighthouse.address, "node-b", run="launched", max_nodes=1) as b,
    ):
        a.report(AgentStatus.JOINING)
        a.work()
        b.report(AgentStatus.JOINING)
        b.await_news(RunWaiting)
        status, text = order("status", where, "--job-id=launched")
        assert status == 0
        assert text.startswith("run launched: running, round 1\n  2 nodes: 1 in the world with 2 ")
        outside, inside = (line.split() for line in text.splitlines()[-2:])
        assert outside[:4] == ["node-b", "-", "2", "joining"]
        assert inside[:4] == ["node-a", "0", "2", "working"]
        _, shown = order("status", where, "--json")
        (run,) = (each for each in json.loads(shown) if each.get("run") == "launched")
        assert [node["status"] for node in run["nodes"]] == ["working", "joining"]
        a.leave(closes=True)
    assert order("status", where, "--job-id=another")[0] == 4


def test_status_shows_all_jobs_or_one(lighthouse: Process, line: Line) -> None:
    line.quorum("a:1", step=7, address="host:1", job="one").result()
    line.beat("b:1", job="two")
    where = f"--lighthouse={lighthouse.address}"
    status, text = order("status", where)
    assert status == 0
    assert "committed step 7\n  1 groups: 1 in the quorum, 0 asking, 0 hung" in text
    assert "job two: no quorum yet" in text
    status, text = order("status", where, "--job_id=one", "--json")
    assert status == 0
    (job,) = json.loads(text)
    (group,) = job["groups"]
    assert (job["job"], job["committed_step"], job["waiting_for"]) == ("one", 7, "")
    assert (group["replica_id"], group["step"], group["address"]) == ("a:1", 7, "host:1")
    assert (group["in_quorum"], group["asking"]) == (True, False)
    assert order("status", where, TORCHFT_JOB_ID="two")[1].startswith("job two:")


def test_accept_loss_lets_the_job_go_on(lighthouse: Process, line: Line) -> None:
    where = [f"--lighthouse={lighthouse.address}", "--job-id=back"]
    for replica_id in ("a:1", "b:1"):
        line.beat(replica_id, job="back")
    behind = line.quorum("b:1", step=5, job="back")
    line.quorum("a:1", step=7, job="back").result()
    behind.result()
    line.leave("a:1", job="back")
    waiting = line.quorum("b:1", step=5, job="back", timeout_s=100)
    line.await_askers("b:1", job="back")
    status, text = order("status", *where)
    assert (status, "lighthouse accept-loss" in text) == (0, True), text
    assert order("accept-loss", *where) == (
        0,
        "job back continues without its committed step 7",
    )
    assert members(waiting.result()) == ["b:1"]
    status, text = order("accept-loss", *where)
    assert (status, "job 'back' has no loss to accept" in text) == (1, True), text


def test_a_group_that_is_not_there_or_cannot_be_reached(lighthouse: Process, line: Line) -> None:
    where = f"--lighthouse={lighthouse.address}"
    line.beat("deaf:1")
    for kind in ("drain", "kill"):
        assert order(kind, where, "--replica=nobody") == (
            1,
            "Error: job 'default' has no living group 'nobody'",
        )
        status, text = order(kind, where, "--replica=deaf")
        assert (status, "has no session with this lighthouse" in text) == (1, True), text
        assert order(kind, where)[0] == 2  # no --replica
    line.beat("deaf:2")
    status, text = order("kill", where, "--replica=deaf")
    assert (status, "say which: deaf:1, deaf:2" in text) == (1, True), text
    assert order("status", where, "--job-id=none") == (
        4,
        "Error: this lighthouse serves no job 'none' now",
    )


def test_the_first_lighthouse_that_answers(lighthouse: Process) -> None:
    gone = steady_address()
    status, text = order("status", TORCHFT_LIGHTHOUSE=f"{gone},{lighthouse.address}")
    assert status == 0, text
    status, text = order("status", f"--lighthouse={gone}")
    assert (status, text.count("cannot be reached"), text.count("\n")) == (1, 1, 0), text


def test_a_lighthouse_that_is_busy_is_waited_for(lighthouse: Process) -> None:
    """The lighthouse is busy for longer than a party that tries again waits for its greeting."""
    lighthouse.send(signal.SIGSTOP)
    busy_s = 1.2 * MAX_CONNECTING_MS / 1000
    goes_on = threading.Timer(busy_s, lighthouse.send, [signal.SIGCONT])
    goes_on.start()
    request = pb.LighthouseStatusRequest()
    answer = pb.LighthouseStatusResponse
    try:
        status = ask("lighthouse", lighthouse.address, PLAIN, DEFAULT_JOB, request, answer)
    finally:
        goes_on.join()
    assert isinstance(status, answer)


def test_operator_commands_need_the_token_that_is_set() -> None:
    with lighthouse_process(TORCHFT_TOKEN="right" * 4) as secured:
        where = f"--lighthouse={secured.address}"
        for words in (["status"], ["accept-loss"], ["kill", "--replica=a"]):
            status, text = order(*words, where)
            assert (status, "Error: not authorized" in text) == (1, True), text
        assert order("status", where, TORCHFT_TOKEN="right" * 4) == (
            0,
            "no job has a living group",
        )


def test_a_long_table_stays_readable() -> None:
    groups = [GroupStatus(replica_id=f"g{i:04}:1", in_quorum=True, step=9) for i in range(1000)]
    groups[700] = GroupStatus(replica_id="g0700:1", in_quorum=True, hung=True)
    groups[800] = GroupStatus(replica_id="g0800:1", asking=True)
    job = JobStatus(job="large", quorum_id=3, groups=tuple(groups))
    lines = status_text([job]).splitlines()
    assert lines[1].strip().startswith("1000 groups: 999 in the quorum, 1 asking, 1 hung")
    assert [line.split()[0] for line in lines[4:7]] == ["g0700:1", "g0800:1", "g0000:1"]
    assert len(lines) == MAX_ROWS + 5
    assert lines[-1].strip() == "and 960 more (--all shows them)"
    assert len(status_text([job], show_all=True).splitlines()) == 1004
    columns = {
        line.index(state)
        for line in lines[4:-1]
        for state in ("HUNG", "in q", "asking")
        if state in line[:24]
    }
    assert len(columns) == 1, "aligned"


@pytest.mark.parametrize(("finished", "how"), [(True, "finished"), (False, "ended unfinished")])
def test_a_job_that_has_ended_is_shown_with_its_last_step(finished: bool, how: str) -> None:
    job = JobStatus(
        job="x", quorum_id=1, committed_step=999, min_replicas=1, ended_s=8.0, finished=finished
    )
    assert status_text([job]) == f"job x: {how} 8 s ago, in step 1000"
