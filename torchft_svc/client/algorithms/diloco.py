"""DiLoCo and Streaming DiLoCo: an outer optimizer learns from what the groups have learned alone.

Douillard et al., DiLoCo, 2023 (arXiv 2311.08105), and Streaming DiLoCo with overlapping
communication, 2025 (arXiv 2501.18512).

Error feedback, which adds what rounding has left out of a sum to the next one: Seide et al., 1-bit
SGD, 2014, and Karimireddy et al., 2019 (arXiv 1901.09847); of both roundings of a sum: Tang et al.,
DoubleSqueeze, 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchft_svc.client.algorithms.agreed_weights import (
    DEFAULT_BUCKET_MB,
    AgreedWeights,
    BucketedAverage,
    Rounding,
    like_parameter,
)
from torchft_svc.client.algorithms.periodic_sync import (
    MAX_ATTEMPTS,
    PeriodicSync,
    check_fragments,
    check_is_plain,
)
from torchft_svc.errors import ConfigError

if TYPE_CHECKING:
    from torchft_svc.client.manager import Manager

_STATE_KEY = "StreamingDiLoCoFragment_"


class DiLoCo(PeriodicSync):
    """Trains alone for some inner steps, then applies the groups' average progress by an outer
    optimizer; with several fragments (Streaming DiLoCo) one of them after the other.

    With ``n`` fragments one is synchronized after each ``sync_every / n`` inner steps, so each of
    them once in ``sync_every``. Its pseudo-gradient is its weights at its last synchronization
    minus its present ones. The average of that over the groups is the gradient of
    ``outer_optimizer``, which starts from the weights of the last synchronization. The result is
    bitwise equal in all groups. ``fragment_sync_delay``: the average is launched so many inner
    steps earlier than it is applied, and travels meanwhile. ``fragment_update_alpha``: how much of
    its own weights a group keeps, from 0 (none) to 1 (all).

    Which fragment is next follows from `Manager.current_step`: a group that joins is in phase after
    it has healed. A refused synchronization is repeated at once, so a group that is lost costs the
    others nothing. One that is refused again and again restores the fragment's weights of the last
    one, and the same fragment comes again an interval later.

    Gradients of the fragment are set to None in a synchronization, where they hold its averages.

    Args:
        manager: with ``use_async_quorum=False``; returns the model and ``inner_optimizer`` from its
            state functions. The outer optimizer and the weights of the last synchronization are
            added here.
        model_fragments: disjoint parts of the model; one part is plain DiLoCo.
        inner_optimizer: applies the inner steps.
        outer_optimizer: one for all parameters, or a list with one for each fragment.
        sync_every: a multiple of the number of fragments.
        backup_device, pin_memory: see `PeriodicSync`.
        use_bucketization: average several tensors in one collective of at most ``bucket_cap_mb``
            MiB (default: 25).
        should_quantize: see `Manager.allreduce`.
        fragment_sync_delay: fewer inner steps than an interval has.
        fragment_update_alpha: from 0 to 1.
        error_feedback: with ``should_quantize``, add what rounding has left out of an average to
            the next one of the fragment. Takes 4 bytes for each element on ``backup_device``. A
            group that heals begins without such errors.

    Raises:
        ConfigError: an argument is invalid; the message says what to change.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | str | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = True,
        bucket_cap_mb: float | None = None,
        should_quantize: bool | str = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        error_feedback: bool = False,
    ) -> None:
        fragments = list(model_fragments)
        outer = _one_for_each(outer_optimizer, len(fragments))
        _check(manager, len(fragments), sync_every, fragment_sync_delay, fragment_update_alpha)
        rounding = Rounding.of(should_quantize, error_feedback=error_feedback)
        capacity_mb = DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
        settings = (
            f"{len(fragments)} fragments, delay {fragment_sync_delay}, alpha "
            f"{fragment_update_alpha:g}, outer {_describe_outer(outer)}, "
            f"{f'buckets of {capacity_mb:g} MiB' if use_bucketization else 'no buckets'}, "
            f"{rounding}"
        )
        super().__init__(
            manager,
            fragments,
            inner_optimizer,
            sync_every,
            settings=settings,
            backup_device=backup_device,
            pin_memory=pin_memory,
        )
        _check_outer(self._agreed, outer)
        rounding.check(self._agreed)
        self._interval = sync_every // len(fragments)
        self._delay = fragment_sync_delay
        self._fragments = [
            _Fragment(
                weights,
                optimizer,
                BucketedAverage(
                    manager,
                    weights.local_tensors(),
                    capacity_mb if use_bucketization else None,
                    rounding=rounding,
                    errors_on=weights.values[0].device,
                ),
                fragment_update_alpha,
            )
            for weights, optimizer in zip(self._agreed, outer, strict=True)
        ]
        self._in_flight: _Fragment | None = None  # whose average is under way
        self._register(
            {
                f"{_STATE_KEY}{number}": (each.load_state_dict, each.state_dict)
                for number, each in enumerate(self._fragments)
            }
        )

    def _end_inner_step(self) -> None:
        is_last_step = self._count >= self._interval
        if self._in_flight is None and self._count >= self._interval - self._delay:
            self._in_flight = self._launch(is_last_step=is_last_step)
        if is_last_step and self._in_flight is not None:
            fragment, self._in_flight, self._count = self._in_flight, None, 0
            self._finish(fragment)

    def _launch(self, *, is_last_step: bool) -> _Fragment:
        """Begin the manager's step, and the average of the fragment whose turn it is.

        ``is_last_step``: no inner step follows before the average is applied.
        """
        self._begin_sync()
        fragment = self._fragments[self._manager.current_step() % len(self._fragments)]
        fragment.launch(frees_gradients=is_last_step)
        return fragment

    def _finish(self, fragment: _Fragment) -> None:
        """Wait for the average, vote, and apply it."""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                fragment = self._launch(is_last_step=True)
            fragment.wait()
            if self._commit_sync(fragment.apply, fragment.restore):
                return
        self._restore(fragment.restore)


