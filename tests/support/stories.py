"""Builds event histories for the tests: a run in which all goes well, to plant one fault in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.demo.events import Committed, Event, Exited, Joined, Killed, PhaseBegan, Started
from tools.demo.promises import Run

STEP_S = 0.1
KILL_AT = 5.0
# The victim's restarted process commits its first update at this instant.
HEALED_AT = 8.0


def commit(
    group: int,
    step: int,
    *,
    incarnation: int = 0,
    at: float | None = None,
    digest: str | None = None,
    loss: float | None = None,
    participating: bool = True,
) -> Committed:
    """A commit whose unnamed fields are those of a run in which all goes well."""
    return Committed(
        group=group,
        incarnation=incarnation,
        at=step * STEP_S + group * 0.001 if at is None else at,
        step=step,
        loss=4.6 / (1 + 0.02 * step) if loss is None else loss,
        digest=f"bits-{step}" if digest is None else digest,
        num_participants=3,
        participating=participating,
    )


def good_events(num_groups: int = 3, num_steps: int = 120) -> list[Event]:
    """Each group commits every 0.1 s; the last is killed after 5 s and back 3 s later."""
    victim = num_groups - 1
    events: list[Event] = []
    for group in range(num_groups):
        events.append(Started(group=group, incarnation=0, at=0.0, pid=100 + group))
        events.append(Joined(group=group, incarnation=0, at=0.01))
        for step in range(1, num_steps + 1):
            done = commit(group, step)
            if group == victim and KILL_AT < done.at < HEALED_AT:
                continue
            life = 1 if group == victim and done.at >= HEALED_AT else 0
            begun_at = done.at - 0.9 * STEP_S
            events.append(
                PhaseBegan(
                    group=group, incarnation=life, at=begun_at, step=step - 1, phase="forward"
                )
            )
            backward_at = done.at - 0.5 * STEP_S
            events.append(
                PhaseBegan(
                    group=group, incarnation=life, at=backward_at, step=step - 1, phase="backward"
                )
            )
            events.append(replace(done, incarnation=life))
    killed = Killed(group=victim, incarnation=0, at=KILL_AT, whole_group=False)
    events.append(killed)
    events.append(Exited(group=victim, incarnation=0, at=KILL_AT + 0.02, status=-9, expected=True))
    events.append(Started(group=victim, incarnation=1, at=KILL_AT + 0.03, pid=200))
    events.append(Joined(group=victim, incarnation=1, at=HEALED_AT - 0.5))
    return in_order(events)


def in_order(events: Sequence[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at)


def run_of(events: Sequence[Event], num_groups: int = 3, **fields: object) -> Run:
    """A run with these events, in order of time; one kill was planned, unless said otherwise."""
    usual: dict[str, object] = {"num_kills_planned": 1, "max_stall_s": 0.5}
    return Run(num_groups=num_groups, events=in_order(events), **(usual | fields))  # type: ignore[arg-type]
