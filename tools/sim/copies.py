"""Holders of copies, and workers that begin from one, in a simulated world (rules B1 to B6).

What a holder waits for, keeps and frees, and how a worker starts, is decided by the machines of the
service, `HolderPlan` and `CopySearch`, which are driven here as `torchft_svc.buddy.holder` and
`torchft_svc.client.step.copies` drive them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tools.sim.lighthouse_actor import LighthouseActor
from tools.sim.lighthouses import Lighthouses
from tools.sim.manager_actor import ManagerActor
from tools.sim.offers import Fetched
from tools.sim.shared import Home, Shared
from tools.sim.world import Process, VirtualWorld
from torchft_svc.core.quorum.lighthouse.copies import (
    LOOK_AGAIN_S,
    LOOK_UP_S,
    MAX_MEMBERS_ASKED,
    REPORT_S,
    REPORT_TIMEOUT_S,
    CopySearch,
    HeldCopy,
    MembersAndCopies,
    Start,
    whole_copy,
)
from torchft_svc.core.quorum.lighthouse.holder_plan import (
    LOOK_S,
    SILENCE_S,
    HolderPlan,
    NextCopy,
)
from torchft_svc.core.quorum.worker.step import StepMachine
from torchft_svc.errors import PeerError, TorchFTError, Unreachable

# How often a manager checks whether it is connected, for a worker that asks who trains.
CONNECTED_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Copy:
    described: HeldCopy
    state: Fetched


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A holder waits for the next copy of one worker."""

    rank: int
    wanted: NextCopy


class HolderActor:
    """One life of a holder, which stands beside a group of ``job``."""

    def __init__(
        self,
        process: Process,
        job: str,
        beside: str,
        ranks: Sequence[int],
        group_world_size: int,
        lighthouses: Lighthouses,
        shared: Shared,
    ) -> None:
        self.process: Process = process
        self._job = job
        self._group_world_size = group_world_size
        self._shared = shared
        shared.holders[process.name] = self
        self._plan = HolderPlan(beside, ranks, group_world_size)
        self._copies: dict[int, list[_Copy]] = {rank: [] for rank in ranks}
        self._numbers = itertools.count(1)  # of copies
        self._waits: dict[int, _Wait] = {}  # by rank, the present ones
        for host in lighthouses.hosts.values():
            process.after(0.0, self._report_to, host)
        for rank in ranks:
            process.after(0.0, self._follow_worker, rank)

    def find(self, address: str, step: int) -> Fetched | None:
        """The state that is served at ``address``."""
        held = (each for copies in self._copies.values() for each in copies)
        wanted = address, step
        return next(
            (it.state for it in held if (it.described.address, it.described.step) == wanted), None
        )

    @property
    def described(self) -> tuple[HeldCopy, ...]:
        return tuple(each.described for copies in self._copies.values() for each in copies)

    def _free(self) -> None:
        """Free what is not kept any more."""
        for rank, copies in self._copies.items():
            kept = self._plan.kept(rank)
            self._copies[rank] = [each for each in copies if each.described.state_key in kept]
        self._shared.copies.holds(self._job, self.process, self.described)

    # -- reports ---------------------------------------------------------------------------------

    def _report_to(self, host: LighthouseActor) -> None:
        """Report, and again a while after the answer, or after it is late."""
        receive = once(lambda view: self._receive_view(host, view))
        self.process.after(REPORT_TIMEOUT_S, receive, None)

        def arrive(copies: tuple[HeldCopy, ...]) -> None:
            view = host.record_copies(self._job, self.process.name, copies)
            if not self._is_cut_off():
                self.process.after(self._latency(), receive, view)

        if host.process.is_dead:
            self.process.after(self._latency(), receive, None)
        elif not self._is_cut_off():
            host.process.after(self._latency(), arrive, self.described)

    def _receive_view(self, host: LighthouseActor, view: MembersAndCopies | None) -> None:
        if view is None:
            self._plan.record_silence(host.name)
        else:
            self._plan.record_view(host.name, view, self.process.world.now)
        self._free()
        self.process.after(REPORT_S, self._report_to, host)

    # -- copies ----------------------------------------------------------------------------------

    def _follow_worker(self, rank: int) -> None:
        """Wait for the next copy that the buddy's worker offers."""
        wanted = self._plan.begin_copy(rank)
        self._free()
        if wanted is None:
            self.process.after(LOOK_S, self._follow_worker, rank)
            return
        wait = self._waits[rank] = _Wait(rank, wanted)
        manager = self._shared.managers.get(wanted.manager_address)
        if manager is None or manager.process.is_dead or self._is_cut_off():
            self.process.after(REPORT_TIMEOUT_S, self._lose, wait, REPORT_S)
        else:
            manager.process.after(self._latency(), self._ask, manager, wait)
            self.process.after(SILENCE_S, self._lose, wait, 0.0)

    def _ask(self, manager: ManagerActor, wait: _Wait) -> None:
        """Wait at the worker, whose manager knows where it is."""
        try:
            worker = self._shared.offers.get(manager.group.checkpoint_address(wait.rank))
        except TorchFTError:
            worker = None

        def lose() -> None:
            self.process.after(self._latency(), self._lose, wait, REPORT_S)

        def send(state: Fetched, copy_s: float) -> None:
            self.process.after(self._latency(), self._receive, wait, state, copy_s)

        if worker is None or worker.process.is_dead:
            lose()
            return
        worker.process.on_death.append(lose)
        worker.process.after(self._latency(), worker.await_copy, wait.wanted.above, send)

    def _lose(self, wait: _Wait, pause_s: float) -> None:
        if self._waits.get(wait.rank) is wait:
            del self._waits[wait.rank]
            self.process.after(pause_s, self._follow_worker, wait.rank)

    def _receive(self, wait: _Wait, state: Fetched, copy_s: float) -> None:
        if self._waits.get(wait.rank) is wait and not self._is_cut_off():
            del self._waits[wait.rank]
            self._add(wait.rank, state, wait.wanted, copy_s)
            self._await_other_workers(wait.rank)

    def _add(self, rank: int, state: Fetched, wanted: NextCopy, fetched_in_s: float) -> None:
        described = HeldCopy(
            step=state.state.step,
            step_quorum_id=state.quorum_id,
            group_rank=rank,
            group_world_size=self._group_world_size,
            address=f"{self.process.name}/{next(self._numbers)}",
        )
        self._copies[rank].append(_Copy(described, state))
        now = self.process.world.now
        self._plan.record_copy(rank, described.state_key, wanted.above, fetched_in_s, now)
        self._free()

    def _await_other_workers(self, rank: int) -> None:
        """Keep the newest copy for those of the other workers."""
        if self._plan.awaits_other_workers(rank, self.process.world.now):
            self.process.after(LOOK_S, self._await_other_workers, rank)
        else:
            self._follow_worker(rank)

    def _is_cut_off(self) -> bool:
        return self._shared.network.is_cut(self.process.name)

    def _latency(self) -> float:
        return self._shared.network.latency(self.process)


