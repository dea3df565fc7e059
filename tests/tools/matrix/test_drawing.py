"""Tests what a seed stands for, and how a failing program is made smaller."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tools.chaos.options import WorkerOptions
from tools.demo.fingerprint import fingerprint
from tools.matrix.model import Net
from tools.matrix.program import (
    Feature,
    Kill,
    Mode,
    Moment,
    Pg,
    Program,
    Transport,
    Wrapper,
    covering,
    decode,
    draw,
    pairs,
    reason_against,
)
from tools.matrix.smallest import find_smallest
from tools.matrix.trainer import make_scheduler, updates_fail

MANY = [draw(seed) for seed in range(500)]


def test_a_seed_draws_the_same_program_again() -> None:
    assert [draw(seed) for seed in range(500)] == MANY
    assert len({str(program) for program in MANY}) > 480


def test_every_choice_is_drawn() -> None:
    for name, kind in (("pg", Pg), ("wrapper", Wrapper), ("transport", Transport), ("mode", Mode)):
        assert {getattr(program, name) for program in MANY} == set(kind)
    assert {feature for program in MANY for feature in program.features} == set(Feature)
    assert {kill.moment for program in MANY for kill in program.kills} == set(Moment)


@pytest.mark.parametrize("program", MANY[:50], ids=str)
def test_a_program_travels_as_json(program: Program) -> None:
    assert decode(json.loads(json.dumps(program.encode()))) == program


def test_only_what_can_work_is_drawn() -> None:
    assert not [program for program in MANY if reason_against(program)]
    in_place = Program(seed=0, transport=Transport.IN_PLACE)
    assert reason_against(in_place) == (
        "weights are received in place only while nothing is computed with them"
    )


def test_what_is_refused_has_nobody_to_kill() -> None:
    for program in MANY:
        assert bool(program.kills) is not (program.is_refused or program.ends_with_heals)


@pytest.mark.parametrize("kind", range(15))
def test_every_scheduler_makes_steps_and_travels(kind: int) -> None:
    def make() -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        return make_scheduler(torch.optim.Adam([weight]), kind)

    scheduler, other = make(), make()
    for _ in range(20):
        metrics = [1.0] if isinstance(scheduler, ReduceLROnPlateau) else []
        scheduler.optimizer.step()
        scheduler.step(*metrics)
    other.load_state_dict(scheduler.state_dict())
    assert fingerprint(other.state_dict()) == fingerprint(scheduler.state_dict())


def test_schedulers_of_all_sorts_are_drawn() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    seeds = {seed for seed in range(800) if draw(seed).has(Feature.SCHEDULER)}
    made = {type(make_scheduler(torch.optim.Adam([weight]), seed)) for seed in seeds}
    assert len(made) == 15


def test_updates_fail_in_a_group_that_is_not_killed_any_more(tmp_path: Path) -> None:
    """No update fails in a heal; one of the others lives, so there is a state to heal from."""
    program = Program(
        seed=1,
        features=frozenset({Feature.PUBLIC_LOOP}),
        kills=(Kill(group=1, moment=Moment.VOTE),),
    )

    def fails(group: int, life: int, worker: int = 0, drawn: Program = program) -> bool:
        options = WorkerOptions(
            folder=tmp_path, group=group, incarnation=life, worker=worker, lighthouse="nowhere:1"
        )
        return updates_fail(drawn, options)

    assert [fails(0, 0), fails(1, 0), fails(1, 1), fails(1, 1, 1)] == [False, False, True, False]
    assert not fails(1, 1, drawn=dataclasses.replace(program, features=frozenset()))


@pytest.mark.parametrize("features", [[], [Feature.TIED, Feature.FROZEN, Feature.MIXED_TYPES]])
def test_each_parameter_is_in_one_fragment(features: list[Feature]) -> None:
    net = Net(Program(seed=0, wrapper=Wrapper.STREAMING, features=frozenset(features)))
    parts = [set(map(id, part.parameters())) for part in net.fragments()]
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(list(net.parameters()))


def test_the_last_group_that_is_up_to_date_lives() -> None:
    for program in MANY:
        assert len({kill.group for kill in program.kills}) < program.num_groups


def test_what_has_nothing_to_do_with_a_failure_is_left_out() -> None:
    program = Program(
        seed=1,
        pg=Pg.SWALLOWING,
        transport=Transport.PG,
        num_workers=2,
        num_groups=3,
        features=frozenset({Feature.TIED, Feature.FROZEN, Feature.AUTOCAST}),
        kills=(Kill(group=0, moment=Moment.VOTE), Kill(group=0, life=1, moment=Moment.HEAL)),
    )
    smallest = find_smallest(
        program, lambda each: each.pg is Pg.SWALLOWING and each.has(Feature.TIED)
    )
    assert smallest == Program(
        seed=1,
        pg=Pg.SWALLOWING,
        features=frozenset({Feature.TIED}),
        kills=(Kill(group=0, moment=Moment.VOTE),),
    )


def test_the_search_ends_when_its_time_is_over() -> None:
    assert find_smallest(MANY[0], lambda _: None) == MANY[0]


def test_a_choice_without_which_a_program_cannot_work_stays() -> None:
    program = Program(seed=1, transport=Transport.IN_PLACE, use_async_quorum=False)
    tried: list[Program] = []
    find_smallest(program, lambda each: bool(tried.append(each)))
    assert [each.transport for each in tried] == [Transport.HTTP]


def test_few_programs_show_many_pairs() -> None:
    chosen = covering(MANY, 10)
    assert len(set(chosen)) == 10
    assert len(set().union(*map(pairs, chosen))) > 2 * len(pairs(chosen[0]))
