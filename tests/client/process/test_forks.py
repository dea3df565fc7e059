"""Tests that forked children of a trainer, such as DataLoader workers, do not block its peers."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from support.training import DEADLINE_S, Trainer, lighthouse, together, trainers

from torchft_svc.client.process.forks import drop_after_fork
from torchft_svc.errors import DeadlineExceeded

pytestmark = pytest.mark.processes

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


def test_sigterm_ends_a_child_also_while_it_is_forked(address: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what another test may have left behind
    with Trainer(address, "a", 0) as a:
        term = signal.getsignal(signal.SIGTERM)
        assert callable(term), "the manager does not hear it"
        for _ in range(20):  # one in five to ten meets the moment
            with forked() as child:
                child.terminate()
                child.join(DEADLINE_S)
                assert child.exitcode == -signal.SIGTERM
        assert not a.manager.is_draining()