class _Fragment:
    """A part of the model with its outer optimizer."""

    def __init__(
        self,
        weights: AgreedWeights,
        outer: torch.optim.Optimizer,
        averaging: BucketedAverage,
        alpha: float,
    ) -> None:
        self._weights = weights
        self._outer = outer
        self._averaging = averaging
        self._alpha = alpha

    def launch(self, *, frees_gradients: bool) -> None:
        """Begin to average the pseudo-gradients; ``frees_gradients``: no inner step follows."""
        if frees_gradients:
            for parameter in self._weights.parameters:
                parameter.grad = None
        self._averaging.launch(self._weights.write_pseudo_gradient)

    def wait(self) -> None:
        """Wait until the average is there, or has failed."""
        self._averaging.wait()

    def restore(self) -> None:
        """Set the fragment to the weights of the last synchronization."""
        self._averaging.drop_averages()
        self._weights.restore()

    @torch.no_grad()
    def apply(self) -> None:
        """Apply the average by the outer optimizer, and mix the group's own weights in."""
        weights = self._weights
        mine = [each.clone() for each in weights.local_tensors()] if self._alpha else []
        weights.restore()
        averages = self._averaging.pop_averages()
        others = _take_gradients(self._outer)
        try:
            for parameter, average in zip(weights.parameters, averages, strict=True):
                parameter.grad = like_parameter(average, parameter)
            self._outer.step()
        finally:
            for parameter in weights.parameters:
                parameter.grad = None
            own = set(map(id, weights.parameters))
            for other, grad in others:
                if id(other) not in own:
                    other.grad = grad
        weights.store()
        if self._alpha:
            for tensor, local in zip(weights.local_tensors(), mine, strict=True):
                tensor.lerp_(local, self._alpha)

    def state_dict(self) -> dict[str, Any]:
        return {
            "outer_optimizer": self._outer.state_dict(),
            "original_parameters": self._weights.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._outer.load_state_dict(state["outer_optimizer"])
        self._weights.load_state_dict(state["original_parameters"])
        self._averaging.reset_errors()


def _take_gradients(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Remove the gradients of all parameters of ``optimizer``, and return them."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append((parameter, parameter.grad))
            parameter.grad = None
    return found


def _one_for_each(
    outer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], num_fragments: int
) -> list[torch.optim.Optimizer]:
    found = [outer] * num_fragments if isinstance(outer, torch.optim.Optimizer) else list(outer)
    if len(found) != num_fragments:
        reason = f"one optimizer, or one for each of the {num_fragments} fragments"
        raise ConfigError("outer_optimizer", f"a list of {len(found)}", reason)
    for each in found:
        check_is_plain("outer_optimizer", each)
    return found


def _describe_outer(outer: Sequence[torch.optim.Optimizer]) -> str:
    names = [type(each).__name__ for each in outer]
    return names[0] if len(set(names)) == 1 else "/".join(names)


def _check_outer(agreed: Sequence[AgreedWeights], outer: Sequence[torch.optim.Optimizer]) -> None:
    for number, (weights, optimizer) in enumerate(zip(agreed, outer, strict=True)):
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for name, parameter in zip(weights.names, weights.parameters, strict=True):
            if parameter.requires_grad and id(parameter) not in held:
                reason = f"outer optimizer {number} does not have it: it would never be trained"
                raise ConfigError(name, f"in fragment {number}", reason)


def _check(manager: Manager, num: int, sync_every: int, delay: int, alpha: float) -> None:
    check_fragments(manager, num, sync_every)
    if not 0 <= delay < sync_every // num:
        reason = f"0 or more inner steps, and fewer than an interval, which has {sync_every // num}"
        raise ConfigError("fragment_sync_delay", delay, reason)
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError("fragment_update_alpha", alpha, "a number from 0 to 1")
