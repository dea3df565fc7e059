"""Tests with whole groups that a difference between their states is found, named and mended.

Each fault is planted behind the back of what else would refuse it, so only the check can find it.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import logging
import os
import re
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.running import eventually
from support.training import (
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    make_manager,
    together,
    trainers,
)
from torch import nn

from tools.demo.torch_wrapper import torch_data_parallel
from torchft_svc.client import DistributedDataParallel, Optimizer, WorldSizeMode
from torchft_svc.coordination import LighthouseClient
from torchft_svc.core.quorum.lighthouse.overview import JobStatus
from torchft_svc.errors import ConfigError, RequestRefused, StateDiverged

EVERY = 4
MAX_STEPS = 3 * EVERY


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse(min_replicas=2) as address:
        yield address


@pytest.fixture
def address_of_three() -> Iterator[str]:
    with lighthouse(min_replicas=3) as address:
        yield address


def find(*groups: Trainer | PlainTrainer) -> StateDiverged:
    """Train until a check finds a difference; all groups must find the same, in one step."""
    for _ in range(MAX_STEPS):
        results = together(*(group.step for group in groups))
        errors = [group.manager.errored() for group in groups]
        if not all(results):
            assert not any(results)
            first = errors[0]
            assert isinstance(first, StateDiverged), first
            for error in errors:
                assert isinstance(error, StateDiverged), error
                assert (error.groups, error.step) == (first.groups, first.step)
            return first
    raise AssertionError(f"nothing was found in {MAX_STEPS} steps")


def train(num_steps: int, *groups: Trainer | PlainTrainer) -> None:
    for _ in range(num_steps):
        assert all(together(*(group.step for group in groups)))


# -- what is found, in the third of three groups ---------------------------------------------------


def change_lr(group: Trainer) -> None:
    """Change the rate as a scheduler does whose milestones a heal has destroyed."""
    scheduler = torch.optim.lr_scheduler.MultiStepLR(group.inner, [10_000])
    scheduler.milestones = Counter({0: 1, 1: 1})
    scheduler.step()


def change_setting(group: Trainer) -> None:
    group.inner.param_groups[0]["betas"] = (0.9, 0.99)


def change_bit(group: Trainer) -> None:
    words = group.model[2].bias.detach().view(torch.int32)
    words[1] ^= 1 << 12  # the last bits may be lost when the next updates are rounded


def own_other_objects(group: Trainer) -> None:
    parameters = group.inner.param_groups[0]["params"]
    parameters[1] = nn.Parameter(parameters[1].detach().clone())


def assign_parameters(group: Trainer) -> None:
    """Assign new ones, as ``load_state_dict(assign=True)`` does; the optimizer keeps the old."""
    layer = group.model[0]
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    accept_new_parameters(group)


def replace_parameter(group: Trainer) -> None:
    group.model[2].weight = nn.Parameter(group.model[2].weight.detach().clone())
    accept_new_parameters(group)


def accept_new_parameters(group: Trainer) -> None:
    """Take out what refuses them before each vote, and so before the comparison (rule T13)."""
    group.parallel._reducer.unsummed = list  # type: ignore[method-assign]


def add_optimizer(group: Trainer) -> None:
    first = list(group.model.parameters())[:1]
    group.other = Optimizer(group.manager, torch.optim.SGD(first, lr=0.0))  # only known while held


FAULTS: dict[str, tuple[Callable[[Trainer], None], str]] = {
    "a learning rate": (
        change_lr,
        r"the learning rate of optimizer 0 \(Adam\), group 0 is 0.001 in group c and 0.01 in",
    ),
    "a setting in a tuple": (change_setting, r"'betas\[1\]' of .* is 0.99 in group c and 0.999 in"),
    "one bit": (change_bit, r"the values of parameter '2.bias' in group c are not those of group"),
    "an optimizer of other objects": (
        own_other_objects,
        r"optimizer 0 \(Adam\), group 0 updates other parameters in group c than",
    ),
    "assigned parameters": (
        assign_parameters,
        r"parameter '0.weight' and 1 more were replaced .* in group c ",
    ),
    "a replaced parameter": (replace_parameter, r"parameter '2.weight' was replaced .* group c "),
    "another optimizer": (add_optimizer, r"the optimizers or the parameters that they update"),
}
# A heal brings values and settings, not objects.
CURED = ("a learning rate", "a setting in a tuple", "one bit")


@pytest.mark.parametrize("fault", CURED)
def test_the_minority_is_found_and_heals(address_of_three: str, fault: str) -> None:
    plant, words = FAULTS[fault]
    with trainers(address_of_three, 3, check_every=EVERY) as groups:
        a, b, c = groups
        train(EVERY + 1, *groups)
        plant(c)
        found = find(*groups)
        assert (found.groups, found.step, found.last_equal) == (("c",), 2 * EVERY, EVERY)
        text = str(found)
        assert text.startswith(f"in the check of step {2 * EVERY}, ")
        assert text.endswith(f"(they were equal in the check of step {EVERY})")
        assert re.search(words, text), text
        with pytest.raises(RequestRefused, match="not that of the others"):
            c.manager.state_dict()
        assert a.manager.state_dict() == b.manager.state_dict(), "these are as they were"
        train(EVERY, *groups)
        assert_identical(groups)
        assert c.inner.param_groups[0]["lr"] == 0.01


def end_of(group: Trainer, *others: Trainer) -> str:
    """Train until ``group`` ends with an error, while the others go on; its sentence."""
    ended: list[str] = []

    def step() -> bool:
        try:
            return group.step()
        except RequestRefused as error:
            group.manager.shutdown()
            ended.append(str(error))
            return False

    for _ in range(3 * MAX_STEPS):
        together(step, *(other.step for other in others))
        if ended:
            return ended[0]
    raise AssertionError("it did not end")


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - set(CURED)))
def test_a_group_that_healing_does_not_cure_ends(address: str, fault: str) -> None:
    plant, words = FAULTS[fault]
    with trainers(address, 3, check_every=EVERY) as (a, b, c):
        in_step(1, a, b, c)
        plant(c)
        found = find(a, b, c)
        assert found.groups == ("c",)
        assert re.search(words, str(found)), str(found)
        last_words = end_of(c, a, b)
        assert (
            "3 checks in a row found that this group's state is not that of the others"
            in last_words
        )
        in_step(a.manager.current_step() + EVERY + 1, a, b)
        assert_identical([a, b])


def test_an_update_that_was_not_applied_is_found(address_of_three: str) -> None:
    """A loop may continue after an exception in ``optimizer.step()``."""
    with trainers(address_of_three, 3, check_every=EVERY) as groups:
        c = groups[2]
        train(EVERY + 1, *groups)
        before = copy.deepcopy(c.state_dict())
        train(1, *groups)
        c.load_state_dict(before)
        found = find(*groups)
        assert found.groups == ("c",)
        assert "the values of parameter '0.weight' and 3 more in group c" in str(found)
        train(EVERY, *groups)
        assert_identical(groups)


class OrderedTrainer(Trainer):
    """The same model from layers of equal shapes, which are in another order in each group."""

    def __init__(self, address: str, name: str, layers: str, **options: Any) -> None:
        super().__init__(address, name, ord(name), **options)
        self.model = nn.Sequential(OrderedDict((each, nn.Linear(4, 4)) for each in layers))
        self.inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer.optims[0] = self.optimizer.optim = self.inner
        self.manager._registry._optimizers.clear()
        self.manager.register_optimizer(self.inner)
        self.parallel = DistributedDataParallel(self.manager, self.model)
        self.parallel._reducer.layout = "one without names"

    def loss(self) -> torch.Tensor:
        return self.parallel(torch.randn(3, 4, generator=self.data)).square().mean()


def test_parameters_in_another_order_are_found(address: str) -> None:
    a = OrderedTrainer(address, "a", "xy", check_every=EVERY)
    b = OrderedTrainer(address, "b", "yx", check_every=EVERY)
    with a, b:
        found = find(a, b)
        assert (found.groups, found.step, found.last_equal) == (("b",), 0, None)
        words = r"names, order, shapes or types of the parameters of group b are not those of "
        words += r"group a, from parameter 'x.weight' on \(they were not compared before\)"
        assert re.search(words, str(found)), str(found)


def update_in_pass(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_in_backward_hooks_is_found(address: str) -> None:
    """Each group trains alone, by writes that torch does not count."""
    with trainers(address, 2, check_every=EVERY) as (a, b):
        train(1, a, b)
        for group in (a, b):
            for parameter in group.model.parameters():
                parameter.register_post_accumulate_grad_hook(update_in_pass)
        found = find(a, b)
        assert "the values of parameter '0.weight' and 3 more in group b" in str(found)
        assert "3 checks in a row" in end_of(b, a)


class PlainTrainer:
    """The loop of programs that step a bare optimizer; torch's wrapper averages, or ours."""

    def __init__(self, address: str, name: str, seed: int, *, by_torch: bool) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 2)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.data = torch.Generator().manual_seed(seed)
        self.manager = make_manager(address, name, check_every=EVERY)
        self.manager.set_state_dict_fns(self.load_state_dict, self.state_dict)
        wrap = torch_data_parallel if by_torch else DistributedDataParallel
        self.parallel = wrap(self.manager, self.model)
        if by_torch:
            self.manager.register_optimizer(self.inner)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def step(self) -> bool:
        self.manager.start_quorum()
        self.inner.zero_grad()
        self.parallel(torch.randn(3, 4, generator=self.data)).square().mean().backward()
        committed = self.manager.should_commit()
        if committed:
            self.inner.step()
        return committed


