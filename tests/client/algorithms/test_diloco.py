"""Tests of DiLoCo with whole groups: its numbers, what a refusal restores, who may join."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.diloco_numbers import EXPECTED
from support.training import DEADLINE_S, TIMEOUT, bits, lighthouse, make_manager, together
from torch import nn

from torchft_svc.client import Optimizer
from torchft_svc.client.algorithms import DiLoCo, LocalSGD
from torchft_svc.client.algorithms.agreed_weights import AgreedWeights, plan_parts
from torchft_svc.client.algorithms.diloco import _Fragment
from torchft_svc.client.process_groups.gloo import ProcessGroupGloo
from torchft_svc.errors import ConfigError, GroupDiffers, RequestRefused

# How long the group waits that is left alone when the other one is refused.
LONELY = timedelta(seconds=5)
# Of one fragment, three inner steps a round.
ONE = {
    (0, 0.0): [1, -1, -3, -11, -13, -15, -23],
    (0, 0.5): [1, -1, -3, -8, -10, -12, -15.5],
    (0, 1.0): [1, -1, -3, -5, -7, -9, -11],
    (1, 0.0): [1, -1, -3, -7, -9, -11, -15],
}


class OneWeight(nn.Module):
    """A fragment of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


class FailingGloo(ProcessGroupGloo):
    """gloo, whose sums fail while ``fails`` is set."""

    def __init__(self) -> None:
        super().__init__(timedelta(seconds=20))
        self.fails = False

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("this sum fails on purpose")
        return super().allreduce(tensors, opts)


class Group:
    """A replica group that trains ``num`` fragments of one weight each."""

    def __init__(
        self,
        address: str,
        name: str,
        num: int = 2,
        *,
        extra_steps: int = 2,
        quorum_timeout: timedelta = TIMEOUT,
        **options: Any,
    ) -> None:
        self.parts = nn.ModuleList(OneWeight() for _ in range(num))
        self.inner = torch.optim.SGD(self.parts.parameters(), lr=1.0)
        self.outer = [torch.optim.SGD(each.parameters(), lr=2.0) for each in self.parts]
        self.pg = FailingGloo()
        self.manager = make_manager(
            address,
            name,
            pg=self.pg,
            use_async_quorum=False,
            timeout=min(TIMEOUT, quorum_timeout),
            quorum_timeout=quorum_timeout,
            state_dict=lambda: {"model": self.parts.state_dict(), "inner": self.inner.state_dict()},
            load_state_dict=self.load,
        )
        self._extra_steps = extra_steps
        self._options = {"sync_every": 3 * num, **options}
        self.locals: list[list[float]] = []
        self.globals: list[list[float]] = []

    def load(self, state: dict[str, Any]) -> None:
        self.parts.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def agreed(self) -> list[float]:
        return [each.values[0].item() for each in self.algorithm._agreed]

    @contextlib.contextmanager
    def training(self) -> Iterator[DiLoCo]:
        for _ in range(self._extra_steps):
            self.manager.start_quorum()
            self.manager.allreduce(torch.ones(1)).wait()
            assert self.manager.should_commit()
        self.algorithm = DiLoCo(
            self.manager, list(self.parts), self.inner, self.outer, **self._options
        )
        with self.algorithm:
            yield self.algorithm

    def inner_step(self) -> None:
        for part in self.parts:
            part.weight.grad = torch.full((1,), 2.0)
        self.inner.step()

    def train(self, num_steps: int, before: Callable[[int], None] = lambda _: None) -> None:
        with self.training():
            for step in range(num_steps):
                before(step)
                self.locals.append([each.weight.item() for each in self.parts])
                if step % 3 == 0:
                    self.globals.append(self.agreed())
                self.inner_step()


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


@contextlib.contextmanager
def groups(address: str, names: str, *args: Any, **options: Any) -> Iterator[list[Group]]:
    made = together(*(lambda name=name: Group(address, name, *args, **options) for name in names))
    try:
        yield made
    finally:
        for each in made:
            each.manager.shutdown()


