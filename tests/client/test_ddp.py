"""Tests that gradients are averaged as torch's own DDP would, and what it does not do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.bounds import check
from support.training import TIMEOUT, lighthouse, make_manager, together
from torch import nn
from torch.utils.checkpoint import checkpoint

from tools.demo.torch_wrapper import torch_data_parallel
from torchft_svc.client import DistributedDataParallel
from torchft_svc.errors import RequestRefused


class Group:
    """A manager, a model, and its parallel wrapper; every group begins with the same weights."""

    def __init__(self, address: str, name: str, timeout: timedelta = TIMEOUT) -> None:
        self.manager = make_manager(address, name, init_sync=False, timeout=timeout)

    def wrap(self, build: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(7)
        self.model = build()
        self.parallel = DistributedDataParallel(self.manager, self.model, **options)

    def run(self, *inputs: torch.Tensor, sync: bool = True) -> None:
        """One forward and backward pass."""
        if sync:
            self.parallel(*inputs).sum().backward()
            return
        with self.parallel.no_sync():
            self.parallel(*inputs).sum().backward()

    def votes(self, batch: torch.Tensor) -> bool:
        """A pass over ``batch``, and whether its step is committed."""
        self.run(batch)
        return self.manager.should_commit()

    def grads(self) -> list[torch.Tensor | None]:
        return [
            None if p.grad is None else p.grad.detach().clone() for p in self.model.parameters()
        ]


@pytest.fixture
def make() -> Iterator[Callable[..., list[Group]]]:
    with lighthouse(min_replicas=2) as address, contextlib.ExitStack() as stack:

        def make(
            build: Callable[[], nn.Module], timeout: timedelta = TIMEOUT, **options: Any
        ) -> list[Group]:
            stack.close()  # another attempt's
            groups = [Group(address, name, timeout) for name in "ab"]
            for group in groups:
                stack.enter_context(group.manager)
                group.wrap(build, **options)
            together(*(group.manager.start_quorum for group in groups))
            together(*(group.manager.wait_quorum for group in groups))
            return groups

        yield make


def expected(build: Callable[[], nn.Module], *batches: torch.Tensor) -> list[torch.Tensor]:
    """The mean of the gradients that each batch gives."""
    torch.manual_seed(7)
    model = build()
    for batch in batches:
        (model(batch).sum() / len(batches)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_gradients(group: Group, wanted: list[torch.Tensor]) -> None:
    for grad, want in zip(group.grads(), wanted, strict=True):
        torch.testing.assert_close(grad, want)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


ONE, TWO = torch.full((2, 3), 0.5), torch.full((2, 3), -1.5)
SMALL = {"bucket_cap_mb": 0.00005}


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many buckets"])
def test_gradients_are_averaged(
    make: Callable[..., list[Group]], options: dict[str, Any], views: bool
) -> None:
    a, b = make(mlp, gradient_as_bucket_view=views, **options)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    wanted = expected(mlp, ONE, TWO)
    assert_gradients(a, wanted)
    assert_gradients(b, wanted)
    assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


def test_accumulating_without_sync(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp, **SMALL)

    def passes(group: Group, batch: torch.Tensor) -> None:
        group.run(batch, sync=False)
        group.run(2 * batch, sync=False)
        group.run(3 * batch)

    together(lambda: passes(a, ONE), lambda: passes(b, TWO))
    one, two = (expected(mlp, k * ONE, k * TWO) for k in (1, 2))
    three = expected(mlp, 3 * ONE, 3 * TWO)
    wanted = [x + y + z for x, y, z in zip(one, two, three, strict=True)]
    assert_gradients(a, wanted)
    assert_gradients(b, wanted)


@pytest.mark.parametrize("views", [True, False], ids=["views", "copies"])
def test_accumulating_with_a_sync_in_each_pass(
    make: Callable[..., list[Group]], views: bool
) -> None:
    a, b = make(mlp, gradient_as_bucket_view=views, **SMALL)

    def passes(group: Group, batch: torch.Tensor) -> None:
        group.run(batch)
        group.run(2 * batch)

    together(lambda: passes(a, ONE), lambda: passes(b, TWO))
    first, second = expected(mlp, ONE, TWO), expected(mlp, 2 * ONE, 2 * TWO)
    wanted = [x + y for x, y in zip(first, second, strict=True)]
    assert_gradients(a, wanted)
    assert_gradients(b, wanted)


class Branches(nn.Module):
    """Uses one of two layers, by the sign of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(3, 2), nn.Linear(3, 2)
        self.frozen = nn.Linear(3, 2)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = self.positive if inputs.sum() > 0 else self.negative
        used: torch.Tensor = chosen(inputs) + self.frozen(inputs)
        return used


