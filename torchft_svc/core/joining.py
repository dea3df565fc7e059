"""Decides whose state may not be that of the others, although its step is theirs (rule Q13)."""

from __future__ import annotations

from collections.abc import Set

from torchft_svc.core.types import Member


def joining(members: tuple[Member, ...], previous: Set[str] | None) -> frozenset[str]:
    """Those of ``members`` that were not in the ``previous`` quorum, or have not healed since.

    A lighthouse that was restarted does not know that quorum (None); whoever is as far as others
    but was told only of earlier ones was not in it, and may have another state. So may one that has
    restored a checkpoint of a step that was committed in an earlier quorum: the job went back to
    before it once, and did it again.
    """
    max_step = max(member.step for member in members)
    strangers = {member.replica_id for member in members if member.unhealed}
    if previous is None:
        newest = max(each.history for each in members if each.step == max_step)
        strangers |= {each.replica_id for each in members if each.history < newest}
    else:
        strangers |= {each.replica_id for each in members if each.replica_id not in previous}
    at_max = [member for member in members if member.step == max_step]
    if all(member.replica_id in strangers for member in at_max):
        strangers -= _most_trusted(at_max)
    return frozenset(strangers)


def _most_trusted(strangers: list[Member]) -> set[str]:
    """Of ``strangers`` at one step, those from whom all go on, because nobody else is as far."""
    healthy = [each for each in strangers if not each.unhealed]
    if not healthy:
        return {strangers[0].replica_id}  # whoever should have served them is gone
    newest = max(each.history for each in healthy)
    return {each.replica_id for each in healthy if each.history == newest}
