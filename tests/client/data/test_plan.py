"""Tests the division of an epoch: every sample in one step, and every step whole (D2, D5, D6)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_svc.client.data.plan import EpochPosition, Held, Piece, StepRules, Turn
from torchft_svc.errors import ConfigError


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    shards = draw(st.integers(1, 3))
    micro = draw(st.none() | st.integers(1, 4).map(lambda each: each * shards))
    batch = (micro or shards) * draw(st.integers(1, 6))
    return {
        "num_samples": draw(st.integers(batch, 60) if batch <= 60 else st.just(batch)),
        "global_batch_size": batch,
        "microbatch_size": micro,
        "last": draw(st.sampled_from(["short", "pad", "drop"])),
        "num_shards": shards,
    }


def epoch_of(chosen: dict[str, Any], sizes: list[int]) -> list[list[tuple[Piece, Fraction]]]:
    """The pieces of each step of an epoch, and their weights in the step's average."""
    steps = []
    position = EpochPosition(2, 0)
    while position.epoch == 2:
        size = sizes[len(steps) % len(sizes)]
        found = []
        for rank in range(size):
            for shard in range(chosen["num_shards"]):
                share = StepRules(**chosen, shard=shard).share(position, Turn(rank, size))
                assert len(share.pieces) == len(share.weights) >= 1
                for piece, weight in zip(share.pieces, share.weights, strict=True):
                    assert piece.end > piece.begin, "everybody makes a pass"
                    of_group = Fraction(weight).limit_denominator(10**6) / chosen["num_shards"]
                    of_step = Fraction(share.part).limit_denominator(10**6)
                    found.append((piece, of_group * of_step))
        steps.append(found)
        position = StepRules(**chosen).following(position)
    assert position == EpochPosition(3, 0)
    return steps


