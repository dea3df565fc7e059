"""A worker's state for those that heal from it: kept from one offer to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.sim.sums import State
from tools.sim.world import Process
from torchft_svc.errors import CheckpointError, PeerError

# How long a request for a state waits for its offer.
EARLY_S = 5.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A state, and the counters that come with it."""

    state: State
    batches_committed: int
    quorum_id: int


class Offers:
    """What one worker offers now; a copy takes about ``mean_copy_s``."""

    def __init__(self, process: Process, mean_copy_s: Callable[[], float]) -> None:
        self.process = process
        self._mean_copy_s = mean_copy_s
        self._offered: dict[int, Fetched] = {}
        self._newest = -1
        self._early: list[tuple[int, Callable[[Fetched | PeerError], None]]] = []
        self._holders: list[tuple[int, Callable[[Fetched, float], None]]] = []  # by the step before

    def offer(self, step: int, state: Fetched) -> None:
        self._offered, self._newest = {step: state}, step
        early, self._early = self._early, []
        for wanted, receive in early:
            self.fetch(wanted, receive)

    def await_copy(self, above: int, receive: Callable[[Fetched, float], None]) -> None:
        """Wait for a copy of a step above ``above``, and how long its transfer takes."""
        self._holders.append((above, receive))

    def offer_copy(self, state: Fetched) -> None:
        """Send ``state`` as it is now to the holders that wait for it."""
        wanting = [each for each in self._holders if each[0] < state.state.step]
        for each in wanting:
            self._holders.remove(each)
            copy_s = self.process.chance.expovariate(1.0) * self._mean_copy_s()
            self.process.after(copy_s, each[1], state, copy_s)

    def retract(self) -> None:
        self._offered = {}

    def fetch(
        self, step: int, receive: Callable[[Fetched | PeerError], None], share: float = 1.0
    ) -> None:
        """Send a ``share`` of the state of ``step``, now or when it is offered."""
        if step in self._offered:
            copy_s = self.process.chance.expovariate(1.0) * self._mean_copy_s()
            self.process.after(share * copy_s, receive, self._offered[step])
        elif step < self._newest:
            receive(CheckpointError("simulated", f"step {step} is not served any more"))
        else:
            early = (step, receive)
            self._early.append(early)
            self.process.after(EARLY_S, self._refuse, early)

    def _refuse(self, early: tuple[int, Callable[[Fetched | PeerError], None]]) -> None:
        if early in self._early:
            self._early.remove(early)
            early[1](CheckpointError("simulated", f"step {early[0]} is not served"))
