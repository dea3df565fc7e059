"""The order of timeouts: what has to be shorter than what, and which settings fit a training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchft_svc.doctor.findings import Diagnosis, found_ok, found_problem, found_warning
from torchft_svc.host.quantities import round_up, show_rate, show_seconds
from torchft_svc.rpc.about import About
from torchft_svc.settings import Timeouts

CHECK = "timeouts"
# A slow step is so many times as long as a usual one.
_SLOW = 5.0
# A heal may take so many times as long as its bytes need alone: other groups heal at the same time.
_SLOW_HEAL = 2.0
# Fewer beats in the heartbeat timeout, and one lost packet more makes a living group dead.
_BEATS = 10
# What a death costs the others beside the step: tested with real processes (ARCHITECTURE.md).
DETECTION_S = 0.25
# Proposed for every load: the default of a lighthouse.
_HEARTBEAT_TIMEOUT_S = 5.0
# Above so many groups gloo should read all addresses with one request.
MANY_GROUPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is trained: durations in seconds, sizes in bytes, ``link_rate`` in bytes per second.

    ``state_bytes``: of one worker. ``num_workers``: of one group.
    """

    step_s: float
    state_bytes: float
    link_rate: float
    num_groups: int
    num_workers: int = 1

    @property
    def heal_s(self) -> float:
        """How long a worker receives a state over a link that it has for itself."""
        return self.state_bytes / self.link_rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting of a plan, where it is set, and why it has this value."""

    setting: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one kind of failure costs the groups that are left; ``steps_lost``: None for all steps
    since the last checkpoint."""

    event: str
    stands_still_s: float
    steps_lost: int | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPlan:
    """The settings for a load, and what failures then cost."""

    load: Load
    choices: tuple[Choice, ...]
    costs: tuple[Cost, ...]


def check_order(
    timeouts: Timeouts, about: About | None, load: Load | None = None
) -> Iterator[Diagnosis]:
    """Compare a trainer's timeouts with those of its lighthouse, and with the load if it is known.

    What `Timeouts` itself refuses is no finding of this function.
    """
    found = [
        *_between(timeouts, about),
        *([] if load is None else _with_load(timeouts, about, load)),
    ]
    yield from found
    if not any(each.advice for each in found):
        order = f"heartbeats each {timeouts.heartbeat_interval_s:g} s"
        if about is not None:
            order += f" < heartbeat timeout {about.heartbeat_timeout_s:g} s"
        order += (
            f" < collective timeout {timeouts.collective_s:g} s <= quorum timeout "
            f"{timeouts.quorum_s:g} s"
        )
        if about is not None:
            order += (
                f"; join timeout {about.join_timeout_s:g} s and heal timeout "
                f"{about.heal_timeout_s:g} s are not above the quorum timeout"
            )
        yield found_ok(CHECK, order)


