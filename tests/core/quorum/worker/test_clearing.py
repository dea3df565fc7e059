"""Tests which calls of zero_grad belong to a step, with the loops that programs write.

A program is a string: each letter is a call at the place of that name, "." a pass that is summed,
"|" a vote, "!" an error of the step.
"""

from __future__ import annotations

import itertools

import pytest

from torchft_svc.core.quorum.worker.clearing import MAX_SEGMENTS, NUM_ALIKE, ClearingPattern

SUMS_OF_A_PASS = 3


def begun_at(program: str) -> list[int]:
    """The places in ``program`` at which a step began."""
    pattern = ClearingPattern()
    under_way, has_failed, num_launched = False, False, 0
    found = []
    for at, letter in enumerate(program):
        match letter:
            case "|":
                pattern.record_vote()
                under_way = False
            case ".":
                num_launched += SUMS_OF_A_PASS
            case "!":
                has_failed = True
            case _:
                if not under_way or not pattern.continues_step(
                    letter, num_launched, has_failed=has_failed
                ):
                    found.append(at)
                    pattern.begin_step()
                    under_way, has_failed, num_launched = True, False, 0
                    assert pattern.continues_step(letter, 0)
    return found


@pytest.mark.parametrize(
    "iteration",
    ["a.|", "ab.|", "aa.|", ".|b", "a.|b", "a.b.|", "a.b.|c", "a.a.a.|", "a.bc.b.|", "..a..|"],
)
def test_each_iteration_is_one_step(iteration: str) -> None:
    program = iteration * 6
    ends = [at for at, letter in enumerate(program) if letter == "|"]
    begun = begun_at(program)
    for before, after in itertools.pairwise(ends[1:]):
        assert len([at for at in begun if before < at <= after]) == 1, program


@pytest.mark.parametrize(
    ("program", "begun"),
    [
        ("a.|a.a.|a.|", [0, 3, 5, 8]),
        ("a.|a.a.a.|", [0, 3, 5, 7]),
        ("a.|ba.|ba.a.|b", [0, 3, 7, 10, 13]),
        ("a.b.|a.a.b.|", [0, 5, 7]),
        ("a.b.|a.b.a.b.|", [0, 5, 9]),
        ("a.|a.na.|", [0, 3, 6]),
        ("a.|.a.|", [0, 4]),
    ],
)
def test_a_loop_that_comes_back_to_its_beginning_gives_the_step_up(
    program: str, begun: list[int]
) -> None:
    assert begun_at(program) == begun


def test_without_a_step_before_a_second_pass_belongs_to_the_step() -> None:
    assert begun_at("a.a.|a.a.|") == [0, 5]


def test_in_a_step_that_has_failed_the_first_iteration_is_begun_anew_too() -> None:
    assert begun_at("a.!a.|") == [0, 3]
    assert begun_at("a.b.!b.|") == [0], "a second pass: the vote discards the step"


def test_another_pass_at_a_new_place_belongs_to_its_step() -> None:
    """A pass may be added in every tenth step, for instance, or from some epoch on."""
    assert begun_at("a.|a.|a.b.|a.|a.b.|") == [0, 3, 6, 11, 14]


def test_more_passes_than_before_at_one_place_are_learned() -> None:
    plain, three = "a.|" * 2, "a.a.a.|"
    program = plain + three * (NUM_ALIKE + 2)
    begun = begun_at(program)
    learned = len(plain) + len(three) * NUM_ALIKE
    assert [at for at in begun if at >= learned] == [learned, learned + len(three)]


def test_a_step_of_many_calls_is_bounded() -> None:
    pattern = ClearingPattern()
    pattern.begin_step()
    for num in range(10 * MAX_SEGMENTS):
        assert pattern.continues_step(num % 7, num)
    assert len(pattern._segments) == MAX_SEGMENTS
