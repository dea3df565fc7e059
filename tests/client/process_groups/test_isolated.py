"""Tests that the process of an isolated group can be killed at any moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from support.bounds import check
from support.meeting_place import MeetingPlace
from support.running import TESTS, environment, eventually, is_alive, start_with_process_id
from support.training import Trainer, assert_identical, in_step, lighthouse, together
from support.warm import Warm

from torchft_svc.client import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from torchft_svc.client.process_groups.isolated.process import FORK_SERVER, fork_carrier
from torchft_svc.client.process_groups.isolated.segments import HostSegment, Pool
from torchft_svc.coordination import LighthouseClient
from torchft_svc.errors import QuorumFailed
from torchft_svc.host.fork_server import ForkServer

TIMEOUT = timedelta(seconds=20)
MAIN = "torchft_svc.client.process_groups.isolated.child"
pytestmark = pytest.mark.processes


@pytest.fixture
def place() -> MeetingPlace:
    return MeetingPlace()


@pytest.fixture
def pair() -> Iterator[list[ProcessGroupBabyGloo]]:
    groups = [ProcessGroupBabyGloo(TIMEOUT) for _ in range(2)]
    yield groups
    for group in groups:
        group.shutdown()


def total(group: ProcessGroupBabyGloo, value: float, numel: int = 1) -> float:
    tensor = torch.full((numel,), float(value))
    group.allreduce([tensor]).wait(TIMEOUT)
    return tensor[0].item()


def shared_descriptors() -> int:
    """How many pieces of shared memory this process holds."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum("torchft-collectives" in os.readlink(link) for link in links if link.is_symlink())


def test_the_status_of_an_earlier_process_with_the_same_id_is_not_reported() -> None:
    fork_server = ForkServer(MAIN, "tests")
    pid, connection = fork_carrier(fork_server)
    connection.close()
    eventually(lambda: pid in fork_server._ends)
    forked = []

    def fork() -> int:
        forked.append(fork_carrier(fork_server))
        return forked[-1][0]

    start_with_process_id(pid, fork)
    assert fork_server.end_of(pid) is None
    for _, connection in forked:
        connection.close()
    server = fork_server._process
    assert server is not None
    server.kill()
    server.wait()


def test_a_killed_process_is_an_error_that_says_so(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)
    work = a.allreduce([torch.ones(1)])
    assert a.pid is not None
    os.kill(a.pid, signal.SIGKILL)
    began_at = time.monotonic()
    with pytest.raises(RuntimeError, match="carries the collectives was killed by SIGKILL"):
        work.wait(TIMEOUT)
    check("its process is killed", time.monotonic() - began_at, 2)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(Exception, match="SIGKILL"):
        work.get_future().wait()
    assert "SIGKILL" in str(a.errored())
    place.configure(a, b)
    assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]


@pytest.mark.parametrize("where", ["in the meeting", "in gloo's connecting"])
def test_nobody_waits_for_a_process_that_is_killed_while_it_meets_the_others(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo], where: str
) -> None:
    a, b = pair[0], ProcessGroupGloo(TIMEOUT)
    place.configure(a)  # so it has its process
    assert a.pid is not None
    os.kill(a.pid, signal.SIGSTOP)
    number = place.quorum_id = place.quorum_id + 1
    met = f"torchft/{number}/0/present"
    if where != "in the meeting":
        place.store.set(f"{met}/0", "1")

    def fails(group: ProcessGroup, name: str, rank: int) -> str:
        with pytest.raises(QuorumFailed) as failed:
            group.configure(place.place(number), name, rank, 2, quorum_id=number)
        return str(failed.value)

    def kill() -> str:
        assert a.pid is not None
        eventually(lambda: place.store.check([f"{met}/1"]) and a._child and a._child.is_busy)
        os.kill(a.pid, signal.SIGKILL)
        return ""

    began_at = time.monotonic()
    error, received, _ = together(lambda: fails(a, "a", 0), lambda: fails(b, "b", 1), kill)
    check("a member that has failed", time.monotonic() - began_at, 3)
    assert "was killed by SIGKILL" in error
    assert received == f"no quorum: a has failed: {error}"
    b.shutdown()
    place.end()


def test_leaving_in_the_middle_kills_frees_and_starts_anew(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)
    before, pid = shared_descriptors(), a.pid
    assert pid is not None
    tensor = torch.ones(1000)
    work = a.allreduce([tensor])
    assert shared_descriptors() > before
    began_at = time.monotonic()
    a.abort()
    check("leaving", time.monotonic() - began_at, 1)
    assert not is_alive(pid)
    assert shared_descriptors() == before
    with pytest.raises(RuntimeError, match="was left"):
        work.wait(TIMEOUT)
    assert tensor.tolist() == [1] * 1000
    began_at = time.monotonic()
    place.configure(a, b)
    assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]
    check("a new group, for which nobody imports torch", time.monotonic() - began_at, 1.5)


