"""Carries messages: late, but in order; a stream breaks as a whole, and both ends notice it.

That is what the real transport allows. A cut host's messages are kept by its system and arrive when
the cut is over, unless the keepalive has given the stream up by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tools.sim.world import Process, VirtualWorld
from torchft_svc.errors import TorchFTError

MEAN_LATENCY_S = 0.0005
# As the real channels: managers and agents send all the time, so their systems miss the other one's
# before a ping does. A server notices it when its ping is not answered.
MIN_KEEPALIVE_S, MAX_KEEPALIVE_S = 5.0, 10.0
MAX_SERVER_KEEPALIVE_S = 25.0
# How long a connection may take, as `torchft_svc.rpc.channel` has it.
CONNECT_TIMEOUT_S = 1.0

Reason = str | TorchFTError  # why a stream has ended; an error is what the server has said


class Network:
    """Which processes are cut off from the others, and how slow the way to each of them is."""

    def __init__(self, world: VirtualWorld) -> None:
        self.world = world
        self._lag: dict[str, float] = {}
        self._cut: set[str] = set()
        self._streams: dict[str, list[Stream]] = {}
        self._waiting: dict[str, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {}

    def latency(self, process: Process) -> float:
        """How long a message to or from ``process`` takes."""
        return process.chance.expovariate(1.0) * MEAN_LATENCY_S * self._lag.get(process.name, 1.0)

    def set_lag(self, name: str, factor: float) -> None:
        self._lag[name] = factor
        if factor == 1.0:
            del self._lag[name]

    def cut(self, name: str) -> None:
        """A manager ``name`` and the lighthouse, a worker ``name`` and its peers, receive
        nothing."""
        self._cut.add(name)
        for stream in self._streams.get(name, ()):
            stream.begin_silence()

    def mend(self, name: str) -> None:
        self._cut.discard(name)
        for stream in list(self._streams.get(name, ())):
            stream.end_silence()
        for action, args in self._waiting.pop(name, ()):
            action(*args)

    def when_mended(self, name: str, action: Callable[..., None], *args: Any) -> None:
        """Call ``action`` now, or when the cut is over."""
        if name in self._cut:
            self._waiting.setdefault(name, []).append((action, args))
        else:
            action(*args)

    def is_cut(self, name: str) -> bool:
        return name in self._cut

    def connect(
        self, client: StreamEnd, server: Callable[[Stream], StreamEnd | None]
    ) -> Stream | None:
        """Open a stream; ``server`` makes the other end (None: nobody listens there, see
        `StreamEnd.on_end`)."""
        if self.is_cut(client.process.name):
            client.process.after(CONNECT_TIMEOUT_S, client.on_end, "the connection timed out")
            return None
        stream = Stream(self, client)
        other = server(stream)
        if other is None:
            client.process.after(self.latency(client.process), client.on_end, "refused")
            return None
        stream.ends = (client, other)
        self._streams.setdefault(client.process.name, []).append(stream)
        for end in stream.ends:
            end.process.on_death.append(stream.on_death(end))
        return stream

    def forget(self, stream: Stream) -> None:
        streams = self._streams.get(stream.name, [])
        if stream in streams:
            streams.remove(stream)
        if not streams:
            self._streams.pop(stream.name, None)

    def break_streams(self, name: str) -> None:
        """A device on the way forgets the connections of ``name``: both ends live, and lose what
        has not arrived yet."""
        for stream in list(self._streams.get(name, ())):
            for end in stream.ends:
                end.last_arrival = self.world.now
            stream.end("the connection was reset")

    def half_open(self, name: str) -> None:
        """The same, but the servers notice nothing until their keepalive times out."""
        for stream in list(self._streams.get(name, ())):
            stream.lose_client()


class StreamEnd:
    """One end of a stream: where its messages arrive, and the news that it has ended."""

    def __init__(
        self, process: Process, on_message: Callable[[Any], None], on_end: Callable[[Any], None]
    ) -> None:
        self.process = process
        self.on_message = on_message
        self.on_end = on_end
        self.is_open = True
        self.last_arrival = 0.0


class Stream:
    """Messages between a group's manager and the lighthouse."""

    def __init__(self, network: Network, client: StreamEnd) -> None:
        self._network = network
        self.name = client.process.name
        self.ends: tuple[StreamEnd, StreamEnd] = (client, client)
        # What a cut holds up: what was on its way when it began, and what was sent since.
        self._caught: deque[tuple[StreamEnd, object]] = deque()
        self._held: deque[tuple[StreamEnd, object]] = deque()
        self._silences = 0
        self._broke_in_silence = False
        self._is_half_open = False

    def send(self, to: StreamEnd, message: object) -> None:
        """The sender learns from `StreamEnd.on_end` that the stream is broken."""
        if not to.is_open:
            return
        if self._network.is_cut(self.name):
            self._held.append((to, message))
            return
        self._deliver(to, message)

    def to_client(self, message: object) -> None:
        self.send(self.ends[0], message)

    def to_server(self, message: object) -> None:
        self.send(self.ends[1], message)

    def end(self, reason: Reason) -> None:
        """Both ends receive the reason, after what was sent before."""
        for end in self.ends:
            self._deliver(end, None, reason)
        self._network.forget(self)

    def cancel(self) -> None:
        client, server = self.ends
        client.is_open = False
        if self._is_half_open:
            return
        if self._network.is_cut(self.name):
            self._broke_in_silence = True
            return
        self._deliver(server, None, "it was cancelled")
        self._network.forget(self)

    def lose_client(self) -> None:
        """Break the connection for the client alone; its messages still arrive."""
        self._is_half_open = True
        client, server = self.ends
        client.last_arrival = server.process.world.now
        self._deliver(client, None, "the connection was reset")
        self._network.forget(self)
        patience_s = client.process.chance.uniform(MIN_KEEPALIVE_S, MAX_SERVER_KEEPALIVE_S)
        server.process.after(patience_s, self._deliver, server, None, "the keepalive timed out")

    def on_death(self, end: StreamEnd) -> Callable[[], None]:
        """Return what to do when the process at ``end`` dies: its system informs the other end."""

        def died() -> None:
            end.is_open = False
            if self._network.is_cut(self.name):
                self._broke_in_silence = True
                return
            self.end("the process at the other end is gone")

        return died

    def begin_silence(self) -> None:
        self._silences += 1
        longest = (MAX_KEEPALIVE_S, MAX_SERVER_KEEPALIVE_S)
        for end, longest_s in zip(self.ends, longest, strict=True):
            patience_s = end.process.chance.uniform(MIN_KEEPALIVE_S, longest_s)
            end.process.after(patience_s, self._give_up, end, self._silences)

    def end_silence(self) -> None:
        for messages in (self._caught, self._held):
            while messages:
                self._deliver(*messages.popleft())
        if self._broke_in_silence:
            self._broke_in_silence = False
            self.end("the other end has given up")

    def _give_up(self, end: StreamEnd, silence: int) -> None:
        if self._network.is_cut(self.name) and silence == self._silences and end.is_open:
            self._broke_in_silence = True
            end.is_open = False
            end.on_end("the keepalive timed out")

    def _deliver(self, to: StreamEnd, message: object, reason: Reason = "") -> None:
        at = max(
            to.last_arrival, to.process.world.now + self._network.latency(self.ends[0].process)
        )
        to.last_arrival = at
        to.process.after(at - to.process.world.now, self._arrive, to, message, reason)

    def _arrive(self, to: StreamEnd, message: object, reason: Reason) -> None:
        if not to.is_open:
            return
        if message is None:
            to.is_open = False
            to.on_end(reason)
        elif self._network.is_cut(self.name):
            self._caught.append((to, message))
        else:
            to.on_message(message)
