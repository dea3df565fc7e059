"""A manager's link to its lighthouses in a simulated world: a driver of `ManagerLink`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tools.sim.lighthouse_actor import Introduction, LighthouseActor, QuorumAnswer
from tools.sim.lighthouses import Lighthouses
from tools.sim.network import Network, Stream
from tools.sim.simulated_link import SimulatedLink
from tools.sim.world import Process
from torchft_svc.core.link import BEAT_TIMEOUT_S, ConfirmLeft, Connect, LinkState, SendBeat
from torchft_svc.core.quorum.manager.lighthouse_link import (
    AnswerAsker,
    ManagerLink,
    ManagerLinkConfig,
    OwnOrder,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Hello,
    Leave,
    LighthouseNews,
    News,
    Question,
    Refusal,
    Welcome,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import Quorum
from torchft_svc.errors import TorchFTError

Outcome = Quorum | TorchFTError
Input = Callable[[ManagerLink, float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSite:
    """The place of a link: in which job, under which name, with which lighthouses."""

    job: str
    name: str
    has_sessions: bool
    on_hello: Callable[[Hello], None]
    network: Network
    lighthouses: Lighthouses


@dataclass(slots=True)
class _Calls:
    """The beats over one connection, where they are calls."""

    num_beats: int = 0
    num_answered: int = 0


class LinkActor(SimulatedLink[ManagerLink]):
    """One life of a manager's link.

    ``on_news`` receives losses and commands, ``on_outcome`` the outcome of each question, by round.
    """

    def __init__(
        self,
        process: Process,
        site: LinkSite,
        config: ManagerLinkConfig,
        on_news: Callable[[LighthouseNews], None],
        on_outcome: Callable[[int, Outcome], None],
        make_beat: Callable[[], Beat],
        reached: Callable[[], int],
    ) -> None:
        self._site = site
        self._on_news = on_news
        self._on_outcome = on_outcome
        self._make_beat = make_beat
        self._num_incarnations = 0
        self._calls = _Calls()
        self._is_newcomer = True  # as of its last question
        self.loses: Callable[[object], bool] | None = None  # whether what comes is lost
        self.on_change: Callable[[bool], None] = lambda is_open: None
        new_id = partial(self._new_replica_id, process.name)
        machine = ManagerLink(config, new_id, process.chance.random, reached, process.name)
        super().__init__(process, site.network, site.lighthouses.hosts, machine)
        if config.resumed is None:
            self.start_proving()

    @property
    def host(self) -> LighthouseActor | None:
        """The lighthouse that it is connected to."""
        is_connected = self._number in self._streams
        return self._site.lighthouses.hosts[self._host] if is_connected else None

    def start_proving(self) -> None:
        """Begin to prove that the group is alive, unless it has begun."""
        if not self._number:
            self.feed(lambda machine, now: machine.start(now))

    def return_for_worker(self) -> None:
        """Connect for a worker that asks who trains, if the group has left or has not begun."""
        self.start_proving()
        self.feed(lambda machine, now: machine.return_for_worker(now))

    def _new_replica_id(self, process_name: str) -> str:
        self._num_incarnations += 1
        return f"{self._site.name}:{process_name}.{self._num_incarnations}"

    def leave(self, leave: Leave) -> None:
        self.feed(lambda machine, now: machine.leave(leave, now))

    def feed_soon(self, input_: Callable[[ManagerLink, float], object]) -> None:
        """Pass an input to the machine when this has returned: what follows may call the caller."""
        self._process.after(0.0, self.feed, input_)

    # -- the machine's shell ---------------------------------------------------------------------

    def _state_changed(self, before: LinkState) -> None:
        is_open = self.machine.state.session_change(before)
        if is_open is not None:
            self.on_change(is_open)

    def _execute_own(self, order: SendBeat | ConfirmLeft | OwnOrder) -> None:
        if isinstance(order, AnswerAsker):
            self._answer(order)
        elif isinstance(order, TermEnds):
            self._process.after(0.0, self._on_news, order)
        elif isinstance(order, SendBeat):
            self._send_beat()
        elif not isinstance(order, ConfirmLeft):
            if isinstance(order, Question):
                member = order.member
                self._is_newcomer = not (member.has_history or member.last_num_groups)
            self.send(order)

    def _answer(self, order: AnswerAsker) -> None:
        site = self._site
        is_leaving = self.machine.state is LinkState.LEAVING
        if isinstance(order.outcome, Quorum) and not is_leaving:  # else its workers are no more
            record = site.lighthouses.splits.record_quorum
            record(site.job, site.name, self._host, order.outcome, self._is_newcomer)
        self._on_outcome(order.round, order.outcome)

    def _connect(self, order: Connect) -> None:
        self._site.on_hello(self.machine.hello())
        super()._connect(order)

    def _introduce(self, connection: Connect, stream: Stream) -> None:
        self._calls = _Calls()
        number = connection.connection
        if self._site.has_sessions:
            hello = self.machine.hello()
            stream.to_server(Introduction(self._site.job, hello, has_session=True))
        else:
            way_s = 2 * self._network.latency(self._process)
            refuse: Input = lambda machine, now: machine.not_supported(number, now)  # noqa: E731
            self._process.after(way_s, self.feed, refuse)

    def _send_beat(self) -> None:
        calls, number = self._calls, self._number
        calls.num_beats += 1
        if self._site.has_sessions:
            self.send(self._make_beat())
            return
        if calls.num_beats == 1:  # the lighthouse does not know it before; answers with a welcome
            self.send(Introduction(self._site.job, self.machine.hello(), has_session=False))
        else:
            self.send(Beat())
            if not self._network.is_cut(self._process.name):
                back_s = 2 * self._network.latency(self._process)
                self._process.after(back_s, self._receive, number, Welcome(0.0))
        self._process.after(BEAT_TIMEOUT_S, self._end_beat, number, calls, calls.num_beats)

    def _end_beat(self, number: int, calls: _Calls, beat: int) -> None:
        """A call has timed out, unless it was answered."""
        if calls.num_answered < beat:
            calls.num_answered = beat
            self.feed(lambda machine, now: machine.beat_was_late(number, now))

    def _receive(self, number: int, news: News | QuorumAnswer) -> None:
        if number not in self._streams or (self.loses is not None and self.loses(news)):
            return
        if isinstance(news, Welcome):
            self._calls.num_answered = self._calls.num_beats
            self.feed(lambda machine, now: machine.welcomed(number, news.min_interval_s, now))
        elif isinstance(news, QuorumAnswer):
            self.feed(lambda machine, now: machine.answered(number, *news, now))
        elif isinstance(news, Refusal):
            self.feed(lambda machine, now: machine.answered(number, news.number, news.error, now))
        elif isinstance(news, LighthouseNews) and self.machine.accepts_news(number):
            self._on_news(news)
