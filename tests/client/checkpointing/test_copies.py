"""Tests copies of a state that processes outside of all groups fetch (rule B3)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.running import eventually

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http import connections, served
from torchft_svc.errors import PeerError
from torchft_svc.testing.proxy import DEADLINE_S, Gate, Proxy

LONG = timedelta(seconds=DEADLINE_S)
SOON = timedelta(milliseconds=300)
CHUNK_BYTES = 64 << 10

Transport = HTTPTransport[Any]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def source(stack: contextlib.ExitStack) -> Transport:
    return stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=CHUNK_BYTES))


@pytest.fixture
def holder(stack: contextlib.ExitStack) -> Transport:
    return stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(4.0 * CHUNK_BYTES)}


def waiting(pool: ThreadPoolExecutor, source: Transport, holder: Transport) -> Future[Any]:
    """A holder that waits for the first copy, as the source knows."""
    before = source.num_awaiting_copy(1)
    fetched = pool.submit(holder.recv_copy, source.metadata(), 0, LONG)
    eventually(lambda: source.num_awaiting_copy(1) == before + 1)
    return fetched


def test_b3_a_copy_is_the_state_of_the_moment_in_which_it_was_offered(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor
) -> None:
    state = weights()
    fetched = waiting(pool, source, holder)
    source.offer_copy(5, state)
    source.disallow_checkpoint()
    state["w"] += 1  # as an update does
    assert torch.equal(fetched.result(DEADLINE_S)["w"], weights()["w"])
    eventually(lambda: source.copied_bytes == 0)


def test_b3_nothing_is_offered_that_nobody_waits_for(source: Transport, holder: Transport) -> None:
    assert source.num_awaiting_copy(5) == 0
    source.offer_copy(5, weights())
    source.disallow_checkpoint()
    assert source.copied_bytes == 0
    with pytest.raises(PeerError):
        holder.recv_copy(source.metadata(), 0, SOON)


def test_b3_a_holder_waits_for_a_step_above_its_own(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor
) -> None:
    fetched = pool.submit(holder.recv_copy, source.metadata(), 5, LONG)
    eventually(lambda: source.num_awaiting_copy(6))
    assert source.num_awaiting_copy(5) == 0, "it has that of step 5"
    source.offer_copy(6, weights())
    assert torch.equal(fetched.result(DEADLINE_S)["w"], weights()["w"])


def test_b3_a_copy_that_is_withdrawn_does_not_arrive(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor
) -> None:
    """A group that heals has other weights than those that it has offered."""
    fetched = waiting(pool, source, holder)
    source.retract_checkpoint()
    source.offer_copy(5, weights())
    source.disallow_checkpoint()
    source.retract_checkpoint()
    healed = weights()["w"] + 1
    source.offer_copy(6, {"w": healed})
    with contextlib.suppress(PeerError):  # the first one was on its way
        found = fetched.result(DEADLINE_S)["w"]
        # It may have arrived before.
        assert torch.equal(found, healed) or torch.equal(found, weights()["w"])


def test_b3_a_heal_goes_on_beside_a_copy(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor, stack: contextlib.ExitStack
) -> None:
    receiver: Transport = stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))
    fetched = waiting(pool, source, holder)
    source.send_checkpoint([1], 7, {"n": torch.ones(3)}, LONG)
    source.offer_copy(5, weights())
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 7, LONG)["n"], torch.ones(3))
    assert torch.equal(fetched.result(DEADLINE_S)["w"], weights()["w"])


def test_k6_holders_leave_heals_their_connections(
    source: Transport,
    holder: Transport,
    pool: ThreadPoolExecutor,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 1)
    receiver: Transport = stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))
    fetched = waiting(pool, source, holder)
    source.send_checkpoint([1], 7, {"n": torch.ones(3)}, LONG)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 7, LONG)["n"], torch.ones(3))
    source.offer_copy(5, weights())
    assert torch.equal(fetched.result(DEADLINE_S)["w"], weights()["w"])


def test_two_holders_receive_one_copy(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor, stack: contextlib.ExitStack
) -> None:
    other: Transport = stack.enter_context(HTTPTransport(LONG, hostname="127.0.0.1"))
    fetched = [waiting(pool, source, each) for each in (holder, other)]
    source.offer_copy(5, weights())
    source.disallow_checkpoint()
    for each in fetched:
        assert torch.equal(each.result(DEADLINE_S)["w"], weights()["w"])


def test_b3_a_slow_holder_is_not_cut_off_by_the_next_copy_for_a_fast_one(
    source: Transport,
    holder: Transport,
    pool: ThreadPoolExecutor,
    stack: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: Transport = stack.enter_context(HTTPTransport(LONG, 1, hostname="127.0.0.1"))
    gate = Gate(4 * CHUNK_BYTES)
    proxy = stack.enter_context(Proxy(source.metadata(), gate))
    late = pool.submit(slow.recv_copy, proxy.url, 0, LONG)
    eventually(lambda: source.num_awaiting_copy(1) == 1)
    waiting(pool, source, holder)
    source.offer_copy(5, weights())
    source.disallow_checkpoint()
    gate.wait_until_reached()
    pool.submit(holder.recv_copy, source.metadata(), 5, LONG)
    eventually(lambda: source._copy._waiting == [5])
    assert source.num_awaiting_copy(6) == 0, "the slow one still fetches that of step 5"
    with monkeypatch.context() as patched:
        patched.setattr(served, "STANDSTILL_S", 0.0)
        assert source.num_awaiting_copy(6) == 1, "it stands still"
    gate.open()
    assert torch.equal(late.result(DEADLINE_S)["w"], weights()["w"])
    eventually(lambda: source.num_awaiting_copy(6) == 1)
    source.offer_copy(6, weights())


def test_the_end_of_a_source_ends_the_wait(
    source: Transport, holder: Transport, pool: ThreadPoolExecutor
) -> None:
    fetched = waiting(pool, source, holder)
    closing = threading.Thread(target=source.shutdown)
    closing.start()
    with pytest.raises(PeerError):
        fetched.result(DEADLINE_S)
    closing.join(DEADLINE_S)
