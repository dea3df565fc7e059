"""One group's session: its stream of beats and questions in, of answers and news out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from torchft_svc.core.types import MAX_REASON_LENGTH, LastQuorum, check_text
from torchft_svc.errors import NotLeader, RequestRefused, TorchFTError, Unreachable
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.questions import Outcome
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import answers, member_from_wire, refusal
from torchft_svc.rpc.deadline import MAX_WAIT_S
from torchft_svc.rpc.outbox import Outbox, first_message
from torchft_svc.rpc.parsing import is_of_a_newer_kind

Context = grpc.aio.ServicerContext[Any, Any]


class Session:
    """Lives as long as its stream. When it ends, the group is out at once."""

    def __init__(self, driver: LighthouseDriver, job: str) -> None:
        self._driver = driver
        self._job = job
        self._replica_id = ""
        self._reason = "its session ended"
        self._number = 0  # of the last question
        self._caller: int | None = None  # who asked it at the driver
        self._outbox = Outbox(driver.heavy_writes, job, driver.unread)

    async def run(self, requests: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        """Serve the stream to its end.

        Raises:
            RequestRefused: the client breaks the protocol.
        """
        hello = await self._hello(requests)
        self._replica_id = hello.replica_id
        last = LastQuorum(hello.last_quorum_id, hello.last_max_step)
        self._driver.open_session(self._job, self._replica_id, last, self._outbox)
        try:
            await self._outbox.exchange(requests, self._hear, context)
        except Unreachable:
            raise
        except TorchFTError as error:
            self._reason = f"its session was refused: {error}"
            raise
        finally:
            self._withdraw()
            self._driver.close_session(self._job, self._replica_id, self._outbox, self._reason)

    async def _hello(self, requests: AsyncIterator[pb.SessionRequest]) -> pb.SessionHello:
        first = await first_message(requests)
        if first is None:
            raise RequestRefused("a session begins with a hello; none came")
        if first.WhichOneof("kind") != "hello":
            raise RequestRefused("a session begins with a hello")
        return first.hello

    def _hear(self, message: pb.SessionRequest) -> bool:
        """Whether the session goes on behind ``message``."""
        kind = message.WhichOneof("kind")
        if kind == "beat":
            self._driver.heard(self._job, self._replica_id, self._outbox, message.beat)
        elif kind == "question":
            self._ask(message.question)
        elif kind == "withdrawal":
            if message.withdrawal.number == self._number:  # or it has been overtaken
                self._withdraw()
        elif kind == "leave":
            self._leave(message.leave)
            return False
        elif kind is not None or not is_of_a_newer_kind(message):
            raise RequestRefused(f"a session does not accept {kind or 'an empty message'}")
        return True

    def _ask(self, question: pb.SessionQuestion) -> None:
        if question.requester.replica_id != self._replica_id:
            raise RequestRefused(
                f"the session of {self._replica_id!r} cannot ask for "
                f"{question.requester.replica_id[:64]!r}"
            )
        self._withdraw()
        self._number = question.number
        member = member_from_wire(question.requester)
        timeout_s = min(max(question.timeout_ms, 0) / 1000, MAX_WAIT_S)
        try:
            self._caller = self._driver.ask(
                self._job, member, timeout_s, self._answer, self._outbox.tell
            )
        except RequestRefused as error:
            self._answer(error)

    def _leave(self, leave: pb.SessionLeave) -> None:
        """The group is out before its stream ends; a question gets its answer or its error."""
        check_text("reason", leave.reason, MAX_REASON_LENGTH)
        reason = leave.reason or "it has left"
        self._driver.close_session(
            self._job,
            self._replica_id,
            self._outbox,
            reason,
            leaves=True,
            between_steps=leave.between_steps,
            ends=leave.ends,
        )

    def _withdraw(self) -> None:
        if self._caller is not None:
            self._driver.withdraw(self._caller)

    def _answer(self, outcome: Outcome) -> None:
        if isinstance(outcome, bytes):
            self._outbox.tell(outcome, answers(self._number))
        elif not isinstance(outcome, NotLeader):  # the stream's end says who leads
            news = pb.SessionNews(refusal=refusal(outcome, self._number))
            self._outbox.tell(news.SerializeToString())
