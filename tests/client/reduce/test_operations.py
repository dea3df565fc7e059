"""Tests how groups compare their operations, and when no comparison is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed import ReduceOp

from torchft_svc.client.reduce.operations import (
    HEADER_LENGTH,
    MAX_PATTERNS,
    MAX_PLACES,
    Header,
    Kind,
    LaunchOrder,
    Operation,
    Stuck,
)
from torchft_svc.core.quorum.worker.step import FIRST_STEPS

CPU = torch.device("cpu")


def of(numel: int, position: int = 1) -> Operation:
    return Operation.of(position, torch.empty(numel), ReduceOp.SUM, Kind.GRADIENTS)


def step(*numels: int) -> list[Operation]:
    """A step with sums of these sizes, and its end."""
    sums = [of(numel, position) for position, numel in enumerate(numels, 1)]
    return [*sums, Operation.end(len(sums))]


def go(order: LaunchOrder, operations: list[Operation], *, is_first: bool = False) -> list[bool]:
    """A whole step; which of its operations need no comparison. All groups are alike."""
    order.begin_step(lambda: is_first)
    expected = []
    for operation in operations:
        expected.append(order.expects(operation))
        if not expected[-1]:
            pattern = order._pattern(operation)
            order.record_agreement(operation, [pattern, pattern])
        order.record_launch(operation)
    return expected


def test_a_step_like_the_last_one_is_not_compared() -> None:
    order = LaunchOrder(lambda: True)
    assert go(order, step(1, 2), is_first=True) == [False] * 3
    assert go(order, step(1, 2)) == [True] * 3
    assert go(order, step(1, 2)) == [True] * 3


def test_other_steps_are_compared_where_they_differ() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2, 3), is_first=True)
    assert go(order, step(1, 5, 3)) == [True, False, False, False]
    assert go(order, step(1, 5)) == [True, True, False], "it ends early"
    assert go(order, step(1, 5, 7)) == [True, True, False, False], "it goes on"


def test_a_step_that_is_remembered_is_compared_once() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2, 3), is_first=True)
    go(order, step(4, 5))
    assert go(order, step(1, 2, 3)) == [False, True, True, True]
    assert go(order, step(4, 5)) == [False, True, True]
    assert go(order, step(4, 5), is_first=True) == [False, True, True], "all members remember it"


def test_a_step_that_not_all_remember_is_compared_whole() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2), is_first=True)
    order.begin_step(lambda: True)
    first, second, _ = step(1, 2)
    assert not order.expects(first)
    order.record_agreement(first, [order._pattern(first), 0])  # a newcomer
    order.record_launch(first)
    assert not order.expects(second)
    assert order._pattern(second)
    order.record_agreement(second, [order._pattern(second), 5])
    order.record_launch(second)
    assert not order.expects(Operation.end(2))


def test_after_a_first_step_in_which_nothing_was_launched_nothing_is_known() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1), is_first=True)
    order.begin_step(lambda: True)  # of another quorum
    assert go(order, step(1)) == [False, True], "its members were in no step together"
    order.begin_step(lambda: False)
    assert go(order, step(1)) == [True, True], "these were"


def test_what_the_others_launch_instead_is_known() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2), is_first=True)
    order.begin_step(lambda: False)
    assert not order.expects(of(5))
    assert order.instead(of(5)) == of(1)
    assert order.instead(of(1)) is None


def test_what_is_remembered_is_bounded() -> None:
    order = LaunchOrder(lambda: True)
    for numel in range(2 * MAX_PATTERNS):
        go(order, step(numel), is_first=True)
    order.begin_step(lambda: True)
    assert len(order._patterns) == MAX_PATTERNS
    assert not order._pattern(of(0))
    assert order._pattern(of(2 * MAX_PATTERNS - 1))
    long = step(*range(MAX_PLACES + 3))
    go(order, long, is_first=True)
    expected = go(order, long)
    assert all(expected[:MAX_PLACES])
    assert not any(expected[MAX_PLACES:])
    assert len(order._launched) == MAX_PLACES


def test_a_header_comes_back_as_it_was_sent() -> None:
    header = Header(of(7, position=3), is_settled=True, pattern=2**63 - 1, num_commits=9)
    stuck = dataclasses.replace(header, stuck=Stuck(4, Operation.end(2)))
    for each in (header, stuck):
        sent = each.encode(CPU)
        assert sent.shape == (HEADER_LENGTH,)
        assert Header.decode(sent.tolist()) == each
    odd = [3, 99, -9, 4, 77, 88]
    lies = Header.decode([*odd, 5, 0, 0, 6, *odd])
    assert "number 3" in str(lies.operation)
    assert lies.stuck is not None
    assert "number 3" in str(lies.stuck.operation)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # Each group's operation, and whether it is settled; who is at another, and who misfits.
        ([(of(4), True), (of(4), False)], [(None, False), (None, False)]),
        ([(of(4), True), (of(5), True)], [(of(5), False), (of(4), False)]),
        ([(of(4), True), (of(5), False)], [(of(5), False), (of(4), True)]),
        ([(of(4), False), (of(5), False)], [(of(5), True), (of(4), True)]),
        (  # a newcomer that fits, beside one that does not
            [(of(4), True), (of(4), False), (of(5), False)],
            [(of(5), False), (of(5), False), (of(4), True)],
        ),
        (
            [(Operation.end(0), True), (of(5), False)],
            [(of(5), False), (Operation.end(0), True)],
        ),
    ],
)
def test_who_does_not_fit(
    groups: list[tuple[Operation, bool]], expected: list[tuple[Operation | None, bool]]
) -> None:
    headers = [Header(operation, is_settled, 0) for operation, is_settled in groups]
    assert [mine.unlike(headers) for mine in headers] == expected


OLD = 4 * FIRST_STEPS


@pytest.mark.parametrize(
    ("groups", "misfits"),
    [
        # Each group's operation, and how many steps it has committed; which do not fit.
        ([(of(4), OLD), (of(5), 7)], [False, True]),
        ([(of(4), 8), (of(5), 7)], [False, True]),
        ([(of(4), 7), (of(5), 7)], [False, False]),  # nobody knows
        ([(of(4), OLD), (of(5), FIRST_STEPS)], [False, False]),  # not new any more
        ([(of(4), OLD), (of(4), OLD), (of(5), 7)], [False, False, True]),
        ([(of(4), OLD), (of(4), 7), (of(5), 7)], [False, False, True]),
        ([(of(4), OLD), (of(5), 7), (of(5), 7)], [False, False, False]),  # most are like that
        ([(of(4), OLD), (of(5), 7), (of(6), 8)], [False, True, True]),
    ],
)
def test_who_is_new_among_those_that_train(
    groups: list[tuple[Operation, int]], misfits: list[bool]
) -> None:
    headers = [Header(operation, True, 0, num_commits) for operation, num_commits in groups]
    assert [mine.unlike(headers)[1] for mine in headers] == misfits


def in_steps(*steps: tuple[int, list[Operation]], stuck: Operation | None = None) -> LaunchOrder:
    """What a group has launched in its last steps; it got ``stuck`` in the last one."""
    order = LaunchOrder(lambda: True)
    for step_number, operations in steps:
        order.begin_step(bool, step_number)
        for operation in operations:
            order.record_launch(operation)
    if stuck is not None:
        order.record_failure(stuck)
    order.begin_step(lambda: True, steps[-1][0] + (stuck is None))
    return order


def test_a_group_learns_afterwards_at_which_operation_another_one_was() -> None:
    """The end of the step, where this group was, counts as an operation."""
    end = step(1, 2)[-1]
    mine = in_steps((4, step(1, 2)), (5, step(1, 2)), (6, [of(1)]), stuck=of(1))
    theirs = in_steps((4, step(1, 2)), (5, step(1, 2)[:-1]), stuck=of(9, position=3))
    headers = [order.header(of(1)) for order in (mine, theirs)]
    found = mine.read_headers(headers[0], headers)
    assert found is not None
    assert (found.step, found.mine, found.theirs, found.member) == (5, end, of(9, position=3), 1)
    assert theirs.read_headers(headers[1], headers) is None, "it was in no step 6"
    again = [order.header(of(2, position=2)) for order in (mine, theirs)]
    assert [each.stuck for each in again] == [None, None], "it was sent"
    assert mine.read_headers(again[0], again) is None


def test_groups_that_were_stuck_at_one_operation_do_not_differ() -> None:
    """A third one has left; or the step is too long ago, or was not launched so far."""
    mine = in_steps((5, step(1, 2)), (6, [of(1), of(2, position=2)]), stuck=of(1))
    stuck = {
        "the same": Stuck(6, of(2, position=2)),
        "further": Stuck(6, of(3, position=3)),
        "long ago": Stuck(1, of(3, position=2)),
        "a lie": Stuck(6, of(3, position=-2)),
    }
    for what, each in stuck.items():
        header = mine.header(of(1))
        other = Header(of(1), True, 0, OLD, each)
        assert header.find_mismatch([header, other], mine._launched_in) is None, what


def test_an_operation_that_was_compared_and_not_launched_counts() -> None:
    mine = in_steps((5, [of(1)]), stuck=of(7, position=2))
    other = Header(of(1), True, 0, OLD, Stuck(5, of(2, position=2)))
    found = mine.read_headers(mine.header(of(1)), [mine.header(of(1)), other])
    assert found is not None
    assert (found.mine, found.is_misfit) == (of(7, position=2), True)


def test_a_group_that_repeats_a_step_alone_does_not_differ_from_itself() -> None:
    """Alone it compares nothing, so its error is sent only when another group has come."""
    order = LaunchOrder(lambda: True)
    order.begin_step(lambda: True, 5)
    order.record_failure(Operation.shares(0))
    order.begin_step(lambda: True, 5)
    for operation in step(1, 2):
        order.record_launch(operation)
    order.begin_step(lambda: True, 6)
    headers = [order.header(of(1)), Header(of(1), True, 0, 0)]
    assert headers[0].stuck is not None
    assert order.read_headers(headers[0], headers) is None


def test_an_error_of_an_earlier_step_is_in_none_of_the_later_ones() -> None:
    order = LaunchOrder(lambda: True)
    order.begin_step(lambda: True, 5)
    order.record_failure(of(7, position=4))
    order.begin_step(lambda: True, 6)
    for operation in step(1, 2):
        order.record_launch(operation)
    order.begin_step(lambda: True, 7)
    other = Header(of(1), True, 0, OLD, Stuck(6, of(2, position=4)))
    assert len(step(1, 2)) == 3
    assert order.read_headers(order.header(of(1)), [order.header(of(1)), other]) is None


@pytest.mark.parametrize("num_launched", [1, 2])
def test_a_known_operation_that_has_failed_shows_no_difference(num_launched: int) -> None:
    """A group has left, so that the first operation fails after this and others were launched."""
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2), is_first=True)
    order.begin_step(bool, 6)
    for operation in step(1, 2)[:num_launched]:
        assert order.expects(operation)
        order.record_launch(operation)
    order.record_failure(of(1))
    order.begin_step(lambda: True, 6)
    headers = [order.header(of(1)), Header(of(1), True, 0, OLD)]
    assert order.read_headers(headers[0], headers) is None


def test_a_group_that_launches_something_else_than_all_are_known_to_differs() -> None:
    """The others need not have been stuck: they have ended the step."""
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2))
    order.begin_step(bool, 6)
    for operation in step(1, 2)[:-1]:
        assert order.expects(operation)
        order.record_launch(operation)
    other = of(7, position=3)
    order.record_failure(other)
    order.begin_step(lambda: True, 6)
    mine, alike = order.header(of(1)), Header(of(1), True, 0, OLD, Stuck(6, other))
    ended = Header(of(1), True, 0, OLD)
    found = order.read_headers(mine, [alike, mine, ended])
    assert found is not None
    assert (found.mine, found.theirs, found.member) == (other, step(1, 2)[-1], 2)
    assert not found.is_misfit, "most are like this one"