@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch's wrapper"])
@pytest.mark.parametrize(
    ("setting", "words"),
    [(True, "the learning rate of optimizer 0 (SGD), group 0 is 0.5"), (False, "the values of")],
    ids=["a setting", "a value"],
)
def test_programs_with_a_bare_optimizer_are_compared(
    address: str, setting: bool, words: str, by_torch: bool
) -> None:
    pair = together(
        lambda: PlainTrainer(address, "a", 0, by_torch=by_torch),
        lambda: PlainTrainer(address, "b", 1, by_torch=by_torch),
    )
    try:
        a, b = pair
        train(EVERY + 1, a, b)
        if setting:
            b.inner.param_groups[0]["lr"] = 0.5
        else:
            with torch.no_grad():
                b.model.weight[1, 2] += 1
        found = find(a, b)
        assert (found.groups, found.step, found.last_equal) == (("b",), 2 * EVERY, EVERY)
        assert words in str(found)
        train(EVERY, a, b)
        assert bits(a.state_dict()) == bits(b.state_dict())
    finally:
        for each in pair:
            each.manager.shutdown()


def test_weights_that_were_never_made_equal_are_found(address: str) -> None:
    """Groups were to begin alike (``init_sync=False``), and do not."""
    with trainers(address, 2, check_every=EVERY, init_sync=False) as (a, b):
        found = find(a, b)
        assert (found.groups, found.step) == (("b",), 1), "at step 0 no group heals"
        train(EVERY, a, b)
        assert_identical([a, b])


