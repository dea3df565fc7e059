"""Tests a group's barriers over gRPC: two workers ask, vote, and get one answer or one error."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import grpc
import pytest
from support.running import attach, eventually, failure, line_to, start_manager

from torchft_svc.coordination import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerLocator,
    QuorumResult,
)
from torchft_svc.errors import RequestRefused, Unreachable

LONG = timedelta(seconds=10)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=1000) as server:
        yield server


class Workers:
    """The workers of one group, each with its own client, asking at the same time."""

    def __init__(self, address: str, count: int = 2) -> None:
        self.address = address
        self.clients = [ManagerClient(address, LONG) for _ in range(count)]
        self._threads = ThreadPoolExecutor(2 * count)

    def ask(self, rank: int, step: int = 0, **fields: Any) -> Future[QuorumResult]:
        asked = {"checkpoint_metadata": f"of {rank}", "shrink_only": False, "timeout": LONG}
        return self._threads.submit(self.clients[rank]._quorum, rank, step, **{**asked, **fields})

    def vote(self, rank: int, step: int, yes: bool) -> Future[bool]:
        return self._threads.submit(self.clients[rank].should_commit, rank, step, yes, LONG)

    def ask_all(self, step: int = 0) -> list[QuorumResult]:
        asked = [self.ask(rank, step) for rank in range(len(self.clients))]
        return [each.result() for each in asked]

    def vote_all(self, step: int, *votes: bool) -> list[bool]:
        cast = [self.vote(rank, step, yes) for rank, yes in enumerate(votes)]
        return [each.result() for each in cast]

    def restart(self, rank: int) -> None:
        """A worker's new process: a new client."""
        self.clients[rank].close()
        self.clients[rank] = ManagerClient(self.address, LONG)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._threads.shutdown()


@pytest.fixture
def workers(lighthouse: LighthouseServer) -> Iterator[Workers]:
    with start_manager(lighthouse.address(), world_size=2) as manager:
        workers = Workers(manager.address())
        yield workers
        workers.close()


def test_two_workers_get_their_parts_of_one_quorum(workers: Workers) -> None:
    first, second = workers.ask_all()
    assert first.replica_ids == second.replica_ids
    assert first.replica_ids[0].startswith("group:")
    assert first.quorum_id == second.quorum_id
    assert (first.replica_rank, first.replica_world_size) == (0, 1)
    assert (first.max_step, first.max_replica_rank, first.max_world_size) == (0, 0, 1)
    assert (first.heal, first.recover_src_replica_rank) == (False, None)
    assert first.store_address == second.store_address == "group.example:1"
    assert [part.store_prefix for part in (first, second)] == [
        f"torchft/{first.quorum_id}/0",
        f"torchft/{first.quorum_id}/1",
    ]


def test_nobody_is_answered_before_all_have_asked(
    workers: Workers, request: pytest.FixtureRequest
) -> None:
    with line_to(workers.address) as line:
        first = line.ask_manager(rank=0, worker_id="w")
        line.flush()
        request.getfixturevalue("early_reasons")
        # The same worker's second call takes the place of its first.
        second = line.ask_manager(rank=0, worker_id="w")
        assert failure(first) == (
            grpc.StatusCode.ABORTED,
            "a newer call of group rank 0 has taken the place of this one",
        )
        code, reason = failure(second)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "group rank 1 of 2 workers has not asked" in reason


def test_the_group_commits_only_if_all_vote_yes(workers: Workers) -> None:
    workers.ask_all(step=0)
    assert workers.vote_all(0, True, True) == [True, True]
    workers.ask_all(step=1)
    assert workers.vote_all(1, True, False) == [False, False]
    workers.ask_all(step=1)
    assert workers.vote_all(1, True, True) == [True, True]


def test_a_no_decides_before_the_others_have_voted(workers: Workers) -> None:
    workers.ask_all()
    assert workers.vote(1, 0, False).result() is False
    assert workers.vote(0, 0, True).result() is False


def test_a_vote_that_nobody_joins_ends_with_the_reason(
    workers: Workers, request: pytest.FixtureRequest
) -> None:
    workers.ask_all()
    request.getfixturevalue("early_reasons")
    with pytest.raises(TimeoutError) as caught:
        workers.vote(0, 0, True).result()
    assert str(caught.value) == (
        "manager's ShouldCommit timed out after 10 s: group rank 1 of 2 workers has not voted"
    )


