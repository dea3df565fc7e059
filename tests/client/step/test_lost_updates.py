"""Tests loops that vote with `should_commit`, step their optimizers, and catch what these raise."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.training import (
    TIMEOUT,
    Trainer,
    assert_identical,
    bits,
    in_step,
    lighthouse,
    together,
    trainers,
)
from torch import nn
from torch.optim import optimizer as torch_optimizer

from torchft_svc.client import DistributedDataParallel, PGTransport, ProcessGroupGloo
from torchft_svc.client.step import updates
from torchft_svc.client.step.updates import NUM_USUAL
from torchft_svc.errors import RequestRefused


class ByHand(Trainer):
    """The loop of the public release; ``trouble`` raises in the update of a step."""

    def __init__(self, address: str, name: str, seed: int, **options: Any) -> None:
        self.trouble: Callable[[], object] = lambda: None
        self.clears_first = False
        super().__init__(address, name, seed, **options)

    def backward(self) -> None:
        if self.clears_first:
            self.inner.zero_grad()
        self.manager.start_quorum()
        if not self.clears_first:
            self.inner.zero_grad()
        self.loss().backward()

    def update(self) -> None:
        self.trouble()
        self.inner.step()

    def step(self) -> bool:
        self.backward()
        committed = False
        try:
            if self.manager.should_commit():
                self.update()
                committed = True
        except RuntimeError:
            pass  # and goes on with the next batch
        return committed

    def meets(self, num_groups: int) -> bool:
        """Train a step; return whether it was committed with ``num_groups`` groups."""
        committed = self.step()
        quorum = self.manager.last_quorum()
        return committed and quorum is not None and quorum.replica_world_size == num_groups


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as address:
        yield address


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[ByHand, ByHand]]:
    with (
        lighthouse(min_replicas=2) as address,
        ByHand(address, "a", 0, **options) as a,
        ByHand(address, "b", 1, **options) as b,
    ):
        yield a, b


def raises_inside(group: ByHand) -> Callable[[], object]:
    """Adam updates the first parameter, and then something is wrong with the second one."""

    def spoil() -> None:
        group.trouble = lambda: None
        weight = group.model.get_submodule("0").get_parameter("weight")
        with torch.no_grad():
            weight.add_(1.0)
        handle = group.inner.register_step_post_hook(lambda *_: fail())

        def fail() -> None:
            handle.remove()
            raise RuntimeError("out of memory")

    return spoil


def raises_before(group: ByHand) -> Callable[[], object]:
    """Something of the program between the vote and the optimizer."""

    def fail() -> None:
        group.trouble = lambda: None
        raise RuntimeError("cannot clip")

    return fail


def train(group: ByHand, until: int, at: int, trouble: Callable[[], object] | None) -> None:
    """Steps until ``until`` is committed, with ``trouble`` in the update after step ``at``."""
    is_over = trouble is None
    while group.manager.current_step() < until:
        if not is_over and group.manager.current_step() >= at:
            assert trouble is not None
            group.trouble, is_over = trouble, True
        group.step()


@pytest.mark.parametrize("clears_first", [False, True], ids=["", "gradients cleared"])
@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("raises", [raises_inside, raises_before])
def test_i3_an_update_that_raised_and_was_caught_is_healed(
    raises: Callable[[ByHand], Callable[[], object]],
    use_async_quorum: bool,
    clears_first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair(use_async_quorum=use_async_quorum) as (a, b):
        a.clears_first = b.clears_first = clears_first
        in_step(1, a, b)
        together(
            lambda: train(a, 2 + NUM_USUAL + 6, 2 + NUM_USUAL, raises(a)),
            lambda: train(b, 2 + NUM_USUAL + 6, 0, None),
        )
        in_step(a.manager.current_step() + 1, a, b)
        assert_identical([a, b])
    (warning,) = [each for each in caplog.messages if "was not applied: " in each]
    expected = {raises_inside: "an exception has ended Adam.step()"}
    assert expected.get(raises, "Adam.step() was not called after should_commit()") in warning


class InPlace(ByHand):
    """Heals over the process group into its own weights; the function that names them reads the
    state as a checkpoint does."""

    def __init__(self, address: str, name: str, seed: int) -> None:
        group = ProcessGroupGloo(TIMEOUT)
        self.heals_in_place: list[bool] = []
        super().__init__(
            address,
            name,
            seed,
            pg=group,
            checkpoint_transport=PGTransport(group, TIMEOUT, state_dict=self.whole_state),
            use_async_quorum=False,
            max_retries=4,
        )

    def whole_state(self) -> dict[str, Any]:
        with self.manager.consistent_state():
            return {"default": self.state_dict(), "torchft": self.manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        mine, theirs = self.model.state_dict(), state["model"]
        self.heals_in_place += [mine[key].data_ptr() == theirs[key].data_ptr() for key in mine]
        super().load_state_dict(state)


def test_i3_spoiled_weights_are_healed_in_place() -> None:
    with (
        lighthouse(min_replicas=2) as address,
        InPlace(address, "a", 0) as a,
        InPlace(address, "b", 1) as b,
    ):
        in_step(2, a, b)
        a.heals_in_place.clear()
        together(lambda: train(a, 6, 3, raises_inside(a)), lambda: train(b, 6, 0, None))
        in_step(a.manager.current_step() + 1, a, b)
        assert_identical([a, b])
        assert a.heals_in_place[:4] == [True] * 4


def test_a_group_that_is_alone_does_not_go_on_with_such_weights(address: str) -> None:
    with ByHand(address, "a", 0) as a:
        a.steps(2)
        a.trouble = raises_inside(a)
        assert not a.step()
        with pytest.raises(RequestRefused, match=r"step 3 .*Adam\.step\(\).*restart this worker"):
            a.manager.state_dict()
        with pytest.raises(RequestRefused, match=r"step 3 was not applied completely"):
            a.step()


def test_the_state_may_be_saved_from_a_hook_of_the_optimizer(address: str) -> None:
    with ByHand(address, "a", 0) as a:
        saved = []
        a.inner.register_step_post_hook(lambda *_: saved.append(a.manager.state_dict()["step"]))
        a.steps(2)
        assert saved == [1, 2]


class HooksFromElsewhere(torch.optim.SGD):
    """An optimizer of a torch that calls its hooks outside of the function around ``step``."""

    def step(this, closure: Any = None) -> None:  # type: ignore[override]  # noqa: N805
        call_hooks(torch_optimizer._global_optimizer_pre_hooks, this)
        raise RuntimeError("out of memory")

    step.hooked = True  # type: ignore[attr-defined]  # torch puts nothing around it


def call_hooks(hooks: dict[int, Any], which: torch.optim.Optimizer) -> None:
    for hook in hooks.values():
        hook(which, (), {})


def test_torch_runs_a_step_in_the_function_that_calls_its_hooks() -> None:
    """Otherwise no update that an exception has left can be found any more."""
    watch = updates.UpdateWatch(lambda _: True, lambda _: [])
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen: list[tuple[bool, object]] = []

    def look() -> float:
        seen.append((watch.is_under_way(), watch.find_failure()))
        return 0.0

    watch.open_window()
    optimizer.step(look)
    assert seen == [(True, None)]
    assert not watch.is_under_way()

    def fail() -> float:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert watch.end_window(1) == updates.LostUpdate(
        "an exception has ended SGD.step()", is_spoiled=True
    )


def test_a_step_that_cannot_be_followed_is_not_called_spoiled() -> None:
    watch = updates.UpdateWatch(lambda _: True, lambda _: [])
    optimizer = HooksFromElsewhere([torch.ones(1, requires_grad=True)], lr=0.1)
    watch.open_window()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert watch.find_failure() is None
    assert watch.end_window(1) is None


def test_an_update_that_is_left_out_does_not_count(address: str) -> None:
    """A group alone, so there is nothing to heal from: the step comes again."""
    with ByHand(address, "a", 0) as a:
        a.steps(NUM_USUAL)
        before = bits(a.state_dict())
        a.trouble = raises_before(a)
        assert not a.step()
        assert bits(a.state_dict()) == before
        a.backward()
        assert a.manager.current_step() == NUM_USUAL


def test_a_spoiled_update_that_is_reported_is_logged(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ByHand(address, "a", 0) as a:
        a.backward()
        assert a.manager.should_commit()
        a.manager.report_spoiled_update(RuntimeError("no room"))
        with pytest.raises(RequestRefused, match="step 1 was not applied completely"):
            a.step()
    (warning,) = [each for each in caplog.messages if "was reported" in each]
    assert "the update to step 1 was not applied: RuntimeError('no room') was reported" in warning


class Quiet:
    """Checks that all steps of a program count, and that none is reported as lost."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.INFO)

    def check(self, group: Trainer, num_commits: int) -> None:
        group.manager.start_quorum()  # judges the last update
        assert group.manager.current_step() == num_commits
        unwanted = ("was not applied", "left out")
        assert not [each for each in self._caplog.messages if any(u in each for u in unwanted)]


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Quiet:
    return Quiet(caplog)


