"""A manager dies while its workers vote: those that had an answer and those that had none agree."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
from support.core.barriers import QUORUM, BarrierOrder, TimelessGroup, asks, request, vote

from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.types import GroupRequest
from torchft_svc.errors import RequestRefused

STEP = 5
OLD_ROUND = 3


def successor(world_size: int) -> TimelessGroup:
    """The manager that follows one which died after it had opened round 3."""
    return TimelessGroup(world_size, first_round=40)


@pytest.mark.parametrize("old_round", [OLD_ROUND, 40, 41, 10**15])
def test_a_vote_without_an_answer_gets_what_the_others_received(old_round: int) -> None:
    """Whichever of both managers had the higher numbers."""
    for asked, decision in ((STEP + 1, True), (STEP, False)):
        group = successor(2)
        assert group.quorum_requested(request(0, asked), 10) == ()
        assert group.vote_received(vote(1, round=old_round), 11) == (AnswerVote(11, decision),)
        assert group.quorum_requested(request(1, asked), 12) == (asks(40, asked),)


def test_the_same_if_the_vote_comes_first() -> None:
    for asked, decision in ((STEP + 1, True), (STEP, False)):
        group = successor(3)
        assert group.vote_received(vote(1, round=OLD_ROUND), 10) == ()
        assert group.vote_received(vote(2, round=OLD_ROUND), 11) == ()
        assert group.quorum_requested(request(0, asked), 12) == (
            AnswerVote(10, decision),
            AnswerVote(11, decision),
        )


def test_i3_a_step_that_grew_with_a_heal_shows_no_commit() -> None:
    """Rank 0 has healed, from step 5 to 6, and received that nothing was committed; rank 1's heal
    has failed, so it voted no."""
    group = successor(2)
    assert group.quorum_requested(request(0, STEP + 1), 10) == ()
    no = vote(1, yes=False, round=OLD_ROUND)
    assert group.vote_received(no, 11) == (AnswerVote(11, should_commit=False),)


@pytest.mark.parametrize("old_round", [OLD_ROUND, 41])
def test_only_the_first_round_of_a_manager_takes_up_older_votes(old_round: int) -> None:
    group = successor(1)
    group.quorum_requested(request(0), 10)
    group.lighthouse_answered(40, QUORUM)
    with pytest.raises(RequestRefused, match=f"belongs to round {old_round}, this is round 40"):
        group.vote_received(vote(0, round=old_round), 11)


def test_a_vote_that_names_no_round_is_not_taken_up() -> None:
    with pytest.raises(RequestRefused, match="nothing to vote on"):
        successor(1).vote_received(vote(0), 10)


@pytest.mark.parametrize("votes_first", [True, False])
def test_who_has_only_voted_receives_the_error_of_a_failed_barrier(votes_first: bool) -> None:
    """The worker's stream to this manager is not open yet."""
    group = successor(3)
    for rank in (0, 2):
        group.worker_attached(rank, f"w{rank}")
    if votes_first:
        group.vote_received(vote(1, round=OLD_ROUND, worker_id="w1"), 10)
    group.quorum_requested(request(2, worker_id="w2", question=9), 11)
    group.worker_detached(0, "w0", "its stream broke")
    orders = group.quorum_requested(request(1, worker_id="w1", question=9), 12)
    assert [type(order) for order in orders] == [RefuseWorker] * votes_first


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("all_yes", [True, False])
def test_in_any_order_all_workers_go_on_at_the_same_step(world_size: int, all_yes: bool) -> None:
    """Each subset has its answer, the others none; the last one voted no unless ``all_yes``."""
    ranks = range(world_size)
    for num_answered in range(world_size + 1):
        for answered in itertools.combinations(ranks, num_answered):
            for order in itertools.permutations(ranks):
                asked = asked_steps(world_size, order, set(answered), all_yes)
                assert len(asked) == world_size, "I5: everybody goes on"
                assert len(set(asked.values())) == 1, (answered, order)
                if not all_yes:
                    assert asked[0] == STEP
                elif answered:
                    assert asked[0] == STEP + 1


def asked_steps(
    world_size: int, order: tuple[int, ...], answered: set[int], all_yes: bool
) -> dict[int, int]:
    """The step at which each worker asks the new manager for a quorum."""
    group = successor(world_size)
    asked: dict[int, int] = {}
    questions: list[GroupRequest] = []
    no_voter = None if all_yes else world_size - 1
    todo: deque[tuple[int, bool | None]] = deque(
        (rank, all_yes if rank in answered else False if rank == no_voter else None)
        for rank in order
    )
    while todo:
        rank, decision = todo.popleft()
        orders: tuple[BarrierOrder, ...]
        if decision is None:
            orders = group.vote_received(vote(rank, round=OLD_ROUND), 10 + rank)
        else:
            asked[rank] = STEP + decision
            orders = group.quorum_requested(request(rank, asked[rank]), 20 + rank)
        for each in orders:
            if isinstance(each, AnswerVote):
                todo.append((each.caller - 10, each.should_commit))
            else:
                assert isinstance(each, GroupRequest)
                questions.append(each)
    assert len(questions) == 1
    return asked
