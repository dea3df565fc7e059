"""Tests that groups that are behind catch up, and what happens if that fails."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.bounds import Late
from support.running import eventually
from support.training import (
    DEADLINE_S,
    TIMEOUT,
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    together,
    trainers,
)

from torchft_svc.client import CheckpointTransport, HTTPTransport
from torchft_svc.client.step.heal import fetch_state
from torchft_svc.coordination import LighthouseClient, QuorumResult
from torchft_svc.core.quorum.worker.peers import Peers
from torchft_svc.errors import CheckpointError, PeerError, QuorumFailed
from torchft_svc.rpc.security import PLAIN

A_QUORUM = QuorumResult(
    quorum_id=7,
    group_rank=0,
    replica_rank=0,
    replica_world_size=2,
    recover_src_manager_address="",
    recover_src_replica_rank=1,
    recover_dst_replica_ranks=(),
    recover_extra_src_manager_addresses=(),
    recover_extra_dst_replica_ranks=(),
    store_address="",
    max_step=5,
    max_replica_rank=None,
    max_world_size=1,
    commit_failures=0,
    replica_ids=("a:1", "b:1"),
)


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=1) as address:
        yield address


class Unreliable(CheckpointTransport[Any]):
    """The HTTP transport, with receptions that fail, or wait, on demand."""

    def __init__(self, num_failures: int = 0) -> None:
        self._http: HTTPTransport[Any] = HTTPTransport(TIMEOUT, hostname="127.0.0.1")
        self.num_failures = num_failures
        self.may_receive = threading.Event()
        self.may_receive.set()
        self.received: list[int] = []
        self.expects: list[bool] = []

    def metadata(self) -> str:
        return self._http.metadata()

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        self._http.send_checkpoint(dst_ranks, step, state_dict, timeout)

    def disallow_checkpoint(self) -> None:
        self._http.disallow_checkpoint()

    def expect_checkpoint(self, like: Any | None) -> None:
        self.expects.append(like is not None)
        self._http.expect_checkpoint(like)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        assert self.may_receive.wait(DEADLINE_S)
        if self.num_failures:
            self.num_failures -= 1
            raise CheckpointError(metadata, "the test wants it so")
        state = self._http.recv_checkpoint(src_rank, metadata, step, timeout)
        self.received.append(step)
        return state

    def recv_deferred(self, *args: Any) -> Any:
        return self._http.recv_deferred(*args)

    def shutdown(self, wait: bool = True) -> None:
        self._http.shutdown(wait)


def train_on(*groups: Trainer) -> None:
    """A few more steps of groups that were in one quorum, then they must be identical."""
    until = max(group.manager.current_step() for group in groups) + 3
    in_step(until, *groups)
    assert_identical(groups)


def test_a_newcomer_heals_and_then_contributes(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(3)
        with Trainer(address, "b", 1) as b:
            assert together(b.step, lambda: a.meets(2)) == [True, True]
            assert not b.manager.is_participating()
            train_on(a, b)
            assert b.manager.is_participating()


def test_a_newcomer_prepares_to_heal_while_it_waits_for_its_first_quorum(address: str) -> None:
    first, second = Unreliable(), Unreliable()
    with Trainer(address, "a", 0, checkpoint_transport=first) as a:
        a.steps(2)
        assert first.expects == [True, False, False]  # nobody was ahead
        with Trainer(address, "b", 1, checkpoint_transport=second) as b:
            together(b.step, lambda: a.meets(2))
            assert second.expects == [True]
            assert second.received
            train_on(a, b)
            assert second.expects[1:]
            assert not any(second.expects[1:])


def test_a_state_that_cannot_be_looked_at_before_the_first_quorum_is_healed_all_the_same(
    address: str,
) -> None:
    class Shy(Unreliable):
        def expect_checkpoint(self, like: Any | None) -> None:
            if like is not None:
                raise ValueError("the test wants it so")

    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=Shy()) as b:
            together(b.step, lambda: a.meets(2))
            train_on(a, b)


def test_a_step_that_is_given_up_while_it_heals_holds_up_nobody(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:

            def newcomer() -> float:
                b.optimizer.zero_grad()
                b.manager.wait_quorum()  # the others count on its sums
                began_at = time.monotonic()
                b.manager.start_quorum()
                took_s = time.monotonic() - began_at
                b.loss().backward()
                b.optimizer.step()
                return took_s

            took_s, _ = together(newcomer, lambda: float(a.meets(2) or a.meets(2)))
            assert took_s < 10  # the timeout is 30 s


@pytest.mark.parametrize("then", ["zero_grad", "step"])
def test_a_backward_pass_that_raises_while_it_heals_holds_up_nobody(
    address: str, then: str
) -> None:
    """The sums that it has launched keep connections open, and the source ends its step, for the
    rest of the state, when these close."""
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:

            def raises(*_: Any) -> None:
                raise ArithmeticError("the test wants it so")

            def newcomer() -> float:
                b.optimizer.zero_grad()
                b.manager.wait_quorum()  # the others count on its sums
                hook = b.model[0].weight.register_hook(raises)  # its gradient is the last one
                with pytest.raises(ArithmeticError):
                    b.loss().backward()
                assert not b.manager.has_fresh_step(), "it has launched sums"
                hook.remove()
                began_at = time.monotonic()
                if then == "step":
                    assert not b.optimizer.step()
                b.optimizer.zero_grad()
                took_s = time.monotonic() - began_at
                b.loss().backward()
                b.optimizer.step()
                return took_s

            took_s, _ = together(newcomer, lambda: float(a.meets(2) or a.meets(2)))
            assert took_s < 10  # the timeout is 30 s
            train_on(a, b)


def test_a_newcomer_contributes_zeros_in_the_step_in_which_it_heals(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:

            def newcomer() -> tuple[Any, ...]:
                b.backward()
                numbers = b.manager.participating_rank(), b.manager.num_participants()
                healed = b.manager.current_step()
                committed = b.optimizer.step()
                return (*numbers, healed, committed, b.manager.current_step())

            seen, committed = together(newcomer, lambda: a.meets(2))
            step = a.manager.current_step()
            assert seen == (None, 1, step - 1, True, step)
            assert committed
            assert a.manager.num_participants() == 1
            # One group contributed at a time so far: the newcomer's batch does not count.
            assert a.manager.batches_committed() == a.manager.current_step()
            assert_identical([a, b])


def test_with_a_synchronous_quorum_a_newcomer_contributes_at_once(address: str) -> None:
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        a.steps(2)
        with Trainer(address, "b", 1, use_async_quorum=False) as b:

            def newcomer() -> tuple[Any, ...]:
                b.manager.start_quorum()
                healed = b.manager.current_step(), b.manager.is_participating()
                b.inner.zero_grad()
                b.loss().backward()
                return (*healed, b.optimizer.step())

            seen, committed = together(newcomer, lambda: a.meets(2))
            assert committed
            step = a.manager.current_step()
            assert seen == (step - 1, True, True)
            assert_identical([a, b])
            assert a.manager.batches_committed() == step + 1


def test_a_group_that_fell_behind_heals(address: str) -> None:
    with trainers(address, 2) as (a, b):
        together(lambda: a.meets(2), lambda: b.meets(2))

        def falls_behind() -> None:
            b.backward()
            b.manager.report_error(RuntimeError("only here"))
            b.optimizer.step()

        together(falls_behind, a.step)
        train_on(a, b)


def test_trap_a_stale_pending_state_dict_after_a_failed_heal(address: str) -> None:
    transport = Unreliable(num_failures=1)
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=transport) as b:
            weights = bits(b.state_dict())
            assert together(b.step, lambda: a.meets(2)) == [False, True]
            # I6: nothing of the failed heal is left, neither a step nor weights.
            assert (b.manager.current_step(), bits(b.state_dict())) == (0, weights)
            assert "the test wants it so" in str(b.manager.errored())
            train_on(a, b)
            # The state that was applied is the one of the later step, not one kept from before.
            assert len(transport.received) == 1
            assert transport.received[0] > 2


def test_i3_a_group_with_another_state_of_the_same_step_heals_although_that_failed_once(
    address: str,
) -> None:
    """The step of the failed heal shows no difference either: both have discarded it."""
    transport = Unreliable(num_failures=1)
    with (
        Trainer(address, "a", 0) as a,
        LighthouseClient(address, connect_timeout=TIMEOUT) as client,
    ):
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=transport) as b:
            b.manager.load_state_dict({"step": 2, "batches_committed": 2})

            def discards() -> bool:
                eventually(lambda: any(group.asking for group in client.status()[0].groups))
                a.backward()
                a.manager.report_error(RuntimeError("only in this step"))
                return a.optimizer.step() is not None

            together(b.step, discards)
            assert transport.num_failures == 0
            assert [group.manager.current_step() for group in (a, b)] == [2, 2]
            train_on(a, b)


def test_a_failed_heal_does_not_disturb_the_others(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=Unreliable(num_failures=3)) as b:
            for _ in range(3):
                assert together(b.step, lambda: a.meets(2)) == [False, True]
            assert a.manager.errored() is None
            train_on(a, b)


def test_a_source_that_cannot_offer_its_state_says_why(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        save, may_save = a.state_dict, threading.Event()

        def fails() -> dict[str, Any]:
            if not may_save.is_set():
                raise ZeroDivisionError("of the test")
            return save()

        pieces = a.manager._registry._pieces
        pieces["default"] = dataclasses.replace(pieces["default"], save=fails)
        with Trainer(address, "b", 1) as b:
            assert together(b.step, lambda: a.meets(2)) == [False, True]
            assert "cannot be offered: ZeroDivisionError('of the test')" in str(b.manager.errored())
            may_save.set()
            train_on(a, b)


def test_trap_a_step_number_that_advances_before_the_healed_weights_are_applied(
    address: str,
) -> None:
    steps_at_load: list[int] = []
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:
            load = b.load_state_dict

            def loads(state: dict[str, Any]) -> None:
                steps_at_load.append(b.manager.current_step())
                load(state)
                steps_at_load.append(b.manager.current_step())

            b.load_state_dict = loads  # type: ignore[method-assign]
            b.manager._registry._pieces.clear()
            b.manager.set_state_dict_fns(loads, b.state_dict)
            assert together(b.step, lambda: a.meets(2)) == [True, True]
            assert steps_at_load == [0, 0]
            assert_identical([a, b])


def test_weights_that_cannot_be_loaded_leave_the_step_where_it_was(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:
            failures = [RuntimeError("no room")]
            load = b.load_state_dict

            def loads(state: dict[str, Any]) -> None:
                if failures:
                    raise failures.pop()
                load(state)

            b.manager._registry._pieces.clear()
            b.manager.set_state_dict_fns(loads, b.state_dict)
            assert together(b.step, lambda: a.meets(2)) == [False, True]
            assert b.manager.current_step() == 0
            assert "no room" in str(b.manager.errored())
            train_on(a, b)


def test_trap_a_slow_healing_peer_raises_a_timeout_in_the_healthy_sender(address: str) -> None:
    transport = Unreliable()
    transport.may_receive.clear()
    # The healthy group's own timeout is far shorter than the newcomer takes.
    short = {"timeout": timedelta(seconds=1.5), "quorum_timeout": TIMEOUT}
    with Trainer(address, "a", 0, **short) as a:
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=transport) as b:

            def healthy() -> bool:
                first = a.meets(2)
                time.sleep(1.6)  # the newcomer takes longer than any timeout of this group
                transport.may_receive.set()
                return first and a.manager.errored() is None

            committed, healed = together(healthy, b.step)
            if not committed or not healed:  # so short a time may be over without a fault
                raise Late(f"{committed} {healed}: {a.manager.errored()}, {b.manager.errored()}")
            assert_identical([a, b])
            train_on(a, b)


def test_a_heal_that_outlasts_the_join_timeout_holds_the_others_up_once() -> None:
    transport = Unreliable()
    transport.may_receive.clear()
    with (
        lighthouse(join_timeout_ms=500) as address,
        Trainer(address, "a", 0) as a,
        Trainer(address, "b", 1, checkpoint_transport=transport) as b,
    ):
        a.steps(2)

        def healthy() -> list[bool]:
            committed = [a.meets(2), *a.steps(3)]  # after the first, without the one that heals
            transport.may_receive.set()
            return committed

        committed, _ = together(healthy, b.step)
        assert committed == [True] * 4
        train_on(a, b)


def test_groups_heal_by_every_registered_piece(address: str) -> None:
    with Trainer(address, "a", 0) as a, Trainer(address, "b", 1) as b:
        extra = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
        for group in (a, b):
            group.manager.register_state_dict_fn(
                "extra",
                lambda state, name=group.name: extra.update({name: state["value"]}),
                lambda name=group.name: {"value": extra[name]},
            )
        together(lambda: a.meets(2), lambda: b.meets(2))  # whoever asked first may have begun alone
        assert extra["a"].tolist() == extra["b"].tolist()


def test_pieces_that_do_not_match_are_an_error_that_names_them(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(1)
        with Trainer(address, "b", 1) as b:
            b.manager.register_state_dict_fn("extra", print, dict)
            assert together(b.step, lambda: a.meets(2)) == [False, True]
            assert "it has the state of 'default', here 'default', 'extra'" in str(
                b.manager.errored()
            )


def test_without_init_sync_everyone_keeps_its_own_weights() -> None:
    with (
        lighthouse(min_replicas=2) as address,
        Trainer(address, "a", 0, init_sync=False) as a,
        Trainer(address, "b", 1, init_sync=False) as b,
    ):
        before = bits(a.model.state_dict()), bits(b.model.state_dict())
        together(a.manager.start_quorum, b.manager.start_quorum)
        together(a.manager.should_commit, b.manager.should_commit)
        assert (bits(a.model.state_dict()), bits(b.model.state_dict())) == before


def test_a_group_that_puts_its_heal_off_commits_nothing(address: str) -> None:
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1) as b:
            over = threading.Event()

            def goes_on() -> int:
                discarded = 0
                while not over.is_set():
                    discarded += not a.step()
                return discarded

            def without_healing() -> None:
                b.manager.start_quorum(allow_heal=False)
                b.loss().backward()
                assert not b.manager.is_participating()
                assert not b.optimizer.step()
                assert b.manager.current_step() == 0
                assert "start_quorum(allow_heal=False) forbids it" in str(b.manager.errored())

            def puts_off() -> None:
                try:
                    for _ in range(3):
                        without_healing()
                    b.until(1)
                finally:
                    over.set()
                    b.manager.shutdown()

            _, discarded = together(puts_off, goes_on)
            assert discarded <= 1, "the others lose nothing by it, but when it leaves"
            assert b.manager.current_step() > 3


def fetch_while_in_quorum(mine: HTTPTransport[Any], quorum: QuorumResult, peers: Peers) -> None:
    """Fetch the state for group rank 0, as long as ``peers`` has no loss that ends this."""
    fetch_state(
        mine,
        quorum,
        0,
        10 * DEADLINE_S,
        PLAIN,
        lambda: peers.check_losses(quorum),
        lambda: peers.check_source(quorum),
        lambda: peers.check_own(quorum),
        lambda received, size: None,
    )


@pytest.mark.parametrize("answers", [False, True], ids=["dead", "frozen"])
def test_a_source_that_is_out_of_the_quorum_is_not_waited_for(answers: bool) -> None:
    """The source's manager cannot be reached, or accepts connections and does not answer."""
    peers = Peers()
    with socket.create_server(("127.0.0.1", 0)) as listener, HTTPTransport[Any](TIMEOUT) as mine:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        if not answers:
            listener.close()
        quorum = dataclasses.replace(A_QUORUM, recover_src_manager_address=address)
        lost = threading.Timer(0.2, peers.record_loss, ["b:1", "its session ended", 7])
        lost.start()
        began_at = time.monotonic()
        with pytest.raises(QuorumFailed, match="b:1 is out: its session ended"):
            fetch_while_in_quorum(mine, quorum, peers)
        lost.join()
        assert time.monotonic() - began_at < DEADLINE_S


