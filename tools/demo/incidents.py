"""Decides what each kill cost: how long the survivors stood still, and how long the heal took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.demo.events import Committed, Event, Joined, Killed, PhaseBegan, Started


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One kill, in a ``phase`` of the victim's work. Times are seconds, ``None`` for never.

    ``stall_s`` runs from the kill until the last of the ``survivors`` has committed again. That may
    be the update that was under way, finished with the help of the dead. ``without_s`` runs until
    the last has committed an update that it began after the kill, so it holds a whole step.
    ``join_s`` (imports, setup) and ``heal_s`` (first commit with own gradients) run from the
    restart, the last one if the group was killed again before it was healed.
    """

    number: int
    kill: Killed
    phase: str
    survivors: tuple[int, ...]
    stall_s: float | None
    without_s: float | None
    restart_s: float | None
    join_s: float | None
    heal_s: float | None


def incidents_of(events: Sequence[Event]) -> list[Incident]:
    """The incidents of a run, in order of time, as ``events`` are."""
    kills = [(place, event) for place, event in enumerate(events) if isinstance(event, Killed)]
    return [
        _incident(number, kill, events[:place], events[place + 1 :])
        for number, (place, kill) in enumerate(kills, start=1)
    ]


def _incident(
    number: int, kill: Killed, before: Sequence[Event], after: Sequence[Event]
) -> Incident:
    survivors = _training_groups(before) - {kill.group}
    own = [event for event in after if event.group == kill.group]
    healed = next((e for e in own if isinstance(e, Committed) and e.participating), None)
    # Killed again on its way back, it was restarted more than once.
    restarts = [event for event in own if isinstance(event, Started)]
    restart = next((e for e in restarts if healed is None or e.life == healed.life), None)
    life = [event for event in own if restart is not None and event.life == restart.life]
    joined = next((event for event in life if isinstance(event, Joined)), None)
    return Incident(
        number=number,
        kill=kill,
        phase=_phase_of(kill, before),
        survivors=tuple(sorted(survivors)),
        stall_s=_stall_s(kill, survivors, after, begun_after=False),
        without_s=_stall_s(kill, survivors, after, begun_after=True),
        restart_s=_between(kill, restarts[0] if restarts else None),
        join_s=_between(restart, joined),
        heal_s=_between(restart, healed),
    )


def _phase_of(kill: Killed, before: Sequence[Event]) -> str:
    """The phase that the victim wrote last: its own clock decides, not when the file was read."""
    life = [event for event in before if event.life == kill.life]
    if not any(isinstance(event, Committed) and event.participating for event in life):
        return "heal" if any(isinstance(event, Joined) for event in life) else "start"
    phases = [event.phase for event in life if isinstance(event, PhaseBegan)]
    return phases[-1] if phases else "start"


def _training_groups(before: Sequence[Event]) -> set[int]:
    """Groups that took part in updates and still live."""
    training: set[int] = set()
    for event in before:
        if isinstance(event, Committed) and event.participating:
            training.add(event.group)
        elif isinstance(event, (Killed, Started)):
            training.discard(event.group)
    return training


def _stall_s(
    kill: Killed, survivors: set[int], after: Sequence[Event], *, begun_after: bool
) -> float | None:
    """Seconds until every survivor committed; one that is killed before is not waited for."""
    waiting, last = set(survivors), kill.at
    begun = set() if begun_after else set(survivors)
    for event in after:
        if isinstance(event, PhaseBegan) and event.phase == "forward":
            begun.add(event.group)
        elif isinstance(event, Killed):
            waiting.discard(event.group)
        elif isinstance(event, Committed) and event.group in waiting & begun:
            waiting.discard(event.group)
            last = event.at
        if not waiting:
            return last - kill.at
    return None


def _between(begin: Event | None, end: Event | None) -> float | None:
    return None if begin is None or end is None else end.at - begin.at
