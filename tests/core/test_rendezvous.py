"""Tests the worlds that a launched run gets: the machines of both ends, as a play."""

from __future__ import annotations

from support.core.launch import Launch


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