class HolderHost:
    """Starts a holder, and again when it has crashed."""

    def __init__(self, name: str, world: VirtualWorld, start: Callable[[Process], HolderActor]):
        self.name = name
        self._world = world
        self._start = start
        self._launcher = world.process(f"{name}/launcher")
        self._num_lives = 0
        self.holder: HolderActor | None = None
        self._launcher.after(0.0, self._begin_life)

    def crash(self, down_s: float) -> None:
        if self.holder is not None and not self.holder.process.is_dead:
            self.holder.process.kill()
            self._launcher.after(down_s, self._begin_life)

    def _begin_life(self) -> None:
        self._num_lives += 1
        self.holder = self._start(self._world.process(f"{self.name}.{self._num_lives}"))


class Starter(Protocol):
    """A worker that begins its first step."""

    process: Process
    home: Home
    group_rank: int
    machine: StepMachine


class SearchActor:
    """Looks for a copy that a worker begins from, as `fetch_copy` does; then calls ``done``."""

    def __init__(
        self,
        worker: Starter,
        quorum_s: float,
        shared: Shared,
        done: Callable[[Fetched | TorchFTError | None], None],
    ) -> None:
        self._process, self._home = worker.process, worker.home
        self._group_rank = worker.group_rank
        self._shared = shared
        self._done = done
        self._looked_at = worker.process.world.now
        size, own_step = worker.home.group_world_size, worker.machine.state.step
        self._search = CopySearch(worker.group_rank, size, own_step, quorum_s, self._looked_at)
        self._number = 0  # of the present look: what belongs to another one comes too late
        self._look_for_copy()

    def _look_for_copy(self) -> None:
        self._looked_at = self._process.world.now
        receive = self._as_step(self._receive)
        look_up(self._process, self._home, self._shared, LOOK_UP_S, receive)

    def _receive(self, view: MembersAndCopies | None) -> None:
        if view is None:
            self._look_again()
            return
        start = self._search.choose_start(view, self._looked_at)
        if start is Start.WITHOUT_COPY:
            self._end(None)
        elif start is Start.ASK_MEMBERS:
            self._ask_members(list(view.members.values())[:MAX_MEMBERS_ASKED])
        elif isinstance(start, HeldCopy):
            self._fetch(start)
        else:
            self._look_again()

    def _ask_members(self, addresses: list[str]) -> None:
        """Ask one after the other: if a member lives, this worker begins without a copy."""
        if not addresses:
            self._look_again()
            return
        go_on = self._as_step(lambda lives: self._member_answered(lives, addresses[1:]))
        manager = self._shared.managers.get(addresses[0])
        self._process.after(LOOK_UP_S, go_on, False)

        def answer() -> None:
            self._process.after(self._latency(), go_on, True)

        if manager is None or manager.process.is_dead:
            self._process.after(self._latency(), go_on, False)
        elif not self._shared.network.is_cut(manager.process.name):
            manager.process.after(self._latency(), answer)

    def _member_answered(self, lives: bool, others: list[str]) -> None:
        if lives:
            self._end(None)
        else:
            self._ask_members(others)

    def _fetch(self, copy: HeldCopy) -> None:
        received = self._as_step(self._fetched)
        holder = self._shared.holders.get(copy.address.partition("/")[0])
        self._process.after(LOOK_UP_S, received, None)
        if holder is None or holder.process.is_dead:
            self._process.after(self._latency(), received, None)
            return

        def send() -> None:
            state = holder.find(copy.address, copy.step)
            self._process.after(self._latency(), received, state)

        if not self._shared.network.is_cut(holder.process.name):
            holder.process.after(self._latency(), send)

    def _fetched(self, state: Fetched | None) -> None:
        if state is None:
            self._look_again()
        else:
            home = self._home
            others = home.others_with_state()
            self._shared.copies.begins(home.job, home.name, self._process, state, others)
            self._end(state)

    def _look_again(self) -> None:
        if self._search.is_over(self._looked_at):
            self._end(Unreachable("holder", "simulated", "no copy can be fetched"))
        else:
            self._process.after(LOOK_AGAIN_S, self._look_for_copy)

    def _as_step(self, action: Callable[..., None]) -> Callable[..., None]:
        """Return ``action`` for the next answer, which is ignored if another one has come."""
        self._number += 1
        number = self._number

        def act(*what: object) -> None:
            if number == self._number:
                self._number += 1
                action(*what)

        return act

    def _end(self, found: Fetched | TorchFTError | None) -> None:
        self._number += 1
        self._done(found)

    def _latency(self) -> float:
        return self._shared.network.latency(self._process)


