"""Tests how the demo kills: whom, how and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice, repeat

from support.stories import commit

from tools.demo.board import Board
from tools.demo.chaos import KillOrder, draw_kills
from tools.demo.events import PHASES, Joined, Killed, PhaseBegan, Started
from tools.demo.killer import Killer

ORDER = KillOrder(
    group=1, phase="backward", fraction=0.5, whole_group=False, after_s=10.0, again=False
)


class TestDrawing:
    def test_a_seed_gives_one_row(self) -> None:
        first, second = (list(islice(draw_kills(7, 3, 10.0), 20)) for _ in range(2))
        assert first == second
        assert first != list(islice(draw_kills(8, 3, 10.0), 20))

    def test_every_phase_group_and_way_comes_up(self) -> None:
        orders = list(islice(draw_kills(0, 3, 10.0), 12))
        assert Counter(order.phase for order in orders) == dict.fromkeys(PHASES, 3)
        assert Counter(order.group for order in orders) == {0: 4, 1: 4, 2: 4}
        assert Counter(order.whole_group for order in orders) == {False: 8, True: 4}

    def test_distances_vary_around_the_interval(self) -> None:
        distances = [order.after_s for order in islice(draw_kills(0, 3, 10.0), 100)]
        assert min(distances) >= 8.0
        assert max(distances) <= 12.0
        assert max(distances) - min(distances) > 2.0


def phase(name: str, at: float, group: int = 1) -> PhaseBegan:
    return PhaseBegan(group=group, incarnation=0, at=at, step=1, phase=name)


def healthy_board() -> Board:
    """Two groups that train; group 1 spends 0.2 s in the backward pass."""
    board = Board(2)
    board.apply(commit(0, 1))
    board.apply(commit(1, 1))
    board.apply(phase("backward", 1.0))
    board.apply(phase("commit", 1.2))
    return board


def killer_due_at(now: float) -> tuple[Killer, Board]:
    killer, board = Killer(repeat(ORDER), num_kills=1), healthy_board()
    assert killer.order_due(now - ORDER.after_s, board) is None  # the time runs from here
    return killer, board


class TestWhen:
    def test_in_the_middle_of_the_phase_that_the_order_names(self) -> None:
        killer, board = killer_due_at(20.0)
        assert killer.order_due(20.0, board) is None
        assert killer.armed
        board.apply(phase("forward", 20.1))
        assert killer.order_due(20.3, board) is None
        board.apply(phase("backward", 20.4))
        assert killer.order_due(20.49, board) is None
        assert killer.order_due(20.51, board) == ORDER
        assert killer.done
        assert not killer.armed

    def test_not_in_a_phase_that_began_before_the_order_was_due(self) -> None:
        killer, board = killer_due_at(20.0)
        board.apply(phase("backward", 19.9))
        assert killer.order_due(20.0, board) is None
        assert killer.order_due(20.05, board) is None

    def test_not_while_a_group_is_not_well(self) -> None:
        killer, board = killer_due_at(20.0)
        board.apply(Killed(group=0, incarnation=0, at=15.0, whole_group=False))
        assert killer.order_due(20.0, board) is None
        board.apply(phase("backward", 20.1))
        assert killer.order_due(30.0, board) is None
        board.apply(phase("commit", 20.3))
        board.apply(commit(0, 9, incarnation=1))
        assert killer.order_due(30.1, board) is None
        board.apply(phase("backward", 30.2))
        assert killer.order_due(30.9, board) is None  # nor in the first second of a life
        assert killer.order_due(31.2, board) is None
        board.apply(phase("backward", 31.3))
        assert killer.order_due(31.9, board) == ORDER

    def test_anyway_when_the_phase_does_not_come(self) -> None:
        killer, board = killer_due_at(20.0)
        assert killer.order_due(20.0, board) is None
        assert killer.order_due(21.9, board) is None
        assert killer.order_due(22.1, board) == ORDER

    def test_once_more_while_it_heals_if_the_order_says_so(self) -> None:
        killer, board = Killer(repeat(replace(ORDER, again=True)), num_kills=1), healthy_board()
        assert killer.order_due(10.0, board) is None
        assert killer.order_due(20.0, board) is None
        board.apply(phase("backward", 20.1))
        assert killer.order_due(20.5, board) is not None
        assert not killer.done
        assert killer.order_due(20.6, board) is None  # it still counts as training
        board.apply(Killed(group=1, incarnation=0, at=20.5, whole_group=False))
        assert killer.order_due(21.0, board) is None
        board.apply(Joined(group=1, incarnation=1, at=25.0))
        assert killer.order_due(25.0, board) is None
        assert killer.order_due(25.2, board) is not None
        assert killer.done

    def test_a_group_that_heals_faster_is_spared(self) -> None:
        killer, board = Killer(repeat(replace(ORDER, again=True)), num_kills=1), healthy_board()
        for now in (10.0, 20.0, 22.1):  # the last one is out of patience
            order = killer.order_due(now, board)
        assert order is not None
        board.apply(Joined(group=1, incarnation=1, at=25.0))
        assert killer.order_due(25.0, board) is None
        board.apply(commit(1, 9, incarnation=1))
        assert killer.order_due(25.2, board) is None
        assert killer.done

    def test_a_group_that_heals_while_nobody_looks_is_spared(self) -> None:
        killer, board = Killer(repeat(replace(ORDER, again=True)), num_kills=1), healthy_board()
        for now in (10.0, 20.0, 22.1):
            order = killer.order_due(now, board)
        assert order is not None
        board.apply(Started(group=1, incarnation=1, at=24.0, pid=2))
        board.apply(Joined(group=1, incarnation=1, at=25.0))
        board.apply(commit(1, 9, incarnation=1))
        assert killer.order_due(25.2, board) is None
        assert killer.done

    def test_no_more_after_it_was_stopped(self) -> None:
        killer, board = Killer(repeat(ORDER), num_kills=9), healthy_board()
        killer.stop_after(1)
        given = 0
        for now in range(100):
            given += killer.order_due(float(now), board) is not None
            killer.stop_after(1)
        assert given == 1
        assert killer.done

    def test_no_more_often_than_asked_for(self) -> None:
        killer, board = Killer(repeat(ORDER), num_kills=2), healthy_board()
        given = [killer.order_due(float(now), board) for now in range(100)]
        assert sum(order is not None for order in given) == 2
