"""Tests that forked children of a trainer, such as DataLoader workers, do not block its peers."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.running import environment
from support.training import DEADLINE_S, Trainer, lighthouse, together, trainers

from torchft_svc.client.process.draining import TermSignal
from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.errors import DeadlineExceeded

pytestmark = pytest.mark.processes

# 40 pools take about two seconds on an idle machine.
POOLS_S = 60.0
_context = multiprocessing.get_context("fork")


@contextlib.contextmanager
def forked() -> Iterator[multiprocessing.process.BaseProcess]:
    """A child that keeps what it has open, and does nothing."""
    child = _context.Process(target=threading.Event().wait)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


def test_leaving_the_members_is_seen_by_them_although_a_child_lives(address: str) -> None:
    with trainers(address, 2) as (a, b):
        together(lambda: a.until(1), lambda: b.until(1))

        def fails() -> bool:
            a.optimizer.zero_grad()
            a.manager.wait_quorum()
            a.manager.report_error(RuntimeError("a bad batch"))
            return a.optimizer.step()

        with forked():
            assert together(fails, b.step) == [False, False]
            assert not isinstance(b.manager.errored(), DeadlineExceeded)
            together(lambda: a.until(3), lambda: b.until(3))


class _Held:
    """A descriptor, which somebody else may have closed in the child."""

    def __init__(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed
        self.mine, self.other = socket.socketpair()
        drop_after_fork(self)

    def drop_descriptors(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "it is closed")
        self.mine.close()


def test_a_descriptor_that_was_closed_does_not_keep_others_open() -> None:
    held = [_Held(is_closed=each) for each in (True, False, True)]
    with forked():
        for each in held:
            each.mine.close()
        held[1].other.settimeout(DEADLINE_S)
        assert held[1].other.recv(1) == b""  # the child does not hold it
        for each in held:
            each.other.close()


def term_handler(values: Connection) -> None:
    values.send(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_child_has_the_default_for_sigterm(address: str, thread: str) -> None:
    """A pool forks from a thread of its own the workers that replace others."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    receiving, sending = _context.Pipe(duplex=False)
    with Trainer(address, "a", 0):
        assert callable(signal.getsignal(signal.SIGTERM)), "the manager does not handle it"
        child = _context.Process(target=term_handler, args=(sending,))
        if thread == "main":
            child.start()
        else:
            starting = threading.Thread(target=child.start)
            starting.start()
            starting.join()
        assert receiving.poll(DEADLINE_S)
        assert receiving.recv()
        child.join(DEADLINE_S)
        assert callable(signal.getsignal(signal.SIGTERM)), "the parent has lost its handler"


def test_the_programs_own_handler_stays_in_its_children() -> None:
    """The same holds for a handler that it has installed after the manager's."""
    receiving, sending = _context.Pipe(duplex=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    term = TermSignal(lambda _: None, lambda _: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = _context.Process(target=term_handler, args=(sending,))
    child.start()
    assert receiving.poll(DEADLINE_S)
    assert not receiving.recv()
    child.join(DEADLINE_S)
    term.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


POOLS = """
import multiprocessing, signal
from torchft_svc.client.process.draining import TermSignal
term = TermSignal(print, print)
assert callable(signal.getsignal(signal.SIGTERM))
for number in range(40):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(abs, range(8))
term.close()
"""


def test_pools_end(tmp_path: Path) -> None:
    """Pools in a trainer end; a handler in their workers made one of 3 to 37 hang."""
    (tmp_path / "pools.py").write_text(POOLS)
    command = [sys.executable, str(tmp_path / "pools.py")]
    process = subprocess.Popen(command, env=environment(), start_new_session=True)
    try:
        assert process.wait(POOLS_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_sigterm_ends_a_child_also_while_it_is_forked(address: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what another test may have left behind
    with Trainer(address, "a", 0) as a:
        term = signal.getsignal(signal.SIGTERM)
        assert callable(term), "the manager does not receive it"
        for _ in range(20):  # one in five to ten meets the moment
            with forked() as child:
                child.terminate()
                child.join(DEADLINE_S)
                assert child.exitcode == -signal.SIGTERM
        assert not a.manager.is_draining()
