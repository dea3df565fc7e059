"""Tests what is distributed: the whole package alone, with metadata that an index accepts."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.running import ROOT
from support.source_copy import copy_sources

from torchft_svc.version import VERSION

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
INFO = f"torchft_svc-{VERSION}.dist-info"
BUILD_S = 200.0


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("distributions")
    sources = copy_sources(folder / "sources")
    run("build", "--no-isolation", "--outdir", str(folder / "dist"), str(sources))
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


def run(module: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def package_files() -> set[str]:
    """The modules of the package in this checkout, their stubs, the dashboard's files, and the mark
    that it is typed."""
    found = [*(ROOT / "torchft_svc").rglob("*.py*"), ROOT / "torchft_svc" / "py.typed"]
    page = ROOT / "torchft_svc" / "lighthouse_server" / "http" / "page"
    found += [page / name for name in ("index.html", "app.js", "style.css", "icon.svg")]
    found = [path for path in found if path.suffix != ".pyc"]
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if not name.startswith(f"{INFO}/")} == package_files()
    assert f"{INFO}/licenses/LICENSE" in names


def test_no_tool_and_no_test_is_distributed(built: Path, wheel: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        inside = [Path(*Path(name).parts[1:]) for name in sources.getnames()]
    names = [*inside, *map(Path, zipfile.ZipFile(wheel).namelist())]
    tops = {path.parts[0] for path in names if path.parts}
    assert {"torchft_svc", "proto", "CHANGELOG.md"} <= tops, "the source distribution was looked at"
    assert not tops & {"tools", "tests", "examples", "docs"}
    assert not [path for path in names if path.name.startswith(("test_", "conftest"))]


def test_every_command_of_the_wheel_leads_to_a_module(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    parser = configparser.ConfigParser()
    parser.read_string(archive.read(f"{INFO}/entry_points.txt").decode())
    modules = [target.partition(":")[0] for group in parser for _, target in parser.items(group)]
    assert len(modules) > 4
    files = set(archive.namelist())
    assert not [name for name in modules if f"{name.replace('.', '/')}.py" not in files]


def test_an_index_accepts_the_metadata(built: Path) -> None:
    output = run("twine", "check", "--strict", *map(str, built.iterdir()))
    assert output.count("PASSED") == 2