def _between(timeouts: Timeouts, about: About | None) -> Iterator[Diagnosis]:
    if about is None:
        return
    interval_s, silent_s = timeouts.heartbeat_interval_s, about.heartbeat_timeout_s
    if interval_s >= silent_s:
        yield found_problem(
            CHECK,
            f"heartbeats come each {interval_s:g} s, and a group that is silent for {silent_s:g} s "
            "counts as dead",
            f"raise --heartbeat-timeout-ms of the lighthouse to {_BEATS * interval_s * 1000:.0f}",
        )
    elif interval_s * _BEATS > silent_s:
        yield found_warning(
            CHECK,
            f"the heartbeat timeout of the lighthouse ({silent_s:g} s) is less than {_BEATS} "
            f"heartbeats ({interval_s:g} s each)",
            f"raise --heartbeat-timeout-ms to {_BEATS * interval_s * 1000:.0f}, or a short pause "
            "makes a living group dead",
        )
    if silent_s >= timeouts.quorum_s:
        yield found_problem(
            CHECK,
            f"the quorum timeout ({timeouts.quorum_s:g} s) is not above the heartbeat timeout "
            f"({silent_s:g} s): all groups give up before a frozen one is left out",
            f"set TORCHFT_QUORUM_TIMEOUT_SEC to more than {silent_s:g}",
        )
    if silent_s >= timeouts.collective_s:
        yield found_warning(
            CHECK,
            f"the collective timeout ({timeouts.collective_s:g} s) is not above the heartbeat "
            f"timeout ({silent_s:g} s): the groups time out before they know which one is frozen",
            f"set TORCHFT_TIMEOUT_SEC to more than {silent_s:g}",
        )
    for name, limit_s in (("join", about.join_timeout_s), ("heal", about.heal_timeout_s)):
        if limit_s > timeouts.quorum_s:
            yield found_warning(
                CHECK,
                f"the {name} timeout of the lighthouse ({limit_s:g} s) is above the quorum timeout "
                f"({timeouts.quorum_s:g} s): groups that wait give up, and discard their step",
                f"set TORCHFT_QUORUM_TIMEOUT_SEC to {limit_s:g} or more",
            )
    if about.hang_timeout_s is not None and about.hang_timeout_s >= timeouts.collective_s:
        yield found_warning(
            CHECK,
            f"the hang timeout ({about.hang_timeout_s:g} s) is not below the collective timeout "
            f"({timeouts.collective_s:g} s): a step fails before the group that hangs is known",
            f"set --hang-timeout-ms to less than {timeouts.collective_s * 1000:.0f}",
        )


def _with_load(timeouts: Timeouts, about: About | None, load: Load) -> Iterator[Diagnosis]:
    slow_s = _SLOW * load.step_s
    if timeouts.collective_s < slow_s:
        level = found_problem if timeouts.collective_s <= load.step_s else found_warning
        yield level(
            CHECK,
            f"a collective waits for the slowest group, and may take {timeouts.collective_s:g} s; "
            f"a step takes {load.step_s:g} s",
            f"set TORCHFT_TIMEOUT_SEC to {round_up(slow_s):g} or more",
        )
    if load.num_workers > 1 and load.heal_s > timeouts.collective_s:
        yield found_problem(
            CHECK,
            f"a worker that has healed waits {timeouts.collective_s:g} s for the others of its "
            f"group, and a heal takes {show_seconds(load.heal_s)}",
            f"set TORCHFT_TIMEOUT_SEC to {round_up(_SLOW_HEAL * load.heal_s):g}",
        )
    if about is None:
        return
    if about.hang_timeout_s is not None and about.hang_timeout_s < 2 * load.step_s:
        yield found_problem(
            CHECK,
            f"a step of {load.step_s:g} s nearly counts as a hang ({about.hang_timeout_s:g} s)",
            f"set --hang-timeout-ms to {round_up(slow_s) * 1000:.0f} or more",
        )
    if load.heal_s * _SLOW_HEAL > about.heal_timeout_s:
        level = found_problem if load.heal_s >= about.heal_timeout_s else found_warning
        yield level(
            CHECK,
            f"a heal takes {show_seconds(load.heal_s)} at {show_rate(load.link_rate)}, and the "
            f"lighthouse waits {about.heal_timeout_s:g} s for it: a group that takes longer starts "
            "its heal again, and may never join",
            f"set --heal-timeout-ms to {round_up(_SLOW_HEAL * load.heal_s) * 1000:.0f} or more",
        )


