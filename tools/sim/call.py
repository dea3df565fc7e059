"""One RPC from a worker to its manager in a simulated world: it ends by its deadline."""

from __future__ import annotations

from collections.abc import Callable

from tools.sim.manager_actor import ManagerActor, Reply, WorkerAnswer
from tools.sim.network import Network
from tools.sim.world import Process
from torchft_svc.errors import DeadlineExceeded, Unreachable

# Enters the request at the manager; returns the number to cancel it by.
Enter = Callable[[ManagerActor, float, Reply], int]


class Call:
    """Ends with an answer, at the deadline, or when the manager dies: whichever is first.

    The manager learns a moment later that the worker gave up or died, so a request that was long on
    its way may take effect although nobody waits for it any more, as with the real transport.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        manager: ManagerActor | None,
        timeout_s: float,
        done: Callable[[WorkerAnswer], None],
    ) -> None:
        self._process = process
        self._network = network
        self._manager = manager
        self._timeout_s = timeout_s
        self._done: Callable[[WorkerAnswer], None] | None = done
        self._caller: int | None = None
        self._arrives_at = 0.0
        self._is_answered = False
        self.on_answer: Callable[[], None] | None = None  # when it is sent

    def start(self, enter: Enter, stalls_s: float = 0.0) -> None:
        """``stalls_s``: how much longer than usual the request is on its way."""
        manager, process = self._manager, self._process
        if manager is None or manager.process.is_dead:
            process.after(self._latency(), self._finish, _unreachable())
            return
        self._expiry = process.after(self._timeout_s, self._give_up)
        manager.process.on_death.append(self._manager_died)
        process.on_death.append(self._cancel)
        delay_s = self._latency() + stalls_s
        self._arrives_at = process.world.now + delay_s
        manager.process.after(delay_s, self._arrive, manager, enter)

    def _arrive(self, manager: ManagerActor, enter: Enter) -> None:
        self._caller = enter(manager, self._timeout_s, self._answer)

    def _answer(self, answer: WorkerAnswer) -> None:
        self._is_answered = True
        if self.on_answer is not None:
            self._process.after(0.0, self.on_answer)
        self._process.after(self._latency(), self._finish, answer)

    def _give_up(self) -> None:
        self._cancel()
        self._finish(DeadlineExceeded("an answer", self._timeout_s, "none came"))

    def break_off(self) -> None:
        """The connection is gone, with an answer that is on its way."""
        if self._done is not None and self._manager is not None:
            if not self._manager.process.is_dead:
                self._cancel()
            self._finish(_unreachable())

    def _cancel(self) -> None:
        """Cancel the call; the cancellation does not overtake the request."""
        assert self._manager is not None
        now = self._process.world.now
        delay_s = max(self._arrives_at - now, 0.0) + self._latency()
        self._manager.process.after(delay_s, self._cancelled, self._manager)

    def _cancelled(self, manager: ManagerActor) -> None:
        if self._caller is not None:
            manager.cancel_call(self._caller)

    def _manager_died(self) -> None:
        if self._is_answered:  # what was sent arrives before the news that its sender is gone
            return
        self._process.after(self._latency(), self._finish, _unreachable())

    def _finish(self, answer: WorkerAnswer) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        if self._manager is not None and not self._manager.process.is_dead:
            self._expiry.cancelled = True
            self._manager.process.on_death.remove(self._manager_died)
            self._process.on_death.remove(self._cancel)
        done(answer)

    def _latency(self) -> float:
        return self._network.latency(self._process)


def _unreachable() -> Unreachable:
    return Unreachable("manager", "simulated", "it is gone or silent")
