"""One replica group's barriers: its workers arrive, and all get one answer or one error (rule M7).

Two barriers follow each other in every round: the *quorum* barrier (all workers ask, the group asks
the lighthouse once, all are answered) and the *commit* barrier (all workers vote, all get the same
decision). A round has a number, told with the quorum and repeated in the vote, so that a late or
repeated vote can not count in another round.

A quorum barrier that fails has failed for the workers that have not reached it yet, too: each gets
the same error when it comes. Otherwise it would wait for the others, which have continued with the
step and may wait for it in a collective of the group.

A group rank belongs to the worker whose stream is open or, without a stream, that asked last:
anybody who reaches the manager may claim a rank. The question of another worker is held until the
owner is gone, which makes the other its successor, or gives a sign of life.
"""

from __future__ import annotations

from torchft_svc.core.quorum.activity import PhaseReport
from torchft_svc.core.quorum.assignment import assign
from torchft_svc.core.quorum.layout import group_layout
from torchft_svc.core.quorum.manager.commit_barrier import CommitBarrier, newer_call
from torchft_svc.core.quorum.manager.ended import EndedBarriers
from torchft_svc.core.quorum.manager.group_orders import (
    AnswerWorker,
    AskLighthouse,
    AwaitOwner,
    Order,
    RefuseWorker,
    StopAsking,
)
from torchft_svc.core.quorum.session_messages import Leave
from torchft_svc.core.quorum.types import Quorum, Vote, WorkerRequest
from torchft_svc.errors import (
    ConfigError,
    GroupLeft,
    QuorumFailed,
    RequestRefused,
    TorchFTError,
)

# Of each rank: the worker that is there, and those that come after it. Anybody may show up.
MAX_SHOWN = 4


