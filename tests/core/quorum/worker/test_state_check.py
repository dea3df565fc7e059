"""Tests when groups compare their states, and which of them a difference is blamed on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.core.quorum.worker.state_check import (
    MAX_ITEMS,
    NUM_STEPS_AFTER_MEETING,
    ROW_LENGTH,
    CheckRules,
    CheckSchedule,
    Item,
    Part,
    Row,
    StateDifference,
    describe_difference,
    find_difference,
    find_item,
)
from torchft_svc.errors import ConfigError

NUM_PARTS = len(Part)
NAMES = {0: "a", 1: "b", 2: "c", 3: "d"}


def row(digests: str, since: int = 0, num_items: int = 7) -> Row:
    """A fingerprint with a digit for each part."""
    return Row(1, since, tuple(map(int, digests)), (num_items,) * NUM_PARTS)


SAME = row("11111")
ABSENT = Row()


@pytest.mark.parametrize(
    ("rows", "majority", "minority", "part"),
    [
        ([SAME, SAME, row("11112")], [0, 1], [2], Part.VALUES),
        ([row("11121"), SAME, SAME], [1, 2], [0], Part.SETTINGS),
        ([SAME, row("11212", since=0), SAME], [0, 2], [1], Part.OPTIMIZERS),
        ([SAME, row("21212"), SAME], [0, 2], [1], Part.LAYOUT),
        # Of two, the one that has joined or healed last; then the higher rank.
        ([row("11111", since=9), row("11112")], [1], [0], Part.VALUES),
        ([row("11111"), row("11112", since=9)], [0], [1], Part.VALUES),
        ([SAME, row("11112")], [0], [1], Part.VALUES),
        # Two against two: the pair with the last newcomer.
        ([SAME, row("11112"), row("11111", since=5), row("11112", since=4)], [1, 3], [0, 2], 4),
        # The majority wins, whoever has come last.
        ([row("12111"), row("11111", since=5), row("11111", since=5)], [1, 2], [0], Part.OBJECTS),
        # Each for itself: all but one heal.
        ([row("11113"), row("11112"), row("11111")], [0], [1, 2], Part.VALUES),
        # Those that heal are not compared.
        ([ABSENT, row("11112"), SAME, SAME], [2, 3], [1], Part.VALUES),
        # The first part in which any of them differs is named.
        ([SAME, SAME, row("11112"), row("11121")], [0, 1], [2, 3], Part.SETTINGS),
    ],
)
def test_who_differs(rows: list[Row], majority: list[int], minority: list[int], part: Part) -> None:
    found = find_difference(rows)
    assert found is not None
    assert (list(found.majority), list(found.minority), found.part) == (majority, minority, part)
    assert found.first in minority
    assert rows[found.first].digests[part] != rows[majority[0]].digests[part]


@pytest.mark.parametrize(
    "rows", [[], [SAME], [SAME, SAME], [SAME, ABSENT], [ABSENT, ABSENT], [SAME, row("11111", 8)]]
)
def test_no_difference(rows: list[Row]) -> None:
    assert find_difference(rows) is None


def test_a_part_that_one_of_them_does_not_know_is_not_compared() -> None:
    """A group that has just healed does not know which optimizers its program steps."""
    unaware = Row(1, 0, (1, 1, 9, 9, 1), (7, 7, 0, 0, 7))
    assert find_difference([SAME, unaware]) is None
    assert find_difference([SAME, row("11221"), unaware]) is None
    found = find_difference([row("11112"), SAME, unaware])
    assert found is not None
    assert (found.part, found.minority) == (Part.VALUES, (0,))


def slow_minority(rows: Sequence[Row]) -> list[int]:
    """The same, written down as plainly as possible."""
    present = [rank for rank in range(len(rows)) if rows[rank].is_present]
    sizes = Counter(rows[rank].digests for rank in present)
    best: tuple[int, ...] | None = None
    for digests, size in sizes.items():
        if best is None:
            best = digests
            continue
        ours = [rank for rank in present if rows[rank].digests == digests]
        theirs = [rank for rank in present if rows[rank].digests == best]
        last, their_last = max(rows[r].since for r in ours), max(rows[r].since for r in theirs)
        if (
            size > sizes[best]
            or (size == sizes[best] and last < their_last)
            or (size == sizes[best] and last == their_last and min(ours) < min(theirs))
        ):
            best = digests
    return [rank for rank in present if rows[rank].digests != best]


def drawn_rows() -> st.SearchStrategy[list[Row]]:
    digests = st.tuples(*[st.integers(0, 1)] * NUM_PARTS)
    present = st.builds(Row, st.just(1), st.integers(0, 3), digests, st.just((3,) * NUM_PARTS))
    return st.lists(st.one_of(present, st.just(ABSENT)), max_size=7)


@given(drawn_rows())
def test_the_twin_finds_the_same_minority(rows: list[Row]) -> None:
    found = find_difference(rows)
    assert (list(found.minority) if found else []) == slow_minority(rows)


@given(drawn_rows())
def test_a_row_survives_the_sum_of_all(rows: list[Row]) -> None:
    """Each member fills its own row, and receives the sum: all decide on the same numbers."""
    empty = [0] * ROW_LENGTH
    tables = [
        [each.encode() if rank == mine else empty for rank, each in enumerate(rows)]
        for mine in range(len(rows))
    ]
    summed = [
        [sum(column) for column in zip(*copies, strict=True)]
        for copies in zip(*tables, strict=True)
    ]
    assert [Row.decode(numbers) for numbers in summed] == rows


def test_no_more_items_are_named_than_the_limit() -> None:
    found = find_difference(
        [row("11111", num_items=MAX_ITEMS + 9), row("11112", num_items=1 << 40)]
    )
    assert found is not None
    assert found.num_items == MAX_ITEMS


# -- when ------------------------------------------------------------------------------------------


def due(schedule: CheckSchedule, until: int) -> list[int]:
    return [step for step in range(until) if schedule.is_due(step)]


def test_which_steps_are_checked() -> None:
    schedule = CheckSchedule(10)
    schedule.begin_quorum(0, heals=True, is_new=True)
    assert due(schedule, 25) == [0, 1, 2, 10, 20]
    schedule.begin_quorum(13, heals=False, is_new=True)  # another group heals
    assert [step for step in due(schedule, 25) if step >= 13] == [13, 14, 15, 20]
    assert schedule.since == 0
    schedule.begin_quorum(17, heals=False, is_new=False)
    assert not schedule.is_due(17)
    schedule.begin_quorum(18, heals=True, is_new=True)
    assert schedule.since == 18
    assert not schedule.is_settled(19), "a stale optimizer state may still be hidden"
    assert schedule.is_settled(18 + NUM_STEPS_AFTER_MEETING)


def test_a_job_that_goes_back_checks_three_steps_again() -> None:
    schedule = CheckSchedule(1000)
    schedule.begin_quorum(500, heals=False, is_new=True)
    schedule.begin_quorum(20, heals=False, is_new=False)
    assert [step for step in due(schedule, 600) if step >= 20] == [20, 21, 22]


def test_zero_switches_the_checks_off() -> None:
    schedule = CheckSchedule(0)
    schedule.begin_quorum(0, heals=False, is_new=True)
    assert due(schedule, 1000) == []


@given(
    st.integers(0, 5),
    st.lists(
        st.tuples(st.sets(st.integers(0, 4), min_size=1), st.booleans(), st.integers(0, 4)),
        max_size=12,
    ),
)
def test_all_members_check_the_same_steps(
    every: int, quorums: list[tuple[set[int], bool, int]]
) -> None:
    """Members come, go and heal; whoever is in a quorum knows what its other members know."""
    schedules = {group: CheckSchedule(every) for group in range(5)}
    last: set[int] = set()
    step = 0
    for members, heals, num_steps in quorums:
        is_new = members != last or heals
        for group in members:
            returns = group not in last
            schedules[group].begin_quorum(step, heals=returns or heals, is_new=is_new)
        for later in range(num_steps + 1):
            assert len({schedules[group].is_due(step + later) for group in members}) == 1
        last, step = members, step + num_steps


@pytest.mark.parametrize("value", [-1, 1 << 63, True, 1.5, "10"])
def test_a_wrong_interval_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="check_every"):
        CheckRules(check_every=value)  # type: ignore[arg-type]


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="use heal, warn or stop"):
        CheckRules(on_difference="ignore")  # type: ignore[arg-type]


def test_what_must_be_equal_in_all_groups() -> None:
    assert CheckRules().described() == {"check_every": 500, "on_difference": "heal"}
    assert CheckRules(check_every=0, on_difference="stop").described() == {"check_every": 0}


# -- in words --------------------------------------------------------------------------------------


def test_the_first_item_that_differs() -> None:
    theirs = [(1, 5), (2, 6), (3, 7)]
    assert find_item(theirs, theirs) is None
    assert find_item(theirs, [(1, 5), (2, 8), (3, 9)]) == Item(name=2, theirs=6, ours=8, num_more=1)
    # A name that only one of them has moves the others.
    assert find_item(theirs, [(2, 8), (3, 7), (0, 0)]) == Item(name=2, theirs=6, ours=8)
    assert find_item(theirs, [(1, 5), (3, 7), (0, 0)]) == Item(name=3, theirs=None, ours=None)
    assert find_item(theirs, [(1, 5), (2, 6), (0, 0)]) == Item(name=3, theirs=None, ours=None)


WHERE = "in the check of step 20, "


@pytest.mark.parametrize(
    ("part", "item", "sentence"),
    [
        (
            Part.SETTINGS,
            Item(name=1, theirs=1, ours=2),
            "item 1 is <1> in group b and <2> in group a",
        ),
        (
            Part.VALUES,
            Item(name=3, theirs=1, ours=2, num_more=4),
            "the values of item 3 and 4 more in group b are not those of group a",
        ),
        (
            Part.OBJECTS,
            Item(name=5, theirs=0, ours=1),
            "item 5 was replaced by another object in group b after the model was wrapped, and not "
            "in group a",
        ),
        (
            Part.LAYOUT,
            Item(name=2, theirs=4, ours=5),
            "item 2 has another shape or type in group b than in group a",
        ),
        (
            Part.LAYOUT,
            Item(name=2, theirs=None, ours=None),
            "names, order, shapes or types of the parameters of group b are not those of group a, "
            "from item 2 on",
        ),
        (
            Part.OPTIMIZERS,
            Item(name=2, theirs=4, ours=5),
            "item 2 updates other parameters in group b than in group a",
        ),
        (
            Part.OPTIMIZERS,
            None,
            "the optimizers or the parameters that they update of group b are not those of group a",
        ),
    ],
)
def test_a_difference_is_one_sentence(part: Part, item: Item | None, sentence: str) -> None:
    difference = StateDifference(part=part, majority=(0, 2), minority=(1,), first=1, num_items=9)
    shown = describe_difference(
        difference, item, lambda _, i: f"item {i}", lambda n: f"<{n}>", NAMES, 20, 10
    )
    assert shown == f"{WHERE}{sentence} (they were equal in the check of step 10)"


def test_an_item_of_another_group_has_no_name_here() -> None:
    difference = StateDifference(
        part=Part.VALUES, majority=(0,), minority=(1,), first=1, num_items=9
    )
    item = Item(name=3, theirs=1, ours=2)
    shown = describe_difference(difference, item, lambda *_: "", str, NAMES, 20, 10)
    assert shown.startswith(f"{WHERE}the values of the parameters of group b are not those of")


def test_a_first_check_and_other_groups_are_described() -> None:
    difference = StateDifference(
        part=Part.VALUES, majority=(0,), minority=(1, 3), first=1, num_items=0
    )
    shown = describe_difference(difference, None, lambda *_: "", str, NAMES, 2, None)
    assert shown.endswith("(they were not compared before; groups that differ, too: d)")
