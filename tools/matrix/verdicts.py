"""Decides whether a program did what is promised to it: pure rules over its workers' events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tools.chaos import verdicts as chaos
from tools.demo.events import Committed, Event, Exited, Finished, Healed, Killed, PhaseBegan
from tools.demo.promises import Outcome, Verdict
from tools.matrix.program import Program

# A kill costs the others milliseconds, a busy machine some seconds, and what waits for a timeout
# that nothing should wait for 20.
MAX_STALL_S = 12.0
# How much of what was seen is shown.
_NUM_EVENTS = 12
_NUM_LINES = 5
_MAX_LINE = 300
_REFUSAL = "ConfigError"
_ACCUSATIONS = ("in the check of step ", "cannot be compared with the others")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What was seen of a program; ``events`` in order of time.

    ``missed``: what did not come in time, if something did not; ``words``: the output of each life.
    ``is_lost``: the kills took all groups that had the newest step, so that the job waits for an
    operator, and the run was ended.
    """

    program: Program
    events: Sequence[Event]
    missed: str = ""
    is_lost: bool = False
    words: Mapping[str, str] = field(default_factory=dict)


def judge(run: Run) -> list[Verdict]:
    """The verdicts that are not good; none: the program works."""
    if run.program.is_refused:
        verdicts = [judge_refusal(run)]
    elif run.program.ends_with_heals:
        verdicts = [judge_ends_of_heals(run)]
    else:
        seen = chaos.Run(seen=[("", event) for event in run.events], incidents=())
        verdicts = [
            judge_end(run),
            judge_stalls(run),
            judge_heals(run),
            judge_accusations(run),
            chaos.judge_ids(seen),
            chaos.judge_identity(seen),
            chaos.judge_progress(seen),
            chaos.judge_discards(seen),
        ]
    return [verdict for verdict in verdicts if verdict.outcome is Outcome.FAIL]


def judge_end(run: Run) -> Verdict:
    """All heal and reach the last step, and nobody dies of anything but his kill."""
    killed: set[tuple[int, int]] = set()
    faults = []
    for event in run.events:
        if isinstance(event, Killed):
            killed.add(event.life)  # all workers of a group end with one of them
        elif isinstance(event, Exited) and event.status != 0 and event.life not in killed:
            faults.append(f"group {event.group} ended with status {event.status}")
    if run.missed:
        faults.append(run.missed)
    ends = {event.step for event in run.events if isinstance(event, Finished)}
    if not faults and not ends and not run.is_lost:
        faults.append("no group finished")
    return Verdict.of("all train together, and end", faults, f"at step {ends}")


def judge_stalls(run: Run) -> Verdict:
    """Check that no group stands still for long between two steps."""
    last: dict[tuple[int, int, int], float] = {}
    faults = []
    longest: dict[int, float] = defaultdict(float)
    for event in run.events:
        if isinstance(event, (Committed, Finished)):
            life = (*event.life, event.worker)
            gap_s = event.at - last.get(life, event.at)
            longest[event.group] = max(longest[event.group], gap_s)
            last[life] = event.at
            if gap_s > MAX_STALL_S:
                step = event.step
                faults.append(f"group {event.group} stalled for {gap_s:.1f} s before {step}")
    proof = f"longest stall {max(longest.values(), default=0.0):.2f} s"
    return Verdict.of("no group stalls", faults, proof)


def judge_heals(run: Run) -> Verdict:
    """Check that a healed group has all of its source's state, averages of its data included.

    Not all can be compared: a source may have died before it wrote what it had.
    """
    wholes_at: dict[tuple[int, int], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for event in run.events:
        if isinstance(event, PhaseBegan) and event.whole:
            wholes_at[event.step, event.worker][event.group].add(event.whole)
    faults = []
    num_compared = 0
    for event in run.events:
        if isinstance(event, Healed) and event.whole:
            groups = wholes_at[event.step, event.worker]
            others = [wholes for group, wholes in groups.items() if group != event.group]
            if len(others) == run.program.num_groups - 1:
                num_compared += 1
                if not any(event.whole in wholes for wholes in others):
                    faults.append(
                        f"group {event.group} has the state of no other group at step {event.step}"
                    )
    return Verdict.of("a healed group has all that its source has", faults, f"{num_compared} heals")


def judge_accusations(run: Run) -> Verdict:
    """No check of the groups' states finds a difference, which would be one by design."""
    found = [
        f"{life}: {line.strip()[:_MAX_LINE]}"
        for life, said in run.words.items()
        for line in said.splitlines()
        if any(accusation in line for accusation in _ACCUSATIONS)
    ]
    return Verdict.of("no group's state is taken for another one", found, "no check found any")


def judge_refusal(run: Run) -> Verdict:
    """All groups are; a worker may be ended before, because another one of its group was."""
    faults = [run.missed] if run.missed else []
    groups: dict[str, bool] = defaultdict(bool)
    for life, said in run.words.items():
        groups[life.rpartition(".")[0]] |= _REFUSAL in said
    faults += [f"{group} was not refused" for group, is_refused in groups.items() if not is_refused]
    if any(isinstance(event, Committed) for event in run.events):
        faults.append("steps were committed")
    return Verdict.of("an invalid program is refused", faults, _REFUSAL)


def judge_ends_of_heals(run: Run) -> Verdict:
    """All groups but the one that all others heal from end, and the error names the cause."""
    faults = [run.missed] if run.missed else []
    groups: dict[str, bool] = defaultdict(bool)
    for life, said in run.words.items():
        groups[life.rpartition(".")[0]] |= _REFUSAL in said and "assign=True" in said
    committed = {event.group for event in run.events if isinstance(event, Committed)}
    spared = [group for group, is_refused in groups.items() if not is_refused]
    if len(spared) > 1:
        faults.append(f"{' and '.join(spared)} were not refused")
    if len(committed) > 1:
        faults.append(f"groups {committed} committed steps")
    return Verdict.of("a group that heals wrongly is ended", faults, _REFUSAL)


def report_failure(run: Run) -> str:
    """Describe what is wrong, the last events, and the last output of every life."""
    last = [event for event in run.events if not isinstance(event, PhaseBegan)][-_NUM_EVENTS:]
    said = [
        f"    -- {life}\n" + "\n".join(f"    {line[:_MAX_LINE]}" for line in lines[-_NUM_LINES:])
        for life, words in run.words.items()
        if (lines := words.strip().splitlines())
    ]
    return "\n".join(
        [f"  {verdict.promise}: NO: {verdict.detail}" for verdict in judge(run)]
        + [f"    {str(event)[:300]}" for event in last]
        + said
    )
