"""Tests how groups compare their operations, and when no comparison is needed."""

from __future__ import annotations

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
)

CPU = torch.device("cpu")


def of(numel: int, position: int = 1) -> Operation:
    return Operation.of(position, torch.empty(numel), ReduceOp.SUM, Kind.GRADIENTS)


def step(*numels: int) -> list[Operation]:
    """A step with sums of these sizes, and its end."""
    sums = [of(numel, position) for position, numel in enumerate(numels, 1)]
    return [*sums, Operation.end(len(sums))]


def go(order: LaunchOrder, operations: list[Operation], *, is_first: bool = False) -> list[bool]:
    """A whole step; which of its operations need no comparison. All groups are alike."""
    order.begin(lambda: is_first)
    expected = []
    for operation in operations:
        expected.append(order.expects(operation))
        if not expected[-1]:
            pattern = order._pattern(operation)
            order.agreed(operation, [pattern, pattern])
        order.launched(operation)
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
    order.begin(lambda: True)
    first, second, _ = step(1, 2)
    assert not order.expects(first)
    order.agreed(first, [order._pattern(first), 0])  # a newcomer
    order.launched(first)
    assert not order.expects(second)
    assert order._pattern(second)
    order.agreed(second, [order._pattern(second), 5])
    order.launched(second)
    assert not order.expects(Operation.end(2))


def test_after_a_first_step_in_which_nothing_was_launched_nothing_is_known() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1), is_first=True)
    order.begin(lambda: True)  # of another quorum
    assert go(order, step(1)) == [False, True], "its members were in no step together"
    order.begin(lambda: False)
    assert go(order, step(1)) == [True, True], "these were"


def test_what_the_others_launch_instead_is_known() -> None:
    order = LaunchOrder(lambda: True)
    go(order, step(1, 2), is_first=True)
    order.begin(lambda: False)
    assert not order.expects(of(5))
    assert order.instead(of(5)) == of(1)
    assert order.instead(of(1)) is None


def test_what_is_remembered_is_bounded() -> None:
    order = LaunchOrder(lambda: True)
    for numel in range(2 * MAX_PATTERNS):
        go(order, step(numel), is_first=True)
    order.begin(lambda: True)
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
    header = Header(of(7, position=3), is_settled=True, pattern=2**63 - 1)
    sent = header.encode(CPU)
    assert sent.shape == (HEADER_LENGTH,)
    assert Header.decode(sent.tolist()) == header
    assert "number 3" in str(Header.decode([3, 99, -9, 4, 77, 88, 5, 0]).operation)


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
