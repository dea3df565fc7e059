"""Decides what goes wrong next, drawn from the seed, and how late the others may be after it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tools.chaos.bounds import JOIN_S, LEFT_OUT_S, LIGHTHOUSE_BACK_S, MANAGER_BACK_S, NEWS_S
from torchft_svc.manager_server.app import WORKER_KEEPALIVE_MS

# The lighthouses' settings: short, so that many faults fit into a minute.
HEARTBEAT_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 1.0
HANG_TIMEOUT_S = 1.5
# A lighthouse that is killed is started again after this, and takes so long to start on a machine
# that is busy with everything else.
LIGHTHOUSE_AWAY_S = 0.5
LIGHTHOUSE_START_S = 1.0
# Longer than a living group needs to ask for its next quorum, shorter than it is waited for.
SETTLE_S = 0.3
# A job whose groups are all back needs no lighthouse any more after this.
STEADY_S = 1.0
# So long the others train on without a frozen group, before they end; and so long that group may
# not go back by itself, which is longer than the lighthouse remembers who has gone.
TRAIN_ON_S = 1.0
HOLD_S = 4.0
# What lasts is drawn from here: from a hiccup that nobody has to notice to a loss.
_LENGTHS_S = (0.3, 1.0, 3.0, 5.0)
# Whoever waits for the host instead of the heartbeat timeout is late on a busy machine, too.
_HOST_FROZEN_S = 8.0


class Kind(Enum):
    """What goes wrong; the value is how people read it."""

    WORKER_KILLED = "a worker is killed"
    GROUP_KILLED = "a worker and its manager are killed"
    MANAGER_KILLED = "a manager is killed"
    GROUP_FROZEN = "a worker and its manager are frozen"
    WORKER_FROZEN = "a worker is frozen"
    WORKER_HANGS = "a training loop hangs"
    STEP_HANGS = "a training loop hangs inside a step"
    SUM_FAILS = "a collective fails"
    CUT_OFF = "a manager is cut off from the lighthouses"
    DRAINED = "a worker gets SIGTERM"
    LIGHTHOUSE_KILLED = "a lighthouse is killed"
    LIGHTHOUSES_AWAY = "all lighthouses are killed, and stay away"
    LINES_CUT = "all managers of a job are cut off from the lighthouses"
    STORE_HOST_FROZEN = "the store's host is frozen while it asks and another joins"
    STALE_SURVIVOR = "a frozen group wakes when all others have ended"


# From the fault until all groups that it did not hit have committed an update begun after it.
BOUNDS_S: Mapping[Kind, float] = {
    Kind.WORKER_KILLED: NEWS_S,
    Kind.GROUP_KILLED: NEWS_S,
    Kind.MANAGER_KILLED: MANAGER_BACK_S,
    Kind.GROUP_FROZEN: HEARTBEAT_TIMEOUT_S + NEWS_S,
    Kind.WORKER_FROZEN: 2 * WORKER_KEEPALIVE_MS / 1000 + NEWS_S,
    Kind.WORKER_HANGS: JOIN_TIMEOUT_S + LEFT_OUT_S,
    Kind.STEP_HANGS: HANG_TIMEOUT_S + NEWS_S,
    Kind.SUM_FAILS: NEWS_S,
    Kind.CUT_OFF: HEARTBEAT_TIMEOUT_S + NEWS_S,
    Kind.DRAINED: NEWS_S,
    Kind.LIGHTHOUSE_KILLED: LIGHTHOUSE_AWAY_S + LIGHTHOUSE_START_S + LIGHTHOUSE_BACK_S,
    Kind.LIGHTHOUSES_AWAY: NEWS_S,  # training goes on without them
    Kind.LINES_CUT: NEWS_S,  # the same
    Kind.STORE_HOST_FROZEN: HEARTBEAT_TIMEOUT_S + JOIN_S,
    Kind.STALE_SURVIVOR: NEWS_S,  # from the operator's word on
}
LASTING = frozenset(
    {
        Kind.GROUP_FROZEN,
        Kind.WORKER_FROZEN,
        Kind.WORKER_HANGS,
        Kind.STEP_HANGS,
        Kind.CUT_OFF,
        Kind.LIGHTHOUSES_AWAY,
        Kind.LINES_CUT,
        Kind.STORE_HOST_FROZEN,
    }
)
# After these the group that was hit has to commit again within the same bound: it was not ended.
EVERYBODY = frozenset(
    {
        Kind.MANAGER_KILLED,
        Kind.SUM_FAILS,
        Kind.LIGHTHOUSE_KILLED,
        Kind.LIGHTHOUSES_AWAY,
        Kind.LINES_CUT,
    }
)
# Before these all groups train in steps that ask nobody.
IN_STEADY_STEPS = frozenset({Kind.LIGHTHOUSES_AWAY, Kind.LINES_CUT})
# These hit no group, but all jobs.
FOR_ALL = frozenset({Kind.LIGHTHOUSE_KILLED, Kind.LIGHTHOUSES_AWAY})
# After this one only the group that was hit has to: all others have ended.
ALONE = frozenset({Kind.STALE_SURVIVOR})
ENDING = frozenset({Kind.WORKER_KILLED, Kind.GROUP_KILLED, Kind.DRAINED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """``kind`` hits worker ``worker`` of ``group`` (or lighthouse ``worker``) for ``length_s``.

    It comes ``pause_s`` after everybody has recovered from the one before.
    """

    kind: Kind
    group: int
    worker: int
    length_s: float
    pause_s: float


def draw_faults(
    seed: int, jobs: Mapping[str, Sequence[int]], sizes: Mapping[int, int], num_lighthouses: int
) -> Iterator[Fault]:
    """An endless row, in which kinds and groups come up equally often.

    ``jobs`` are the groups, by job; ``sizes`` the numbers of workers, by group.
    """
    dice = random.Random(seed)
    # The one of the lowest name, of three: another goes on, and one more joins.
    hosts = [min(groups) for groups in jobs.values() if len(groups) > 2]
    left_out = set() if hosts else {Kind.STORE_HOST_FROZEN}
    kinds = _shuffled_for_ever(dice, [kind for kind in Kind if kind not in left_out])
    groups = _shuffled_for_ever(dice, list(sizes))
    for kind in kinds:
        group = dice.choice(hosts) if kind is Kind.STORE_HOST_FROZEN else next(groups)
        choices = num_lighthouses if kind is Kind.LIGHTHOUSE_KILLED else sizes[group]
        yield Fault(
            kind=kind,
            group=group,
            worker=dice.randrange(choices),
            length_s=_draw_length(dice, kind),
            pause_s=STEADY_S if kind in IN_STEADY_STEPS else dice.uniform(0.1, 1.0),
        )


def _draw_length(dice: random.Random, kind: Kind) -> float:
    if kind is Kind.STORE_HOST_FROZEN:
        return _HOST_FROZEN_S
    return dice.choice(_LENGTHS_S) if kind in LASTING else 0.0


def _shuffled_for_ever(dice: random.Random, deck: list) -> Iterator:  # type: ignore[type-arg]
    while True:
        yield from dice.sample(deck, len(deck))
