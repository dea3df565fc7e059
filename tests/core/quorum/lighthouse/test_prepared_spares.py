"""Prepared spares stand by without being seen, and take free places, each one of them (G1, G2)."""

from __future__ import annotations

import random

import pytest

from torchft_svc.core.quorum.lighthouse.jobs import ReportPlaceTaken
from torchft_svc.core.quorum.lighthouse.lighthouse import (
    ID_STRIDE,
    Lighthouse,
    Order,
    Orders,
    Publish,
    ReportPause,
    Send,
)
from torchft_svc.core.quorum.lighthouse.prepared_spares import MAX_PREPARED_SPARES
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Departure,
    Drain,
    Hello,
    Leave,
    NoQuorumYet,
    Question,
    Refusal,
    Withdrawal,
)
from torchft_svc.core.quorum.types import NO_QUORUM, LastQuorum, Member, QuorumConfig
from torchft_svc.errors import GroupDiffers, RequestRefused

JOB = "job"
LONG_S = 1000.0
ENDS = Leave("it has ended", between_steps=True, ends=True)


class Scene:
    """A lighthouse, with groups whose stream is the number behind their name's first letter."""

    def __init__(self, **settings: object) -> None:
        self.now = 100.0
        self.config = QuorumConfig(**{"join_timeout_s": 1.0, **settings})  # type: ignore[arg-type]
        self.core = Lighthouse(self.config, ID_STRIDE, self.now)
        self.streams: dict[str, int] = {}
        self.seen: dict[str, int] = {}  # the quorum that each has received
        self.step = 0
        self.last: tuple[str, ...] = ()
        self.quorums: list[tuple[str, ...]] = []
        self._number = 0

    def open(self, name: str, *, is_spare: bool = False) -> Orders:
        self._number += 1
        self.streams[name] = self._number
        return self.core.opened(self._number, JOB, Hello(name, NO_QUORUM, 0, is_spare), self.now)

    def ask(self, name: str, **fields: object) -> Orders:
        self._number += 1
        seen = self.seen.get(name, 0)
        member = Member(
            replica_id=name,
            step=self.step if seen else 0,
            seen_quorum_id=seen,
            has_history=seen > 0,
            **fields,  # type: ignore[arg-type]
        )
        question = Question(self._number, member, LONG_S)
        return self._see(self.core.received(self.streams[name], question, self.now))

    def meet(self, *names: str) -> Orders:
        """All of ``names`` ask for the next step."""
        self.step += 1
        orders: list[Order] = []
        for name in names:
            orders += self.ask(name)
        return tuple(orders)

    def lose(self, name: str, leave: Leave | None = None) -> Orders:
        stream = self.streams.pop(name)
        if leave is None:
            return self._see(self.core.closed(stream, self.now))
        return self._see(self.core.received(stream, leave, self.now))

    def pass_time(self, seconds: float, *living: str) -> Orders:
        orders: list[Order] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            for name in living:
                orders += self._see(self.core.received(self.streams[name], Beat(), self.now))
            orders += self._see(self.core.tick(self.now))
        return tuple(orders)

    def _see(self, orders: Orders) -> Orders:
        for each in orders:
            if isinstance(each, Publish):
                self.last = tuple(member.replica_id for member in each.quorum.participants)
                self.quorums.append(self.last)
                self.seen.update(dict.fromkeys(self.last, each.quorum.quorum_id))
        return orders

    @property
    def spares(self) -> list[str]:
        (status,) = self.core.status(JOB, self.now)
        return [each.replica_id for each in status.prepared_spares]

    @property
    def groups(self) -> list[str]:
        (status,) = self.core.status(JOB, self.now)
        return [each.replica_id for each in status.groups]


def running(*names: str, **settings: object) -> Scene:
    """A job of these groups, in which a prepared spare ``s`` asks."""
    scene = Scene(**settings)
    for name in names:
        scene.open(name)
    scene.meet(*names)
    scene.meet(*names)
    assert scene.last == names
    scene.open("s", is_spare=True)
    assert scene.ask("s") == ()
    return scene


def taken(orders: Orders) -> list[str]:
    return [each.replica_id for each in orders if isinstance(each, ReportPlaceTaken)]


def test_g1_a_spare_is_in_no_quorum_and_delays_nobody() -> None:
    scene = running("a", "b")
    for _ in range(3):
        scene.meet("a", "b")
        assert scene.last == ("a", "b")
    assert (scene.groups, scene.spares) == (["a", "b"], ["s"])
    orders = scene.pass_time(60.0, "a", "b")  # the spare is silent meanwhile
    assert not [each for each in orders if isinstance(each, ReportPause)]
    scene.meet("a", "b")
    assert scene.last == ("a", "b")


