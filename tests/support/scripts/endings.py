"""Trainers that are ended in various ways, as processes: run by test_endings.py.

Arguments: what to do, and the lighthouse's address. Prints `manager PID` once a manager process
runs, `training` once steps are committed, and then whatever the test looks for.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchft_svc.client import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    OptimizerWrapper,
    ProcessGroupDummy,
)

LIFE_S = 60.0
# A manager that nobody holds any more is shut down.
_kept: list[object] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def make(lighthouse: str, **options: object) -> tuple[Manager, OptimizerWrapper, nn.Module]:
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = Manager(
        state_dict=lambda: {"model": model.state_dict()},
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        lighthouse_addr=lighthouse,
        replica_id=f"{sys.argv[1]}-{os.getpid()}",
        **options,  # type: ignore[arg-type]
    )
    for child in psutil.Process().children():
        say("manager", child.pid)
    made = manager, OptimizerWrapper(manager, sgd), DistributedDataParallel(manager, model)
    _kept.append(made)
    return made


def trains(lighthouse: str) -> None:
    """Trains until it is interrupted."""
    manager, optimizer, model = make(lighthouse)
    ends_at = time.monotonic() + LIFE_S
    while time.monotonic() < ends_at:
        optimizer.zero_grad()
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        if manager.current_step() == 3:
            say("training")


def waits(lighthouse: str) -> None:
    """Waits for a quorum that never comes."""
    _, optimizer, _ = make(lighthouse)
    say("training")
    optimizer.zero_grad()


def waits_in_backward(lighthouse: str) -> None:
    """Waits, in its backward pass, for a group that hangs."""
    loss = begins_a_step(lighthouse)
    threading.Thread(target=say_when_it_waits, args=(threading.get_ident(),), daemon=True).start()
    loss.backward()


def say_when_it_waits(main_thread: int) -> None:
    """Print a line when the main thread waits for a sum to end."""
    while True:
        frame = sys._current_frames()[main_thread]
        while frame is not None and frame.f_code.co_name != "_wait_in_slices":
            frame = frame.f_back
        if frame is not None:
            say("waiting")
            return
        time.sleep(0.01)


def hangs(lighthouse: str) -> None:
    """The group that hangs: it meets another one and then computes nothing."""
    begins_a_step(lighthouse)
    time.sleep(LIFE_S)


def hangs_with_the_lock(lighthouse: str) -> None:
    """The same, and no thread of it runs."""
    begins_a_step(lighthouse)
    time.sleep(1.0)  # the thread that reports the phase does so ten times in a second
    take_the_lock()


class NeverEnds(dist.Work):
    """A collective in a library that ignores deadlines."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        time.sleep(LIFE_S)
        return True


class Stuck(ProcessGroupDummy):
    def allreduce(self, *_: object) -> dist.Work:
        return NeverEnds()


def sticks_in_a_collective(lighthouse: str) -> None:
    """Begin a collective that neither ends nor can be abandoned."""
    short = timedelta(seconds=0.5)
    _, optimizer, model = make(lighthouse, pg=Stuck(), timeout=short, watchdog_timeout=short)
    optimizer.zero_grad()
    say("training")
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def begins_a_step(lighthouse: str) -> torch.Tensor:
    """Begin a step with another group; return its loss, before the backward pass."""
    manager, optimizer, model = make(lighthouse)
    while True:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        if manager.num_participants() == 2:
            break
        loss.backward()
        optimizer.step()
    say("training")
    return loss


def leads(lighthouse: str) -> None:
    """Rank 0 of a group of two: commits a step with the other, and hangs."""
    commits_a_step(lighthouse)
    time.sleep(LIFE_S)


def leads_into_a_step(lighthouse: str) -> None:
    """The same, and hangs in the next step's forward pass."""
    commits_a_step(lighthouse).zero_grad()
    time.sleep(LIFE_S)


def sleeps(lighthouse: str) -> None:
    """Train with a main thread that hangs."""
    make(lighthouse)
    say("training")
    time.sleep(LIFE_S)


def holds_the_lock(lighthouse: str) -> None:
    """Hangs in a call into a library that keeps the interpreter's lock: no thread runs."""
    make(lighthouse)
    signal.signal(signal.SIGTERM, lambda *_: say("it had the lock back"))
    sys.setswitchinterval(1000)  # no other thread runs between the message and the end
    ctypes.PyDLL(None).write(1, b"training\n", 9)
    take_the_lock()


def take_the_lock() -> None:
    """Take the interpreter's lock, and never give it back."""
    lock = ctypes.create_string_buffer(64)  # zeros: a mutex that nobody holds
    for _ in range(2):  # nor does a signal end the second wait
        ctypes.PyDLL(None).pthread_mutex_lock(lock)


def forks(lighthouse: str) -> None:
    """Loads its data with forked workers, made before and after the first step."""
    manager, optimizer, model = make(lighthouse)
    data = TensorDataset(torch.randn(24, 4))
    sampler = DistributedSampler(data, replica_rank=0, num_replica_groups=2, shuffle=False)
    seen = 0
    for _ in range(2):
        loader = DataLoader(
            data, 3, sampler=sampler, num_workers=2, multiprocessing_context="fork", timeout=30
        )
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).sum().backward()
            seen += len(inputs) if optimizer.step() else 0
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # runs what a program runs at exit: the parent's manager must survive it
    os.waitpid(pid, 0)
    optimizer.zero_grad()
    model(inputs).sum().backward()
    say("seen", seen, optimizer.step())
    manager.shutdown()


def returns(lighthouse: str) -> None:
    """Ends without shutting its manager down."""
    commits_a_step(lighthouse)


def commits_a_step(lighthouse: str) -> OptimizerWrapper:
    _, optimizer, model = make(lighthouse)
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    assert optimizer.step()
    say("training")
    return optimizer


def raises(lighthouse: str) -> None:
    """Ends with an error."""
    returns(lighthouse)
    raise RuntimeError("on purpose")


def unreachable(lighthouse: str) -> None:
    """Start without a lighthouse."""
    manager, _, _ = make("127.0.0.1:1", quorum_timeout=timedelta(seconds=20))
    try:
        manager.start_quorum(timeout=timedelta(seconds=1))
    except (ConnectionError, TimeoutError) as error:
        say("error", error)


# Registered first, so called last: what follows is the interpreter's own end, which takes seconds
# with torch on a busy machine.
atexit.register(say, "ended")
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.manual_seed(0)
globals()[sys.argv[1]](sys.argv[2])