def columns(rows: list[list[float]]) -> list[list[float]]:
    return [list(column) for column in zip(*rows, strict=True)]


def check_numbers(address: str, delay: int, alpha: float, *, extra_steps: int = 2) -> None:
    """Check both fragments' values; after an odd number of steps the second one is the first."""
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    with groups(address, "ab", extra_steps=extra_steps, **options) as (a, b):
        together(lambda: a.train(16), lambda: b.train(16))
        first, second, first_agreed, second_agreed = EXPECTED[delay, alpha]
        order = -1 if extra_steps % 2 else 1
        for group in (a, b):
            assert columns(group.locals)[::order] == [first, second]
            found = columns(group.globals)[::order]
            assert [each[:5] for each in found] == [first_agreed, second_agreed]


@pytest.mark.parametrize(("delay", "alpha"), EXPECTED)
def test_the_numbers_of_two_fragments(address: str, delay: int, alpha: float) -> None:
    check_numbers(address, delay, alpha)


def test_the_fragment_follows_the_step_of_the_manager(address: str) -> None:
    check_numbers(address, 0, 0.0, extra_steps=1)


@pytest.mark.parametrize(("delay", "alpha"), ONE)
def test_the_numbers_of_one_fragment(address: str, delay: int, alpha: float) -> None:
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    with groups(address, "ab", 1, **options) as (a, b):
        together(lambda: a.train(7), lambda: b.train(7))
        assert columns(a.locals) == columns(b.locals) == [ONE[delay, alpha]]


def check_refusals(address: str) -> None:
    with groups(address, "ab") as (a, b):

        def fail_third(group: Group) -> Callable[[int], None]:
            def before(step: int) -> None:
                group.pg.fails = 6 <= step < 9

            return before

        together(lambda: a.train(13, fail_third(a)), lambda: b.train(13, fail_third(b)))
        for group in (a, b):
            first, second = columns(group.locals)
            assert first == [1, -1, -3, -11, -13, -15, -17, -19, -21, -11, -13, -15, -23]
            assert second == [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -35]
            assert group.manager.current_step() == 2 + 3


def test_sums_that_fail_restore_the_fragment_which_comes_again(address: str) -> None:
    check_refusals(address)


def check_join(address: str, timeout: timedelta = TIMEOUT) -> None:
    last_step = 40
    # The third one comes when the others train: the first quorum would wait for it.
    has_begun, has_come = threading.Event(), threading.Event()
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(groups(address, "ab", quorum_timeout=timeout))

        def train(group: Group) -> None:
            with group.training():
                while group.manager.current_step() < last_step:
                    group.inner_step()
                    if group.manager.current_step() == 6:
                        has_begun.set()
                        assert has_come.wait(DEADLINE_S)

        def join() -> Group:
            assert has_begun.wait(DEADLINE_S)
            (group,) = stack.enter_context(
                groups(address, "c", extra_steps=0, quorum_timeout=timeout)
            )
            has_come.set()
            train(group)
            return group

        *_, c = together(lambda: train(a), lambda: train(b), join)
        assert c is not None
        quorum = c.manager.last_quorum()
        assert quorum is not None
        assert quorum.replica_world_size == 3, "it was in before the others ended"
        states = [[bits(each.state_dict()) for each in g.algorithm._fragments] for g in (a, b, c)]
        assert states[0] == states[1] == states[2]
        assert {g.algorithm.inner_steps for g in (a, b, c)} == {0}


def test_a_group_that_joins_is_in_phase(address: str) -> None:
    check_join(address)


def reset_the_counter_at_the_launch(patch: pytest.MonkeyPatch) -> None:
    launch = DiLoCo._launch

    def faulty(self: DiLoCo, **options: Any) -> Any:
        self._count = 0
        return launch(self, **options)

    patch.setattr(DiLoCo, "_launch", faulty)


