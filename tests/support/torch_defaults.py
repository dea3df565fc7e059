"""Torch's defaults of a program whose devices are not the CPU: ``meta`` stands for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

DEFAULTS = [
    pytest.param({"device": "meta"}, id="meta"),
    pytest.param({"device": "cpu:0"}, id="cpu:0"),
    pytest.param({"dtype": torch.bfloat16}, id="bfloat16"),
    pytest.param({"dtype": torch.float64}, id="float64"),
]


def set_defaults(config: Mapping[str, Any]) -> None:
    """Set the default device of this thread, and the default dtype of this process."""
    if "device" in config:
        torch.set_default_device(config["device"])
    if "dtype" in config:
        torch.set_default_dtype(config["dtype"])


@contextlib.contextmanager
def torch_defaults(config: Mapping[str, Any]) -> Iterator[None]:
    """Inside of this block they are those of ``config``."""
    set_defaults(config)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
