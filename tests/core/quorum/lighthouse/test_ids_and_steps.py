"""Rules Q6 and Q7: when the quorum id grows, and what happens to committed steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.recorded_jobs import AnswerQuorum
from support.core.scenes import JOB, Refused, Scene, answer, config, formed, loss, member

from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.lighthouse.jobs import MAX_AHEAD_OF_NEW_JOB_S, MAX_AHEAD_S
from torchft_svc.core.quorum.lighthouse.membership import GATHER_S
from torchft_svc.core.quorum.lighthouse.quorum import joining
from torchft_svc.core.quorum.session_messages import Kill
from torchft_svc.core.quorum.tally import Tally
from torchft_svc.core.quorum.types import Member, Quorum
from torchft_svc.errors import RequestRefused

SILENT = "no sign of life for 100 s"


def ids_after(*groups: Member, first_id: int = 0) -> list[int]:
    """The ids of a quorum of a:1 and b:1 and of the one of ``groups`` that follows it."""
    scene = Scene(first_id=first_id)
    scene.beat("a", "b")
    scene.ask_all("a", "b")
    for number, each in enumerate(groups, start=3):
        scene._record(scene.jobs.request("job", each, number, scene.now))
    return [quorum_id for quorum_id, _ in scene.pop_quorums()]


@pytest.mark.parametrize(
    ("groups", "ids"),
    [
        ((member("a", 1), member("b", 1)), [1, 1]),
        ((member("a", shrink_only=True), member("b", data="{}")), [1, 1]),
        ((member("a", commit_failures=1), member("b")), [1, 2]),
        ((member("a"), member("b", address="elsewhere:1")), [1, 2]),
        ((member("a"), member("b", store_address="elsewhere:2")), [1, 2]),
        ((member("c"), member("a"), member("b")), [1, 2]),
        ((member("a", seen_quorum_id=1), member("b")), [1, 1]),
        ((member("a", seen_quorum_id=2), member("b")), [1, 3]),
        ((member("a", seen_quorum_id=9), member("b", seen_quorum_id=5)), [1, 10]),
    ],
    ids=["same", "other fields", "failures", "address", "store", "joiner", "own", "seen", "most"],
)
def test_q6_when_the_id_grows(groups: tuple[Member, ...], ids: list[int]) -> None:
    assert ids_after(*groups) == ids


def test_q6_ids_begin_above_the_base() -> None:
    assert ids_after(member("a"), member("b"), first_id=1_700_000_000) == [1_700_000_001] * 2


def test_q6_a_member_less() -> None:
    scene = formed("a", "b")
    scene.leave("b")
    scene.ask("a")
    scene.ask_all("b", "a")
    assert scene.pop_quorums() == [(2, ["a"]), (3, ["a", "b"])]


def test_q6_an_id_reported_by_anyone_is_not_given_out_again() -> None:
    """A group that gave up, or is kept out of the quorum, may have reported the id, too."""
    scene = formed("a")
    scene.withdraw(scene.ask("c", seen_quorum_id=6))
    scene.leave("c")
    scene.ask("a")
    assert scene.pop_quorums() == [(7, ["a"])]
    scene.ask("b", seen_quorum_id=9)
    scene.ask("a", shrink_only=True)
    scene.ask("a")
    assert scene.pop_quorums() == [(10, ["a"]), (11, ["a", "b"])]


def test_q6_ids_go_on_after_the_job_has_ended_and_come_back() -> None:
    scene = formed("a")
    scene.leave("a")
    scene.ask("a")
    assert scene.pop_quorums() == [(2, ["a"])]
    scene.leave("a")
    scene.withdraw(scene.ask("b", seen_quorum_id=6, min_replicas=2))  # of another lighthouse
    scene.leave("b")
    scene.ask("a")
    assert scene.pop_quorums() == [(7, ["a"])]


# As many as a lighthouse of these tests has for a second.
IDS_PER_S = 1000


def test_q6_an_id_of_the_far_future_is_refused() -> None:
    """An id may be ahead by as much as clocks may differ.

    An id of a job that is new here may be ahead by a little more.
    """
    scene = Scene(first_id=70)
    scene.now = 60.0
    clock_id = 70 + 60 * IDS_PER_S
    highest = clock_id + int(MAX_AHEAD_OF_NEW_JOB_S) * IDS_PER_S
    scene.ask("a", seen_quorum_id=highest)
    scene.ask("a", seen_quorum_id=highest + 1, commit_failures=1)  # it was given out here
    assert scene.pop_quorums() == [(highest + 1, ["a"]), (highest + 2, ["a"])]
    scene = Scene(first_id=70)
    scene.ask("a")
    scene.pop_orders()
    of_running = 70 + int(scene.now + MAX_AHEAD_S) * IDS_PER_S
    for reported in (of_running + 1, 2**61):
        with pytest.raises(
            RequestRefused, match=f"quorum {reported}, which a group reported, was never issued"
        ):
            scene.ask("b", seen_quorum_id=reported)
    assert [each.groups[0].replica_id for each in scene.jobs.status("", scene.now)] == ["a"]
    scene.ask("b", seen_quorum_id=of_running)
    scene.ask("a")
    assert scene.pop_quorums() == [(of_running + 1, ["a", "b"])]


def test_q6_a_lighthouse_whose_clock_is_not_set_believes_any_id() -> None:
    """The lighthouse's clock shows a time before all ids: the job that runs knows better."""
    scene = Scene(first_id=7, id_stride=16)
    scene.ask("a", seen_quorum_id=2**61)
    ((quorum_id, _),) = scene.pop_quorums()
    assert 2**61 < quorum_id <= 2**61 + 16