def store_the_backup_after_mixing(patch: pytest.MonkeyPatch) -> None:
    apply = _Fragment.apply

    def faulty(self: _Fragment) -> None:
        apply(self)
        self._weights.store()

    patch.setattr(_Fragment, "apply", faulty)


def choose_the_fragment_by_a_count_of_its_own(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, *, is_last_step: bool) -> Any:
        self._begin_sync()
        self._num_launched = getattr(self, "_num_launched", -1) + 1
        fragment = self._fragments[self._num_launched % len(self._fragments)]
        fragment.launch(frees_gradients=is_last_step)
        return fragment

    patch.setattr(DiLoCo, "_launch", faulty)


def restore_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Fragment, "restore", lambda self: self._averaging.drop_averages())


def heal_without_the_backup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgreedWeights, "load_state_dict", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (reset_the_counter_at_the_launch, lambda where: check_numbers(where, 1, 0.0)),
        (store_the_backup_after_mixing, lambda where: check_numbers(where, 0, 0.5)),
        (
            choose_the_fragment_by_a_count_of_its_own,
            lambda where: check_numbers(where, 0, 0.0, extra_steps=1),
        ),
        (restore_nothing, check_refusals),
        (heal_without_the_backup, lambda where: check_join(where, timedelta(seconds=5))),
    ],
)
def test_planted_faults_are_found(
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[str], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, GroupDiffers)):  # by the checks of states, if they are due
        check(address)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outer": 1}, "outer_optimizer.*one for each of the 2 fragments"),
        ({"sync_every": 1}, "sync_every.*multiple of the number of fragments"),
        ({"sync_every": 7}, "sync_every.*multiple of the number of fragments"),
        ({"fragment_sync_delay": 3}, "fragment_sync_delay.*an interval, which has 3"),
        ({"fragment_update_alpha": 1.5}, "fragment_update_alpha.*from 0 to 1"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb.*above 0"),
        ({"wrapped": True}, "optimizer.*plain torch optimizer"),
        ({"wrapped_outer": True}, "outer_optimizer.*plain torch optimizer"),
        ({"should_quantize": "int4"}, "should_quantize.*'int8', 'float8'"),
        ({"float64": True, "should_quantize": True}, "weight.*made in float32"),
        ({"twice": True}, "weight.*belongs to fragment 0"),
    ],
)
def test_wrong_arguments(address: str, change: dict[str, Any], words: str) -> None:
    with groups(address, "a") as (group,):
        num_outer = change.pop("outer", 2)
        inner: Any = group.inner
        if change.pop("wrapped", False):
            inner = Optimizer(group.manager, group.inner)
        parts, outer = list(group.parts), group.outer[:num_outer]
        if change.pop("twice", False):
            parts[1] = parts[0]
        if change.pop("wrapped_outer", False):
            outer[1] = Optimizer(group.manager, outer[1])  # type: ignore[call-overload]
        if change.pop("float64", False):
            group.parts.double()
        with pytest.raises(ConfigError, match=words):
            DiLoCo(
                group.manager,
                parts,
                inner,
                outer,
                **{"sync_every": 6, **change},
            )
        DiLoCo(group.manager, list(group.parts), group.inner, group.outer, 6)


def test_a_manager_with_an_asynchronous_quorum_is_refused(address: str) -> None:
    with make_manager(address, "a") as manager:
        part = OneWeight()
        inner, outer = (torch.optim.SGD(part.parameters(), lr=1.0) for _ in range(2))
        with pytest.raises(ConfigError, match=r"use_async_quorum.*has to be False"):
            DiLoCo(manager, [part], inner, outer, sync_every=3)


def test_an_outer_optimizer_of_another_fragment_is_refused(address: str) -> None:
    with groups(address, "a") as (group,):
        swapped = list(reversed(group.outer))
        with pytest.raises(ConfigError, match="outer optimizer 0 does not have it"):
            DiLoCo(group.manager, list(group.parts), group.inner, swapped, 6)


