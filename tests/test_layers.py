"""Tests the shape of the tree: who may import torch, and how long functions may be."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = ("torchft_svc", "tools", "examples")
MAX_FUNCTION_LINES = 70
# Never to grow: path and function, its own limit, and the reason.
LONGER = {
    "torchft_svc/client/manager.py:__init__": 95,  # 36 keywords of the user-facing class
}
# Public names that two classes have, and why.
ONE_NAME = {
    "Quorum": "`coordination.Quorum` has the public release's fields, `core`'s the rules'",
    "Backend": "an engine that runs a trainer's workers, and torch's inside an isolated group",
    "End": "what a trainer sends a worker, and what an agent is to do",
    "Incident": "of a trainer's run, and of a job in its lighthouse's ledger",
    "Lost": "of a worker of a trainer, and of a session",
    "Progress": "of a worker of a trainer, and of a simulated job",
}
# What no trainer imports, or only while the process of its manager starts.
NOT_FOR_A_TRAINER = {
    "click",
    "google.protobuf",
    "grpc",
    "torchft_svc.client.checkpointing.http.transport",
    "torchft_svc.client.process_groups.isolated.group",
    "torchft_svc.coordination.lighthouse_client",
    "torchft_svc.core.quorum.lighthouse.membership",
    "torchft_svc.elastic",
    "torchft_svc.lighthouse_server",
    "torchft_svc.manager_server.app",
    "torchft_svc.trainer",
    "uvloop",
}
WITHOUT_TORCH = (
    "core",
    "rpc",
    "host",
    "lighthouse_server",
    "manager_server",
    "coordination",
    "doctor",
    "errors",
    "settings",
)


@functools.cache
def sources() -> list[Path]:
    """Every source file of ours that is read by people."""
    found = [path for tree in TREES for path in sorted((ROOT / tree).rglob("*.py"))]
    return [path for path in found if path.parent.name != "proto"]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, and how many lines it has from `def` to its end."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield f"{shown(path)}:{node.name}", node.end_lineno - node.lineno + 1


def test_no_function_is_too_long() -> None:
    too_long = {
        name: length
        for path in sources()
        for name, length in functions(path)
        if length > LONGER.get(name, MAX_FUNCTION_LINES)
    }
    assert not too_long


def test_the_exceptions_are_still_needed() -> None:
    lengths: dict[str, int] = {}
    for path in sources():
        for name, length in functions(path):  # a name may occur twice in a file
            lengths[name] = max(length, lengths.get(name, 0))
    assert not {name for name in LONGER if lengths.get(name, 0) <= MAX_FUNCTION_LINES}


def test_the_first_line_of_every_file_says_what_it_does() -> None:
    silent = []
    for path in sources():
        text = path.read_text()
        if path.name == "__init__.py" and not text.strip():
            continue
        docstring = ast.get_docstring(parsed(path)) or ""
        if not text.startswith(('"""', "#!", 'r"""')) or len(docstring.split("\n")[0]) < 15:
            silent.append(shown(path))
    assert not silent


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path in sources():
        ours = shown(path).startswith(("torchft_svc/", "tools/sim/"))
        if ours and not shown(path).startswith("torchft_svc/compat/"):  # the public release's names
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(shown(path))
    assert {name for name, paths in found.items() if len(paths) > 1} == ONE_NAME.keys()


# Imported only where this is installed: it is no dependency.
NEEDS = {"torchft_svc.client.reduce.triton_blocks": "triton"}


def modules(tree: str = "torchft_svc") -> list[str]:
    """Names of the modules by their files: this is asked while tests are collected."""
    found = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / tree).rglob("*.py"))
    names = {".".join(path.parts).removesuffix(".__init__") for path in found}
    lacking = {name for name, need in NEEDS.items() if importlib.util.find_spec(need) is None}
    return sorted(name for name in names - lacking if not name.endswith("__main__"))


@pytest.mark.parametrize("name", modules())
def test_public_names_resolve(name: str) -> None:
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    assert not missing


def fresh(script: str) -> str:
    """What a new interpreter says to ``script``."""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.processes
def test_services_and_the_core_never_import_torch() -> None:
    without = [
        name for name in modules() if name == "torchft_svc" or name.split(".")[1] in WITHOUT_TORCH
    ]
    imports = "\n".join(f"import {name}" for name in [*without, *modules("tools/sim")])
    output = fresh(f"{imports}\nimport sys\nprint(sorted({{'torch', 'numpy'}} & set(sys.modules)))")
    assert output == "[]"


@pytest.mark.processes
def test_the_core_imports_neither_grpc_nor_asyncio() -> None:
    imports = "\n".join(
        f"import {name}" for name in modules() if re.search(r"\.(core|retry)\b", name)
    )
    output = fresh(
        f"{imports}\nimport sys\nprint(sorted({{'grpc', 'asyncio', 'socket'}} & set(sys.modules)))"
    )
    assert output == "[]"


@pytest.mark.processes
def test_a_trainer_starts_its_manager_before_it_imports_what_both_need() -> None:
    output = fresh(
        "import subprocess, sys\n"
        "from torchft_svc.client import DistributedDataParallel, Manager, Optimizer\n"
        "def spawn(command, **_):\n"
        f"    print(command[3], sorted({NOT_FOR_A_TRAINER} & set(sys.modules)))\n"
        "    sys.exit()\n"
        "subprocess.Popen = spawn\n"
        "Manager(state_dict=dict, load_state_dict=print, lighthouse_addr='127.0.0.1:1')\n"
    )
    assert output == "torchft_svc.manager_server.sidecar []"


@pytest.mark.processes
def test_importing_starts_no_thread_and_configures_no_logging() -> None:
    imports = "\n".join(f"import {name}" for name in modules())
    output = fresh(
        "import torch, threading, logging\n"
        "before = set(threading.enumerate()), list(logging.root.handlers), logging.root.level\n"
        f"{imports}\n"
        "after = set(threading.enumerate()), list(logging.root.handlers), logging.root.level\n"
        "print(before == after, [n for n in logging.root.manager.loggerDict "
        "if n.startswith('torchft') and logging.getLogger(n).handlers])"
    )
    assert output == "True []"
