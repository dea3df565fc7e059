"""Decides which program a seed stands for: how it trains, what is special in it, who is killed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


class Pg(Enum):
    """What carries the collectives between the groups."""

    GLOO = "gloo"
    ISOLATED = "isolated"
    SWALLOWING = "swallowing"


class Wrapper(Enum):
    """What averages the gradients, or the weights."""

    DDP = "our ddp"
    BY_HAND = "allreduce by hand"
    TORCH_DDP = "torch ddp"  # over a ManagedProcessGroup
    FSDP = "fsdp"  # with replicate_across_groups
    HSDP = "hsdp"  # over a mesh of ft_init_device_mesh
    LOCAL_SGD = "local sgd"  # of the weights, from time to time
    DILOCO = "diloco"
    STREAMING = "streaming diloco"  # two fragments, whose averages travel during an inner step
    DECOUPLED = "decoupled diloco"  # of which a thread of its own makes the manager's steps


class Transport(Enum):
    """What moves the state of a group that heals."""

    HTTP = "http"
    PG = "pg"
    IN_PLACE = "pg in place"


class Mode(Enum):
    """The names of `torchft_svc.client.WorldSizeMode`."""

    DYNAMIC = "dynamic"
    FIXED_WITH_SPARES = "spares"


class Feature(Enum):
    """What users' programs have besides a model and an optimizer."""

    BATCH_NORM = "batch norm"
    AUTOCAST = "autocast"
    GRAD_SCALER = "grad scaler"
    ACCUMULATION = "accumulation"
    CHECKPOINTING = "checkpointing"
    TIED = "tied"
    FROZEN = "frozen"
    SPARSE = "sparse"
    MIXED_TYPES = "mixed types"
    SCHEDULER = "scheduler"
    TWO_OPTIMIZERS = "two optimizers"
    FORWARD_STATE = "forward changes state"
    PIECES = "state in pieces"
    PENALTY = "gradient penalty"  # a second derivative, in the loss
    FORCES = "gradients of inputs"  # as many as a group likes, in its steps and between them
    CLEARS_TWICE = "clears twice"  # adversarial training: two passes with zero_grad() between
    PUBLIC_LOOP = "loop of the public release"  # whose updates fail now and then, and which goes on
    QUANTIZED = "8-bit sums"
    ASSIGN = "assign"  # a load function that replaces the parameters


class Moment(Enum):
    """A place in a step at which a worker is killed."""

    QUORUM = "while the quorum forms"
    FORWARD = "in the forward pass"
    BACKWARD = "in the backward pass"
    VOTE = "in the vote"
    UPDATE = "before the update"
    AFTER = "after the commit"
    HEAL = "while it heals"
    SERVE = "while it serves a state"


