"""Decides what a group that starts fetches of the others' state before it asks for a quorum.

    record_digests ─> next_chunk, record_chunk ... ─> record_digests ─> ... ─> is_over

The others train on meanwhile. So a chunk that was fetched may be out of date, and what is at hand
at the end is compared again when the group heals (rule K3). This decides which chunks are worth
fetching: those that no step has changed while they could be watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Digests are compared, and what has changed is fetched again, at most this often.
MAX_PASSES = 4
# A pass that fetches more than this share of the pass before does not get closer.
SHRINKS_BY = 0.5
# Of a state that changes but for this share with each step, nothing is fetched in advance.
MIN_STABLE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What is at hand at the end, in bytes, and what the heal still has to fetch.

    ``changing``: chunks that changed from one step to the next. ``outdated``: others that changed
    since they were fetched.
    """

    total: int
    at_hand: int
    changing: int
    outdated: int

    @property
    def is_in_vain(self) -> bool:
        """Whether nearly all of the state changes with each step."""
        return self.changing > (1 - MIN_STABLE_SHARE) * self.total


class CatchUp:
    """The chunks of a state, by number, of which some are at hand.

    ``sizes``: their bytes. ``at_hand``: the digests of the bytes that were fetched, also before.
    """

    def __init__(self, sizes: Sequence[int], at_hand: Mapping[int, bytes] | None = None) -> None:
        self.at_hand: dict[int, bytes] = dict(at_hand or {})
        self._sizes = tuple(sizes)
        self._digests: tuple[bytes, ...] | None = None
        self._step = 0  # in which they were read
        self._changing: set[int] = set()
        self._has_compared = False  # two steps' digests
        self._left: list[int] = []  # the next one last
        self._underway: set[int] = set()
        self._num_passes = 0
        self._pass_bytes = 0  # of the present pass, as planned
        self._is_over = not self._sizes

    @property
    def is_over(self) -> bool:
        """Whether nothing more is fetched in advance."""
        return self._is_over

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is left, or under way, of the present pass."""
        return not self._left and not self._underway

    @property
    def has_left(self) -> bool:
        """Whether `next_chunk` would return one."""
        return bool(self._left)

    @property
    def awaits_step(self) -> bool:
        """Whether the digests of another step would show what a step changes."""
        return not self._is_over and not self._has_compared

    def wants_digests(self, step: int) -> bool:
        """Whether the digests are to be read now; ``step``: the one that the source is in."""
        return not self._is_over and (self.is_idle or self._may_compare(step))

    def _may_compare(self, step: int) -> bool:
        """Whether the first comparison, which shows what each step changes, is possible."""
        return not self._has_compared and step > self._step

    def record_digests(self, step: int, digests: Sequence[bytes]) -> None:
        """Record the digests of all chunks, as the source has computed them.

        ``step``: the one in which it has ended that, of the first digests, and otherwise the one in
        which it has begun: so two steps lie between them for certain. If the number of chunks has
        changed, the state has another form, and nothing that is at hand fits.
        """
        before, self._digests = self._digests, tuple(digests)
        if len(digests) != len(self._sizes):
            self.at_hand.clear()
            self._end()
            return
        if before is None:
            self._step = step
            self._begin_pass(self._stale())
            return
        if self._may_compare(step):
            self._has_compared = True
            self._changing |= {n for n, digest in enumerate(digests) if before[n] != digest}
            for chunk in self._changing:
                self.at_hand.pop(chunk, None)
            if self.outcome().is_in_vain:
                self._end()
                return
        is_new_pass = self.is_idle
        stale = self._stale()
        if not is_new_pass:
            self._left = [chunk for chunk in reversed(stale) if chunk not in self._underway]
            return
        shrinks = self._bytes_of(stale) <= SHRINKS_BY * self._pass_bytes
        if stale and shrinks and self._num_passes < MAX_PASSES:
            self._begin_pass(stale)
        else:
            self._end()

    def _begin_pass(self, chunks: list[int]) -> None:
        self._num_passes += 1
        self._pass_bytes = self._bytes_of(chunks)
        self._left = chunks[::-1]

    def _stale(self) -> list[int]:
        """The chunks that are not at hand as the source had them last, without changing ones."""
        assert self._digests is not None
        return [
            n
            for n, digest in enumerate(self._digests)
            if n not in self._changing and self.at_hand.get(n) != digest
        ]

    def _end(self) -> None:
        self._is_over = True
        self._left = []

    def next_chunk(self) -> int | None:
        """The chunk to fetch now; None: none at present."""
        if not self._left:
            return None
        chunk = self._left.pop()
        self._underway.add(chunk)
        self.at_hand.pop(chunk, None)  # its bytes are being overwritten
        return chunk

    def put_back(self, chunk: int) -> None:
        """Record that ``chunk`` was not fetched, and is left to another connection."""
        self._underway.discard(chunk)
        if not self._is_over and chunk not in self._changing:
            self._left.append(chunk)

    def record_chunk(self, chunk: int, digest: bytes | None) -> None:
        """Record that ``chunk`` was fetched with ``digest``; None: it changed while it was sent."""
        self._underway.discard(chunk)
        if digest is None:
            self._changing.add(chunk)
        elif chunk not in self._changing:
            self.at_hand[chunk] = digest

    def outcome(self) -> CaughtUp:
        """What is at hand now."""
        outdated = [n for n in self._stale() if n in self.at_hand] if self._fits() else []
        return CaughtUp(
            total=sum(self._sizes),
            at_hand=self._bytes_of([n for n in self.at_hand if n not in outdated]),
            changing=self._bytes_of(self._changing),
            outdated=self._bytes_of(outdated),
        )

    def _fits(self) -> bool:
        return self._digests is not None and len(self._digests) == len(self._sizes)

    def _bytes_of(self, chunks: Sequence[int] | set[int]) -> int:
        return sum(self._sizes[chunk] for chunk in chunks)
