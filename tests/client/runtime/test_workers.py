"""Tests replica groups of several workers: one decision for all, and errors that reach all."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from support.bounds import check, raises_in_time
from support.running import eventually, line_to, steady_address
from support.training import (
    DEADLINE_S,
    Trainer,
    assert_identical,
    lighthouse,
    together,
    workers,
)
from torch.distributed import TCPStore

from torchft_svc.client import HTTPTransport, Manager
from torchft_svc.client.runtime import bootstrap
from torchft_svc.coordination import ManagerClient
from torchft_svc.core.quorum.session_messages import Drain
from torchft_svc.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    Drained,
    GivenUp,
    PeerError,
    TorchFTError,
    Unreachable,
)
from torchft_svc.host.address import parse_address
from torchft_svc.host.interfaces import list_interfaces


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


@pytest.mark.processes
def test_who_waits_for_a_manager_that_does_not_start_is_informed_why(address: str) -> None:
    taken = int(address.rpartition(":")[2])
    began_at = time.monotonic()
    errors = []

    def fails(rank: int) -> None:
        with pytest.raises(TorchFTError) as caught:
            Trainer(address, "a", rank, rank=rank, **place, port=taken, in_process=False)
        errors.append(caught.value)

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"store_addr": "localhost", "store_port": store.port, "world_size": 2}
    together(lambda: fails(0), lambda: fails(1))
    check("the manager does not start", time.monotonic() - began_at, 5.0)
    (error,) = [each for each in errors if isinstance(each, GivenUp)]
    assert "it did not start: " in error.reason
    del store


def test_each_worker_trains_with_its_own_kind() -> None:
    with (
        lighthouse(min_replicas=2) as address,
        workers(address, "a", 2, seed=0) as a,
        workers(address, "b", 2, seed=10) as b,
    ):
        for _ in range(3):
            assert together(*(worker.step for worker in (*a, *b))) == [True] * 4
        for rank in range(2):
            assert_identical([a[rank], b[rank]])
        assert a[0].manager.batches_committed() == 6
        assert not torch.equal(a[0].model[0].weight, a[1].model[0].weight)


def test_a_worker_that_starts_late_is_not_taken_for_one_that_has_missed_an_answer(
    address: str,
) -> None:
    """The peer has asked one question more, for which no manager had an answer; they meet in each
    step."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {"store_addr": "localhost", "store_port": store.port, "world_size": 2}
    with Trainer(address, "a", 0, rank=0, **place, steady_steps=False) as early:
        with pytest.raises(DeadlineExceeded):
            early.manager.start_quorum(timeout=timedelta(seconds=0.5))
        with Trainer(address, "a", 1, rank=1, **place, steady_steps=False) as late:
            committed = meet_in_steps([early, late], 3)
    assert committed == [[True] * 3] * 2
    del store


def meet_in_steps(group: list[Trainer], num: int) -> list[list[bool]]:
    """Each worker's steps, in each of which all wait for one another."""
    meeting = threading.Barrier(2)

    def steps(worker: Trainer) -> list[bool]:
        committed = []
        for _ in range(num):
            worker.optimizer.zero_grad()
            meeting.wait(DEADLINE_S)
            worker.loss().backward()
            committed.append(worker.optimizer.step())
        return committed

    return together(*(lambda worker=worker: steps(worker) for worker in group))