# -- who is blamed ---------------------------------------------------------------------------------


def test_of_two_groups_the_one_that_joined_last_heals() -> None:
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        first = stack.enter_context(Trainer(address, "b", 0, check_every=EVERY))
        first.until(3)
        second = stack.enter_context(Trainer(address, "a", 1, check_every=EVERY))
        in_step(5, first, second)
        first.inner.param_groups[0]["lr"] = 0.5
        found = find(first, second)
        assert found.groups == ("a",)
        assert "is 0.01 in group a and 0.5 in group b" in str(found)
        in_step(found.step + 2, first, second)
        assert_identical([first, second])
        assert second.inner.param_groups[0]["lr"] == 0.5


def test_a_check_while_all_others_heal_has_compared_nothing() -> None:
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        a = stack.enter_context(Trainer(address, "a", 0, check_every=10_000))
        a.until(3)
        b = stack.enter_context(Trainer(address, "b", 1, check_every=10_000))
        in_step(4, a, b)
        change_bit(b)
        found = find(a, b)
        assert (found.groups, found.last_equal) == (("b",), None), "b has healed in the step before"
        assert str(found).endswith("(they were not compared before)")


def test_a_spare_is_compared_too(address_of_three: str) -> None:
    options = {"min_replica_size": 2, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}
    with trainers(address_of_three, 3, check_every=EVERY, **options) as groups:
        train(EVERY, *groups)
        change_bit(groups[2])
        assert find(*groups).groups == ("c",)
        train(EVERY, *groups)
        assert not groups[2].manager.is_participating()
        assert_identical(groups)


