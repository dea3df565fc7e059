"""What a run is: its groups, settings and faults, all drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchft_svc.core.quorum.types import QuorumConfig

# What may happen to a group, and how often, compared with each other.
GROUP_FAULTS = {
    "crash": 4.0,
    "crash_worker": 2.0,
    "crash_manager": 1.0,
    "restart_workers": 1.0,
    "freeze": 2.0,
    "hang": 3.0,
    "cut": 2.0,
    "cut_manager": 2.0,
    "reset": 2.0,
    "lag": 2.0,
    "break_sum": 3.0,
    "leave": 2.0,
    "drain": 2.0,
    "stall": 1.0,
}
LIGHTHOUSE_FAULTS = {
    "lighthouse_crash": 2.0,
    "lighthouse_freeze": 0.3,
    "crash_all": 0.3,
    "accept_loss": 0.5,
}
# They are not among those that each run has its own rates for.
LATER_LIGHTHOUSE_FAULTS = ("lighthouse_lead", "change_leader", "clock_jump")
# Of the lighthouse's sessions, as often as `NUMS_OF_BROKEN_SESSIONS`.
SESSION_FAULTS = ("half_open", "half_open", "half_open", "lighthouse_lead")
MAX_FAULTS, MAX_FAULTS_OF_LARGE = 30, 6
# The longest that a fault lasts, and the time in which faults begin, in seconds.
MAX_DOWN_S, FAULTS_END_S = 8.0, 20.0
LONG_HANG = 4.0  # times as long: longer than others wait for it
# A model takes a while to copy, compared with a message; where heals are waited for, longer.
SHORT_HANG_S = 1.5  # a bit longer than any step
MEAN_COPY_S, LONG_COPY_S = 0.05, 1.0
# How often workers lose the connection to their manager, though both live.
NUMS_OF_BROKEN_LINES = (0, 0, 3, 20)
# How often a run lets groups hang, or heal slowly.
MAX_OCCASIONS = 3
# How often a session breaks without the lighthouse's notice, or it leads no more.
NUMS_OF_BROKEN_SESSIONS = (0, 0, 2, 10)
# How often programs raise in an update, or put off what they have to heal.
NUMS_OF_ODD_STEPS = (0, 0, 0, 4)
# Of runs with groups of several workers; and of all.
LOST_DECISION_RATE, LOST_QUORUM_RATE, FOREIGN_CHECKPOINT_RATE = 0.3, 0.15, 0.1
ALONE_S = 5.0  # nothing else happens before
LONG_RESTART_S = 7.0  # of a manager: longer than its workers wait for another one
LIST_RATE = 0.35  # of runs with several lighthouses
MIN_JOIN_TIMEOUT_S = 5.0  # there: far more than a look back
MAX_SKEW_S = 50.0
STEADY_RATE = 0.75  # of runs whose workers can go on without a question
# How often a member of a term has a reason to end it, in such runs.
NUMS_OF_ENDS = (0, 1, 4, 8)
# Of those, runs in which little but `ENDS_OF_LONG_TERMS` happens; how often compared with each
# other, and how many of them in a run.
LONG_TERMS_RATE = 0.4
# Of these, runs in which a group and the lighthouse are back at the same time.
RETURNS_RATE = 0.2
ENDS_OF_LONG_TERMS = {
    "lose_update": 4.0,
    "crash": 3.0,
    "drain": 2.0,
    "die_with_sum": 2.0,
    "lose_decision": 2.0,
    "crash_manager": 1.0,
    "hang": 1.0,
    "break_sum": 1.0,
    "freeze": 0.5,
}
NUMS_OF_STORIES = (2, 4, 8)
LONG_SUM_S = 15.0
LONE_DEATHS_RATE = 0.1  # of such runs in which only managers die
MET_S, APART_S = 12.0, 3.0  # the first one when all train together, and one after the other
PREVIEWS_RATE = 0.15  # of all runs
SPARES_RATE = 0.25  # of all runs
COPIES_RATE = 0.2  # of all others
# What happens to the groups whose places prepared spares take, and to these spares meanwhile.
LOSSES_OF_PLACES = ("crash", "crash", "crash", "crash_worker", "drain", "leave", "cut", "freeze")
TROUBLES_OF_SPARES = ("crash", "crash_manager", "cut", "freeze", "half_open", "reset", "drain")
LONE_LOSS_RATE = 0.3  # of the runs with copies
LATE_LOSS_RATE, LATEST_LOSS_S = 0.4, 50.0  # groups of several workers have copied some steps
FAULTS_OF_HOLDERS = ("holder_crash", "holder_freeze", "holder_cut")
NUMS_OF_SPARE_STORIES = (1, 3, 6)
FINISH_RATE = 0.25  # of the runs with spares, or copies: their jobs end on purpose
LARGE = 200  # above this many groups, a run is about the number


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRules:
    """How the workers of a run train; durations in seconds."""

    collective_s: float
    quorum_s: float
    train_s: float
    min_replica_size: int
    use_async_quorum: bool
    num_wanted: int | None
    shrink_only_rate: float
    reports_phases: bool
    mean_copy_s: float
    is_steady: bool
    copy_every: int = 0  # so many steps a copy is offered to holders; 0: never
    mean_preview_s: float = 0.0  # what a worker fetches before its first question; 0: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``kind`` happens ``at`` to group number ``target``, and lasts ``seconds``."""

    at: float
    kind: str
    target: int
    seconds: float
    value: float = 0.0

    @property
    def is_for_holder(self) -> bool:
        return self.kind in FAULTS_OF_HOLDERS

    @property
    def is_for_all(self) -> bool:
        return self.kind in LIGHTHOUSE_FAULTS or self.kind in LATER_LIGHTHOUSE_FAULTS

    def __str__(self) -> str:
        whom = "" if self.is_for_all else f" of group {self.target}"
        return f"{self.at:10.4f} s  {self.kind}{whom} for {self.seconds:.2f} s ({self.value:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """All that decides a run."""

    seed: int
    num_groups: int
    num_jobs: int
    group_world_size: int
    config: QuorumConfig
    trainer: TrainerRules
    connect_timeout_s: float
    quorum_retries: int
    requested_min_replicas: int
    unary_every: int  # each such group has no session; 0: none
    save_every: int
    start_spread_s: float
    is_clock_honest: bool
    num_lighthouses: int
    is_elected: bool  # of several lighthouses only one answers, and the others name it
    clock_skews_s: tuple[float, ...]  # of the lighthouses' wall clocks
    is_lockstep: bool  # the workers of a group meet in a collective of their own in each step
    faults: tuple[Fault, ...]
    num_spares: int = 0  # groups beside the others that start as prepared spares
    spare_restart_rate: float = 0.0  # of the other groups, when they are started again
    num_holders: int = 0  # of copies, for each job
    holds_parts: bool = False  # each holder has the copies of one worker of a group

    @property
    def num_always_ordinary(self) -> int:
        """How many groups start as ordinary ones whenever they start: prepared spares alone begin
        no job, and count for no minimum."""
        fewest = max(
            self.config.min_replicas, self.requested_min_replicas, self.trainer.min_replica_size
        )
        return fewest * self.num_jobs

    @property
    def quiet_at(self) -> float:
        """Time when the last fault is over."""
        ends = (fault.at + fault.seconds for fault in self.faults)
        return max(ends, default=0.0) + self.start_spread_s + 1.0

    @property
    def patience_s(self) -> float:
        """How long after that all groups of a job must have committed a step together.

        A fault may have left a group in each of the waits of a step, one after the other.
        """
        parts = (
            self.trainer.quorum_s,
            self.trainer.collective_s,
            self.config.heal_timeout_s or self.config.join_timeout_s,
            self.config.newcomer_timeout_s,
            self.config.heartbeat_timeout_s,
            self.trainer.train_s,
        )
        return 4 * sum(parts) + 30.0


def draw(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed``; ``num_groups`` overrides the number drawn."""
    chance = random.Random(f"{seed}/spares")
    if chance.random() < SPARES_RATE and (num_groups or 0) <= LARGE:
        return draw_spares(seed, num_groups)
    chance = random.Random(f"{seed}/copies")
    if chance.random() < COPIES_RATE and (num_groups or 0) <= LARGE:
        return draw_copies(seed, num_groups)
    return draw_ordinary(seed, num_groups)


