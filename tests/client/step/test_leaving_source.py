"""Tests that a group that ends still serves the groups that heal from it (rule H12)."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.bounds import check
from support.fork_server import Call, Forked
from support.running import eventually
from support.scripts import leaving_source
from support.training import (
    DEADLINE_S,
    TIMEOUT,
    Trainer,
    assert_identical,
    lighthouse,
    together,
    workers,
)

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.pg import PGTransport
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.core.quorum.worker import linger
from torchft_svc.testing.proxy import Proxy, Throttle

STANDSTILL_S = 0.7
# A shutdown takes some hundredths of a second.
AT_ONCE_S = 0.4


class Gate:
    """Holds a fetch until the test allows it."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_fetch = threading.Event()

    def hold(self) -> None:
        self.is_asked.set()
        assert self.may_fetch.wait(DEADLINE_S)


class Held(HTTPTransport[Any]):
    """A transport that fetches a state when the test allows it."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT, hostname="127.0.0.1")
        self.gate = Gate()

    def recv_striped(self, *what: Any, **more: Any) -> Any:
        self.gate.hold()
        return super().recv_striped(*what, **more)


class HeldPG(PGTransport):
    """The same over a process group."""

    def __init__(self, pg: ProcessGroupGloo, timeout: timedelta) -> None:
        super().__init__(pg, timeout)
        self.gate = Gate()

    def recv_checkpoint(self, *what: Any, **more: Any) -> Any:
        self.gate.hold()
        return super().recv_checkpoint(*what, **more)


@contextlib.contextmanager
def released(held: Held | HeldPG) -> Iterator[None]:
    """Let ``held`` fetch after the block."""
    try:
        yield
    finally:
        held.gate.may_fetch.set()


class Watched(HTTPTransport[Any]):
    """A transport that counts how often it is asked for its receivers' progress."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT, hostname="127.0.0.1")
        self.num_asked = 0

    def last_sent_at(self) -> float | None:
        self.num_asked += 1
        return super().last_sent_at()


class Slow(HTTPTransport[Any]):
    """A transport behind a link that a test makes slow."""

    link: Proxy | None = None

    def metadata(self) -> str:
        if self.link is None:
            self.link = Proxy(super().metadata(), Throttle(2_000.0), piece_bytes=256)
        return self.link.url

    def shutdown(self, wait: bool = True) -> None:
        super().shutdown(wait)
        if self.link is not None:
            self.link.__exit__()


@dataclass(frozen=True)
class Pair:
    """Group ``b`` heals from ``a``, over ``transport``, in the last step of ``a``."""

    a: Trainer
    b: Trainer
    transport: Held | HeldPG
    threads: ThreadPoolExecutor
    heals: Future[bool]

    def leave(self) -> Future[None]:
        """Let ``a`` shut down."""
        return self.threads.submit(self.a.manager.shutdown)


@contextlib.contextmanager
def healing(kind: str = "http") -> Iterator[Pair]:
    """A group that has trained, and one that has just started and fetches nothing yet."""
    with lighthouse() as address, contextlib.ExitStack() as stack:

        def trainer(name: str, seed: int, make: Callable[[Any], Any]) -> tuple[Trainer, Any]:
            pg = ProcessGroupGloo(TIMEOUT)
            transport = make(pg)
            options = {"pg": pg, "checkpoint_transport": transport}
            return stack.enter_context(Trainer(address, name, seed, **options)), transport

        http = kind == "http"
        a, _ = trainer("a", 0, lambda pg: Slow(TIMEOUT) if http else PGTransport(pg, TIMEOUT))
        a.steps(2)
        b, transport = trainer("b", 1, lambda pg: Held() if http else HeldPG(pg, TIMEOUT))
        threads = stack.enter_context(ThreadPoolExecutor(2))
        stack.callback(transport.gate.may_fetch.set)
        heals = threads.submit(b.step)
        assert a.meets(2)
        eventually(transport.gate.is_asked.is_set)
        yield Pair(a, b, transport, threads, heals)


@pytest.mark.parametrize("kind", ["http", "pg"])
def test_a_group_that_ends_waits_for_a_slow_heal(kind: str) -> None:
    """Both end at one step with the same weights; the link needs over a second for them."""
    with healing(kind) as pair:
        leaves = pair.leave()
        time.sleep(AT_ONCE_S)
        assert not leaves.done()
        pair.transport.gate.may_fetch.set()
        assert pair.heals.result(DEADLINE_S)
        leaves.result(DEADLINE_S)
        assert_identical([pair.a, pair.b])


def parts(kind: str, *, is_held: bool = False) -> dict[str, Any]:
    """The process group and the transport of a worker."""
    pg = ProcessGroupGloo(TIMEOUT)
    if kind == "http":
        return {"pg": pg, "checkpoint_transport": Held() if is_held else HTTPTransport(TIMEOUT)}
    return {"pg": pg, "checkpoint_transport": (HeldPG if is_held else PGTransport)(pg, TIMEOUT)}


