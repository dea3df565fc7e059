"""Tests HTTPTransport end to end: an offered state arrives, whenever it is requested."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bounds import raises_in_time
from support.running import environment, eventually
from support.warm import Warm

from torchft_svc.client.checkpointing import HTTPTransport
from torchft_svc.client.checkpointing.http.fetch import Fetch
from torchft_svc.errors import CheckpointError, ConfigError, PeerError, Unreachable

SOON = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=64 << 10) as transport:
        yield transport


@pytest.fixture
def receiver() -> Iterator[HTTPTransport[Any]]:
    with HTTPTransport(LONG, hostname="127.0.0.1", chunk_bytes=64 << 10) as transport:
        yield transport


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchft")]


def adam_state(num_layers: int = 200) -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(num_layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 7}


def test_a_state_arrives_as_it_was_offered(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    state = {"w": torch.randn(300, 1000), "n": [1, 2.5, None, "x"], "empty": torch.empty(0, 3)}
    source.send_checkpoint([1], 5, state, LONG)
    received = receiver.recv_checkpoint(0, source.metadata(), 5, LONG)
    torch.testing.assert_close(received["w"], state["w"], rtol=0, atol=0)
    assert received["n"] == state["n"]
    assert received["empty"].shape == (0, 3)


def test_an_adam_optimizer_of_many_tensors_loads_what_arrived(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    state = adam_state()
    source.send_checkpoint([1], 1, state, LONG)
    received = receiver.recv_checkpoint(0, source.metadata(), 1, LONG)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(200)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    model.load_state_dict(received["model"])
    optimizer.load_state_dict(received["optim"])
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for mine, theirs in zip(
        optimizer.state_dict()["state"].values(), state["optim"]["state"].values(), strict=True
    ):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_state_without_tensors_arrives(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.send_checkpoint([1], 0, {"step": 3}, LONG)
    assert receiver.recv_checkpoint(0, source.metadata(), 0, LONG) == {"step": 3}


def test_a_state_without_tensors_outlives_the_step(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.send_checkpoint([1, 2], 0, {"step": 3}, LONG)
    source.disallow_checkpoint()
    for _ in range(2):
        assert receiver.recv_checkpoint(0, source.metadata(), 0, LONG) == {"step": 3}
    with raises_in_time(PeerError, "not offered"):
        receiver.recv_checkpoint(0, source.metadata(), 0, SOON)


def test_who_asks_early_waits(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    source.send_checkpoint([1], 4, {"step": 4}, LONG)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 5, LONG)
        assert receiver.recv_checkpoint(0, source.metadata(), 4, LONG) == {"step": 4}
        assert not asked.done()
        source.send_checkpoint([1], 5, {"step": 5}, LONG)
        assert asked.result(20) == {"step": 5}


def test_who_asks_too_early_is_informed_at_the_deadline(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    with raises_in_time(PeerError, r"step 5 .* timed out after 0\.3 s: .*not offered"):
        receiver.recv_checkpoint(0, source.metadata(), 5, SOON)


def test_a_step_that_is_gone_is_refused_at_once(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.send_checkpoint([1], 6, {}, LONG)
    with pytest.raises(CheckpointError, match="step 5 is gone, the newest is 6"):
        receiver.recv_checkpoint(0, source.metadata(), 5, LONG)


def test_a_state_that_cannot_be_offered_is_refused_at_once(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.refuse_checkpoint([1], 5, "ZeroDivisionError()")
    with pytest.raises(CheckpointError, match=r"step 5 cannot be offered: ZeroDivisionError\(\)"):
        receiver.recv_checkpoint(0, source.metadata(), 5, LONG)
    source.send_checkpoint([1], 5, {"w": torch.ones(5)}, LONG)  # it can after all
    assert receiver.recv_checkpoint(0, source.metadata(), 5, LONG)["w"].tolist() == [1] * 5


def test_a_step_that_was_discarded_can_be_offered_again(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    source.send_checkpoint([1], 6, {"try": 1}, LONG)
    receiver.recv_checkpoint(0, source.metadata(), 6, LONG)
    source.disallow_checkpoint()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 6, LONG)
        source.send_checkpoint([1], 6, {"try": 2}, LONG)
        assert asked.result(20) == {"try": 2}


def test_i3_a_state_is_not_served_any_more_once_its_owner_has_healed(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    """A heal at step 0 changes the weights and not the step; a receiver died before it came."""
    source.send_checkpoint([1], 0, {"w": torch.zeros(5)}, LONG)
    source.disallow_checkpoint()
    source.retract_checkpoint()
    with ThreadPoolExecutor() as pool:
        fetching = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 0, LONG)
        with pytest.raises(FutureTimeout):
            fetching.result(timeout=0.3)
        source.send_checkpoint([1], 0, {"w": torch.ones(5)}, LONG)
        assert fetching.result()["w"].tolist() == [1] * 5


def test_i7_what_was_received_is_freed_with_its_last_tensor(
    source: HTTPTransport[Any], receiver: HTTPTransport[Any]
) -> None:
    """A received state may be gigabytes: it does not wait for the garbage collector."""
    source.send_checkpoint([1], 0, {"w": torch.ones(100_000)}, LONG)
    gc.collect()
    gc.disable()
    try:
        received = receiver.recv_checkpoint(0, source.metadata(), 0, LONG)
        assert received["w"].sum() == 100_000
        # What fetched it holds the memory; it is gone with the call, and the last of its threads.
        eventually(lambda: not [each for each in gc.get_objects() if type(each) is Fetch])
    finally:
        gc.enable()


def test_nobody_listens(source: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> None:
    where = source.metadata()
    source.shutdown()
    with pytest.raises(Unreachable, match=r"checkpoint source at 127\.0\.0\.1"):
        receiver.recv_checkpoint(0, where, 1, LONG)


def test_an_unsendable_value_is_named_with_its_path(source: HTTPTransport[Any]) -> None:
    with pytest.raises(ConfigError, match=r"state_dict\['optim'\]\['fn'\].*function objects"):
        source.send_checkpoint([1], 1, {"optim": {"fn": lambda: 0}}, LONG)


def test_the_advertised_host_can_be_set() -> None:
    with HTTPTransport(LONG, hostname="fe80::1") as transport:
        assert transport.metadata().startswith("http://[fe80::1]:")


def test_shutdown_leaves_no_thread_and_may_be_called_twice() -> None:
    before = our_threads()
    transport: HTTPTransport[Any] = HTTPTransport(LONG, hostname="127.0.0.1")
    transport.send_checkpoint([1], 1, {"w": torch.ones(1000)}, LONG)
    transport.recv_checkpoint(0, transport.metadata(), 1, LONG)
    assert len(our_threads()) > len(before)
    transport.shutdown()
    transport.shutdown()
    assert our_threads() == before


def test_shutdown_ends_a_receiver_that_waits(source: HTTPTransport[Any]) -> None:
    receiver: HTTPTransport[Any] = HTTPTransport(LONG, hostname="127.0.0.1")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 5, LONG)
        source.send_checkpoint([1], 4, {}, LONG)
        receiver.recv_checkpoint(0, source.metadata(), 4, LONG)  # so the other one runs as well
        receiver.shutdown()
        with pytest.raises(CheckpointError, match="shutting down"):
            asked.result(20)


@pytest.mark.processes
def test_the_import_starts_no_thread(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    names = "[thread.name for thread in threading.enumerate()]"
    program.write_text(f"import threading, torchft_svc.client\nprint({names})\n")
    importer = Warm([sys.executable, str(program)], text=True, env=environment())
    assert importer.stdout.read() == "['MainThread']\n"
    assert importer.wait(20) == 0
    importer.close()


def test_what_is_sent_at_the_end_of_a_step_comes_beside_its_state(
    source: HTTPTransport[Any],
) -> None:
    with HTTPTransport[Any](LONG, hostname="127.0.0.1") as receiver:
        rest = {"w": torch.ones(50_000), "n": 1}
        source.send_checkpoint([1], 3, {"early": torch.zeros(50_000)}, LONG)
        source.send_deferred([1], [], 3, rest, LONG)
        rest["w"].zero_()  # it was copied
        assert not receiver.recv_checkpoint(0, source.metadata(), 3, LONG)["early"].any()
        assert receiver.recv_deferred(0, source.metadata(), (), 3, LONG)["w"].all()
        source.send_checkpoint([1], 3, {"early": 2}, LONG)  # the step has begun anew
        source.send_deferred([1], [], 3, {"n": 2}, LONG)
        assert receiver.recv_deferred(0, source.metadata(), (), 3, LONG) == {"n": 2}
        source.refuse_checkpoint([1], 4, "it was given up")
        with pytest.raises(CheckpointError, match="it was given up"):
            receiver.recv_deferred(0, source.metadata(), (), 4, LONG)


def test_a_wait_for_the_end_of_a_step_can_be_ended(source: HTTPTransport[Any]) -> None:
    with HTTPTransport[Any](LONG, hostname="127.0.0.1") as receiver:
        source.send_checkpoint([1], 3, {"early": 1}, LONG)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receiver.recv_deferred, 0, source.metadata(), (), 3, LONG)
            eventually(lambda: bool(receiver._fetches))
            receiver.interrupt_receive("its group is lost")
            with pytest.raises(CheckpointError, match="its group is lost"):
                waiting.result()


def test_an_advertised_host_that_is_given_but_empty_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hostname=' ' cannot work: it is empty"):
        HTTPTransport(LONG, hostname=" ")
