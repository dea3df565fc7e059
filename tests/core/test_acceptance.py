"""Which quorum a group takes for the answer to its question."""

from __future__ import annotations

import pytest
from support.core.scenes import member, quorum

from torchft_svc.core.acceptance import check_answer
from torchft_svc.errors import QuorumFailed


@pytest.mark.parametrize(
    ("seen", "answered", "ids_grow"), [(0, 1, True), (7, 7, True), (7, 8, True), (7, 1, False)]
)
def test_i1_a_quorum_that_is_taken(seen: int, answered: int, ids_grow: bool) -> None:
    asked = member("a", seen_quorum_id=seen)
    check_answer(asked, quorum(answered, asked, member("b")), ids_grow=ids_grow)


def test_i1_a_quorum_of_a_lighthouse_that_leads_no_more() -> None:
    asked = member("a", seen_quorum_id=7)
    with pytest.raises(QuorumFailed, match="quorum 6 is older than quorum 7"):
        check_answer(asked, quorum(6, asked), ids_grow=True)


@pytest.mark.parametrize("ids_grow", [True, False])
def test_a_quorum_without_the_group_that_asked(ids_grow: bool) -> None:
    with pytest.raises(QuorumFailed, match="quorum 1 was formed without 'a'"):
        check_answer(member("a"), quorum(1, member("b")), ids_grow=ids_grow)
