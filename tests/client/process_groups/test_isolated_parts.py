"""Tests the parts of isolated groups: messages, works and the poller."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.meeting_place import MeetingPlace
from support.running import eventually
from torch._C import _distributed_c10d as c10d

from torchft_svc.client import ProcessGroupBabyGloo, ProcessGroupBabyNCCL
from torchft_svc.client.process_groups.isolated import messages
from torchft_svc.client.process_groups.isolated.child import CompletionPoller
from torchft_svc.client.process_groups.isolated.group import IsolatedWork
from torchft_svc.client.process_groups.isolated.segments import HostSegment, Pool
from torchft_svc.client.process_groups.members import Members
from torchft_svc.errors import ConfigError, TorchFTError

SOON = timedelta(seconds=0.05)
ENOUGH = timedelta(seconds=10)


@pytest.mark.parametrize(
    "message",
    [
        messages.Configure(
            1,
            Members("host:1/torchft/2/0", "a", 0, 2),
            ENOUGH,
            messages.Backend("nccl", "cuda:1", high_priority=True),
        ),
        messages.ShareDevice(3, 1, (1, b"handle", 64, 0, b"counter", 7, b"event", True), b"r"),
        messages.Launch(4, 3, "allreduce", [[messages.Place(3, 64, (2, 3), torch.bfloat16)]], {}),
        messages.Reply(4, "it was refused"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_passes_through_the_pipe(message: Any) -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        here.send(message)
        assert there.recv() == message


@pytest.mark.parametrize(
    "kind", sorted(name for name in vars(c10d) if name.endswith("Options") and name[0].isupper())
)
def test_options_pass_through_the_pipe(kind: str) -> None:
    options = getattr(c10d, kind)()
    if hasattr(options, "timeout"):
        options.timeout = ENOUGH
    plain = messages.options_to_plain(options)
    here, there = multiprocessing.Pipe()
    with here, there:
        here.send(plain)
        back = messages.options_from_plain(there.recv())
    assert messages.options_to_plain(back) == plain


@pytest.fixture
def work() -> IsolatedWork:
    """A work whose result, 5, is in the shared memory already."""
    result = torch.zeros(1)
    loan, _ = Pool(HostSegment.create).lend([result])
    loan.tensors()[0].fill_(5)
    return IsolatedWork([result], [result], loan, 0.05)


def test_both_waits_last_until_the_end(work: IsolatedWork) -> None:
    for timeout in (None, SOON):
        with pytest.raises(RuntimeError, match=r"not over after 0\.05 s"):
            work.wait(timeout)
    assert not work.is_completed()
    work.fetch_results()
    work.complete(None)
    assert work.wait()
    assert work.wait(SOON)
    assert work.result() == [torch.tensor([5.0])]
    assert work.is_success()


def test_a_failure_is_raised_by_both_waits(work: IsolatedWork) -> None:
    work.complete(RuntimeError("a member is gone"))
    for timeout in (None, SOON):
        with pytest.raises(RuntimeError, match="a member is gone"):
            work.wait(timeout)
    with pytest.raises(RuntimeError, match="a member is gone"):
        work.get_future().wait()
    assert not work.is_success()


def test_the_poller_reports_what_has_ended_while_another_operation_hangs() -> None:
    poller, hangs = CompletionPoller(), threading.Event()
    threading.Thread(target=poller.run, name="poller", daemon=True).start()
    late, quick = threading.Event(), threading.Event()
    poller.add(hangs.is_set, late.set)
    poller.add(lambda: True, quick.set)
    assert quick.wait(10)
    assert not late.is_set()
    hangs.set()
    assert late.wait(10)


def test_the_poller_survives_a_device_that_has_failed() -> None:
    def ask_the_device() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    poller = CompletionPoller()
    threading.Thread(target=poller.run, name="poller", daemon=True).start()
    for _ in range(2):
        ended = threading.Event()
        poller.add(ask_the_device, ended.set)
        assert ended.wait(10)


@pytest.mark.processes
def test_a_process_that_does_not_read_keeps_nobody_from_leaving() -> None:
    group = ProcessGroupBabyGloo(ENOUGH)
    MeetingPlace().configure(group)
    assert group.pid is not None
    os.kill(group.pid, signal.SIGSTOP)
    launched: list[Any] = []

    def launch() -> None:
        try:
            while True:  # until the socket is full, or the group is left
                launched.append(group.barrier())
        except TorchFTError:
            pass

    thread = threading.Thread(target=launch)
    thread.start()
    eventually(lambda: len(launched) > 10, what="nothing is launched")
    group.abort()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="was left"):
        launched[-1].wait(ENOUGH)
    group.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_sentence_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use ProcessGroupBabyGloo"):
        ProcessGroupBabyNCCL()