def test_q6_what_is_reported_in_one_job_does_not_move_the_ids_of_another() -> None:
    scene = Scene(config(max_jobs=2), first_id=70)
    far = 70 + int(MAX_AHEAD_S) * IDS_PER_S
    scene.ask("a", job="forged", seen_quorum_id=far)
    scene.leave("a", job="forged")
    scene.ask("b", job="honest")
    assert scene.pop_quorums() == [(far + 1, ["a"]), (71, ["b"])]
    scene.leave("b", job="honest")
    scene.ask("a", job="forged")  # but each goes on above its own
    scene.ask("b", job="honest")
    assert scene.pop_quorums() == [(far + 2, ["a"]), (72, ["b"])]


def test_q6_ids_do_not_come_back_when_a_job_is_forgotten() -> None:
    """An id may come back if it was ahead of the clock."""
    scene = Scene(config(max_jobs=1), first_id=70)
    scene.now = 60.0
    far = 70 + int(MAX_AHEAD_S) * IDS_PER_S
    for job, reported in (("x", 5000), ("y", 0), ("z", far), ("x", 0), ("w", 0)):
        scene.ask("a", job=job, seen_quorum_id=reported)
        scene.leave("a", job=job)
    ids = [quorum_id for quorum_id, _ in scene.pop_quorums()]
    assert ids[0] == 5001
    assert ids[1] == 71
    assert ids[2] == far + 1
    assert 5001 < ids[3] <= ids[4] <= 70 + 60 * IDS_PER_S + 1


def test_q6_a_forged_id_does_not_keep_the_job_from_the_next_lighthouse() -> None:
    """The next lighthouse has the same clock, or one that is a little behind."""
    scene = formed("a")
    scene.ask("b", seen_quorum_id=int(MAX_AHEAD_S) * IDS_PER_S)
    scene.ask("a", step=1)
    ((quorum_id, _),) = scene.pop_quorums()
    following = Scene()
    following.ask("a", step=1, seen_quorum_id=quorum_id)
    assert following.pop_quorums() == [(quorum_id + 1, ["a"])]


# -- steps that are not believed --------------------------------------------------------------


def doubted(replica_id: str, reported: int) -> Member:
    return member(replica_id, 0, doubted_step=reported)


@pytest.mark.parametrize("reported", [72, 1000, 2**62])
def test_doubt_a_newcomer_more_than_a_step_ahead_of_the_job_has_to_heal(reported: int) -> None:
    scene = formed("a", "b", step=70)
    scene.ask("c", step=reported)
    scene.ask_all("a", "b", step=71)
    quorum = answer(2, member("a", 71), member("b", 71), doubted("c", reported), callers=(4, 5, 3))
    assert scene.pop_orders() == [quorum]
    assert [each.replica_id for each in quorum.quorum.up_to_date] == ["a", "b"]
    scene.leave("c")
    scene.pop_orders()
    scene.ask_all("a", "b", step=72)
    assert scene.pop_quorums() == [(3, ["a", "b"])]
    assert scene.jobs.committed_step(JOB) == 72