def draw_copies(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which holders have copies, and all groups of a job are lost at
    once (rules B1 to B6)."""
    scenario = draw_ordinary(seed, num_groups)
    chance = random.Random(f"{seed}/held")
    trainer = replace(scenario.trainer, copy_every=chance.choice([1, 2, 5]))
    holds_parts = scenario.group_world_size > 1 and chance.random() < 0.5
    num_whole = chance.choice([1, 1, 2, 3])
    num_holders = num_whole * (scenario.group_world_size if holds_parts else 1)
    scenario = replace(
        scenario,
        trainer=trainer,
        num_holders=num_holders,
        holds_parts=holds_parts,
        save_every=chance.choice([0, 0, 5]),
    )
    is_late = chance.random() < LATE_LOSS_RATE
    last_s = LATEST_LOSS_S if is_late else FAULTS_END_S
    faults, lost_at = scenario.faults, chance.uniform(10.0, last_s)
    if chance.random() < 0.5:  # nothing else happens before
        faults = tuple(each for each in faults if each.at > lost_at)
    if chance.random() < LONE_LOSS_RATE:  # a group begins while the others train
        target, began_at = chance.randrange(scenario.num_groups), chance.uniform(3.0, 6.0)
        lone = Fault(at=began_at, kind="crash", target=target, seconds=MAX_DOWN_S)
        lost_at = began_at + MAX_DOWN_S + chance.uniform(2.0, 6.0)
        faults = (lone, *(each for each in faults if each.at > lost_at))
    for _ in range(chance.choice([1, 1, 2])):
        faults = (*faults, *_draw_total_loss(chance, scenario, lost_at))
        lost_at += chance.uniform(8.0, 15.0)
    if chance.random() < FINISH_RATE:
        at = max(each.at + each.seconds for each in faults) + 10.0
        faults = (*faults, *_draw_finish(chance, scenario, at))
    return replace(scenario, faults=_in_order(faults))


def _draw_total_loss(chance: random.Random, scenario: Scenario, at: float) -> list[Fault]:
    """All groups die; holders or lighthouses may be in trouble, too."""
    faults = [Fault(at=at, kind="crash_all", target=0, seconds=chance.choice([0.02, 2.0, 6.0]))]
    also = chance.choice(["", "holders", "holders", "lighthouse"])
    num_holders = scenario.num_holders * scenario.num_jobs
    if also == "holders":
        for target in chance.sample(range(num_holders), chance.randint(1, num_holders)):
            kind, seconds = chance.choice(FAULTS_OF_HOLDERS), chance.choice([0.3, 2.0, 8.0])
            began_at = at + chance.uniform(-3.0, 3.0)
            faults.append(Fault(at=began_at, kind=kind, target=target, seconds=seconds))
    elif also == "lighthouse":
        kind = chance.choice(["lighthouse_crash", "lighthouse_lead", "lighthouse_freeze"])
        began_at, seconds = at + chance.uniform(-2.0, 2.0), chance.choice([0.02, 0.3, 2.0])
        faults.append(Fault(at=began_at, kind=kind, target=0, seconds=seconds))
    return faults


def draw_spares(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which some groups start as prepared spares (rules G1 to G4)."""
    scenario = draw_ordinary(seed, num_groups)
    chance = random.Random(f"{seed}/places")
    faults = scenario.faults
    if chance.random() < 0.5:  # little else happens
        faults = tuple(each for each in faults if chance.random() < 0.1)
    num_spares = chance.choice([1, 1, 2, 3]) * scenario.num_jobs
    mean_preview_s = chance.choice([0.0, 0.5, 3.0])  # with 0 they do not follow
    scenario = replace(
        scenario,
        trainer=replace(scenario.trainer, mean_preview_s=mean_preview_s),
        num_spares=num_spares,
        spare_restart_rate=chance.choice([0.0, 0.5, 1.0]),
        faults=(),
    )
    more: list[Fault] = []
    for _ in range(chance.choice(NUMS_OF_SPARE_STORIES)):
        more += _draw_lost_places(chance, scenario)
    if chance.random() < FINISH_RATE:
        at = FAULTS_END_S + chance.uniform(5.0, 8.0)
        faults = tuple(each for each in faults if each.at + each.seconds < FAULTS_END_S)
        more = [each for each in more if each.at + each.seconds < FAULTS_END_S]
        more += _draw_finish(chance, scenario, at)
    return replace(scenario, faults=_in_order((*faults, *more)))


def _draw_lost_places(chance: random.Random, scenario: Scenario) -> list[Fault]:
    """Some groups are lost; and something may happen to a spare, or to the lighthouse, then."""
    at, num_groups = chance.uniform(2.0, FAULTS_END_S), scenario.num_groups
    num_lost = chance.choice([1, 1, 1, 2, num_groups - 1, num_groups])
    faults = []
    for target in chance.sample(range(num_groups), min(num_lost, num_groups)):
        kind, lost_at = chance.choice(LOSSES_OF_PLACES), at + chance.choice([0.0, chance.random()])
        seconds = chance.choice([0.02, 2.0, 6.0, MAX_DOWN_S])
        value = chance.random()
        faults.append(Fault(at=lost_at, kind=kind, target=target, seconds=seconds, value=value))
    also = chance.choice(["", "spare", "spare", "lighthouse"])
    began_at, seconds = at + chance.uniform(-0.5, 0.5), chance.choice([0.02, 0.3, 2.0, 6.0])
    if also == "spare":
        kind, target = chance.choice(TROUBLES_OF_SPARES), chance.randrange(scenario.num_spares)
        value, target = chance.random(), num_groups + target
        faults.append(Fault(at=began_at, kind=kind, target=target, seconds=seconds, value=value))
    elif also == "lighthouse":
        kind = chance.choice(["lighthouse_crash", "lighthouse_lead", "lighthouse_freeze"])
        faults.append(Fault(at=began_at, kind=kind, target=0, seconds=min(seconds, 2.0)))
    return faults


def _draw_finish(chance: random.Random, scenario: Scenario, at: float) -> list[Fault]:
    """All jobs end on purpose; a spare's session may break at that moment."""
    faults = [
        Fault(at=at, kind="finish", target=job, seconds=1.0) for job in range(scenario.num_jobs)
    ]
    if scenario.num_spares and chance.random() < 0.5:
        target = scenario.num_groups + chance.randrange(scenario.num_spares)
        broke_at, kind = at + chance.uniform(-0.3, 0.6), chance.choice(["reset", "half_open"])
        faults.append(Fault(at=broke_at, kind=kind, target=target, seconds=0.0))
    return faults


def draw_ordinary(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed``, without prepared spares."""
    scenario = _draw_kind(seed, num_groups)
    chance = random.Random(f"{seed}/previews")
    if chance.random() >= PREVIEWS_RATE or scenario.num_groups > LARGE:
        return scenario
    mean_s = chance.choice([0.05, 0.5, 3.0])
    return replace(scenario, trainer=replace(scenario.trainer, mean_preview_s=mean_s))


def _draw_kind(seed: int, num_groups: int | None) -> Scenario:
    """The scenario of ``seed``, of one of the kinds."""
    chance = random.Random(~seed)
    if chance.random() >= STEADY_RATE:
        return draw_asking(seed, num_groups)
    is_long = chance.random() < LONG_TERMS_RATE and (num_groups or 0) <= LARGE
    if is_long and chance.random() < RETURNS_RATE:
        return draw_returns(seed, num_groups)
    return draw_long_terms(seed, num_groups) if is_long else draw_steady(seed, num_groups)


def draw_steady(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which steps may begin without a question."""
    scenario = draw_asking(seed, num_groups)
    trainer = replace(scenario.trainer, is_steady=True)
    chance = random.Random(f"{seed}/terms")
    more: list[Fault] = []
    for _ in range(0 if scenario.num_groups > LARGE else chance.choice(NUMS_OF_ENDS)):
        more += _draw_end_of_term(chance, scenario)
    scenario = replace(scenario, trainer=trainer, faults=_in_order((*scenario.faults, *more)))
    return _draw_lone_deaths_of_managers(seed, scenario)


def _draw_lone_deaths_of_managers(seed: int, scenario: Scenario) -> Scenario:
    """Draw, in some runs, deaths of managers alone, which cost nobody a step."""
    chance = random.Random(f"{seed}/managers")
    if chance.random() >= LONE_DEATHS_RATE or scenario.num_groups > LARGE:
        return scenario
    # Of groups whose manager is a child of the worker, which can say who it was.
    deaths = [
        Fault(
            at=MET_S + number * APART_S + chance.uniform(0.0, 1.0),
            kind="crash_manager",
            target=chance.randrange(0, scenario.num_groups, 2),
            seconds=0.02,
        )
        for number in range(chance.randint(1, 4))
    ]
    # So alike that nobody waits for long in a step; and who is away is no straggler yet.
    trainer = replace(scenario.trainer, train_s=min(scenario.trainer.train_s, 0.3))
    config = replace(scenario.config, join_timeout_s=20.0, heal_timeout_s=None)
    return replace(
        scenario,
        group_world_size=chance.choice((1, 2)),
        unary_every=0,
        start_spread_s=0.1,
        config=config,
        trainer=trainer,
        faults=tuple(deaths),
    )


def _draw_end_of_term(chance: random.Random, scenario: Scenario) -> list[Fault]:
    """A member cannot go on, or hangs, or a group comes; and the news of it may get lost."""
    num_groups = scenario.num_groups
    at, (target, other) = chance.uniform(1.0, FAULTS_END_S), chance.sample(range(num_groups), 2)
    kind = chance.choice(["lose_update", "lose_update", "break_sum", "hang", "drain", "crash"])
    is_hang = kind == "hang"
    seconds = scenario.config.join_timeout_s + chance.uniform(3.0, 6.0) if is_hang else 0.02
    value = chance.random()
    faults = [Fault(at=at, kind=kind, target=target, seconds=seconds, value=value)]
    loss = chance.choice(["", "lighthouse_crash", "reset_worker", "crash_manager"])
    if loss:
        began_at, away_s = at + chance.uniform(-0.3, 0.3), chance.choice([0.02, 0.3])
        faults.append(Fault(at=began_at, kind=loss, target=other, seconds=away_s))
    return faults


def draw_long_terms(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which terms are long, and members are waited for: one that has
    missed the end of a term is seen to wait."""
    scenario = draw_asking(seed, num_groups)
    chance = random.Random(f"{seed}/long terms")
    config = QuorumConfig(
        join_timeout_s=chance.choice([5.0, 5.0, 10.0]),
        heartbeat_timeout_s=chance.choice([1.0, 5.0]),
        max_members_per_job=scenario.config.max_members_per_job,
    )
    trainer = replace(
        scenario.trainer,
        collective_s=LONG_SUM_S,
        quorum_s=60.0,
        train_s=chance.choice([0.1, 0.3, 1.0]),
        min_replica_size=1,
        num_wanted=None,
        shrink_only_rate=0.0,
        reports_phases=False,
        mean_copy_s=MEAN_COPY_S,
        is_steady=True,
    )
    group_world_size = chance.choice([1, 1, 2, 2, 3])
    scenario = replace(
        scenario,
        num_jobs=1,
        group_world_size=group_world_size,
        config=config,
        trainer=trainer,
        connect_timeout_s=10.0,
        requested_min_replicas=0,
        unary_every=0,
        start_spread_s=0.1,
        num_lighthouses=1,
        is_elected=False,
        clock_skews_s=(0.0,),
        is_clock_honest=True,
        is_lockstep=group_world_size > 1 and chance.random() < 0.5,
        faults=(),
    )
    faults: list[Fault] = []
    at = 1.0
    for _ in range(chance.choice(NUMS_OF_STORIES)):
        at += chance.uniform(0.3, 3.0)
        faults += _draw_story(chance, scenario, at)
    return replace(scenario, faults=_in_order(faults))


def draw_returns(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which a group that the others have left is back at the moment at
    which its lighthouse is restarted, and may be the first to come there (rule Q11)."""
    scenario = draw_long_terms(seed, num_groups)
    chance = random.Random(f"{seed}/returns")
    lost, other = chance.sample(range(scenario.num_groups), 2)
    at, away_s = 4.0, chance.choice([0.3, 2.0, 5.0])
    lost_s = scenario.config.heartbeat_timeout_s + chance.uniform(2.0, 6.0)
    down_at = at + lost_s + chance.uniform(-0.6, 0.3) - away_s
    faults = [
        Fault(at=at, kind=chance.choice(["freeze", "cut"]), target=lost, seconds=lost_s),
        Fault(at=down_at, kind="lighthouse_crash", target=lost, seconds=away_s),
    ]
    if chance.random() < 0.5:
        faults.append(Fault(at=down_at + 0.1, kind="crash", target=other, seconds=5.0))
    return replace(scenario, faults=_in_order(faults))


def _draw_story(chance: random.Random, scenario: Scenario, at: float) -> list[Fault]:
    """A long term ends, or has a reason to; and those that should learn of it may be deaf."""
    kinds, rates = list(ENDS_OF_LONG_TERMS), list(ENDS_OF_LONG_TERMS.values())
    kind = chance.choices(kinds, rates)[0]
    target, *others = chance.sample(range(scenario.num_groups), scenario.num_groups)
    seconds = chance.choice([0.02, 0.3, 2.0])
    if kind == "hang":
        seconds = scenario.config.join_timeout_s + chance.uniform(3.0, 6.0)
    elif kind == "lose_decision":
        seconds = chance.choice([0.05, 0.2])
    value = chance.random()
    if kind == "hang" and value < 0.7:
        kind = "hang_between"
    faults = [Fault(at=at, kind=kind, target=target, seconds=seconds, value=value)]
    loss = chance.choice(["", "", "lose_news", "lose_news", "lighthouse"])
    if loss == "lose_news":
        what = chance.random()
        for each in others[: chance.choice([1, len(others)])]:
            faults.append(Fault(at=at - 0.05, kind=loss, target=each, seconds=0.0, value=what))
    elif loss == "lighthouse":
        kind = chance.choice(["lighthouse_crash", "lighthouse_lead"])
        began_at, away_s = at + chance.uniform(-0.3, 0.3), chance.choice([0.02, 0.3])
        faults.append(Fault(at=began_at, kind=kind, target=target, seconds=away_s))
    return faults


def draw_asking(seed: int, num_groups: int | None = None) -> Scenario:
    """The scenario of ``seed`` in which each step asks."""
    chance = random.Random(seed)
    drawn = chance.choice([2, 2, 3, 3, 4, 5, 6, 10])
    groups = drawn if num_groups is None else num_groups
    is_large = groups > LARGE
    quorum_s = chance.choice([5.0, 15.0, 60.0])
    collective_s = min(quorum_s, chance.choice([2.0, 5.0, 15.0]))
    min_replica_size = chance.choice([1, 1, 1, max(1, groups // 2)])
    jobs = chance.choice([1, 1, 1, 2])
    is_clock_honest = chance.random() < 0.7
    hang_timeout_s = chance.choice([None, None, collective_s + 3.0])
    config = QuorumConfig(
        min_replicas=chance.choice([1, 1, max(1, groups // (2 * jobs))]),
        join_timeout_s=chance.choice([0.2, 1.0, 5.0, 20.0]),
        startup_timeout_s=chance.choice([None, 5.0]),
        heartbeat_timeout_s=chance.choice([1.0, 5.0]),
        on_step_regression=chance.choice(["auto", "auto", "hold", "warn"]),
        hang_timeout_s=None if is_large else hang_timeout_s,
        on_hang=chance.choice(["report", "kill"]),
        max_members_per_job=10 * groups,
    )
    trainer = TrainerRules(
        collective_s=collective_s,
        quorum_s=quorum_s,
        train_s=chance.choice([0.1, 0.3, 1.0]) if not is_large else 4.0,
        min_replica_size=min_replica_size,
        use_async_quorum=chance.random() < 0.7,
        num_wanted=chance.choice([None, None, None, min_replica_size]),
        shrink_only_rate=chance.choice([0.0, 0.0, 0.0, 0.2 / groups]),
        reports_phases=config.hang_timeout_s is not None,
        mean_copy_s=MEAN_COPY_S,
        is_steady=False,
    )
    scenario = Scenario(
        seed=seed,
        num_groups=groups,
        num_jobs=1 if is_large else jobs,
        group_world_size=1 if is_large else chance.choice([1, 1, 2, 3]),
        config=config,
        trainer=trainer,
        connect_timeout_s=min(quorum_s, chance.choice([1.0, 10.0])),
        quorum_retries=chance.choice([0, 0, 2]),
        requested_min_replicas=chance.choice([0, 0, 0, max(1, groups // (2 * jobs))]),
        unary_every=chance.choice([0, 0, 0, 1, 3]),
        save_every=chance.choice([0, 1, 5]),
        start_spread_s=chance.choice([0.0, 0.1, 1.0 if is_large else 10.0]),
        is_clock_honest=is_clock_honest,
        num_lighthouses=1,
        is_elected=False,
        clock_skews_s=(0.0,),
        is_lockstep=False,
        faults=_draw_faults(chance, groups, is_clock_honest, is_large),
    )
    scenario = _draw_patience(chance, scenario, is_large)
    return scenario if is_large else _draw_rare(chance, scenario)


def _draw_patience(chance: random.Random, scenario: Scenario, is_large: bool) -> Scenario:
    """Hangs that evict, long heals, broken streams and odd steps, in some runs.

    Drawn late, so that the rest of a seed stays as it was.
    """
    config, trainer = scenario.config, scenario.trainer
    more: list[Fault] = []
    if chance.random() < 0.5:
        config = replace(config, on_hang="evict")
        if not is_large:
            timeouts_s = [SHORT_HANG_S, SHORT_HANG_S, trainer.collective_s + 3.0]
            config = replace(config, hang_timeout_s=chance.choice(timeouts_s))
            trainer = replace(trainer, reports_phases=True)
    if chance.random() < 0.35 and not is_large:
        join_timeout_s = chance.choice([config.join_timeout_s, 0.2, 1.0])
        heal_timeout_s = join_timeout_s + chance.choice([2.0, 8.0])
        config = replace(config, join_timeout_s=join_timeout_s, heal_timeout_s=heal_timeout_s)
        mean_copy_s = max(LONG_COPY_S, trainer.collective_s / 3)
        trainer = replace(trainer, reports_phases=True, mean_copy_s=mean_copy_s)
        for _ in range(chance.randint(0, MAX_OCCASIONS)):
            more += _draw_broken_heals(chance, scenario.num_groups)
    hang_timeout_s = config.hang_timeout_s
    if config.on_hang == "evict" and hang_timeout_s is not None:
        loss_rate = 0.3
        if chance.random() < 0.4:  # the others cannot go on without it
            fewest = scenario.num_groups // scenario.num_jobs - chance.choice([0, 0, 1])
            config, loss_rate = replace(config, min_replicas=max(1, fewest)), 0.8
        for _ in range(chance.randint(1, MAX_OCCASIONS)):
            more += _draw_hangs(chance, scenario.num_groups, hang_timeout_s, loss_rate)
    for _ in range(0 if is_large else chance.choice(NUMS_OF_BROKEN_LINES)):
        kind = chance.choice(["reset_worker", "lose_answer"])
        at, target = chance.uniform(0.0, FAULTS_END_S), chance.randrange(scenario.num_groups)
        more.append(Fault(at=at, kind=kind, target=target, seconds=0.0, value=chance.random()))
    is_lockstep = scenario.group_world_size > 1 and chance.random() < 0.5
    for _ in range(0 if is_large else chance.choice(NUMS_OF_ODD_STEPS)):
        more += _draw_odd_steps(chance, scenario.num_groups, scenario.trainer.use_async_quorum)
    more += _draw_broken_sessions(chance, scenario.num_groups, is_large)
    scenario = replace(
        scenario,
        config=config,
        trainer=trainer,
        is_lockstep=is_lockstep,
        faults=_in_order((*scenario.faults, *more)),
    )
    return scenario if is_large else _draw_lists(chance, scenario)


def _in_order(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _draw_lists(chance: random.Random, scenario: Scenario) -> Scenario:
    """Several lighthouses, in some runs, with moves between them; and clocks that jump."""
    more: list[Fault] = []
    if chance.random() < LIST_RATE:
        number, is_elected = chance.choice([2, 2, 3]), chance.random() < 0.4
        config = scenario.config
        if not is_elected:  # else groups are left out before they have looked back
            join_timeout_s = max(config.join_timeout_s, MIN_JOIN_TIMEOUT_S)
            heal_timeout_s = config.heal_timeout_s and max(config.heal_timeout_s, join_timeout_s)
            config = replace(config, join_timeout_s=join_timeout_s, heal_timeout_s=heal_timeout_s)
        for _ in range(chance.randint(0, MAX_OCCASIONS)):
            more += _draw_moves(chance, scenario.num_groups, is_elected)
        scenario = replace(scenario, config=config, num_lighthouses=number, is_elected=is_elected)
    skews_s = [0.0] * scenario.num_lighthouses
    if not scenario.is_clock_honest:
        skews_s = [chance.uniform(-MAX_SKEW_S, MAX_SKEW_S) for _ in skews_s]
        for _ in range(chance.randint(0, MAX_OCCASIONS)):
            at, target = chance.uniform(0.0, FAULTS_END_S), chance.randrange(scenario.num_groups)
            value = chance.random()
            more.append(Fault(at=at, kind="clock_jump", target=target, seconds=0.0, value=value))
    faults = _in_order((*scenario.faults, *more))
    return replace(scenario, clock_skews_s=tuple(skews_s), faults=faults)


def _draw_moves(chance: random.Random, num_groups: int, is_elected: bool) -> list[Fault]:
    """The first lighthouse is away for a while; as it comes back, something happens to a group."""
    at, away_s = chance.uniform(1.0, FAULTS_END_S), chance.choice([1.0, 3.0, MAX_DOWN_S])
    kind = chance.choice(["lighthouse_crash", "lighthouse_crash", "lighthouse_freeze"])
    if is_elected and chance.random() < 0.5:
        kind = "change_leader"
    faults = [Fault(at=at, kind=kind, target=0, seconds=away_s)]
    for target in chance.sample(range(num_groups), chance.choice([1, 1, max(1, num_groups // 2)])):
        kind = chance.choice(["freeze", "freeze", "cut", "cut_manager", "crash", "crash"])
        began_at = at + away_s + chance.uniform(-2.0, 0.5)
        seconds = chance.choice([0.3, 2.0, 4.0, MAX_DOWN_S])
        faults.append(
            Fault(at=began_at, kind=kind, target=target, seconds=seconds, value=chance.random())
        )
    return faults


def _draw_rare(chance: random.Random, scenario: Scenario) -> Scenario:
    """What needs a moment of its own: a manager dies while it sends a decision or a quorum, or a
    group begins with the checkpoint of another run while the job is at step 0."""
    num_groups = scenario.num_groups
    more: list[Fault] = []
    if scenario.group_world_size > 1 and chance.random() < LOST_DECISION_RATE:
        more += _draw_deaths_while_sending(chance, num_groups, "lose_decision")
    if chance.random() < FOREIGN_CHECKPOINT_RATE:
        later = tuple(fault for fault in scenario.faults if fault.at > ALONE_S)
        scenario = replace(scenario, start_spread_s=0.0, faults=later)
        stranger = chance.randrange(num_groups)
        for target in range(num_groups):
            kind = "foreign_checkpoint" if target == stranger else "break_sum"
            more.append(Fault(at=0.02, kind=kind, target=target, seconds=0.02))
    chance = random.Random(f"{scenario.seed}/quorums")
    if scenario.group_world_size > 1 and chance.random() < LOST_QUORUM_RATE:
        more += _draw_deaths_while_sending(chance, num_groups, "lose_quorum")
    return replace(scenario, faults=_in_order((*scenario.faults, *more)))


def _draw_deaths_while_sending(chance: random.Random, num_groups: int, kind: str) -> list[Fault]:
    """Managers die when only one of their workers knows the decision, or has the quorum."""
    faults = []
    for _ in range(chance.randint(1, MAX_OCCASIONS)):
        at, target = chance.uniform(0.0, FAULTS_END_S), chance.randrange(num_groups)
        down_s = chance.choice([0.2, LONG_RESTART_S])
        faults.append(Fault(at=at, kind=kind, target=target, seconds=down_s))
    return faults


def _draw_hangs(
    chance: random.Random, num_groups: int, hang_timeout_s: float, loss_rate: float
) -> list[Fault]:
    """Some groups hang while the others wait for them, which may be lost just then."""
    at = chance.uniform(1.0, FAULTS_END_S)
    num_hung = chance.choice([1, 1, max(1, num_groups // 2), num_groups - 1])
    groups = chance.sample(range(num_groups), num_groups)
    faults = [
        Fault(
            at=at + chance.choice([0.0, chance.random()]),
            kind="hang",
            target=target,
            seconds=hang_timeout_s + chance.uniform(0.0, MAX_DOWN_S),
        )
        for target in groups[:num_hung]
    ]
    if chance.random() >= loss_rate:
        return faults
    lost_at = at + hang_timeout_s + chance.uniform(0.5, 3.0)
    if chance.random() < 0.5:  # a newcomer in their place
        away_s = hang_timeout_s + chance.uniform(1.0, 4.0)
        faults.append(Fault(at=at - 1.0, kind="crash", target=groups[-1], seconds=away_s))
    for target in groups[num_hung:]:
        kind = chance.choice(["crash", "crash", "leave", "cut", "reset", "freeze"])
        seconds = chance.choice([0.3, 2.0, MAX_DOWN_S])
        lost = Fault(at=lost_at, kind=kind, target=target, seconds=seconds, value=chance.random())
        faults.append(lost)
    return faults


def _draw_odd_steps(chance: random.Random, num_groups: int, use_async_quorum: bool) -> list[Fault]:
    """Some groups, or all, lose an update or put heals off at about the same time.

    Without an asynchronous quorum all have to put heals off in the same step, which a fault at a
    time cannot do: a group that does not would count one that is behind as a contributor.
    """
    kind = chance.choice(["lose_update", "spoil_update", "put_off"])
    at, value = chance.uniform(1.0, FAULTS_END_S), chance.random()
    targets = chance.sample(range(num_groups), chance.choice([1, 1, num_groups]))
    seconds = chance.choice([0.3, 2.0, MAX_DOWN_S]) if kind == "put_off" else 0.0
    faults = [
        Fault(at=at, kind=kind, target=target, seconds=seconds, value=value) for target in targets
    ]
    if kind == "put_off" and not use_async_quorum:
        return []
    if kind == "put_off":  # one that has something to heal
        faults.append(Fault(at=at - 0.1, kind="crash", target=targets[0], seconds=0.02))
    return faults


def _draw_broken_sessions(chance: random.Random, num_groups: int, is_large: bool) -> list[Fault]:
    """Sessions break and the lighthouse does not notice, or it leads no more."""
    return [
        Fault(
            at=chance.uniform(0.0, FAULTS_END_S),
            kind=chance.choice(SESSION_FAULTS),
            target=chance.randrange(num_groups),
            seconds=chance.choice([0.02, 0.3, 2.0]),
            value=chance.random(),
        )
        for _ in range(0 if is_large else chance.choice(NUMS_OF_BROKEN_SESSIONS))
    ]


def _draw_broken_heals(chance: random.Random, num_groups: int) -> list[Fault]:
    """Some groups begin anew, and are interrupted while they heal."""
    at, down_s = chance.uniform(1.0, FAULTS_END_S), chance.choice([0.02, 0.3])
    faults = []
    for target in chance.sample(range(num_groups), chance.randint(1, num_groups)):
        faults.append(Fault(at=at, kind="crash", target=target, seconds=down_s))
        for _ in range(chance.randint(0, 3)):
            kind = chance.choice(["reset", "reset", "cut_manager", "lag"])
            reset_at = at + down_s + chance.uniform(0.2, 3.0)
            value = chance.random()
            faults.append(Fault(at=reset_at, kind=kind, target=target, seconds=0.3, value=value))
    return faults


def _draw_faults(
    chance: random.Random, num_groups: int, is_clock_honest: bool, is_large: bool
) -> tuple[Fault, ...]:
    """A few kinds, each as often as chance has it in this run: runs are to differ."""
    kinds = {**GROUP_FAULTS, **LIGHTHOUSE_FAULTS}
    rates = {kind: rate * chance.choice([0.0, 0.3, 1.0, 3.0]) for kind, rate in kinds.items()}
    if not any(rates.values()):
        return ()
    names, weights = list(rates), list(rates.values())
    end_s = 3.0 if is_large else chance.choice([3.0, FAULTS_END_S])
    faults = []
    for _ in range(chance.randint(0, MAX_FAULTS_OF_LARGE if is_large else MAX_FAULTS)):
        kind = chance.choices(names, weights)[0]
        value = chance.random()
        if kind == "lighthouse_crash" and is_clock_honest:
            value = 0.0
        seconds = chance.choice([0.02, 0.3, 2.0, 6.0, MAX_DOWN_S][: 3 if is_large else 5])
        if kind == "hang" and chance.random() < 0.3:
            seconds *= LONG_HANG
        at, target = chance.uniform(0.0, end_s), chance.randrange(num_groups)
        faults.append(Fault(at=at, kind=kind, target=target, seconds=seconds, value=value))
    return tuple(sorted(faults, key=lambda fault: fault.at))
