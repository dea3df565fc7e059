"""Tests that passes of autograd that leave the parameters' gradients alone are no backward passes.

Forces, gradient penalties, meta-learning, and torch.func: each group makes as many as it likes,
also between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from support.training import Trainer, in_step, lighthouse, together, trainers
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from torchft_svc.errors import RequestRefused

Pass = Callable[[nn.Module, torch.Tensor], object]


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(inputs)
    return outputs.square().mean()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# -- passes that accumulate nothing into a parameter -----------------------------------------------


def forces(model: nn.Module, inputs: torch.Tensor) -> object:
    inputs.requires_grad_()
    return torch.autograd.grad(loss_of(model, inputs), inputs)


def forces_of_forces(model: nn.Module, inputs: torch.Tensor) -> object:
    inputs.requires_grad_()
    (first,) = torch.autograd.grad(loss_of(model, inputs), inputs, create_graph=True)
    return torch.autograd.grad(first.sum(), inputs)


def gradients_of_parameters(model: nn.Module, inputs: torch.Tensor) -> object:
    return torch.autograd.grad(loss_of(model, inputs), list(model.parameters()))


def gradient_of_the_outputs(model: nn.Module, inputs: torch.Tensor) -> object:
    outputs = model(inputs)
    return torch.autograd.grad(outputs.sum(), outputs)


def forces_of_a_compiled_model(model: nn.Module, inputs: torch.Tensor) -> object:
    return forces(torch.compile(model, backend="aot_eager"), inputs)  # type: ignore[arg-type]


def a_graph_used_twice(model: nn.Module, inputs: torch.Tensor) -> object:
    inputs.requires_grad_()
    loss = loss_of(model, inputs)
    torch.autograd.grad(loss, inputs, retain_graph=True)
    return torch.autograd.grad(loss, inputs)


def backward_into_the_inputs(model: nn.Module, inputs: torch.Tensor) -> object:
    inputs.requires_grad_()
    loss_of(model, inputs).backward(inputs=[inputs])  # type: ignore[no-untyped-call]
    return inputs.grad


def an_attack_on_frozen_weights(model: nn.Module, inputs: torch.Tensor) -> object:
    inputs.requires_grad_()
    model.requires_grad_(False)
    try:
        loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
    finally:
        model.requires_grad_(True)
    return inputs.grad


def a_transformed_loss(model: nn.Module, inputs: torch.Tensor) -> object:
    return grad(lambda inputs: loss_of(model, inputs))(inputs)


def gradients_of_each_sample(model: nn.Module, inputs: torch.Tensor) -> object:
    def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = functional_call(model, weights, (sample,))
        return outputs.square().mean()

    slopes = vmap(grad(loss), in_dims=(None, 0))(weights_of(model), inputs)
    return list(slopes.values())


def jacobians(model: nn.Module, inputs: torch.Tensor) -> object:
    return jacrev(model)(inputs[0]), vmap(jacrev(model))(inputs)


def a_hessian(model: nn.Module, inputs: torch.Tensor) -> object:
    return hessian(lambda inputs: loss_of(model, inputs))(inputs[0])


def products(model: nn.Module, inputs: torch.Tensor) -> object:
    outputs, back = vjp(model, inputs)
    return back(outputs), jvp(model, (inputs,), (inputs,))


def a_tangent_kernel(model: nn.Module, inputs: torch.Tensor) -> object:
    def outputs(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = functional_call(model, weights, (inputs,))
        return result

    return list(jacrev(outputs)(weights_of(model)).values())


SIDE_PASSES: list[Pass] = [
    forces,
    forces_of_forces,
    gradients_of_parameters,
    gradient_of_the_outputs,
    forces_of_a_compiled_model,
    a_graph_used_twice,
    backward_into_the_inputs,
    an_attack_on_frozen_weights,
    a_transformed_loss,
    gradients_of_each_sample,
    jacobians,
    a_hessian,
    products,
    a_tangent_kernel,
]


@pytest.mark.parametrize("side_pass", SIDE_PASSES)
def test_one_group_alone_makes_more_passes_between_and_within_steps(side_pass: Pass) -> None:
    with lighthouse(min_replicas=2) as address, trainers(address, 2) as (a, b):
        in_step(1, a, b)
        before = a.manager.current_step()
        wanted = side_pass(a.model, torch.ones(3, 4))
        torch.testing.assert_close(side_pass(a.parallel, torch.ones(3, 4)), wanted)

        def steps_with_more() -> list[bool]:
            return [step(number) for number in range(2)]

        def step(num_more: int) -> bool:
            a.optimizer.zero_grad()
            for _ in range(num_more):
                side_pass(a.parallel, torch.ones(3, 4))
            a.loss().backward()
            side_pass(a.parallel, torch.ones(3, 4))
            return a.optimizer.step()

        assert together(steps_with_more, lambda: b.steps(2)) == [[True, True], [True, True]]
        assert a.manager.current_step() == before + 2


# -- programs whose backward pass comes after other passes -----------------------------------------


def with_a_penalty(model: nn.Module, inputs: torch.Tensor) -> None:
    inputs.requires_grad_()
    loss = loss_of(model, inputs)
    (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
    (loss + slope.norm()).backward()


def with_the_penalty_alone(model: nn.Module, inputs: torch.Tensor) -> None:
    inputs.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, inputs), inputs, create_graph=True)
    slope.square().sum().backward()  # type: ignore[no-untyped-call]


def with_a_transformed_penalty(model: nn.Module, inputs: torch.Tensor) -> None:
    slope = grad(lambda inputs: loss_of(model, inputs))(inputs)
    slope.square().sum().backward()


def with_a_batch_of_calls(model: nn.Module, inputs: torch.Tensor) -> None:
    vmap(model)(inputs).square().mean().backward()


def with_an_inner_step(model: nn.Module, inputs: torch.Tensor) -> None:
    """Step inside the loss, as meta-learning does; the outer gradient includes the inner one."""
    weights = dict(model.named_parameters())
    inner = loss_of(model, inputs)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    pairs = zip(weights.items(), slopes, strict=True)
    faster = {name: weight - 0.1 * slope for (name, weight), slope in pairs}
    functional_call(model, faster, (inputs,)).square().mean().backward()


def into_some_parameters(model: nn.Module, inputs: torch.Tensor) -> None:
    inputs.requires_grad_()
    some = list(model.parameters())[1:3]
    loss_of(model, inputs).backward(inputs=[inputs, *some])  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def with_a_graph_of_its_own(model: nn.Module, inputs: torch.Tensor) -> None:
    loss_of(model, inputs).backward(create_graph=True)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():  # torch: such gradients keep their graph
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()


def after_a_side_pass_without_sync(model: nn.Module, inputs: torch.Tensor) -> None:
    quiet = getattr(model, "no_sync", contextlib.nullcontext)
    with quiet():
        forces(model, inputs.clone())
        loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]
    forces(model, inputs.clone())
    loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]


class Recomputed(nn.Module):
    """All of its parameters are inside a checkpoint."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.use_reentrant = use_reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(self.net, inputs, use_reentrant=self.use_reentrant)
        return 2 * outputs


