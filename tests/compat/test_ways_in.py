"""Tests how programs that import `torchft` come to `torchft_svc.compat`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import ROOT, environment

from torchft_svc.compat import finder
from torchft_svc.errors import ConfigError

PROGRAM = """
import importlib.util, subprocess, sys
assert importlib.util.find_spec("torchft") is not None
import torchft.coordination, torchft_svc.compat.coordination
assert torchft.coordination is torchft_svc.compat.coordination
assert torchft is torchft_svc.compat
print("program", __name__, sys.argv[1:], flush=True)
child = "import torchft._torchft as t; from importlib.util import find_spec as f; "
child += "print(t.__name__, f('torchft.ddp') is not None)"
subprocess.run([sys.executable, "-c", child], check=True)
"""


@pytest.fixture
def put_back() -> Iterator[None]:
    """Let `import torchft` fail again afterwards."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    yield
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] == "torchft":
            del sys.modules[name]


def run(
    *arguments: str | Path, path: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    variables = environment(**changes)
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(path)])
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=variables, check=False
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def another_torchft(tmp_path: Path) -> Path:
    """A folder with a package that stands for the public release."""
    package = tmp_path / "site" / "torchft"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package.parent


@pytest.mark.usefixtures("put_back")
def test_after_install_both_names_are_one_module() -> None:
    assert importlib.util.find_spec("torchft") is None
    finder.install()
    finder.install()
    assert importlib.util.find_spec("torchft") is not None
    public = importlib.import_module("torchft")
    ours = importlib.import_module("torchft_svc.compat")
    assert public is ours
    assert ours.__spec__ is not None
    assert ours.__spec__.name == "torchft_svc.compat"
    assert importlib.import_module("torchft.work") is importlib.import_module(
        "torchft_svc.compat.work"
    )
    assert public.data is importlib.import_module("torchft_svc.compat.data")
    assert importlib.util.find_spec("torchft.nowhere") is None


@pytest.mark.usefixtures("put_back")
def test_the_public_release_is_replaced_only_on_request(
    another_torchft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(another_torchft)
    with pytest.raises(ConfigError, match="the public release is installed here"):
        finder.install()
    assert importlib.util.find_spec("torchft").origin.startswith(str(another_torchft))  # type: ignore[union-attr]
    finder.install(replace=True)
    assert importlib.import_module("torchft").__name__ == "torchft_svc.compat"


@pytest.mark.usefixtures("put_back")
def test_a_public_release_that_was_imported_stays(
    another_torchft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(another_torchft)
    importlib.import_module("torchft")
    with pytest.raises(ConfigError, match="it was imported already"):
        finder.install(replace=True)


@pytest.mark.processes
def test_a_program_and_its_children_run_unchanged(program: Path) -> None:
    result = run("-m", "torchft_svc.compat", program, "a", "--b")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "program __main__ ['a', '--b']",
        "torchft_svc.compat._torchft True",
    ]


@pytest.mark.processes
def test_a_module_runs_unchanged(program: Path) -> None:
    result = run("-m", "torchft_svc.compat", "-m", "program", "a", path=program.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "program __main__ ['a']"


@pytest.mark.processes
def test_a_program_is_not_run_beside_the_public_release(
    program: Path, another_torchft: Path
) -> None:
    refused = run("-m", "torchft_svc.compat", program, path=another_torchft)
    assert refused.returncode == 1
    assert "the public release is installed here" in refused.stderr
    assert "--replace" in refused.stderr
    replaced = run("-m", "torchft_svc.compat", "--replace", program, path=another_torchft)
    assert replaced.returncode == 0, replaced.stderr
    assert replaced.stdout.splitlines()[1] == "torchft_svc.compat._torchft True"


@pytest.mark.processes
def test_torchrun_starts_such_programs(program: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = run(*torchrun, "-m", "torchft_svc.compat", program, "a")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("__main__ ['a']") == 2


WAITING = """
import sys
from torchft_svc.manager_server.early import EARLY
print("torch" in sys.modules, EARLY.is_there)
EARLY.kill_process()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lighthouse", "rank", "waits"),
    [
        ("http://localhost:29510", "0", True),
        ("http://localhost:29510", "1", False),
        ("", "0", False),
    ],
)
def test_the_manager_of_a_worker_starts_before_torch(
    tmp_path: Path, lighthouse: str, rank: str, waits: bool
) -> None:
    path = tmp_path / "waiting.py"
    path.write_text(WAITING)
    result = run("-m", "torchft_svc.compat", path, TORCHFT_LIGHTHOUSE=lighthouse, RANK=rank)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["False", str(waits)]


@pytest.mark.processes
def test_a_wrong_command_line_shows_the_usage() -> None:
    result = run("-m", "torchft_svc.compat", "--nothing")
    assert result.returncode == 2
    assert result.stderr.startswith("usage: python -m torchft_svc.compat")