def test_a_group_votes_without_a_call(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(address, "a", 2) as group:
        for worker in group:
            client = worker.manager._runtime.deps.client
            eventually(lambda client=client: client._attachment.is_open)
            monkeypatch.setattr(client, "_send_vote", lambda *_: pytest.fail("a call"))
        for _ in range(3):
            assert together(*(worker.step for worker in group)) == [True] * 2


def test_a_group_of_several_does_not_wait_for_news_after_a_failed_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of several workers never sum a step again (rule E9), so they need no news."""
    waits: list[object] = []
    listen = ManagerClient.listen

    def count(client: ManagerClient, *args: Any) -> None:
        waits.append(client)
        listen(client, *args)

    monkeypatch.setattr(ManagerClient, "listen", count)
    with (
        lighthouse(min_replicas=2) as address,
        workers(address, "a", 2) as a,
        workers(address, "b", 2, seed=5) as b,
    ):
        everyone = [*a, *b]
        deadline = time.monotonic() + DEADLINE_S
        while not all(each.manager._worker.round.keeps_quorum for each in everyone):
            assert time.monotonic() < deadline, "the quorum never becomes a term"
            together(*(each.step for each in everyone))
        together(*(each.optimizer.zero_grad for each in everyone))
        for each in everyone:
            assert each.manager._worker.round.keeps_quorum
            each.manager._runtime.deps.pg.abort()
        losses = [each.loss() for each in everyone]
        together(*(loss.backward for loss in losses))
        assert together(*(each.optimizer.step for each in everyone)) == [False] * 4
    assert waits == []


def test_one_worker_s_error_discards_the_step_of_all(address: str) -> None:
    with workers(address, "a", 3) as group:
        together(*(worker.step for worker in group))

        def fails() -> bool:
            group[1].backward()
            group[1].manager.report_error(RuntimeError("only here"))
            return group[1].optimizer.step()

        assert together(group[0].step, fails, group[2].step) == [False] * 3
        assert [worker.manager.current_step() for worker in group] == [1] * 3
        assert together(*(worker.step for worker in group)) == [True] * 3


def test_i5_a_worker_that_is_gone_is_an_error_for_the_others_at_once(address: str) -> None:
    with workers(address, "a", 2) as group:
        together(*(worker.step for worker in group))
        together(*(worker.backward for worker in group))
        began_at = time.monotonic()

        def votes() -> None:
            with contextlib.suppress(TorchFTError):
                assert not group[0].optimizer.step()

        together(votes, group[1].manager.shutdown)
        check("a worker is gone, with 10 s left,", time.monotonic() - began_at, 3.0)
        assert group[0].manager.current_step() == 1


def test_i5_who_waits_for_a_group_that_hangs_learns_that_a_peer_is_gone() -> None:
    """The other groups would let it wait: theirs hang, and NCCL's end informs nobody."""
    with (
        lighthouse(min_replicas=2) as address,
        workers(address, "a", 2) as a,
        workers(address, "b", 2) as b,
    ):
        together(*(worker.step for worker in (*a, *b)))
        together(*(worker.optimizer.zero_grad for worker in (*a, *b)))
        together(*(worker.manager.wait_quorum for worker in (*a, *b)))  # and b does no more
        began_at = time.monotonic()

        def waits() -> None:
            a[0].loss().backward()
            with contextlib.suppress(TorchFTError):
                assert not a[0].optimizer.step()

        together(waits, a[1].manager.shutdown)
        check("a peer is gone, with 30 s left,", time.monotonic() - began_at, 3.0)


def test_a_drained_worker_ends_though_nobody_can_answer_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "MANAGER_PATIENCE_S", 0.1)
    with workers(address, "a", 2) as group:
        together(*(worker.step for worker in group))
        group[0].manager._runtime.services.close()
        group[0].manager._runtime.worker.drain(Drain("a signal"))
        group[0].backward()
        with pytest.raises(Drained, match="a signal; it could not leave: manager at"):
            group[0].optimizer.step()


def test_a_drained_worker_waits_for_peers_that_do_not_know_of_it(address: str) -> None:
    """The failed question did not announce the worker's end: its peers would wait for it for
    ever."""
    with workers(address, "a", 2) as group:
        together(*(worker.step for worker in group))
        drained = group[1]
        drained.manager.start_quorum(timeout=timedelta(seconds=0.1))
        drained.manager._stepper._runner.wait_until_ready()
        drained.manager._runtime.worker.drain(Drain("a signal to one of them"))
        drained.loss().backward()
        assert not drained.optimizer.step()

        def ends(worker: Trainer) -> None:
            with pytest.raises(Drained):
                worker.steps(2)

        together(*(lambda worker=worker: ends(worker) for worker in group))


def test_drained_workers_end_at_one_place_though_only_one_was_signalled(address: str) -> None:
    """A collective of the group, as in a sharded model's forward pass, must find all of them."""
    with workers(address, "a", 2) as group:
        together(*(worker.step for worker in group))
        group[1].manager._runtime.worker.drain(Drain("a signal to one of them"))
        collective = threading.Barrier(2, timeout=DEADLINE_S)

        def trains(worker: Trainer) -> None:
            worker.backward()
            collective.wait()
            with pytest.raises(Drained):
                worker.optimizer.step()

        together(*(lambda worker=worker: trains(worker) for worker in group))
        assert [worker.manager.current_step() for worker in group] == [1, 1]


def test_workers_at_different_steps_are_refused(address: str) -> None:
    with workers(address, "a", 2) as group:
        group[0].manager.load_state_dict({"step": 5, "batches_committed": 5})

        def error_of(worker: Trainer) -> str:
            try:
                worker.manager.start_quorum()
                worker.manager.wait_quorum()
            except TorchFTError as error:
                return str(error)
            return ""

        for reason in together(lambda: error_of(group[0]), lambda: error_of(group[1])):
            assert "different steps: rank 0 at step 5, rank 1 at step 0" in reason


def test_a_group_needs_a_common_store(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="set MASTER_ADDR and MASTER_PORT"):
        Manager(rank=0, world_size=2, lighthouse_addr=address)
    with pytest.raises(ConfigError, match=r"store_port=None.*store_addr is set"):
        Manager(store_addr="localhost", lighthouse_addr=address)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(ConfigError, match=r"MASTER_PORT=None.*MASTER_ADDR is set"):
        Manager(lighthouse_addr=address)


