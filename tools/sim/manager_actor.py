"""A group's manager in a simulated world: the real barriers, driven as the service drives them."""

from __future__ import annotations

import math
from collections.abc import Callable

from tools.sim.invariants import Invariants, must
from tools.sim.link_actor import LinkActor, LinkSite, Outcome
from tools.sim.trace import Trace
from tools.sim.world import Process
from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import Answer, AnswerWorker, Group, SentNews
from torchft_svc.core.quorum.manager.lighthouse_link import ManagerLinkConfig
from torchft_svc.core.quorum.manager.shell import GroupShell
from torchft_svc.core.quorum.session_messages import Drain, Leave
from torchft_svc.core.quorum.types import GroupRequest, Quorum, Vote, WorkerRequest
from torchft_svc.errors import CommitFailed, TorchFTError

FIRST_ROUND = 1 << 40
# How long the workers have to end by themselves when their group is killed.
KILL_NEWS_S = 0.5

WorkerAnswer = AnswerWorker | AnswerVote | TorchFTError
Reply = Callable[[WorkerAnswer], None]
OnNews = Callable[[SentNews], None]


class ManagerActor(GroupShell):
    """One life of a group's manager."""

    def __init__(
        self,
        process: Process,
        site: LinkSite,
        config: ManagerLinkConfig,
        on_killed: Callable[[], None],
        invariants: Invariants,
        trace: Trace,
    ) -> None:
        self.process = process
        self._job = site.job
        self._name = site.name
        self._on_killed = on_killed
        self._invariants = invariants
        self._trace = trace
        now = process.world.now
        # Each life begins far from the others; here it is always below the one before.
        first_round = FIRST_ROUND - int(now * 1000)
        group = Group(config.group_world_size, first_round, now, look_s=math.inf)
        beat = lambda: group.make_beat(process.world.now)  # noqa: E731
        self.link = LinkActor(
            process, site, config, self.receive_news, self.receive_outcome, beat, group.reached
        )
        self.link.on_change = self.change_link
        super().__init__(group, self.link.machine, lambda: process.world.now, process.after)
        self._replies: dict[int, Reply] = {}
        self._barriers: dict[int, tuple[int, int]] = {}  # round and step, by the callers that vote
        self._askers: dict[int, str] = {}  # the workers that ask, by caller
        # The last life whose workers asked beside those of the one before: they may count as one
        # life, so that the end of one is noticed by the deadline of the others' requests only.
        self._mixed_life = 0
        self._workers: dict[int, tuple[str, OnNews]] = {}  # by group rank
        self._formed: Quorum | None = None  # the last one
        # Ends the manager, when one worker has received a yes, or its quorum.
        self.on_answer: Callable[[AnswerVote | AnswerWorker], None] = lambda answer: None
        if config.resumed is not None:
            self.resume_term()

    # -- workers ---------------------------------------------------------------------------------

    def attach_worker(self, group_rank: int, worker_id: str, on_news: OnNews) -> None:
        orders = self.group.worker_attached(group_rank, worker_id)
        self._workers[group_rank] = (worker_id, on_news)
        self._execute(orders)

    def is_attached(self, worker_id: str) -> bool:
        return any(attached == worker_id for attached, _ in self._workers.values())

    def detach_worker(self, group_rank: int, worker_id: str, reason: str) -> None:
        if self._workers.get(group_rank, ("",))[0] != worker_id:
            return
        del self._workers[group_rank]
        orders = self.group.worker_detached(group_rank, worker_id, reason, self._now())
        self._execute(orders)
        # Workers of a later life of the group do not wait for one of a life before, nor does one
        # whose request is held: it asks as soon as the worker before it is known to be gone.
        all_released = (
            not orders
            or _life(worker_id) <= self._mixed_life
            or all(
                self.group.held_rank(caller) is not None
                or (caller in self._askers and _life(self._askers[caller]) > _life(worker_id))
                for caller in self._replies
            )
        )
        must(all_released, "I5", f"{self.process.name}: {worker_id} is gone, and others still wait")

    def receive_phase(self, group_rank: int, report: PhaseReport) -> None:
        self._execute(self.group.phase_reported(group_rank, report, self._now()))
        if self.group.is_whole:
            self.link.start_proving()

    def request_quorum(self, request: WorkerRequest, timeout_s: float, reply: Reply) -> int:
        """Ask for the quorum; returns the number of the call, for `cancel_call`."""
        self.link.start_proving()
        caller = self._begin_call("quorum", timeout_s, reply)
        self._askers[caller] = request.worker_id
        lives = {_life(each) for each in self._askers.values()}
        if len(lives) > 1:
            self._mixed_life = max(lives)
        now = self._now()
        self._execute(self.group.quorum_requested(request, caller, timeout_s, now))
        return caller

    def cast_vote(self, vote: Vote, timeout_s: float, reply: Reply) -> int:
        """Vote; returns the number of the call, for `cancel_call`."""
        if vote.should_commit:
            barrier = vote.round, vote.step
            self._invariants.identity.voted_yes(self._name, barrier, vote.group_rank)
        caller = self._begin_call("commit vote", timeout_s, reply)
        self._barriers[caller] = vote.round, vote.step
        now = self._now()
        self._execute(self.group.vote_received(vote, caller, timeout_s, now))
        return caller

    def cancel_call(self, caller: int) -> None:
        if caller in self._replies:
            self._end_call(caller, CommitFailed("cancelled"))
            self._execute(self.group.call_withdrawn(caller))

    def _begin_call(self, action: str, timeout_s: float, reply: Reply) -> int:
        caller = next(self._callers)
        self._replies[caller] = reply
        self._invariants.waits.begin_wait((self, caller), self.process, action, timeout_s)
        return caller

    def _end_call(self, caller: int, answer: WorkerAnswer) -> None:
        self._invariants.waits.answered((self, caller), "a manager answers a worker")
        self._askers.pop(caller, None)
        barrier = self._barriers.pop(caller, (0, 0))
        is_yes = isinstance(answer, AnswerVote) and answer.should_commit
        if is_yes:
            self._invariants.identity.decided(self._name, barrier, self.group.world_size)
        self._replies.pop(caller)(answer)
        if isinstance(answer, AnswerWorker) or (isinstance(answer, AnswerVote) and is_yes):
            self.on_answer(answer)

    def drain(self, reason: str) -> None:
        self.receive_news(Drain(reason))

    def receive_outcome(self, round_: int, outcome: Outcome) -> None:
        """The lighthouse has answered the request of ``round_``, or cannot be asked."""
        if isinstance(outcome, Quorum):
            self._formed = outcome
        super().receive_outcome(round_, outcome)

    # -- orders ----------------------------------------------------------------------------------

    def _is_dead(self) -> bool:
        return self.process.is_dead  # maybe since it has sent a decision (`on_answer`)

    def _ask_lighthouse(self, request: GroupRequest, timeout_s: float) -> None:
        self.link.feed_soon(lambda machine, now: machine.ask_quorum(request, timeout_s, now))

    def _withdraw_request(self, round_: int) -> None:
        self.link.feed_soon(lambda machine, now: machine.withdraw_round(round_, now))

    def _leave_lighthouse(self, leave: Leave) -> None:
        self._trace.record(self.process.name, f"leaves: {leave.reason}")
        self.link.leave(leave)

    def _answer_call(self, answer: Answer) -> None:
        if isinstance(answer, AnswerWorker):
            assert self._formed is not None
            part, group_rank = answer.assignment, answer.request.group_rank
            self._invariants.agreement.assigned(self._job, self._formed, part, group_rank)
        self._end_call(answer.caller, answer.error if isinstance(answer, RefuseWorker) else answer)

    def _send_news(self, group_ranks: tuple[int, ...], news: SentNews) -> None:
        for group_rank in group_ranks:
            self._workers[group_rank][1](news)

    def _end_group(self) -> None:
        self.process.after(KILL_NEWS_S, self._on_killed)


def _life(worker_id: str) -> int:
    """The number of the worker's life, which all workers that start together have."""
    return int(worker_id.rpartition(".")[2])
