"""How often the nodes of a launched run have failed of late, and what its limits say (L34, L35)."""

from __future__ import annotations

from collections import deque

from torchft_svc.core.launch.world import MAX_FAILURES, Node, RunSettings

_Place = tuple[str, int | None]


class RunFailures:
    """Keeps so many instants as its limits need, of so many nodes at most; the oldest go first.

    A node is known by its host, and by the rank that was given to it by hand: its id is new at
    every start of its agent.
    """

    def __init__(self, settings: RunSettings, max_nodes: int) -> None:
        self._settings = settings
        self._max_nodes = max_nodes
        self._of_run: deque[float] = deque(maxlen=(settings.max_run_failures or 0) + 1)
        self._of_nodes: dict[_Place, deque[float]] = {}
        self._new: dict[str, None] = {}

    def note(self, node: Node, at: float, num_failures: int = 1) -> None:
        """Its workers have failed, or it was lost."""
        self._new[node.node_id] = None
        instants = [at] * min(num_failures, MAX_FAILURES + 1)
        self._of_run.extend(instants)
        limit, place = self._settings.max_node_failures, _place(node)
        if limit is not None:
            known = self._of_nodes.pop(place, None)
            self._of_nodes[place] = deque(maxlen=limit + 1) if known is None else known
            self._of_nodes[place].extend(instants)
            if len(self._of_nodes) > self._max_nodes:
                del self._of_nodes[next(iter(self._of_nodes))]

    def take_new(self) -> list[str]:
        """The ids of the nodes that have failed since the last call, the last one at the end."""
        failed, self._new = list(self._new), {}
        return failed

    def why_over(self, at: float) -> str:
        """Why the run has to end (L34); empty: it has not."""
        limit = self._settings.max_run_failures
        if limit is None or self._counts_for_s(self._of_run, limit, at) <= 0:
            return ""
        return f"its nodes have failed {self._shown(limit)}, --max-run-failures is {limit}"

    def why_excluded(self, node: Node, at: float) -> str:
        """Why this node cannot take part for a while (L35); empty: it can."""
        limit, of_node = self._settings.max_node_failures, self._of_nodes.get(_place(node))
        if limit is None or of_node is None:
            return ""
        for_s = self._counts_for_s(of_node, limit, at)
        if for_s <= 0:
            return ""
        return (
            f"node {node.node_id!r} on {node.host} is excluded for {for_s:.0f} s: it has failed "
            f"{self._shown(limit)}, --max-node-failures is {limit}"
        )

    def _shown(self, limit: int) -> str:
        times = "once" if limit == 0 else f"{limit + 1} times"
        return f"{times} within {self._settings.failure_window_s:g} s"

    def _counts_for_s(self, failures: deque[float], limit: int, at: float) -> float:
        """How long they will have been more than ``limit``; 0 or less: they are not."""
        if len(failures) <= limit:
            return 0.0
        return failures[0] + self._settings.failure_window_s - at


def _place(node: Node) -> _Place:
    return node.host, node.rank
