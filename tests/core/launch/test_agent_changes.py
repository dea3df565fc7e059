"""Tests what an agent sends its workers about a change of their world."""

from __future__ import annotations

import pytest

from torchft_svc.core.launch.agent import (
    AgentConfig,
    AgentMachine,
    Broadcast,
    Order,
)
from torchft_svc.core.launch.restart import RestartPolicy
from torchft_svc.core.launch.worker_events import WorkerState, WorldChangeEvent
from torchft_svc.core.launch.world import AgentWelcome, Node, RunSettings, World

UP, DOWN = WorldChangeEvent.SCALE_UP, WorldChangeEvent.SCALE_DOWN


def world(round_: int, nodes: str) -> World:
    made = tuple(Node(node_id=each, host="host", num_workers=2) for each in nodes)
    return World(round_, made, 29500 + round_)


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ("abc", UP),
        ("a", DOWN),
        ("ac", DOWN),
        ("acd", DOWN),  # it is larger, but b is lost, and may be frozen in a collective
        ("ab", DOWN),  # another round for the same nodes: somebody has left the last one
    ],
)
def test_a_scale_up_keeps_all_nodes(after: str, change: WorldChangeEvent) -> None:
    config = AgentConfig(
        node=Node(node_id="a", host="host", num_workers=2),
        settings=RunSettings(min_nodes=1, max_nodes=4),
        policy=RestartPolicy.SOFT,
    )
    agent = AgentMachine(config, 0.0)
    agent.started(0.0)
    agent.news_received(AgentWelcome(1.0), 0.0)
    agent.store_opened(29501, 0.0)
    agent.news_received(world(1, "ab"), 0.0)
    agent.workers_reached(1, 0.1)
    orders: tuple[Order, ...] = tuple(agent.news_received(world(2, after), 1.0))
    broadcasts = [order for order in orders if isinstance(order, Broadcast)]
    assert broadcasts == [
        Broadcast(WorkerState.PAUSED, world(1, "ab"), change),
        Broadcast(WorkerState.HEALTHY, world(2, after), change),
    ]
