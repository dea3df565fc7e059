"""A manager's link to its lighthouses in a simulated world: a driver of `LinkMachine`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tools.sim.lighthouse_actor import Introduction, LighthouseActor, QuorumAnswer
from tools.sim.lighthouses import Lighthouses
from tools.sim.network import Network, Stream, StreamEnd
from tools.sim.world import Process
from torchft_svc.core.quorum.manager.lighthouse_link import LinkMachine
from torchft_svc.core.quorum.manager.link_types import (
    BEAT_TIMEOUT_S,
    AnswerAsker,
    Close,
    ConfirmLeft,
    Connect,
    LinkConfig,
    LinkState,
    Log,
    Order,
    Probe,
    SendBeat,
)
from torchft_svc.core.quorum.session_messages import (
    Beat,
    Drain,
    Hello,
    Kill,
    Leave,
    Lost,
    NewcomerWaits,
    News,
    Question,
    Refusal,
    Welcome,
)
from torchft_svc.core.quorum.term import TermEnds
from torchft_svc.core.quorum.types import GroupRequest, Quorum
from torchft_svc.core.timer import DeadlineTimer
from torchft_svc.errors import TorchFTError, Unreachable

Outcome = Quorum | TorchFTError
Input = Callable[[LinkMachine, float], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSite:
    """Where a link is: in which job, under which name, with which lighthouses."""

    job: str
    name: str
    has_sessions: bool
    on_hello: Callable[[Hello], None]
    network: Network
    lighthouses: Lighthouses


@dataclass(slots=True)
class _Contact:
    stream: Stream
    hello: Hello
    num_beats: int = 0
    num_answered: int = 0  # of the beats that are calls


class LinkActor:
    """One life of a manager's link.

    ``on_news`` receives losses and commands, ``on_outcome`` the outcome of each question, by round.
    """

    def __init__(
        self,
        process: Process,
        site: LinkSite,
        config: LinkConfig,
        on_news: Callable[[Lost | Kill | Drain | NewcomerWaits | TermEnds], None],
        on_outcome: Callable[[int, Outcome], None],
        make_beat: Callable[[], Beat],
        reached: Callable[[], int],
    ) -> None:
        self._process = process
        self._network = site.network
        self._site = site
        self._on_news = on_news
        self._on_outcome = on_outcome
        self._make_beat = make_beat
        self._num_incarnations = 0
        self._contacts: dict[int, _Contact] = {}
        self._number = 0  # of the connection that messages go over
        self._timer = DeadlineTimer(process.after, lambda: self._tell(LinkMachine.tick))
        self._host = ""  # that it is connected to
        self._is_newcomer = True  # as of its last question
        self.loses: Callable[[object], bool] | None = None  # whether what comes is lost
        self.on_change: Callable[[bool], None] = lambda is_open: None
        draw = process.chance.random
        self.machine = LinkMachine(config, self._new_replica_id, draw, reached, process.name)
        if config.resumed is None:
            self.begin()

    def begin(self) -> None:
        """Begin to prove that the group is alive, unless it has begun."""
        if not self._number:
            self._tell(lambda machine, now: machine.start(now))

    def _new_replica_id(self) -> str:
        self._num_incarnations += 1
        return f"{self._site.name}:{self._process.name}.{self._num_incarnations}"

    def ask(self, ask: GroupRequest, timeout_s: float) -> None:
        """``on_outcome`` hears of the outcome, after this has returned."""
        self._tell_soon(lambda machine, now: machine.ask(ask, timeout_s, now))

    def withdraw(self, round_: int) -> None:
        self._tell_soon(lambda machine, now: machine.withdraw(round_, now))

    def leave(self, leave: Leave) -> None:
        self._tell(lambda machine, now: machine.leave(leave, now))

    # -- the machine's shell ---------------------------------------------------------------------

    def _tell_soon(self, tell: Input) -> None:
        self._process.after(0.0, self._tell, tell)

    def _tell(self, tell: Input) -> None:
        now, before = self._process.world.now, self.machine.state
        tell(self.machine, now)
        is_open = self.machine.state.session_change(before)
        if is_open is not None:
            self.on_change(is_open)
        for order in self.machine.take_orders():
            self._carry_out(order)
        self._timer.set(self.machine.next_deadline(now), now)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Connect):
            self._connect(order)
        elif isinstance(order, Close):
            contact = self._contacts.pop(order.connection, None)
            if contact is not None:
                contact.stream.cancel()
        elif isinstance(order, Probe):
            self._probe(order)
        elif isinstance(order, AnswerAsker):
            self._answer(order)
        elif isinstance(order, TermEnds):
            self._process.after(0.0, self._on_news, order)
        elif isinstance(order, SendBeat):
            self._beat(self._contacts[self._number])
        elif not isinstance(order, ConfirmLeft | Log):
            if isinstance(order, Question):
                member = order.member
                self._is_newcomer = not (member.has_history or member.last_num_groups)
            self._contacts[self._number].stream.to_server(order)

    def _answer(self, order: AnswerAsker) -> None:
        site = self._site
        is_leaving = self.machine.state is LinkState.LEAVING
        if isinstance(order.outcome, Quorum) and not is_leaving:  # else its workers are no more
            record = site.lighthouses.splits.record_quorum
            record(site.job, site.name, self._host, order.outcome, self._is_newcomer)
        self._on_outcome(order.round, order.outcome)

    def _connect(self, order: Connect) -> None:
        self._number = number = order.connection
        self._site.on_hello(order.hello)
        self._host = order.address
        end = StreamEnd(self._process, partial(self._receive, number), partial(self._ended, order))
        stream = self._network.connect(end, self._site.lighthouses.hosts[order.address].accept)
        if stream is None:
            return
        self._contacts[number] = _Contact(stream, order.hello)
        if self._site.has_sessions:
            stream.to_server(Introduction(self._site.job, order.hello, has_session=True))
        else:
            refuse: Input = lambda machine, now: machine.not_supported(number, now)  # noqa: E731
            self._process.after(2 * self._network.latency(self._process), self._tell, refuse)

    def _beat(self, contact: _Contact) -> None:
        contact.num_beats += 1
        if self._site.has_sessions:
            contact.stream.to_server(self._make_beat())
            return
        number = self._number
        if contact.num_beats == 1:  # the lighthouse does not know it before; answers with a welcome
            introduction = Introduction(self._site.job, contact.hello, has_session=False)
            contact.stream.to_server(introduction)
        else:
            contact.stream.to_server(Beat())
            if not self._network.is_cut(self._process.name):
                back_s = 2 * self._network.latency(self._process)
                self._process.after(back_s, self._receive, number, Welcome(0.0))
        args = number, contact, contact.num_beats
        self._process.after(BEAT_TIMEOUT_S, self._look_at_beat, *args)

    def _look_at_beat(self, number: int, contact: _Contact, beat: int) -> None:
        if contact.num_answered < beat:
            contact.num_answered = beat
            self._tell(lambda machine, now: machine.beat_was_late(number, now))

    def _probe(self, order: Probe) -> None:
        """A lighthouse that is frozen, or cut off from this group, does not answer."""
        answers: dict[str, bool] = {}

        def answer(address: str, is_taken: bool) -> None:
            if address in answers:
                return
            answers[address] = is_taken
            if len(answers) == len(order.addresses):
                takers = [each for each, takes in answers.items() if takes]
                self._tell(lambda machine, now: machine.probed(order.connection, takers, now))

        def ask(address: str, host: LighthouseActor) -> None:
            back_s = self._network.latency(self._process)
            self._process.after(back_s, answer, address, host.accepts_groups())

        for address in order.addresses:
            host = self._site.lighthouses.hosts[address]
            way_s = self._network.latency(self._process)
            self._process.after(order.timeout_s, answer, address, False)
            if self._network.is_cut(self._process.name):
                continue
            if host.process.is_dead:
                self._process.after(way_s, answer, address, False)
            else:
                host.process.after(way_s, ask, address, host)

    def _receive(self, number: int, news: News | QuorumAnswer) -> None:
        contact = self._contacts.get(number)
        if contact is None or (self.loses is not None and self.loses(news)):
            return
        if isinstance(news, Welcome):
            contact.num_answered = contact.num_beats
            self._tell(lambda machine, now: machine.welcomed(number, news.min_interval_s, now))
        elif isinstance(news, QuorumAnswer):
            self._tell(lambda machine, now: machine.answered(number, *news, now))
        elif isinstance(news, Refusal):
            self._tell(lambda machine, now: machine.answered(number, news.number, news.error, now))
        elif isinstance(news, Lost | Kill | Drain | NewcomerWaits | TermEnds) and self.machine.news(
            number
        ):
            self._on_news(news)

    def _ended(self, order: Connect, reason: str | TorchFTError) -> None:
        error = reason
        if isinstance(error, str):
            error = Unreachable("lighthouse", order.address, error)
        self._tell(lambda machine, now: machine.closed(order.connection, error, now))