def test_doubt_the_commit_that_the_others_discarded_is_believed() -> None:
    scene = formed("a", "b", step=70)
    scene.leave("a")
    scene.pop_orders()
    scene.ask("a", step=71)  # it committed alone, and its session broke
    scene.ask("b", step=70, commit_failures=1)
    ((_, members),) = scene.pop_quorums()
    assert members == ["a", "b"]
    assert scene.jobs.committed_step(JOB) == 71


def test_doubt_who_could_not_heal_is_not_believed_the_next_time_either() -> None:
    scene = formed("a", step=70)
    scene.ask("c", step=1000)
    scene.ask("a", step=71)
    scene.pop_orders()
    scene.ask("c", step=1000, unhealed=True)
    scene.ask("a", step=72)
    (order,) = scene.pop_orders()
    assert order.quorum.participants == (
        member("a", 72),
        member("c", 0, doubted_step=1000, unhealed=True),
    )


def test_doubt_where_no_group_of_the_last_quorum_lives_the_highest_wins() -> None:
    scene = formed("a", step=70)
    scene.ask("c", step=1000)
    scene.ask("d", step=900)
    scene.leave("a")
    assert scene.pop_quorums() == [(2, ["c", "d"])]
    assert scene.jobs.committed_step(JOB) == 1000


def test_doubt_nobody_takes_the_job_over_while_its_last_group_hangs() -> None:
    scene = formed("a", "b", step=70, settings=config(min_replicas=2))
    scene.ask("b", step=71)
    scene.until(110)  # a is late
    scene.leave("b")
    scene.pop_orders()
    scene.ask("c", step=1000)
    scene.ask("d", step=900)
    assert scene.pop_orders() == []
    assert scene.why().startswith("c, d: more than a step ahead of the job, which has committed")
    with pytest.raises(RequestRefused, match="no loss to accept"):
        scene.accept_loss()
    scene.leave("a")
    assert scene.pop_quorums() == [(2, ["c", "d"])]


def test_doubt_groups_that_all_went_on_from_another_checkpoint_are_believed() -> None:
    scene = formed("a", "b", step=70)
    scene.ask_all("a", "b", step=1000)
    assert scene.pop_quorums() == [(1, ["a", "b"])]
    assert scene.jobs.committed_step(JOB) == 1000


def test_doubt_who_was_in_a_newer_quorum_elsewhere_is_believed() -> None:
    """The job went on with another lighthouse, all but one group that could not reach that."""
    scene = formed("a:1", "b:1", "c:1", step=100)
    scene.leave("a:1")
    scene.leave("b:1")
    scene.pop_orders()
    scene.opened("a:2", quorum_id=50, max_step=300)
    scene.opened("b:2", quorum_id=50, max_step=300)
    for replica_id, step in (("a:2", 301), ("b:2", 301), ("d:1", 1000), ("c:1", 100)):
        scene.ask(replica_id, step=step, seen_quorum_id=50)
    (order,) = scene.pop_orders()
    steps = {each.replica_id: each.step for each in order.quorum.participants}
    assert steps == {"a:2": 301, "b:2": 301, "c:1": 100, "d:1": 0}
    assert scene.jobs.committed_step(JOB) == 301


def forge(scene: Scene, *replica_ids: str, step: int = 2**62) -> None:
    """Make these groups report all that shows that the job went on elsewhere."""
    for replica_id in replica_ids:
        scene.opened(replica_id, quorum_id=50, max_step=step)
        reported = {"seen_quorum_id": 50, "has_history": True, "last_num_groups": 3}
        scene.ask(replica_id, step=step, **reported)


@pytest.mark.parametrize(
    "forged",
    [("e:1",), ("e:1", "f:1", "g:1", "h:1"), ("b:9", "e:1"), ("b:9", "b:8", "a:9")],
    ids=["one", "many", "a name of a lost group", "one name twice, and one that lives"],
)
def test_doubt_a_history_that_strangers_have_made_up_is_not_believed(
    forged: tuple[str, ...],
) -> None:
    """The history does not hold the job either when the strangers have left."""
    scene = formed("a:1", "b:1", "c:1", step=70)
    scene.leave("b:1")
    forge(scene, *forged)
    scene.ask_all("a:1", "c:1", step=71)
    (order,) = [each for each in scene.pop_orders() if isinstance(each, AnswerQuorum)]
    steps = {each.replica_id: each.step for each in order.quorum.participants}
    assert {steps.pop("a:1"), steps.pop("c:1")} == {71}
    assert set(steps.values()) == {0}
    for replica_id in forged:
        scene.leave(replica_id)
    scene.pop_orders()
    scene.ask_all("a:1", "c:1", step=72)
    assert [members for _, members in scene.pop_quorums()] == [["a:1", "c:1"]]
    assert scene.jobs.committed_step(JOB) == 72


