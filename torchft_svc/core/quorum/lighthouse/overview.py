"""What people want to know of a job: its quorum, its groups, and why it stands still if it does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torchft_svc.core.pieces import Pieces
from torchft_svc.core.quorum.activity import HangWatch, Phase
from torchft_svc.core.quorum.lighthouse.incidents import Goodput
from torchft_svc.core.quorum.lighthouse.membership import GroupState, Membership
from torchft_svc.core.quorum.lighthouse.pace import Pace, PaceWatch
from torchft_svc.core.quorum.lighthouse.prepared_spares import PreparedSpare
from torchft_svc.core.quorum.lighthouse.quorum import Formed, Waiting, Why
from torchft_svc.core.quorum.types import DifferenceReport, Member, Quorum

# People look at what happened last; a job whose groups come and go for months keeps no more.
MAX_GONE_KEPT = 16
MAX_DIFFERENCES_KEPT = 64  # far more than the checks that groups may still report
MAX_REASON_KEPT = 200  # characters, of up to a thousand
MAX_NAMES = 4  # in a sentence; the others are counted
# How many groups are described, or encoded, before other work goes first: a millisecond or two.
GROUPS_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Pause:
    """Why the groups that ask wait at ``now``: the ``decision``, and which groups are ``held``
    because living earlier groups have their name."""

    decision: Formed | Waiting
    now: float
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def sentence(self, *, with_durations: bool = True) -> str:
        """The reason for people; without durations it does not change all the time."""
        held = [
            f"{key} waits until {', '.join(earlier[:MAX_NAMES])}, which had its name before, is "
            "dead or has left"
            for key, earlier in sorted(self.held.items())[:MAX_NAMES]
        ]
        if isinstance(self.decision, Formed):
            return "; ".join([*held, "a quorum is being published"])
        if held and self.decision.why is Why.NOBODY_ASKS:
            return "; ".join(held)
        return "; ".join([*held, explain(self.decision, self.now if with_durations else None)])


def explain(waiting: Waiting, now: float | None = None) -> str:
    """The sentence about a decision; without ``now`` it names no duration."""
    if waiting.why is Why.NOBODY_ASKS:
        return "no group asks for a quorum"
    if waiting.why is Why.GATHERING:
        return (
            f"this lighthouse is new to the job: waiting for {waiting.num_missing} more groups of "
            "its quorum"
        )
    if waiting.why is Why.STARTING:
        return "a cold start: waiting for groups that are started together (--startup-wait-ms)"
    if waiting.why is Why.AWAITED:
        healing, since = waiting.heal or ("", 0.0)
        for_s = "" if now is None else f" since {now - since:.0f} s"
        heal = f"; {healing} heals{for_s}" if healing else ""
        return f"waiting for {name_some(waiting.awaited)}: alive, but has not asked{heal}"
    if waiting.why is Why.TOO_FEW:
        left = f", {waiting.num_kept_out} more kept out by shrink_only" * (waiting.num_kept_out > 0)
        return (
            f"{waiting.num_asking} of at least {waiting.num_needed} groups ask "
            f"(--min-replicas){left}"
        )
    if waiting.why is Why.NOT_BELIEVED:
        return (
            f"{name_some(waiting.not_believed)}: more than a step ahead of the job, which has "
            f"committed step {waiting.committed_step}; waiting for a group of the last quorum, to "
            "heal from it"
        )
    done = "finished after" if waiting.is_finished else "committed"
    return (
        f"the job has {done} step {waiting.committed_step}, the groups that ask have at most "
        f"step {waiting.max_step}: waiting for a group with the newer state "
        "(or for `lighthouse accept-loss`, which gives it up)"
    )


def name_some(replica_ids: Iterable[str]) -> str:
    """The first few ids in order, and how many more there are."""
    names = sorted(replica_ids)
    more = len(names) - MAX_NAMES
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


# All values of `GroupStatus.state`; of several that hold, it is the first.
GROUP_STATES = ("hung", "left_out", "healing", "in_quorum", "waiting", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """One living replica group; durations in seconds.

    ``in_quorum``: the last one. ``asking``: for the next one. ``phase``: since ``phase_s`` (None:
    not known). ``silent_s``: since its last sign of life. ``hung``: its step has stood still for
    longer than the hang timeout. ``left_out``: it is not awaited until it asks. ``received_bytes``,
    ``state_bytes``: see `Activity`. ``paces``: how long its own work takes in a step, and then in
    each phase (empty: not known), by its slowest worker, ``slowest_rank``; ``slow``: for longer
    than the limit.
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
    received_bytes: int = 0
    state_bytes: int = 0
    paces: tuple[Pace, ...] = ()
    slow: bool = False
    slowest_rank: int = 0

    @property
    def state(self) -> str:
        """The one of `GROUP_STATES` that matters most to who looks after the group."""
        if self.hung:
            return "hung"
        if self.left_out:
            return "left_out"
        if self.phase is Phase.HEALING:
            return "healing"
        if self.in_quorum:
            return "in_quorum"
        return "waiting" if self.asking else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneGroup:
    """A group that is no longer alive, since ``gone_s`` seconds, because of ``reason``.

    ``orderly``: it left on purpose (it has shut down, was drained or killed, or went to another
    lighthouse); else it was lost.
    """

    replica_id: str
    reason: str = ""
    orderly: bool = False
    gone_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job of a lighthouse, its ``groups`` sorted by replica id.

    ``quorum_id`` is 0 before the first quorum; ``waiting_for``: why the groups that ask have no
    quorum yet (empty: none asks). ``num_expected``: the groups of the largest quorum, less those
    that left on purpose since. ``num_discarded``: steps that members of a quorum discarded;
    ``num_heals``: heals that succeeded. ``num_differences``: checks that found the groups' states
    to differ, ``last_difference`` what the last one found (empty: none did). ``stalled_s``: since a
    quorum showed a higher step than all before it, or since the job began. ``gone``: the groups
    that ended last, the newest first. ``num_holders``: processes that hold copies of its states,
    ``copy_step``: that of the newest state that they hold as a whole (0: none), ``copy_age_s``:
    since they first held a newer one than all before it, or first reported (None: none ever did).
    ``goodput``: how much of its time ended in committed steps (None: not known). ``ended_s``: since
    the last group of the job was gone (None: it has living groups); ``finished``: all groups of its
    last quorum had ended on purpose by then.
    ``prepared_spares`` stand by, and fill ``num_places`` (rule G2).
    """

    job: str
    quorum_id: int = 0
    committed_step: int = 0
    min_replicas: int = 1
    waiting_for: str = ""
    groups: tuple[GroupStatus, ...] = ()
    num_expected: int = 0
    num_discarded: int = 0
    num_heals: int = 0
    num_differences: int = 0
    last_difference: str = ""
    stalled_s: float = 0.0
    gone: tuple[GoneGroup, ...] = ()
    ended_s: float | None = None
    finished: bool = False
    copy_step: int = 0
    num_holders: int = 0
    copy_age_s: float | None = None
    goodput: Goodput | None = field(default=None, compare=False)
    prepared_spares: tuple[PreparedSpare, ...] = ()
    num_places: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSample:
    """What a timeline keeps of a job, which needs no look at each group; see `JobStatus`."""

    committed_step: int = 0
    num_groups: int = 0
    num_in_quorum: int = 0
    num_heals: int = 0
    num_discarded: int = 0
    goodput: Goodput = field(default_factory=Goodput)


class History:
    """What has happened to one job, for its status."""

    def __init__(self, now: float) -> None:
        self._moved_at = now  # since when its step stands still
        self._quorum: Quorum | None = None  # the last one
        self._highest = -1
        self._remaining: set[str] = (
            set()
        )  # of the last quorum, those that have not ended on purpose
        self._behind: set[str] = set()  # of the last quorum, those that had to heal
        self._num_expected = 0
        self.num_places = 0  # which prepared spares fill (rule G2)
        self.num_discarded = 0
        self.num_heals = 0
        self._num_differences = 0
        self._last_difference = ""
        # Of the last checks that found a difference, quorum id and step: all groups report it.
        self._counted: deque[tuple[int, int]] = deque(maxlen=MAX_DIFFERENCES_KEPT)
        self._gone: deque[tuple[GoneGroup, float]] = deque(maxlen=MAX_GONE_KEPT)

    def end(self) -> bool:
        """End the history as the last group is gone; returns whether all of the last quorum ended
        on purpose."""
        is_finished = self._quorum is not None and not self._remaining
        self._quorum, self._remaining, self._behind = None, set(), set()
        return is_finished

    def asked(self, member: Member) -> None:
        """Record that a group asks for the next quorum: its part in the last one is over."""
        if member.replica_id in self._behind:
            self._behind.discard(member.replica_id)
            assert self._quorum is not None
            self.num_heals += member.step >= self._quorum.max_step and not member.unhealed

    def published(self, quorum: Quorum, now: float) -> None:
        """Record that the job has another quorum."""
        last, self._quorum = self._quorum, quorum
        if last is not None:
            known = {member.replica_id for member in last.participants}
            self.num_discarded += any(
                member.commit_failures and member.step <= last.max_step
                for member in quorum.participants
                if member.replica_id in known
            )
        self._remaining = {member.replica_id for member in quorum.participants}
        self._behind = set()
        if quorum.max_step > 0:  # at the first step all begin with the weights of one
            up_to_date = {member.replica_id for member in quorum.up_to_date}
            self._behind = self._remaining - up_to_date
        self._num_expected = max(self._num_expected, len(self._remaining))
        self.record_step(quorum.max_step, now)

    def record_places(self, num_groups: int) -> None:
        """Record that the job has had so many groups at once, without spares that took a place."""
        self.num_places = max(self.num_places, num_groups)

    def end_place(self) -> None:
        """Record that the program of a group has ended: nobody takes its place."""
        self.num_places = max(0, self.num_places - 1)

    def record_difference(self, report: DifferenceReport) -> bool:
        """Count the check that has found this difference, once: each group reports it. Returns
        whether this is the first report."""
        which = report.quorum_id, report.step
        if which in self._counted:
            return False
        self._counted.append(which)
        self._num_differences += 1
        self._last_difference = report.sentence
        return True

    def record_step(self, step: int, now: float) -> None:
        """Record that a group of the last quorum has reached ``step``."""
        if step > self._highest:
            self._highest, self._moved_at = step, now

    @property
    def highest_step(self) -> int:
        """The highest step that a group of a quorum has reached (0: none)."""
        return max(0, self._highest)

    def gone(self, group: GoneGroup, *, ends: bool, now: float) -> None:
        """Record that a group is gone; ``ends``: for good, and on purpose."""
        if group.replica_id in self._remaining and ends:
            self._remaining.discard(group.replica_id)
            self._num_expected -= 1
        self._behind.discard(group.replica_id)
        self._gone.appendleft((replace(group, reason=group.reason[:MAX_REASON_KEPT]), now))

    def went_back(self) -> None:
        """Record that the next quorum continues from an earlier step: that is progress again."""
        self._highest = -1

    def add_to(self, status: JobStatus, now: float) -> JobStatus:
        """The status with what has happened to the job."""
        return replace(
            status,
            num_expected=max(self._num_expected, status.min_replicas),
            num_discarded=self.num_discarded,
            num_heals=self.num_heals,
            num_differences=self._num_differences,
            last_difference=self._last_difference,
            stalled_s=max(0.0, now - self._moved_at),
            gone=tuple(replace(group, gone_s=now - at) for group, at in self._gone),
            num_places=self.num_places,
        )


def describe_in_pieces(
    job: str,
    members: Membership,
    hangs: HangWatch,
    watch: PaceWatch,
    held: Iterable[Member],
    why: str,
    now: float,
    *,
    with_paces: bool = True,
) -> Pieces[JobStatus]:
    """The status of a job with living groups, without its history.

    ``held``: groups that wait until an earlier incarnation is gone; ``why``: see `Pause.sentence`.
    The job may change between two pieces of `GROUPS_AT_ONCE` groups: a group that is gone by then
    is left out.
    """
    previous = members.previous
    peers = {each.replica_id: each for each in previous.participants} if previous else {}
    askers = {each.replica_id: each for each in (*members.asking(), *held)}
    groups = []
    min_replicas = 0
    best = watch.best_row(members.previous_ids) if with_paces else ()
    for number, (replica_id, silent_s) in enumerate(members.silences(now), 1):
        if number % GROUPS_AT_ONCE == 0:
            yield
        state = members.state(replica_id)
        if state is None:
            continue
        known = askers.get(replica_id) or peers.get(replica_id) or Member(replica_id=replica_id)
        doing = hangs.activity(replica_id)
        min_replicas = max(min_replicas, known.min_replicas)
        groups.append(
            GroupStatus(
                replica_id=replica_id,
                address=known.address,
                in_quorum=replica_id in members.previous_ids,
                asking=replica_id in askers,
                step=max(known.step, doing.step if doing else 0),
                phase=doing.phase if doing else None,
                phase_s=max(0.0, now - doing.since) if doing else 0.0,
                silent_s=silent_s,
                hung=hangs.is_hung(replica_id),
                left_out=state in (GroupState.STRAGGLING, GroupState.EVICTED),
                received_bytes=doing.received_bytes if doing else 0,
                state_bytes=doing.state_bytes if doing else 0,
                paces=watch.compare(best, (replica_id,)).get(replica_id, ()) if with_paces else (),
                slow=watch.is_slow(replica_id),
                slowest_rank=watch.slowest_rank(replica_id),
            )
        )
    return JobStatus(
        job=job,
        quorum_id=members.last.quorum_id if members.previous_ids else 0,
        committed_step=members.committed_step,
        min_replicas=min_replicas or members.min_replicas,
        waiting_for=why if askers else "",
        groups=tuple(sorted(groups, key=lambda group: group.replica_id)),
    )
