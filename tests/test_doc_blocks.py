"""Tests the code blocks of all pages: commands and data parse, and no Python block is left out.

`tests/processes/test_tutorial.py` and `tests/processes/test_page_programs.py` run the programs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.documents import Block, code_blocks
from support.page_programs import PROGRAMS, program_of
from support.running import ROOT
from torch.distributed.run import get_args_parser as torchrun_parser

from torchft_svc.compat._torchft import _with_hyphens
from torchft_svc.core.quorum.lighthouse.incidents import IncidentKind
from torchft_svc.elastic.run import get_args_parser
from torchft_svc.lighthouse_server import cli as lighthouse_cli
from torchft_svc.manager_server import cli as manager_cli

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# A page whose commands are all run.
FOLLOWED = ROOT / "docs" / "tutorial.md"
SERVICES = {"lighthouse": lighthouse_cli.main, "torchft-manager": manager_cli.main}
# Of the system and of other projects: what is done with them is not ours to check.
OTHER_PROGRAMS = {
    "cd",
    "chmod",
    "curl",
    "export",
    "git",
    "grep",
    "kill",
    "mkdir",
    "openssl",
    "pip",
    "wait",
} | {
    "docker",
    "kubectl",
    "sbatch",
    "torchx",
}
# Shown as they are: output, and what Sphinx makes of a block.
SHOWN = {"", "text", "{eval-rst}", "{toctree}"}


def blocks(*languages: str) -> list[tuple[Path, Block]]:
    return [
        (page, block)
        for page in PAGES
        for block in code_blocks(page)
        if block.language in languages
    ]


def where(page: Path, block: Block) -> str:
    return f"{page.relative_to(ROOT)}:{block.line}"


def names(found: list[tuple[Path, Block]]) -> list[str]:
    return [where(*each) for each in found]


def command_lines(text: str) -> list[list[str]]:
    """The words of each command, without variables, pipes, files and comments."""
    commands: list[list[str]] = []
    is_target = False
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if is_target:
                is_target = False
            elif set(word) <= set("<>"):
                is_target = True  # the file that follows
            elif set(word) <= set("&|;"):
                if command:
                    commands.append(command)
                command = []
            elif command or not re.match(r"[A-Z_a-z]+=", word):
                command.append(word)
    return commands


COMMANDS = blocks("sh", "bash", "shell", "console")


@pytest.mark.parametrize(("page", "block"), COMMANDS, ids=names(COMMANDS))
def test_the_commands_of_a_block_exist_and_accept_their_flags(page: Path, block: Block) -> None:
    for command in command_lines(block.text):
        check_command(*command)


def check_command(program: str, *arguments: str) -> None:
    if program in SERVICES:
        SERVICES[program].make_context(program, list(arguments))
    elif program == "torchft_lighthouse":
        hyphenated = [_with_hyphens(each) for each in arguments]
        SERVICES["lighthouse"].make_context(program, hyphenated)
    elif program == "torchft-run":
        check_program(get_args_parser().parse_args(arguments).training_script)
    elif program == "torchrun":
        check_program(torchrun_parser().parse_args(arguments).training_script)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        targets = [word for word in arguments if "=" not in word]
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    elif program.rpartition("/")[2] in ("python", "python3"):
        check_python(*arguments)
    elif program not in OTHER_PROGRAMS:
        scripts = importlib.metadata.entry_points(group="console_scripts")
        known = {script.name for script in scripts}
        assert program in known, f"what is {program!r}? If not ours, add it to OTHER_PROGRAMS"


def check_python(first: str, *arguments: str) -> None:
    if first != "-m":
        check_program(first, *arguments)
    elif arguments[0].startswith(("tools.", "torchft_svc.")):
        assert importlib.util.find_spec(arguments[0]) is not None, arguments[0]


def check_program(script: str, *arguments: str) -> None:
    """A program of ours has the flags that it is given; the reader's own is not there."""
    if not script.startswith("examples/"):
        assert script in ("train.py", "plain.py", "torchft_svc.compat"), script
        return
    text = (ROOT / script).read_text()
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    assert not [flag for flag in flags if f'"{flag}"' not in text]


PYTHON = blocks("python", "py")


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=names(PYTHON))
def test_every_python_block_belongs_to_a_program_that_runs(page: Path, block: Block) -> None:
    if page != FOLLOWED:
        assert program_of(page, block), "add it to a program of tests/support/page_programs.py"


def test_every_program_is_of_a_block_that_is_there() -> None:
    found = {program_of(page, block) for page, block in PYTHON if page != FOLLOWED}
    assert {begin for program in PROGRAMS.values() for begin in program.blocks} == found


DATA = blocks("json", "yaml", "toml")


@pytest.mark.parametrize(("page", "block"), DATA, ids=names(DATA))
def test_data_can_be_read(page: Path, block: Block) -> None:
    if block.language == "json":
        for line in (
            [block.text] if block.text.startswith(("{\n", "[\n")) else block.text.splitlines()
        ):
            json.loads(line)
    elif block.language == "yaml":
        assert list(yaml.safe_load_all(block.text))


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    checked = {"sh", "bash", "shell", "console", "python", "py", "json", "yaml", "diff"}
    languages = {
        block.language: where(page, block) for page in PAGES for block in code_blocks(page)
    }
    assert not {kind: at for kind, at in languages.items() if kind not in checked | SHOWN}


FAILURES = sorted((ROOT / "docs" / "failures").glob("*.md"))


@pytest.mark.parametrize("page", FAILURES, ids=lambda page: page.name)
def test_the_output_on_a_page_of_failures_is_that_of_the_code(page: Path) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "torchft_svc").rglob("*.py"))
    for block in code_blocks(page):
        if block.language == "":
            for line in block.text.splitlines():
                parts = re.split(r"\.\.\.|\b[ab]\b|\d+(?:\.\d+)?(?: kB)?|[:;()]", line)
                absent = [part for part in parts if part.strip() and part.strip() not in code]
                assert not absent, f"{where(page, block)}: {line}: {absent}"


def test_each_kind_of_incident_is_on_a_page_of_failures() -> None:
    texts = "\n".join(page.read_text() for page in FAILURES)
    assert not [kind for kind in IncidentKind if f"`{kind.value}`" not in texts]
