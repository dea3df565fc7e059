"""What people want to know of a job: its quorum, its groups, and why it stands still if it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchft_svc.core.activity import HangWatch
from torchft_svc.core.membership import Membership
from torchft_svc.core.step import Phase
from torchft_svc.core.types import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """One living replica group; durations in seconds.

    ``in_quorum``: in the last one. ``asking``: it waits for the next one. ``phase`` is what it does
    since ``phase_s`` (None: it does not tell), ``silent_s`` is the time since its last sign of
    life, ``hung`` that its step has stood still for longer than the hang timeout, ``left_out`` that
    nobody waits for it until it asks.
    """

    replica_id: str
    address: str = ""
    in_quorum: bool = False
    asking: bool = False
    step: int = 0
    phase: Phase | None = None
    phase_s: float = 0.0
    silent_s: float = 0.0
    hung: bool = False
    left_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job of a lighthouse, its ``groups`` sorted by replica id.

    ``quorum_id`` is 0 before the first quorum; ``waiting_for`` says why the groups that ask have
    no quorum yet (empty: none asks).
    """

    job: str
    quorum_id: int = 0
    committed_step: int = 0
    min_replicas: int = 1
    waiting_for: str = ""
    groups: tuple[GroupStatus, ...] = ()


def describe(
    job: str, members: Membership, hangs: HangWatch, held: Iterable[Member], why: str, now: float
) -> JobStatus:
    """``held`` wait until an earlier incarnation is gone; ``why`` is asked by the caller."""
    previous = members.previous
    fellows = {each.replica_id: each for each in previous.participants} if previous else {}
    askers = {each.replica_id: each for each in (*members.asking(), *held)}
    groups = []
    told = 0
    for replica_id, silent_s in members.silences(now):
        known = askers.get(replica_id, fellows.get(replica_id, Member(replica_id=replica_id)))
        doing = hangs.activity(replica_id)
        told = max(told, known.min_replicas)
        groups.append(
            GroupStatus(
                replica_id=replica_id,
                address=known.address,
                in_quorum=replica_id in fellows,
                asking=replica_id in askers,
                step=max(known.step, doing.step if doing else 0),
                phase=doing.phase if doing else None,
                phase_s=max(0.0, now - doing.since) if doing else 0.0,
                silent_s=silent_s,
                hung=hangs.is_hung(replica_id),
                left_out=members.is_left_out(replica_id),
            )
        )
    return JobStatus(
        job=job,
        quorum_id=previous.quorum_id if previous else 0,
        committed_step=members.committed_step,
        min_replicas=told or members.min_replicas,
        waiting_for=why if askers else "",
        groups=tuple(sorted(groups, key=lambda group: group.replica_id)),
    )
