"""The values of the decisions: members, quorums, requests of workers, and settings."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from torchft_svc.core.limits import (
    MAX_ADDRESS_LENGTH,
    MAX_INT64,
    MAX_REASON_LENGTH,
    check_length,
    check_name,
    check_text,
    utf8_length,
)
from torchft_svc.core.quorum.term import Wish
from torchft_svc.errors import ConfigError, RequestRefused

MAX_DATA_LENGTH = 16 * 1024  # bytes
# Numbers, flags and field tags of a member, encoded.
MAX_NUMBERS_LENGTH = 92
# Every member receives the whole quorum, so the cost grows with the square of its size. 20,000
# groups need 4 MB, which is also the limit of the public release's clients.
DEFAULT_QUORUM_BYTES = 4 << 20
# The largest permitted setting: managers accept no longer answer.
MAX_QUORUM_BYTES = 64 << 20
# A few settings, a line for each of a few wrappers of a model, digests of all the rest, and the
# packed names of about a thousand parameters. Only the lighthouse receives it.
MAX_LAYOUT_LENGTH = 4096
# More workers than the largest cluster has.
MAX_WORLD_SIZE = 1_000_000
# More jobs or groups than a lighthouse can serve.
MAX_LIMIT = 1_000_000
# How many reports of differing states a heartbeat holds: groups beat more often than they compare.
MAX_DIFFERENCES = 16

DEFAULT_JOB = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica group, as it asks for a quorum.

    ``step``: committed optimizer updates; ``commit_failures``: steps discarded since.
    ``seen_quorum_id``: the highest quorum id that the group has received (0: none);
    ``has_history``: all of its workers have received one, so that this is no restart.
    ``last_num_groups``: the size of the last quorum that it has received (0: none).
    ``min_replicas``: the fewest groups that its job trains with (0: the lighthouse decides).
    ``unhealed``: the last heal has failed, which its step need not show. ``layout``: what the group
    reduces, and how; it must be equal in all groups (empty: not known). ``doubted_step``: in a
    quorum, the reported step if it is not believed (else 0); its ``step`` is 0 then.
    ``step_quorum_id``: the quorum in which ``step`` was committed, also before a checkpoint that
    was restored (0: not known). ``steady``: it can begin steps without a question (rule E1).
    ``sole_lighthouse``: neither the group nor one that it was in a quorum with knows another
    lighthouse. ``unknown``: encoded fields of a newer client, which its peers receive unchanged.
    """

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 1
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0
    seen_quorum_id: int = 0
    min_replicas: int = 0
    last_num_groups: int = 0
    unhealed: bool = False
    has_history: bool = False
    layout: str = ""
    doubted_step: int = 0
    step_quorum_id: int = 0
    steady: bool = False
    sole_lighthouse: bool = False
    unknown: bytes = b""

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_name("replica_id", self.replica_id)
        for field in ("address", "store_address"):
            check_text(field, getattr(self, field), MAX_ADDRESS_LENGTH)
        if utf8_length(self.data) > MAX_DATA_LENGTH:
            raise RequestRefused(
                f"data has {utf8_length(self.data)} bytes, {MAX_DATA_LENGTH} are allowed"
            )
        if len(self.unknown) > MAX_DATA_LENGTH:
            raise RequestRefused(
                f"unknown fields have {len(self.unknown)} bytes, {MAX_DATA_LENGTH} are allowed"
            )
        for field in ("step", "commit_failures", "doubted_step"):
            check_count(field, getattr(self, field))
        check_text("layout", self.layout, MAX_LAYOUT_LENGTH)
        check_quorum_id("seen_quorum_id", self.seen_quorum_id)
        check_quorum_id("step_quorum_id", self.step_quorum_id)
        for field in ("world_size", "min_replicas", "last_num_groups"):
            if not 0 <= getattr(self, field) <= MAX_WORLD_SIZE:
                raise RequestRefused(
                    f"{field} is {getattr(self, field)}, must be 0 to {MAX_WORLD_SIZE}"
                )

    @property
    def num_bytes(self) -> int:
        """An upper bound of its size in an encoded quorum."""
        texts = self.replica_id + self.address + self.store_address + self.data
        return MAX_NUMBERS_LENGTH + len(self.unknown) + utf8_length(texts)

    @property
    def history(self) -> tuple[int, int]:
        """The age of the group's state: of two groups at one step, the larger one is newer."""
        return self.seen_quorum_id, self.step_quorum_id

    @property
    def last_quorum(self) -> LastQuorum:
        """The newest quorum that the group has received, and a step that all its members have
        reached: they may have discarded the last one that it committed in it."""
        may_be_alone = self.step_quorum_id in (0, self.seen_quorum_id)
        return LastQuorum(self.seen_quorum_id, max(0, self.step - may_be_alone))

    @property
    def place(self) -> tuple[str, str, str]:
        """Two quorums share an id only if this is equal for all members."""
        return self.replica_id, self.address, self.store_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Quorum:
    """The groups that train together; ``participants`` are sorted by replica id.

    ``joining``: members that were not in the quorum before, or have not healed since. A member may
    be at the same step as the others with another state: it committed the step that they discarded
    and repeated without it. So its state counts as up to date only if no other member's does.
    """

    quorum_id: int
    participants: tuple[Member, ...]
    joining: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def max_step(self) -> int:
        return max(member.step for member in self.participants)

    @property
    def up_to_date(self) -> tuple[Member, ...]:
        """The members that the others heal from."""
        max_step = self.max_step
        at_max = [member for member in self.participants if member.step == max_step]
        at_max = [member for member in at_max if not member.doubted_step] or at_max
        staying = [member for member in at_max if member.replica_id not in self.joining]
        return tuple(staying if staying and max_step > 0 else at_max)

    @property
    def steady(self) -> bool:
        """Whether the next steps may belong to this quorum, without a question (rule E1).

        A group that heals, as all but one may at step 0, changes what the others know of it. A lone
        group is not kept from a step by the absence of others, so it asks whether it still counts.
        """
        is_level = self.max_step > 0 and len(self.up_to_date) == len(self.participants) > 1
        return is_level and all(member.steady for member in self.participants)