def test_a_worker_that_asks_again_instead_of_voting_frees_the_voter(workers: Workers) -> None:
    with line_to(workers.address) as line:
        asked = [line.ask_manager(rank=rank, worker_id=f"w{rank}") for rank in (0, 1)]
        assert asked[0].result().round == asked[1].result().round
        vote = line.vote(rank=0, worker_id="w0", should_commit=True)
        line.flush()
        asked = [line.ask_manager(rank=rank, worker_id=f"w{rank}") for rank in (1, 0)]
        assert failure(vote) == (
            grpc.StatusCode.ABORTED,
            "group rank 1 asked for a new quorum instead of voting",
        )
        assert asked[0].result().round == asked[1].result().round


def test_different_steps_that_no_heal_can_mend_are_an_error_for_every_worker(
    workers: Workers,
) -> None:
    asked = [workers.ask(0, step=3), workers.ask(1, step=4)]
    for each in asked:
        with pytest.raises(RequestRefused) as caught:
            each.result()
        assert str(caught.value) == (
            "the workers of this group are at different steps: rank 0 at step 3, rank 1 at step 4"
        )


@pytest.mark.parametrize("rank", [-1, 2, 2**40])
def test_a_rank_outside_the_group_is_refused(workers: Workers, rank: int) -> None:
    sentence = f"group rank {rank} is outside this group of 2 workers"
    client = workers.clients[0]
    for call in (
        lambda: client._quorum(rank, 0, "", False, LONG),
        lambda: client.should_commit(rank, 0, True, LONG),
        lambda: client._checkpoint_metadata(rank, LONG),
    ):
        with pytest.raises(RequestRefused) as caught:
            call()
        assert str(caught.value) == sentence


def test_two_workers_with_one_number_are_refused(workers: Workers) -> None:
    with line_to(workers.address) as line:
        first = line.ask_manager(rank=0, worker_id="one")
        line.flush()
        assert failure(line.ask_manager(rank=0, worker_id="another")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "group rank 0 is taken: another worker with this rank already waits; "
            "give every worker of the group a rank of its own",
        )
        peer = line.ask_manager(rank=1, worker_id="two")
        assert first.result().round == peer.result().round


def test_a_wrong_step_in_a_vote_is_refused(workers: Workers) -> None:
    workers.ask_all(step=5)
    with pytest.raises(RequestRefused) as caught:
        workers.vote(0, 4, True).result()
    assert str(caught.value) == "the vote is for step 4, the group is at step 5"
    with pytest.raises(RequestRefused, match="step is -3, must be 0 or more"):
        workers.vote(0, -3, True).result()
    assert workers.vote_all(5, True, True) == [True, True]


def test_a_late_vote_of_an_earlier_round_is_refused(workers: Workers) -> None:
    workers.ask_all()
    workers.vote_all(0, True, True)
    workers.ask_all(step=1)
    with line_to(workers.address) as line:
        me = workers.clients[0]._calls.worker_id
        late = line.vote(rank=0, step=1, should_commit=True, round=7, worker_id=me)
        code, reason = failure(late)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert reason.startswith("the vote belongs to round 7, this is round ")


def test_checkpoint_addresses_are_those_of_the_ranks(workers: Workers) -> None:
    with pytest.raises(RequestRefused, match="group rank 1 has not reported where it serves"):
        workers.clients[0]._checkpoint_metadata(1, LONG)
    workers.ask_all()
    assert workers.clients[0]._checkpoint_metadata(1, LONG) == "of 1"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_not_only_the_last_arriving_ranks_failures_and_wishes_are_forwarded(
    order: tuple[int, int],
) -> None:
    """Another group of the quorum sees the largest count, and shrink_only if any worker asks so."""
    fields: tuple[dict[str, Any], ...] = ({"commit_failures": 3, "shrink_only": True}, {})
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse,
        start_manager(lighthouse.address(), world_size=2) as manager,
        line_to(lighthouse.address()) as peer,
        line_to(manager.address()) as line,
    ):
        quorum = peer.quorum("zzz:1")
        asked = []
        for rank in order:
            asked.append(line.ask_manager(rank=rank, worker_id=f"w{rank}", **fields[rank]))
            line.flush()
        assert [each.result().commit_failures for each in asked] == [3, 3]
        group = quorum.result().quorum.participants[0]
    assert (group.commit_failures, group.shrink_only, group.world_size) == (3, True, 2)


@pytest.mark.usefixtures("early_news")
def test_a_restarted_worker_makes_its_group_another_incarnation(workers: Workers) -> None:
    before = workers.ask_all()[0]
    workers.vote_all(0, True, True)
    workers.restart(1)
    after = workers.ask_all(step=1)[0]
    assert after.replica_ids[0].startswith("group:")
    assert after.replica_ids != before.replica_ids
    assert after.quorum_id > before.quorum_id
    assert after.replica_world_size == 1, "the incarnation before has left"
    again = workers.ask_all(step=1)[0]
    assert again.replica_ids == after.replica_ids