def test_a_store_that_does_not_answer(address: str) -> None:
    with pytest.raises(Unreachable, match=r"store at localhost:1 cannot be reached"):
        Manager(
            store_addr="localhost",
            store_port=1,
            lighthouse_addr=address,
            connect_timeout=timedelta(milliseconds=300),
        )


def test_a_worker_whose_leader_never_comes(address: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with raises_in_time(PeerError, "rank 0 has not published"):
        Manager(
            rank=1,
            world_size=2,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=address,
            connect_timeout=timedelta(milliseconds=300),
        )


@pytest.mark.parametrize(
    ("world", "expected"), [({}, "3"), ({"TORCHFT_WORLD_ROUND": "7"}, "world-7")]
)
def test_the_environment_of_a_launcher(
    address: str, monkeypatch: pytest.MonkeyPatch, world: dict[str, str], expected: str
) -> None:
    agent = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(agent.port),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHFT_LIGHTHOUSE": address,
        "REPLICA_GROUP_ID": "seven",
        **world,
    }.items():
        monkeypatch.setenv(name, value)
    with Manager(in_process=True) as manager:
        assert manager.replica_id() == "seven"
        # The attempt is a part of the key: an earlier attempt's address can not be read. Workers
        # that a soft restart has left alone have another attempt than their peers, in one world.
        assert agent.get(f"torchft/services/{expected}/replica_name") == b"seven"
        manager.start_quorum()
        assert manager.should_commit()


def test_rank_0_hosts_the_store_that_the_environment_names(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(steady_address().rpartition(":")[2])
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with Manager(in_process=True, lighthouse_addr=address) as manager:
        manager.start_quorum()
        client = TCPStore("localhost", port, is_master=False, wait_for_workers=False)
        assert client.check(["torchft/services/0/manager_address"])
        assert manager.should_commit()


@pytest.mark.parametrize("store_is_named", [False, True])
def test_the_other_groups_get_the_address_of_the_chosen_interface(
    store_is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = [each for each in list_interfaces() if each.addresses and not each.is_loopback]
    if not outside:
        pytest.skip("this machine has no interface but the loopback one")
    chosen = outside[0]
    monkeypatch.setenv("TORCHFT_INTERFACE", chosen.name)
    if store_is_named:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", steady_address().rpartition(":")[2])
    with (
        lighthouse(min_replicas=2) as address,  # whose route leaves from 127.0.0.1
        Manager(in_process=True, lighthouse_addr=address, replica_id="a") as manager,
        line_to(address) as line,
    ):

        def meet() -> Any:
            quorum = line.quorum("b:1", timeout_s=DEADLINE_S).result().quorum
            line.leave("b:1", "its part is over")  # else the first group would wait for it
            return quorum

        quorum, _ = together(meet, manager.start_quorum)
        (member,) = (each for each in quorum.participants if each.replica_id.startswith("a:"))
        with ManagerClient(member.address, timedelta(seconds=DEADLINE_S)) as client:
            state_address = client._checkpoint_metadata(0, timedelta(seconds=DEADLINE_S))
        hosts = {parse_address(each).host for each in (member.address, member.store_address)} | {
            urlsplit(state_address).hostname
        }
        assert hosts == {str(chosen.addresses[0])}


def test_an_interface_that_is_not_there_ends_the_trainer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_INTERFACE", "ib7")
    with pytest.raises(ConfigError, match=r"TORCHFT_INTERFACE='ib7'.*no such network interface"):
        Manager(in_process=True, lighthouse_addr=address)


class FailsOnce(HTTPTransport[Any]):
    """The first state that is fetched does not arrive."""

    failed = False

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        if not self.failed:
            self.failed = True
            raise CheckpointError("a test", "lost on the way")
        return super().recv_checkpoint(src_rank, metadata, step, timeout)


def test_a_heal_that_fails_for_one_worker_is_repeated_by_all(address: str) -> None:
    with workers(address, "a", 2) as first:
        together(*(lambda worker=worker: worker.until(3) for worker in first))
        transport = FailsOnce(timedelta(seconds=10), hostname="127.0.0.1")
        with workers(
            address, "b", 2, seed=10, of_rank={1: {"checkpoint_transport": transport}}
        ) as second:
            ends_at: list[int] = []

            def train(worker: Trainer) -> None:
                """Train until a while after the newcomers have committed a step: all end at one."""
                deadline = time.monotonic() + DEADLINE_S
                while not ends_at or worker.manager.current_step() < ends_at[0]:
                    assert time.monotonic() < deadline
                    if worker.step() and worker in second:
                        ends_at.append(worker.manager.current_step() + 10)

            everyone = [*first, *second]
            together(*(lambda worker=worker: train(worker) for worker in everyone))
            assert transport.failed
            assert {worker.manager.current_step() for worker in everyone} == {ends_at[0]}
            for rank in range(2):
                assert_identical([first[rank], second[rank]])
