"""Tests that torch's analyzer finds the missing member in the records of a quorum."""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.collective_calls import NAMES, Calls
from support.endings import running
from support.meeting_place import MeetingPlace, marked
from support.running import eventually
from support.training import DEADLINE_S, TIMEOUT, lighthouse, together

from torchft_svc.client import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from torchft_svc.client.process_groups.members import Members
from torchft_svc.client.process_groups.recording import MAX_QUORUMS, FlightRecorder
from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import ConfigError

KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(TIMEOUT)),
    "baby": lambda: ProcessGroupBabyGloo(TIMEOUT),
}


@pytest.fixture(params=marked(KINDS))
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[ProcessGroup]]:
    """Three, as they would be in three processes."""
    groups = [KINDS[request.param]() for _ in range(3)]
    for group in groups:
        group.record_to(FlightRecorder(tmp_path))
    yield groups
    for group in groups:
        group.shutdown()


@pytest.fixture
def analyze(caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """What torch's analyzer says to the files in a folder."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")  # not in old ones

    def run(folder: Path, *flags: str) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "Flight Recorder"):
            try:
                fr_trace.main([str(folder), *flags])
            finally:
                gc.enable()  # which it leaves off
        return caplog.text

    return run


def folder_of(tmp_path: Path, quorum_id: int) -> Path:
    return tmp_path / f"quorum_{quorum_id}" / "group_rank_0"


def all_launch(groups: list[ProcessGroup], *names: str) -> None:
    """Collectives that succeed."""

    def launch(group: ProcessGroup) -> None:
        for name in names:
            getattr(Calls(group), name)()

    together(*(functools.partial(launch, group) for group in groups))


def written(*groups: ProcessGroup) -> None:
    """Wait until everything is."""
    for group in groups:
        group = group.parent if isinstance(group, ProcessGroupWrapper) else group
        assert group._recorder is not None
        group._recorder.close(DEADLINE_S)


def test_the_analyzer_names_who_was_missing(
    tmp_path: Path, groups: list[ProcessGroup], analyze: Callable[..., str]
) -> None:
    """All collectives run first; the analyzer takes none of them for a mistake."""
    MeetingPlace().configure(*groups)
    all_launch(groups, *NAMES)
    for group in groups[:2]:
        group.allreduce([torch.ones(5)])
    for group in groups:
        group.abort()
    written(*groups)
    report = analyze(folder_of(tmp_path, 1))
    assert report.count("Not all ranks joining collective") == 1, report
    assert "collective: gloo:all_reduce" in report
    assert "missing ranks: {2}" in report
    assert "input sizes: [[5]]" in report
    assert "collective state: started" in report
    assert "has errors" not in report


def test_the_log_says_where_it_stands(
    groups: list[ProcessGroup], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c = groups
    MeetingPlace().configure(*groups)
    all_launch(groups, "broadcast")
    works = [group.allreduce([torch.ones(5)]) for group in (a, b)]
    a.save_record("the step is given up")
    a.abort()
    c.lose_member(1, "group a is gone")
    c.abort()
    eventually(works[1].is_completed)  # it notices that both have left
    b.save_record("nobody is there")
    written(*groups)
    where = r"quorum 1, replica rank 0 of 3: all_reduce 2 \(launched .* UTC\) did not end in .* s"
    assert re.search(where + r" \(the step is given up\): .*/rank_0", caplog.text)
    assert re.search(r"rank 1 of 3: all_reduce 2 .* failed after .*nobody is there", caplog.text)
    missing = r"rank 2 of 3: nothing is missing up to broadcast 1 .*group a is gone"
    assert re.search(missing, caplog.text)


def test_who_changes_places_in_order_leaves_no_record(
    tmp_path: Path, groups: list[ProcessGroup]
) -> None:
    place = MeetingPlace()
    place.configure(*groups)
    all_launch(groups, "allreduce", "reduce_scatter", "send_and_recv")
    place.configure(*groups)
    groups[0].allreduce([torch.ones(1)])
    place.configure(*groups)  # but not this time
    for group in groups:
        group.shutdown()
    written(*groups)
    assert [path.name for path in tmp_path.iterdir()] == ["quorum_2"]
    assert [path.name for path in folder_of(tmp_path, 2).iterdir()] == ["rank_0"]


def test_a_record_holds_the_last_collectives_and_no_tensor(tmp_path: Path) -> None:
    group = ProcessGroupGloo(TIMEOUT)
    group.record_to(FlightRecorder(tmp_path, num_records=3))
    MeetingPlace().configure(group)
    alive = [torch.ones(numel, dtype=torch.float64) for numel in range(1, 6)]
    for tensor in alive:
        group.allreduce([tensor]).wait()
    group.forget_completed()
    assert group._flight is not None
    assert [record.outputs[0][0].numel() for record in group._flight._records] == [3, 4, 5]
    watched = [weakref.ref(tensor) for tensor in alive]
    del alive, tensor
    # gloo's own thread holds the last one for a moment longer.
    eventually(lambda: not [each for each in watched if each() is not None])
    group.save_record("for the test")
    group.abort()
    written(group)
    group.shutdown()
    found = pickle.loads((folder_of(tmp_path, 1) / "rank_0").read_bytes())  # noqa: S301 - ours
    assert (found["replica_id"], found["reason"]) == ("group 0", "for the test")
    assert [entry["collective_seq_id"] for entry in found["entries"]] == [3, 4, 5]
    assert {entry["state"] for entry in found["entries"]} == {"completed"}
    assert found["entries"][0]["input_dtypes"] == ["float64"]


def test_the_analyzer_names_who_called_something_else(
    tmp_path: Path, analyze: Callable[..., str]
) -> None:
    """No real group takes part: gloo ends processes of members that disagree on a size."""
    for rank in range(3):
        recorder = FlightRecorder(tmp_path)
        members = Members("nowhere:1/x", f"group {rank}", rank, 3, quorum_id=7, group_rank=2)
        flight = recorder.start_log(members, "nccl")
        assert flight is not None
        for numel in (4, 6 if rank == 2 else 5):
            flight.launch("allreduce", ([torch.ones(numel)],), {})
        recorder.write(flight.snapshot(), "for the test")
        recorder.close(DEADLINE_S)
    folder = tmp_path / "quorum_7" / "group_rank_2"
    report = analyze(folder)
    assert "Collective sequence number: 2 has errors" in report
    # Which of the two sizes it takes for the mistake depends on which file it reads first.
    assert re.search(r"Culprit rank \d; Error type: SIZE_OR_SYNTAX_MISMATCH", report)
    assert "'[[6]]'" in report
    assert "'[[5]]'" in report
    (folder / "rank_1").unlink()
    report = analyze(folder, "--allow-incomplete-ranks")
    assert "we missed FR dumps from ranks ({1})" in report


def test_a_call_that_torch_refuses_is_not_recorded(tmp_path: Path) -> None:
    group = ProcessGroupGloo(TIMEOUT)
    group.record_to(FlightRecorder(tmp_path))
    MeetingPlace().configure(group)
    for call in (group.allreduce, group.allgather, group.send):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            call(7)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        group.send([torch.ones(1)], "nobody")
    assert group._flight is not None
    assert not group._flight._records
    group.shutdown()


def test_the_oldest_quorums_are_forgotten_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "quorum_of_another_kind").mkdir()
    for quorum_id in range(1, MAX_QUORUMS + 1):
        folder_of(tmp_path, quorum_id).mkdir(parents=True)
        (folder_of(tmp_path, quorum_id) / "rank_1").touch()
    (folder_of(tmp_path, 2) / "notes.txt").touch()
    group = ProcessGroupGloo(TIMEOUT)
    group.record_to(FlightRecorder(tmp_path))
    place = MeetingPlace()
    place.quorum_id = MAX_QUORUMS
    for _ in range(2):
        place.configure(group)
        group.abort()
        written(group)
    group.shutdown()
    kept = {f"quorum_{quorum_id}" for quorum_id in range(3, MAX_QUORUMS + 3)}
    # Somebody's notes are not ours to remove.
    assert {path.name for path in tmp_path.iterdir()} - kept == {
        "quorum_2",
        "quorum_of_another_kind",
    }
    assert kept <= {path.name for path in tmp_path.iterdir()}


def test_what_goes_wrong_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"flight_recorder='.*/file/records'"):
        FlightRecorder(tmp_path / "file" / "records")
    with pytest.raises(ConfigError, match="num_records=0"):
        FlightRecorder(tmp_path, num_records=0)
    (tmp_path / "quorum_1").touch()
    group = ProcessGroupGloo(TIMEOUT)
    group.record_to(FlightRecorder(tmp_path))
    MeetingPlace().configure(group)
    group.abort()
    written(group)
    group.shutdown()
    assert "quorum 1, replica rank 0 of 1 cannot be written" in caplog.text


@pytest.mark.processes
def test_the_analyzer_names_a_trainer_that_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, analyze: Callable[..., str]
) -> None:
    """Two trainers, of which one computes nothing until somebody kills it."""
    monkeypatch.setenv("TORCHFT_FLIGHT_RECORDER", str(tmp_path))
    with (
        lighthouse() as address,
        running("hangs", address) as hung,
        running("waits_in_backward", address) as waits,
    ):
        hung.read_until("training")
        waits.read_until("waiting")
        with LighthouseClient(address, TIMEOUT) as operator:
            operator.kill(f"hangs-{hung.process.pid}", "it hangs")
        assert hung.ends() == 1
        assert waits.ends() == 0, waits.errors()
        # A sum, or the comparison before the first one of these members.
        said = r"replica rank 1 of 2: all_\w+ \d+ \(launched .*\) (failed after|did not end in)"
        assert re.search(said, waits.errors())
    (quorum,) = (tmp_path / "job_default").glob("quorum_*/group_rank_0")
    report = analyze(quorum)
    assert "missing ranks: {0}" in report
    assert "collective: gloo:all_" in report
    (quorum / "rank_0").unlink()  # as if it had been frozen, or killed by the system
    with pytest.raises(AssertionError, match=r"Missing dump files from ranks \{0\}"):
        analyze(quorum)