@pytest.mark.parametrize("is_async", [True, False], ids=["heals in a step", "heals before a step"])
def test_a_group_that_healed_is_compared_at_once(is_async: bool) -> None:
    """The source sends an optimizer's state that it took once: one update later that shows."""
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        options = {"check_every": 10_000, "use_async_quorum": is_async}
        a = stack.enter_context(Trainer(address, "a", 0, **options))
        a.until(1)
        stale = copy.deepcopy(a.inner.state_dict())
        a.state_dict = lambda: {"model": a.model.state_dict(), "optimizer": stale}  # type: ignore[method-assign]
        a.manager._registry._pieces["default"] = dataclasses.replace(
            a.manager._registry._pieces["default"], save=a.state_dict
        )
        a.until(6)
        b = stack.enter_context(Trainer(address, "b", 1, **options))
        found, last_words = until_ended(b, a)
        assert found.groups == ("b",)
        assert "the values of parameter" in str(found)
        assert "3 checks in a row" in last_words
        a.until(a.manager.current_step() + 2)


class ForgetfulTrainer(Trainer):
    """A trainer whose state has the scheduler, but not the optimizer with the changed rate."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        super().__init__(address, name, seed, **options)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.inner, [3])

    def state_dict(self) -> dict[str, Any]:
        scheduler = getattr(self, "scheduler", None)  # asked for once before it is there
        saved = {} if scheduler is None else scheduler.state_dict()
        return {"model": self.model.state_dict(), "scheduler": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])

    def step(self) -> bool:
        committed = super().step()
        if committed:
            self.scheduler.step()
        return committed


def test_a_state_without_the_optimizer_is_found() -> None:
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        a = stack.enter_context(ForgetfulTrainer(address, "a", 0))
        a.until(6)
        b = stack.enter_context(ForgetfulTrainer(address, "b", 1))
        found, last_words = until_ended(b, a)
        assert found.groups == ("b",)
        assert (
            "the learning rate of optimizer 0 (Adam), group 0 is 0.01 in group b and 0.001"
            in str(found)
        )
        assert "3 checks in a row" in last_words


def until_ended(group: Trainer, other: Trainer) -> tuple[StateDiverged, str]:
    """Train, each on its own, until ``group`` ends: the first difference, and its last words."""
    found: list[StateDiverged] = []
    last_words: list[str] = []

    def train_group() -> None:
        while not last_words:
            try:
                group.step()
            except RequestRefused as error:
                last_words.append(str(error))
                group.manager.shutdown()
            latched = group.manager.errored()
            found.extend([latched] if isinstance(latched, StateDiverged) else [])

    def train_other() -> None:
        while not last_words:
            other.step()

    together(train_group, train_other)
    return found[0], last_words[0]


# -- policies --------------------------------------------------------------------------------------


def test_a_difference_may_only_be_logged(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with trainers(address, 2, check_every=2, on_difference="warn") as (a, b):
        train(3, a, b)
        b.inner.param_groups[0]["weight_decay"] = 0.5
        with caplog.at_level(logging.WARNING):
            train(4, a, b)
        messages = [each.getMessage() for each in caplog.records]
        lines = [each for each in messages if "in the check" in each]
        settings = [each for each in lines if "'weight_decay' of" in each]
        assert len(settings) == 2, "once in each group"
        assert b.inner.param_groups[0]["weight_decay"] == 0.5

        eventually(lambda: status_of(address).num_differences >= 2, 10)
        assert status_of(address).last_difference.startswith("in the check of step ")


def status_of(address: str) -> JobStatus:
    with LighthouseClient(address, timedelta(seconds=5)) as client:
        (job,) = client.status()
        return job


def test_a_difference_may_end_all_groups(address: str) -> None:
    with trainers(address, 2, check_every=EVERY, on_difference="stop") as (a, b):
        train(EVERY, a, b)
        b.inner.param_groups[0]["lr"] = 0.5

        def ends(group: Trainer) -> StateDiverged:
            before = copy.deepcopy(group.model.state_dict())
            with pytest.raises(StateDiverged, match=r"the learning rate of .* is 0\.5 in group b"):
                group.steps(1)
            assert bits(group.model.state_dict()) == bits(before), "I6"
            return group.manager.errored()  # type: ignore[return-value]

        found = together(lambda: ends(a), lambda: ends(b))
        assert [(each.groups, each.step, each.last_equal) for each in found] == [
            (("b",), EVERY, 2)
        ] * 2
        together(a.manager.shutdown, b.manager.shutdown)
        job = status_of(address)
        assert job.num_differences == 1, "also of a job that ends because of it"
        assert "the learning rate" in job.last_difference


def test_no_check_without_an_interval(address: str) -> None:
    with trainers(address, 2, check_every=0) as (a, b):
        train(1, a, b)
        b.inner.param_groups[0]["lr"] = 0.5
        train(MAX_STEPS, a, b)
        assert bits(a.state_dict()) != bits(b.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [({"check_every": 8}, "check_every"), ({"on_difference": "warn"}, "on_difference")],
    ids=["interval", "policy"],
)
def test_groups_with_other_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with lighthouse(min_replicas=1) as address, Trainer(address, "a", 0, check_every=4) as a:
        a.until(1)
        with (
            Trainer(address, "b", 1, **{"check_every": 4, **options}) as b,
            pytest.raises(RequestRefused, match=words),
        ):
            together(a.step, b.step)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"check_every": -1}, "0 .never. or more"), ({"on_difference": "heel"}, "heal, warn or stop")],
)
def test_wrong_settings_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_manager("127.0.0.1:1", "a", **options)


# -- where no file can be opened -------------------------------------------------------------------


@pytest.fixture
def end_files(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make this process find that it can open no more files; its connections stay as they are."""
    open_file = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if path == os.devnull:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, *rest, **named)

    return lambda: monkeypatch.setattr(os, "open", refuse)