@dataclass(frozen=True, slots=True, order=True)
class LastQuorum:
    """The newest known quorum, and its ``max_step``; ids start at 1 (0: none)."""

    quorum_id: int = 0
    max_step: int = 0

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_quorum_id("last_quorum_id", self.quorum_id)
        check_step(self.max_step)

    def reached(self, step: int) -> LastQuorum:
        """This quorum, when all its members have reached ``step`` in it."""
        if not self.quorum_id or step <= self.max_step:
            return self
        return LastQuorum(self.quorum_id, step)


NO_QUORUM = LastQuorum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The incarnation that a manager continues, because the one before died in a term (rule E7):
    its group is in quorum ``quorum_id`` of ``num_groups`` groups, and has reached ``step``."""

    replica_id: str
    quorum_id: int = 0
    step: int = 0
    num_groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """A worker asks for a quorum; ``worker_id`` is new at every start of its process.

    ``drain_reason``: why this worker has to end, so that its group leaves when all workers have
    asked (empty: it has not to). ``unhealed``: its last heal has failed. ``last_quorum_id``: the
    highest that it has received (0: none), maybe from an earlier manager, of ``last_num_groups``
    (0: not known). ``last_round`` is the round of the last one (0: not known, or this is not the
    first question since). ``question`` counts this worker's questions; a question is repeated with
    the same number if its answer was lost (0: the worker does not count). ``layout``,
    ``step_quorum_id``, ``steady``: see `Member`. ``agreed``: the other members of its last quorum
    know that they have to ask now, too (rule E4).
    """

    group_rank: int
    step: int
    checkpoint_address: str = ""
    shrink_only: bool = False
    commit_failures: int = 0
    init_sync: bool = True
    worker_id: str = ""
    drain_reason: str = ""
    unhealed: bool = False
    last_quorum_id: int = 0
    last_num_groups: int = 0
    last_round: int = 0
    layout: str = ""
    step_quorum_id: int = 0
    steady: bool = False
    agreed: bool = False
    question: int = 0

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        for field in ("step", "commit_failures", "question", "last_num_groups"):
            check_count(field, getattr(self, field))
        check_quorum_id("last_quorum_id", self.last_quorum_id)
        check_quorum_id("step_quorum_id", self.step_quorum_id)
        check_text("checkpoint address", self.checkpoint_address, MAX_ADDRESS_LENGTH)
        check_text("drain reason", self.drain_reason, MAX_REASON_LENGTH)
        check_text("layout", self.layout, MAX_LAYOUT_LENGTH)
        check_text("worker id", self.worker_id, MAX_ADDRESS_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group asks for a quorum, for ``round``: the `WorkerRequest` s of all its workers, combined.

    ``new_incarnation``: a worker was restarted, so to the others this is another group now.
    ``has_history``: all workers have received a quorum. ``steady``: all can begin steps without a
    question; ``agreed``: the other members know that they have to ask, as all workers report.
    ``seen_num_groups``: the size of quorum ``seen_quorum_id`` (0: not known).
    """

    round: int
    step: int
    shrink_only: bool
    commit_failures: int
    new_incarnation: bool
    unhealed: bool = False
    seen_quorum_id: int = 0
    seen_num_groups: int = 0
    has_history: bool = False
    layout: str = ""
    step_quorum_id: int = 0
    steady: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """A worker's vote on its step; ``round`` is 0 if the worker does not know rounds; ``wish``: see
    `Wish`."""

    group_rank: int
    step: int
    should_commit: bool
    round: int = 0
    worker_id: str = ""
    wish: Wish = Wish.SOME

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_step(self.step)