def test_doubt_of_two_groups_the_one_that_stayed_is_believed() -> None:
    """Both may have gone on alone, and nobody else can say who is right."""
    scene = formed("a:1", "b:1", step=70)
    scene.leave("b:1")
    forge(scene, "b:2", step=200)
    scene.ask("a:1", step=71)
    (order,) = [each for each in scene.pop_orders() if isinstance(each, AnswerQuorum)]
    assert [each.step for each in order.quorum.participants] == [71, 0]


def test_doubt_groups_that_committed_a_step_while_the_lighthouse_was_away_are_believed() -> None:
    """One that was restarted meanwhile, and has lost its state, was alone in the first quorum."""
    scene = formed("a:2", step=0)
    scene.ask_all("b:1", "c:1", step=1)
    scene.ask("a:2", step=0, commit_failures=1)
    order = scene.pop_orders()[-1]
    assert [each.step for each in order.quorum.participants] == [0, 1, 1]


def test_doubt_a_lighthouse_that_is_new_to_the_job_believes_those_that_report_it() -> None:
    scene = Scene()
    scene.opened("a", quorum_id=50, max_step=70)
    scene.opened("b", quorum_id=50, max_step=70)
    scene.ask("c", step=1000)
    for replica_id in "ab":
        scene.ask(replica_id, step=71, seen_quorum_id=50, last_num_groups=2)
    assert scene.pop_quorums() == [(51, ["a", "b", "c"])]
    assert scene.jobs.committed_step(JOB) == 71


def test_doubt_a_lighthouse_that_knows_only_a_part_of_the_last_quorum_believes_a_newer_step() -> (
    None
):
    """The others may have gone on, and have been restarted since."""
    scene = Scene()
    scene.opened("a", quorum_id=50, max_step=70)
    scene.ask("c", step=200)
    scene.ask("a", step=71, seen_quorum_id=50, last_num_groups=2, has_history=True)
    scene.until(GATHER_S)
    assert scene.pop_quorums() == [(51, ["a", "c"])]
    assert scene.jobs.committed_step(JOB) == 200


def test_doubt_a_lighthouse_can_let_the_job_follow() -> None:
    scene = formed("a", step=70, settings=config(on_step_jump="follow"))
    scene.ask("c", step=1000)
    scene.ask("a", step=71)
    assert scene.pop_quorums() == [(2, ["a", "c"])]
    assert scene.jobs.committed_step(JOB) == 1000


def test_doubt_at_the_first_step_nobody_begins_with_the_weights_of_one_that_is_not_believed() -> (
    None
):
    scene = formed("b", "c", step=0)
    scene.ask("a", step=1000)
    scene.ask_all("b", "c", step=0)
    (order,) = scene.pop_orders()
    for group_rank in (0, 1):
        parts = [assign(order.quorum, each, group_rank) for each in "abc"]
        assert [part.recover_src_replica_rank for part in parts] == [1, None, 1]
        assert {part.store_address for part in parts} <= {"b:2", "c:2"}


def test_q7_hold_until_the_newer_state_is_back() -> None:
    scene = formed("a", "b", step=7)
    scene.leave("a")
    scene.pop_orders()
    scene.ask("b", step=5)
    assert scene.pop_orders() == []
    assert scene.why().startswith("the job has committed step 7, the groups that ask have at most")
    scene.ask("c", step=6)
    assert scene.pop_orders() == []
    scene.ask("a:2", step=7)
    assert scene.pop_quorums() == [(2, ["a:2", "b", "c"])]


def test_q7_a_restart_of_the_whole_job_goes_on_with_a_warning() -> None:
    scene = formed("a", "b", step=7)
    scene.leave("a")
    scene.leave("b")
    scene.pop_orders()
    scene.ask("c", step=4)
    assert scene.pop_orders() == [answer(2, member("c", 4), callers=(3,), lost_from=7)]
    scene.ask("c", step=5)  # from here on it is an ordinary job
    assert scene.pop_orders() == [answer(2, member("c", 5), callers=(4,))]