@given(chosen=settings(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_sample_is_in_one_step_and_counts_once(
    chosen: dict[str, Any], sizes: list[int]
) -> None:
    size, batch, last = chosen["num_samples"], chosen["global_batch_size"], chosen["last"]
    counted: list[int] = []
    for step in epoch_of(chosen, sizes):
        in_step = [
            (place, weight / (piece.end - piece.begin))
            for piece, weight in step
            if weight
            for place in range(piece.begin, piece.end)
        ]
        places = [place for place, _ in in_step]
        assert len(set(places)) == len(places)
        # The mean over exactly the samples of the step.
        assert {weight for _, weight in in_step} == {Fraction(1, len(places))}
        assert len(places) == batch or (last == "short" and step is not None)
        counted += places
    if last == "drop":
        assert sorted(counted) == list(range(size - size % batch))
    elif last == "short":
        assert sorted(counted) == list(range(size))
    else:
        assert sorted(counted) == list(range(-(-size // batch) * batch))


@given(chosen=settings(), size=st.integers(1, 5))
def test_the_workers_of_a_group_make_the_same_passes(chosen: dict[str, Any], size: int) -> None:
    position = EpochPosition()
    for rank in range(size):
        shares = [
            StepRules(**chosen, shard=shard).share(position, Turn(rank, size))
            for shard in range(chosen["num_shards"])
        ]
        assert len({len(share.pieces) for share in shares}) == 1
        assert len({share.part for share in shares}) == 1


@st.composite
def losses(draw: st.DrawFn) -> tuple[StepRules, EpochPosition, list[Held]]:
    """A step, and what those hold of it who are left: their shares, or nothing."""
    micro, num = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    size = draw(st.integers(1, 40))
    batch = micro * num
    last = draw(st.sampled_from(["short", "pad"]))
    rules = StepRules(num_samples=size, global_batch_size=batch, microbatch_size=micro, last=last)
    position = EpochPosition(1, draw(st.integers(0, (size - 1) // batch)) * batch)
    num_groups = draw(st.integers(2, 5))
    lost = draw(st.sets(st.integers(0, num_groups - 1), min_size=1, max_size=num_groups - 1))
    held = []
    for rank in sorted({*range(num_groups)} - lost):
        share = rules.share(position, Turn(rank, num_groups))
        has_read = bool(share.part) and draw(st.booleans())
        held.append(Held(share.pieces[0].begin, share.pieces[-1].end) if has_read else Held())
    return rules, position, held


@given(loss=losses())
def test_after_a_loss_every_sample_counts_once(
    loss: tuple[StepRules, EpochPosition, list[Held]],
) -> None:
    rules, position, held = loss
    end = rules.end_of_step(position)
    counted: list[int] = []
    sizes = []
    for rank, mine in enumerate(held):
        found = rules.share_after_loss(position, held, rank)
        assert found is not None
        share, num_read = found
        read = [place for piece in share.pieces[:num_read] for place in _places(piece)]
        assert read == list(range(*mine)), "what was read stays"
        assert sum(share.weights[:num_read]) == pytest.approx(float(bool(read)))
        sizes.append(len(share.pieces) if share.part else 0)
        for piece, weight in zip(share.pieces, share.weights, strict=True):
            assert piece.end > piece.begin
            each = weight * share.part * (end - position.first) / (piece.end - piece.begin)
            assert each == pytest.approx(1.0 if share.part else 0.0)
            counted += _places(piece) if share.part else []
    assert sorted(counted) == list(range(position.first, end))
    most_held = max(-(-(mine.end - mine.begin) // rules.unit) for mine in held)
    assert max(sizes) <= max(most_held, min(sizes) + 1), "as even as what was read allows"


def _places(piece: Piece) -> list[int]:
    return list(range(piece.begin, piece.end))


@pytest.mark.parametrize(
    "held",
    [
        [Held(0, 4), Held(2, 6)],
        [Held(0, 3)],
        [Held(1, 4)],
        [Held(8, 14)],
        [Held(12, 14)],
    ],
)
def test_what_no_group_can_hold_is_not_divided(held: list[Held]) -> None:
    rules = StepRules(num_samples=50, global_batch_size=12, microbatch_size=2)
    assert rules.share_after_loss(EpochPosition(), held, 0) is None
    assert rules.share_after_loss(EpochPosition(), [Held(0, 4), Held(6, 10)], 0) is not None


def test_a_whole_share_in_one_batch_has_weight_one() -> None:
    rules = StepRules(num_samples=100, global_batch_size=10)
    shares = [rules.share(EpochPosition(), Turn(rank, 3)) for rank in range(3)]
    assert [share.pieces for share in shares] == [
        (Piece(0, 0, 4),),
        (Piece(0, 4, 7),),
        (Piece(0, 7, 10),),
    ]
    assert [share.weights for share in shares] == [(1.0,)] * 3
    assert [share.part for share in shares] == [0.4, 0.3, 0.3]


def test_what_is_planned_goes_on_into_the_next_epoch() -> None:
    rules = StepRules(num_samples=5, global_batch_size=4, microbatch_size=2)
    ahead = rules.pieces_from(EpochPosition(), Turn(0, 1))
    expected = [Piece(0, 0, 2), Piece(0, 2, 4), Piece(0, 4, 5), Piece(1, 0, 2)]
    assert [next(ahead) for _ in expected] == expected


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"num_samples": 0}, "0 samples.*one or more"),
        ({"global_batch_size": 0}, "global_batch_size=0.*1 or more"),
        ({"microbatch_size": -1}, "microbatch_size=-1.*1 or more"),
        ({"microbatch_size": 3}, "global_batch_size=8.*multiple of microbatch_size, 3"),
        ({"num_shards": 3}, "global_batch_size=8.*multiple of the number of workers.*3"),
        (
            {"num_shards": 3, "microbatch_size": 4},
            "microbatch_size=4.*multiple of the number of workers.*3",
        ),
        ({"last": "keep"}, "last='keep'.*short, pad, drop"),
        ({"last": "drop", "num_samples": 7}, "global_batch_size=8.*7 samples has no whole step"),
    ],
)
def test_impossible_settings(chosen: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        StepRules(**{"num_samples": 100, "global_batch_size": 8, **chosen})
