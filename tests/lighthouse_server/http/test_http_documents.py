"""Tests the documents of the dashboard, and the differences that are sent of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.core.launch.launched_run import NodeStatus, RunStatus
from torchft_svc.core.launch.world import AgentStatus
from torchft_svc.core.quorum.activity import Phase
from torchft_svc.core.quorum.lighthouse.incidents import Goodput, Incident, IncidentKind
from torchft_svc.core.quorum.lighthouse.overview import GoneGroup, GroupStatus, JobStatus
from torchft_svc.core.quorum.lighthouse.pace import Pace
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.lighthouse_server.http.differences import Document, difference
from torchft_svc.lighthouse_server.http.documents import (
    PACE_UPDATES,
    ShownPaces,
    job_document,
    overview,
)
from torchft_svc.lighthouse_server.http.public_status import status_html

NOW = 1_000_000.0
GROUPS = (
    GroupStatus(replica_id="a:1", in_quorum=True, step=7, phase=Phase.TRAINING, phase_s=0.5),
    GroupStatus(replica_id="b:1", in_quorum=True, step=0, phase=Phase.HEALING, phase_s=2.0),
    GroupStatus(replica_id="c:1", in_quorum=True, hung=True, silent_s=3.0),
    GroupStatus(replica_id="d:1", left_out=True),
    GroupStatus(replica_id="e:1", asking=True),
    GroupStatus(replica_id="f:1"),
)
JOB = JobStatus(
    job="j",
    quorum_id=9,
    committed_step=7,
    groups=GROUPS,
    num_expected=8,
    stalled_s=4.0,
    goodput=Goodput(wall_s=90.0, committed_s=30.0, lost_s={"other": 60.04}, ratio=1 / 3),
    gone=(
        GoneGroup(replica_id="g:2", reason="crashed", gone_s=1.0),
        GoneGroup(replica_id="g:1", reason="before", gone_s=60.0),
        GoneGroup(replica_id="a:0", reason="and back", gone_s=90.0),
        GoneGroup(replica_id="h:1", orderly=True, gone_s=99.0),
    ),
)


def document(
    job: JobStatus = JOB,
    now: float = NOW,
    *incidents: Incident,
    paces: Mapping[str, Sequence[Document]] | None = None,
) -> Document:
    return job_document(job, now, None, incidents, paces or {})


def test_a_group_that_heals_shows_how_far_it_is() -> None:
    heals = {"received_bytes": 10, "state_bytes": 40}
    group = GroupStatus(replica_id="b:1", phase=Phase.HEALING, **heals)
    shown = document(replace(JOB, groups=(group, *GROUPS[:1])))["groups"]
    assert shown["b"].items() >= heals.items()
    assert not shown["a"].keys() & heals.keys()


def test_a_group_has_the_state_that_matters_most() -> None:
    states = {name: group["state"] for name, group in document()["groups"].items()}
    assert states == {
        "a": "training",
        "b": "healing",
        "c": "hung",
        "d": "left out",
        "e": "waiting",
        "f": "outside",
        "g": "lost",
        "h": "left",
    }


def test_a_summary_has_the_spares_and_a_long_silence_of_one() -> None:
    fresh = PreparedSpare("s:1", asks=True, silent_s=0.5)
    shown = document(JobStatus(job="j", prepared_spares=(fresh,)))["summary"]
    assert (shown["spares"], shown["spares_ready"]) == (1, 1)
    assert "spares_seen_at" not in shown  # it would change with each beat
    silent = PreparedSpare("s:2", silent_s=8.0)
    shown = document(JobStatus(job="j", prepared_spares=(fresh, silent)))["summary"]
    assert (shown["spares"], shown["spares_ready"], shown["spares_seen_at"]) == (2, 1, NOW - 8)
    assert not {"spares", "spares_ready"} & document()["summary"].keys()


def test_each_spare_is_in_it_with_what_it_can_do() -> None:
    spares = (PreparedSpare("s:1", asks=True, silent_s=0.5), PreparedSpare("a:2", silent_s=8.0))
    shown = document(replace(JOB, prepared_spares=spares))
    assert shown["spares"] == {
        "s": {"id": "s:1", "state": "ready spare"},
        "a:2": {"id": "a:2", "state": "starting spare", "seen_at": NOW - 8},
    }
    assert {"a:1", "b"} <= shown["groups"].keys(), "a name that is not the group's alone"
    assert "spares" not in document()


def test_the_goodput_is_in_it_where_it_is_known() -> None:
    expected = {"ratio": 0.333, "committed_s": 30, "lost_s": {"other": 60.0}}
    assert document()["goodput"] == expected
    assert "goodput" not in document(JobStatus(job="j"))


def test_the_copies_of_the_state_are_in_it_where_a_process_holds_them() -> None:
    held = replace(JOB, num_holders=2, copy_step=5, copy_age_s=3.0)
    expected = {"holders": 2, "step": 5, "at": NOW - 3}
    assert document(held)["summary"]["copies"] == expected
    later = replace(held, copy_age_s=7.5, stalled_s=8.5)
    assert document(later, NOW + 4.5)["summary"]["copies"] == expected, "time alone is no change"
    assert "copies" not in document()["summary"]


def test_the_next_incarnation_takes_over_the_row_of_its_name() -> None:
    groups = document()["groups"]
    assert groups["a"]["id"] == "a:1"
    assert groups["g"] == {"id": "g:2", "state": "lost", "gone_at": NOW - 1, "reason": "crashed"}


def test_two_groups_with_one_name_have_two_rows() -> None:
    twins = tuple(GroupStatus(replica_id=f"a:{number}") for number in (1, 2))
    assert set(document(JobStatus(job="j", groups=twins))["groups"]) == {"a:1", "a:2"}


def test_time_alone_changes_nothing() -> None:
    def later(by_s: float) -> JobStatus:
        groups = (
            GroupStatus(replica_id="a:1", phase=Phase.IDLE, phase_s=5 + by_s, silent_s=8 + by_s),
        )
        gone = (GoneGroup(replica_id="b:1", gone_s=7 + by_s),)
        return JobStatus(job="j", groups=groups, gone=gone, stalled_s=2 + by_s)

    assert document(later(0.0)) == document(later(3.25), NOW + 3.25)
    ended = [JobStatus(job="j", stalled_s=6 + by_s, ended_s=5 + by_s) for by_s in (0.0, 9.5)]
    assert overview(ended[:1], (), NOW) == overview(ended[1:], (), NOW + 9.5)


def training(number: int, **changes: Any) -> GroupStatus:
    fields = {"in_quorum": True, "step": 7, "phase": Phase.TRAINING, **changes}
    return GroupStatus(replica_id=f"g{number}:1", address=f"host-{number}:1", **fields)


def test_groups_that_train_as_they_should_change_nothing() -> None:
    """A thousand of them would otherwise be sent anew each second, to each reader."""
    before = JobStatus(job="j", committed_step=7, groups=tuple(map(training, range(1000))))
    random = Random(1)
    groups = tuple(
        training(
            number,
            step=random.randrange(17, 19),
            phase=random.choice((Phase.TRAINING, Phase.QUORUM, Phase.VOTING)),
            phase_s=random.uniform(0.0, 4.9),
            silent_s=random.uniform(0.0, 4.9),
            asking=random.random() < 0.5,
        )
        for number in range(1000)
    )
    after = replace(before, committed_step=17, groups=groups)
    patch = difference(document(before), document(after, NOW + 1.0))
    assert patch == {"summary": {"step": 17, "moved_at": NOW + 1.0}}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"step": 5}, {"step": 5, "phase": "training", "phase_at": NOW}),
        ({"phase_s": 6.0}, {"phase": "training", "phase_at": NOW - 6.0}),
        ({"silent_s": 6.0}, {"seen_at": NOW - 6.0}),
        ({"slow": True, "slowest_rank": 3}, {"slow": True, "slowest_rank": 3}),
        (
            {"phase": Phase.HEALING, "phase_s": 1.0},
            {"state": "healing", "step": 7, "phase": "healing", "phase_at": NOW - 1.0},
        ),
        (
            {"in_quorum": False, "asking": True, "phase": None},
            {"state": "waiting", "step": 7, "asking": True},
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_shown_at_once(
    changes: dict[str, Any], shown: Document
) -> None:
    job = JobStatus(job="j", committed_step=7, groups=(training(0, **changes),))
    usual = {"id": "g0:1", "state": "training", "address": "host-0:1"}
    assert document(job)["groups"]["g0"] == usual | shown


# -- paces -----------------------------------------------------------------------------------------


def paces(seconds: float) -> tuple[Pace, ...]:
    return (Pace("step", seconds, 2 * seconds, 1.0), Pace("training", seconds / 2))


def test_the_paces_of_each_group_are_looked_at_in_turns() -> None:
    ids = [f"g{number}:1" for number in range(2 * PACE_UPDATES)]
    shown, looks = ShownPaces(), []

    def look(due: Sequence[str]) -> dict[str, tuple[Pace, ...]]:
        looks.append(list(due))
        return {each: paces(0.25 * len(looks)) for each in due}

    first = shown.update(ids, look)
    assert looks == [ids], "a reader who comes sees all"
    assert first["g1:1"][0] == {
        "phase": "step",
        "seconds": 0.25,
        "to_best": 0.5,
        "to_own_best": 1.0,
    }
    for _ in range(PACE_UPDATES):
        found = shown.update(ids, look)
    assert sorted(each for due in looks[1:] for each in due) == sorted(ids)
    assert max(map(len, looks[1:])) == 2
    assert all(each[0]["seconds"] > 0.25 for each in found.values())
    assert shown.update([*ids[2:], "new:1"], look).keys() == {*ids[2:], "new:1"}


def test_a_pace_that_differs_by_noise_is_not_sent_again() -> None:
    shown = ShownPaces()

    def later(seconds: float) -> float:
        for _ in range(PACE_UPDATES):
            found = shown.update(["a:1"], lambda due: {each: paces(seconds) for each in due})
        seconds = found["a:1"][0]["seconds"]
        return seconds

    assert [later(each) for each in (0.25, 0.26, 0.24, 0.3, 0.31)] == [0.25, 0.25, 0.25, 0.3, 0.3]


def test_a_group_whose_paces_are_not_known_has_none() -> None:
    shown = ShownPaces().update(["a:1", "b:1"], lambda due: {"a:1": paces(0.25)})
    found = document(paces=shown)["groups"]
    assert (len(found["a"]["paces"]), "paces" in found["b"]) == (2, False)


# -- the rest --------------------------------------------------------------------------------------


def test_an_incident_is_in_it_without_what_is_not_known() -> None:
    lost = Incident(
        number=3,
        job="j",
        kind=IncidentKind.LOST,
        cause="gone",
        groups=("g:2",),
        at=NOW,
        paused_s=0.5,
    )
    shown = document(JOB, NOW, lost)["incidents"]["3"]
    assert (shown["kind"], shown["groups"], shown["paused_s"]) == ("lost", ["g:2"], 0.5)
    assert "healed_s" not in shown


def test_a_run_is_shown_with_its_nodes() -> None:
    node = NodeStatus(
        node_id="n1",
        host="h",
        node_rank=0,
        num_workers=2,
        status=AgentStatus.WORKING,
        reached=False,
        num_restarts=1,
        silent_s=1.0,
        waits_for_s=None,
    )
    run = RunStatus(
        run="r", round=2, min_nodes=1, max_nodes=2, phase="running", why="", nodes=(node,)
    )
    shown = overview((), (run,), NOW)["runs"]["r"]
    assert shown["nodes"]["n1"] == {
        "rank": 0,
        "host": "h",
        "workers": 2,
        "state": "working",
        "late": True,
        "restarts": 1,
        "seen_at": NOW - 1,
    }


def has_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_none, value.values()))
    return value is None


def test_a_document_contains_no_null() -> None:
    """A patch would remove what has it."""
    assert not has_none(document())
    assert not has_none(overview([JOB, JobStatus(job="k", ended_s=1.0)], (), NOW))


# -- differences -----------------------------------------------------------------------------------

VALUES = st.none() | st.integers(0, 3) | st.booleans() | st.lists(st.integers(0, 2), max_size=2)
DOCUMENTS = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        VALUES.filter(lambda value: value is not None),
        lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def merge(target: Any, patch: Any) -> Any:
    """The algorithm of RFC 7396, word by word."""
    if not isinstance(patch, dict):
        return patch
    if not isinstance(target, dict):
        target = {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = merge(target.get(name), value)
    return target


def is_same(first: object, second: object) -> bool:
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@given(DOCUMENTS, DOCUMENTS)
def test_a_patch_makes_the_new_document_of_the_old_one(before: Document, after: Document) -> None:
    patch = difference(before, after)
    patched = merge(json.loads(json.dumps(before)), json.loads(json.dumps(patch)))
    assert is_same(patched, after)
    assert not difference(after, json.loads(json.dumps(after)))


def test_a_patch_contains_what_has_changed_alone() -> None:
    before = {"groups": {"a": {"step": 1, "state": "training"}, "b": {"step": 1}}}
    after = {"groups": {"a": {"step": 2, "state": "training"}, "c": {"step": 1}}}
    assert difference(before, after) == {"groups": {"a": {"step": 2}, "b": None, "c": {"step": 1}}}


def test_the_status_of_the_public_release_escapes_what_others_say() -> None:
    evil = GroupStatus(replica_id="<script>:1", address="<img>")
    page = status_html([JobStatus(job="<b>", waiting_for="<i>", groups=(evil,))])
    assert not any(tag in page for tag in ("<script", "<img", "<b>", "<i>"))
    assert "&lt;script&gt;:1" in page