_SHARDED = frozenset({Wrapper.FSDP, Wrapper.HSDP})
_HEALS_BEFORE = frozenset({Wrapper.DILOCO, Wrapper.STREAMING, Wrapper.DECOUPLED})
_TRAINS_ALONE = _HEALS_BEFORE | {Wrapper.LOCAL_SGD}
_QUANTIZABLE = _HEALS_BEFORE | {Wrapper.BY_HAND}
# What an algorithm whose groups train alone for some steps has no place for.
_EACH_STEP = frozenset(
    {
        Feature.GRAD_SCALER,
        Feature.TWO_OPTIMIZERS,
        Feature.PUBLIC_LOOP,
        Feature.SCHEDULER,
        Feature.SPARSE,
        Feature.ASSIGN,
    }
)
# Of all that a step goes through; what happens to a group that heals is drawn apart.
_ANY_STEP = tuple(moment for moment in Moment if moment not in (Moment.HEAL, Moment.SERVE))
_DELAYS_MS = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
_MAX_FEATURES = 6
# How many programs that are refused are drawn again without what is refused.
_RARELY = 0.75


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """SIGKILL for one ``worker``, in one ``life`` of ``group``, ``delay_ms`` after ``moment``.

    It comes when this life has committed ``step`` steps with all groups: whoever is left then has a
    state to heal by. ``with_manager``: the group's manager is killed, too.
    """

    group: int
    life: int = 0
    worker: int = 0
    step: int = 0
    moment: Moment
    delay_ms: float = 0.0
    with_manager: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One training job. ``kills`` happen one after another; whoever is killed is started again."""

    seed: int
    pg: Pg = Pg.GLOO
    wrapper: Wrapper = Wrapper.DDP
    transport: Transport = Transport.HTTP
    mode: Mode = Mode.DYNAMIC
    use_async_quorum: bool = True
    num_workers: int = 1
    num_groups: int = 2
    features: frozenset[Feature] = frozenset()
    kills: tuple[Kill, ...] = ()

    def has(self, feature: Feature) -> bool:
        return feature in self.features

    @property
    def is_sharded(self) -> bool:
        return self.wrapper in _SHARDED

    @property
    def trains_alone(self) -> bool:
        """Whether groups train alone, and average what they have learned from time to time."""
        return self.wrapper in _TRAINS_ALONE

    @property
    def is_decoupled(self) -> bool:
        """Whether nothing waits for the manager's steps, which merge beside training."""
        return self.wrapper is Wrapper.DECOUPLED

    @property
    def is_refused(self) -> bool:
        """Whether the library promises to refuse it, with a `ConfigError`."""
        return self.has(Feature.SPARSE)

    @property
    def ends_with_heals(self) -> bool:
        """Whether the library promises to end a group that heals, with a `ConfigError`."""
        return self.has(Feature.ASSIGN)

    @property
    def min_replica_size(self) -> int:
        return self.num_groups - 1 if self.mode is Mode.FIXED_WITH_SPARES else 1

    def choices(self) -> dict[str, str]:
        """The choice in every dimension that may matter together with another one."""
        return {
            "pg": self.pg.value,
            "wrapper": self.wrapper.value,
            "transport": self.transport.value,
            "mode": self.mode.value,
            "quorum": "async" if self.use_async_quorum else "sync",
            "workers": str(self.num_workers),
            "groups": str(self.num_groups),
        }

    def __str__(self) -> str:
        words = list(self.choices().values())
        words[5] += " worker(s)"
        words[6] += " groups"
        kills = [
            f"kill {k.group}.{k.life}.{k.worker} {k.moment.value} after {k.step} steps"
            for k in self.kills
        ]
        return "; ".join([", ".join(words), ", ".join(_names(self.features)) or "plain", *kills])

    def encode(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **{field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)},
            "features": _names(self.features),
            "kills": [
                {
                    field.name: _plain(getattr(kill, field.name))
                    for field in dataclasses.fields(kill)
                }
                for kill in self.kills
            ],
        }


def decode(values: dict[str, Any]) -> Program:
    """The program that `Program.encode` wrote; what is left out has its default."""
    kinds = {"pg": Pg, "wrapper": Wrapper, "transport": Transport, "mode": Mode}
    given: dict[str, Any] = {
        name: kinds[name](value) if name in kinds else value for name, value in values.items()
    }
    given["features"] = frozenset(Feature(name) for name in values.get("features", ()))
    given["kills"] = tuple(
        Kill(**{**kill, "moment": Moment(kill["moment"])}) for kill in values.get("kills", ())
    )
    return Program(**given)


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _names(features: frozenset[Feature]) -> list[str]:
    return [feature.value for feature in Feature if feature in features]


def reason_against(program: Program) -> str | None:
    """Why the documentation says that a program like this one cannot work; None: it can."""
    has, wrapper = program.has, program.wrapper
    rules = (
        (
            program.transport is Transport.IN_PLACE and program.use_async_quorum,
            "weights are received in place only while nothing is computed with them",
        ),
        (
            has(Feature.GRAD_SCALER) and program.use_async_quorum,
            "the scale is healed state that goes into the gradients",
        ),
        (
            has(Feature.SPARSE) and wrapper is not Wrapper.DDP,
            "only our wrapper promises to refuse them",
        ),
        (
            has(Feature.SPARSE) and has(Feature.ASSIGN),
            "no group gets so far that it heals",
        ),
        (
            (has(Feature.PENALTY) or has(Feature.FORCES)) and program.is_sharded,
            "FSDP frees weights that another backward pass needs",
        ),
        (
            has(Feature.TIED) and has(Feature.MIXED_TYPES) and program.is_sharded,
            "tied weights have to be sharded together, those of other types apart",
        ),
        (
            has(Feature.QUANTIZED) and wrapper not in _QUANTIZABLE,
            "nothing else sums in 8-bit numbers",
        ),
        (
            has(Feature.QUANTIZED) and has(Feature.MIXED_TYPES),
            "8-bit sums of float64 are refused",
        ),
        (
            wrapper in _HEALS_BEFORE and program.use_async_quorum,
            "a group heals before it contributes to DiLoCo",
        ),
        (
            program.trains_alone and bool(program.features & _EACH_STEP),
            "one optimizer makes the inner steps, and its wrapper is not there",
        ),
        (
            program.trains_alone and program.transport is Transport.IN_PLACE,
            "the algorithm has state of its own, which is not received in place here",
        ),
        (
            program.is_decoupled and has(Feature.PIECES),
            "a learner heals nothing but what is merged",
        ),
    )
    return next((reason for applies, reason in rules if applies), None)