def averaged(group: Trainer, *optimizers: torch.optim.Optimizer) -> None:
    """One committed step, in which these optimizers are stepped."""
    group.manager.start_quorum()
    for each in optimizers:
        each.zero_grad()
    group.loss().backward()
    assert group.manager.should_commit()
    for each in optimizers:
        each.step()


@pytest.mark.parametrize("period", [2, 3, 5])
@pytest.mark.parametrize("first", [0, 1])
def test_an_optimizer_that_steps_every_so_often(
    address: str, quiet: Quiet, period: int, first: int
) -> None:
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        for step in range(4 * period):
            averaged(a, *([a.inner] if step % period == first else []))
        quiet.check(a, 4 * period)


@pytest.mark.parametrize("num_first", [1, 2, 5])
def test_optimizers_that_take_turns(address: str, quiet: Quiet, num_first: int) -> None:
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        first = torch.optim.SGD(a.model.get_submodule("0").parameters(), lr=0.1)
        last = torch.optim.SGD(a.model.get_submodule("2").parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(num_first):
                averaged(a, first)
            averaged(a, last)
        quiet.check(a, 3 * (num_first + 1))


@pytest.mark.parametrize("num_alone", [1, 4])
def test_an_optimizer_that_joins_in_every_so_often(
    address: str, quiet: Quiet, num_alone: int
) -> None:
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        first = torch.optim.SGD(a.model.get_submodule("0").parameters(), lr=0.1)
        last = torch.optim.SGD(a.model.get_submodule("2").parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(num_alone):
                averaged(a, first)
            averaged(a, first, last)
        quiet.check(a, 3 * (num_alone + 1))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("clears_first", [True, False])
def test_a_scaler_that_leaves_out_infinite_gradients(
    address: str, quiet: Quiet, set_to_none: bool, clears_first: bool
) -> None:
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        num_updates = 0
        a.inner.register_step_post_hook(lambda *_: updates.append(1))
        updates: list[int] = []
        for step in range(2 * NUM_USUAL + 3):
            if clears_first:
                a.inner.zero_grad(set_to_none=set_to_none)
            a.manager.start_quorum()
            if not clears_first:
                a.inner.zero_grad(set_to_none=set_to_none)
            scaled = scaler.scale(a.loss())
            (scaled * float("inf") if step in (4, 8) else scaled).backward()
            assert a.manager.should_commit()
            scaler.step(a.inner)
            scaler.update()
        num_updates = len(updates)
        assert num_updates == 2 * NUM_USUAL + 1
        quiet.check(a, 2 * NUM_USUAL + 3)


def test_a_program_that_leaves_updates_out_by_design_is_held_up_once(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All groups leave out an update of a large norm: none is ahead, the step does not count."""
    caplog.set_level(logging.INFO)
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        for num in range(4 * NUM_USUAL):
            averaged(a, *([] if num in (4, 8, 9) else [a.inner]))
        a.manager.start_quorum()
        assert a.manager.current_step() == 4 * NUM_USUAL - 1
    assert len([each for each in caplog.messages if "was not applied" in each]) == 1
    assert len([each for each in caplog.messages if "the program's way" in each]) == 1


def skips_when_all_agree(group: ByHand, skips: bool, clears_first: bool) -> bool:
    """One step of a loop that votes without a backward pass where a group has a bad batch."""
    if clears_first:
        group.inner.zero_grad()
    group.manager.start_quorum()
    loss = group.loss()
    bad = torch.tensor(float(skips))
    group.manager.allreduce(bad).wait()
    if bad > 0:
        return group.manager.should_commit()
    if not clears_first:
        group.inner.zero_grad()
    loss.backward()
    committed = group.manager.should_commit()
    if committed:
        group.inner.step()
    return committed


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_step_without_a_backward_pass_has_no_update_to_lose(
    quiet: Quiet, num_groups: int, clears_first: bool
) -> None:
    """What the step before has left, in the buckets or in ``grad``, is not for this step."""
    with lighthouse(min_replicas=num_groups) as address, contextlib.ExitStack() as stack:
        groups = [stack.enter_context(ByHand(address, f"g{n}", n)) for n in range(num_groups)]
        in_step(1, *groups)
        before = groups[0].manager.current_step()
        for num in range(NUM_USUAL + 2):
            bad = groups[0] if num == NUM_USUAL else None
            committed = together(
                *(
                    lambda a=a, bad=bad: skips_when_all_agree(a, a is bad, clears_first)
                    for a in groups
                )
            )
            assert committed == [True] * num_groups
        together(*(lambda a=a: quiet.check(a, before + NUM_USUAL + 2) for a in groups))
        assert_identical(groups)


def fails_to_step(parameter: nn.Parameter) -> None:
    """An optimizer of something else raises in its step, and the program goes on."""
    inner = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    inner.register_step_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        inner.step()


def test_optimizers_of_something_else_are_ignored(address: str, quiet: Quiet) -> None:
    with (
        Trainer(address, "a", 0, use_async_quorum=False) as a,
        Trainer(address, "b", 1, job_id="other", use_async_quorum=False) as b,
    ):
        critic = next(b.model.parameters())
        for num in range(2 * NUM_USUAL):
            averaged(a, a.inner)
            fails_to_step(nn.Parameter(torch.zeros(2)))  # of an evaluation
            fails_to_step(critic)  # the parameters of another manager
            if num < NUM_USUAL:
                averaged(b, b.inner)
        quiet.check(a, 2 * NUM_USUAL)


def test_optimizers_on_other_threads_are_ignored(address: str, quiet: Quiet) -> None:
    """Another thread may update the same parameters, as an evaluation of an adapted copy may do."""
    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        for _ in range(NUM_USUAL + 2):
            averaged(a, a.inner)
            for parameter in (nn.Parameter(torch.zeros(2)), next(a.model.parameters())):
                thread = threading.Thread(target=fails_to_step, args=(parameter,))
                thread.start()
                thread.join()
        quiet.check(a, NUM_USUAL + 2)


def test_an_optimizer_whose_step_calls_that_of_its_base_class(address: str, quiet: Quiet) -> None:
    class Counting(torch.optim.SGD):
        num = 0

        def step(self, closure: Any = None) -> Any:
            self.num += 1
            return super().step(closure)

    with Trainer(address, "a", 0, use_async_quorum=False) as a:
        optimizer = Counting(a.model.parameters(), lr=0.1)
        for _ in range(NUM_USUAL + 2):
            averaged(a, optimizer)
        quiet.check(a, NUM_USUAL + 2)
        assert optimizer.num == NUM_USUAL + 2


def test_parameters_that_are_in_the_state_alone_are_known(address: str) -> None:
    """A loop that averages its gradients itself: no wrapper knows its parameters."""
    weight = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1)
    states = {"state_dict": lambda: {"weight": weight}, "load_state_dict": lambda _: None}
    with ByHand(address, "a", 0, **states) as a:
        a.manager.start_quorum()
        weight.grad = torch.ones(3)
        a.manager.allreduce(weight.grad).wait()
        assert a.manager.should_commit()
        sgd.register_step_post_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            sgd.step()
        with pytest.raises(RequestRefused, match="an exception has ended SGD"):
            a.manager.state_dict()


def test_a_second_wrapper_s_optimizer_that_is_not_reached_is_found(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first one is stepped, and then something raises."""
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as groups:
        critics = [nn.Linear(4, 1) for _ in groups]
        optimizers = []
        for group, critic in zip(groups, critics, strict=True):
            sgd = torch.optim.SGD(critic.parameters(), lr=0.1)
            group.manager.register_state_dict_fn(
                "critic", critic.load_state_dict, critic.state_dict
            )
            optimizers.append([group.inner, sgd])
        wrapped = [
            DistributedDataParallel(group.manager, critic)
            for group, critic in zip(groups, critics, strict=True)
        ]

        def run(index: int, fails_at: int) -> None:
            group = groups[index]
            while group.manager.current_step() < NUM_USUAL + 5:
                group.manager.start_quorum()
                for each in optimizers[index]:
                    each.zero_grad()
                inputs = torch.randn(3, 4, generator=group.data)
                (group.parallel(inputs).square().mean() + wrapped[index](inputs).mean()).backward()
                with contextlib.suppress(ZeroDivisionError):
                    if group.manager.should_commit():
                        optimizers[index][0].step()
                        if group.manager.current_step() == fails_at:
                            fails_at = -1
                            raise ZeroDivisionError
                        optimizers[index][1].step()

        together(lambda: run(0, NUM_USUAL + 2), lambda: run(1, -1))
        assert groups[0].manager.state_dict() == groups[1].manager.state_dict()
        assert bits(groups[0].state_dict()) == bits(groups[1].state_dict())
        assert bits(critics[0].state_dict()) == bits(critics[1].state_dict())
    assert [each for each in caplog.messages if "SGD.step() was not called after" in each]
