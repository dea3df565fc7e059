"""Tests agents' links to a lighthouse: worlds, losses, restarts of the lighthouse, lists, trust."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import Agent, lighthouse, runs_at
from support.papers import authority
from support.running import eventually, refusing, silent, steady_address

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.launch.agent_link import LinkTrouble
from torchft_svc.core.launch.world import AgentStatus, AgentWelcome, RunClosed, RunWaiting, World
from torchft_svc.core.quorum.types import QuorumConfig
from torchft_svc.errors import AddressError, NotLeader, RequestRefused, Unauthorized, Unreachable
from torchft_svc.host.address import HostPort
from torchft_svc.host.loop import Background
from torchft_svc.lighthouse_server.driver import LighthouseDriver
from torchft_svc.lighthouse_server.servicer import lighthouse_service
from torchft_svc.rpc.security import Security
from torchft_svc.rpc.serving import serve

JOINING = AgentStatus.JOINING


def names(world: World) -> list[str]:
    return sorted(world.node_ids)


def test_nodes_meet_join_get_lost_and_leave() -> None:
    with lighthouse() as address, Agent(address, "a") as a, Agent(address, "b") as b:
        a.report(JOINING)
        b.report(JOINING)
        first = a.work()
        assert first == b.work()
        assert names(first) == ["a", "b"]
        with Agent(address, "c") as c:
            c.report(JOINING)
            second = c.work()
            assert names(second) == ["a", "b", "c"]
            assert second == a.work(first.round) == b.work(first.round)
            assert second.node_ids[:2] == first.node_ids, "a node that stays keeps its rank"
        third = a.work(second.round)
        assert names(third) == ["a", "b"], "its stream broke"
        assert third == b.work(second.round)
        assert third.master_port != second.master_port
        b.leave()
        assert names(a.work(third.round)) == ["a"]
        a.leave(closes=True)


def test_the_run_is_closed_for_all() -> None:
    with lighthouse() as address, Agent(address, "a") as a, Agent(address, "b") as b:
        for agent in (a, b):
            agent.report(JOINING)
        for agent in (a, b):
            agent.work()
        a.leave(closes=True, failed=True)
        closed = b.await_news(RunClosed)
        assert closed.failed
        assert "it has enough" in closed.reason
        b.leave()  # at once, as nobody listens


def test_a_node_waits_for_a_free_place() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a", max_nodes=2) as a,
        Agent(address, "b", max_nodes=2) as b,
        Agent(address, "c", max_nodes=2) as c,
    ):
        a.report(JOINING)
        b.report(JOINING)
        world = a.work()
        b.work()
        c.report(JOINING)
        c.await_news(RunWaiting, lambda news: "places are taken" in news.reason)
        b.leave()
        assert names(c.work(world.round)) == ["a", "c"]


def test_runs_do_not_concern_one_another() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a", run="one") as a,
        Agent(address, "b", run="two") as b,
    ):
        a.report(JOINING)
        b.report(JOINING)
        assert names(a.work()) == ["a"]
        assert names(b.work()) == ["b"]


def test_a_world_outlives_its_lighthouse() -> None:
    address = steady_address()
    with Agent(address, "a") as a, Agent(address, "b") as b:
        with lighthouse(address):
            a.report(JOINING)
            b.report(JOINING)
            world = a.work()
            b.work()
        trouble = a.await_news(LinkTrouble)
        assert isinstance(trouble.error, Unreachable)
        assert not trouble.is_final
        num_received = len(a.received)
        with lighthouse(address), Agent(address, "c") as c:
            c.report(JOINING)
            joined = c.work()
            assert names(joined) == ["a", "b", "c"]
            assert a.work(world.round) == joined
            later = a.received[num_received:]
            assert [type(each) for each in later if isinstance(each, AgentWelcome | World)] == [
                AgentWelcome,
                World,
            ], "the first world after it is the one with the newcomer"


def test_a_node_that_was_left_out_shows_another_lighthouse_no_world() -> None:
    address = steady_address()
    with Agent(address, "a") as a, Agent(address, "b") as b:
        with lighthouse(address):
            a.report(JOINING)
            b.report(JOINING)
            world = a.work()
            b.work()
            a.report(AgentStatus.WARMING, world)
            assert names(b.work(world.round)) == ["b"]
            eventually(lambda: isinstance(a.received[-1], RunWaiting))
            b.link.close()
        with lighthouse(address):
            [run] = eventually(lambda: runs_at(address))
            assert [node.node_id for node in run.nodes] == ["a"]
            assert run.round == 0


def test_the_first_lighthouse_of_a_list_that_answers_serves() -> None:
    with refusing() as nobody, lighthouse() as address, Agent(f"{nobody},{address}", "a") as a:
        a.report(JOINING)
        assert names(a.work()) == ["a"]


def test_all_go_back_to_an_earlier_lighthouse_in_their_world() -> None:
    first = steady_address()
    with (
        lighthouse() as second,
        Agent(f"{first},{second}", "a") as a,
        Agent(f"{first},{second}", "b") as b,
        Agent(first, "c") as c,
    ):
        a.report(JOINING)
        b.report(JOINING)
        world = a.work()
        assert world == b.work()
        with lighthouse(first):
            for agent in (a, b):
                eventually(lambda agent=agent: len(welcomes(agent)) == 2)
            c.report(JOINING)
            joined = c.work()
            assert names(joined) == ["a", "b", "c"]
            assert joined.node_ids[:2] == world.node_ids
            assert a.work(world.round) == joined
            assert [each for each in a.received if isinstance(each, World)] == [world, joined]


def welcomes(agent: Agent) -> list[AgentWelcome]:
    return [news for news in agent.received if isinstance(news, AgentWelcome)]


def test_a_lighthouse_that_does_not_lead_names_the_one_that_does() -> None:
    with lighthouse() as leader, not_leading(leader) as follower, Agent(follower, "a") as a:
        a.report(JOINING)
        trouble = a.await_news(LinkTrouble)
        assert isinstance(trouble.error, NotLeader)
        assert trouble.error.leader == leader
        assert names(a.work()) == ["a"]


@contextlib.contextmanager
def not_leading(leader: str) -> Iterator[str]:
    """Serve a lighthouse that does not lead; ``leader`` does."""

    def refuse() -> None:
        raise NotLeader(leader)

    driver = LighthouseDriver(QuorumConfig(), refuse)
    serving = Background(serve(lambda _: lighthouse_service(driver), HostPort("127.0.0.1", 0)))
    try:
        yield str(serving.value)
    finally:
        serving.close()


def test_a_lighthouse_that_is_silent_is_passed_over() -> None:
    with silent() as nobody, lighthouse() as address, Agent(f"{nobody},{address}", "a") as a:
        a.report(JOINING)
        assert isinstance(a.await_news(LinkTrouble).error, Unreachable)
        assert names(a.work()) == ["a"]


def test_two_nodes_with_one_node_rank() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a", rank=1) as a,
        Agent(address, "b", rank=1) as b,
    ):
        a.report(JOINING)
        a.await_news(AgentWelcome)
        b.report(JOINING)
        trouble = b.await_news(LinkTrouble)
        assert trouble.is_final
        assert isinstance(trouble.error, RequestRefused)
        assert "were both given node rank 1" in str(trouble.error)


def test_nodes_that_cannot_reach_each_other_get_an_error_with_a_remedy() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a") as a,
        Agent(address, "b", host="10.0.0.1") as b,
    ):
        a.report(JOINING)
        a.await_news(AgentWelcome)
        b.report(JOINING)
        trouble = b.await_news(LinkTrouble)
        assert trouble.is_final
        assert "cannot reach each other at 127.0.0.1 and 10.0.0.1" in str(trouble.error)
        assert "--local-addr" in str(trouble.error)


def test_a_token_is_needed() -> None:
    security = Security(token="a-very-secret-token")  # noqa: S106 - a token for this test
    with LighthouseServer("127.0.0.1:0", 1, security=security) as server:
        address = server.address()
        with Agent(address, "a", security=Security()) as stranger:
            stranger.report(JOINING)
            trouble = stranger.await_news(LinkTrouble)
            assert trouble.is_final
            assert isinstance(trouble.error, Unauthorized)
            assert "TORCHFT_TOKEN" in str(trouble.error)
        with Agent(address, "b", security=security) as friend:
            friend.report(JOINING)
            assert names(friend.work()) == ["b"]


def test_both_sides_show_certificates(tmp_path: Path) -> None:
    security = authority(tmp_path / "ours").issue("127.0.0.1")
    with LighthouseServer("127.0.0.1:0", 1, security=security) as server:
        with Agent(server.address(), "a", security=security) as friend:
            friend.report(JOINING)
            assert names(friend.work()) == ["a"]
        with Agent(server.address(), "b", security=Security()) as stranger:
            stranger.report(JOINING)
            assert not stranger.await_news(LinkTrouble).is_final, "nobody knows what is wrong"


def test_a_wrong_address_is_an_error_at_once() -> None:
    with pytest.raises(AddressError, match="has no port"):
        Agent("nowhere", "a")