def test_a_state_that_differs_is_lost_also_where_no_file_can_be_opened(
    address: str, end_files: Callable[[], None]
) -> None:
    with trainers(address, 2, check_every=EVERY) as (a, b):
        train(EVERY + 1, a, b)
        change_bit(b)
        train(2 * EVERY - a.manager.current_step(), a, b)
        end_files()

        def ends(group: Trainer) -> None:
            with pytest.raises(ConfigError, match="too many open files"):
                group.step()

        together(lambda: ends(a), lambda: ends(b))
        assert isinstance(a.manager.errored(), StateDiverged)
        assert a.manager.state_dict()["step"] == 2 * EVERY
        with pytest.raises(RequestRefused, match="not that of the others"):
            b.manager.state_dict()


def test_a_step_that_was_given_up_is_left_also_where_no_file_can_be_opened(
    address: str, end_files: Callable[[], None]
) -> None:
    with trainers(address, 2, check_every=0) as (a, b):
        train(2, a, b)
        a.manager.start_quorum()
        end_files()

        def gives_up() -> bool:
            with pytest.raises(ConfigError, match="too many open files"):
                a.manager.start_quorum()
            return a.manager._stepper._deps.pg.errored() is not None

        def waits() -> bool:
            with pytest.raises(ConfigError, match="too many open files"):
                b.step()
            return True

        assert together(gives_up, waits) == [True, True], "so nobody waits for its sums"


# -- what is no difference -------------------------------------------------------------------------