def test_a_source_that_was_lost_while_the_members_met_is_not_asked() -> None:
    peers = Peers()
    peers.record_loss("b:1", "no sign of life for 5 s", 7)
    with socket.create_server(("127.0.0.1", 0)) as frozen, HTTPTransport[Any](TIMEOUT) as mine:
        address = f"127.0.0.1:{frozen.getsockname()[1]}"
        quorum = dataclasses.replace(A_QUORUM, recover_src_manager_address=address)
        with pytest.raises(QuorumFailed, match="b:1 is out: no sign of life for 5 s"):
            fetch_while_in_quorum(mine, quorum, peers)
        frozen.setblocking(False)
        with pytest.raises(BlockingIOError):
            frozen.accept()


@pytest.mark.parametrize("extra", [False, True], ids=["one source", "another one"])
def test_a_group_that_is_out_itself_waits_for_no_state(address: str, extra: bool) -> None:
    """The group was frozen: it gets its quorum, and then its own loss. Its sources have gone on."""
    peers = Peers()
    with Trainer(address, "b", 0) as b, HTTPTransport[Any](TIMEOUT) as mine:
        b.steps(2)
        with LighthouseClient(address, TIMEOUT) as client:
            (group,) = client.status()[0].groups
        quorum = dataclasses.replace(
            A_QUORUM,
            recover_src_manager_address=group.address,
            recover_extra_src_manager_addresses=(group.address,) * extra,
        )
        lost = threading.Timer(0.2, peers.record_loss, ["a:1", "no sign of life for 5 s", 7])
        lost.start()
        began_at = time.monotonic()
        with pytest.raises(PeerError, match="a:1 is out: no sign of life for 5 s"):
            fetch_while_in_quorum(mine, quorum, peers)
        lost.join()
        assert time.monotonic() - began_at < DEADLINE_S