@pytest.mark.parametrize("kind", ["http", "pg"])
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_group_ends_when_the_receivers_of_all_of_its_workers_are_done(
    slow_rank: int, kind: str
) -> None:
    of_a = {rank: parts(kind) for rank in range(2)}
    of_b = {rank: parts(kind, is_held=rank == slow_rank) for rank in range(2)}
    held = of_b[slow_rank]["checkpoint_transport"]
    with (
        lighthouse() as address,
        workers(address, "a", 2, of_rank=of_a) as a,
        ThreadPoolExecutor(4) as threads,
    ):
        together(*(worker.step for worker in a))
        with workers(address, "b", 2, seed=10, of_rank=of_b) as b, released(held):
            heals = [threads.submit(worker.step) for worker in b]
            together(*(lambda worker=worker: worker.meets(2) for worker in a))
            eventually(held.gate.is_asked.is_set)
            leaves = [threads.submit(worker.manager.shutdown) for worker in a]
            time.sleep(2 * AT_ONCE_S)
            assert not any(each.done() for each in leaves)
            held.gate.may_fetch.set()
            assert [each.result(DEADLINE_S) for each in heals] == [True, True]
            for each in leaves:
                each.result(DEADLINE_S)
            for rank in range(2):
                assert_identical([a[rank], b[rank]])


def test_a_frozen_receiver_does_not_keep_a_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linger, "STANDSTILL_S", STANDSTILL_S)
    with healing() as pair:
        began_at = time.monotonic()
        pair.leave().result(DEADLINE_S)
        check("it leaves", time.monotonic() - began_at, STANDSTILL_S + 2.0)
        pair.transport.gate.may_fetch.set()
        assert not pair.heals.result(DEADLINE_S)
    assert "leaves although b may not have the whole state" in caplog.messages


def test_a_receiver_that_is_gone_does_not_keep_a_group() -> None:
    with healing() as pair:
        leaves = pair.leave()
        time.sleep(AT_ONCE_S)
        assert not leaves.done()
        began_at = time.monotonic()
        pair.b.manager.shutdown()
        leaves.result(DEADLINE_S)
        check("it leaves", time.monotonic() - began_at, 2.0)


@pytest.mark.parametrize("heals", [True, False])
def test_a_group_from_which_none_heals_leaves_at_once(heals: bool) -> None:
    """A heal that is some steps ago does not count."""
    transport = Watched()
    with lighthouse() as address, Trainer(address, "a", 0, checkpoint_transport=transport) as a:
        a.steps(2)
        if heals:
            with Trainer(address, "b", 1) as b:
                together(lambda: a.meets(2), b.step)
                together(lambda: a.steps(2), lambda: b.steps(2))
        began_at = time.monotonic()
        a.manager.shutdown()
        check("a shutdown", time.monotonic() - began_at, AT_ONCE_S)
        assert not transport.num_asked


def test_an_interrupted_program_waits_for_nobody() -> None:
    with healing() as pair:
        began_at = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt), pair.a:
            raise KeyboardInterrupt
        check("it ends", time.monotonic() - began_at, AT_ONCE_S)


@pytest.mark.processes
def test_a_second_signal_ends_a_group_that_waits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    held = Held()
    with lighthouse() as address, ThreadPoolExecutor(1) as threads:
        process = Forked(Call(leaving_source.main, (address, "a"), {}, out))
        try:
            eventually(lambda: out.exists() and "training 1" in out.read_text(), DEADLINE_S)
            with Trainer(address, "b", 1, checkpoint_transport=held) as b, released(held):
                threads.submit(b.step)
                eventually(lambda: "training 2" in out.read_text(), DEADLINE_S)
                process.send_signal(signal.SIGTERM)
                eventually(lambda: "still sends its state to b" in out.read_text(), DEADLINE_S)
                began_at = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == -signal.SIGTERM
                check("it ends", time.monotonic() - began_at, AT_ONCE_S)
        finally:
            process.send_signal(signal.SIGKILL)


NOW = 100.0


@pytest.mark.parametrize(
    ("sent_at", "drain_until", "until"),
    [
        (NOW, None, NOW + linger.STANDSTILL_S),
        (NOW + 50, None, NOW + 50 + linger.STANDSTILL_S),
        (NOW + 10_000, None, NOW + linger.MAX_LINGER_S),
        (NOW + 1, NOW + 8, NOW + 4),
        (NOW, NOW + 60, NOW + linger.STANDSTILL_S),
        (NOW + 20, float("inf"), NOW + linger.MAX_DRAIN_LINGER_S),
        (NOW, NOW - 1, NOW - 0.5),
    ],
)
def test_for_how_long_a_group_waits(
    sent_at: float, drain_until: float | None, until: float
) -> None:
    assert linger.lingers_until(NOW, sent_at, drain_until) == until
