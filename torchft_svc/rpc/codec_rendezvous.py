"""Between the messages of launchers' agents on the wire and their values.

Whatever comes in is checked: `RequestRefused` says what is wrong with it.
"""

from __future__ import annotations

import functools
from typing import Literal

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
    check_round,
)
from torchft_svc.core.limits import MAX_ADDRESS_LENGTH, MAX_DURATION_S, check_name, one_line
from torchft_svc.errors import RequestRefused
from torchft_svc.proto import torchft_pb2 as pb
from torchft_svc.rpc.parsing import checked, is_of_a_newer_kind, parser

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
_parse_world = parser(pb.World)


def agent_status_to_wire(status: AgentStatus) -> pb.AgentStatus:
    return _STATUSES[status]


def agent_status_from_wire(number: pb.AgentStatus) -> AgentStatus:
    """Raises `RequestRefused` if this version does not know it."""
    status = _STATUSES_OF_WIRE.get(number)
    if status is None:
        raise RequestRefused(f"an agent's status {number} is not known")
    return status


# -- what agents tell ------------------------------------------------------------------------------


def agent_hello_to_wire(run_id: str, hello: AgentHello) -> pb.AgentRequest:
    settings = hello.settings
    world = b"" if hello.world is None else world_to_wire(hello.world).SerializeToString()
    message = pb.AgentHello(
        run_id=run_id,
        node=_node_to_wire(hello.node),
        settings=pb.RunSettings(
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            join_timeout_ms=round(settings.join_timeout_s * 1000),
            join_window_ms=round(settings.join_window_s * 1000),
            max_run_failures=settings.max_run_failures,
            max_node_failures=settings.max_node_failures,
            failure_window_ms=max(1, round(settings.failure_window_s * 1000)),
            waits_for_lost=settings.waits_for_lost,
            is_soft=settings.is_soft,
        ),
        state=_state_to_wire(hello.state),
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
    settings = _settings_from_wire(message.settings)
    settings.check()
    node = _node_from_wire(message.node)
    node.check()
    world = world_from_bytes(message.world) if message.world else None
    return message.run_id, AgentHello(node, settings, _state_from_wire(message.state), world)


def _settings_from_wire(message: pb.RunSettings) -> RunSettings:
    def limit(field: Literal["max_run_failures", "max_node_failures"]) -> int | None:
        return getattr(message, field) if message.HasField(field) else None

    return RunSettings(
        min_nodes=message.min_nodes,
        max_nodes=message.max_nodes,
        join_timeout_s=message.join_timeout_ms / 1000,
        join_window_s=message.join_window_ms / 1000,
        max_run_failures=limit("max_run_failures"),
        max_node_failures=limit("max_node_failures"),
        failure_window_s=message.failure_window_ms / 1000 or FAILURE_WINDOW_S,
        waits_for_lost=message.waits_for_lost,
        is_soft=message.is_soft,
    )


def agent_message_to_wire(message: AgentMessage) -> pb.AgentRequest:
    if isinstance(message, AgentState):
        return pb.AgentRequest(state=_state_to_wire(message))
    if isinstance(message, RunMove):
        return pb.AgentRequest(move=pb.RunMove(address=message.address))
    leave = pb.AgentLeave(
        reason=one_line(message.reason), failed=message.failed, closes=message.closes
    )
    return pb.AgentRequest(leave=leave)


def agent_message_from_wire(request: pb.AgentRequest) -> AgentMessage | None:
    """None: only a newer version knows what it is, and does not need it here.

    Raises:
        RequestRefused: it has no place behind the first message, or is out of bounds.
    """
    kind = request.WhichOneof("kind")
    if kind == "state":
        return _state_from_wire(request.state)
    if kind == "leave":
        message = request.leave
        leave = AgentLeave(message.reason, failed=message.failed, closes=message.closes)
        leave.check()
        return leave
    if kind == "move":
        move = RunMove(request.move.address)
        move.check()
        return move
    if kind is None and is_of_a_newer_kind(request):
        return None
    raise RequestRefused(f"an agent's stream does not accept {kind or 'an empty message'}")


def _state_to_wire(state: AgentState) -> pb.AgentState:
    return pb.AgentState(
        status=agent_status_to_wire(state.status),
        round=state.round,
        reached=state.reached,
        store_port=state.store_port,
        can_warm_up=state.can_warm_up,
        num_restarts=state.num_restarts,
        num_failures=state.num_failures,
        trained_since=state.trained_since,
        trained_until=state.trained_until,
        paused=state.paused,
    )


def _state_from_wire(message: pb.AgentState) -> AgentState:
    state = AgentState(
        status=agent_status_from_wire(message.status),
        round=message.round,
        reached=message.reached,
        store_port=message.store_port,
        can_warm_up=message.can_warm_up,
        num_restarts=message.num_restarts,
        num_failures=message.num_failures,
        trained_since=message.trained_since,
        trained_until=message.trained_until,
        paused=message.paused,
    )
    state.check()
    return state


# -- what the lighthouse tells ---------------------------------------------------------------------


def world_news_to_wire(news: WorldNews) -> bytes:
    """Encoded, for all streams that are told the same."""
    if isinstance(news, World):
        message = pb.AgentNews(world=world_to_wire(news))
    elif isinstance(news, AgentWelcome):
        interval_ms = round(news.beat_interval_s * 1000)
        message = pb.AgentNews(welcome=pb.AgentWelcome(beat_interval_ms=interval_ms))
    elif isinstance(news, WarmUp):
        message = pb.AgentNews(warm_up=pb.WarmUp(expected=world_to_wire(news.expected)))
    elif isinstance(news, WorldPaused):
        message = pb.AgentNews(paused=pb.WorldPaused(reason=one_line(news.reason)))
    elif isinstance(news, WorldReached):
        message = pb.AgentNews(reached=pb.WorldReached(round=news.round))
    elif isinstance(news, RunMove):
        message = pb.AgentNews(move=pb.RunMove(address=news.address))
    elif isinstance(news, RunWaiting):
        waiting = pb.RunWaiting(reason=one_line(news.reason), num_failures=news.num_failures)
        message = pb.AgentNews(waiting=waiting)
    else:
        reason = one_line(news.reason)
        closed = pb.RunClosed(reason=reason, failed=news.failed, drained=news.drained)
        message = pb.AgentNews(closed=closed)
    return message.SerializeToString()


def world_news_from_wire(message: pb.AgentNews) -> WorldNews | None:
    """None: only a newer version knows what it is.

    Raises:
        RequestRefused: no lighthouse would say that.
    """
    kind = message.WhichOneof("kind")
    if kind == "world":
        return _world_from_wire(message.world)
    if kind == "warm_up":
        return WarmUp(_world_from_wire(message.warm_up.expected))
    if kind == "welcome":
        interval_s = message.welcome.beat_interval_ms / 1000
        return AgentWelcome(min(max(interval_s, 0.0), MAX_DURATION_S))
    if kind == "paused":
        return WorldPaused(one_line(message.paused.reason))
    if kind == "waiting":
        return RunWaiting(one_line(message.waiting.reason), message.waiting.num_failures)
    if kind == "closed":
        closed = message.closed
        return RunClosed(one_line(closed.reason), closed.failed, closed.drained)
    if kind == "reached":
        check_round(message.reached.round)
        return WorldReached(message.reached.round)
    if kind == "move":
        return RunMove(one_line(message.move.address, MAX_ADDRESS_LENGTH))
    return None


def world_to_wire(world: World) -> pb.World:
    nodes = map(_node_to_wire, world.nodes)
    return pb.World(round=world.round, nodes=nodes, master_port=world.master_port)


@functools.lru_cache(maxsize=8)
def world_from_bytes(encoded: bytes) -> World:
    """All nodes of a run tell a new lighthouse the same world: it is looked at once."""
    return _world_from_wire(checked(_parse_world(encoded), "the world"))


def _world_from_wire(message: pb.World) -> World:
    nodes = tuple(map(_node_from_wire, message.nodes))
    world = World(message.round, nodes, message.master_port)
    world.check()
    return world


def _node_to_wire(node: Node) -> pb.Node:
    return pb.Node(
        node_id=node.node_id,
        host=node.host,
        num_workers=node.num_workers,
        role=node.role,
        rank=node.rank,
    )


def _node_from_wire(message: pb.Node) -> Node:
    return Node(
        node_id=message.node_id,
        host=message.host,
        num_workers=message.num_workers,
        role=message.role,
        rank=message.rank if message.HasField("rank") else None,
    )
