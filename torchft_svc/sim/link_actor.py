"""A manager's link to its lighthouses in a simulated world: a driver of `LinkMachine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torchft_svc.core.activity import Activity
from torchft_svc.core.group_orders import AskLighthouse
from torchft_svc.core.lighthouse_link import LinkMachine
from torchft_svc.core.link_types import (
    AnswerAsker,
    Close,
    Connect,
    LinkConfig,
    Order,
    Probe,
    SendBeat,
    SendLeave,
    SendQuestion,
    SendWithdrawal,
)
from torchft_svc.core.types import Quorum
from torchft_svc.errors import TorchFTError, Unreachable
from torchft_svc.sim.network import Network, Stream, StreamEnd
from torchft_svc.sim.world import Event, Process

Outcome = Quorum | TorchFTError
Input = Callable[[LinkMachine, float], object]


class OnQuorum(Protocol):
    """Hears of each quorum that a group takes, and at which lighthouse."""

    def __call__(
        self, job: str, group: str, host: str, quorum: Quorum, is_newcomer: bool, /
    ) -> None: ...


class Server(Protocol):
    """What a link has to know of a simulated lighthouse."""

    @property
    def process(self) -> Process:
        """Of now."""

    def accept(self, stream: Stream) -> StreamEnd | None:
        """The server's end of a new stream, if somebody listens."""

    def takes_groups(self) -> bool:
        """Whether it would take a group now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSite:
    """Where a link is: in which job, under which name, and with which lighthouses."""

    job: str
    name: str
    has_sessions: bool
    lighthouses: Mapping[str, Server]
    on_quorum: OnQuorum


@dataclass(slots=True)
class _Contact:
    stream: Stream
    replica_id: str
    num_beats: int = 0
    num_answered: int = 0  # of the beats that are calls


class LinkActor:
    """One life of a manager's link."""

    def __init__(
        self,
        process: Process,
        network: Network,
        site: LinkSite,
        config: LinkConfig,
        on_news: Callable[..., None],
        on_outcome: Callable[[int, Outcome], None],
        activity: Callable[[], Activity | None],
    ) -> None:
        self._process = process
        self._network = network
        self._site = site
        self._on_news = on_news
        self._on_outcome = on_outcome
        self._activity = activity
        self._num_incarnations = 0
        self._contacts: dict[int, _Contact] = {}
        self._timer: Event | None = None
        self._host = ""  # that it is connected to
        self._is_newcomer = True  # as it told in its last question
        draw = process.chance.random
        self.machine = LinkMachine(config, self._new_replica_id, draw, address=process.name)
        self._tell(lambda machine, now: machine.start(now))

    def _new_replica_id(self) -> str:
        self._num_incarnations += 1
        return f"{self._site.name}:{self._process.name}.{self._num_incarnations}"

    @property
    def replica_id(self) -> str:
        """Of the incarnation that asks now."""
        return self.machine.replica_id

    @property
    def seen_quorum_id(self) -> int:
        """Of the newest quorum that the group was told."""
        return self.machine.seen_quorum_id

    def ask(self, ask: AskLighthouse, timeout_s: float) -> None:
        """``on_outcome`` hears of the outcome, after this has returned."""
        self._tell_soon(lambda machine, now: machine.ask(ask, timeout_s, now))

    def withdraw(self, round_: int) -> None:
        """Nobody waits for the answer any more."""
        self._tell_soon(lambda machine, now: machine.withdraw(round_, now))

    def leave(self, reason: str, between_steps: bool, ends: bool) -> None:
        self._tell(
            lambda machine, now: machine.leave(reason, now, between_steps=between_steps, ends=ends)
        )

    # -- the machine's shell ---------------------------------------------------------------------

    def _tell_soon(self, tell: Input) -> None:
        self._process.after(0.0, self._tell, tell)

    def _tell(self, tell: Input) -> None:
        now = self._process.world.now
        tell(self.machine, now)
        for order in self.machine.take_orders():
            self._carry_out(order)
        if self._timer is not None:
            self._timer.cancelled = True
            self._timer = None
        at = self.machine.next_deadline(now)
        if at < float("inf"):
            self._timer = self._process.after(at - now, self._tell, LinkMachine.tick)

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
            if isinstance(order.outcome, Quorum):
                site = self._site
                site.on_quorum(site.job, site.name, self._host, order.outcome, self._is_newcomer)
            self._on_outcome(order.round, order.outcome)
        elif isinstance(order, SendQuestion | SendWithdrawal | SendBeat | SendLeave):
            self._send(order, self._contacts[order.connection])

    def _connect(self, order: Connect) -> None:
        number, self._host = order.connection, order.address
        end = StreamEnd(self._process, partial(self._hear, number), partial(self._ended, order))
        stream = self._network.connect(end, self._site.lighthouses[order.address].accept)
        if stream is None:
            return
        self._contacts[number] = _Contact(stream, order.replica_id)
        if self._site.has_sessions:
            stream.to_server("hello", self._site.job, order.replica_id, order.last)
        else:
            refuse: Input = lambda machine, now: machine.not_supported(number, now)  # noqa: E731
            self._process.after(2 * self._network.latency(self._process), self._tell, refuse)

    def _send(
        self, order: SendQuestion | SendWithdrawal | SendBeat | SendLeave, contact: _Contact
    ) -> None:
        if isinstance(order, SendBeat):
            self._beat(order, contact)
        elif isinstance(order, SendQuestion):
            member = order.member
            self._is_newcomer = not (member.has_history or member.last_num_groups)
            contact.stream.to_server("question", order.number, order.member, order.timeout_s)
        elif isinstance(order, SendWithdrawal):
            contact.stream.to_server("withdrawal", order.number)
        else:
            contact.stream.to_server("leave", order.reason, order.between_steps, order.ends)

    def _beat(self, order: SendBeat, contact: _Contact) -> None:
        contact.num_beats += 1
        if self._site.has_sessions:
            doing = self._activity()
            now = self._process.world.now
            told = () if doing is None else (doing.phase, doing.step, now - doing.since)
            contact.stream.to_server("beat", *told)
            return
        if contact.num_beats == 1:  # the lighthouse does not know it before; answers with a welcome
            contact.stream.to_server("hello", self._site.job, contact.replica_id, None)
        else:
            contact.stream.to_server("beat")
            if not self._network.is_cut(self._process.name):
                back_s = 2 * self._network.latency(self._process)
                self._process.after(back_s, self._hear, order.connection, "welcome", 0.0)
        args = order.connection, contact, contact.num_beats
        self._process.after(order.timeout_s, self._look_at_beat, *args)

    def _look_at_beat(self, number: int, contact: _Contact, beat: int) -> None:
        if contact.num_answered < beat:
            contact.num_answered = beat
            self._tell(lambda machine, now: machine.beat_was_late(number, now))

    def _probe(self, order: Probe) -> None:
        """Whoever is cut off, or asks one that is frozen, hears nothing."""
        answers: dict[str, bool] = {}

        def hear(address: str, is_taken: bool) -> None:
            if address in answers:
                return
            answers[address] = is_taken
            if len(answers) == len(order.addresses):
                takers = [each for each, takes in answers.items() if takes]
                self._tell(lambda machine, now: machine.probed(order.connection, takers, now))

        def ask(address: str, server: Server) -> None:
            back_s = self._network.latency(self._process)
            self._process.after(back_s, hear, address, server.takes_groups())

        for address in order.addresses:
            server, way_s = self._site.lighthouses[address], self._network.latency(self._process)
            self._process.after(order.timeout_s, hear, address, False)
            if self._network.is_cut(self._process.name):
                continue
            if server.process.is_dead:
                self._process.after(way_s, hear, address, False)
            else:
                server.process.after(way_s, ask, address, server)

    def _hear(self, number: int, kind: str, *what: object) -> None:
        contact = self._contacts.get(number)
        if contact is None:
            return
        if kind == "welcome":
            (interval_s,) = what
            assert isinstance(interval_s, float | int)
            contact.num_answered = contact.num_beats
            self._tell(lambda machine, now: machine.welcomed(number, interval_s, now))
        elif kind in ("quorum", "refusal"):
            question, outcome = what
            assert isinstance(question, int)
            assert isinstance(outcome, Quorum | TorchFTError)
            self._tell(lambda machine, now: machine.answered(number, question, outcome, now))
        elif kind in ("lost", "kill", "drain") and self.machine.news(number):
            self._on_news(kind, *what)

    def _ended(self, order: Connect, reason: str | TorchFTError) -> None:
        error = reason
        if isinstance(error, str):
            error = Unreachable("lighthouse", order.address, error)
        self._tell(lambda machine, now: machine.closed(order.connection, error, now))
