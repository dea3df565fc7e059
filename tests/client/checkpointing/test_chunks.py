"""Tests which source sends which chunk, and which chunks are valid: tables with a fake clock."""

from __future__ import annotations

import pytest

from torchft_svc.client.checkpointing.http.chunks import (
    SLOW_S,
    SLOW_WITHOUT_PACE_S,
    Chunks,
    ConnectionId,
)

A, B, C = (ConnectionId(source, 0) for source in range(3))
GOOD, BAD = b"good", b"bad!"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Table:
    """Chunks of a state whose lead is source 0, and what was cut."""

    def __init__(self, num_chunks: int, *extras: int) -> None:
        self.clock = Clock()
        self.cut: list[ConnectionId] = []
        self.chunks = Chunks(num_chunks, 0, self._cut, self.clock)
        for source in extras:
            assert self.chunks.add_source(source)

    def _cut(self, conn: ConnectionId) -> None:
        self.cut.append(conn)
        self.chunks.give_back(conn)

    def bring(self, conn: ConnectionId, digest: bytes = GOOD) -> int:
        chunk = self.chunks.next_chunk(conn)
        assert chunk is not None
        assert self.chunks.arrived(conn, digest) == (digest is GOOD or not self.chunks.has_digests)
        return chunk


def test_an_only_source_needs_no_law() -> None:
    table = Table(2)
    assert [table.bring(A), table.chunks.unreported(0, 9), table.bring(A)] == [0, [0], 1]
    assert table.chunks.is_complete
    assert table.chunks.next_chunk(A) is None
    assert [table.chunks.unreported(0, 9), table.chunks.unreported(0, 9)] == [[1], []]


def test_what_others_sent_is_not_good_before_the_lead_said_so() -> None:
    table = Table(3, 1)
    table.bring(A), table.bring(B), table.bring(B)
    assert not table.chunks.is_complete
    # If the lead were lost now, source 1 would have to send digests: it must keep everything.
    assert [table.chunks.unreported(source, 9) for source in (0, 1)] == [[0], []]
    assert table.chunks.apply_digests(0, [GOOD] * 3) == set()
    assert table.chunks.is_complete
    assert [table.chunks.unreported(source, 9) for source in (0, 1)] == [[1, 2], [0, 1, 2]]


def test_who_sent_something_else_is_named_and_its_chunks_are_fetched_again() -> None:
    table = Table(3, 1, 2)
    table.bring(A), table.bring(B, BAD), table.bring(C)
    assert table.chunks.apply_digests(0, [GOOD] * 3) == {1}
    assert table.chunks.remove_source(1)
    assert table.bring(A) == 1
    assert table.chunks.is_complete


def test_after_the_law_nothing_else_is_taken() -> None:
    table = Table(1, 1)
    table.chunks.apply_digests(0, [GOOD])
    assert table.bring(B, BAD) == 0
    assert table.bring(A) == 0
    assert table.chunks.is_complete


def test_a_lead_that_is_lost_before_the_law_is_followed_by_another_with_its_own() -> None:
    table = Table(2, 1)
    table.bring(A, BAD)
    assert table.chunks.remove_source(0)
    assert table.chunks.lead == 1
    table.bring(B)
    assert not table.chunks.is_complete
    assert table.chunks.apply_digests(0, [BAD] * 2) == set()  # it comes too late
    assert table.chunks.apply_digests(1, [GOOD] * 2) == {0}
    assert table.bring(B) == 0
    assert table.chunks.is_complete


def test_the_law_outlives_the_lead() -> None:
    table = Table(2, 1)
    table.bring(A)
    table.chunks.apply_digests(0, [GOOD] * 2)
    assert table.chunks.remove_source(0)
    assert table.bring(B) == 1
    assert table.chunks.is_complete
    assert table.chunks.shares() == {0: 1, 1: 1}


def test_a_source_that_leaves_gives_its_chunks_back_and_the_last_one_is_informed() -> None:
    table = Table(1, 1)
    assert table.chunks.next_chunk(B) == 0
    assert table.chunks.remove_source(1)
    table.chunks.give_back(B)
    assert table.chunks.next_chunk(B) is None
    assert table.bring(A) == 0
    assert not table.chunks.remove_source(0)
    assert not table.chunks.add_source(2)


