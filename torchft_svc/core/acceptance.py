"""What a group takes for the answer to its question (rule Q23)."""

from __future__ import annotations

from torchft_svc.core.types import Member, Quorum
from torchft_svc.errors import QuorumFailed


def check_answer(asked: Member, answer: Quorum, *, ids_grow: bool) -> None:
    """``ids_grow``: this lighthouse never repeats an id (the public release's begins anew).

    Raises:
        QuorumFailed: the quorum is one without this group, or older than one that it has been in,
            as one of a lighthouse is that does not know that it leads no more.
    """
    if all(asked.replica_id != member.replica_id for member in answer.participants):
        raise QuorumFailed(f"quorum {answer.quorum_id} was formed without {asked.replica_id!r}")
    if ids_grow and answer.quorum_id < asked.seen_quorum_id:
        raise QuorumFailed(
            f"quorum {answer.quorum_id} is older than quorum {asked.seen_quorum_id}, which this "
            "group has seen: does another lighthouse lead by now?"
        )
