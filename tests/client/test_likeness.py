"""Tests with real processes that a group with another model or program does not harm the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.files import complete_lines
from support.forked import Group
from support.running import eventually, lighthouse_process
from support.scripts import unlike_trainer

pytestmark = pytest.mark.processes

START_S = 60.0


class Trainers:
    """Groups at one lighthouse, and the lines of their output."""

    def __init__(self, address: str, folder: Path, stack: ExitStack) -> None:
        self._address = address
        self._folder = folder
        self._stack = stack
        self.groups: dict[str, Group] = {}

    def start(self, name: str, kind: str = "") -> Group:
        group = Group(
            name,
            unlike_trainer.run,
            (kind, self._folder / f"{name}.jsonl"),
            1,
            self._folder / f"{name}.log",
            self._address,
        )
        self._stack.callback(group.end)
        self.groups[name] = group.start()
        return group

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in complete_lines(self._folder / f"{name}.jsonl")]

    def commits(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines_of(name) if line.get("committed")]

    def await_commits(self, *names: str, more: int = 5) -> None:
        """Each commits so many more steps, together with the others of ``names``."""

        def together(name: str) -> int:
            return sum(line["groups"] == len(names) for line in self.commits(name))

        before = {name: together(name) for name in names}
        eventually(
            lambda: all(together(name) >= before[name] + more for name in names),
            START_S,
            f"{names} train together: {[self.lines_of(name)[-3:] for name in self.groups]}",
        )

    def assert_identical(self, *names: str) -> None:
        """I3: what they committed as one step is one state."""
        hashes: dict[int, set[str]] = {}
        for name in names:
            for line in self.commits(name):
                hashes.setdefault(line["step"], set()).add(line["hash"])
        assert all(len(each) == 1 for each in hashes.values()), "I3"

    def is_running(self, name: str) -> bool:
        return self.groups[name].workers[0].poll() is None

    def failure(self, name: str) -> str:
        """The error that has ended a trainer."""
        eventually(lambda: not self.is_running(name), START_S, f"{name} ends")
        return str(self.lines_of(name)[-1]["raised"])


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[Callable[..., Trainers]]:
    with ExitStack() as stack:

        def make(*flags: str) -> Trainers:
            lighthouse = stack.enter_context(lighthouse_process(*flags))
            return Trainers(lighthouse.address, tmp_path, stack)

        yield make


@pytest.mark.parametrize(
    ("those", "kind", "both_sides"),
    [
        (
            "",
            "a bigger model",
            ("23554 elements of float32", "186 elements of float32"),
        ),
        (
            "heads",
            "heads, swapped",
            (
                "The first difference is parameter 0: heads.b.weight in 'c:",
                "heads.a.weight in '",
            ),
        ),
        ("", "channels last", ("float32, 2 not contiguous, in 1 parts", "float32, in 1 parts")),
        ("", "a synchronous quorum", ("use_async_quorum=False", "use_async_quorum=True")),
        ("", "another minimum", ("min_replica_size=2", "min_replica_size=1")),
        (
            "by hand",
            "by hand, another minimum",
            ("min_replica_size=2", "min_replica_size=1"),
        ),
        (
            "by hand",
            "by hand, a synchronous quorum",
            ("use_async_quorum=False", "use_async_quorum=True"),
        ),
        ("", "by hand", ("186 elements of float32", "': world_size_mode")),
    ],
)
def test_who_joins_with_another_layout_is_refused_and_nobody_else_notices(
    trainers: Callable[..., Trainers], those: str, kind: str, both_sides: tuple[str, str]
) -> None:
    fleet = trainers("--min-replicas=2")
    fleet.start("a", those)
    fleet.start("b", those)
    fleet.await_commits("a", "b")
    before = {name: len(fleet.lines_of(name)) for name in "ab"}
    fleet.start("c", kind)
    reason = fleet.failure("c")
    assert " differs from " in reason
    for side in both_sides:
        assert side in reason
    fleet.await_commits("a", "b")
    for name in "ab":
        assert fleet.is_running(name)
        assert all(line["committed"] for line in fleet.lines_of(name)[before[name] :]), (
            "nobody noticed"
        )
    fleet.assert_identical("a", "b")


@pytest.mark.parametrize(
    ("kinds", "here", "there"),
    [
        (
            ("both branches", "a branch until step 2"),
            "number 1, the backward pass of wrapper 1",
            "number 1, the backward pass of wrapper 0",
        ),
        (
            ("an average first", "an average last"),
            "number 1, Manager.allreduce: average of 4 elements of float32",
            "number 1, Manager.allreduce: average of 4096 elements of float32",
        ),
        (  # in the first step with these members
            ("an average first", ""),
            "number 1, Manager.allreduce: average of 4 elements of float32",
            "number 1, gradients: sum of 187 elements of float32",
        ),
        (
            ("an average first, checked", "checked"),
            "number 1, Manager.allreduce: average of 4 elements of float32",
            "number 1, gradients: sum of 187 elements of float32",
        ),
    ],
)
def test_operations_that_do_not_match_are_an_error_of_the_step(
    trainers: Callable[..., Trainers], kinds: tuple[str, str], here: str, there: str
) -> None:
    fleet = trainers("--min-replicas=2")
    for name, kind in zip("ab", kinds, strict=True):
        fleet.start(name, kind)

    def mismatches(name: str) -> list[str]:
        errors = [str(line.get("error")) for line in fleet.lines_of(name)]
        return [error for error in errors if "different operations" in error]

    for name in "ab":
        eventually(
            lambda name=name: len(mismatches(name)) >= 2, START_S, str(fleet.lines_of(name)[-3:])
        )
        if not fleet.commits(name):  # nobody trains, so none of them is the one that does not fit
            assert "does not match the others" in fleet.failure(name), "gloo has ended it"
        else:
            eventually(lambda name=name: len(mismatches(name)) > 3, START_S, "it goes on")
            assert fleet.is_running(name), "gloo has ended it"
    assert f"Here: {here}. In another group: {there}." in mismatches("a")[0]
    assert f"Here: {there}. In another group: {here}." in mismatches("b")[0]
    assert not any(line["step"] > 2 for name in "ab" for line in fleet.commits(name))
    fleet.assert_identical("a", "b")


@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [
        (
            "an average once before",
            "number 1, Manager.allreduce: average of 4096 elements of float32",
            "number 1, gradients: sum of 187 elements of float32",
        ),
        (
            "an average once behind",
            "number 2, Manager.allreduce: average of 1 elements of float32",
            "number 2, the end of the step, after 1 operation",
        ),
    ],
)
def test_an_operation_that_one_group_alone_has_in_a_later_step_ends_nobody(
    trainers: Callable[..., Trainers], kind: str, here: str, there: str
) -> None:
    """Gloo would end all of them, where a sum meets one of another size."""
    fleet = trainers("--min-replicas=2")
    fleet.start("a", kind)
    fleet.start("b")

    def errors() -> list[str]:
        return [str(line["error"]) for line in fleet.lines_of("a") if line.get("error")]

    eventually(lambda: len(errors()) > 0, START_S, "the step is discarded")
    assert f"Here: {here}. In another group: {there}, as in the step before" in errors()[0]
    fleet.await_commits("a", "b", more=3)
    assert all(fleet.is_running(name) for name in "ab"), "gloo has ended it"
    fleet.assert_identical("a", "b")


def test_a_group_that_never_fits_ends_and_the_others_go_on(
    trainers: Callable[..., Trainers],
) -> None:
    """The group sums what the others sum until the end of a step."""
    fleet = trainers("--min-replicas=2")
    fleet.start("a", "both branches")
    fleet.start("b", "both branches")
    fleet.await_commits("a", "b")
    fleet.start("c", "the branch alone")
    reason = fleet.failure("c")
    assert "does not match the others, which has cost all groups 3 steps in a row" in reason
    end = "number 2, the end of the step, after 1 operation"
    assert f"Here: {end}. In another group: number 2, the backward pass of wrapper 0" in reason
    assert not fleet.commits("c")
    fleet.await_commits("a", "b")
    for name in "ab":
        assert fleet.is_running(name)
        discarded = [
            line for line in fleet.lines_of(name) if line["step"] and not line["committed"]
        ]
        assert len(discarded) == 3
        assert all(f"In another group: {end}" in line["error"] for line in discarded)
    fleet.assert_identical("a", "b")