def look_up(
    process: Process,
    home: Home,
    shared: Shared,
    timeout_s: float,
    receive: Callable[[MembersAndCopies | None], None],
) -> None:
    """Ask the lighthouse, through the manager, which members and copies there are (None: it does
    not answer within ``timeout_s``)."""
    receive, until = once(receive), process.world.now + timeout_s

    def answer(host: LighthouseActor, manager: ManagerActor) -> None:
        view = host.members_and_copies(home.job)
        manager.process.after(shared.network.latency(manager.process), pass_on, view)

    def pass_on(view: MembersAndCopies | None) -> None:
        process.after(shared.network.latency(process), receive, view)

    def ask(manager: ManagerActor) -> None:
        """Ask as soon as the manager is connected."""
        host = manager.link.host
        if host is not None and not shared.network.is_cut(manager.process.name):
            host.process.after(shared.network.latency(manager.process), answer, host, manager)
        elif process.world.now < until:
            manager.process.after(CONNECTED_LOOK_S, ask, manager)

    def arrive(manager: ManagerActor) -> None:
        manager.link.return_for_worker()
        ask(manager)

    manager = home.manager
    process.after(timeout_s, receive, None)
    if manager is not None and not manager.process.is_dead:
        manager.process.after(shared.network.latency(process), arrive, manager)


def once(receive: Callable[[MembersAndCopies | None], None]) -> Callable[..., None]:
    """Return ``receive`` for the first of several answers to one call."""
    is_over = [False]

    def first(view: MembersAndCopies | None) -> None:
        if not is_over[0]:
            is_over[0] = True
            receive(view)

    return first


def is_copy_missed(
    view: MembersAndCopies | None, group_rank: int, group_world_size: int
) -> PeerError | None:
    """Why the first step of a job that begins anew must be discarded (None: it need not)."""
    if view is None:
        return Unreachable("lighthouse", "simulated", "it is not known whether a copy is held")
    if whole_copy(view, group_rank, group_world_size, 0) is not None:
        return Unreachable("copy", "simulated", "the job begins there")
    return None
