"""Tests of the modules that a process may fork with: each is imported in one of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launched import LAUNCH_S

# What a preloaded module does, and what the reason begins with (empty: the process may fork).
MODULES = {
    "torch alone": ("import torch, torch._dynamo; torch.cuda.is_available()", ""),
    "threads that end before a fork": (
        "import numpy; numpy.ones((500, 500)) @ numpy.ones((500, 1))",
        "",
    ),
    "a thread of Python": (
        """
        import threading
        threading.Thread(target=threading.Event().wait, name="beater", daemon=True).start()
        """,
        "preloaded modules have started threads, which workers would not have: beater",
    ),
    "a pool of OpenMP": (
        """
        import torch
        torch.set_num_threads(3)
        torch.ones(1 << 20).add_(1).sum()
        """,
        r"preloaded modules have started \d+ threads? of native code",
    ),
    "torch has initialized CUDA": (
        "import torch; torch.cuda._initialized = True",
        "preloaded modules use CUDA",
    ),
    "torch refuses a device in forks": (
        """
        import os, torch
        parent = os.getpid()
        torch.cuda._is_in_bad_fork = lambda: os.getpid() != parent
        """,
        "preloaded modules use a device, which torch refuses",
    ),
    "CUDA before its initialization": (
        "import ctypes, os; ctypes.CDLL(os.environ['DRIVER']).become(3)",
        "",
    ),
    "CUDA without torch": (
        "import ctypes, os, torch; ctypes.CDLL(os.environ['DRIVER']).become(0)",
        "preloaded modules use CUDA",
    ),
}
# What the driver answers is what decides; without a device, a library of its name answers instead.
DRIVER = """
static int state = 3;
int become(int next) { return state = next; }
int cuDeviceGetCount(int *count) { *count = 0; return state; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shared library with the name of CUDA's driver."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    path = folder / "libcuda.so.1"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path)]
    subprocess.run([compiler, *options, str(folder / "driver.c")], check=True, timeout=60)
    return path


@pytest.mark.processes
@pytest.mark.parametrize("name", MODULES)
def test_a_process_may_fork_if_forks_are_like_new_ones(
    name: str, driver: Path, tmp_path: Path
) -> None:
    program, reason = MODULES[name]
    (tmp_path / "preloaded.py").write_text(textwrap.dedent(program))
    check = (
        "import preloaded; from torchft_svc.elastic.fork_check import why_not_forked as why; "
        "print(why())"
    )
    found = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "DRIVER": str(driver)},
        capture_output=True,
        text=True,
        timeout=LAUNCH_S,
        check=True,
    ).stdout.strip()
    assert re.match(reason, found) if reason else not found