def test_q7_newcomers_that_saw_the_job_end_count_as_a_restart() -> None:
    scene = formed("a", step=7)
    scene.ask("b", step=4)
    assert scene.pop_orders() == []
    scene.leave("a")
    assert scene.pop_orders() == [loss("a"), answer(2, member("b", 4), callers=(2,), lost_from=7)]


@pytest.mark.parametrize("all_gone", [True, False])
def test_q7_warn_goes_on_in_either_case(all_gone: bool) -> None:
    scene = formed("a", "b", step=7, settings=config(on_step_regression="warn"))
    scene.leave("a")
    if all_gone:
        scene.leave("b")
    scene.pop_orders()
    scene.ask("b", step=4)
    assert scene.pop_orders() == [answer(2, member("b", 4), callers=(3,), lost_from=7)]


@pytest.mark.parametrize("all_gone", [True, False])
def test_q7_hold_waits_in_either_case(all_gone: bool) -> None:
    scene = formed("a", "b", step=7, settings=config(on_step_regression="hold"))
    scene.leave("a")
    if all_gone:
        scene.leave("b")
    scene.pop_orders()
    scene.ask("b", step=4)
    assert scene.pop_orders() == []
    scene.ask("c", step=7)
    assert scene.pop_quorums() == [(2, ["b", "c"])]


def test_q7_who_was_frozen_while_the_others_went_on_never_takes_the_job_back() -> None:
    """The group comes back as another incarnation, and does not report the quorum that it was in.

    Nobody waits for it there.
    """
    scene = formed("a:1", "b:1", step=62)
    scene.leave("b:1", "no sign of life")
    scene.ask("a:1", step=210)
    scene.leave("a:1")
    scene.pop_orders()
    scene.ask("b:2", step=62, seen_quorum_id=1, last_num_groups=2, has_history=True)
    scene.until(scene.now + 99)
    assert scene.pop_orders() == []
    assert scene.why().startswith("the job has committed step 210, the groups that ask have at")
    scene.ask("c:1", step=200)  # a restart from a checkpoint beside it decides nothing either
    assert scene.pop_orders() == []
    scene.accept_loss()
    assert scene.pop_quorums() == [(3, ["b:2", "c:1"])]


@pytest.mark.parametrize("policy", ["auto", "hold", "warn"])
def test_q7_after_a_finished_job_another_run_begins(policy: str) -> None:
    scene = formed("a", "b", step=7, settings=config(on_step_regression=policy))
    scene.leave("a", ends=True)
    scene.leave("b", ends=True)
    scene.withdraw(scene.ask("d", step=0, min_replicas=2))  # somebody who looks in changes nothing
    scene.leave("d")
    scene.pop_orders()
    caller = scene.ask("c")
    group = member("c")
    assert scene.pop_orders() == [
        answer(2, group, callers=(caller,), lost_from=7, begins_anew=True)
    ]
    caller = scene.ask("c", step=1)
    assert scene.pop_orders() == [answer(2, member("c", 1), callers=(caller,))]
    scene.leave("c", ends=False)
    scene.pop_orders()
    caller = scene.ask("e")
    reported = [answer(3, member("e"), callers=(caller,), lost_from=1)]
    assert scene.pop_orders() == ([] if policy == "hold" else reported), "that run had not finished"


def test_q7_who_belongs_to_a_finished_job_does_not_begin_it_anew() -> None:
    scene = formed("a:1", "b:1", step=62)
    scene.leave("b:1", "no sign of life")
    scene.ask("a:1", step=210)
    scene.leave("a:1", ends=True)
    scene.pop_orders()
    scene.ask("b:2", step=62, seen_quorum_id=1, has_history=True)
    assert scene.pop_orders() == []
    assert scene.why().startswith("the job has finished after step 210, the groups that ask have")


def test_q7_a_job_is_finished_only_if_all_its_groups_ended_on_purpose() -> None:
    scene = formed("a", "b", step=7)
    scene.leave("a", ends=True)
    scene.leave("b")
    scene.pop_orders()
    scene.ask("c")
    assert scene.pop_orders() == [answer(2, member("c"), callers=(3,), lost_from=7)]