class Deserted(Unreliable):
    """Receives nothing until it is informed twice that its source is out."""

    def __init__(self) -> None:
        super().__init__()
        self.receives = threading.Event()
        self.lost = threading.Event()
        self.why = ""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self.receives.set()
        assert self.lost.wait(DEADLINE_S)
        raise CheckpointError(metadata, self.why)

    def lose_source(self, why: str) -> None:
        if self.why:  # the first time it may still have been about to send
            self.lost.set()
        self.why = why


def test_a_receiving_transport_is_informed_that_its_source_is_out(address: str) -> None:
    transport = Deserted()
    with Trainer(address, "a", 0) as a:
        a.steps(2)
        with Trainer(address, "b", 1, checkpoint_transport=transport) as b:

            def begins_a_step_with_b() -> None:
                while not transport.receives.is_set():
                    a.optimizer.zero_grad()
                    a.manager.wait_quorum()
                    quorum = a.manager.last_quorum()
                    if quorum is not None and quorum.replica_world_size == 2:
                        return
                    a.loss().backward()
                    a.optimizer.step()

            together(b.manager.start_quorum, begins_a_step_with_b)
            assert transport.receives.wait(DEADLINE_S)
            a.manager.shutdown()
            assert transport.lost.wait(DEADLINE_S), "it waits for its timeout"
            assert re.search(r"\ba:\S+ is out: ", transport.why)
