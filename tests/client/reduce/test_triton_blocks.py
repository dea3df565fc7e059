"""Tests, in Triton's interpreter, that the kernels for devices make the same bits as torch.

With a device tests/gpu/test_quantized.py runs the kernels themselves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from support.running import ROOT


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_bits_are_those_of_torch() -> None:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "tests/support/scripts/interpreted_blocks.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "sums are equal" in found.stdout
