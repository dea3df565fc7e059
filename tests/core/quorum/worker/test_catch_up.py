"""Tests which chunks a group that starts fetches before it joins."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from torchft_svc.core.quorum.worker.catch_up import MAX_PASSES, CatchUp, CaughtUp


def digests_of(versions: Sequence[int]) -> list[bytes]:
    return [bytes([chunk, version]) for chunk, version in enumerate(versions)]


def fetch_all(machine: CatchUp, versions: Sequence[int]) -> list[int]:
    """Fetch what the machine wants, as the source has it now."""
    fetched = []
    while (chunk := machine.next_chunk()) is not None:
        machine.record_chunk(chunk, digests_of(versions)[chunk])
        fetched.append(chunk)
    return fetched


def begun(versions: Sequence[int], step: int = 5) -> CatchUp:
    machine = CatchUp([10] * len(versions))
    machine.record_digests(step, digests_of(versions))
    return machine


def test_k1_all_is_fetched_if_no_step_is_committed_meanwhile() -> None:
    machine = begun([0, 0, 0])
    assert fetch_all(machine, [0, 0, 0]) == [0, 1, 2]
    assert machine.wants_digests(5)
    machine.record_digests(5, digests_of([0, 0, 0]))
    assert machine.is_over
    assert machine.outcome() == CaughtUp(total=30, at_hand=30, changing=0, outdated=0)


def test_k1_what_a_step_changes_is_left_to_the_heal() -> None:
    machine = begun([0, 0, 0, 0])
    assert machine.next_chunk() == 0
    assert not machine.wants_digests(5), "the first step is not over"
    assert machine.wants_digests(6)
    machine.record_digests(6, digests_of([1, 0, 0, 1]))
    machine.record_chunk(0, digests_of([1])[0])
    assert fetch_all(machine, [1, 0, 0, 1]) == [1, 2]
    machine.record_digests(7, digests_of([2, 0, 0, 2]))
    assert machine.is_over
    assert set(machine.at_hand) == {1, 2}
    assert machine.outcome() == CaughtUp(total=40, at_hand=20, changing=20, outdated=0)


def test_digests_of_one_step_show_nothing() -> None:
    """The first ones were read until step 5, so those of step 5 may have been read before."""
    machine = begun([0, 0])
    fetch_all(machine, [0, 0])
    machine.record_digests(5, digests_of([1, 0]))
    assert machine.awaits_step
    assert machine.next_chunk() == 0, "it is fetched once more, as it is less than before"


def test_k1_what_changes_seldom_is_fetched_again_while_that_shrinks() -> None:
    machine = begun([0] * 8)
    machine.record_digests(6, digests_of([0] * 8))
    fetch_all(machine, [0] * 8)
    machine.record_digests(9, digests_of([1, 1, 1, 0, 0, 0, 0, 0]))
    assert fetch_all(machine, [1, 1, 1, 0, 0, 0, 0, 0]) == [0, 1, 2]
    machine.record_digests(12, digests_of([2, 1, 1, 0, 0, 0, 0, 0]))
    assert fetch_all(machine, [2, 1, 1, 0, 0, 0, 0, 0]) == [0]
    machine.record_digests(15, digests_of([3, 1, 1, 0, 0, 0, 0, 0]))
    assert machine.is_over, "a pass of one chunk that does not shrink gets no closer"
    assert machine.outcome() == CaughtUp(total=80, at_hand=70, changing=0, outdated=10)


def test_k5_a_model_that_changes_as_a_whole_is_not_fetched() -> None:
    machine = begun([0] * 20)
    machine.record_digests(6, digests_of([1] * 19 + [0]))
    assert machine.is_over
    assert machine.next_chunk() is None
    assert machine.outcome().is_in_vain


def test_a_tenth_that_does_not_change_is_worth_it() -> None:
    machine = begun([0] * 10)
    machine.record_digests(6, digests_of([1] * 9 + [0]))
    assert not machine.is_over
    assert not machine.outcome().is_in_vain


def test_a_chunk_that_changes_while_it_is_sent_is_left_to_the_heal() -> None:
    machine = begun([0, 0])
    chunk = machine.next_chunk()
    assert chunk == 0
    machine.record_chunk(0, None)
    assert fetch_all(machine, [0, 0]) == [1]
    assert machine.outcome().changing == 10


def test_k6_a_chunk_that_was_put_back_is_fetched_by_another_connection() -> None:
    machine = begun([0, 0])
    assert machine.next_chunk() == 0
    machine.put_back(0)
    assert fetch_all(machine, [0, 0]) == [0, 1]
    assert machine.outcome().at_hand == 20


def test_k6_a_chunk_that_changes_with_each_step_is_not_put_back() -> None:
    machine = begun([0, 0])
    assert machine.next_chunk() == 0
    machine.record_digests(6, digests_of([1, 0]))
    machine.put_back(0)
    assert fetch_all(machine, [1, 0]) == [1]


def test_k2_another_form_of_the_state_makes_what_is_at_hand_useless() -> None:
    machine = begun([0, 0])
    fetch_all(machine, [0, 0])
    machine.record_digests(6, digests_of([0, 0, 0]))
    assert machine.is_over
    assert machine.at_hand == {}


def test_k4_what_is_at_hand_already_is_not_fetched() -> None:
    machine = CatchUp([10, 10, 10], {0: digests_of([0])[0], 1: b"other"})
    machine.record_digests(5, digests_of([0, 0, 0]))
    assert fetch_all(machine, [0, 0, 0]) == [1, 2]


def test_an_empty_state_is_at_hand() -> None:
    assert CatchUp(()).is_over


@pytest.mark.parametrize("seed", range(200))
def test_it_ends_and_claims_nothing_that_it_does_not_have(seed: int) -> None:
    """Whatever the source changes, and when: what is said to be at hand is what arrived last."""
    chance = random.Random(seed)
    num = chance.randint(1, 12)
    versions = [0] * num
    rates = [chance.choice([0.0, 0.0, 0.1, 1.0]) for _ in range(num)]
    memory: dict[int, bytes] = {}
    machine, step = CatchUp([chance.randint(1, 9) for _ in range(num)]), 3
    machine.record_digests(step, digests_of(versions))
    num_fetched = num_read = 0
    while not (machine.is_over and machine.is_idle):
        if chance.random() < 0.4:
            step += 1
            versions = [
                v + (chance.random() < rate) for v, rate in zip(versions, rates, strict=True)
            ]
        if machine.wants_digests(step):
            num_read += 1
            machine.record_digests(step, digests_of(versions))
        if (chunk := machine.next_chunk()) is not None:
            assert chunk not in machine.at_hand
            digest = None if chance.random() < 0.05 else digests_of(versions)[chunk]
            if digest is not None:
                memory[chunk] = digest
            num_fetched += 1
            machine.record_chunk(chunk, digest)
        for at, digest in machine.at_hand.items():
            assert memory[at] == digest
        assert num_fetched <= num * (MAX_PASSES + 1)
        assert num_read <= MAX_PASSES + 2
    outcome = machine.outcome()
    assert outcome.at_hand + outcome.changing + outcome.outdated <= outcome.total
    if outcome.is_in_vain:
        return
    steady = {n for n, rate in enumerate(rates) if rate == 0.0}
    assert steady <= set(machine.at_hand) | machine._changing
