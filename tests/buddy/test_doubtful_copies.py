"""Tests copies that are claimed, and are not what they are claimed to be: they cost a bounded time,
and no worker and no holder takes wrong bits from them."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.bounds import check
from support.held_copies import (
    CALL,
    EVERY,
    LONG_S,
    KnownCopy,
    holder,
    lighthouse,
    reported,
    train_until_copied,
    view_of,
)
from support.running import attach, eventually, silent, start_manager
from support.training import Trainer

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.encoding.memory import Memory
from torchft_svc.client.checkpointing.encoding.serialization import Described
from torchft_svc.client.checkpointing.http.requests import COPY, STATE
from torchft_svc.client.checkpointing.http.served import ServedState
from torchft_svc.client.step.state import MANAGER_KEY, USER_KEY
from torchft_svc.coordination import LighthouseClient, ManagerClient
from torchft_svc.core.limits import MAX_INT64
from torchft_svc.core.quorum.lighthouse.copies import HeldCopy
from torchft_svc.errors import PeerError, TorchFTError
from torchft_svc.rpc.security import Security
from torchft_svc.testing.proxy import Proxy
from torchft_svc.testing.transport_contract import bits

Transport = HTTPTransport[Any]
# Of the worker that begins: it waits so long for a quorum, and for a byte.
QUORUM_S, SILENT_S = 3.0, 1.0
IMPATIENT = {
    "quorum_timeout": timedelta(seconds=QUORUM_S),
    "timeout": timedelta(seconds=SILENT_S),
    "buddy_every": 1,
}
LONG = timedelta(seconds=60)
HOLDER_SILENCE = "torchft_svc.buddy.holder._SILENCE_TIMEOUT"
FAR = 1000  # a step that the job has not reached
BIG = 1 << 20


def whole_state(step: int, /, **changes: Any) -> dict[str, Any]:
    counters = {"step": step, "quorum_id": 7, "batches_committed": step, **changes}
    return {USER_KEY: {"default": torch.zeros(BIG)}, MANAGER_KEY: counters}


def serve(transport: Transport, state: Any, step: int = FAR) -> str:
    """Offer ``state`` to workers and to holders."""
    for name in (STATE, COPY):
        offered = transport._to_serve([0], [], step, state, LONG)
        assert offered is not None
        transport._server.offer(name, offered)
    return transport.metadata()


def serve_description(transport: Transport, size: int) -> str:
    """Offer a state that claims to have so many bytes."""
    document = {"version": 1, "blobs": [size], "tensors": [], "tree": {}}
    described = Described(json.dumps(document).encode(), Memory([], 0))
    for name in (STATE, COPY):
        transport._server.offer(
            name,
            ServedState(described, step=FAR, num_receivers=1, chunk_bytes=BIG, idle_timeout_s=60.0),
        )
    return transport.metadata()


@contextlib.contextmanager
def plain(make: Callable[[Transport], str]) -> Iterator[str]:
    with Transport(LONG, hostname="127.0.0.1") as transport:
        yield make(transport)


@contextlib.contextmanager
def stopping() -> Iterator[str]:
    """A source that sends half of its state, and then nothing more."""
    with (
        Transport(LONG, hostname="127.0.0.1") as transport,
        Proxy(serve(transport, whole_state(FAR)), lambda at, data: hold(at, data)) as proxy,
    ):

        def hold(at: int, data: bytes) -> bytes:
            if at + len(data) > 2 * BIG:
                proxy.hold()
            return data

        yield proxy.url


@contextlib.contextmanager
def refusing_tokens() -> Iterator[str]:
    token = Security(token="a-token-of-another-cluster")  # noqa: S106 - of this test
    with Transport(LONG, hostname="127.0.0.1", security=token) as transport:
        yield serve(transport, whole_state(FAR))


@contextlib.contextmanager
def mute() -> Iterator[str]:
    with silent() as address:
        yield f"http://{address}/secret"


DOUBTFUL: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "no address": lambda: contextlib.nullcontext("garbage"),
    "nobody there": lambda: contextlib.nullcontext("http://127.0.0.1:1/secret"),
    "another step": lambda: plain(lambda source: serve(source, whole_state(FAR - 1))),
    "another quorum": lambda: plain(lambda source: serve(source, whole_state(FAR, quorum_id=8))),
    "a step that is none": lambda: plain(lambda source: serve(source, whole_state(FAR, step=True))),
    "no state": lambda: plain(lambda source: serve(source, {USER_KEY: 5, MANAGER_KEY: 6})),
    "another program": lambda: plain(
        lambda source: serve(source, {**whole_state(FAR), USER_KEY: {"other": 1}})
    ),
    "too large": lambda: plain(lambda source: serve_description(source, 1 << 43)),
    "larger than can be": lambda: plain(lambda source: serve_description(source, 1 << 62)),
    "stops in the middle": stopping,
    "another token": refusing_tokens,
    "silent": mute,
}


def claimed(address: str, step: int = FAR) -> HeldCopy:
    return HeldCopy(step=step, step_quorum_id=7, address=address)


@pytest.fixture(scope="module")
def real() -> Iterator[KnownCopy]:
    with (
        pytest.MonkeyPatch.context() as patch,
        lighthouse() as server,
        holder(server.address()) as held,
        Trainer(server.address(), "a", 1, buddy_every=EVERY) as trainer,
    ):
        # It waits for the next copy all the time, and a new request would begin another thread.
        patch.setattr(HOLDER_SILENCE, timedelta(minutes=10))
        yield train_until_copied(trainer, held, server.address())


@pytest.mark.parametrize("kind", DOUBTFUL)
def test_a_worker_begins_from_the_copy_before_a_doubtful_one(real: KnownCopy, kind: str) -> None:
    with (
        lighthouse() as server,
        DOUBTFUL[kind]() as address,
        reported(server.address(), claimed(address), real.copy),
        Trainer(server.address(), "b", 2, **IMPATIENT) as trainer,
    ):
        began_at = time.monotonic()
        trainer.optimizer.zero_grad()
        check("a doubtful copy", time.monotonic() - began_at, 2 * QUORUM_S + SILENT_S)
        assert trainer.manager.current_step() == real.copy.step
        assert bits(trainer.state_dict()) == real.bits


def test_a_worker_asks_another_holder_of_the_same_copy(real: KnownCopy) -> None:
    gone = replace(real.copy, address="http://127.0.0.1:1/gone")
    with (
        lighthouse() as server,
        reported(server.address(), gone, real.copy),
        Trainer(server.address(), "b", 2, buddy_every=1) as trainer,
    ):
        began_at = time.monotonic()
        trainer.optimizer.zero_grad()
        check("another holder is asked", time.monotonic() - began_at, 10.0)
        assert bits(trainer.state_dict()) == real.bits


@pytest.mark.parametrize("step", [FAR, MAX_INT64])
def test_a_worker_with_nothing_but_a_doubtful_copy_says_so(step: int) -> None:
    with (
        lighthouse() as server,
        reported(server.address(), claimed("http://127.0.0.1:1/secret", step)),
        Trainer(server.address(), "b", 2, **IMPATIENT) as trainer,
    ):
        began_at = time.monotonic()
        with pytest.raises(PeerError, match=r"127\.0\.0\.1:1") as raised:
            trainer.optimizer.zero_grad()
        check("a doubtful copy alone", time.monotonic() - began_at, 2 * QUORUM_S)
        assert "secret" not in str(raised.value)
        assert trainer.manager.current_step() == 0


@pytest.mark.parametrize("kind", [kind for kind in DOUBTFUL if not kind.startswith("another ")])
def test_a_holder_keeps_its_copy_when_the_next_one_is_doubtful(
    real: KnownCopy, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that is copied next has a worker whose address leads to such a source."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(HOLDER_SILENCE, timedelta(seconds=SILENT_S))
    with (
        lighthouse() as server,
        DOUBTFUL[kind]() as address,
        start_manager(server.address(), replica_id="b") as manager,
        ManagerClient(manager.address(), CALL) as client,
        holder(server.address()) as held,
    ):
        step = real.copy.step + 1
        attach(client, 0)
        client._quorum(0, step, address, shrink_only=False, timeout=LONG)
        with Transport(LONG, hostname="127.0.0.1") as transport:
            state = transport.recv_checkpoint(0, real.copy.address, real.copy.step, LONG)
            copy = held.add(0, state, above=0, fetched_in_s=0.1)
        eventually(lambda: "no copy of rank 0 of b" in caplog.text, LONG_S)
        eventually(lambda: copy in view_of(server.address()).copies, LONG_S)
        assert "Traceback" not in caplog.text
        assert held.described() == [copy]


@pytest.mark.parametrize(
    ("copies", "reason"),
    [
        ([claimed("x", step=-1)], "a copy of no worker's state"),
        ([replace(claimed("x"), group_rank=5)], "a copy of no worker's state"),
        ([replace(claimed("x"), group_world_size=0)], "a copy of no worker's state"),
        ([claimed("x" * 5000)], "address"),
        ([claimed("x")] * 600, "600 copies, at most 512"),
    ],
)
def test_a_lighthouse_refuses_absurd_reports(copies: list[HeldCopy], reason: str) -> None:
    with lighthouse() as server, LighthouseClient(server.address(), CALL) as client:
        with pytest.raises(TorchFTError, match=reason):
            client.report_copies("evil", copies, CALL)
        assert not view_of(server.address()).copies
