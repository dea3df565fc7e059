"""Tests that the other workers notice the death of rank 0 at once, with a launcher's store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from support.bounds import check
from support.endings import Program, running
from support.training import DEADLINE_S, Trainer, lighthouse
from torch.distributed import TCPStore

from tools.chaos.bounds import NEWS_S
from torchft_svc.errors import PeerError

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def group(program: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Program, Trainer]]:
    """Rank 0 as a process, and rank 1 here; they have committed a step together."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with lighthouse() as address, contextlib.ExitStack() as stack:
        with monkeypatch.context() as launcher:
            for name, value in place.items():
                launcher.setenv(name, value)
            leader = stack.enter_context(running(program, address))
        leader.read_until("manager")
        other = stack.enter_context(
            Trainer(
                address,
                "",
                0,
                rank=1,
                world_size=2,
                store_addr="localhost",
                store_port=store.port,
                in_process=False,
                quorum_timeout=timedelta(seconds=DEADLINE_S),
            )
        )
        assert other.step()
        leader.read_until("training")
        yield leader, other
    del store


def kill(leader: Program, whole: bool = False) -> float:
    """SIGKILL, with ``whole`` also for its manager, silent then; the time of it."""
    at = time.monotonic()
    leader.process.kill()
    if whole:
        for manager in leader.children:
            manager.kill()
    return at


def check_next_step(leader: Program, other: Trainer) -> None:
    """The manager is gone, and nobody waits for another one."""
    leader.check_children()
    began_at = time.monotonic()
    other.manager.start_quorum()
    with pytest.raises(PeerError):
        other.manager.wait_quorum()
    assert not other.manager.should_commit()
    check("nobody is waited for in the next step", time.monotonic() - began_at, NEWS_S)


WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["alone", "with its manager"])


@WHOLE
def test_who_waits_for_a_quorum_is_informed(
    monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    with group("leads", monkeypatch) as (leader, other):
        other.manager.start_quorum()
        killed_at: list[float] = []
        # It may ask a moment later than it is killed: that makes no difference.
        killer = threading.Timer(0.1, lambda: killed_at.append(kill(leader, whole)))
        killer.start()
        with pytest.raises(PeerError):
            other.manager.wait_quorum()
        failed_at = time.monotonic()
        killer.join()
        assert failed_at > killed_at[0]
        check("who waits for a quorum is informed", failed_at - killed_at[0], NEWS_S)
        assert not other.manager.should_commit()
        check_next_step(leader, other)


@WHOLE
def test_who_votes_is_informed(monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> None:
    with group("leads_into_a_step", monkeypatch) as (leader, other):
        other.backward()
        killed_at = kill(leader, whole)
        with contextlib.suppress(PeerError):
            assert not other.optimizer.step()
        check("who votes is informed", time.monotonic() - killed_at, NEWS_S)
        check_next_step(leader, other)


def test_who_votes_later_finds_no_manager_and_does_not_wait_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with group("leads_into_a_step", monkeypatch) as (leader, other):
        other.backward()
        kill(leader)
        leader.check_children()
        began_at = time.monotonic()
        with pytest.raises(PeerError):
            other.optimizer.step()
        check("who votes later is informed", time.monotonic() - began_at, NEWS_S)
        check_next_step(leader, other)
