"""The commit barrier of a replica group: all its workers vote, and all get the same decision.

One no decides at once, a yes needs all. While a quorum stays in force (rule E1), the barriers of
its steps follow one another in one round; the decision on a step says whether the next one belongs
to the same quorum (rule E2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torchft_svc.core.quorum.term import Fate, fate
from torchft_svc.core.quorum.types import Vote, WorkerRequest
from torchft_svc.errors import CommitFailed, RequestRefused, TorchFTError


@dataclass(frozen=True, slots=True)
class AnswerVote:
    """Send the decision to the worker whose call is ``caller``."""

    caller: int
    should_commit: bool
    fate: Fate = Fate.ABORTED


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """Send the error to the worker whose call is ``caller``."""

    caller: int
    error: TorchFTError


VoteAnswer = AnswerVote | RefuseWorker


@dataclass(frozen=True, slots=True)
class EndedBarrier:
    """The commit barrier of ``round``, about one of ``steps``.

    ``decision`` is None if there was none, because of ``reason``; then nobody received a yes.
    """

    round: int
    steps: frozenset[int]
    decision: bool | None
    reason: str = ""
    fate: Fate = Fate.ABORTED

    def concerns(self, round_: int, step: int) -> bool:
        """Whether a vote belongs here; ``round_`` is 0 if the voter does not know rounds."""
        return round_ in (0, self.round) and step in self.steps


class CommitBarrier:
    """One barrier after the other, for ``world_size`` workers.

    Rounds before ``first_round`` are those of an earlier manager, which died: workers may still
    vote in one, until the group asks here, or until all have gone on to the next step of that
    round, which then is one of this manager.
    """

    def __init__(self, world_size: int, first_round: int) -> None:
        self._world_size = world_size
        self._round = first_round - 1
        self.is_inherited = True  # a vote may belong to a round of an earlier manager
        self._went_on_to: dict[int, int] = {}  # by group rank, without a question
        self._denied_from = math.inf  # no step from this one on is committed in the round
        self._is_held = False  # a yes of all is not enough yet
        self._votes: dict[int, tuple[Vote, int]] = {}  # by group rank, with their callers
        self._steps: frozenset[int] = frozenset()  # that a vote in this round may name
        self._decision: bool | None = None
        self._fate = Fate.ABORTED
        # The last barriers that are over; no worker has received another quorum since.
        self._ended: tuple[EndedBarrier, ...] = ()

    def announce_round(self, round_: int) -> None:
        """The group asks for the quorum of ``round_``: votes of earlier rounds count no longer."""
        self._round, self.is_inherited = round_, False

    def open_round(self, steps: Iterable[int]) -> None:
        """The workers have received the quorum of the round, at one of these ``steps``."""
        self._steps = frozenset(steps)
        self._denied_from = math.inf
        self._ended = ()

    # -- queries ---------------------------------------------------------------------------------

    def voters(self) -> Collection[int]:
        """The group ranks that have voted."""
        return self._votes.keys()

    def awaits_decision(self, group_rank: int) -> bool:
        """Whether this worker waits for the decision."""
        return group_rank in self._votes and self._decision is None

    # -- votes -----------------------------------------------------------------------------------

    def count_vote(
        self, vote: Vote, caller: int, asking: Collection[WorkerRequest]
    ) -> list[VoteAnswer]:
        """Count the vote of a worker, and return the answers to all that have one now.

        ``asking``: the requests of those that ask for the next quorum.
        After a no its voter may ask again before the others vote: they receive the decision.

        A vote in a round of an earlier manager is accepted: the step that other workers ask for by
        now, or vote on, shows the decision that they received; if they have received none, they
        vote again, too.

        Raises: RequestRefused: the vote belongs to another round, or contradicts an earlier one.
        """
        late = self._late_answer(vote, caller, asking)
        if late is not None:
            return [late]
        answers = self._begin_barrier_of(vote)
        if not self._is_of_earlier(vote):
            self.check_round(vote)
        elif asking:
            was_committed = any(_shows_commit(each, vote) for each in asking)
            return [AnswerVote(caller, was_committed)]
        earlier = self._votes.get(vote.group_rank)
        if earlier and (earlier[0].worker_id, earlier[0].should_commit) != (
            vote.worker_id,
            vote.should_commit,
        ):
            raise RequestRefused(
                f"group rank {vote.group_rank} has already voted in round {self._round}"
            )
        if self._decision is not None:
            self._votes[vote.group_rank] = (vote, caller)
            return [*answers, AnswerVote(caller, self._decision, self._fate)]
        if earlier:
            answers.append(RefuseWorker(earlier[1], CommitFailed(newer_call(vote.group_rank))))
        self._votes[vote.group_rank] = (vote, caller)
        if not vote.should_commit or self._is_denied():
            self._decide(False)
        elif len(self._votes) == self._world_size and not self._is_held:
            self._decide(True)
        if self._decision is not None:
            answers += self._answers()
        return answers

    def step_begun(self, group_rank: int, step: int) -> list[VoteAnswer]:
        """A worker has begun ``step`` without a question, or will.

        In a round of an earlier manager that shows what this had decided about the step before:
        those that still vote on that receive the same. The worker may wait for them in a collective
        of the group before it votes.
        """
        if not self.is_inherited:
            return []
        self._went_on_to[group_rank] = step
        if self._decision is not None or step - 1 not in self._voted_steps():
            return []
        return self._adopt_commit(Fate.CONTINUES)

    def deny_steps(self, step: int) -> list[VoteAnswer]:
        """Commit no step from ``step`` on in this round: answer votes on one with no.

        In a round of an earlier manager that may have answered one of them with yes, until all have
        voted, or one shows what it has received.
        """
        self._denied_from = min(self._denied_from, step)
        if self._decision is not None or not self._is_denied():
            return []
        self._decide(False)
        return self._answers()

    def hold_yes(self) -> None:
        """Decide nothing but no until `release_yes`."""
        self._is_held = True

    def release_yes(self) -> list[VoteAnswer]:
        """Decide as usual again: what may be in vain has been denied."""
        was_held, self._is_held = self._is_held, False
        if not was_held or self._decision is not None or len(self._votes) < self._world_size:
            return []
        self._decide(True)
        return self._answers()

    def drop_votes(self, reason: str) -> list[VoteAnswer]:
        """End the barrier, or that of the next step if the group has gone on with it; workers that
        still wait for a decision get the ``reason``."""
        self._begin_next_step()
        undecided = self._decision is None
        dropped: list[VoteAnswer] = [
            RefuseWorker(who, CommitFailed(reason)) for _, who in self._votes.values() if undecided
        ]
        self._end(reason)
        return dropped

    def withdraw_vote(self, caller: int) -> list[VoteAnswer]:
        """A worker gave up waiting for the decision; the others must not wait for it."""
        for rank, (_, waiting) in list(self._votes.items()):
            if waiting == caller and self._decision is None:
                del self._votes[rank]
                return self.drop_votes(f"group rank {rank} gave up waiting")
        return []

    def answer_inherited(self, asked: WorkerRequest) -> list[VoteAnswer]:
        """Answer the votes in a round of an earlier manager as that has answered ``asked``, which
        has asked for the next quorum since."""
        if not self.is_inherited or self._decision is not None:
            return []
        votes, self._votes = self._votes, {}
        return [AnswerVote(who, _shows_commit(asked, vote)) for vote, who in votes.values()]

    # -- the rules -------------------------------------------------------------------------------

    def _late_answer(
        self, vote: Vote, caller: int, asking: Collection[WorkerRequest]
    ) -> VoteAnswer | None:
        """The answer for a worker whose barrier is over; None if it is not."""
        if self._is_overtaken(vote):
            goes_on = self._is_next_begun(vote) or any(
                other.should_commit for other, _ in self._votes.values()
            )
            return AnswerVote(caller, True, Fate.CONTINUES if goes_on else Fate.ABORTED)
        ended = self.find_ended(vote, asking)
        return None if ended is None else answer_late(vote, caller, ended)

    def find_ended(self, vote: Vote, asking: Collection[WorkerRequest]) -> EndedBarrier | None:
        """The barrier that is over and that ``vote`` belongs to, of a worker that has not asked
        again."""
        if any(each.group_rank == vote.group_rank for each in asking):
            return None
        late = (each for each in self._ended if each.concerns(vote.round, vote.step))
        return next(late, None)

    def _is_overtaken(self, vote: Vote) -> bool:
        """Whether another worker is in the next step of a round of an earlier manager already,
        which shows that all received a yes. A worker that votes no was not among them."""
        is_next_there = self._is_next_begun(vote) or vote.step + 1 in self._voted_steps()
        return self._is_of_earlier(vote) and vote.should_commit and is_next_there

    def _is_next_begun(self, vote: Vote) -> bool:
        return vote.step + 1 in self._went_on_to.values()

    def _is_denied(self) -> bool:
        """Whether nobody has committed the step that is voted on, and nobody can."""
        is_whole = len(self._votes) == self._world_size
        is_over = max(self._voted_steps(), default=-1) >= self._denied_from
        return is_over and (is_whole or not self.is_inherited)

    def _voted_steps(self) -> set[int]:
        return {vote.step for vote, _ in self._votes.values()}

    def _decide(self, decision: bool) -> None:
        self._decision = decision
        self._fate = fate(decision, [vote.wish for vote, _ in self._votes.values()])

    def _answers(self) -> list[VoteAnswer]:
        assert self._decision is not None
        return [AnswerVote(who, self._decision, self._fate) for _, who in self._votes.values()]

    def _begin_barrier_of(self, vote: Vote) -> list[VoteAnswer]:
        """Begin the barrier that ``vote`` is about, if it is that of the next step.

        In a round of an earlier manager, the vote shows what that had decided about the step
        before; workers whose answer was lost may still vote on that. One that votes no may have no
        quorum, because its question has failed, and shows no more than that the step was committed.
        """
        if vote.step - 1 not in self._voted_steps():
            return []
        if self._decision is None and self._is_of_earlier(vote):
            return self._adopt_commit(Fate.CONTINUES if vote.should_commit else Fate.ABORTED)
        self._begin_next_step()
        return []

    def _adopt_commit(self, fate: Fate) -> list[VoteAnswer]:
        """Answer the votes as the earlier manager did, which had decided to commit."""
        self._decision, self._fate = True, fate
        answers = self._answers()
        if fate is Fate.CONTINUES:
            self._begin_next_step()
        else:
            self._end()
        return answers

    def _begin_next_step(self) -> None:
        if not (self._decision and self._fate is Fate.CONTINUES):
            return
        step, round_ = max((vote.step, vote.round) for vote, _ in self._votes.values())
        self._end()
        self._steps = frozenset({step + 1})
        if self.is_inherited:  # all go on, and what came before is known
            self._round, self.is_inherited = round_, False

    def _end(self, reason: str = "") -> None:
        """End the barrier, and remember how it ended for a late vote."""
        voted = [vote for vote, _ in self._votes.values()]
        steps = self._steps or frozenset(vote.step for vote in voted if self._decision)
        if steps:
            round_ = voted[0].round if self.is_inherited and voted else self._round
            ended = EndedBarrier(round_, steps, self._decision, reason, self._fate)
            self._ended = (*self._ended[-1:], ended)
        self._votes, self._steps = {}, frozenset()
        self._decision, self._fate = None, Fate.ABORTED

    def check_round(self, vote: Vote) -> None:
        if not self._steps:
            raise RequestRefused("there is nothing to vote on: no quorum yet, or a new one is due")
        if vote.round not in (0, self._round):
            raise RequestRefused(
                f"the vote belongs to round {vote.round}, this is round {self._round}"
            )
        if vote.step not in self._steps:
            expected = " or ".join(map(str, sorted(self._steps)))
            raise RequestRefused(
                f"the vote is for step {vote.step}, the group is at step {expected}"
            )

    def _is_of_earlier(self, vote: Vote) -> bool:
        """Whether it belongs to a round of an earlier manager."""
        return self.is_inherited and vote.round > 0


def newer_call(group_rank: int) -> str:
    """The reason for a call that the same worker has repeated."""
    return f"a newer call of group rank {group_rank} has taken the place of this one"


def answer_late(vote: Vote, caller: int, ended: EndedBarrier) -> VoteAnswer:
    """The answer to a vote that belongs to a barrier which has ended.

    A worker that votes no was not in a barrier that decided yes: it is new, and had no quorum.
    """
    if ended.decision is None:
        return RefuseWorker(caller, CommitFailed(ended.reason))
    committed = ended.decision and vote.should_commit
    return AnswerVote(caller, committed, ended.fate if committed else Fate.ABORTED)


def _shows_commit(asked: WorkerRequest, vote: Vote) -> bool:
    """Whether a worker's next request shows that the step of ``vote`` was committed.

    Its step also grows with a heal. But a worker that could not heal at the same time has voted no,
    and one no is enough.
    """
    return vote.should_commit and asked.step > vote.step