def test_a_parameter_that_one_group_did_not_use_gets_the_others_average(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(Branches, **SMALL)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    for group in (a, b):
        layers = group.model
        assert layers.positive.weight.grad.tolist() == [[0.5] * 3] * 2  # type: ignore[union-attr]
        assert layers.negative.weight.grad.tolist() == [[-1.5] * 3] * 2  # type: ignore[union-attr]
        assert layers.frozen.weight.grad is None  # type: ignore[union-attr]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(3, 4), nn.Linear(4, 2).double()
        self.factor = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(inputs).double()) * self.factor.double()


def test_mixed_dtypes(make: Callable[..., list[Group]]) -> None:
    a, b = make(Mixed, **SMALL)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    for group in (a, b):
        for grad, want in zip(group.grads(), expected(Mixed, ONE, TWO), strict=True):
            assert grad is not None
            assert grad.dtype == want.dtype
            torch.testing.assert_close(grad, want, rtol=2e-2, atol=1e-2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outer(self.inner(inputs))
        return result


def test_tied_weights(make: Callable[..., list[Group]]) -> None:
    a, b = make(Tied, **SMALL)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    assert_gradients(a, expected(Tied, ONE, TWO))
    assert_gradients(b, expected(Tied, ONE, TWO))


class Checkpointed(nn.Module):
    """Reentrant checkpoints of single layers, one of which is used in two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(inputs)
        for layer in self.used():
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return {"logits": hidden}

    def used(self) -> list[nn.Module]:
        return [self.last]


class CheckpointedTwice(Checkpointed):
    def used(self) -> list[nn.Module]:
        return [self.shared, self.shared, self.last]


@pytest.mark.parametrize("build", [Checkpointed, CheckpointedTwice])
def test_reentrant_checkpoints(
    make: Callable[..., list[Group]], build: Callable[[], nn.Module]
) -> None:
    a, b = make(build, **SMALL)
    launched = []
    for group in (a, b):
        launch = group.manager._sums.launch_sum
        group.manager._sums.launch_sum = (  # type: ignore[method-assign]
            lambda t, wish, run=launch: launched.append(t) or run(t, wish)  # type: ignore
        )

    def run(group: Group, batch: torch.Tensor) -> None:
        group.parallel(batch)["logits"].sum().backward()

    together(lambda: run(a, ONE), lambda: run(b, TWO))
    torch.manual_seed(7)
    plain = build()
    for batch in (ONE, TWO):
        (plain(batch)["logits"].sum() / 2).backward()
    for group in (a, b):
        for (name, used), want in zip(
            group.model.named_parameters(), plain.parameters(), strict=True
        ):
            assert used.grad is not None
            wanted = torch.zeros_like(used) if want.grad is None else want.grad
            torch.testing.assert_close(used.grad, wanted, msg=name)
    if build is Checkpointed:  # every bucket once, not once for every checkpoint
        assert len(launched) == 2 * len(a.parallel._reducer._buckets)
    assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


def test_parameters_that_are_frozen_later_get_no_gradient(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, **SMALL)
    for group in (a, b):
        group.model.get_submodule("0").requires_grad_(False)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    for group in (a, b):
        assert [grad is None for grad in group.grads()] == [True, True] + 4 * [False]


def test_a_pass_is_not_begun_again_in_a_step_that_has_begun_to_sum(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, **SMALL)

    def fails() -> bool:
        hook = a.model.get_submodule("0").get_parameter("weight").register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            a.run(ONE)
        hook.remove()
        a.run(ONE)  # what it would sum now, is not what the other group sums
        return a.manager.should_commit()

    assert together(fails, lambda: b.votes(TWO)) == [False, False]
    assert "not finished" in str(a.manager.errored())


def test_sums_begin_before_the_backward_pass_is_over(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp, **SMALL)
    both_launched = threading.Barrier(2, timeout=20)
    first_layers = [group.model.get_submodule("0") for group in (a, b)]
    for group, first in zip((a, b), first_layers, strict=True):
        # Called when all layers but the first have their gradients.
        first.weight.register_hook(lambda grad, group=group: reduces(group, grad))

    def reduces(group: Group, grad: torch.Tensor) -> torch.Tensor:
        both_launched.wait()
        for reduction in group.parallel._reducer._reductions:
            assert reduction.wait()
        assert len(group.parallel._reducer._reductions) >= 2
        return grad

    together(lambda: a.run(ONE), lambda: b.run(TWO))
    assert_gradients(a, expected(mlp, ONE, TWO))


def test_nothing_is_raised_into_the_backward_pass(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp, **SMALL)
    b.manager.shutdown()
    began_at = time.monotonic()
    a.run(ONE)
    check("a peer is gone, with 10 s left,", time.monotonic() - began_at, 3.0)
    assert a.manager.errored() is not None
    assert not a.manager.should_commit()


def test_memory_of_an_abandoned_sum_is_never_used_again(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp)
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    together(a.manager.should_commit, b.manager.should_commit)
    (bucket,) = a.parallel._reducer._buckets
    memory = bucket.memory

    def loses_its_peer() -> None:
        a.manager.start_quorum()
        a.manager.wait_quorum()
        give_up = threading.Timer(0.3, a.manager.report_error, [RuntimeError("given up")])
        give_up.start()
        a.run(ONE)  # waits for the other group, which computes nothing
        give_up.join()

    def hangs() -> None:
        b.manager.start_quorum()
        b.manager.wait_quorum()

    together(loses_its_peer, hangs)
    assert bucket.memory.data_ptr() != memory.data_ptr()
    memory.fill_(float("nan"))  # what the abandoned operation may do
    assert all(torch.isfinite(grad).all() for grad in a.grads() if grad is not None)
    assert not a.manager.should_commit()


def test_a_backward_pass_that_raises_is_followed_by_a_good_one(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, **SMALL)

    def fails(group: Group) -> None:
        handle = group.model.get_submodule("2").weight.register_hook(raises)
        with pytest.raises(ZeroDivisionError):
            group.run(ONE)
        handle.remove()
        group.model.zero_grad()
        group.manager.start_quorum()
        group.run(ONE)

    def raises(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    together(lambda: fails(a), lambda: fails(b))
    assert_gradients(a, expected(mlp, ONE, ONE))
    assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


def raising(model: nn.Module, layer: str, error: BaseException) -> Any:
    """A hook that ends each backward pass at ``layer``, until it is removed."""

    def raises(_: torch.Tensor) -> None:
        raise error

    return model.get_submodule(layer).get_parameter("weight").register_hook(raises)


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("layer", ["4", "0"], ids=["before a sum", "after some sums"])
def test_an_exception_in_the_backward_pass_that_is_caught_discards_the_step(
    make: Callable[..., list[Group]], layer: str, error: BaseException
) -> None:
    a, b = make(mlp, **SMALL)

    def fails() -> bool:
        handle = raising(a.model, layer, error)
        with pytest.raises(type(error)):
            a.run(ONE)
        handle.remove()
        return a.manager.should_commit()

    began_at = time.monotonic()
    assert together(fails, lambda: b.votes(TWO)) == [False, False]
    check("a step whose backward pass was ended", time.monotonic() - began_at, 5.0)
    assert "not finished" in str(a.manager.errored())
    together(*(group.model.zero_grad for group in (a, b)))
    together(*(group.manager.start_quorum for group in (a, b)))
    together(lambda: a.run(ONE), lambda: b.run(TWO))
    assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]
    assert_gradients(a, expected(mlp, ONE, TWO))
    assert_gradients(b, expected(mlp, ONE, TWO))


def test_an_interrupt_while_the_sums_are_waited_for_discards_the_step(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, timeout=timedelta(seconds=2))  # for which the other one waits in vain
    came = threading.Event()

    def interrupts(*_: Any) -> None:
        came.set()
        raise KeyboardInterrupt

    a.manager._worker.on_phase = interrupts

    def fails() -> bool:
        with pytest.raises(KeyboardInterrupt):
            a.run(ONE)  # the other group has not begun, so this one waits
        a.manager._worker.on_phase = lambda *_: None
        return a.manager.should_commit()

    def comes_late() -> bool:
        assert came.wait(20)
        b.run(TWO)
        return b.manager.should_commit()

    assert together(fails, comes_late)[0] is False
    assert "interrupted" in str(a.manager.errored())


def test_a_graph_is_used_twice(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp, **SMALL)

    def twice(group: Group, batch: torch.Tensor) -> None:
        loss = group.parallel(batch).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    together(lambda: twice(a, ONE), lambda: twice(b, TWO))
    wanted = [2 * grad for grad in expected(mlp, ONE, TWO)]
    assert_gradients(a, wanted)
    assert_gradients(b, wanted)
    assert together(a.manager.should_commit, b.manager.should_commit) == [True, True]


def test_a_graph_is_not_used_again_in_a_step_that_has_begun_to_sum(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, **SMALL)

    def fails() -> bool:
        loss = a.parallel(ONE).sum()
        handle = raising(a.model, "0", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
        loss.backward()
        return a.manager.should_commit()

    assert together(fails, lambda: b.votes(TWO)) == [False, False]
    assert "not finished" in str(a.manager.errored())


def test_a_pass_that_summed_nothing_may_be_tried_again(make: Callable[..., list[Group]]) -> None:
    a, b = make(mlp, **SMALL)

    def tries_again() -> bool:
        loss = a.parallel(ONE).sum()
        handle = raising(a.model, "4", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
        a.model.zero_grad()
        loss.backward()
        return a.manager.should_commit()

    assert together(tries_again, lambda: b.votes(TWO)) == [True, True]
    assert_gradients(a, expected(mlp, ONE, TWO))


def test_a_pass_that_was_ended_does_not_spoil_the_next_step(
    make: Callable[..., list[Group]],
) -> None:
    a, b = make(mlp, **SMALL)

    def fails() -> bool:
        handle = raising(a.model, "0", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            a.run(ONE)
        handle.remove()
        a.model.zero_grad()
        return follows(a, ONE)

    def follows(group: Group, batch: torch.Tensor) -> bool:
        group.manager.start_quorum()
        group.manager.allreduce(torch.ones(1)).wait()
        group.run(batch)
        return group.manager.should_commit()

    def waits() -> bool:
        b.run(TWO)
        b.manager.should_commit()
        b.model.zero_grad()
        return follows(b, TWO)

    assert together(fails, waits) == [True, True]
    assert_gradients(b, expected(mlp, ONE, TWO))


def test_a_sum_of_one_s_own_in_a_backward_pass_that_was_ended(
    make: Callable[..., list[Group]],
) -> None:
    """Torch's wrapper over a managed group launches such sums, and FSDP's hook."""
    a, b = make(mlp)
    weights = [group.model.get_submodule("4").get_parameter("weight") for group in (a, b)]
    for group, weight in zip((a, b), weights, strict=True):
        weight.register_hook(lambda grad, run=group.manager.allreduce: run(grad).wait() and None)

    def fails() -> bool:
        handle = raising(a.model, "0", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            a.model(ONE).sum().backward()
        handle.remove()
        a.parallel = None  # type: ignore[assignment]
        return a.manager.should_commit()

    def waits() -> bool:
        b.model(TWO).sum().backward()
        return b.manager.should_commit()

    together(fails, waits)
    assert "not finished" in str(a.manager.errored())


def test_two_wrappers_of_one_manager_may_be_used_in_one_graph(
    make: Callable[..., list[Group]],
) -> None:
    """The wrappers' sums do not mix: those of the second pass follow all of the first one's."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    groups = make(build, bucket_cap_mb=1e-5)
    heads = []
    for _ in groups:
        torch.manual_seed(8)
        heads.append(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))))
    wrapped = [
        DistributedDataParallel(group.manager, head, bucket_cap_mb=1e-5)
        for group, head in zip(groups, heads, strict=True)
    ]
    batches = [torch.randn(3, 4), torch.randn(3, 4)]

    def run(index: int) -> None:
        trunk = groups[index].parallel(batches[index])
        loss = wrapped[index](trunk) + trunk + wrapped[index](batches[index])
        loss.sum().backward()

    together(lambda: run(0), lambda: run(1))
    for group in groups:
        assert group.manager.errored() is None
    for one, other in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    torch.manual_seed(7)
    trunk = build()
    torch.manual_seed(8)
    head = build()
    for batch in batches:
        out = trunk(batch)
        ((head(out) + out + head(batch)).sum() / 2).backward()
    assert_gradients(groups[0], [p.grad for p in trunk.parameters()])
    for got, wanted in zip(heads[0].parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)


def test_a_model_may_be_wrapped_again_when_its_manager_was_shut_down() -> None:
    """The wrapper before, which would average nothing, does not train it."""
    with lighthouse() as address:
        with Group(address, "a").manager as manager:
            first = Group.__new__(Group)
            first.manager = manager
            first.wrap(mlp)
            torchs = torch_data_parallel(manager, mlp())
            manager.start_quorum()
            assert first.votes(ONE)
        for each in (first.parallel, torchs):
            with pytest.raises(RequestRefused, match=r"was shut down.*wrap the model again"):
                each(ONE).sum().backward()
        first.model(ONE).sum().backward()
        with Group(address, "a").manager as manager:
            parallel = DistributedDataParallel(manager, first.model)
            manager.start_quorum()
            parallel(ONE).sum().backward()
            assert manager.should_commit()
