"""Copies what launchers' agents and a lighthouse send to the wire and back.

Each record that comes in is checked: `RequestRefused` has the reason.
"""

from __future__ import annotations

import functools

from torchft_svc.core.launch.world import (
    FAILURE_WINDOW_S,
    AgentHello,
    AgentLeave,
    AgentMessage,
    AgentState,
    AgentStatus,
    AgentWelcome,
    Node,
    RunClosed,
    RunMove,
    RunSettings,
    RunWaiting,
    WarmUp,
    World,
    WorldNews,
    WorldPaused,
    WorldReached,
)
from torchft_svc.core.limits import MAX_DURATION_S, check_name, one_line
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.parsing import checked, parser
from torchft_svc.rpc.records import Codec, Field, OneOf, list_of, milliseconds, within

# A hello has to fit into a request. The world of 2,000 nodes takes about 150 KB; a lighthouse that
# is new to a larger run begins a new world of it.
MAX_WORLD_BYTES = 200 * 1024

_STATUSES: dict[AgentStatus, pb.AgentStatus] = {
    AgentStatus.JOINING: pb.AGENT_JOINING,
    AgentStatus.WARMING: pb.AGENT_WARMING,
    AgentStatus.READY: pb.AGENT_READY,
    AgentStatus.WORKING: pb.AGENT_WORKING,
    AgentStatus.FINISHED: pb.AGENT_FINISHED,
}
_STATUSES_OF_WIRE = {number: status for status, number in _STATUSES.items()}


def _status_from_wire(number: pb.AgentStatus) -> AgentStatus:
    status = _STATUSES_OF_WIRE.get(number)
    if status is None:
        raise RequestRefused(f"an agent's status {number} is not known")
    return status


AGENT_STATUS = Field("", _STATUSES.__getitem__, _status_from_wire)

_NODE = Codec(Node, pb.Node)
_WORLD = Codec(World, pb.World, fields={"nodes": list_of(_NODE)}, checks=True)
_STATE = Codec(AgentState, pb.AgentState, fields={"status": AGENT_STATUS}, checks=True)
_SETTINGS = Codec(
    RunSettings,
    pb.RunSettings,
    fields={
        "join_timeout_s": milliseconds("join_timeout_ms"),
        "join_window_s": milliseconds("join_window_ms"),
        "failure_window_s": Field(
            "failure_window_ms",
            lambda seconds: max(1, round(seconds * 1000)),
            lambda number: number / 1000 or FAILURE_WINDOW_S,
        ),
    },
    checks=True,
)
_MOVE = Codec(RunMove, pb.RunMove, checks=True)
_parse_world = parser(pb.World)

# -- from an agent ---------------------------------------------------------------------------------


def agent_hello_to_wire(run_id: str, hello: AgentHello) -> pb.AgentRequest:
    world = b"" if hello.world is None else _WORLD.to_wire(hello.world).SerializeToString()
    message = pb.AgentHello(
        run_id=run_id,
        node=_NODE.to_wire(hello.node),
        settings=_SETTINGS.to_wire(hello.settings),
        state=_STATE.to_wire(hello.state),
        world=world if len(world) <= MAX_WORLD_BYTES else b"",
    )
    return pb.AgentRequest(hello=message)


def agent_hello_from_wire(request: pb.AgentRequest | None) -> tuple[str, AgentHello]:
    """The first message of a stream (None: none came): the run's id, and the hello.

    Raises:
        RequestRefused: it is another one, or out of bounds.
    """
    if request is None or request.WhichOneof("kind") != "hello":
        found = "" if request is not None else "; none came"
        raise RequestRefused(f"an agent's stream begins with a hello{found}")
    message = request.hello
    check_name("run_id", message.run_id)
    settings = _SETTINGS.from_wire(message.settings)
    node = _NODE.from_wire(message.node)
    node.check()
    world = world_from_bytes(message.world) if message.world else None
    return message.run_id, AgentHello(node, settings, _STATE.from_wire(message.state), world)


_MESSAGES = OneOf(
    pb.AgentRequest,
    "an agent's stream",
    {
        "state": _STATE,
        "leave": Codec(
            AgentLeave, pb.AgentLeave, fields={"reason": Field("", one_line)}, checks=True
        ),
        "move": _MOVE,
    },
)


def agent_message_to_wire(message: AgentMessage) -> pb.AgentRequest:
    return _MESSAGES.to_wire(message)


def agent_message_from_wire(request: pb.AgentRequest) -> AgentMessage:
    """A message behind the first one.

    Raises:
        RequestRefused: it has no place there, or is out of bounds.
    """
    message: AgentMessage = _MESSAGES.from_wire(request)
    return message


# -- from the lighthouse ---------------------------------------------------------------------------


_NEWS = OneOf(
    pb.AgentNews,
    "an agent",
    {
        "world": _WORLD,
        "welcome": Codec(
            AgentWelcome,
            pb.AgentWelcome,
            fields={
                "beat_interval_s": Field(
                    "beat_interval_ms",
                    lambda seconds: round(seconds * 1000),
                    lambda number: min(max(number / 1000, 0.0), MAX_DURATION_S),
                )
            },
        ),
        "warm_up": Codec(
            WarmUp, pb.WarmUp, fields={"expected": Field("", _WORLD.to_wire, _WORLD.from_wire)}
        ),
        "paused": Codec(WorldPaused, pb.WorldPaused, texts=one_line),
        "waiting": Codec(RunWaiting, pb.RunWaiting, texts=one_line),
        "closed": Codec(
            RunClosed,
            pb.RunClosed,
            fields={"within_s": within("within_ms")},
            texts=one_line,
        ),
        "reached": Codec(WorldReached, pb.WorldReached, checks=True),
        "move": _MOVE,
    },
)


def world_news_to_wire(news: WorldNews) -> bytes:
    """The encoded news, the same for all streams that receive it."""
    return _NEWS.to_wire(news).SerializeToString()


def world_news_from_wire(message: pb.AgentNews) -> WorldNews:
    """News of a lighthouse.

    Raises:
        RequestRefused: no lighthouse would send that.
    """
    news: WorldNews = _NEWS.from_wire(message)
    return news


@functools.lru_cache(maxsize=8)
def world_from_bytes(encoded: bytes) -> World:
    """The world that a hello has; all nodes of a run send the same one, which is parsed once."""
    return _WORLD.from_wire(checked(_parse_world(encoded), "the world"))
