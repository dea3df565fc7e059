"""A job whose groups are all killed goes on from a copy that is held elsewhere (rules B1 to B6)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest
from support.buddies import BACK, EVERY, LONG_S, CopiedJob, Group, States, kill_all, until_begun
from support.etcd_server import etcd_server, needs_etcd
from support.running import Process, eventually, lighthouse_process, steady_address

pytestmark = pytest.mark.processes
LEASE_S = 2


@pytest.fixture
def job() -> Iterator[CopiedJob]:
    with lighthouse_process() as lighthouse, CopiedJob(lighthouse.address) as job:
        yield job


def check_goes_on(job: CopiedJob, last: int, states: States, *again: Group) -> None:
    """The groups of the next life begin with the bits of the one before, and are copied, too."""
    step = until_begun(*again)
    _, begun = min((group.first() for group in again), key=itemgetter(0))
    assert begun <= states, "it is bitwise the state that a group had"
    assert last - step <= BACK, (last, step)
    eventually(lambda: min(each.last_step() for each in again) > last, LONG_S)
    job.until_copied(above=last)


def test_b5_a_killed_job_goes_on_from_the_only_copy_that_is_left(job: CopiedJob) -> None:
    holders = [job.hold(beside) for beside in "ab"]
    groups = [job.train(name, seed) for seed, name in enumerate("ab")]
    eventually(lambda: sum(step > 4 * EVERY for step in job.steps_held()) == len(holders), LONG_S)
    holders[1].kill()  # the one beside group b, and so the one with the state of group a
    last, states = kill_all(*groups)
    check_goes_on(job, last, states, *(job.train(name, 7 + n) for n, name in enumerate("ab")))


def test_b5_a_group_heals_from_a_living_one_and_not_from_a_copy(job: CopiedJob) -> None:
    job.hold("a")
    groups = [job.train(name, seed) for seed, name in enumerate("ab")]
    job.until_copied(above=2 * EVERY)
    groups[0].kill()
    again = job.train("a", 7)
    until_begun(again)
    assert "fetching a copy" not in again.text()
    eventually(lambda: again.first()[1] <= groups[1].states())


def test_b5_a_group_that_waits_to_join_while_the_others_die_begins_from_a_copy(
    job: CopiedJob,
) -> None:
    """The group has asked while there was a living state, and is the only one that asks now."""
    job.hold("a")
    groups = [job.train(name, seed, every=1, step_s=2.0) for seed, name in enumerate("ab")]
    job.until_copied(above=1)
    groups[0].kill()
    again = job.train("a", 7, every=1, step_s=2.0)
    job.until(lambda status: any(each.asking and not each.in_quorum for each in status.groups))
    groups[1].kill()
    assert until_begun(again) >= 2
    assert again.first()[1] <= groups[1].states()
    text = again.text()
    assert "the job begins there" in text or "fetching a copy" in text


def test_a_spare_takes_a_place_and_when_all_are_killed_the_job_goes_on_from_a_copy(
    job: CopiedJob,
) -> None:
    """Prepared spares (rule G2) and copies together: the copy is of what the spare has trained."""
    job.hold("x")
    groups = [job.train(name, seed) for seed, name in enumerate("ab")]
    job.until_copied(above=EVERY)
    spare = job.train("c", 5, TORCHFT_SPARE="1")
    job.until(lambda status: any(each.asks for each in status.prepared_spares), "no spare")
    assert not spare.states(), "it stands by"
    groups[0].kill()
    joined_at = until_begun(spare)
    eventually(lambda: spare.first()[1] <= groups[1].states())
    job.until_copied(above=joined_at + EVERY)
    last, states = kill_all(groups[1], spare)
    check_goes_on(job, last, states, *(job.train(name, 9 + n) for n, name in enumerate("ab")))


def test_b2_a_lighthouse_that_is_killed_with_all_groups_learns_of_the_copies_again() -> None:
    address = steady_address()
    with lighthouse_process(bind=address) as before, CopiedJob(address) as job:
        job.hold("x")
        groups = [job.train(name, seed) for seed, name in enumerate("ab")]
        job.until_copied(above=2 * EVERY)
        before.kill()
        last, states = kill_all(*groups)
        again = [job.train(name, 7 + seed) for seed, name in enumerate("ab")]
        with lighthouse_process(bind=address):
            check_goes_on(job, last, states, *again)


def leads(lighthouse: Process) -> bool:
    """Whether it leads now, by its log: a lease may have ended on a busy machine."""
    sentences = re.findall("leads now|does not lead any more", lighthouse.errors())
    return sentences[-1:] == ["leads now"]


@needs_etcd
def test_b2_the_next_leader_of_several_lighthouses_knows_the_copies(tmp_path: Path) -> None:
    """A holder reports to all of them, and the one that is elected waits for its report."""
    with etcd_server(tmp_path) as etcd:

        def lighthouse() -> Process:
            flags = (f"--leader-election=etcd://{etcd.address}/torchft", f"--lease-ttl-s={LEASE_S}")
            return lighthouse_process(*flags, "--join-timeout-ms=1000")

        with lighthouse() as one, lighthouse() as two:
            addresses = {each.address: each for each in (one, two)}
            with CopiedJob(",".join(addresses)) as job:
                job.hold("x")
                groups = [job.train(name, seed) for seed, name in enumerate("ab")]
                job.until_copied(above=2 * EVERY)
                leaders = [each for each in (one, two) if leads(each)]
                assert len(leaders) == 1
                leaders[0].send(signal.SIGKILL)
                last, states = kill_all(*groups)
                again = [job.train(name, 7 + seed) for seed, name in enumerate("ab")]
                check_goes_on(job, last, states, *again)
