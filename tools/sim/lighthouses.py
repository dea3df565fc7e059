"""The lighthouses of a simulated world: who leads, and whether a list splits a job (rule F4)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.sim.invariants import Invariants, must
from tools.sim.lighthouse_actor import LighthouseActor
from tools.sim.network import MAX_KEEPALIVE_S, Network
from tools.sim.scenario import Fault, Scenario
from tools.sim.trace import Trace
from tools.sim.world import VirtualWorld
from torchft_svc.core.quorum.types import Quorum

# How long an elected leader may be dead or frozen before another one is elected.
LEASE_S = 2.0
# A group finds a lighthouse that has answered for so long, if nothing was wrong meanwhile.
KNOWN_AFTER_S = 4.0
# A newcomer whose questions have less time does not wait for the others for long enough.
PATIENT_S = 10.0
MAX_CLOCK_JUMP_S = 400.0  # half of it, back or ahead


class Lighthouses:
    """The lighthouses, in the order of the list that all managers have."""

    def __init__(
        self,
        world: VirtualWorld,
        network: Network,
        scenario: Scenario,
        invariants: Invariants,
        trace: Trace,
    ) -> None:
        self._world = world
        self._nature = world.process("election")
        self.is_elected = scenario.is_elected
        names = [f"lighthouse{number or ''}" for number in range(scenario.num_lighthouses)]
        self.leader = names[0]  # if there is an election
        self.hosts: dict[str, LighthouseActor] = {}  # by their addresses
        # With election only one of them answers: to the groups it is one that restarts.
        one = invariants.of_lighthouse() if self.is_elected else None
        for name, skew_s in zip(names, scenario.clock_skews_s, strict=True):
            view = one or invariants.of_lighthouse()
            self.hosts[name] = LighthouseActor(
                world, network, scenario.config, view, trace, name, skew_s, self._elected
            )
        self.splits = Splits(world, self, scenario.trainer.quorum_s >= PATIENT_S)

    def __iter__(self) -> Iterator[LighthouseActor]:
        return iter(self.hosts.values())

    def _elected(self) -> str:
        """The leader (empty: there is no election, and each serves groups)."""
        return self.leader if self.is_elected else ""

    def apply_fault(self, fault: Fault) -> bool:
        """Let ``fault`` happen, if it is one of a lighthouse; whether it is."""
        host = list(self.hosts.values())[fault.target % len(self.hosts)]
        if fault.kind == "lighthouse_crash":
            self.crash(host, fault.seconds, fault.value * 100.0)
        elif fault.kind == "lighthouse_freeze":
            self.freeze(host, fault.seconds)
        elif fault.kind == "lighthouse_lead":
            self.end_lead(host, fault.seconds)
        elif fault.kind == "change_leader":
            self.change_leader()
        elif fault.kind == "clock_jump":
            host.clock_skew_s += (fault.value - 0.5) * MAX_CLOCK_JUMP_S
        else:
            return False
        return True

    def crash(self, host: LighthouseActor, down_s: float, clock_back_s: float) -> None:
        if not host.process.is_dead:
            host.crash(down_s, clock_back_s)
            host.is_away_for(down_s)
            self._elect_later(host, down_s)

    def freeze(self, host: LighthouseActor, seconds: float) -> None:
        host.is_away_for(seconds)
        host.thawed_at = max(host.thawed_at, host.process.world.now + seconds)
        host.process.freeze()
        self._nature.after(seconds, host.process.thaw)
        self._elect_later(host, seconds)

    def end_lead(self, host: LighthouseActor, seconds: float) -> None:
        host.is_away_for(seconds)
        host.end_lead(seconds)

    def change_leader(self) -> None:
        if self.is_elected:
            self._elect(self.hosts[self.leader])

    def _elect_later(self, host: LighthouseActor, seconds: float) -> None:
        if self.is_elected and host.name == self.leader and seconds > LEASE_S:
            self._nature.after(LEASE_S, self._elect, host)

    def _elect(self, before: LighthouseActor) -> None:
        """Choose another one that can answer; both begin without any memory."""
        if before.name != self.leader:
            return
        able = [each for each in self.hosts.values() if each is not before and each.is_up]
        if not able:
            if not before.is_up:
                self._nature.after(LEASE_S, self._elect, before)
            return
        self.leader = able[0].name
        for each in (before, able[0]):
            if not each.process.is_dead:
                each.process.thaw()
                each.crash(0.0, 0.0)


@dataclass(slots=True)
class _Received:
    """The last quorum that a group has received."""

    at: float
    host: str
    group: str
    names: frozenset[str]  # of its members


@dataclass(slots=True)
class Splits:
    """Two parts of a job never train at two lighthouses at once (rule F4)."""

    _world: VirtualWorld
    _among: Lighthouses
    _has_time: bool  # newcomers may wait for as long as they like
    _troubled_until: dict[str, float] = field(default_factory=dict)
    _unreachable_until: dict[str, float] = field(default_factory=dict)
    _received: dict[str, dict[str, _Received]] = field(default_factory=dict)
    num_moves: int = 0
    # Until then groups may come from a silent lighthouse to one where a newcomer has begun.
    split_until: float = -math.inf

    def record_trouble(self, group: str, seconds: float) -> None:
        _extend(self._troubled_until, group, self._world.now + seconds)

    def record_unreachable(self, group: str, seconds: float) -> None:
        """A group receives nothing, or late, for ``seconds``.

        If its session survives that, an earlier lighthouse seems to be silent for a while.
        """
        known_s = KNOWN_AFTER_S if seconds > MAX_KEEPALIVE_S else 0.0
        _extend(self._unreachable_until, group, self._world.now + seconds - known_s)

    def record_quorum(
        self, job: str, group: str, host: str, quorum: Quorum, is_newcomer: bool
    ) -> None:
        """``group`` received ``quorum`` at lighthouse ``host``."""
        if self._among.is_elected or len(self._among.hosts) == 1:
            return
        names = frozenset(each.replica_id.partition(":")[0] for each in quorum.participants)
        groups = self._received.setdefault(job, {})
        before = groups.get(group)
        if before is not None and before.host != host:
            self.num_moves += 1
        order = list(self._among.hosts)
        for other in groups.values():
            if other.host == host or other.group in names or group in other.names:
                continue
            if order.index(other.host) < order.index(host):
                self._check_later(group, host, other)
                if is_newcomer:
                    self.split_until = self._world.now + MAX_KEEPALIVE_S + KNOWN_AFTER_S
            elif is_newcomer and self._has_time and not names & other.names:
                # Else one has moved on, and the quorum that it has left commits nothing without it.
                self._check_newcomer(group, host, other)
        groups[group] = _Received(self._world.now, host, group, names)

    def _check_later(self, group: str, host: str, other: _Received) -> None:
        """The other group is at an earlier lighthouse, which this one could have found, unless that
        is silent."""
        was_unreachable = self._is_recent(self._unreachable_until, group)
        is_known = self._is_up(other.host) and not was_unreachable
        must(
            not is_known or self._is_old(other),
            "F4",
            f"{group} trains at {host}, and {other.group} at {other.host}",
        )

    def _check_newcomer(self, group: str, host: str, other: _Received) -> None:
        """The other group is at a later lighthouse, from which it could have come."""
        is_well = not self._is_recent(self._troubled_until, other.group)
        is_up = self._serves(other.host)
        # One that was frozen had the newcomer's session all the time, and the others had none.
        was_frozen = self._world.now - self._among.hosts[host].thawed_at <= KNOWN_AFTER_S
        must(
            not (is_well and is_up) or was_frozen or self._is_old(other),
            "F4",
            f"the newcomer {group} begins at {host}, while {other.group} trains at {other.host}",
        )

    def _is_up(self, host: str) -> bool:
        up_since = self._among.hosts[host].up_since
        return self._serves(host) and self._world.now - up_since > KNOWN_AFTER_S

    def _serves(self, host: str) -> bool:
        at = self._among.hosts[host]
        return at.is_up and at.accepts_clients()

    def _is_old(self, received: _Received) -> bool:
        return self._world.now - received.at > KNOWN_AFTER_S

    def _is_recent(self, until: dict[str, float], group: str) -> bool:
        return until.get(group, -KNOWN_AFTER_S) + KNOWN_AFTER_S > self._world.now


def _extend(until: dict[str, float], group: str, at: float) -> None:
    until[group] = max(until.get(group, 0.0), at)