def test_g1_a_spare_does_not_count_as_one_of_min_replicas() -> None:
    scene = Scene(min_replicas=2)
    scene.open("s", is_spare=True)
    scene.ask("s")
    scene.open("a")
    scene.ask("a")
    assert (scene.groups, scene.spares, scene.last) == (["a"], ["s"], ())


def test_g1_spares_alone_begin_nothing_and_are_shown() -> None:
    scene = Scene()
    scene.open("s", is_spare=True)
    scene.ask("s")
    scene.pass_time(120.0, "s")
    assert (scene.groups, scene.spares, scene.last) == ([], ["s"], ())


def test_g2_a_spare_takes_the_place_in_the_next_quorum() -> None:
    scene = running("a", "b", "c")
    assert taken(scene.lose("c")) == ["s"]
    assert scene.spares == []
    scene.meet("a", "b")
    assert scene.last == ("a", "b", "s")


def test_g2_a_spare_that_has_taken_a_place_learns_what_it_waits_for() -> None:
    scene = running("a", "b", "c", join_timeout_s=60.0)
    assert taken(scene.lose("c")) == ["s"]
    orders = scene.pass_time(5.0, "a", "b", "s")
    stream = scene.streams["s"]
    reasons = [
        each.news.reason
        for each in orders
        if isinstance(each, Send) and isinstance(each.news, NoQuorumYet) and stream in each.streams
    ]
    assert len(reasons) == 1, orders
    assert "a, b" in reasons[0]
    assert [each.job for each in orders if isinstance(each, ReportPause)] == [JOB]


def test_g2_a_spare_that_has_not_asked_takes_no_place_yet() -> None:
    scene = running("a", "b")
    scene.open("t", is_spare=True)
    assert taken(scene.lose("b")) == ["s"]
    scene.meet("a")
    assert scene.last == ("a", "s")
    assert taken(scene.lose("s")) == []
    assert taken(scene.ask("t")) == ["t"]


def test_g2_two_lost_groups_need_two_spares() -> None:
    scene = running("a", "b", "c")
    scene.open("t", is_spare=True)
    scene.ask("t")
    assert taken(scene.lose("b")) == ["s"]
    assert taken(scene.lose("c")) == ["t"]
    scene.meet("a")
    assert scene.last == ("a", "s", "t")


def test_g2_a_silent_spare_gets_no_place_before_it_is_back() -> None:
    scene = running("a", "b")
    scene.pass_time(6.0, "a", "b")
    assert taken(scene.lose("b")) == []
    orders = scene.core.received(scene.streams["s"], Beat(), scene.now)
    assert taken(orders) == ["s"]


def test_g2_a_lost_spare_disturbs_nobody() -> None:
    scene = running("a", "b")
    orders = scene.lose("s")
    assert not [each for each in orders if not isinstance(each, Send)]
    assert (scene.spares, taken(scene.lose("b"))) == ([], [])


def test_g2_an_ordinary_group_that_returns_adds_no_place() -> None:
    scene = running("a", "b")
    scene.lose("b")
    scene.meet("a")
    assert scene.last == ("a", "s")
    scene.open("b2")
    scene.ask("b2")
    scene.meet("a", "s")
    assert scene.last == ("a", "b2", "s")
    scene.open("t", is_spare=True)
    scene.ask("t")
    assert taken(scene.lose("s")) == []  # two of two places are taken
    scene.meet("a", "b2")
    assert taken(scene.lose("a")) == ["t"]


def test_g2_the_place_of_a_program_that_has_ended_is_not_taken() -> None:
    scene = running("a", "b", "c")
    assert taken(scene.lose("c", ENDS)) == []


def test_g2_the_place_of_a_drained_group_is_taken() -> None:
    scene = running("a", "b", "c")
    drained = Leave("it is preempted", True, True, Departure.DRAINED)
    assert taken(scene.lose("c", drained)) == ["s"]


def test_g2_a_straggler_keeps_its_place() -> None:
    scene = running("a", "b", "c")
    scene.step += 1
    scene.ask("a")
    scene.ask("b")
    orders = scene.pass_time(2.0, "a", "b", "c", "s")
    assert (scene.last, taken(orders)) == (("a", "b"), [])


def test_g2_a_newcomer_that_asks_again_keeps_its_place() -> None:
    """A question that was out of time was withdrawn."""
    scene = running("a", "b", join_timeout_s=60.0)
    scene.lose("s")
    scene.lose("b")
    scene.open("b2")
    scene.ask("b2")
    scene.open("s", is_spare=True)
    assert taken(scene.ask("s")) == []
    number = scene.core._sessions.by_stream[scene.streams["b2"]].number
    orders = scene.core.received(scene.streams["b2"], Withdrawal(number), scene.now)
    assert taken(orders) == []
    assert taken(scene.ask("b2")) == []
    assert taken(scene.lose("b2")) == ["s"]