def test_what_is_far_slower_is_asked_from_another_source_in_the_end() -> None:
    table = Table(2, 1)
    table.chunks.apply_digests(0, [GOOD] * 2)
    assert table.chunks.next_chunk(B) == 0
    table.clock.now = 0.1
    table.bring(A)
    table.clock.now = SLOW_S + 0.1
    assert table.bring(A) == 0
    assert table.cut == [B]
    assert table.chunks.is_slow(1)
    assert table.chunks.is_complete


def test_the_only_chunk_is_asked_from_another_source_in_the_end() -> None:
    table = Table(1, 1)
    table.chunks.apply_digests(0, [GOOD])
    assert table.chunks.next_chunk(A) == 0
    table.clock.now = SLOW_WITHOUT_PACE_S
    assert table.bring(B) == 0
    assert table.cut == [A]


def test_a_source_that_comes_after_all_are_lost_leads() -> None:
    table = Table(1)
    assert table.chunks.next_chunk(A) == 0
    assert not table.chunks.remove_source(0)
    table.chunks.give_back(A)
    assert table.chunks.add_source(1)
    assert table.bring(B) == 0
    assert table.chunks.is_complete


def test_slow_is_better_than_nobody() -> None:
    table = Table(3, 1)
    table.chunks.apply_digests(0, [GOOD] * 3)
    assert table.chunks.next_chunk(B) == 0
    table.bring(A), table.bring(A)
    table.clock.now = 2 * SLOW_S
    assert table.chunks.next_chunk(A) == 0
    table.chunks.give_back(A)
    assert table.chunks.remove_source(0)
    assert not table.chunks.is_slow(1)
    assert table.bring(B) == 0


@pytest.mark.parametrize("why", ["stop", "complete"])
def test_it_is_over(why: str) -> None:
    table = Table(1)
    if why == "stop":
        table.chunks.stop()
    else:
        table.bring(A)
    table.chunks.wait_until_over()
    assert table.chunks.next_chunk(A) is None
    assert not table.chunks.add_source(1)


def with_at_hand(*extras: int, at_hand: dict[int, bytes]) -> Chunks:
    chunks = Chunks(3, 0, lambda conn: None, at_hand=at_hand)
    for source in extras:
        assert chunks.add_source(source)
    return chunks


def test_k3_what_is_at_hand_waits_for_the_digests_of_the_lead() -> None:
    chunks = with_at_hand(at_hand={0: GOOD, 2: BAD})
    assert chunks.next_chunk(A) == 1
    assert chunks.arrived(A, GOOD)
    assert not chunks.is_complete
    assert chunks.apply_digests(0, [GOOD, GOOD, GOOD]) == set(), "no source has sent a bad chunk"
    assert chunks.next_chunk(A) == 2
    assert chunks.arrived(A, GOOD)
    assert chunks.is_complete
    assert chunks.num_reused == 1
    assert chunks.unreported(0, 9) == [0, 1, 2], "the source need not keep what is at hand"


def test_k3_all_that_is_at_hand_completes_a_state() -> None:
    chunks = with_at_hand(1, at_hand=dict.fromkeys(range(3), GOOD))
    assert chunks.apply_digests(1, [BAD, BAD, BAD]) == set(), "it is not the lead"
    assert not chunks.is_complete
    chunks.apply_digests(0, [GOOD, GOOD, GOOD])
    assert chunks.is_complete
    assert [chunks.next_chunk(conn) for conn in (A, B)] == [None, None]


def test_without_digests_all_is_fetched() -> None:
    chunks = with_at_hand(at_hand=dict.fromkeys(range(3), GOOD))
    chunks.drop_at_hand()
    assert {chunks.next_chunk(ConnectionId(0, n)) for n in range(3)} == {0, 1, 2}


def test_k4_what_is_in_memory_is_known_after_a_failure() -> None:
    chunks = with_at_hand(at_hand={0: GOOD, 2: BAD})
    chunks.next_chunk(A)
    assert chunks.in_memory() == {0: GOOD, 2: BAD}, "chunk 1 is being written"
    chunks.arrived(A, GOOD)
    assert chunks.in_memory() == {0: GOOD, 1: GOOD, 2: BAD}