@pytest.mark.parametrize(
    ("change", "mine", "theirs"),
    [
        ({"fragment_update_alpha": 0.5}, r"alpha 0\b", r"alpha 0\.5"),
        ({"bucket_cap_mb": 1.5}, "buckets of 25 MiB", r"buckets of 1\.5 MiB"),
        ({"use_bucketization": False}, "buckets of 25 MiB", "no buckets"),
        ({"should_quantize": "float8"}, "not quantized", "quantized float8"),
        (
            {"should_quantize": "int8", "error_feedback": True},
            "not quantized",
            "quantized int8 with error feedback",
        ),
    ],
)
def test_groups_with_other_settings_are_refused(
    address: str, change: dict[str, Any], mine: str, theirs: str
) -> None:
    with groups(address, "ab", extra_steps=0, quorum_timeout=LONELY) as (a, b):
        b._options.update(change)
        with pytest.raises(RequestRefused, match=rf"{mine}.*{theirs}|{theirs}.*{mine}"):
            together(lambda: a.train(4), lambda: b.train(4))


def test_a_group_with_another_outer_optimizer_for_one_fragment_is_refused(address: str) -> None:
    with groups(address, "ab", extra_steps=0, quorum_timeout=LONELY) as (a, b):
        b.outer[1] = torch.optim.Adam(b.parts[1].parameters())  # type: ignore[call-overload]
        with pytest.raises(
            RequestRefused, match=r"outer SGD,.*outer SGD/Adam,|outer SGD/Adam,.*outer SGD,"
        ):
            together(lambda: a.train(4), lambda: b.train(4))


def test_two_names_of_one_number_format_are_the_same_setting(address: str) -> None:
    with groups(address, "ab", extra_steps=0) as (a, b):
        a._options["should_quantize"], b._options["should_quantize"] = True, "int8"
        together(lambda: a.train(4), lambda: b.train(4))
        assert a.manager.current_step() == b.manager.current_step() == 1


@pytest.mark.parametrize("votes", [False, True])
def test_an_average_is_not_applied_in_another_step(address: str, votes: bool) -> None:
    """The program has a step of its own while the average of an algorithm is under way."""
    with groups(address, "ab", extra_steps=0, fragment_sync_delay=1) as (a, b):

        def train(group: Group) -> None:
            def before(step: int) -> None:
                if step == 2:
                    group.manager.start_quorum()
                    group.manager.allreduce(torch.ones(1)).wait()
                    assert not votes or group.manager.should_commit()

            with pytest.raises(RequestRefused, match="so the average is not applied"):
                group.train(4, before)
            assert [each.weight.item() for each in group.parts] == [1, -5]
            assert group.agreed() == [1, 1]

        together(lambda: train(a), lambda: train(b))


def test_a_manager_serves_one_algorithm(address: str) -> None:
    with groups(address, "a") as (group,):
        local = LocalSGD(group.manager, group.parts, group.inner, 2)
        with pytest.raises(ConfigError, match=r"DiLoCo.*its manager serves another algorithm"):
            DiLoCo(group.manager, list(group.parts), group.inner, group.outer, 6)
        assert local.inner_steps == 0


