"""Groups of several workers with shards and odd contents: each worker's part is copied, and what
fits together is used (rules B1, B4, B5)."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import pytest
from support.buddies import EVERY, LONG_S, CopiedJob, Group, States, kill_all, until_begun
from support.held_copies import reported
from support.running import eventually, lighthouse_process

from torchft_svc.core.quorum.lighthouse.copies import HeldCopy

pytestmark = pytest.mark.processes
WHOLE = ("--group-world-size=2",)
PARTS = [(*WHOLE, f"--group-rank={rank}") for rank in range(2)]


class Shards:
    """Two groups of two workers, which are killed and begin another life."""

    def __init__(self, job: CopiedJob) -> None:
        self.job = job
        self._lives = 0
        self.groups: list[Group] = []

    def train(self) -> int:
        """Begin the next life of both groups; returns the first step above 0 of them."""
        self._lives += 1
        self.groups = [
            self.job.train_shards(name, 10 * self._lives + number, "hsdp")
            for number, name in enumerate("ab")
        ]
        return until_begun(*self.groups)

    def check_goes_on(self, last: int, states: States) -> int:
        """Train again; the bits of all workers are those of one step of the life before."""
        step = self.train()
        _, begun = min((group.first() for group in self.groups), key=itemgetter(0))
        assert {rank for _, rank, _ in begun} == {0, 1}
        assert begun <= states, "it is bitwise the state that the groups had"
        eventually(lambda: min(group.last_step() for group in self.groups) > last, LONG_S)
        return step


@pytest.fixture(scope="module")
def lighthouse() -> Iterator[str]:
    with lighthouse_process() as process:
        yield process.address


@pytest.fixture
def shards(lighthouse: str) -> Iterator[Shards]:
    with CopiedJob(lighthouse) as job:
        job.until(lambda status: not status.num_holders, "a holder of an earlier test is known")
        yield Shards(job)


@pytest.mark.timeout(300)
def test_b1_a_job_goes_on_from_a_whole_group_and_then_from_two_parts(shards: Shards) -> None:
    job = shards.job
    whole = job.hold("x", *WHOLE)
    shards.train()
    copied = job.until_copied(above=EVERY)
    last, states = kill_all(*shards.groups)
    assert shards.check_goes_on(last, states) >= copied

    for flags in PARTS:
        job.hold("x", *flags)
    job.until(lambda status: status.num_holders == 3)
    newest = job.until_copied(above=last)
    whole.kill()
    copied = job.until(lambda now: now.copy_step > newest and now.num_holders == 2).copy_step
    last, states = kill_all(*shards.groups)
    assert shards.check_goes_on(last, states) >= copied


@pytest.mark.timeout(300)
def test_b4_a_state_of_which_one_part_is_missing_or_of_another_step_is_not_used(
    shards: Shards,
) -> None:
    job = shards.job
    part = job.hold("x", *PARTS[0])
    shards.train()
    line = eventually(lambda: [each for each in part.lines if "holds" in each], LONG_S)[0]
    step = int(line[line.index("step") + 1].rstrip(","))
    job.until(lambda status: status.num_holders == 1 and status.copy_step == 0)
    kill_all(*shards.groups)
    others = [
        HeldCopy(step=each, group_rank=1, group_world_size=2, address="http://127.0.0.1:1/x")
        for each in (step - EVERY, step, step + EVERY)
    ]  # of that step, but of another quorum
    with reported(job.lighthouse, *others):
        assert shards.train() < EVERY, "a job without a whole state begins anew"
        assert not any("fetching a copy" in group.text() for group in shards.groups)