def test_who_is_killed_by_an_operator_ends_on_purpose_however_it_goes() -> None:
    scene = formed("a", step=7)
    scene.jobs.commanded(JOB, "a", Kill("wanted"), scene.now)
    scene.leave("a", "its session ended")
    assert scene.pop_orders() == [replace(loss("a", "killed: wanted"), is_orderly=True)]
    assert scene.jobs.status(JOB, scene.now)[0].finished


def test_q7_a_held_quorum_is_let_go_when_the_last_veteran_dies() -> None:
    """The scene's group c asks late, so that it outlives b."""
    scene = formed("a", "b", step=7)
    scene.leave("a")
    scene.beat("b")
    scene.until(150)
    scene.ask("b", step=5)
    scene.ask("c", step=4)
    scene.until(240)
    scene.beat("c")
    scene.pop_orders()
    scene.before(250)
    assert scene.pop_orders() == []
    scene.until(250)
    assert scene.pop_orders() == [
        loss("b", SILENT),
        Refused(3, "QuorumFailed", f"no quorum: 'b' is out: {SILENT}"),
        answer(2, member("c", 4), callers=(4,), lost_from=7),
    ]


def held(min_replicas: int = 1) -> Scene:
    """`b` asks at step 5 for a job that has committed step 7; `a`, which has it, is lost."""
    scene = Scene()
    scene.beat("a", "b")
    scene.ask("a", step=7)
    scene.ask("b", step=5)
    scene.leave("a")
    scene.ask("b", step=5, min_replicas=min_replicas)
    scene.pop_orders()
    return scene


def test_q7_an_operator_accepts_the_loss_once() -> None:
    scene = held()
    scene.accept_loss()
    group = member("b", 5, min_replicas=1)
    assert scene.pop_orders() == [answer(2, group, callers=(3,), lost_from=7)]
    assert scene.jobs.committed_step(JOB) == 5
    scene.ask("b", step=4)  # and not the next one
    assert scene.pop_orders() == []
    assert "committed step 5" in scene.why()


def test_n6_what_an_operator_gives_up_is_no_goodput() -> None:
    scene = Scene()
    scene.beat("a", "b")
    scene.ask("a", step=7)
    scene.ask("b", step=5)
    scene.now += 10.0
    for replica_id in ("a", "b"):
        done = Tally(committed_s=10.0, num_committed=10)
        scene.jobs.record_report(JOB, replica_id, done, (), scene.now)
    assert scene.jobs.goodput(JOB, scene.now).committed_s == 10.0
    scene.leave("a")
    scene.ask("b", step=5, min_replicas=1)
    scene.accept_loss()
    found = scene.jobs.goodput(JOB, scene.now)
    assert (found.committed_s, found.lost_s["discarded"]) == (8.0, 2.0)


def test_q7_a_loss_is_accepted_before_there_are_enough_groups() -> None:
    scene = held(min_replicas=2)
    assert scene.why() == "1 of at least 2 groups ask (--min-replicas)"
    scene.accept_loss()
    assert scene.pop_orders() == []
    scene.accept_loss()  # twice does no harm
    scene.ask("c", step=6)
    (order,) = scene.pop_orders()
    assert (order.callers, order.lost_from) == ((3, 4), 7)


def test_q7_a_loss_that_was_accepted_is_none_if_the_newer_state_comes_back() -> None:
    scene = held(min_replicas=3)
    scene.accept_loss()
    caller = scene.ask("a", step=7)
    scene.withdraw(caller)
    scene.leave("a")
    scene.ask("c", step=5)
    scene.ask("d", step=5)
    assert scene.pop_orders() == [loss("a")]
    assert "committed step 7" in scene.why()


def test_q7_no_loss_is_accepted_while_a_group_that_may_know_more_is_awaited() -> None:
    scene = formed("a", "b", step=7)
    scene.ask("c", step=4)  # a newcomer in a healthy job
    with pytest.raises(RequestRefused, match="waiting for a, b: alive, but has not asked"):
        scene.accept_loss()
    scene.leave("a")
    scene.ask("b", step=5)  # it is what is left, and there is nobody to wait for
    scene.accept_loss()
    assert scene.pop_quorums() == [(2, ["b", "c"])]


