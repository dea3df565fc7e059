"""Tests the worlds that a launched run gets: the machines of both ends, as a play."""

from __future__ import annotations

import pytest
from support.core.launch import Launch

from torchft_svc.core.rendezvous import MAX_NODES_OF_ALL_RUNS, Rendezvous, RendezvousConfig
from torchft_svc.core.world import (
    MAX_NODES,
    AgentHello,
    AgentState,
    AgentStatus,
    Node,
    RunSettings,
    World,
)
from torchft_svc.errors import RequestRefused


def test_a_cold_start_a_loss_and_a_warm_join() -> None:
    launch = Launch("1:3")
    for name in "abc":
        launch.start(name)
    launch.passes(1.1)
    assert launch.worlds == [("a", "b", "c")]
    assert launch.agents["b"].names == ["start 1"]
    launch.passes(3.0)
    launch.kill("a")
    launch.passes(0.1)
    assert launch.worlds[1:] == [("c", "b")]
    assert launch.world.master_addr == "host-c"
    assert launch.agents["b"].names == ["start 1", "PAUSED 1 SCALE_DOWN", "HEALTHY 2 SCALE_DOWN"]
    newcomer = launch.start("d", is_slow=True)
    launch.passes(3.0)
    assert newcomer.names == ["start expected 3"]
    assert len(launch.worlds) == 2
    launch.answer("d")
    launch.passes(0.1)
    assert launch.worlds[2:] == [("c", "b", "d")]
    assert newcomer.names == ["start expected 3", "HEALTHY 3 SCALE_UP"]
    assert launch.agents["b"].names[-2:] == ["PAUSED 2 SCALE_UP", "HEALTHY 3 SCALE_UP"]


def test_worlds_that_agents_tell_do_not_fill_the_memory() -> None:
    rendezvous = Rendezvous(RendezvousConfig(), 0.0)
    nodes = tuple(Node(node_id=f"n{n}", host="h", num_workers=1) for n in range(MAX_NODES))
    settings = RunSettings(min_nodes=1, max_nodes=MAX_NODES)
    state = AgentState(status=AgentStatus.WORKING, round=3)
    hello = AgentHello(nodes[0], settings, state, World(3, nodes, 1))
    num_runs = MAX_NODES_OF_ALL_RUNS // MAX_NODES
    for stream in range(num_runs):
        rendezvous.opened(stream, f"run {stream}", hello, 0.0)
    with pytest.raises(RequestRefused, match="nodes in all runs, 200000 are allowed"):
        rendezvous.opened(num_runs, "one more", hello, 0.0)
    again = AgentHello(nodes[1], settings, state, World(3, nodes, 1))
    rendezvous.opened(num_runs + 1, "run 1", again, 0.0)
