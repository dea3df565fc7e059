"""Tests agents' links to a lighthouse: worlds, losses, restarts of the lighthouse, lists, trust."""

from __future__ import annotations

import pytest
from support.agents import Agent, lighthouse
from support.running import refusing, steady_address

from torchft_svc.coordination import LighthouseServer
from torchft_svc.core.world import AgentStatus, AgentWelcome, RunClosed, RunWaiting, World
from torchft_svc.elastic.rendezvous.link import LinkTrouble
from torchft_svc.errors import AddressError, RequestRefused, Unauthorized, Unreachable
from torchft_svc.rpc.security import Security

JOINING = AgentStatus.JOINING


def names(world: World) -> list[str]:
    return sorted(world.node_ids)


def test_nodes_meet_join_get_lost_and_leave() -> None:
    with lighthouse() as address, Agent(address, "a") as a, Agent(address, "b") as b:
        a.tell(JOINING)
        b.tell(JOINING)
        first = a.work()
        assert first == b.work()
        assert names(first) == ["a", "b"]
        with Agent(address, "c") as c:
            c.tell(JOINING)
            second = c.work()
            assert names(second) == ["a", "b", "c"]
            assert second == a.work(first.round) == b.work(first.round)
            assert second.node_ids[:2] == first.node_ids, "who is there keeps its rank"
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
            agent.tell(JOINING)
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
        a.tell(JOINING)
        b.tell(JOINING)
        world = a.work()
        b.work()
        c.tell(JOINING)
        assert "places are taken" in c.await_news(RunWaiting).reason
        b.leave()
        assert names(c.work(world.round)) == ["a", "c"]


def test_runs_do_not_concern_one_another() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a", run="one") as a,
        Agent(address, "b", run="two") as b,
    ):
        a.tell(JOINING)
        b.tell(JOINING)
        assert names(a.work()) == ["a"]
        assert names(b.work()) == ["b"]


def test_a_world_outlives_its_lighthouse() -> None:
    address = steady_address()
    with Agent(address, "a") as a, Agent(address, "b") as b:
        with lighthouse(address):
            a.tell(JOINING)
            b.tell(JOINING)
            world = a.work()
            b.work()
        trouble = a.await_news(LinkTrouble)
        assert isinstance(trouble.error, Unreachable)
        assert not trouble.is_final
        num_heard = len(a.heard)
        with lighthouse(address), Agent(address, "c") as c:
            c.tell(JOINING)
            joined = c.work()
            assert names(joined) == ["a", "b", "c"]
            assert joined.round > world.round
            later = a.heard[num_heard:]
            assert [type(each) for each in later if isinstance(each, AgentWelcome | World)] == [
                AgentWelcome,
                World,
            ], "the first world after it is the one with the newcomer"


def test_the_first_lighthouse_of_a_list_that_answers_serves() -> None:
    with refusing() as nobody, lighthouse() as address, Agent(f"{nobody},{address}", "a") as a:
        a.tell(JOINING)
        assert names(a.work()) == ["a"]


def test_two_nodes_with_one_node_rank() -> None:
    with (
        lighthouse() as address,
        Agent(address, "a", rank=1) as a,
        Agent(address, "b", rank=1) as b,
    ):
        a.tell(JOINING)
        a.await_news(AgentWelcome)
        b.tell(JOINING)
        trouble = b.await_news(LinkTrouble)
        assert trouble.is_final
        assert isinstance(trouble.error, RequestRefused)
        assert "were both given node rank 1" in str(trouble.error)


def test_a_token_is_needed() -> None:
    security = Security(token="a-very-secret-token")  # noqa: S106 - a token for this test
    with LighthouseServer("127.0.0.1:0", 1, security=security) as server:
        address = server.address()
        with Agent(address, "a", security=Security()) as stranger:
            stranger.tell(JOINING)
            trouble = stranger.await_news(LinkTrouble)
            assert trouble.is_final
            assert isinstance(trouble.error, Unauthorized)
            assert "TORCHFT_TOKEN" in str(trouble.error)
        with Agent(address, "b", security=security) as friend:
            friend.tell(JOINING)
            assert names(friend.work()) == ["b"]


def test_a_wrong_address_is_an_error_at_once() -> None:
    with pytest.raises(AddressError, match="has no port"):
        Agent("nowhere", "a")