class NoisyTrainer(Trainer):
    """A trainer with buffers, random numbers and data of its own."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        super().__init__(address, name, seed, **options)
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)]
        self.model = nn.Sequential(*layers)
        self.model[3].bias.requires_grad_(False)
        self.inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.parallel = DistributedDataParallel(self.manager, self.model)
        self.optimizer = Optimizer(self.manager, self.inner)
        self.noise = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(self.inner, 5)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scheduler": self.noise.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.noise.load_state_dict(state["scheduler"])

    def step(self) -> bool:
        committed = super().step()
        if committed:
            self.noise.step()
        return committed


def test_what_differs_by_design_is_no_difference() -> None:
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        options = {"check_every": 1}
        a = stack.enter_context(NoisyTrainer(address, "a", 0, **options))
        a.until(4)
        b = stack.enter_context(NoisyTrainer(address, "b", 1, **options))
        in_step(8, a, b)
        for _ in range(8):
            assert together(a.step, b.step) == [True, True]
            assert [a.manager.errored(), b.manager.errored()] == [None, None]
        assert bits(a.model[1].running_mean) != bits(b.model[1].running_mean)
        assert bits(list(a.model.parameters())) == bits(list(b.model.parameters()))


class StagedTrainer(Trainer):
    """An optimizer of the first layer from step 2 on, and one of the last layer from step 4 on."""

    layer: nn.Module | None = None

    def train_only(self, layer: nn.Module) -> None:
        self.layer = layer
        self.inner = torch.optim.Adam(layer.parameters(), lr=0.01)
        self.optimizer = Optimizer(self.manager, self.inner)

    def step(self) -> bool:
        self.manager.start_quorum()
        step = self.manager.current_step()
        layer = self.model[0] if step < 4 else self.model[2]
        if step >= 2 and layer is not self.layer:
            self.train_only(layer)
        return super().step()


def test_an_optimizer_that_the_program_has_replaced_is_not_compared() -> None:
    """A group that joins makes the last one alone."""
    with lighthouse(min_replicas=1) as address, ExitStack() as stack:
        options = {"check_every": 1, "use_async_quorum": False}
        a = stack.enter_context(StagedTrainer(address, "a", 0, **options))
        a.until(3)
        replaced = weakref.ref(a.inner)
        a.until(5)
        b = stack.enter_context(StagedTrainer(address, "b", 1, **options))
        b.train_only(b.model[2])
        in_step(8, a, b)
        assert_identical([a, b])
        assert replaced() is None, "the manager keeps it alive"


def test_a_check_ends_no_term(address: str) -> None:
    with trainers(address, 2, check_every=1) as (a, b):
        train(3, a, b)
        quorum_id = a.manager.last_quorum().quorum_id  # type: ignore[union-attr]
        for _ in range(6):
            train(1, a, b)
            assert a.manager._worker.round.keeps_quorum
            assert b.manager._worker.round.keeps_quorum
        assert a.manager.last_quorum().quorum_id == quorum_id  # type: ignore[union-attr]


def test_an_error_in_a_step_with_a_check_costs_that_step_only(address: str) -> None:
    with trainers(address, 2, check_every=1) as (a, b):
        train(4, a, b)

        def fails() -> bool:
            b.backward()
            b.manager.report_error(RuntimeError("made up"))
            return b.optimizer.step()

        assert together(a.step, fails) == [False, False]
        assert not isinstance(a.manager.errored(), StateDiverged)
        in_step(6, a, b)
        assert_identical([a, b])


def test_nothing_is_compared_where_no_model_is_wrapped(address: str) -> None:
    """A program may average its weights from time to time instead."""
    managers = [make_manager(address, name, init_sync=False, check_every=1) for name in "ab"]
    for manager in managers:
        manager.set_state_dict_fns(lambda state: None, lambda: {"nothing": 0})

    def step(index: int) -> bool:
        manager = managers[index]
        manager.start_quorum()
        manager.allreduce(torch.full((3,), float(index))).wait()
        assert manager._sums.collectives._num_launched == 1
        return manager.should_commit()

    try:
        for _ in range(4):
            assert together(lambda: step(0), lambda: step(1)) == [True, True]
    finally:
        for manager in managers:
            manager.shutdown()
