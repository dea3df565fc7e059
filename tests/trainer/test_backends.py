"""The contract of a trainer's backend: each rule on local processes, and on Ray."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import cast

import psutil
import pytest
from support.running import eventually, lives
from support.scripted_workers import (
    FROM,
    GIVEN,
    STATE,
    Listener,
    fail,
    leave,
    obey,
    offer,
    offer_and_end,
    play,
    sleep,
    take,
)

from torchft_svc.errors import CheckpointError
from torchft_svc.trainer.backend import Backend
from torchft_svc.trainer.local import LocalBackend
from torchft_svc.trainer.messages import (
    End,
    Finished,
    JoinWorld,
    Reported,
    StateHandle,
    StateOffered,
    Train,
)

pytestmark = pytest.mark.processes

NUM_CPUS = 4
NUM_MESSAGES = 500  # more than are read at once
ONE_CPU = {"CPU": 1.0}


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def engine(request: pytest.FixtureRequest) -> Iterator[Callable[[], Backend]]:
    """Opens a backend. For the module, so that all tests without Ray come first."""
    if request.param == "local":
        yield lambda: LocalBackend(resources={"CPU": NUM_CPUS}, program=play)
        return
    ray = pytest.importorskip("ray")
    from torchft_svc.trainer.ray_backend import RayBackend

    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False)
    yield lambda: RayBackend(program=play)
    ray.shutdown()


@pytest.fixture(scope="module")
def backend(engine: Callable[[], Backend]) -> Iterator[Backend]:
    with contextlib.closing(engine()) as backend:
        yield backend


@pytest.fixture
def listener(backend: Backend) -> Iterator[Listener]:
    with contextlib.closing(Listener(backend)) as listener:
        yield listener


def number(of: int) -> Train:
    return Train(command=of, until_epoch=1, until_step=None)


def test_messages_arrive_in_order_and_the_last_ones_before_the_end(
    backend: Backend, listener: Listener
) -> None:
    first, second = listener.start(obey), listener.start(obey)
    for each in range(NUM_MESSAGES):
        for worker in (first, second):
            backend.send(worker, number(each))
    backend.send(first, End())
    listener.wait_for_loss(first)
    assert listener.said(first, "number") == list(range(NUM_MESSAGES))
    assert listener.said(first, "last") == [first]
    assert second not in listener.lost
    backend.send(first, End())  # nobody receives it
    backend.send(second, End())
    listener.wait_for_loss(second)
    assert listener.said(second, "number") == list(range(NUM_MESSAGES))
    assert backend.wait(0.1) == []


def test_lost_workers_are_reported_once_and_the_others_continue(
    backend: Backend, listener: Listener
) -> None:
    killed, frozen, unwanted = lost = [listener.start(sleep) for _ in range(3)]
    other = listener.start(obey)
    processes = [psutil.Process(listener.wait_for_word(worker, "pid")) for worker in lost]
    listener.wait_for_word(other, "pid")
    processes[0].kill()
    processes[1].suspend()
    backend.kill(frozen)  # the trainer does this if it receives nothing any more
    backend.kill(unwanted)
    backend.kill(unwanted)
    listener.wait_for_loss(*lost)
    assert all(listener.lost.values())
    listener.wait_for(lambda: not any(map(lives, processes)), 4.0)  # Ray alone needs 5 s
    backend.kill(killed)
    backend.send(killed, End())
    backend.send(other, number(5))
    assert listener.wait_for_word(other, "number") == 5
    assert set(listener.lost) == set(lost)


def test_programs_that_end_by_themselves(backend: Backend, listener: Listener) -> None:
    leaving, failing = listener.start(leave), listener.start(fail)
    listener.wait_for_loss(leaving, failing)
    assert listener.said(leaving, "leaving") == [True]
    assert listener.lost[leaving]
    assert listener.lost[failing]


def join(state: StateHandle) -> JoinWorld:
    return JoinWorld(world=1, rank=0, world_size=1, address="", state=state)


def test_states_outlive_the_workers_that_offer_them(backend: Backend, listener: Listener) -> None:
    killed, ended, taker = (
        listener.start(offer),
        listener.start(offer_and_end),
        listener.start(take),
    )
    pid = listener.wait_for_word(killed, "pid")
    backend.send(killed, End())
    listener.wait_for_word(killed, "offered")
    os.kill(pid, signal.SIGKILL)
    listener.wait_for_loss(killed, ended)
    handles = [one.state for one in listener.answers[killed] if isinstance(one, StateOffered)]
    handles += [one.result for one in listener.answers[ended] if isinstance(one, Finished)]
    given = [one.state for one in listener.answers[ended] if isinstance(one, Reported)]
    handles += [each for each in given if each is not None]
    handles.append(backend.write_state(FROM, STATE))
    states = [STATE, STATE, GIVEN, STATE]
    for handle, state in zip(handles, states, strict=True):
        assert handle.position == FROM
        assert backend.read_state(handle) == state
        backend.send(taker, join(handle))
    backend.send(taker, End())
    listener.wait_for_loss(taker)
    hashes = [hashlib.sha256(state).hexdigest() for state in states]
    assert listener.said(taker, "hash") == hashes
    assert listener.said(taker, "position") == [FROM] * 4
    for handle in handles:
        backend.drop_state(handle)
        backend.drop_state(handle)
        with pytest.raises(CheckpointError):
            backend.read_state(handle)


def test_resources_limit_the_workers(backend: Backend, listener: Listener) -> None:
    backend.request(0, ONE_CPU)  # nothing is kept
    listener.wait_for(lambda: backend.num_startable({"CPU": 2.0}) == NUM_CPUS // 2)
    assert backend.num_startable(ONE_CPU) == NUM_CPUS
    assert backend.num_startable({"CPU": NUM_CPUS + 1.0}) == 0
    assert backend.num_startable({"CPU": 1.0, "unobtainium": 1.0}) == 0
    first, second = (listener.start(sleep, {"CPU": 1.5}) for _ in range(2))
    listener.wait_for_word(first, "pid")
    assert backend.num_startable({"CPU": 1.5}) == 0
    assert backend.num_startable(ONE_CPU) == 1
    backend.request(1, {"CPU": 1.5})  # the second one's place is for it
    backend.kill(second)
    listener.wait_for_loss(second)
    listener.wait_for(lambda: backend.num_startable({"CPU": 1.5}) == 1)


def test_nothing_happens_for_a_while(backend: Backend) -> None:
    before = time.monotonic()
    assert backend.wait(0.2) == []
    assert time.monotonic() - before >= 0.15


def test_workers_that_could_not_be_started_are_lost(backend: Backend, listener: Listener) -> None:
    """The trainer would wait for those that nobody starts."""
    if isinstance(backend, LocalBackend):
        pytest.skip("it starts each worker when it is asked to")
    first, failing = listener.start(sleep), 1_000_000
    backend.start(failing, cast("bytes", threading.Lock()), {})  # Ray cannot store that
    after = listener.start(sleep)
    with pytest.raises(TypeError):
        backend.wait(0.0)
    listener.wait_for_loss(failing, after)
    assert set(listener.lost) == {failing, after}
    next_one = listener.start(sleep)
    for worker in (first, next_one):
        listener.wait_for_word(worker, "pid")


def test_close_ends_all_workers_also_those_that_start(backend: Backend) -> None:
    listener = Listener(backend)
    running = listener.start(sleep)
    process = psutil.Process(listener.wait_for_word(running, "pid"))
    process.suspend()
    starting, unwanted = listener.start(sleep), listener.start(sleep)
    backend.kill(unwanted)
    listener.wait_for_loss(unwanted)
    backend.close()
    backend.close()
    eventually(lambda: not lives(process))
    assert starting not in listener.lost


def test_workers_end_together_with_their_fork_server() -> None:
    with contextlib.closing(LocalBackend(program=play)) as backend:
        listener = Listener(backend)
        workers = [listener.start(sleep) for _ in range(4)]
        for worker in workers:
            listener.wait_for_word(worker, "pid")
        server = backend._server._process
        assert server is not None
        server.kill()
        # No process is left that could report how they ended, and that is not waited for.
        listener.wait_for(lambda: set(workers) <= set(listener.lost), within_s=6.0)
        assert listener.wait_for_word(listener.start(sleep), "pid")
        listener.close()