def test_two_groups_of_two_workers_train_together() -> None:
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse,
        start_manager(lighthouse.address(), replica_id="a", world_size=2) as one,
        start_manager(lighthouse.address(), replica_id="b", world_size=2) as two,
    ):
        groups = [Workers(one.address()), Workers(two.address())]
        asked = [group.ask(rank, step=0) for group in groups for rank in (0, 1)]
        results = [each.result() for each in asked]
        for group in groups:
            group.close()
        assert [result.recover_src_manager_address for result in results[2:]] == [
            one.address().removeprefix("http://")
        ] * 2
    assert {result.replica_world_size for result in results} == {2}
    assert [result.replica_rank for result in results] == [0, 0, 1, 1]
    assert len({result.quorum_id for result in results}) == 1
    assert [result.heal for result in results] == [False, False, True, True]


def test_i3_a_group_that_could_not_heal_has_to_heal_again() -> None:
    """The group is as far as the others, and both have discarded the step of that heal."""
    heals = []
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=1) as lighthouse,
        start_manager(lighthouse.address(), replica_id="a") as one,
        line_to(one.address()) as a,
        LighthouseClient(lighthouse.address(), connect_timeout=LONG) as client,
    ):
        a.ask_manager(step=3, worker_id="a").result()
        with (
            start_manager(lighthouse.address(), replica_id="b") as two,
            line_to(two.address()) as b,
        ):
            for unhealed in (False, True, False):
                asked = b.ask_manager(step=3, worker_id="b", unhealed=unhealed)
                eventually(lambda: any(group.asking for group in client.status()[0].groups))
                a.ask_manager(step=3, worker_id="a").result()
                heals.append(asked.result().heal)
    assert heals == [True, True, False]


def test_i3_a_new_manager_reports_the_last_quorum_of_its_workers() -> None:
    """Each group has trained alone, one after the other, and each manager is new: they are at one
    step with different states, and only the later one goes on."""
    with LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000) as lighthouse:
        addresses: dict[str, str] = {}
        clients = {}
        for name in ("a", "b"):
            with start_manager(lighthouse.address(), replica_id=name) as manager:
                addresses[name] = manager.address()
                find = functools.partial(addresses.__getitem__, name)
                clients[name] = ManagerClient(manager.address(), LONG, ManagerLocator(find, 10.0))
                assert not ask_alone(clients[name], step=0).heal
        with (
            start_manager(lighthouse.address(), replica_id="a") as a,
            start_manager(lighthouse.address(), replica_id="b") as b,
            LighthouseClient(lighthouse.address(), connect_timeout=LONG) as status,
            ThreadPoolExecutor(2) as threads,
        ):
            addresses.update(a=a.address(), b=b.address())
            eventually(lambda: [len(job.groups) for job in status.status()] == [2])
            asked = [threads.submit(ask_alone, clients[name], step=1) for name in ("a", "b")]
            assert [each.result().heal for each in asked] == [True, False]
        for client in clients.values():
            client.close()


def ask_alone(client: ManagerClient, step: int) -> QuorumResult:
    """Ask as the only worker of its group, and again if its manager is another one by now."""

    def ask() -> QuorumResult | None:
        try:
            return client._quorum(0, step, "here", shrink_only=False, timeout=LONG)
        except Unreachable as error:
            if client.why_over(error):
                raise
            return None

    return cast(QuorumResult, eventually(ask))


@pytest.mark.usefixtures("early_news")
def test_the_first_worker_that_waits_receives_the_reason() -> None:
    """The worker receives which peers have not asked, then the reason of the lighthouse."""
    reasons_of: list[queue.SimpleQueue[str]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    with (
        LighthouseServer("127.0.0.1:0", min_replicas=2) as lighthouse,
        start_manager(lighthouse.address(), world_size=2) as manager,
        contextlib.closing(Workers(manager.address())) as workers,
    ):
        for rank, client in enumerate(workers.clients):
            attach(client, rank, on_no_quorum=reasons_of[rank].put)
        asked = [workers.ask(1, timeout=timedelta(seconds=30))]
        missing = "group rank 0 of 2 workers has not asked for a quorum"
        assert reasons_of[1].get(timeout=LONG.seconds) == missing
        asked.append(workers.ask(0, timeout=timedelta(seconds=30)))
        reasons = iter(lambda: reasons_of[0].get(timeout=LONG.seconds), None)
        assert next(filter(None, reasons)) == "1 of at least 2 groups ask (--min-replicas)"
        workers.close()
        for each in asked:
            assert each.exception() is not None
