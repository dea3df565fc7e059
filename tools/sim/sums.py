"""The collectives of a simulated world: a sum needs every member, and arrives at each by itself.

So a member that dies while the result is on its way leaves some with the sum and others without,
which is how a step comes to be committed by a part of its quorum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tools.sim.invariants import Invariants, must
from tools.sim.network import Network
from tools.sim.world import Process
from torchft_svc.core.route import MANAGER_PATIENCE_S
from torchft_svc.errors import PeerError, QuorumFailed

# Two workers of a group that wait for each other for so long will do so for ever.
LOCKED_S = 3.0


@dataclass(frozen=True, slots=True)
class State:
    """A worker's state, as far as the simulation is concerned; equal weights have equal numbers."""

    step: int
    weights: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What a member puts into a sum: gradients for ``state``, which are divided by ``num_groups``
    (None: it contributes zeros), and its ``wish`` to end the term."""

    state: State | None
    num_groups: int
    wish: float


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum of all members' states, as a ``digest``, and of their ``wishes`` to end the term."""

    digest: int
    wishes: float


Result = Sum | PeerError
Done = Callable[[Result], None]
Key = tuple[str, str, int, int]  # job, store, quorum id, group rank


class Sums:
    """All process groups of a world, by job, store, quorum id and group rank."""

    def __init__(self, network: Network, invariants: Invariants) -> None:
        self.network = network
        self.invariants = invariants
        self._rings: dict[Key, Ring] = {}
        self._over: set[Key] = set()

    def join(self, key: Key, members: tuple[str, ...], me: str, process: Process) -> Seat:
        """The seat of group ``me`` among ``members``.

        A broken process group cannot be built again under its id: its store holds the old
        addresses.
        """
        ring = self._rings.setdefault(key, Ring(self, key, members))
        seat = Seat(ring, me, process)
        if ring.is_broken or me in ring.seats or key in self._over:
            seat.error = QuorumFailed("the process group of this quorum is broken")
            return seat
        ring.seats[me] = seat
        process.on_death.append(seat.abort)
        return seat

    def forget(self, ring: Ring) -> None:
        self._rings.pop(ring.key, None)
        if ring.is_broken:
            self._over.add(ring.key)


