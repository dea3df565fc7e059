"""A transport that is one stream: while it is open the group is alive, and news come over it."""

from __future__ import annotations

import grpc

from torchft_svc.core.link import SendBeat
from torchft_svc.core.quorum.manager.lighthouse_link import Message
from torchft_svc.core.quorum.session_messages import Leave, Question, Withdrawal
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import QuorumFailed, TorchFTError
from torchft_svc.manager_server.transport import Contact, NotSupported
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.codec import JOB_KEY, fit_for_logs, quorum_from_wire
from torchft_svc.rpc.codec_session import session_message_to_wire
from torchft_svc.rpc.lighthouse_stream import LighthouseStream
from torchft_svc.rpc.status import error_from_wire


class SessionTransport(LighthouseStream[Question | Withdrawal | Leave]):
    """The stream of a session; to be used on one event loop."""

    def __init__(self, contact: Contact) -> None:
        config = contact.config
        super().__init__(
            contact.channel,
            contact.address,
            "Session",
            (pb.SessionRequest, pb.SessionNews),
            ((JOB_KEY, config.job_id), *config.security.metadata),
        )
        self._contact = contact
        self._timeout_s = 0.0  # of the last question

    def send(self, message: Message) -> None:
        """Send ``message`` soon; a question that is withdrawn before is not sent at all."""
        if isinstance(message, Question):
            self._timeout_s = message.timeout_s
        elif isinstance(message, Withdrawal):
            for each in self._unsent:
                if isinstance(each, Question) and each.number == message.number:
                    self._unsent.remove(each)
                    return
        super().send(message)

    def _make_hello(self) -> pb.SessionRequest:
        return session_message_to_wire(self._contact.make_hello())

    def _introduced(self) -> None:
        number = self._contact.number
        self._contact.feed(lambda machine, now: machine.introduced(number, now))

    def _encode(self, message: Message) -> pb.SessionRequest:
        if isinstance(message, SendBeat):
            return session_message_to_wire(self._contact.make_beat())
        return session_message_to_wire(message)

    def _receive(self, news: pb.SessionNews, *, is_first: bool) -> None:
        kind = "welcome" if is_first else news.WhichOneof("kind")
        fit_for_logs(news)
        if kind == "welcome":
            self._receive_welcome(news.welcome)
        elif kind == "refusal":
            refusal = news.refusal
            error = error_from_wire(refusal.error, refusal.reason, "quorum", self._timeout_s)
            self._receive_outcome(refusal.number, error)
        elif kind == "quorum":
            try:
                self._receive_outcome(news.answers, quorum_from_wire(news.quorum))
            except QuorumFailed as error:
                self._receive_outcome(news.answers, error)
        elif kind is not None:  # else only a newer version knows it
            self._contact.on_news(self._contact.number, news)

    def _receive_welcome(self, welcome: pb.SessionWelcome) -> None:
        number, interval_s = self._contact.number, welcome.min_interval_ms / 1000
        if not welcome.knows_prepared_spares:
            self._contact.feed(lambda machine, now: machine.refuse_spare(number, now))
        self._contact.feed(lambda machine, now: machine.welcomed(number, interval_s, now))

    def _receive_outcome(self, question: int, outcome: Quorum | TorchFTError) -> None:
        number = self._contact.number
        self._contact.feed(lambda machine, now: machine.answered(number, question, outcome, now))

    def _to_error(self, error: grpc.aio.AioRpcError) -> TorchFTError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise NotSupported from None
        return super()._to_error(error)
