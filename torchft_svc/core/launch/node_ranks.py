"""Decides the node ranks of the next world (rules L5 and L6)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from torchft_svc.core.launch.world import Node


def order_nodes(
    survivors: Sequence[Node],
    joiners: Sequence[Node],
    last_ranks: dict[str, int],
    seniors: Container[str],
) -> tuple[Node, ...]:
    """All of them by node rank.

    ``last_ranks``: of the world before, by node id. A rank that was given by hand is kept, then the
    last one, as far as there are so many nodes; what is left is filled by survivors first. One of
    ``seniors`` is rank 0, if one is there: the others get the state of rank 0.
    """
    places: list[Node | None] = [None] * (len(survivors) + len(joiners))
    survivors = sorted(survivors, key=lambda node: last_ranks.get(node.node_id, len(places)))
    rest = _place(places, [*survivors, *joiners], lambda node: node.rank)
    rest = _place(places, rest, lambda node: last_ranks.get(node.node_id))
    for node in rest:
        places[places.index(None)] = node
    nodes = [node for node in places if node is not None]
    ranks = [rank for rank, node in enumerate(nodes) if node.node_id in seniors]
    if ranks:
        nodes[0], nodes[ranks[0]] = nodes[ranks[0]], nodes[0]
    return tuple(nodes)


def _place(
    places: list[Node | None], nodes: Iterable[Node], wish: Callable[[Node], int | None]
) -> list[Node]:
    """Give each the rank that it wishes, where that is free; who has none yet."""
    rest = []
    for node in nodes:
        rank = wish(node)
        if rank is not None and rank < len(places) and places[rank] is None:
            places[rank] = node
        else:
            rest.append(node)
    return rest
