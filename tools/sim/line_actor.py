"""A worker's calls and stream to its manager in a simulated world, and the news."""

from __future__ import annotations

import math
from collections.abc import Callable

from tools.sim.call import Call, Enter
from tools.sim.manager_actor import ManagerActor, OnNews, Reply, WorkerAnswer
from tools.sim.network import Network
from tools.sim.shared import Home
from tools.sim.world import Process
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote
from torchft_svc.core.quorum.manager.group import AnswerWorker, SentNews
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.core.quorum.worker.round import Round, WorkerCalls
from torchft_svc.core.route import AttachEnd, AttachRetry
from torchft_svc.errors import TorchFTError


class LineActor:
    """A worker's calls and stream to the manager that its group has now."""

    def __init__(
        self,
        process: Process,
        home: Home,
        group_rank: int,
        network: Network,
        round_: Round,
        on_news: OnNews,
        on_cut: Callable[[], None],
    ) -> None:
        self._process = process
        self._home = home
        self._group_rank = group_rank
        self._network = network
        self._on_news = on_news
        self._round = round_
        self._on_cut = on_cut
        self._arrives_at = 0.0  # of the last message: nothing overtakes it
        self._ends_at = -math.inf  # the end of the stream
        self._calls = WorkerCalls(process.name)
        self._call: Call | None = None  # the last one
        self._report: PhaseReport | None = None  # the last one that was sent
        self._retry = AttachRetry(process.world.chance(f"{process.name}/attach").random)
        self.lost_at = -math.inf  # when the last one has ended
        self._stream = 0  # the number of the one that is open, or being opened
        self.loses_next_answer = False

    def manager_name(self) -> str:
        manager = self._home.manager
        return manager.process.name if manager else ""

    def attach(self) -> None:
        """Open the stream to the manager, and again when it has ended."""
        self._stream += 1
        number, manager = self._stream, self._home.manager
        if manager is None or manager.process.is_dead:
            self.end()
        else:
            self._send(lambda manager: self._attached(manager, number))

    def end(self) -> None:
        """The manager is dead, or the connection to it."""
        latency_s = self._network.latency(self._process)
        self._ends_at = self._process.world.now + latency_s
        self._process.after(latency_s, self._ended, self._stream, AttachEnd.BROKEN)

    @property
    def changes_at(self) -> float:
        """The time at which the stream has ended, or is opened: messages may travel for long."""
        return max(self.lost_at, self._ends_at, self._arrives_at)

    def _ended(self, number: int, how: AttachEnd) -> None:
        if number != self._stream:  # its end is known already
            return
        self._stream += 1
        self.lost_at = self._process.world.now
        following = self._retry.ended(how, self.lost_at)
        broken = self._round.stream_lost() if following.is_broken else None
        cut = self._round.peers.stream_ended() if following.is_cut else None
        if broken or cut:  # otherwise nobody is to notice it
            self._on_cut()
        self._process.after(following.pause_s, self.attach)

    @property
    def last_round(self) -> int:
        return self._calls.last_round

    def report_phase(self, report: PhaseReport) -> None:
        signed = self._report = self._calls.sign_report(report)
        self._send(lambda manager: manager.receive_phase(self._group_rank, signed))

    def ask_to_drain(self, reason: str) -> None:
        self._send(lambda manager: manager.drain(reason))

    def ask(
        self,
        request: WorkerRequest,
        timeout_s: float,
        done: Callable[[AnswerWorker | TorchFTError], None],
    ) -> None:
        """Wait for the quorum."""
        signed = self._calls.sign_question(request)

        def answered(answer: WorkerAnswer) -> None:
            assert not isinstance(answer, AnswerVote)
            if isinstance(answer, AnswerWorker):
                assigned = answer.assignment
                num_groups = assigned.replica_world_size
                self._calls.record_answer(assigned.quorum_id, num_groups, answer.round)
            done(answer)

        def enter(manager: ManagerActor, left_s: float, reply: Reply) -> int:
            return manager.request_quorum(signed, left_s, reply)

        self._call_manager(timeout_s, enter, answered)

    def vote(
        self,
        vote: Vote,
        timeout_s: float,
        done: Callable[[AnswerVote | TorchFTError], None],
        stalls_s: float = 0.0,
    ) -> None:
        """Wait for the decision; ``stalls_s``: how much longer the vote is on its way."""
        signed = self._calls.sign_ballot(vote)

        def answered(answer: WorkerAnswer) -> None:
            assert not isinstance(answer, AnswerWorker)
            done(answer)

        def enter(manager: ManagerActor, left_s: float, reply: Reply) -> int:
            return manager.cast_vote(signed, left_s, reply)

        self._call_manager(timeout_s, enter, answered, stalls_s)

    def _call_manager(
        self,
        timeout_s: float,
        enter: Enter,
        done: Callable[[WorkerAnswer], None],
        stalls_s: float = 0.0,
    ) -> None:
        """One RPC, which ends by its deadline."""
        manager = self._home.manager
        self._call = Call(self._process, self._network, manager, timeout_s, done)
        if self.loses_next_answer:
            self.loses_next_answer = False
            self._call.on_answer = self.break_off
        self._call.start(enter, stalls_s)

    def break_off(self) -> None:
        """The connection is lost, although both ends live; it is opened again."""
        if self._process.is_dead or self._process.is_frozen:
            return
        self._send(self._detached)
        self.end()
        if self._call is not None:
            self._call.break_off()

    def _detached(self, manager: ManagerActor) -> None:
        manager.detach_worker(self._group_rank, self._process.name, "its stream broke")

    def _send(self, what: Callable[[ManagerActor], None]) -> None:
        manager = self._home.manager
        if manager is None or manager.process.is_dead:
            return
        now = self._process.world.now
        at = max(self._arrives_at, now + self._network.latency(self._process))
        self._arrives_at = at
        manager.process.after(at - now, self._arrive, manager, what)

    def _arrive(self, manager: ManagerActor, what: Callable[[ManagerActor], None]) -> None:
        if not self._process.is_dead:
            what(manager)

    def _attached(self, manager: ManagerActor, number: int) -> None:
        try:
            manager.attach_worker(self._group_rank, self._process.name, self._receive)
        except TorchFTError:
            self._process.after(0.0, self._ended, number, AttachEnd.REFUSED)
        else:
            self._process.after(0.0, self._retry.received)
            if self._report is not None:
                manager.receive_phase(self._group_rank, self._report)

    def _receive(self, news: SentNews) -> None:
        self._process.after(self._network.latency(self._process), self._on_news, news)