def test_g2_after_a_total_loss_spares_wait_for_an_ordinary_group() -> None:
    scene = running("a", "b")
    scene.lose("s")
    scene.lose("a")
    scene.lose("b")
    scene.open("t", is_spare=True)
    scene.ask("t")
    scene.pass_time(30.0, "t")
    assert (scene.spares, scene.last) == (["t"], ("a", "b"))
    scene.open("a2")
    assert taken(scene.ask("a2")) == ["t"]
    scene.meet("a2")
    assert scene.last == ("a2", "t")


def test_g2_spares_do_not_take_the_job_back_to_what_they_have() -> None:
    """All members are lost before the spare that has taken a place is in a quorum."""
    scene = running("a", "b")
    assert taken(scene.lose("b")) == ["s"]
    num_quorums = len(scene.quorums)
    scene.lose("a")
    assert scene.spares == ["s"], "it stands by again"
    scene.pass_time(30.0, "s")
    assert len(scene.quorums) == num_quorums
    scene.open("c")
    scene.ask("c")
    scene.meet("c")
    assert scene.last == ("c", "s")
    assert scene.spares == []


def test_g2_a_spare_whose_model_differs_is_refused_at_once() -> None:
    scene = Scene()
    for name in ("a", "b"):
        scene.open(name)
        scene.ask(name, layout="model=1")
    scene.open("s", is_spare=True)
    (refused,) = scene.ask("s", layout="model=2")
    assert isinstance(refused, Send)
    assert isinstance(refused.news, Refusal)
    assert isinstance(refused.news.error, GroupDiffers)


def test_g4_spares_end_with_the_job() -> None:
    scene = running("a", "b")
    scene.lose("a", ENDS)
    orders = scene.lose("b", ENDS)
    drains = [each for each in orders if isinstance(each, Send) and isinstance(each.news, Drain)]
    assert drains == [Send((scene.streams["s"],), Drain("the job has finished"))]


def test_g4_a_spare_whose_session_has_broken_ends_when_it_is_back() -> None:
    scene = running("a", "b")
    for name in ("a", "b"):
        scene.lose(name, ENDS)
    scene.lose("s")
    assert Send((scene._number + 1,), Drain("the job has finished")) in scene.open(
        "s", is_spare=True
    )
    assert not [
        each
        for each in scene.open("t", is_spare=True)  # of the next run
        if isinstance(each, Send) and isinstance(each.news, Drain)
    ]


@pytest.mark.parametrize(("away_s", "ends"), [(0.5, True), (4.0, True), (6.0, False)])
def test_g4_a_spare_that_is_away_when_the_job_ends_ends_when_it_is_back(
    away_s: float, ends: bool
) -> None:
    """The session of the spare has broken before, which the lighthouse has noticed."""
    scene = running("a", "b", heartbeat_timeout_s=5.0)
    scene.lose("s")
    scene.pass_time(away_s, "a", "b")
    for name in ("a", "b"):
        scene.lose(name, ENDS)
    opened = scene.open("s", is_spare=True)
    drain = Send((scene.streams["s"],), Drain("the job has finished"))
    assert (drain in opened) is ends


def test_g4_a_spare_that_is_back_before_the_job_ends_is_away_no_more() -> None:
    scene = running("a", "b")
    scene.lose("s")
    scene.open("s", is_spare=True)
    assert scene.core.jobs._jobs[JOB].away_spares == {}


def test_g4_spares_of_a_run_without_a_quorum_go_on_waiting() -> None:
    """The run before has finished; the groups of the next one are lost before they ask."""
    scene = running("a", "b")
    for name in ("a", "b", "s"):
        scene.lose(name, ENDS)
    scene.open("t", is_spare=True)
    scene.ask("t")
    scene.open("c")
    assert [each for each in scene.lose("c") if isinstance(each, Send)] == []
    assert scene.spares == ["t"]


def test_a_request_that_is_withdrawn_takes_no_place() -> None:
    scene = running("a", "b")
    number = scene.core._sessions.by_stream[scene.streams["s"]].caller
    assert number is not None
    scene.core.jobs.withdraw(JOB, number, scene.now)
    assert taken(scene.lose("b")) == []


def test_the_question_of_a_lost_spare_is_refused() -> None:
    scene = running("a", "b")
    scene.open("s", is_spare=True)  # a second session: the first one has broken unnoticed
    orders = scene.lose("s", Leave("it has crashed"))
    assert not [each for each in orders if isinstance(each, Publish)]
    assert scene.spares == []