def inside_reentrant_checkpoints(model: nn.Module, inputs: torch.Tensor) -> None:
    inputs.requires_grad_()
    loss_of(model, inputs).backward()  # type: ignore[no-untyped-call]


PROGRAMS: list[Callable[[nn.Module, torch.Tensor], None]] = [
    with_a_penalty,
    with_the_penalty_alone,
    with_a_transformed_penalty,
    with_a_batch_of_calls,
    with_an_inner_step,
    into_some_parameters,
    with_a_graph_of_its_own,
    after_a_side_pass_without_sync,
]
NESTED = "recomputed in a nested pass"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
    "recomputed": lambda: Recomputed(use_reentrant=False),
    NESTED: lambda: Recomputed(use_reentrant=True),
}


class Group(Trainer):
    """A group with another model, whose weights depend on the seed 0 only."""

    def __init__(self, address: str, name: str, kind: str) -> None:
        super().__init__(address, name, 0, init_sync=False)
        self.kind = kind
        self.model = made(kind)
        self.parallel = type(self.parallel)(self.manager, self.model, bucket_cap_mb=0.0001)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    with lighthouse(min_replicas=2) as address, contextlib.ExitStack() as stack:
        yield [stack.enter_context(Group(address, name, request.param)) for name in "ab"]


CASES = [
    *(pytest.param("plain", program, id=program.__name__) for program in PROGRAMS),
    pytest.param("recomputed", with_a_penalty, id="recomputed"),
    pytest.param(NESTED, inside_reentrant_checkpoints, id=NESTED),
]


@pytest.mark.parametrize(("groups", "program"), CASES, indirect=["groups"])
def test_gradients_are_averaged_as_without_groups(
    groups: list[Group], program: Callable[[nn.Module, torch.Tensor], None]
) -> None:
    kind = groups[0].kind
    batches = [torch.randn(3, 4), torch.randn(3, 4)]
    gradients = []
    for batch in batches:
        alone = made(kind)
        program(alone, batch.clone())
        gradients.append([parameter.grad for parameter in alone.parameters()])
    wanted = [(one + other) / 2 for one, other in zip(*gradients, strict=True)]  # type: ignore[operator]

    def runs(group: Group, batch: torch.Tensor) -> bool:
        group.manager.start_quorum()
        program(group.parallel, batch.clone())
        return group.manager.should_commit()

    pairs = list(zip(groups, batches, strict=True))
    assert all(together(*(lambda pair=pair: runs(*pair) for pair in pairs)))
    for group in groups:
        got = [parameter.grad for parameter in group.model.parameters()]
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("groups", ["recomputed in a nested pass"], indirect=True)
def test_a_nested_pass_over_old_weights_is_refused(groups: list[Group]) -> None:
    """The first gradient shows that it is a backward pass."""
    first = groups[0]
    loss = loss_of(first.parallel, torch.ones(3, 4, requires_grad=True))
    together(*(group.manager.start_quorum for group in groups))
    first.manager._weights.version += 1
    with pytest.raises(RequestRefused, match="the forward pass ran before"):
        loss.backward()  # type: ignore[no-untyped-call]
    assert not first.manager.should_commit(), "a step that was not averaged"