def test_q7_no_loss_is_accepted_while_groups_gather() -> None:
    scene = formed("a", "b", step=7, settings=config(on_step_regression="hold"))
    scene.leave("a")
    scene.leave("b")
    scene.ask("b", step=5, last_num_groups=2)
    with pytest.raises(RequestRefused, match="waiting for 1 more groups"):
        scene.accept_loss()
    scene.until(100 + GATHER_S)
    scene.accept_loss()
    assert scene.pop_quorums() == [(2, ["b"])]


def test_q7_no_loss_is_accepted_when_nobody_asks_any_more() -> None:
    scene = held(min_replicas=2)
    scene.accept_loss()
    scene.withdraw(3)
    with pytest.raises(RequestRefused, match="no group asks for a quorum"):
        scene.accept_loss()


@pytest.mark.parametrize("policy", ["auto", "hold", "warn"])
def test_q7_nothing_to_accept(policy: str) -> None:
    scene = formed("a", "b", step=7, settings=config(on_step_regression=policy))
    for job, why in ((JOB, "no group asks for a quorum"), ("else", "no group asks")):
        with pytest.raises(RequestRefused, match=f"job '{job}' has no loss to accept: {why}"):
            scene.accept_loss(job)
    scene.ask("a", step=7)
    with pytest.raises(RequestRefused, match=r"waiting for b: alive.* would lose committed steps"):
        scene.accept_loss()
    assert scene.pop_orders() == []


def test_a_restarted_lighthouse_reports_by_seen_ids_whose_state_is_older() -> None:
    """`c` is as far as the others, but was left out when they came there."""
    asking = (
        Member(replica_id="a", step=17, seen_quorum_id=5),
        Member(replica_id="b", step=17, seen_quorum_id=5),
        Member(replica_id="c", step=17, seen_quorum_id=3),
        Member(replica_id="d", step=2, seen_quorum_id=9),
    )
    seen = Quorum(quorum_id=10, participants=asking, joining=joining(asking, None))
    assert [each.replica_id for each in seen.up_to_date] == ["a", "b"]
    reported_nothing = tuple(Member(replica_id=name, step=17) for name in "ab")
    assert joining(reported_nothing, None) == frozenset()


def test_who_was_to_heal_and_missed_that_is_no_source_of_the_next_quorum() -> None:
    """`b` was at the step of the others, with another state, and its answer was lost."""
    asking = tuple(Member(replica_id=name, step=17, seen_quorum_id=9) for name in "ab")
    missed = replace(asking[1], seen_quorum_id=5)
    before = Quorum(quorum_id=9, participants=asking, joining=frozenset("b"))
    assert joining((asking[0], missed), before) == {"b"}
    assert joining(asking, before) == frozenset(), "it has healed, or says that it has not"
    reported_nothing = tuple(Member(replica_id=name, step=17) for name in "ab")
    assert joining(reported_nothing, before) == frozenset(), "an old version reports no ids"
    assert joining((asking[0], missed), replace(before, joining=frozenset())) == frozenset()


def test_i1_two_lighthouses_that_a_job_has_come_apart_to_give_out_other_ids() -> None:
    """Each half knows the same last id, and nobody else does."""
    reported = set()
    for remainder in range(8):
        scene = Scene(first_id=96 + remainder, id_stride=8)
        scene.ask(f"a:{remainder}", step=3, seen_quorum_id=500)
        ((quorum_id, _),) = scene.pop_quorums()
        scene.ask(f"a:{remainder}", step=3, commit_failures=1)
        ((next_id, _),) = scene.pop_quorums()
        assert next_id == quorum_id + 8
        reported.add(quorum_id)
    assert reported == set(range(501, 509))


def test_of_groups_that_restored_one_step_the_one_that_was_committed_last_is_right() -> None:
    """The job went back to before that step once, and did it again."""
    asking = (
        Member(replica_id="a", step=17, step_quorum_id=9),
        Member(replica_id="b", step=17, step_quorum_id=5),
        Member(replica_id="c", step=17),  # its checkpoint does not show it
    )
    assert joining(asking, None) == {"b", "c"}
    running = (*asking, Member(replica_id="d", step=17, step_quorum_id=4, seen_quorum_id=4))
    assert joining(running, None) == {"a", "b", "c"}, "who trains is not held up by them"
    same = tuple(Member(replica_id=name, step=17, step_quorum_id=9) for name in "ab")
    assert joining(same, None) == frozenset(), "nobody has to heal"