def test_sizes_that_differ_hurt_the_processes_only(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)

    def fails(group: ProcessGroupBabyGloo, numel: int) -> bool:
        try:
            total(group, 1, numel)
        except RuntimeError:
            return True
        return False

    assert any(together(lambda: fails(a, 4), lambda: fails(b, 4096)))
    place.configure(a, b)
    assert together(lambda: total(a, 1), lambda: total(b, 2)) == [3, 3]


def test_waits_do_not_hold_up_one_another(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)
    late, there, back = torch.zeros(1), torch.full((1,), 5.0), torch.zeros(1)
    receiving = a.recv([late], 1, 7)  # ends last
    sending = a.send([there], 1, 8)
    b.recv([back], 0, 8).wait(TIMEOUT)
    sending.wait(TIMEOUT)
    assert not receiving.is_completed()
    b.send([back], 0, 7).wait(TIMEOUT)
    receiving.wait(TIMEOUT)
    assert (late.item(), back.item()) == (5, 5)


def test_a_wait_may_be_too_short(place: MeetingPlace, pair: list[ProcessGroupBabyGloo]) -> None:
    a, b = pair
    place.configure(a, b)
    tensor = torch.ones(1)
    work = a.allreduce([tensor])
    with pytest.raises(RuntimeError, match=r"not over after 0\.05 s"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    assert total(b, 2) == 3
    assert work.get_future().wait() == [tensor]
    assert tensor.item() == 3


def test_strided_tensors_get_their_results(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)

    def transposed(group: ProcessGroupBabyGloo) -> list[list[float]]:
        tensor = torch.arange(6.0).reshape(2, 3).t()
        group.allreduce([tensor]).wait(TIMEOUT)
        return tensor.tolist()

    expected = (2 * torch.arange(6.0)).reshape(2, 3).t().tolist()
    assert together(lambda: transposed(a), lambda: transposed(b)) == [expected] * 2


def test_a_tensor_that_is_read_and_written(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    """Torch's own groups take one for both, so a program may give one."""
    place.configure(*pair)

    def gather(group: ProcessGroupBabyGloo) -> list[float]:
        outputs = [torch.zeros(1), torch.zeros(1)]
        own = outputs[group.rank()].fill_(group.rank() + 1)
        group.allgather([outputs], [own]).wait(TIMEOUT)
        return torch.cat(outputs).tolist()

    assert together(lambda: gather(pair[0]), lambda: gather(pair[1])) == [[1, 2], [1, 2]]


def test_tensors_in_shared_memory_are_used_as_they_are(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    a, b = pair
    place.configure(a, b)

    def sums(group: ProcessGroupBabyGloo) -> list[list[float]]:
        rows = torch.ones(3, 4).share_memory_()
        output = torch.zeros(2, 4)  # the one is copied, the other is not
        group.allreduce([rows[1]]).wait(TIMEOUT)
        group.allgather([[output[0], rows[2]]], [rows[1]]).wait(TIMEOUT)
        return [*rows.tolist(), *output.tolist()]

    once, twice = [1.0] * 4, [2.0] * 4
    expected = [once, twice, twice, twice, [0.0] * 4]
    assert together(lambda: sums(a), lambda: sums(b)) == [expected] * 2
    # Another process has to receive them again.
    a.abort()
    b.abort()
    place.configure(a, b)
    assert together(lambda: sums(a), lambda: sums(b)) == [expected] * 2


def test_i7_what_was_shared_and_is_freed_is_forgotten(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    group = pair[0]
    place.configure(group)

    def num_mapped() -> int:
        assert group.pid is not None
        return Path(f"/proc/{group.pid}/maps").read_text().count("/torch_")

    for _ in range(10):
        tensor = torch.ones(1000).share_memory_()
        group.allreduce([tensor]).wait(TIMEOUT)
    assert num_mapped() >= 1
    del tensor

    def is_forgotten() -> bool:
        group.allreduce([torch.ones(1)]).wait(TIMEOUT)  # the child receives it with the next one
        return num_mapped() == 0

    eventually(is_forgotten, what="freed memory is still mapped")


def test_i7_a_program_that_repeats_its_steps_needs_no_more_memory() -> None:
    pool = Pool(HostSegment.create)
    tensors = [torch.ones(1000), torch.ones(50_000)]
    for _ in range(100):
        loans = [pool.lend([tensor])[0] for tensor in tensors]
        for loan in loans:
            pool.give_back(loan)
    assert len(pool._all) == 2
    pool.close()


def test_a_lost_fork_server_is_replaced(
    place: MeetingPlace, pair: list[ProcessGroupBabyGloo]
) -> None:
    place.configure(*pair)
    server = FORK_SERVER._process
    assert server is not None
    server.kill()
    server.wait()
    # The forked processes survive; new ones come from a new server.
    assert together(lambda: total(pair[0], 1), lambda: total(pair[1], 2)) == [3, 3]
    third = ProcessGroupBabyGloo(TIMEOUT)
    MeetingPlace().configure(third)
    assert total(third, 4) == 4
    third.shutdown()


def test_they_end_with_the_trainer_although_a_forked_child_lives_on() -> None:
    trainer = Warm(
        [sys.executable, "-m", "support.scripts.isolated_trainer"],
        cwd=TESTS,
        text=True,
        env=environment(),
    )
    carrier, forked = map(int, trainer.stdout.readline().split())
    server = next(
        int(line.split()[1])
        for line in Path(f"/proc/{carrier}/status").read_text().splitlines()
        if line.startswith("PPid:")
    )
    trainer.kill()
    trainer.wait()
    trainer.close()
    try:
        for pid in (carrier, server):
            eventually(lambda pid=pid: not is_alive(pid), what=f"{pid} lives on")  # type: ignore[misc]
        assert is_alive(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def test_groups_train_over_it_and_one_process_is_killed() -> None:
    with lighthouse(min_replicas=2) as address:
        groups = [ProcessGroupBabyGloo(TIMEOUT) for _ in range(2)]
        with (
            Trainer(address, "a", 1, pg=groups[0]) as first,
            Trainer(address, "b", 2, pg=groups[1]) as second,
        ):
            assert together(lambda: first.steps(3), lambda: second.steps(3)) == [[True] * 3] * 2
            assert groups[0].pid is not None
            os.kill(groups[0].pid, signal.SIGKILL)
            in_step(6, first, second)
            assert_identical([first, second])


def test_a_process_that_is_killed_while_its_group_waits_for_a_quorum_holds_up_nobody() -> None:
    """The quorum is the same again: the others have their connections, and do not come to meet."""
    with lighthouse(min_replicas=2) as address, LighthouseClient(address, TIMEOUT) as client:
        groups = [ProcessGroupBabyGloo(TIMEOUT) for _ in range(2)]
        with (
            Trainer(address, "a", 1, pg=groups[0]) as first,
            Trainer(address, "b", 2, pg=groups[1]) as second,
        ):
            assert together(lambda: first.steps(1), lambda: second.steps(1)) == [[True]] * 2
            first.optimizer.zero_grad()
            eventually(lambda: any(group.asking for group in client.status()[0].groups))
            assert groups[0].pid is not None
            os.kill(groups[0].pid, signal.SIGKILL)
            eventually(lambda: groups[0].errored() is not None)

            def gives_up() -> str:
                first.manager.wait_quorum()
                error = str(first.manager.errored())
                first.loss().backward()
                assert not first.optimizer.step()
                return error

            said, committed = together(gives_up, second.step)
            assert "was killed by SIGKILL" in str(said)
            assert not committed
            in_step(4, first, second)
            assert_identical([first, second])


def test_others_train_while_a_newcomer_still_starts_its_fork_server() -> None:
    """A fork server imports torch for seconds at least: in a quorum all others would wait for
    it."""
    alone = 20
    with lighthouse(min_replicas=1) as address, Trainer(address, "a", 1) as first:
        assert first.step()
        for old in fork_servers():
            os.kill(old, signal.SIGKILL)
            eventually(lambda old=old: not is_alive(old))  # type: ignore[misc]
        eventually(lambda: FORK_SERVER._socket is None)
        group = ProcessGroupBabyGloo(TIMEOUT)
        (server,) = fork_servers()
        os.kill(server, signal.SIGSTOP)
        try:
            with Trainer(address, "b", 2, pg=group) as second:

                def trains_alone() -> list[bool]:
                    committed = first.steps(alone)
                    os.kill(server, signal.SIGCONT)
                    committed.append(first.meets(2))
                    return committed

                committed, _ = together(trains_alone, lambda: second.meets(2))
                assert committed[:alone] == [True] * alone
                in_step(alone + 4, first, second)
                assert_identical([first, second])
        finally:
            os.kill(server, signal.SIGCONT)


def fork_servers() -> list[int]:
    """The living processes of this one that others are forked from."""
    return [
        child.pid
        for child in psutil.Process().children()
        if is_alive(child.pid) and any("isolated.child" in part for part in child.cmdline())
    ]