def test_a_group_that_trains_is_not_taken_for_a_spare_when_its_manager_is_new() -> None:
    scene = running("a", "b")
    scene.lose("b")
    scene.meet("a")
    assert scene.last == ("a", "s")
    scene.lose("s")
    scene.open("s", is_spare=True)
    assert scene.spares == ["s"]
    scene.meet("a", "s")
    assert scene.spares == []
    scene.meet("a")
    assert scene.last == ("a", "s")


def test_spares_are_limited() -> None:
    scene = running("a", "b")
    for number in range(MAX_PREPARED_SPARES - 1):
        scene.open(f"t{number}", is_spare=True)
    with pytest.raises(RequestRefused, match=f"{MAX_PREPARED_SPARES} prepared spares"):
        scene.open("one-more", is_spare=True)
    scene.open("s", is_spare=True)  # another session of one that is there


def test_an_operator_can_drain_a_spare_by_its_name() -> None:
    scene = running("a", "b")
    orders = scene.core.commanded(JOB, "s", Drain("no longer needed"), scene.now)
    assert Send((scene.streams["s"],), Drain("no longer needed")) in orders


def restarted(*names: str, num_groups: int, **settings: object) -> Scene:
    """A lighthouse that was restarted under these groups of a quorum of ``num_groups``, and to
    which a prepared spare ``s`` has come."""
    scene = Scene(**settings)
    for name in names:
        scene._number += 1
        scene.streams[name] = scene._number
        hello = Hello(name, LastQuorum(5, 7), num_groups)
        scene.core.opened(scene._number, JOB, hello, scene.now)
        scene.seen[name] = 5
    scene.step = 8
    scene.open("s", is_spare=True)
    scene.ask("s")
    return scene


def test_g2_a_restarted_lighthouse_learns_the_places_from_the_groups() -> None:
    scene = restarted("a", "b", num_groups=3)
    scene.meet("a", "b")
    scene.pass_time(5.0, "a", "b", "s")
    assert scene.last in (("a", "b"), ("a", "b", "s"))
    scene.meet("a", "b")
    assert scene.last == ("a", "b", "s")


@pytest.mark.parametrize("is_known", [True, False])
def test_g2_spares_complete_the_first_quorum_of_a_restarted_lighthouse(*, is_known: bool) -> None:
    """The groups that are left are too few for one without spares, whether all have come or not."""
    names = ("a", "b", "c") if is_known else ("a", "b")
    scene = restarted(*names, num_groups=3, min_replicas=3)
    if is_known:
        scene.pass_time(5.0, "a", "b", "c", "s")
        scene.lose("c")
    for name in ("a", "b"):
        scene.ask(name, last_num_groups=3)
    scene.pass_time(5.0, "a", "b", "s")
    assert scene.last == ("a", "b", "s")


def test_g2_a_restarted_lighthouse_waits_for_groups_that_it_has_not_seen() -> None:
    scene = restarted("a", "b", num_groups=3, min_replicas=3)
    for name in ("a", "b"):
        scene.ask(name, last_num_groups=3)
    assert scene.spares == ["s"]
    late = Hello("c", LastQuorum(5, 7), 3)
    scene.streams["c"] = 1000
    scene.core.opened(1000, JOB, late, scene.now)
    scene.seen["c"] = 5
    scene.ask("c", last_num_groups=3)
    scene.pass_time(5.0, "a", "b", "c", "s")
    assert (scene.last, scene.spares) == (("a", "b", "c"), ["s"])


@pytest.mark.parametrize("seed", range(60))
def test_no_spare_is_in_a_quorum_without_a_place(seed: int) -> None:
    """Whatever is lost and comes: a quorum that a spare has joined has no more groups than there
    are places, unless ordinary groups have come, too."""
    dice = random.Random(seed)
    scene = Scene(heartbeat_timeout_s=1000.0)
    names = [f"g{number}" for number in range(dice.randint(1, 4))]
    for name in names:
        scene.open(name)
    scene.meet(*names)
    numbers = iter(range(1000))
    for _ in range(60):
        match dice.choice(("lose", "lose", "spare", "spare", "return", "step", "step")):
            case "lose" if len(set(scene.last) & scene.streams.keys()) > 1:
                scene.lose(dice.choice(sorted(scene.streams)))
            case "spare":
                name = f"s{next(numbers)}"
                scene.open(name, is_spare=True)
                if dice.random() < 0.8:
                    scene.ask(name)
            case "return":
                name = f"r{next(numbers)}"
                scene.open(name)
                scene.ask(name)
            case "step":
                scene.meet(*(key for key in scene.last if key in scene.streams))
    num_places, before = 0, frozenset[str]()
    for quorum in map(frozenset, scene.quorums):
        spares = {each for each in quorum if each[0] == "s"}
        num_places = max(num_places, len(quorum - spares))
        new = quorum - before
        if new & spares and not new - spares:
            assert len(quorum) <= num_places, (before, quorum)
        before = quorum
    assert not set(scene.spares) & before
