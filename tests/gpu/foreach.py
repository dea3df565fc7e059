"""Variant: buckets filled by one call for all tensors, to be measured beside the one in use."""

from __future__ import annotations

import torch

from torchft_svc.client.buckets import Bucket


def install() -> None:
    def fill(self: Bucket, scale: float) -> None:
        grads = [parameter.grad for parameter in self.parameters]
        if scale == 0.0 or any(grad is None for grad in grads):
            self.memory.zero_()
        if scale == 0.0:
            return
        pairs = [(v, g) for v, g in zip(self.views, grads, strict=True) if g is not None]
        torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
        if scale != 1.0:
            self.memory.mul_(scale)

    Bucket.fill = fill  # type: ignore[method-assign]