def make_plan(load: Load) -> SettingsPlan:
    """Choose settings for ``load``, and compute what failures then cost."""
    slow_s = _SLOW * load.step_s
    hang_s = max(15.0, round_up(slow_s))
    workers_wait_s = _SLOW_HEAL * load.heal_s if load.num_workers > 1 else 0.0
    collective_s = max(60.0, round_up(max(2 * hang_s, workers_wait_s)))
    join_s = max(60.0, round_up(2 * slow_s))
    heal_s = max(join_s, round_up(_SLOW_HEAL * load.heal_s))
    quorum_s = max(60.0, collective_s, round_up(heal_s + load.step_s) if heal_s > 60 else 0.0)
    choices = [
        _milliseconds(
            "--heartbeat-timeout-ms",
            _HEARTBEAT_TIMEOUT_S,
            "a frozen machine delays the others for this",
        ),
        _milliseconds(
            "--join-timeout-ms", join_s, f"{2 * _SLOW:g} steps, and above your longest pause"
        ),
        _milliseconds(
            "--heal-timeout-ms",
            heal_s,
            f"a heal takes {show_seconds(load.heal_s)}; not below the join timeout",
        ),
        _milliseconds(
            "--hang-timeout-ms", hang_s, f"{_SLOW:g} steps; with --on-hang kill or evict"
        ),
        _seconds("TORCHFT_TIMEOUT_SEC", collective_s, "above the hang timeout and slow steps"),
        _seconds(
            "TORCHFT_QUORUM_TIMEOUT_SEC",
            quorum_s,
            "not below the heal timeout, which others wait",
        ),
        _seconds("TORCHFT_CONNECT_TIMEOUT_SEC", 60.0, "not above the quorum timeout"),
        Choice(
            setting="grace period of the scheduler",
            value=f"{round_up(2 * load.step_s + 30):g} s",
            reason="a drain ends with its step; add the time of your checkpoint",
        ),
    ]
    if load.num_groups > MANY_GROUPS:
        reason = f"gloo connects {load.num_groups} groups with one request to the store"
        choices.append(Choice(setting="GLOO_ENABLE_STORE_V2_API", value="1", reason=reason))
    return SettingsPlan(
        load=load, choices=tuple(choices), costs=tuple(_costs(load, join_s, hang_s))
    )


def _milliseconds(setting: str, seconds: float, reason: str) -> Choice:
    return Choice(setting=f"lighthouse {setting}", value=f"{seconds * 1000:.0f}", reason=reason)


def _seconds(setting: str, seconds: float, reason: str) -> Choice:
    return Choice(setting=setting, value=f"{seconds:g}", reason=reason)


def _costs(load: Load, join_s: float, hang_s: float) -> Iterator[Cost]:
    step_s = load.step_s
    rest = f"{load.num_groups - 1} of {load.num_groups} groups train until it is back"
    yield Cost(
        event="a worker is killed",
        stands_still_s=step_s + DETECTION_S,
        steps_lost=1,
        note=rest,
    )
    yield Cost(
        event="a group comes back and heals",
        stands_still_s=max(0.0, load.heal_s - step_s),
        steps_lost=0,
        note=f"the heal takes {show_seconds(load.heal_s)}, beside one step of the others",
    )
    yield Cost(
        event="a machine is frozen or cut off",
        stands_still_s=_HEARTBEAT_TIMEOUT_S + step_s + DETECTION_S,
        steps_lost=1,
        note="the heartbeat timeout, then as a death",
    )
    yield Cost(
        event="a group hangs inside a step",
        stands_still_s=hang_s + step_s + DETECTION_S,
        steps_lost=1,
        note="the hang timeout, with --on-hang kill or evict",
    )
    yield Cost(
        event="a group hangs between two steps",
        stands_still_s=join_s + step_s,
        steps_lost=0,
        note="the join timeout, once",
    )
    yield Cost(event="SIGTERM, or lighthouse drain", stands_still_s=0.0, steps_lost=0, note=rest)
    yield Cost(
        event="the lighthouse is away",
        stands_still_s=0.0,
        steps_lost=0,
        note="training goes on; groups that come or fail wait for it",
    )
    yield Cost(
        event="all groups are lost",
        stands_still_s=load.heal_s,
        steps_lost=None,
        note="all since the last checkpoint; reading it may take this long",
    )
