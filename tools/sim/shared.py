"""What the workers of a simulated world share, and what each of them knows of its own group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tools.sim.copy_checks import CopyChecks
from tools.sim.invariants import Invariants
from tools.sim.manager_actor import ManagerActor
from tools.sim.network import Network
from tools.sim.offers import Fetched, Offers
from tools.sim.sums import GroupCollective, Sums
from tools.sim.terms import Companions, Histories, Terms
from tools.sim.trace import Trace
from tools.sim.world import Process
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.errors import PeerError, QuorumFailed, TorchFTError, Unreachable

# Groups that end when their question times out must not miss one another for ever: at last they
# ask for far longer than they are away, as operations.md says.
LONG_QUESTION_S = 30.0


class Home(Protocol):
    """What a worker knows of its group, see `Site`."""

    job: str
    name: str
    group_world_size: int
    is_spare: bool  # it starts as a prepared spare
    manager: ManagerActor | None
    collective: GroupCollective | None  # of its workers, if they have one

    def is_manager_over(self) -> bool: ...
    def others_with_state(self) -> list[str]: ...
    def check_origins(self) -> None: ...
    def worker_drained(self, *, has_left: bool) -> None: ...
    def worker_failed(self, why: str) -> None: ...
    def save(self, group_rank: int, saved: Fetched) -> None: ...


class CopySource(Protocol):
    """What a worker that begins from a copy knows of the process that holds it."""

    process: Process

    def find(self, address: str, step: int) -> Fetched | None: ...


class Shared:
    """What all workers of a world share."""

    def __init__(
        self,
        network: Network,
        sums: Sums,
        invariants: Invariants,
        terms: Terms,
        companions: Companions,
        histories: Histories,
        copies: CopyChecks,
        trace: Trace,
    ) -> None:
        self.network = network
        self.sums = sums
        self.invariants = invariants
        self.terms = terms
        self.companions = companions
        self.histories = histories
        self.copies = copies
        self.trace = trace
        self.holders: dict[str, CopySource] = {}
        self.managers: dict[str, ManagerActor] = {}
        self.offers: dict[str, Offers] = {}
        self.num_commits = 0
        self.is_calm = False  # the faults are over
        # By job: the commits of its newest quorum and step, and how many workers have done it.
        self.together: dict[str, tuple[tuple[int, int], int]] = {}

    def question_s(self, quorum_s: float, *, has_to_end: bool) -> float:
        """How long a worker asks for a quorum; ``has_to_end``: its group does if there is none."""
        return max(quorum_s, LONG_QUESTION_S) if self.is_calm and has_to_end else quorum_s

    def fetch(
        self,
        process: Process,
        part: QuorumResult,
        group_rank: int,
        receive: Callable[[Fetched | PeerError], None],
        share: float,
    ) -> None:
        """Ask the source's manager for its worker's address, and that worker for a ``share`` of the
        state; the rest is at hand."""

        def ask(manager: ManagerActor) -> None:
            try:
                address = manager.group.checkpoint_address(group_rank)
            except TorchFTError as error:
                receive(QuorumFailed(str(error)))
                return
            offers = self.offers.get(address)
            if offers is None or offers.process.is_dead:
                receive(Unreachable("worker", address, "it is gone"))
            else:
                latency_s = self.network.latency(process)
                offers.process.after(latency_s, offers.fetch, part.max_step, receive, share)

        source = self.managers.get(part.recover_src_manager_address)
        if source is None or source.process.is_dead:
            receive(Unreachable("manager", part.recover_src_manager_address, "it is gone"))
        else:
            source.process.after(self.network.latency(process), ask, source)

    def count_commit(self, job: str, quorum_id: int, step: int) -> None:
        self.num_commits += 1
        key, count = self.together.get(job, ((quorum_id, step), 0))
        count = count + 1 if key == (quorum_id, step) else 1
        self.together[job] = ((quorum_id, step), count)
