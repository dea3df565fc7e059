"""Feeds a group with inputs and executes its orders: the loop of the service and the simulator."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import NoReturn, Protocol

from torchft_svc.core.link import Absence
from torchft_svc.core.quorum.manager.commit_barrier import AnswerVote, RefuseWorker
from torchft_svc.core.quorum.manager.group import (
    Answer,
    AnswerWorker,
    AskLighthouse,
    EndGroup,
    Group,
    NotifyWorkers,
    Order,
    Orders,
    OwnGroupLost,
    SentNews,
    StopAsking,
)
from torchft_svc.core.quorum.session_messages import Leave, LighthouseNews, Lost
from torchft_svc.core.quorum.types import GroupRequest, Quorum
from torchft_svc.core.timer import CallLater, DeadlineTimer
from torchft_svc.errors import TorchFTError


class GroupIdentity(Protocol):
    """What the link knows: this incarnation of the group, the last quorum that it was in, and how
    long there was no lighthouse before the present session."""

    @property
    def replica_id(self) -> str: ...
    @property
    def seen_quorum_id(self) -> int: ...
    @property
    def absence(self) -> Absence | None: ...


class GroupShell(abc.ABC):
    """Drives ``group``; a subclass has the ways to its workers and to the lighthouse.

    ``clock`` is monotonic seconds; ``call_later`` is for the timer.
    """

    def __init__(
        self,
        group: Group,
        identity: GroupIdentity,
        clock: Callable[[], float],
        call_later: CallLater,
    ) -> None:
        self.group = group
        self._identity = identity
        self._now = clock
        self._callers = itertools.count()
        self._timer = DeadlineTimer(call_later, self._tick)

    # -- inputs from the lighthouse and of the time ----------------------------------------------

    def resume_term(self) -> None:
        """Continue a term, see `Group.term_resumed`; before the first call."""
        self.group.term_resumed(self._now())
        self._execute(())

    def receive_news(self, news: LighthouseNews, encoded: bytes | None = None) -> None:
        """News of the lighthouse, or a command; workers receive them as ``encoded``."""
        me = self._identity
        self._execute(self.group.news_received(news, me.replica_id, me.seen_quorum_id, encoded))

    def receive_outcome(self, round_: int, outcome: Quorum | TorchFTError) -> None:
        """The lighthouse has answered the request of ``round_``, or cannot be asked."""
        replica_id = self._identity.replica_id
        self._execute(self.group.lighthouse_answered(round_, outcome, replica_id, self._now()))

    def change_link(self, is_open: bool) -> None:
        """The session has begun, or a lighthouse could not be reached, or was lost."""
        absence = self._identity.absence if is_open else None
        self._execute(self.group.link_changed(self._now(), is_open=is_open, absence=absence))

    def _tick(self) -> None:
        self._execute(self.group.tick(self._now()))

    # -- orders ----------------------------------------------------------------------------------

    def _execute(self, orders: Orders) -> None:
        """Execute the orders of one input, and set the timer."""
        for order in orders:
            if not self._is_dead():
                self._execute_order(order)
        self._timer.set(self.group.next_deadline(), self._now())

    def _execute_order(self, order: Order) -> None:
        match order:
            case AskLighthouse():
                self._ask_lighthouse(order.request, order.timeout_s)
            case StopAsking():
                self._withdraw_request(order.round)
            case Leave():
                self._leave_lighthouse(order)
            case AnswerWorker() | AnswerVote() | RefuseWorker():
                self._answer_call(order)
            case NotifyWorkers():
                news = order.news
                if isinstance(news, OwnGroupLost):
                    me = self._identity
                    news = Lost(me.replica_id, news.reason, me.seen_quorum_id)
                self._send_news(order.group_ranks, news)
            case EndGroup():
                self._end_group()
            case _:
                _refuse_order(order)

    def _is_dead(self) -> bool:
        """Whether this process died while it executed an order; the simulator's may."""
        return False

    @abc.abstractmethod
    def _ask_lighthouse(self, request: GroupRequest, timeout_s: float) -> None:
        """Send the request, then call `receive_outcome`."""

    @abc.abstractmethod
    def _withdraw_request(self, round_: int) -> None:
        """Stop waiting for the outcome of ``round_``."""

    @abc.abstractmethod
    def _leave_lighthouse(self, leave: Leave) -> None:
        """Send the message with which the group leaves."""

    @abc.abstractmethod
    def _answer_call(self, answer: Answer) -> None:
        """Answer the call of a worker, if it still waits."""

    @abc.abstractmethod
    def _send_news(self, group_ranks: tuple[int, ...], news: SentNews) -> None:
        """Send ``news`` to the attached workers with these group ranks."""

    @abc.abstractmethod
    def _end_group(self) -> None:
        """End the group when its workers have received their last news."""


def _refuse_order(order: NoReturn) -> NoReturn:
    """Fail; mypy finds an order that has no case."""
    raise AssertionError(order)
