"""Tests one receiver with several sources: they share the load, and none can damage the state."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from support.bounds import Late
from support.running import SCRIPTS, eventually
from support.warm import Warm

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http import feed, fetch, served
from torchft_svc.errors import CheckpointError, DeadlineExceeded, PeerError, Unreachable
from torchft_svc.testing.proxy import DEADLINE_S, Damage, Gate, Hook, Proxy, Throttle

LONG = timedelta(seconds=DEADLINE_S)
CHUNK_BYTES = 256 << 10
NUM_FLOATS = 2 << 20
NUM_BYTES = NUM_FLOATS * 4
LINK_BYTES_PER_S = 10e6
# Smaller ones would make each connection slow, not the link.
PIECE_BYTES = 128 << 10
HALF_WAY = NUM_BYTES // 8

Transport = HTTPTransport[Any]


def weights() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(float(NUM_FLOATS))}


class Site:
    """Sources that offer step 1, each behind a proxy of its own, and one receiver."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self.receiver: Transport = stack.enter_context(
            HTTPTransport(LONG, num_connections=2, hostname="127.0.0.1")
        )
        self._pool = stack.enter_context(ThreadPoolExecutor())
        self.sources: list[Transport] = []
        self.proxies: list[Proxy] = []

    def add(
        self,
        state: Any = None,
        hook: Hook | None = None,
        piece_bytes: int = PIECE_BYTES,
        **options: Any,
    ) -> Transport:
        """The first one is the one that was assigned."""
        source: Transport = self._stack.enter_context(
            HTTPTransport(LONG, hostname="127.0.0.1", **{"chunk_bytes": CHUNK_BYTES, **options})
        )
        announced, extras = ([], [1]) if self.sources else ([1], [])
        source.send_striped(announced, extras, 1, weights() if state is None else state, LONG)
        self.sources.append(source)
        self.add_proxy(source.metadata(), hook, piece_bytes)
        return source

    def add_gated(self, start: int, state: Any = None) -> Gate:
        """A source on a slow link whose bytes from ``start`` on wait at the gate."""
        gate, throttle = Gate(start), Throttle(LINK_BYTES_PER_S / 3)
        self.add(state, lambda place, data: gate(place, throttle(place, data)))
        return gate

    def add_silent(self) -> None:
        """A source that does not offer anything."""
        source: Transport = HTTPTransport(LONG, hostname="127.0.0.1")
        self.add_proxy(self._stack.enter_context(source).metadata(), None)
        self.sources.append(source)

    def add_proxy(self, url: str, hook: Hook | None = None, piece_bytes: int = PIECE_BYTES) -> None:
        proxy = Proxy(url, Throttle(LINK_BYTES_PER_S) if hook is None else hook, piece_bytes)
        self.proxies.append(self._stack.enter_context(proxy))

    def fetch(self) -> Future[Any]:
        first, *others = [proxy.url for proxy in self.proxies]
        lookups: list[Callable[[], str]] = [lambda url=url: url for url in others]  # type: ignore[misc]
        return self._pool.submit(self.receiver.recv_striped, 0, first, lookups, 1, LONG)

    def heal(self) -> float:
        """Fetch the right state; how many seconds that took."""
        began_at = time.monotonic()
        self.expect(self.fetch())
        return time.monotonic() - began_at

    def expect(self, fetched: Future[Any]) -> None:
        assert torch.equal(fetched.result(DEADLINE_S)["w"], weights()["w"])

    @property
    def shares(self) -> list[float]:
        return [proxy.num_bytes / NUM_BYTES for proxy in self.proxies]


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(stack)


