"""The places of a trainer's workers on Ray: bundles of placement groups, used again and again."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

# Ask a node that took workers with it at most so often whether it is there.
ASK_EVERY_S = 2.0
# Its answer is waited for as long: the process of a frozen worker is on a node that answers.
ANSWER_S = 3.0
# Resources that were given back show up in Ray's view of its nodes after at most this.
RETURN_S = 5.0
_LOOK_S = 0.02
_ROUNDING = 1e-4  # Ray counts in ten-thousandths


@dataclass(eq=False, kw_only=True, slots=True)
class Slot:
    """One bundle of a placement group: room for one worker."""

    group: PlacementGroup
    bundle: int
    resources: dict[str, float]
    is_ours: bool  # not of the task or trial that the trainer runs in
    worker: int | None = None


_Placed = list[tuple[Slot, str | None]]


class RaySlots:
    """Reserves room for workers.

    The slot of a worker that has ended is kept for the next one: a restart on the same nodes waits
    for nobody. If its node is lost, Ray moves the bundle to another one as soon as there is one,
    and asks its autoscaler for one until then.

    A trainer that runs within a placement group of several bundles (a trial of Ray Tune, say) uses
    all of them but the first, and asks for nothing else.

    Args:
        strategy: ``PACK`` on few nodes, or ``SPREAD`` over many; both as far as it is possible.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._slots: list[Slot] = []
        self._suspects: dict[str, _Question] = {}  # by node id
        self._is_inside = False
        outer = get_current_placement_group()
        takes_children = (
            ray._private.worker.global_worker.should_capture_child_tasks_in_placement_group
        )
        if outer is not None and outer.bundle_count > 1 and takes_children:
            self._is_inside = True
            self._slots = [
                Slot(group=outer, bundle=index, resources=dict(resources), is_ours=False)
                for index, resources in enumerate(outer.bundle_specs)
                if index > 0
            ]

    def num_free(self, resources: Mapping[str, float]) -> int:
        """The number of workers that can be started now."""
        for question in self._suspects.values():
            question.wait()
        totals = self._living_nodes()
        held: dict[str, Counter[str]] = defaultdict(Counter)
        num_ready = num_pending = 0
        for group in self._by_group(totals):
            for slot, node in group:
                if node is None:
                    num_pending += not _is_torn(group)
                    continue
                held[node].update(slot.resources)
                num_ready += slot.worker is None and _covers(slot.resources, resources)
        if self._is_inside:
            return num_ready
        # Ray's view is up to a second old: what we hold may be in it as free.
        view: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
        num_fitting = 0
        for node, total in totals.items():
            seen = view.get(node, {})
            free = {
                name: min(seen.get(name, 0.0), total.get(name, 0.0) - held[node][name])
                for name in resources
            }
            num_fitting += _num_fitting(free, resources)
        return num_ready + max(0, num_fitting - num_pending)

    def reserve(self, workers: Sequence[int], resources: Mapping[str, float]) -> list[Slot]:
        """Reserve a slot for each worker; those that are new are in one placement group."""
        self._remove_torn()
        found = [
            slot
            for group in self._by_group(self._living_nodes())
            for slot, node in group
            if slot.worker is None and node is not None and _covers(slot.resources, resources)
        ][: len(workers)]
        if len(found) < len(workers):
            found += self._reserve(len(workers) - len(found), resources)
        for slot, worker in zip(found, workers, strict=True):
            slot.worker = worker
        return found

    def give_back(self, worker: int) -> None:
        """The worker has ended."""
        for slot in self._slots:
            if slot.worker == worker:
                slot.worker = None

    def suspect(self, worker: int) -> None:
        """The worker was lost in a way that lets its node look dead.

        Ray may take a minute to notice it. Until then, the node offers nothing until it answers.
        """
        node = self._node_of(worker)
        if node is not None:
            self._suspects[node] = _Question(node)

    def is_placed(self, worker: int) -> bool:
        """Whether a node has room for the worker."""
        return self._node_of(worker) is not None

    def ask_for(self, num_workers: int, resources: Mapping[str, float]) -> None:
        """Reserve free slots for so many workers, each as soon as there is room for it.

        What is not there yet is asked of the autoscaler.
        """
        if self._is_inside:
            return
        self._remove_torn()
        num_free = sum(slot.worker is None for slot in self._slots)
        for _ in range(num_workers - num_free):
            self._reserve(1, resources)
        if num_workers < num_free:
            self._remove_free(num_free - num_workers)

    def close(self) -> None:
        """Free all bundles."""
        groups = {slot.group for slot in self._slots if slot.is_ours}
        back: Counter[str] = Counter(ray.available_resources())
        for slot in self._slots:
            back.update(slot.resources if slot.is_ours else {})
        self._slots.clear()
        for group in groups:
            remove_placement_group(group)
        # The next trainer of this program is to find it, once the last process has ended.
        deadline = time.monotonic() + RETURN_S
        while groups and time.monotonic() < deadline:
            free, total = ray.available_resources(), ray.cluster_resources()
            if all(
                free.get(name, 0.0) + _ROUNDING >= min(amount, total.get(name, 0.0))
                for name, amount in back.items()
                if "_group_" not in name
            ):
                break
            time.sleep(_LOOK_S)

    def _reserve(self, num_slots: int, resources: Mapping[str, float]) -> list[Slot]:
        bundle = {name: float(amount) for name, amount in resources.items()}
        group = placement_group([dict(bundle) for _ in range(num_slots)], strategy=self._strategy)
        slots = [
            Slot(group=group, bundle=index, resources=dict(bundle), is_ours=True)
            for index in range(num_slots)
        ]
        self._slots += slots
        return slots

    def _remove_free(self, num_slots: int) -> None:
        """Remove free bundles, first those for which there is no room yet."""
        groups = self._by_group(self._living_nodes())
        for group in sorted(groups, key=lambda group: any(node for _, node in group)):
            if len(group) <= num_slots and _is_unused(group):
                num_slots -= len(group)
                self._remove(group)

    def _remove_torn(self) -> None:
        """New ones find a place at once; Ray may notice only in some seconds what is lost."""
        if not self._is_inside:
            for group in self._by_group(self._living_nodes()):
                if _is_torn(group):
                    self._remove(group)

    def _remove(self, group: _Placed) -> None:
        removed = group[0][0].group
        self._slots = [slot for slot in self._slots if slot.group != removed]
        remove_placement_group(removed)

    def _by_group(self, alive: Mapping[str, object]) -> list[_Placed]:
        """The slots of each placement group, with the living node each is on."""
        groups: dict[PlacementGroup, _Placed] = {}
        for slot in self._slots:
            groups.setdefault(slot.group, []).append((slot, None))
        for group, slots in groups.items():
            nodes = placement_group_table(group)["bundles_to_node_id"]
            for index, (slot, _) in enumerate(slots):
                node = nodes.get(slot.bundle)
                slots[index] = slot, node if node in alive else None
        return list(groups.values())

    def _node_of(self, worker: int) -> str | None:
        for slot in self._slots:
            if slot.worker == worker:
                nodes = placement_group_table(slot.group)["bundles_to_node_id"]
                return nodes.get(slot.bundle) or None
        return None

    def _living_nodes(self) -> dict[str, dict[str, float]]:
        """The resources of each node that Ray knows to live, and that is not a suspect."""
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        self._suspects = {
            node: question
            for node, question in self._suspects.items()
            if node in alive and not question.is_answered()
        }
        return {node: total for node, total in alive.items() if node not in self._suspects}