def draw(seed: int) -> Program:
    """The program of a seed; any combination that can work may come."""
    dice = random.Random(seed)
    while True:
        num_features = dice.randint(0, _MAX_FEATURES)
        features = set(dice.sample(list(Feature), num_features))
        if dice.random() < _RARELY:  # nothing else of such a program is seen
            features -= {Feature.ASSIGN, Feature.SPARSE}
        program = Program(
            seed=seed,
            # The isolated one costs two more processes for each life of each worker.
            pg=dice.choices(list(Pg), (3, 1, 2))[0],
            wrapper=dice.choice(list(Wrapper)),
            transport=dice.choice(list(Transport)),
            mode=dice.choice(list(Mode)),
            use_async_quorum=dice.random() < 0.5,
            num_workers=dice.choice((1, 2)),
            num_groups=dice.choice((2, 3)),
            features=frozenset(features),
        )
        if reason_against(program) is None:
            break
    has_end = program.is_refused or program.ends_with_heals
    return dataclasses.replace(program, kills=() if has_end else _draw_kills(dice, program))


def _draw_kills(dice: random.Random, program: Program) -> tuple[Kill, ...]:
    """Draw one kill while all train, and perhaps one while the group that came back heals."""
    victim = dice.randrange(program.num_groups)
    first = _kill_of(dice, program, victim, dice.choice(_ANY_STEP))
    kills = [dataclasses.replace(first, step=dice.randint(1, 8))]
    match dice.randrange(4):
        case 0:
            second = _kill_of(dice, program, victim, Moment.HEAL)
            kills.append(dataclasses.replace(second, life=1))
        case 1 if program.num_groups > 2:  # the last one that is up to date has to live
            other = (victim + 1) % program.num_groups
            second = _kill_of(dice, program, other, Moment.SERVE)
            kills.append(dataclasses.replace(second, step=1))
    return tuple(kills)


def _kill_of(dice: random.Random, program: Program, group: int, moment: Moment) -> Kill:
    return Kill(
        group=group,
        worker=dice.randrange(program.num_workers),
        moment=moment,
        delay_ms=dice.choice(_DELAYS_MS),
        with_manager=dice.random() < 0.3,
    )


def pairs(program: Program) -> set[tuple[str, str]]:
    """All pairs of choices, and of a feature or a moment with the wrapper, that it shows."""
    choices = [f"{name}: {value}" for name, value in program.choices().items()]
    special = _names(program.features) + [kill.moment.value for kill in program.kills]
    return set(combinations(choices, 2)) | {(each, program.wrapper.value) for each in special}


def covering(programs: Iterable[Program], num: int) -> list[Program]:
    """The ``num`` of them that show the most pairs for what they cost, chosen one after another."""
    left = {program: pairs(program) for program in programs}
    chosen: list[Program] = []
    for _ in range(num):
        best = max(left, key=lambda program: len(left[program]) / _cost(program) ** 0.7)
        found = left.pop(best)
        chosen.append(best)
        for program in left:
            left[program] -= found
    return chosen


def _cost(program: Program) -> int:
    """About as many workers as it starts; an isolated one has two more processes."""
    num_lives = (program.num_groups + len(program.kills)) * program.num_workers
    return 2 + num_lives * (4 if program.pg is Pg.ISOLATED else 1)
