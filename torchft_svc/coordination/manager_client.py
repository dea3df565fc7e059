"""Asks a manager."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torchft_svc.coordination.attachment import Attachment, Listeners
from torchft_svc.coordination.client import Client
from torchft_svc.coordination.stream_votes import ACTION
from torchft_svc.coordination.types import ManagerLocator
from torchft_svc.core.limits import limited_s, whole_milliseconds
from torchft_svc.core.quorum.activity import Phase, PhaseReport
from torchft_svc.core.quorum.assignment import QuorumResult
from torchft_svc.core.quorum.lighthouse.copies import MembersAndCopies
from torchft_svc.core.quorum.tally import GroupEvent, Tally
from torchft_svc.core.quorum.term import Fate
from torchft_svc.core.quorum.types import DEFAULT_JOB, DifferenceReport, Vote, WorkerRequest
from torchft_svc.core.quorum.worker.round import WorkerCalls
from torchft_svc.errors import TorchFTError, Unreachable
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import (
    decision_from_wire,
    quorum_result_from_wire,
    vote_to_wire,
    worker_request_to_wire,
)
from torchft_svc.rpc.codec_status import members_from_wire
from torchft_svc.rpc.security import Security
from torchft_svc.rpc.status import error_from_wire

log = logging.getLogger(__name__)

# Some steps take longer: a worker that is killed in one logs where it stood, too; no harm.
STANDS_STILL_S = 1.0


class ManagerClient(Client):
    """A worker's client of the manager of its group, or of another group.

    With ``locator`` it follows a manager that is started anew: the call that could not reach
    it fails, the next one goes where it is then.
    ``security``: TLS files and token (default: those of the environment).

    Raises:
        Unreachable: nobody answers at ``addr`` within ``connect_timeout``.
        Unauthorized: from each call, if the manager does not trust this client, or it the other.
    """

    def __init__(
        self,
        addr: str,
        connect_timeout: timedelta,
        locator: ManagerLocator | None = None,
        *,
        security: Security | None = None,
    ) -> None:
        super().__init__("manager", addr, connect_timeout, DEFAULT_JOB, security)
        self._locator = locator
        self._over: Unreachable | None = None  # a manager that has ended for good
        self._calls = WorkerCalls(str(uuid.uuid4()))
        self._moved_at: float | None = -math.inf  # None: it waits for others
        self._attachment: Attachment | None = None
        self._ask_quorum = self._method("Quorum", pb.ManagerQuorumResponse.FromString)
        self._address = self._method("CheckpointAddress", pb.CheckpointAddressResponse.FromString)
        self._members = self._method("JobMembers", pb.JobMembersResponse.FromString)
        self._send_vote = self._method("ShouldCommit", pb.ShouldCommitResponse.FromString)
        self._kill = self._method("Kill", pb.KillResponse.FromString)
        self._drain = self._method("Drain", pb.DrainResponse.FromString)
        self._connect()

    def attach(
        self,
        group_rank: int,
        listeners: Listeners,
        tally: Callable[[float], Tally | None] = lambda now: None,
    ) -> None:
        """Keep a stream to the manager open, until `close`; ``listeners`` receive its news.
        ``tally``: see `Attachment`.

        While it is open the manager knows that this worker lives; when it breaks, the group's other
        workers receive the loss as news.
        """
        assert self._attachment is None, "a client has one attachment"
        self._attachment = Attachment(
            lambda: self._channel,
            self._metadata,
            group_rank,
            self._calls.worker_id,
            dataclasses.replace(listeners, on_over=self._receive_over),
            self._lost_contact,
            tally,
        )

    def report_phase(self, report: PhaseReport) -> None:
        """Report to the manager what this worker does, if it is attached; only stores it."""
        self._moved_at = None if report.phase is Phase.QUORUM else time.monotonic()
        if self._attachment is not None:
            self._attachment.report_phase(self._calls.sign_report(report))

    def report_difference(self, report: DifferenceReport) -> None:
        """Report that the groups' states differ, if the client is attached; only stores it."""
        if self._attachment is not None:
            self._attachment.report_difference(report)

    def report_event(self, event: GroupEvent) -> None:
        """Report what has happened to the group, if the client is attached; only stores it."""
        if self._attachment is not None:
            with self._lock:
                event = self._calls.sign_event(event)
            self._attachment.report_event(event)

    def stands_still(self) -> bool:
        """Whether this worker has been in one phase for long, or begun no step yet, and does not
        wait for others."""
        moved_at = self._moved_at
        return moved_at is not None and time.monotonic() - moved_at > STANDS_STILL_S

    def why_over(self, failure: TorchFTError) -> Unreachable | None:
        """Why no other manager will come, if a call has failed because the manager is gone (None:
        another failure, or another manager may come)."""
        if not isinstance(failure, Unreachable) or failure.peer != "manager":
            return None
        if self._locator is None:
            return failure
        try:
            self._find()
        except Unreachable as over:
            return over
        return None

    def close(self, failure: str = "") -> None:
        """Detach, cancel what is under way, close the connection; may be called twice.

        ``failure``: the error that this worker's program ends with, in one line; the group then
        counts as lost.
        """
        if self._attachment is not None:
            self._caller.call(functools.partial(self._attachment.close, failure))
        super().close()

    def _lost_contact(self) -> None:
        with contextlib.suppress(Unreachable):
            self._move(self._find())

    def _receive_over(self, reason: str) -> None:
        log.info("the manager at %s ends for good: %s", self._addr, reason)
        self._over = Unreachable("manager", self._addr, reason)

    def _find(self) -> str:
        """The address of the manager; raises `Unreachable` if there will be none any more."""
        addr = self._locator.find() if self._locator else self._addr
        if self._over and addr == self._over.address:
            raise self._over
        return addr

    def _quorum(
        self,
        group_rank: int,
        step: int,
        checkpoint_metadata: str,
        shrink_only: bool,
        timeout: timedelta,
        commit_failures: int = 0,
        reconfigure_handle: str = "",
        init_sync: bool = True,
        drain_reason: str = "",
        unhealed: bool = False,
        question: int = 0,
        layout: str = "",
        step_quorum_id: int = 0,
    ) -> QuorumResult:
        """Wait until every worker of the group has asked and there is a quorum.

        ``reconfigure_handle`` is accepted for the public release's sake and has no effect.

        ``drain_reason``: why this worker has to end, so its group leaves when all have asked
        (empty: it has not).
        ``unhealed``: the last quorum wanted it to heal, which has failed.
        ``question``: the number of this question among those of this worker, from 1; the same when
        it is repeated because the answer was lost. A barrier that failed before this worker came to
        it then fails for it, too (0: it waits for the next one).
        ``layout``: what this worker sums and how, which must be the same in all groups (empty: not
        reported).
        ``step_quorum_id``: in which quorum ``step`` was committed (0: not known).

        Raises:
            GroupLeft: the group was drained, there will be no quorum any more.
            QuorumFailed: there is no quorum in this round, with the reason.
            DeadlineExceeded: none within ``timeout``; the error says what was waited for.
            RequestRefused: wrong rank, the workers of the group are at different steps, or the
                group is not like the others of its job.
        """
        request = WorkerRequest(
            group_rank=group_rank,
            step=step,
            checkpoint_address=checkpoint_metadata,
            shrink_only=shrink_only,
            commit_failures=commit_failures,
            init_sync=init_sync,
            drain_reason=drain_reason,
            unhealed=unhealed,
            question=question,
            layout=layout,
            step_quorum_id=step_quorum_id,
        )
        return self.ask(request, timeout)

    def ask(self, request: WorkerRequest, timeout: timedelta) -> QuorumResult:
        """See `_quorum`; what each call repeats is added here."""
        with self._lock:
            request = self._calls.sign_question(request)
        result, round_ = quorum_result_from_wire(
            self._ask_quorum(worker_request_to_wire(request), timeout)
        )
        with self._lock:
            self._calls.record_answer(result.quorum_id, result.replica_world_size, round_)
        return result

    def _checkpoint_metadata(self, rank: int, timeout: timedelta) -> str:
        """The address at which worker ``rank`` of this manager's group serves its state."""
        answer = self._address(pb.CheckpointAddressRequest(rank=rank), timeout)
        return answer.checkpoint_server_address

    def job_members(self, timeout: timedelta) -> tuple[list[str], int]:
        """The manager addresses of the groups in the job's last quorum, and its committed step.

        Raises:
            PeerError: the manager, or its lighthouse, does not answer.
        """
        answer = self._members(pb.JobMembersRequest(), timeout)
        return list(answer.manager_addresses), answer.committed_step

    def members_and_copies(self, timeout: timedelta) -> MembersAndCopies:
        """The members of the job's last quorum that live, and the copies of its states.

        Raises:
            PeerError: the manager, or its lighthouse, does not answer.
            RequestRefused: the lighthouse is one that does not know this request.
        """
        return members_from_wire(self._members(pb.JobMembersRequest(), timeout))

    def should_commit(
        self, group_rank: int, step: int, should_commit: bool, timeout: timedelta
    ) -> bool:
        """Vote on the round of the last quorum, and wait for the group's decision.

        Raises:
            CommitFailed: another worker gave up, with the reason.
            DeadlineExceeded: not all have voted within ``timeout``.
            RequestRefused: wrong rank or step, or the round is over.
        """
        vote = Vote(group_rank=group_rank, step=step, should_commit=should_commit)
        committed, _ = self.vote(vote, timeout)
        return committed

    def vote(self, vote: Vote, timeout: timedelta) -> tuple[bool, Fate]:
        """See `should_commit`, with how the next step begins; what each call repeats is added
        here.

        The vote is sent on the stream if that is open, and by a call if not, or if the stream ends
        meanwhile: a manager that has it counts it once.
        """
        with self._lock:
            vote = self._calls.sign_ballot(vote)
        request = vote_to_wire(vote)
        attachment = self._attachment
        if attachment is not None and attachment.is_open:
            timeout_s = limited_s(timeout)
            deadline = time.monotonic() + timeout_s
            answer = attachment.vote(request, timeout_s)
            if answer is not None:
                if answer.error:
                    raise error_from_wire(answer.error, answer.reason, ACTION, timeout_s)
                return decision_from_wire(answer.decided)
            timeout = timedelta(seconds=max(0.0, deadline - time.monotonic()))
        return decision_from_wire(self._send_vote(request, timeout))

    def listen(self, timeout: timedelta = timedelta(seconds=1)) -> None:
        """Wait until the news that the manager has for this worker are received.

        Returns at once if there is no stream, or the manager does not answer on it.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.listen(limited_s(timeout))

    def kill(self, msg: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the group at once: its workers, its manager, and the trainer that started that."""
        self._kill(pb.KillRequest(msg=msg), timeout)

    def drain(
        self,
        reason: str = "",
        timeout: timedelta = timedelta(seconds=5),
        *,
        within: timedelta | None = None,
    ) -> None:
        """Let the group finish its step, leave the lighthouse, and end.

        ``within``: in what time its processes will be killed (None: not known).
        """
        request = pb.DrainRequest(reason=reason, within_ms=whole_milliseconds(within))
        self._drain(request, timeout)