def test_all_sources_send_at_once(site: Site) -> None:
    gates = [site.add_gated(NUM_BYTES // 16) for _ in range(4)]
    fetched = site.fetch()
    for gate in gates:
        gate.wait_until_reached()
    for gate in gates:
        gate.open()
    site.expect(fetched)
    assert sum(site.shares) < 2


def test_all_sources_keep_what_is_missing_when_they_go_on(site: Site) -> None:
    states = [weights() for _ in range(3)]
    gates = [site.add_gated(NUM_BYTES * 3 // 10, state) for state in states]
    fetched = site.fetch()
    for gate in gates:
        gate.wait_until_reached()
    for source, state in zip(site.sources, states, strict=True):
        source.disallow_checkpoint()
        state["w"].zero_()
    # What others have sent is not kept, either.
    assert all(0 < source.copied_bytes < 0.95 * NUM_BYTES for source in site.sources)
    for gate in gates:
        gate.open()
    site.expect(fetched)
    assert [source.copied_bytes for source in site.sources] == [0, 0, 0]


def test_an_extra_source_keeps_nothing_for_long_for_who_did_not_come(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "EXTRAS_TIMEOUT_S", 0.3)
    first, extra = site.add(), site.add()
    for source in (first, extra):
        source.disallow_checkpoint()
    copied = [first.copied_bytes, extra.copied_bytes]
    if copied == [NUM_BYTES, 0]:
        site.sources.clear()  # the next attempt begins with a first one
        site.proxies.clear()
        raise Late("it has let go already")
    assert copied == [NUM_BYTES, NUM_BYTES]
    eventually(lambda: extra.copied_bytes == 0)
    assert first.copied_bytes == NUM_BYTES
    site.heal()
    assert site.shares[1] < 0.01


def test_a_receiver_that_comes_after_the_step_gets_a_part_from_all(site: Site) -> None:
    gates = [site.add_gated(HALF_WAY) for _ in range(2)]
    for source in site.sources:
        source.disallow_checkpoint()
    fetched = site.fetch()
    for gate in gates:
        gate.wait_until_reached()
        gate.open()
    site.expect(fetched)
    assert [source.copied_bytes for source in site.sources] == [0, 0]


def test_digests_are_sent_of_chunks_that_are_not_kept_any_more(site: Site) -> None:
    source = site.add()
    url = urlsplit(source.metadata())
    with contextlib.closing(HTTPConnection(str(url.hostname), url.port, DEADLINE_S)) as connection:

        def ask(path: str) -> bytes:
            connection.request("GET", f"{url.path}/{path}")
            with connection.getresponse() as response:
                assert response.status == 200
                return response.read()

        state_id = ask("state/1").split()[0].decode()
        seal = ask(f"chunk/{state_id}/0")[-8:]
        ask(f"chunk/{state_id}/1?receiver=r&verified=0")
        source.disallow_checkpoint()
        assert source.copied_bytes == NUM_BYTES - CHUNK_BYTES
        assert ask(f"digests/{state_id}").startswith(seal)


@pytest.mark.parametrize("dead", [0, 1], ids=["assigned", "extra"])
@pytest.mark.processes
def test_a_source_that_is_killed_half_way_is_replaced_by_the_others(site: Site, dead: int) -> None:
    script = str(SCRIPTS / "checkpoint_source.py")
    flags = ["--floats", str(NUM_FLOATS), "--chunk-bytes", str(CHUNK_BYTES)]
    with Warm([sys.executable, script, *flags], env=os.environ, text=True) as process:
        try:
            url = process.stdout.readline().split()[0]
            for number in range(3):
                if number == dead:
                    site.add_proxy(url)
                    site.sources.append(site.receiver)
                else:
                    site.add()
            fetched = site.fetch()
            eventually(lambda: site.shares[dead] > 0.1)
            process.send_signal(signal.SIGKILL)
            process.wait()
            site.expect(fetched)
        finally:
            process.kill()


def test_a_source_that_cannot_be_reached_is_replaced_by_the_others(site: Site) -> None:
    site.add().shutdown()
    site.add()
    site.add()
    site.heal()
    assert site.shares[0] == 0


def test_when_all_are_gone_the_error_is_that_of_the_assigned_one(site: Site) -> None:
    gates = [site.add_gated(HALF_WAY) for _ in range(3)]
    fetched = site.fetch()
    for gate in gates:
        gate.wait_until_reached()
    for source in reversed(site.sources):
        source.shutdown()
    for gate in gates:
        gate.open()
    with pytest.raises(PeerError):
        fetched.result(DEADLINE_S)


@pytest.mark.parametrize("start", [5_000, HALF_WAY], ids=["at-once", "half-way"])
@pytest.mark.parametrize("stands_still", [0, 1], ids=["assigned", "extra"])
def test_a_source_that_stands_still_holds_nobody_up(
    site: Site, stands_still: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "DIGESTS_TIMEOUT_S", 1.0)
    gate = Gate(start)
    for number in range(3):
        site.add(hook=gate if number == stands_still else None)
    try:
        assert site.heal() < DEADLINE_S / 2
    finally:
        gate.open()


def test_an_assigned_source_that_is_lost_before_it_offers_is_not_waited_for(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The source's process is frozen before it begins, and its group is out of the quorum."""
    site.add_silent()
    site.add()
    site.add()
    fetched = site.fetch()
    with pytest.raises(FutureTimeoutError):
        fetched.result(0.5)
    site.receiver.lose_source("a:1 is out: no sign of life for 5 s")
    site.expect(fetched)
    assert "is lost, others continue: checkpoint from" in caplog.text
    assert "a:1 is out: no sign of life for 5 s" in caplog.text


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, NUM_BYTES], ids=["chunks", "one chunk"])
def test_an_assigned_source_that_says_nothing_is_overtaken(
    site: Site, chunk_bytes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's group is in the quorum, but a firewall, say, cuts its checkpoints off."""
    monkeypatch.setattr(fetch, "LATER_BY_S", 0.3)
    site.add_silent()
    site.add(chunk_bytes=chunk_bytes)
    site.add(chunk_bytes=chunk_bytes)
    assert site.heal() < DEADLINE_S / 2
    assert "described the state 0.3 s ago, this source did not" in caplog.text


def test_an_extra_source_has_a_state_without_tensors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extra source may send the rest of a state, for instance, when the step ends."""
    monkeypatch.setattr(fetch, "LATER_BY_S", 0.3)
    site.add_silent()
    site.add({"step": 7})
    assert site.fetch().result(DEADLINE_S / 2) == {"step": 7}


def test_digests_that_come_byte_by_byte_are_too_late(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "DIGESTS_TIMEOUT_S", 0.5)
    drips: list[bool] = []

    def drip(_: int, data: bytes) -> bytes:
        if drips:
            time.sleep(0.1)
        return data

    site.add(hook=drip, piece_bytes=8)
    url = site.proxies[0].url
    source = feed.Feed(url, feed.FetchRequest(url, 1, DEADLINE_S, 1))
    source.open()
    drips.append(True)
    with pytest.raises(DeadlineExceeded, match="receiving digests"):
        source.fetch_digests(NUM_BYTES // CHUNK_BYTES)
    source.close()


def test_a_source_that_fails_before_another_one_has_answered_is_replaced(site: Site) -> None:
    def late(place: int, data: bytes) -> bytes:
        if place == 0:
            time.sleep(0.5)
        return data

    site.add(hook=lambda place, data: data if place < 5_000 else None)
    site.add(hook=late)
    site.heal()


def test_an_only_source_that_is_lost_before_it_offers_is_not_waited_for(site: Site) -> None:
    site.add_silent()
    fetched = site.fetch()
    with pytest.raises(FutureTimeoutError):
        fetched.result(0.5)
    site.receiver.lose_source("a:1 is out: no sign of life for 5 s")
    with pytest.raises(CheckpointError, match="a:1 is out: no sign of life for 5 s"):
        fetched.result(DEADLINE_S)


def test_a_lost_source_that_still_sends_is_read_to_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's step hangs, or its manager is frozen: it is out, and still has the state."""
    monkeypatch.setattr(fetch, "SILENCE_S", 0.3)
    site.add(hook=Throttle(LINK_BYTES_PER_S))
    fetched = site.fetch()
    eventually(lambda: site.shares[0] > 0.1)
    num_informed = 0
    while not fetched.done():
        site.receiver.lose_source("a:1 is out: it hangs")
        num_informed += 1
        time.sleep(0.05)
    assert num_informed > 6
    site.expect(fetched)


@pytest.mark.parametrize("start", [100, 5_000, HALF_WAY], ids=["head", "at-once", "half-way"])
def test_a_lost_source_that_stops_sending_is_not_waited_for(site: Site, start: int) -> None:
    """The source is the only one: what is one chunk, for instance, comes from nobody else."""
    gate = Gate(start)
    site.add(hook=gate)
    fetched = site.fetch()
    gate.wait_until_reached()

    def is_over() -> bool:
        site.receiver.lose_source("a:1 is out: no sign of life for 5 s")
        return fetched.done()

    eventually(is_over, DEADLINE_S)
    try:
        with pytest.raises(CheckpointError, match="a:1 is out: no sign of life for 5 s"):
            fetched.result(0)
    finally:
        gate.open()


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_source_that_is_lost_after_the_last_chunk_is_not_missed(
    site: Site, monkeypatch: pytest.MonkeyPatch, num_sources: int
) -> None:
    """No other one has to vouch for its chunks, and no thread waits for more."""

    def lose(source: feed.Feed, *_: Any) -> None:
        raise CheckpointError(source.address, "it has ended")

    def learn(source: feed.Feed, _: int) -> list[bytes]:
        source._stopped.wait(DEADLINE_S)
        raise CheckpointError(source.address, "it has ended")

    def slow(_: int, data: bytes) -> bytes:
        time.sleep(0.5 if len(data) > 3000 else 0.0)  # the only chunk
        return data

    def later(_: int, data: bytes) -> bytes:
        time.sleep(0.2)  # there is no chunk left for this one
        return data

    monkeypatch.setattr(feed.Feed, "report", lose)
    monkeypatch.setattr(feed.Feed, "fetch_digests", learn)
    state = {"w": torch.arange(1000.0)}
    for hook in (slow, later)[:num_sources]:
        site.add(state, hook)
    assert torch.equal(site.fetch().result(DEADLINE_S)["w"], state["w"])

    def is_fetching() -> bool:
        return any(each.name.startswith("torchft-fetch") for each in threading.enumerate())

    eventually(lambda: not is_fetching())


def test_a_slow_source_gives_less(site: Site) -> None:
    site.add()
    site.add(hook=Throttle(LINK_BYTES_PER_S / 8))
    site.heal()
    assert site.shares[1] < 0.5 < site.shares[0]


def test_a_source_with_other_bytes_is_found_out(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.add()
    site.add({"w": torch.arange(float(NUM_FLOATS)) + 1})
    site.add()
    site.heal()
    assert "its state is not the one that the others hold" in caplog.text


@pytest.mark.parametrize(
    ("state", "options"),
    [
        ({**weights(), "lr": 2}, {}),
        ({"w": torch.zeros(NUM_FLOATS + 1)}, {}),
        (weights(), {"chunk_bytes": 2 * CHUNK_BYTES}),
    ],
    ids=["value", "shape", "chunks"],
)
def test_a_source_with_another_description_is_left_out(
    site: Site, caplog: pytest.LogCaptureFixture, state: Any, options: dict[str, Any]
) -> None:
    site.add()
    other = site.add(state, **options)
    site.heal()
    assert "offers another state for this step: left out" in caplog.text
    assert site.shares[1] < 0.01
    other.disallow_checkpoint()
    assert other.copied_bytes < NUM_BYTES


def test_damaged_digests_are_fetched_again(site: Site) -> None:
    for _ in range(2):
        site.add(hook=Damage([500, 1000, 300_000, HALF_WAY]))
    site.heal()


@pytest.mark.parametrize(
    ("kind", "arguments"), [(Unreachable, ("manager", "a:1", "it is gone")), (OSError, ("no",))]
)
def test_an_extra_source_that_cannot_be_looked_up_takes_no_part(
    site: Site, kind: type[Exception], arguments: tuple[str, ...]
) -> None:
    def fail() -> str:
        raise kind(*arguments)  # made here: with its traceback it would hold what fetched for ever

    site.add()
    state = site.receiver.recv_striped(0, site.proxies[0].url, [fail], 1, LONG)
    assert torch.equal(state["w"], weights()["w"])


def test_a_heal_with_many_sources_can_be_ended(site: Site) -> None:
    gates = [site.add_gated(HALF_WAY) for _ in range(3)]
    fetched = site.fetch()
    for gate in gates:
        gate.wait_until_reached()
    site.receiver.shutdown()
    with pytest.raises(CheckpointError, match="shutting down"):
        fetched.result(DEADLINE_S)
    for gate in gates:
        gate.open()
