"""Tests that Ctrl-C in a call leaves nothing behind that stops the next ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import bounds
from support.running import environment, eventually

from torchft_svc.coordination import LighthouseServer
from torchft_svc.rpc import caller as caller_module
from torchft_svc.rpc.caller import Caller

# With calls on the main thread, gRPC's lock was taken for good after 20 interrupts or fewer.
NUM_INTERRUPTS = 200
RUN_S = 60.0
PROGRAM = """
import os, random, signal, sys, threading, time
from datetime import timedelta
from torchft_svc.coordination import LighthouseClient

LIMIT = timedelta(seconds=10)
client = LighthouseClient(sys.argv[1], LIMIT)
call = lambda: client.heartbeat("a:1", LIMIT)
began_at = time.perf_counter()
for _ in range(20):
    call()
took_s = (time.perf_counter() - began_at) / 20
dice, armed, go = random.Random(7), threading.Event(), threading.Event()

def interrupt():
    while go.wait():
        go.clear()
        time.sleep(1.2 * took_s * dice.random())
        armed.clear()
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
for number in range(int(sys.argv[2])):
    armed.set()
    go.set()
    try:
        while True:
            call()
            if not armed.is_set():
                time.sleep(10.0)  # until the interrupt comes
    except KeyboardInterrupt:
        pass
    if number % 20 == 19:
        over = threading.Event()
        threading.Thread(target=lambda: (call(), over.set()), daemon=True).start()
        if not over.wait(20.0):
            print("stuck after", number, flush=True)
            os._exit(1)
client.close()
print("closed", flush=True)
"""


@pytest.mark.processes
def test_interrupted_calls_do_not_stop_later_ones(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        done = subprocess.run(
            [sys.executable, str(tmp_path / "program.py"), server.address(), str(NUM_INTERRUPTS)],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=RUN_S,
            check=False,
        )
    finally:
        server.shutdown()
    assert done.stdout == "closed\n", done.stderr


def test_calls_are_made_apart_from_the_main_thread_only() -> None:
    caller = Caller()
    apart = caller.call(threading.current_thread)
    assert apart is not threading.main_thread()
    assert caller.call(threading.current_thread) is apart, "it was not kept"
    found: list[threading.Thread] = []
    other = threading.Thread(target=lambda: found.append(caller.call(threading.current_thread)))
    other.start()
    other.join()
    assert found == [other]
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 / 0)
    caller.close()
    caller.close()
    assert not apart.is_alive()
    assert caller.call(threading.current_thread) is threading.main_thread()


def test_a_call_that_was_left_does_not_hold_up_the_next_one() -> None:
    caller = Caller()
    entered, goes_on = threading.Event(), threading.Event()

    def interrupt() -> None:
        import _thread

        entered.wait(RUN_S)
        _thread.interrupt_main()

    def stay() -> None:
        entered.set()
        goes_on.wait(RUN_S)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        caller.call(stay)
    began_at = time.monotonic()
    assert caller.call(lambda: 7) == 7
    assert time.monotonic() - began_at < RUN_S / 2
    goes_on.set()
    helper.join()
    caller.close()


def test_a_thread_whose_start_was_interrupted_ends_with_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    caller = Caller()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            caller.call(threading.current_thread)
    caller.close()
    assert [thread.is_alive() for thread in started] == [False]


def test_the_end_waits_for_all_calls_that_were_left_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caller_module, "_JOIN_S", 1.0)
    caller, goes_on = Caller(), threading.Event()
    for _ in range(6):
        caller._submit(lambda: goes_on.wait(RUN_S))
    began_at = time.monotonic()
    caller.close()
    took_s = time.monotonic() - began_at
    goes_on.set()
    bounds.check("an end with six calls", took_s, 2.0)


@pytest.mark.processes
def test_a_forked_child_does_not_wait_for_threads_of_its_parent() -> None:
    caller = Caller()
    caller.call(threading.current_thread)
    child = os.fork()
    if not child:
        signal.alarm(int(RUN_S))
        status = 1
        try:
            status = caller.call(lambda: 7) - 7
            caller.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0) == (child, 0)
    caller.close()


def test_a_caller_that_is_dropped_ends_its_threads() -> None:
    caller = Caller()
    apart = caller.call(threading.current_thread)
    del caller
    eventually(lambda: not apart.is_alive())
