"""A host is cut off by the loss of all packets, which closes nothing: nobody trains on beside the
others, and all are equal when the line is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from support.bounds import check
from support.hosts import Host, Network, network
from support.running import Process

from tools.chaos.bounds import NEWS_S
from tools.chaos.fleet import Fleet
from tools.demo.events import Committed, Discarded

pytestmark = pytest.mark.processes

HEARTBEAT_S = 0.6
BOUND_S = HEARTBEAT_S + NEWS_S
# A sum that gets no answer fails after this: who is cut off then asks for a quorum of its own.
TIMEOUT_S = 1.0
CUT_S = 2.5
SUMMED_AGAIN = "is summed in another quorum"


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(2) as made:
        yield made


def start_lighthouse(host: Host) -> Process:
    return Process(
        "lighthouse_server",
        f"--bind={host.address}:0",
        "--min-replicas=1",
        f"--heartbeat-timeout-ms={HEARTBEAT_S * 1000:.0f}",
        namespace=host.namespace,
    )


def start(fleet: Fleet, groups: dict[int, Host]) -> None:
    """Start the groups on their hosts, and wait until they commit steps that ask nobody."""
    for group, host in groups.items():
        fleet.start(group, host=host.address, namespace=host.namespace or "")
    fleet.all_meet(set(groups))
    since = time.monotonic()
    for _ in range(3):
        since = fleet.await_commits(set(groups), 30.0, since=since, num_members=len(groups))


def count_troubles(fleet: Fleet, group: int) -> int:
    """Count the steps that the group has discarded, or has summed again."""
    fleet.read()
    (worker,) = fleet.lives_of(group)
    return len(fleet.of(group, Discarded)) + worker.output().count(SUMMED_AGAIN)


def check_alone(fleet: Fleet, group: int, others: set[int], since: float) -> None:
    """Check that a cut-off group has committed no step that the others have not.

    The step that was under way when they lost it may be an exception.
    """
    fleet.read()
    (quorum_id,) = {each.quorum_id for each in fleet.of(group, Committed)[-1:]}
    together = [each for other in others for each in fleet.of(other, Committed)]
    last = max(each.step for each in together if each.quorum_id == quorum_id)
    commits = fleet.of(group, Committed, since=since)
    assert all(each.quorum_id == quorum_id and each.step <= last + 1 for each in commits), commits


def check_equal(fleet: Fleet, groups: set[int], since: float) -> None:
    """All have the same weights after each step that they committed together."""
    fleet.all_meet(groups)
    fleet.read()
    digests: dict[tuple[int, int], dict[int, str]] = {}
    for group in groups:
        for each in fleet.of(group, Committed, since=since):
            if len(each.members.split()) == len(groups):
                digests.setdefault((each.step, each.quorum_id), {})[group] = each.digest
    together = [each for each in digests.values() if each.keys() == groups]
    assert together
    assert all(len(set(each.values())) == 1 for each in together), digests


def cut_and_mend(
    fleet: Fleet, cut: Callable[[], None], mend: Callable[[], None], cut_off: int, others: set[int]
) -> None:
    before = count_troubles(fleet, cut_off)
    cut_at = time.monotonic()
    cut()
    again_at = fleet.await_commits(others, 30.0, since=cut_at, num_members=len(others))
    check("the others go on", again_at - cut_at, BOUND_S)
    time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))
    fleet.await_commits(others, 30.0, since=time.monotonic(), num_members=len(others))
    check_alone(fleet, cut_off, others, cut_at)
    assert count_troubles(fleet, cut_off) > before, "it has noticed nothing"
    mended_at = time.monotonic()
    mend()
    check_equal(fleet, {cut_off, *others}, mended_at)
    print(f"all train together {time.monotonic() - mended_at:.1f} s after the line is back")


def test_who_is_cut_off_commits_nothing_beside_its_successors(
    hosts: Network, make_fleet: Callable[..., Fleet]
) -> None:
    """First only its manager from the lighthouse, so that its worker still reaches the others; then
    the whole host."""
    far, lighthouse_host = hosts.others
    with start_lighthouse(lighthouse_host) as lighthouse:
        fleet = make_fleet(lighthouse.address, manager={"timeout_s": TIMEOUT_S})
        start(fleet, {0: hosts.here, 1: hosts.here, 2: far})
        cut_and_mend(fleet, lambda: hosts.cut(far, lighthouse_host), hosts.mend, 2, {0, 1})
        cut_and_mend(fleet, lambda: hosts.cut_off(far), hosts.mend, 2, {0, 1})


def test_of_two_hosts_only_the_one_that_reaches_the_lighthouse_goes_on(
    hosts: Network, make_fleet: Callable[..., Fleet]
) -> None:
    """The one that is cut off hosts the store, too."""
    far = hosts.others[0]
    with start_lighthouse(hosts.here) as lighthouse:
        fleet = make_fleet(lighthouse.address, manager={"timeout_s": TIMEOUT_S})
        start(fleet, {0: far, 1: hosts.here})
        cut_and_mend(fleet, lambda: hosts.cut_off(far), hosts.mend, 0, {1})


def test_a_lone_group_does_not_train_on_beside_one_that_takes_its_place(
    hosts: Network, make_fleet: Callable[..., Fleet]
) -> None:
    """No sum of others holds it back, but it asks before each step."""
    far = hosts.others[0]
    with start_lighthouse(hosts.here) as lighthouse:
        fleet = make_fleet(lighthouse.address, manager={"timeout_s": TIMEOUT_S})
        start(fleet, {0: far})
        cut_at = time.monotonic()
        hosts.cut_off(far)
        fleet.start(1, host=hosts.here.address)
        fleet.all_meet({1})
        time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))
        fleet.read()
        commits = fleet.of(0, Committed, since=cut_at)
        assert len(commits) <= 1, commits
        mended_at = time.monotonic()
        hosts.mend()
        check_equal(fleet, {0, 1}, mended_at)