@dataclass(frozen=True, slots=True)
class DifferenceReport:
    """A state check in ``step`` of quorum ``quorum_id`` found that states differ (rule C1), as
    ``sentence`` describes; a worker reports it to its manager, and that to the lighthouse."""

    quorum_id: int
    step: int
    sentence: str

    def check(self) -> None:
        """Raise `RequestRefused` if a field from the network is out of bounds."""
        check_quorum_id("quorum_id", self.quorum_id)
        check_step(self.step)
        check_text("sentence", self.sentence, MAX_REASON_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumConfig:
    """Settings of when a job's quorum is formed; durations in seconds.

    ``on_step_regression``: what happens to a quorum that would lose committed steps: ``hold`` holds
    it back, ``warn`` publishes it with a warning; ``auto`` holds it back while a group that took
    part in the job is alive, else warns. ``on_step_jump``: a group whose step is more than a commit
    ahead of the running job has to ``heal``, or the others ``follow`` it. A group that stays in one
    phase of its own work for ``hang_timeout_s`` (None: no limit) is reported; with
    ``on_hang="kill"`` it is ended, with ``"evict"`` the members of its quorum that wait continue
    without it. A group whose own work in a step takes ``slow_factor`` times that of the best group
    for ``slow_after_s`` is reported; with ``on_slow="evict"`` it is drained if enough remain.
    ``heal_timeout_s`` (None: the join timeout) is the join timeout for a group while it heals. A
    job none of whose groups was in a quorum before waits for ``startup_wait_s`` after its first
    request for groups that are started together.
    """

    min_replicas: int = 1
    join_timeout_s: float = 60.0
    heal_timeout_s: float | None = None
    startup_timeout_s: float | None = None
    startup_wait_s: float = 0.0
    heartbeat_timeout_s: float = 5.0
    on_step_regression: Literal["auto", "hold", "warn"] = "auto"
    on_step_jump: Literal["heal", "follow"] = "heal"
    hang_timeout_s: float | None = None
    on_hang: Literal["report", "kill", "evict"] = "report"
    slow_factor: float = 1.5
    slow_after_s: float = 60.0
    on_slow: Literal["report", "evict"] = "report"
    # One lighthouse serves many jobs, but a client that invents names must not fill its memory.
    max_jobs: int = 1000
    max_members_per_job: int = 20_000
    # Of a job's quorum, encoded: each of its members gets that.
    max_quorum_bytes: int = DEFAULT_QUORUM_BYTES

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ConfigError(
                "min_replicas", self.min_replicas, "a quorum needs at least one group"
            )
        for field in (
            "join_timeout_s",
            "heal_timeout_s",
            "startup_timeout_s",
            "startup_wait_s",
            "heartbeat_timeout_s",
            "slow_after_s",
        ):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    field, value, "a timeout is a finite number of seconds, 0 or more"
                )
            check_length(field, value or 0.0)
        self._check_heal()
        if self.heartbeat_timeout_s == 0:
            raise ConfigError("heartbeat_timeout_s", 0, "every group would be dead at once")
        if self.hang_timeout_s is not None and not (
            math.isfinite(self.hang_timeout_s) and self.hang_timeout_s > 0
        ):
            raise ConfigError(
                "hang_timeout_s", self.hang_timeout_s, "use a finite time above 0 seconds, or None"
            )
        check_length("hang_timeout_s", self.hang_timeout_s or 0.0)
        if not (math.isfinite(self.slow_factor) and self.slow_factor > 1):
            reason = "use a number above 1: the own work of the best group times this is slow"
            raise ConfigError("slow_factor", self.slow_factor, reason)
        self._check_choices()
        self._check_limits()

    def _check_limits(self) -> None:
        if self.min_replicas > MAX_WORLD_SIZE:
            raise ConfigError("min_replicas", self.min_replicas, f"use {MAX_WORLD_SIZE} at most")
        for field, most in (
            ("max_jobs", MAX_LIMIT),
            ("max_members_per_job", MAX_LIMIT),
            ("max_quorum_bytes", MAX_QUORUM_BYTES),
        ):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "a limit is at least 1")
            if getattr(self, field) > most:
                raise ConfigError(field, getattr(self, field), f"use {most} at most")

    def _check_choices(self) -> None:
        choices = {
            "on_hang": ("report", "kill", "evict"),
            "on_slow": ("report", "evict"),
            "on_step_regression": ("auto", "hold", "warn"),
            "on_step_jump": ("heal", "follow"),
        }
        for field, words in choices.items():
            if getattr(self, field) not in words:
                reason = f"use {', '.join(words[:-1])} or {words[-1]}"
                raise ConfigError(field, getattr(self, field), reason)

    def _check_heal(self) -> None:
        if self.heal_timeout_s is not None and self.heal_timeout_s < self.join_timeout_s:
            raise ConfigError(
                "heal_timeout_s",
                self.heal_timeout_s,
                f"it must not be below join_timeout_s={self.join_timeout_s:g}: a group that "
                "heals would get less time than others",
            )

    @property
    def healing_timeout_s(self) -> float:
        """How long a healing group is awaited."""
        return self.join_timeout_s if self.heal_timeout_s is None else self.heal_timeout_s

    @property
    def newcomer_timeout_s(self) -> float:
        """How long a cold start waits for living groups that have not asked."""
        return self.join_timeout_s if self.startup_timeout_s is None else self.startup_timeout_s


def check_quorum_id(field: str, quorum_id: int) -> None:
    """Refuse an id that no lighthouse can have issued (0: none was reported)."""
    if quorum_id < 0:
        raise RequestRefused(f"{field} is {quorum_id}, must be 0 or more")
    # The clock-derived base of a lighthouse is far below this; more would exhaust the ids.
    if quorum_id > MAX_INT64 // 2:
        raise RequestRefused(f"{field} {quorum_id} was never issued")


def check_step(step: int) -> None:
    """Refuse a step that nobody can have reached."""
    check_count("step", step)


def check_count(field: str, value: int) -> None:
    """Refuse a ``value`` that counts nothing, or more than the wire can carry."""
    if not 0 <= value <= MAX_INT64:
        raise RequestRefused(f"{field} is {value}, must be 0 or more")