class GroupCollective:
    """What the workers of one group do together in each step, such as gathering their shards.

    All of them have to come. A worker that waits here does not ask its manager, so a peer that
    waits for it in the quorum at the same time waits in vain.
    """

    def __init__(self, network: Network, invariants: Invariants, group: str, size: int) -> None:
        self._network = network
        self._invariants = invariants
        self._group = group
        self._size = size
        self._asks_since: dict[Process, float] = {}
        self._waiting: dict[Process, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._is_broken = False
        self._is_excused = False
        self._manager_lost_at = self._manager_back_at = -math.inf

    def lose_manager(self, away_s: float) -> None:
        """Record that the manager is dead, and that another one comes after ``away_s``."""
        self._manager_lost_at = self._network.world.now
        self._manager_back_at = self._manager_lost_at + away_s

    def excuse(self) -> None:
        """The manager was replaced, and cannot find out which worker continued without an answer:
        until all come, one may wait in the quorum for the whole time of its question."""
        self._is_excused = True

    def asks(self, process: Process) -> None:
        """Record that a worker waits for an answer; it may ask again, if it has another manager."""
        self._asks_since.setdefault(process, self._network.world.now)

    def is_answered(self, process: Process) -> None:
        self._asks_since.pop(process, None)

    def arrive(self, process: Process, done: Callable[[], None], fail: Callable[[], None]) -> None:
        """Call ``done`` when all workers have come, ``fail`` if one has died."""
        if self._is_broken:
            process.after(0.0, fail)
            return
        self._waiting[process] = done, fail
        if len(self._waiting) == self._size:
            arrived, self._waiting = self._waiting, {}
            self._is_excused = False
            for each, (proceed, _) in arrived.items():
                each.after(self._network.latency(each), proceed)
        else:
            process.after(LOCKED_S, self._check, process, done)

    def break_up(self) -> None:
        """A worker is dead, and its connections are closed."""
        self._is_broken = True
        waiting, self._waiting = self._waiting, {}
        for process, (_, fail) in waiting.items():
            process.after(self._network.latency(process), fail)

    def _check(self, process: Process, done: Callable[[], None]) -> None:
        if self._waiting.get(process, (None,))[0] is not done:
            return
        now = self._network.world.now
        for peer, since in self._asks_since.items():
            is_explained = self._is_excused or self._invariants.hangs.has_trouble(
                self._group, since
            )
            is_locked = now - self._answerable_since(since) > LOCKED_S and not is_explained
            what = f"{process.name} waits for {peer.name} in a collective, that one in the quorum"
            must(not is_locked, "I5", what)
        process.after(LOCKED_S, self._check, process, done)

    def _answerable_since(self, asks_since: float) -> float:
        """The time from which on a manager could have answered a question.

        While none lives, the worker asks until it gives up (rule M3).
        """
        gives_up_at = max(asks_since, self._manager_lost_at) + MANAGER_PATIENCE_S
        return max(asks_since, min(self._manager_back_at, gives_up_at))


class Ring:
    """One process group over all its members."""

    def __init__(self, sums: Sums, key: Key, members: tuple[str, ...]) -> None:
        self.sums = sums
        self.key = key
        self.members = frozenset(members)
        self.seats: dict[str, Seat] = {}
        self.is_broken = False
        self._arrived: dict[int, dict[str, tuple[Contribution, Done]]] = {}

    def arrive(self, number: int, seat: Seat, part: Contribution, done: Done) -> None:
        arrived = self._arrived.setdefault(number, {})
        arrived[seat.me] = part, done
        if len(arrived) < len(self.members) or self.is_broken:
            return
        del self._arrived[number]
        parts = {who: part for who, (part, _) in arrived.items() if part.state is not None}
        states = {who: (it.state.step, it.state.weights) for who, it in parts.items() if it.state}
        identity = self.sums.invariants.identity
        identity.contributed(str(self.key), states)
        identity.divided(str(self.key), {who: part.num_groups for who, part in parts.items()})
        digest = hash(tuple(states[who] for who in sorted(states)))
        result = Sum(digest, sum(part.wish for part, _ in arrived.values()))
        for who, (_, hand_over) in arrived.items():
            other = self.seats[who]
            delay_s = self.sums.network.latency(other.process)
            other.result_at = self.sums.network.world.now + delay_s
            other.process.after(delay_s, other.receive, number, result, hand_over)

    def break_up(self, but: Seat, in_order: bool = False) -> None:
        """A member has closed its connections: the others notice, if ``in_order`` after its
        result."""
        self.is_broken = True
        for seat in self.seats.values():
            if seat is not but:
                due_s = max(0.0, seat.result_at - self.sums.network.world.now) if in_order else 0.0
                delay_s = due_s + self.sums.network.latency(seat.process)
                seat.process.after(delay_s, seat.notice)
        self._arrived.clear()


class Seat:
    """One worker's process group."""

    def __init__(self, ring: Ring, me: str, process: Process) -> None:
        self._ring = ring
        self.me = me
        self.process = process
        self.error: PeerError | None = None
        self.result_at = 0.0
        self._num_begun = 0
        self._pending: Done | None = None

    @property
    def quorum_id(self) -> int:
        return self._ring.key[2]

    def reduce(self, part: Contribution, done: Done) -> None:
        self._num_begun += 1
        self._pending = done
        self._when_connected(self._ring.arrive, self._num_begun, self, part, done)

    def receive(self, number: int, result: Sum, done: Done) -> None:
        if self._pending is done and number == self._num_begun:
            self._when_connected(self._finish, result)

    def abort(self) -> None:
        """Close the connections: no member finishes another sum."""
        self._fail("it was aborted")
        if not self._ring.is_broken:
            self._ring.is_broken = True
            self._when_connected(self._ring.break_up, self)

    def depart(self) -> None:
        """The worker ends in good order, and has sent what the others wait for."""
        if self.abort in self.process.on_death:
            self.process.on_death.remove(self.abort)
        if not self._ring.is_broken:
            self._when_connected(self._ring.break_up, self, True)

    def leave(self) -> None:
        self.abort()
        if self._ring.seats.get(self.me) is self:
            del self._ring.seats[self.me]
        if self.abort in self.process.on_death:
            self.process.on_death.remove(self.abort)
        if not self._ring.seats:
            self._ring.sums.forget(self._ring)

    def notice(self) -> None:
        self._fail("a member has closed its connections")

    def _fail(self, reason: str) -> None:
        if self.error is None:
            self.error = QuorumFailed(reason)
        self._finish(self.error)

    def _finish(self, result: Result) -> None:
        done, self._pending = self._pending, None
        if done is not None and not self.process.is_dead:
            done(result)

    def _when_connected(self, action: Callable[..., None], *args: object) -> None:
        self._ring.sums.network.when_mended(self.process.name, action, *args)
