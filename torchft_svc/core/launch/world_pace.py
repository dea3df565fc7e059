"""When the next world of a run is due (rules L1 to L3), and how long nodes wait (L9, L10)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torchft_svc.core.launch.run_nodes import Agent
from torchft_svc.core.launch.world import RunSettings

# What breaks at one moment is noticed within so much time.
SETTLE_S = 0.05
# The least time from one world to the next, if losses in quick succession lead to both: after the
# first of such worlds, after the second, and after any later one.
SPACING_S = (0.1, 0.4, 1.0)
# A loss after so long is the first one again. Joins wait for that long, too.
CALM_S = 1.0
# Nodes whose workers start anew are waited for where nobody is left (L1), but not longer than this
# part of the time that the others wait.
WARMING_SHARE = 0.5
# An agent that has just come has no store yet.
MIN_JOIN_TIMEOUT_S = 1.0


class WorldPace:
    """Of one run with ``settings``. Losses lead to another world at once, but a storm of them does
    not to many (L2); joins wait (L3), and the first world may (L1)."""

    def __init__(self, settings: RunSettings, begins_at: float) -> None:
        self.settings = settings
        self.begins_at = begins_at  # no run begins before that
        self._published_at = -math.inf
        self._enough_since: float | None = None
        self._paused_since: float | None = None
        self._due_at = math.inf
        self._earliest_at = -math.inf
        self._calm_at = -math.inf
        self._num_in_succession = 0
        self.held_until = -math.inf  # no world is made before that

    @property
    def due_at(self) -> float:
        """When losses are acted on; infinity: there are none."""
        return self._due_at

    @property
    def is_paused(self) -> bool:
        """Whether members wait until enough nodes are there."""
        return self._paused_since is not None

    def is_waiting(self) -> bool:
        return self._due_at < math.inf

    def note_loss(self, at: float) -> None:
        """Something is lost, perhaps for a moment only."""
        if not self.is_waiting():
            self._due_at = max(at + SETTLE_S, self._earliest_at)

    def act_at(self, at: float) -> None:
        """It was waited for long enough."""
        self._due_at = at

    def hold(self, until: float) -> None:
        """Who is missing may come back until then; nobody joins before that."""
        self.held_until = until
        self._earliest_at = max(self._earliest_at, until)
        self._calm_at = max(self._calm_at, until)
        if self.is_waiting():
            self._due_at = max(self._due_at, until)

    def forget_losses(self) -> None:
        """All have come back, or nobody is left to wait for another world."""
        self._due_at = math.inf

    def acted(self, at: float) -> None:
        """Losses have led to another world, or to a wait for further nodes."""
        if at >= self._calm_at:
            self._num_in_succession = 0
        spacing_s = SPACING_S[min(self._num_in_succession, len(SPACING_S) - 1)]
        self._num_in_succession += 1
        self._due_at, self._earliest_at, self._calm_at = math.inf, at + spacing_s, at + CALM_S

    def published(self, at: float) -> None:
        """There is a world, of this lighthouse or of another one."""
        self._published_at = at
        self._enough_since = self._paused_since = None

    # -- the next world --------------------------------------------------------------------------

    def note_joiners(self, joiners: Sequence[Agent], at: float) -> bool:
        """Nobody is in a world, and these can be; whether they are enough."""
        self._paused_since = None
        if len(joiners) < self.settings.min_nodes:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = at
        return self._enough_since is not None

    def note_members(self) -> None:
        """Some are in a world: there is nothing to begin."""
        self._enough_since = None

    def forms_at(self, joiners: Sequence[Agent], is_warming: bool) -> float:
        """When the first world of `note_joiners` is made (L1); infinity: they are not enough."""
        since = self._enough_since
        if since is None:
            return math.inf
        if len(joiners) == self.settings.max_nodes:
            return max(since, self.begins_at)
        is_idle = not any(each.is_working or each.state.reached for each in joiners)
        if is_idle and is_warming:
            at = since + WARMING_SHARE * self.join_timeout_s
        else:
            at = max(since + self.settings.join_window_s, self.begins_at)
        return min((at, *map(self.gives_up_at, joiners)))

    def joins_at(self, joiners: Sequence[Agent], num_members: int, is_reached: bool) -> float:
        """When they are taken in (L3)."""
        if not is_reached:
            return self._published_at + self.join_timeout_s
        since = -math.inf
        if num_members + len(joiners) < self.settings.max_nodes:  # more may come along
            waits = (each.waits_since for each in joiners if each.waits_since is not None)
            since = min(waits, default=-math.inf)
        at = max(since + self.settings.join_window_s, self._calm_at)
        return min((at, *map(self.gives_up_at, joiners)))

    def pauses_until(self, at: float) -> float:
        """When members that are too few have waited for long enough (L9)."""
        if self._paused_since is None:
            self._paused_since = at
        return self._paused_since + self.join_timeout_s

    @property
    def join_timeout_s(self) -> float:
        return max(self.settings.join_timeout_s, MIN_JOIN_TIMEOUT_S)

    def gives_up_at(self, agent: Agent) -> float:
        """When an agent outside has to end (L10); no run begins before `begins_at`."""
        if agent.waits_since is None:
            return math.inf
        return max(agent.waits_since, self.begins_at) + self.join_timeout_s