class _Question:
    """Asks a node whether it can be reached: a task without needs, which has to run there."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._asked_at = time.monotonic()
        self._wait_until = self._asked_at + ANSWER_S
        self._answer = self._ask()

    def _ask(self) -> Any:
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        return ray.remote(**options)(_be_there).remote()

    def wait(self) -> None:
        """The first answer is worth a moment."""
        ray.wait([self._answer], timeout=max(0.0, self._wait_until - time.monotonic()))

    def is_answered(self) -> bool:
        if not ray.wait([self._answer], timeout=0)[0]:
            return False
        try:
            return bool(ray.get(self._answer))
        except RayError:
            now = time.monotonic()
            if now >= self._asked_at + ASK_EVERY_S:
                self._asked_at, self._answer = now, self._ask()
            return False


def _be_there() -> bool:
    return True


def _is_unused(group: _Placed) -> bool:
    return all(slot.worker is None for slot, _ in group)


def _is_torn(group: _Placed) -> bool:
    """Whether a part of it is lost, and nobody is in what is left."""
    return len(group) > 1 and _is_unused(group) and any(node is None for _, node in group)


def _covers(offered: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(offered.get(name, 0.0) + _ROUNDING >= amount for name, amount in wanted.items())


def _num_fitting(free: Mapping[str, float], wanted: Mapping[str, float]) -> int:
    return max(0, int(min((free[name] + _ROUNDING) / amount for name, amount in wanted.items())))
