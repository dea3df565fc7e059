"""What one worker has to do in a quorum: its rank, its store, the group to heal from.

Every member computes this from the same quorum, with the same result (I2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchft_svc.core.quorum.types import Member, Quorum
from torchft_svc.errors import QuorumFailed

# Groups that serve one that heals. Each may have to keep a copy of its state, and all wait for one
# another, so not all of them serve; and few links are faster than those of four hosts together.
MAX_HEAL_SOURCES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumResult:
    """The part of one worker in a quorum, as its manager computes and sends it.

    ``group_rank``: of this worker. ``max_replica_rank`` (None: the group is behind) and
    ``max_world_size``: the group's index, and the number of groups, at ``max_step``.
    ``recover_src_*``: the group to fetch the state from (None and empty: no heal);
    ``recover_dst_replica_ranks`` fetch it from here. All groups that are up to date have the same
    state, so parts may come from more of them: ``recover_extra_src_manager_addresses`` in the order
    of preference; ``recover_extra_dst_replica_ranks`` may fetch a part from here.
    ``steady``: the next steps may belong to this quorum, and ask nobody (rule E1).

    The codec copies all fields to and from `ManagerQuorumResponse`, where they have these names.
    """

    quorum_id: int
    group_rank: int
    replica_rank: int
    replica_world_size: int
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    store_address: str
    recover_src_replica_rank: int | None
    recover_src_manager_address: str
    recover_dst_replica_ranks: tuple[int, ...]
    recover_extra_src_manager_addresses: tuple[str, ...]
    recover_extra_dst_replica_ranks: tuple[int, ...]
    commit_failures: int
    replica_ids: tuple[str, ...]
    steady: bool = False

    @property
    def heal(self) -> bool:
        """Whether this worker has to load the state of another group."""
        return self.recover_src_replica_rank is not None

    @property
    def store_prefix(self) -> str:
        """The place in the store where workers of this group rank meet: new for every quorum id."""
        return f"torchft/{self.quorum_id}/{self.group_rank}"


def check_answer(asked: Member, answer: Quorum, *, ids_grow: bool) -> None:
    """Check that ``answer`` answers the question of the group ``asked`` (rule Q23).

    ``ids_grow``: this lighthouse never repeats an id (the public release's does).

    Raises: QuorumFailed: the quorum does not contain this group, or is older than one that it has
    been in, for example from a lighthouse that does not know that it leads no more.
    """
    if all(asked.replica_id != member.replica_id for member in answer.participants):
        raise QuorumFailed(f"quorum {answer.quorum_id} was formed without {asked.replica_id!r}")
    if ids_grow and answer.quorum_id < asked.seen_quorum_id:
        raise QuorumFailed(
            f"quorum {answer.quorum_id} is older than quorum {asked.seen_quorum_id}, which this "
            "group has seen: does another lighthouse lead by now?"
        )


def assign(
    quorum: Quorum, replica_id: str, group_rank: int, init_sync: bool = True
) -> QuorumResult:
    """The part of worker ``group_rank`` of group ``replica_id`` in ``quorum``.

    Raises:
        QuorumFailed: the group is not a member of this quorum.
    """
    members = sorted(quorum.participants, key=lambda member: member.replica_id)
    ranks = {member.replica_id: rank for rank, member in enumerate(members)}
    if replica_id not in ranks:
        raise QuorumFailed(f"quorum {quorum.quorum_id} was formed without {replica_id!r}")
    replica_rank = ranks[replica_id]
    max_step = quorum.max_step
    current = sorted(ranks[member.replica_id] for member in quorum.up_to_date)
    from_one = init_sync and max_step == 0
    sources = heal_plan(len(members), current, group_rank, from_one)
    extras = {} if from_one else extra_plan(sources, current)
    source = sources.get(replica_rank)
    commit_failures = max(member.commit_failures for member in members)
    store = members[store_host(current, group_rank, commit_failures)].store_address
    return QuorumResult(
        quorum_id=quorum.quorum_id,
        group_rank=group_rank,
        replica_rank=replica_rank,
        replica_world_size=len(members),
        max_step=max_step,
        max_replica_rank=current.index(replica_rank) if replica_rank in current else None,
        max_world_size=len(current),
        store_address=store,
        recover_src_replica_rank=source,
        recover_src_manager_address="" if source is None else members[source].address,
        recover_dst_replica_ranks=tuple(
            sorted(key for key, value in sources.items() if value == replica_rank)
        ),
        recover_extra_src_manager_addresses=tuple(
            members[rank].address for rank in extras.get(replica_rank, ())
        ),
        recover_extra_dst_replica_ranks=tuple(
            sorted(key for key, ranks in extras.items() if replica_rank in ranks)
        ),
        commit_failures=commit_failures,
        replica_ids=tuple(member.replica_id for member in members),
        steady=quorum.steady,
    )


def store_host(current: list[int], group_rank: int, commit_failures: int) -> int:
    """Whose store the workers with this group rank meet at, of the groups that are up to date.

    Each group rank has another one, to spread the load. After one failure they meet there again:
    most failures have nothing to do with the store, and the connections exist. After more they take
    the next one: a store that does not answer must not stop them.
    """
    return current[(group_rank + max(0, commit_failures - 1)) % len(current)]


def heal_plan(
    world_size: int, current: list[int], group_rank: int, from_one: bool
) -> dict[int, int]:
    """Which replica rank heals from which, for the workers with this group rank.

    Groups that are not ``current`` are assigned round robin to those that are, starting with number
    ``group_rank``, so that the ranks of one group load different sources. ``from_one``: at step 0
    no group is behind, but none is equal either, so all take the state of one primary, on every
    group rank, because a model's shards only fit together if they come from one group.
    """
    if from_one:
        return {rank: current[0] for rank in range(world_size) if rank != current[0]}
    behind = sorted(set(range(world_size)) - set(current))
    return {rank: current[(index + group_rank) % len(current)] for index, rank in enumerate(behind)}


def extra_plan(sources: dict[int, int], current: list[int]) -> dict[int, tuple[int, ...]]:
    """The further sources of each replica rank that heals: the up-to-date ranks after its
    source."""
    num_extras = min(len(current), MAX_HEAL_SOURCES) - 1
    plan = {}
    for rank, source in sources.items():
        place = current.index(source) + 1
        turned = current[place:] + current[:place]
        plan[rank] = tuple(turned[:num_extras])
    return plan