class Group:
    """The barriers of a group of ``world_size`` workers; ``commits`` are those of their votes.

    A caller is a number of the shell's choice, unique among the waiting requests. ``first_round``
    must be far from the rounds of an earlier manager of the same workers, above or below them.
    """

    def __init__(self, world_size: int, first_round: int = 1) -> None:
        if world_size < 1:
            raise ConfigError("group_world_size", world_size, "a group has at least one worker")
        self.world_size = world_size
        self._round = first_round - 1
        self._asking = False
        self._requests: dict[int, tuple[WorkerRequest, int]] = {}  # by group rank
        self.commits = CommitBarrier(world_size, first_round)
        self._formed: tuple[Quorum, str] | None = None  # sent last, and the group's id in it
        self._over = EndedBarriers()
        self._rounds_before: dict[int, int] = {}  # by group rank, see `reported`
        self._workers: dict[int, str] = {}
        self._voters: dict[int, str] = {}  # the last ones; they may have asked an earlier manager
        self._lives: dict[int, tuple[str, int]] = {}  # each rank's worker, and the life it is of
        self._shown: dict[int, dict[str, int]] = {}  # the lives of the last ones that showed up
        self._attached: dict[int, str] = {}
        self._owners: dict[int, str] = {}  # the worker that each group rank belongs to
        self._heirs: dict[int, tuple[WorkerRequest, int]] = {}  # questions held, by group rank
        self._suspects: dict[int, int] = {}  # group ranks whose owner may be dead, see `AwaitOwner`
        self._restarted = False
        self._is_resumed = False  # in the term of a manager before, until the group asks
        self._drain_reason: str | None = None
        self._all_gone_since = False  # the drain; whoever comes then may be of the next life
        self._ended_workers: dict[int, tuple[str, str]] = {}  # told to end: worker id and why
        self._checkpoint_addresses: dict[int, str] = {}

    def resume(self) -> None:
        """A manager before had a quorum for the group, which continues in it: no step is committed
        until it is known whether that is still in force (`CommitBarrier.release`)."""
        self._is_resumed = True
        self.commits.hold()

    # -- who is there ----------------------------------------------------------------------------

    def attached(self, group_rank: int, worker_id: str) -> bool:
        """A worker has opened its stream; returns whether it belongs to the next life of a group
        that was drained: it is not known, and all others are gone.

        Their streams may only have broken: those that come back have to end, too.

        Raises: RequestRefused: the rank does not exist, or belongs to another worker.
        """
        self._check_rank(group_rank)
        self._show(group_rank, worker_id)
        if not self.belongs_to(group_rank, worker_id):
            raise self._taken(group_rank, "is there")
        is_known = self._lives.get(group_rank, ("",))[0] == worker_id
        is_next = self._all_gone_since and not self._attached and not is_known
        if is_next:
            self._drain_reason = None  # the reason was for the workers that have ended
        self._attached[group_rank] = self._owners[group_rank] = worker_id
        self._suspects.pop(group_rank, None)
        self._note_life(group_rank, worker_id)
        return is_next

    def detached(
        self, group_rank: int, worker_id: str, reason: str, *, ends: bool = False
    ) -> tuple[Order, ...]:
        """A worker's stream has ended: the workers that wait for it are told, and the group leaves.

        ``ends``: its program ends on purpose. The next worker with this rank makes this another
        incarnation of the group.
        """
        if self._attached.get(group_rank) != worker_id:
            return ()
        del self._attached[group_rank]
        self._rounds_before.pop(group_rank, None)
        self._all_gone_since = not self._attached
        self._workers.setdefault(group_rank, worker_id)  # it may only have been frozen
        self._restarted = True
        gone = f"group rank {group_rank} is gone: {reason}"
        orders: list[Order] = [StopAsking(self._round)] if self._asking else []
        self._asking = False
        orders += self._end_the_rest()
        if self._is_missed(group_rank, worker_id):
            orders += self._fail_barrier(QuorumFailed(gone))
        orders += self.commits.drop(gone)
        orders.append(Leave(gone, ends=ends))
        return (*orders, *self._give_away(group_rank))

    def belongs_to(self, group_rank: int, worker_id: str) -> bool:
        """Whether no other worker is known to have this rank."""
        return self._owners.get(group_rank, worker_id) == worker_id

    def owner_was_silent(self, group_rank: int, number: int) -> tuple[Order, ...]:
        """For as long as `AwaitOwner` says: it is dead, unless it has given a sign of life
        since."""
        if self._suspects.get(group_rank) != number:
            return ()
        return self._give_away(group_rank)

    def _give_away(self, group_rank: int) -> tuple[Order, ...]:
        """The rank belongs to the worker that waits for it, or comes next."""
        self._owners.pop(group_rank, None)
        self._suspects.pop(group_rank, None)
        heir = self._heirs.pop(group_rank, None)
        return self.quorum_requested(*heir) if heir else ()

    def _hold(self, request: WorkerRequest, caller: int) -> tuple[Order, ...]:
        """Another worker asks with a rank that is taken: while it is not known whether the owner
        lives, it may be its successor."""
        rank = request.group_rank
        if rank in self._requests or self.commits.waits(rank):
            raise self._taken(rank, "already waits")
        held = self._heirs.get(rank)
        if held and held[0].worker_id != request.worker_id:
            raise self._taken(rank, "is there")
        self._heirs[rank] = (request, caller)
        orders: list[Order] = []
        if held:
            orders.append(RefuseWorker(held[1], QuorumFailed(newer_call(rank))))
        if rank not in self._attached and self._owners[rank] and rank not in self._suspects:
            self._suspects[rank] = caller
            orders.append(AwaitOwner(rank, caller))
        return tuple(orders)

    def _refuse_heir(self, group_rank: int) -> list[Order]:
        """The owner of the rank lives."""
        self._suspects.pop(group_rank, None)
        heir = self._heirs.pop(group_rank, None)
        return [RefuseWorker(heir[1], self._taken(group_rank, "is there"))] if heir else []

    def _is_missed(self, group_rank: int, worker_id: str) -> bool:
        """Whether the workers in the quorum barrier wait for this one.

        They do not if all of them belong to a later life of the group: the end of a worker may be
        noticed after the first question of the next life.
        """
        newest, life = self._lives.get(group_rank, (worker_id, 0))
        life -= newest != worker_id
        return any(self._lives[rank][1] <= life for rank in self._requests)

    def _show(self, group_rank: int, worker_id: str) -> None:
        """A worker has shown up, let in or not: one that comes after another one with its rank
        begins the group's next life, unless others have; a life may be too short for some ranks."""
        shown = self._shown.setdefault(group_rank, {})
        if worker_id in shown:
            return
        newest = max((max(each.values(), default=0) for each in self._shown.values()), default=0)
        shown[worker_id] = max(newest, max(shown.values()) + 1) if shown else newest
        if len(shown) > MAX_SHOWN:
            del shown[next(iter(shown))]

    def _note_life(self, group_rank: int, worker_id: str) -> None:
        """The worker is let in."""
        if group_rank not in self._lives or self._lives[group_rank][0] != worker_id:
            self._show(group_rank, worker_id)
            self._lives[group_rank] = worker_id, self._shown[group_rank][worker_id]

    def drain(self, reason: str) -> tuple[Order, ...]:
        """The group leaves for good when all workers have finished their step."""
        self._drain_reason = self._drain_reason or reason
        self._all_gone_since = False
        # Where a quorum is asked for already, one with this group may be on its way, and has to be
        # honoured: the lighthouse's last word comes as an input, as always.
        return (self._leave(),) if self._asking else tuple(self._end_the_rest())

    def _end_the_rest(self) -> list[Order]:
        """If a worker is gone, so that the group has left, the others are told to end as soon as
        all of them ask."""
        left = self._attached.keys()
        is_short = self._restarted and bool(left) and left <= self._requests.keys()
        if self._drain_reason is None or not is_short:
            return []
        return self._end_workers(self._drain_reason)

    def _end_workers(self, reason: str) -> list[Order]:
        """Tell all that ask; a worker that misses it is told again."""
        self._ended_workers = {
            rank: (each.worker_id, reason)
            for rank, (each, _) in self._requests.items()
            if each.worker_id
        }
        for rank in self._requests.keys() - self._attached.keys():
            self._owners.pop(rank, None)
        return self._refuse_requests(GroupLeft(reason))

    def _leave(self) -> Leave:
        """In a term the others may be in a step with this group, unless all have agreed to ask."""
        assert self._drain_reason is not None
        requests = [request for request, _ in self._requests.values()]
        # The manager that has formed their quorum may have died.
        may_be = any(request.last_quorum_id for request in requests)
        in_term = self._formed[0].steady if self._formed else may_be
        knows = not in_term or all(request.agreed for request in requests)
        return Leave(self._drain_reason, between_steps=knows, ends=True)

    # -- the quorum barrier ----------------------------------------------------------------------

    def quorum_requested(self, request: WorkerRequest, caller: int) -> tuple[Order, ...]:
        """A worker asks; when all have asked, the group asks the lighthouse.

        Raises: RequestRefused: the rank does not exist, or is taken by another worker that waits.
        """
        self._check_rank(request.group_rank)
        request.check()
        self._show(request.group_rank, request.worker_id)
        if not self.belongs_to(request.group_rank, request.worker_id):
            return self._hold(request, caller)
        orders = self._enter_barrier(request, caller)
        return (*self._refuse_heir(request.group_rank), *orders)

    def _enter_barrier(self, request: WorkerRequest, caller: int) -> tuple[Order, ...]:
        told = self._ended_workers.get(request.group_rank)
        if told and told[0] == request.worker_id and self._restarted:
            # Its answer was lost, and a peer that was told has ended: no other worker will ask.
            return (RefuseWorker(caller, GroupLeft(told[1])),)
        waiting = self._requests.get(request.group_rank)
        late = self._answer_late_question(request, caller)
        if late is not None:
            return (late,)
        orders: list[Order] = []
        orders += self.commits.end_inherited(request) or self.commits.drop(
            f"group rank {request.group_rank} asked for a new quorum instead of voting"
        )
        if waiting and request.question > waiting[0].question > 0:
            # It has given up its question before, which is not known here yet.
            orders += self._give_up_barrier(request.group_rank)
            waiting = None
        if waiting:
            # The same worker asks again: its first call was lost on the way back.
            orders.append(RefuseWorker(waiting[1], QuorumFailed(newer_call(request.group_rank))))
        self._requests[request.group_rank] = (request, caller)
        if self._asking:
            if waiting and request == waiting[0]:
                return tuple(orders)
            # Its request has changed, so what the lighthouse knows is out of date.
            orders.append(StopAsking(self._round))
            self._asking = False
        self._meet(request)
        orders += self._refuse_answered()
        if len(self._requests) < self.world_size:
            return (*orders, *self._end_the_rest())
        if self._drain_reason is not None:
            return (*orders, self._leave(), *self._end_workers(self._drain_reason))
        return (*orders, self._ask())

    def quorum_formed(self, round_: int, quorum: Quorum, replica_id: str) -> tuple[Order, ...]:
        """The lighthouse has answered the question of ``round_``, in which the group has this id.

        After a heal that failed for some of them, workers may be at different steps. Then the group
        has asked as one that is behind, and all its workers heal again. If it is not behind, nobody
        can say which worker is right, and all get the error. A heal may also lead to a lower step,
        if the reported one is not believed.
        """
        if not self._asking or round_ != self._round:
            return ()
        steps = {request.step for request, _ in self._requests.values()}
        if self._is_torn(steps, quorum.max_step):
            self._asking = False
            return tuple(self._fail_barrier(_different_steps(self._requests)))
        answers: list[Order] = [
            _answer_worker(caller, request, quorum, replica_id, round_)
            for request, caller in self._requests.values()
        ]
        self._over.note([request for request, _ in self._requests.values()], None)
        self.commits.open({*steps, quorum.max_step})
        self._formed = quorum, replica_id
        self._asking = False
        self._requests = {}
        return tuple(answers)

    def _is_torn(self, steps: set[int], max_step: int) -> bool:
        """Whether the workers are at different steps, and this quorum does not heal all of them."""
        heals = min(steps) != max_step  # behind, or not believed
        told = {
            asked.step for asked, _ in self._requests.values() if not (heals and asked.unhealed)
        }
        return len(steps) > 1 and min(steps) <= max_step < max(told, default=0)

    def quorum_failed(self, round_: int, error: TorchFTError) -> tuple[Order, ...]:
        """There is no quorum in ``round_``; every worker gets the reason."""
        if not self._asking or round_ != self._round:
            return ()
        self._asking = False
        if self._drain_reason is not None:
            return tuple(self._end_workers(self._drain_reason))
        return tuple(self._fail_barrier(error))

    def reported(self, group_rank: int, report: PhaseReport) -> tuple[Order, ...]:
        """A worker does something else. An earlier manager may have answered only some of the
        workers before it died. The others ask again, and learn that their peers do not ask the same
        any more, and may wait for them in a collective of the group. They are in the round before
        the last one of these; the numbers of their questions may differ."""
        if not self.commits.is_inherited:
            return ()
        self._rounds_before[group_rank] = report.round_before
        orders = self._refuse_answered()
        if report.went_on_to:
            orders += self.commits.went_on(group_rank, report.went_on_to)
        return tuple(orders)

    def withdrawn(self, caller: int) -> tuple[Order, ...]:
        """A worker gave up waiting; the others must not wait for it."""
        for rank, (_, waiting) in list(self._requests.items()):
            if waiting == caller:
                failed = self._give_up_barrier(rank)
                return tuple(each for each in failed if getattr(each, "caller", None) != caller)
        held_rank = self.held_rank(caller)
        if held_rank is not None:
            del self._heirs[held_rank]
            return ()
        return tuple(self.commits.withdrawn(caller))

    # -- the commit barrier ----------------------------------------------------------------------

    def voted(self, vote: Vote, caller: int) -> tuple[Order, ...]:
        """A worker votes, see `CommitBarrier.count`.

        Raises: RequestRefused: the rank does not exist or is taken by another worker, or the vote
        belongs to another round.
        """
        self._check_rank(vote.group_rank)
        vote.check()
        if not self.belongs_to(vote.group_rank, vote.worker_id):
            raise self._taken(vote.group_rank, "is there")
        asking = [request for request, _ in self._requests.values()]
        orders = self.commits.count(vote, caller, asking)
        self._voters[vote.group_rank] = vote.worker_id
        return (*self._refuse_heir(vote.group_rank), *orders)

    # -- questions -------------------------------------------------------------------------------

    def checkpoint_address(self, group_rank: int) -> str:
        """Where worker ``group_rank`` serves its state.

        Raises:
            RequestRefused: the rank does not exist, or has not asked for a quorum yet.
        """
        self._check_rank(group_rank)
        if group_rank not in self._checkpoint_addresses:
            raise RequestRefused(
                f"group rank {group_rank} has not reported where it serves its state"
            )
        return self._checkpoint_addresses[group_rank]

    @property
    def is_asking(self) -> bool:
        """Whether all workers have asked, and the lighthouse has not answered."""
        return self._asking

    @property
    def last_quorum(self) -> Quorum | None:
        """That the workers have received last."""
        return self._formed[0] if self._formed else None

    def askers(self) -> list[int]:
        return [caller for _, caller in self._requests.values()]

    def held_rank(self, caller: int | None) -> int | None:
        """The group rank that ``caller`` would take over from a worker that may still live;
        None: its question is not held, but in the barrier."""
        return next((rank for rank, (_, held) in self._heirs.items() if held == caller), None)

    def why(self, caller: int | None = None) -> str:
        """What this group waits for, or ``caller``, whose question may be held."""
        held_rank = self.held_rank(caller)
        if held_rank is not None:
            return f"group rank {held_rank} belongs to another worker, which may be alive"
        if self._asking:
            return "the lighthouse has not answered yet"
        voters = self.commits.voters()
        waiting, barrier = (
            (voters, "voted") if voters else (self._requests.keys(), "asked for a quorum")
        )
        missing = [rank for rank in range(self.world_size) if rank not in waiting]
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return f"group rank {shown} of {self.world_size} workers has not {barrier}"

    # -- the rules -------------------------------------------------------------------------------

    def _check_rank(self, group_rank: int) -> None:
        if not 0 <= group_rank < self.world_size:
            raise RequestRefused(
                f"group rank {group_rank} is outside this group of {self.world_size} workers"
            )

    def _meet(self, request: WorkerRequest) -> None:
        """Note the worker; another one at a known rank makes this another incarnation."""
        rank = request.group_rank
        if {self._attached.get(rank), self._workers.get(rank)} - {None, request.worker_id}:
            self._restarted = True
            # That was for the workers before. The living ones repeat it; but a dead one may still
            # ask, and the new ones would end, and leave the last one waiting.
            self._drain_reason = None
        self._workers[rank] = self._owners[rank] = request.worker_id
        self._note_life(request.group_rank, request.worker_id)
        self._checkpoint_addresses[request.group_rank] = request.checkpoint_address
        if request.drain_reason:
            self._drain_reason = self._drain_reason or request.drain_reason

    def _ask(self) -> AskLighthouse:
        requests = [request for request, _ in self._requests.values()]
        # Those that ask together are of one life, also if one before was too short for some ranks.
        newest = max(life for _, life in self._lives.values())
        self._lives = {each.group_rank: (each.worker_id, newest) for each in requests}
        self._shown = {each.group_rank: {each.worker_id: newest} for each in requests}
        self._round += 1
        self.commits.announce(self._round)
        self._asking = True
        layouts = {request.group_rank: request.layout for request in requests}
        seen = max(requests, key=lambda request: request.last_quorum_id)
        has_history = all(request.last_quorum_id for request in requests)
        # A worker that is not in the quorum of the group was restarted while no manager lived.
        is_new = self._restarted or (self._is_resumed and not has_history)
        ask = AskLighthouse(
            round=self._round,
            step=min(request.step for request in requests),
            shrink_only=any(request.shrink_only for request in requests),
            commit_failures=max(request.commit_failures for request in requests),
            new_incarnation=is_new,
            unhealed=any(request.unhealed for request in requests),
            seen_quorum_id=seen.last_quorum_id,
            seen_num_groups=seen.last_num_groups,
            has_history=has_history,
            layout=group_layout([layouts[rank] for rank in sorted(layouts)]),
            step_quorum_id=min(request.step_quorum_id for request in requests),
            steady=all(request.steady for request in requests),
            agreed=all(request.agreed for request in requests),
        )
        self._restarted = self._is_resumed = False
        return ask

    def _give_up_barrier(self, group_rank: int) -> list[Order]:
        """A worker no longer waits in it; the others must not wait for that worker."""
        orders: list[Order] = [StopAsking(self._round)] if self._asking else []
        self._asking = False
        return orders + self._fail_barrier(QuorumFailed(f"group rank {group_rank} gave up waiting"))

    def _fail_barrier(self, error: TorchFTError) -> list[Order]:
        """End the quorum barrier, if there is one, for the waiting workers and those still to
        come."""
        if not self._requests:
            return []
        known = self._attached, self._workers, self._voters
        absent = {
            rank: worker_id
            for rank in range(self.world_size)
            if rank not in self._requests
            and (worker_id := next(filter(None, (each.get(rank) for each in known)), ""))
        }  # a worker that was never there has begun no step
        self._over.failed([request for request, _ in self._requests.values()], absent, error)
        return self._refuse_requests(error)

    def _refuse_answered(self) -> list[Order]:
        """Let nobody wait for an answer that another worker has from an earlier manager."""
        refused: list[Order] = []
        for rank, (request, caller) in list(self._requests.items()):
            ahead = self._has_answer_to(request)
            if ahead is not None:
                del self._requests[rank]
                error = QuorumFailed(
                    f"the manager died when only group rank {ahead} had its answer"
                )
                self._over.note([request], error)
                refused.append(RefuseWorker(caller, error))
        return refused

    def _has_answer_to(self, request: WorkerRequest) -> int | None:
        """The group rank of another worker to which an earlier manager has answered the same."""
        if not self.commits.is_inherited or not request.last_round:
            return None
        rounds = self._rounds_before.items()
        return next((rank for rank, before in rounds if before == request.last_round), None)

    def _answer_late_question(self, request: WorkerRequest, caller: int) -> Order | None:
        """The answer for a worker that comes to a barrier which is over; None if it is not."""
        ended = self._over.repeated(request)
        if ended is not None:
            if ended.error is not None:
                return RefuseWorker(caller, ended.error)
            # Also if the round is over by now, which it learns when it votes.
            assert self._formed is not None
            return _answer_worker(caller, request, *self._formed, self._round)
        error = self._over.missed(request)
        if error is None:
            return None
        self._meet(request)
        return RefuseWorker(caller, error)

    def _refuse_requests(self, error: TorchFTError) -> list[Order]:
        refused: list[Order] = [RefuseWorker(who, error) for _, who in self._requests.values()]
        self._requests = {}
        return refused

    def _taken(self, group_rank: int, what: str) -> RequestRefused:
        return RequestRefused(
            f"group rank {group_rank} is taken: another worker with this rank {what}; "
            "give every worker of the group a rank of its own"
        )


def _answer_worker(
    caller: int, request: WorkerRequest, quorum: Quorum, replica_id: str, round_: int
) -> AnswerWorker | RefuseWorker:
    try:
        part = assign(quorum, replica_id, request.group_rank, request.init_sync)
    except QuorumFailed as error:
        return RefuseWorker(caller, error)
    return AnswerWorker(caller, request, part, round_)


def _different_steps(requests: dict[int, tuple[WorkerRequest, int]]) -> RequestRefused:
    named = sorted((request.group_rank, request.step) for request, _ in requests.values())
    steps = ", ".join(f"rank {rank} at step {step}" for rank, step in named)
    return RequestRefused(f"the workers of this group are at different steps: {steps}")
