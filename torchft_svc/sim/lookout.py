"""Looks at a lighthouse now and then: whom it waits for (I5), and whom it remembers (I7).

Like the other checks it keeps books of its own, from what the lighthouse hears and says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torchft_svc.core.activity import Activity
from torchft_svc.core.lighthouse import Lighthouse
from torchft_svc.core.lighthouse_orders import ReportEviction, ReportLeftHealing
from torchft_svc.core.step import Phase
from torchft_svc.core.types import Member, Quorum, QuorumConfig
from torchft_svc.sim.books import Book
from torchft_svc.sim.invariants import SLACK_S, must, parts_of
from torchft_svc.sim.left_out import (
    check_all_are_in,
    check_eviction,
    check_hangs_are_heeded,
    check_heals,
    check_history,
    check_left_healing,
)

LOOK_S = 0.25
_AWAITED = re.compile(r"waiting for (.*?)(?: and \d+ more)?: alive, but has not asked")
_DUE = "a quorum is being published"
_REPLICA_ID = re.compile(r"g\d+:\S+")

Key = tuple[str, str]  # job and replica id


class Lookout:
    """Over one life of a lighthouse."""

    def __init__(self, config: QuorumConfig) -> None:
        self._config = config
        self._longest_s = config.heal_timeout_s or config.join_timeout_s
        self._books: dict[str, Book] = {}

    def heard(self, key: Key) -> None:
        self._book(key[0]).dead.discard(key[1])

    def asked(self, key: Key, member: Member, now: float) -> None:
        book = self._book(key[0])
        book.dead.discard(key[1])
        since, gave_up_at = book.gave_up.pop(key[1], (now, now))
        if now - gave_up_at > self._config.heartbeat_timeout_s:
            since = now
        since = book.asking.setdefault(key[1], since)
        if key[1] in book.previous:
            book.first_back_at = min(since, book.first_back_at or since)
        for ids in (book.late, book.evicted, book.recalled):
            ids.discard(key[1])
        book.doing[key[1]] = Activity(Phase.QUORUM, member.step, now)

    def does(self, key: Key, activity: Activity) -> None:
        """What a group tells."""
        self._book(key[0]).doing[key[1]] = activity

    def withdrew(self, key: Key, now: float) -> None:
        book = self._book(key[0])
        since = book.asking.pop(key[1], None)
        if since is not None:
            book.gave_up[key[1]] = (since, now)

    def gone(self, key: Key, now: float) -> None:
        """If nobody of the last quorum is left, those who hang are waited for again."""
        book = self._book(key[0])
        book.forget(key[1])
        left = book.going_on()
        if book.may_be_late(now, self._config.join_timeout_s):
            left &= book.asking.keys()
        if not left:
            book.recalled |= book.evicted
            book.evicted.clear()

    def over(self, name: str) -> None:
        """No group of the job is left: who was in its last quorum is forgotten."""
        self._books[name] = Book()

    def evicted(self, out: ReportEviction, now: float) -> None:
        """It hangs, and nobody waits for it from here on."""
        book = self._book(out.job)
        check_eviction(book, out, self._config, now)
        book.recalled.discard(out.replica_id)
        book.evicted.add(out.replica_id)

    def left_healing(self, left: ReportLeftHealing, now: float) -> None:
        book = self._book(left.job)
        check_left_healing(book, left, self._config, now)
        book.left_healing.add(left.replica_id)

    def published(self, name: str, quorum: Quorum, known: Collection[Key], now: float) -> None:
        book = self._book(name)
        check_history(name, book, quorum)
        check_heals(book, quorum, self._config, now)
        check_all_are_in(book, quorum, [key for job, key in known if job == name])
        book.late |= book.evicted
        book.evicted.clear()
        book.recalled.clear()
        book.previous = frozenset(member.replica_id for member in quorum.participants)
        book.due_since = book.first_back_at = None
        for replica_id in book.previous:
            book.asking.pop(replica_id, None)

    def look(self, core: Lighthouse, alive: Collection[Key], now: float) -> None:
        """At what each job waits for: a straggler costs the others its time once, the dead none."""
        for name, book in self._books.items():
            why = core.why(name, now)
            self._check_due(name, book, why, now)
            check_hangs_are_heeded(name, book, self._config, now)
            found = _AWAITED.search(why)
            awaited = set(found[1].split(", ")) if found else set()
            if book.going_on():
                held = awaited & book.evicted
                must(not held, "I5", f"{name} waits for {held}, which hang and were left out")
            for each in awaited:
                must((name, each) in alive, "I5", f"{name} waits for {each}, which is dead")
                must(each not in book.late, "I5", f"{name} waits for the straggler {each} again")
            back = [since for each, since in book.asking.items() if each in book.previous]
            if back and now - min(back) > self._longest_s + SLACK_S:
                must(not awaited, "I5", f"{name} waits for {awaited} since {min(back):.2f} s")
                book.late |= book.going_on() - book.asking.keys()

    def _book(self, name: str) -> Book:
        return self._books.setdefault(name, Book())

    def _check_due(self, name: str, book: Book, why: str, now: float) -> None:
        if _DUE not in why:
            book.due_since = None
        elif book.due_since is None:
            book.due_since = now
        else:
            is_new = now - book.due_since < SLACK_S
            must(is_new, "I5", f"a quorum of {name} is due since {book.due_since:.2f} s")

    def check_memory(self, core: Lighthouse, alive: Collection[Key]) -> None:
        """Nothing in the core names a group that is dead, but the last quorum."""
        known = {replica_id for _, replica_id in alive}
        for book in self._books.values():
            known |= book.previous
        for name in _names_of(core):
            must(name in known, "I7", f"the lighthouse still remembers {name}")


def _names_of(core: Lighthouse) -> Iterator[str]:
    for _, part in parts_of(core, "lighthouse"):
        for each in part:
            if isinstance(each, str) and _REPLICA_ID.fullmatch(each):
                yield each