def test_parameters_that_only_the_inner_optimizer_has_are_reported(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with groups(address, "ab", extra_steps=0) as (a, b):
        for group in (a, b):
            group.inner.add_param_group({"params": [torch.ones(4, requires_grad=True)]})
        with caplog.at_level(logging.WARNING, "torchft_svc"):
            together(lambda: a.train(7), lambda: b.train(7))
        words = "SGD trains 1 parameters (the first one's shape is (4,)) that are in none"
        assert caplog.text.count(words) == 2


def test_each_parameter_that_does_not_heal_is_reported(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with groups(address, "ab", extra_steps=0) as (a, b):
        for group in (a, b):
            part = group.parts[0]
            group.manager._registry._pieces.clear()
            group.manager.register_state_dict_fn("model", part.load_state_dict, part.state_dict)
        with caplog.at_level(logging.WARNING, "torchft_svc"):
            together(lambda: a.train(4), lambda: b.train(4))
        assert caplog.text.count("1 of 2 parameters of the model are not in the state") == 2


def test_one_outer_optimizer_updates_only_the_fragment_whose_turn_it_is(address: str) -> None:
    with groups(address, "ab") as (a, b):
        for group in (a, b):
            group.outer = torch.optim.SGD(group.parts.parameters(), lr=2.0)  # type: ignore[assignment]
        together(lambda: a.train(16), lambda: b.train(16))
        assert columns(a.locals) == list(EXPECTED[0, 0.0][:2])


def test_an_inner_optimizer_that_does_not_heal_is_reported(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with groups(address, "ab", extra_steps=0) as (a, b):
        for group in (a, b):
            group.inner = torch.optim.SGD(group.parts.parameters(), lr=1.0, momentum=0.1)
            group.manager._registry._pieces.clear()
            group.manager.register_state_dict_fn(
                "model", group.parts.load_state_dict, group.parts.state_dict
            )
        with caplog.at_level(logging.WARNING, "torchft_svc"):
            together(lambda: a.train(4), lambda: b.train(4))
        assert caplog.text.count("values of SGD are not in the state") == 2


def test_no_tensor_is_lost_between_buckets() -> None:
    """Sizes 6, 6, 6 with room for 10: each has a part of its own; none is left out."""
    megabyte = 1024 * 1024 // 4
    tensors = [torch.empty(6 * megabyte, device="meta") for _ in range(3)]
    assert plan_parts(tensors, 10.0) == [[0], [1], [2]]
    mixed = [torch.empty(2), torch.empty(2, dtype=torch.float64), torch.empty(3)]
    assert plan_parts(mixed, 10.0) == [[0, 2], [1]]
    assert plan_parts(mixed, None) == [[0], [1], [2]]


def test_all_groups_are_bitwise_equal_after_each_synchronization(address: str) -> None:
    """Real training, each group with data of its own; Nesterov momentum outside, AdamW inside."""
    seen: dict[str, list[Any]] = {}

    def train(name: str, seed: int) -> list[float]:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        parts = [model[0], model[2]]
        inner = torch.optim.AdamW(model.parameters(), lr=0.02)
        outer = [
            torch.optim.SGD(each.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for each in parts
        ]
        data = torch.Generator().manual_seed(seed)
        losses = []

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["inner"])

        manager = make_manager(
            address,
            name,
            use_async_quorum=False,
            state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
            load_state_dict=load,
        )
        with manager, DiLoCo(manager, parts, inner, outer, sync_every=8) as algorithm:
            for _ in range(80):
                inputs = torch.randn(16, 8, generator=data)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                inner.zero_grad()
                loss.backward()
                inner.step()
                losses.append(loss.item())
                if not algorithm.inner_steps:
                    states = [each.state_dict() for each in algorithm._fragments]
                    seen.setdefault(name, []).append(bits(states))
        return losses

    losses, _ = together(lambda: train("a", 1), lambda: train("b", 2))
    assert len(seen["a"]) == 20
    assert seen["a"] == seen["b"]
    assert sum(losses[-8:]) < sum(losses[:8]) / 3


@pytest.mark.parametrize("found", [torch.ones(1), torch.ones(3, 1), torch.ones(4, 3), 1.0])
def test_agreed_weights_of_another_shape_are_refused_whole(found: Any) -> None:
    """Some of them could be broadcast to the shape that is wanted."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weights = AgreedWeights(model, torch.device("cpu"), False)
    before = [value.clone() for value in weights.values]
    state: dict[str, Any] = {name: value + 1 for name, value in weights.state_dict().items()}
    with pytest.raises(ConfigError, match=r"1\.weight of .* here it has the shape \(3, 3\)"):
        weights.load_state_dict({**state, "1.weight": found})
    assert all(map(torch.equal, weights.values, before))
    weights.load_state_dict(state)
    assert all(map(torch.equal, weights.values, state.values()))
