"""Which lighthouse of a list to go to next. Pure: it neither waits nor connects (rule F2)."""

from __future__ import annotations

from collections.abc import Sequence

# Away from the first lighthouses of the list, look this often whether one of them is back: for so
# long the groups of a job may be at different ones.
LOOK_BACK_S = 1.0


class Route:
    """The order of the list decides, so that all groups of a job end at the same lighthouse."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._untried = list(addresses[1:])
        self._leaders_tried: set[str] = set()
        self.current = addresses[0]

    @property
    def preferred(self) -> tuple[str, ...]:
        """Those before the current one: where the others of the job will be, once one is back."""
        if self.current not in self._addresses:  # a leader's own name for itself
            return ()
        return self._addresses[: self._addresses.index(self.current)]

    def worked(self) -> None:
        """The current one has answered: if it breaks it is tried again first, then the list."""
        self._untried = [self.current, *(each for each in self._addresses if each != self.current)]
        self._leaders_tried.clear()

    def go_on(self, leader: str = "") -> bool:
        """The current one failed, or named the ``leader``: choose the next one.

        False if all have been tried in vain, and it is time for a pause.
        """
        if leader and leader != self.current and leader not in self._leaders_tried:
            self._leaders_tried.add(leader)  # once: two that name each other are no way out
            self.current = leader
            return True
        is_fresh = bool(self._untried)
        if not is_fresh:
            self._untried = list(self._addresses)
            self._leaders_tried.clear()
        self.current = self._untried.pop(0)
        return is_fresh

    def go_back(self, address: str) -> None:
        """One of `preferred` would take the group."""
        self.current = address
        self.worked()
