"""Writes the reference of all settings from the code that reads them: `docs/settings.md`.

Environment variables come from the properties of `torchft_svc.env.Environment`, flags from the
commands' own parsers, arguments from signatures and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import click
from torch.distributed import run as torchrun

from torchft_svc.buddy import cli as buddy_cli
from torchft_svc.client import DistributedDataParallel, HTTPTransport, Manager
from torchft_svc.elastic.run import get_args_parser
from torchft_svc.env import Environment
from torchft_svc.lighthouse_server import cli as lighthouse_cli
from torchft_svc.lighthouse_server.operator_commands import OPERATOR_COMMANDS as LIGHTHOUSE_COMMANDS
from torchft_svc.manager_server import cli as manager_cli
from torchft_svc.manager_server.operator_commands import OPERATOR_COMMANDS as MANAGER_COMMANDS
from torchft_svc.trainer import Trainer

PAGE = Path("docs/settings.md")
_PACKAGE = Path(__file__).parents[2] / "torchft_svc"
_HEAD = """\
# Settings

Every variable, flag and argument. `python -m tools.docs` writes this page from the code, and a test
compares both. [Operations](operations.md#settings) describes what the settings are good for.

An argument overrides the environment, and the environment overrides the default. An empty variable
counts as not set; for TLS files, tokens, users and passwords it is an error. No duration may exceed
24 days; use that value for "no limit".
"""
# Who reads a variable, by the package that does.
_PROGRAMS = {
    "buddy": "`torchft-buddy`",
    "client": "trainers",
    "compat": "trainers",
    "trainer": "`Trainer`",
    "lighthouse_server": "`lighthouse`",
    "manager_server": "`torchft-manager`",
    "elastic": "`torchft-run`",
    "coordination": "`LighthouseClient`",
}
_EVERYBODY = "all programs"
# Code of one package that runs in another program.
_ELSEWHERE = {
    "manager_server/early.py": "trainers",
    "manager_server/child.py": "trainers",
    "elastic/runtime.py": "workers of `torchft-run`",
    "settings.py": "trainers",
    "host/exit_verdict.py": "trainers",
}
# The flags that every command has.
_SHARED_FLAGS = ("--tls-cert", "--tls-key", "--tls-ca", "--token-file")
_DEFAULT_IN_TEXT = re.compile(r" \(default: ([^)]*)\)")
_READERS = {
    "_int": "whole number",
    "_seconds": "seconds",
    "_bool": "true or false",
    "_text": "text",
    "_protecting": "text, not empty",
}


@dataclass(slots=True)
class Variable:
    """An environment variable: ``names`` that count (the first is ours), and who reads it."""

    names: list[str]
    kind: str
    default: str
    meaning: str
    programs: set[str] = field(default_factory=set)


def variables() -> list[Variable]:
    """Return each variable that `Environment` reads, in its order."""
    readers = _readers()
    return [
        Variable(
            names=re.findall(r"``([A-Z_]+)(?:=\w+)?``", head),
            kind=_kind(name),
            default=_default_in(rest),
            meaning=_sentence(_DEFAULT_IN_TEXT.sub("", rest)),
            programs=readers.get(name, set()),
        )
        for name, head, rest in _documented_properties()
    ]


def _documented_properties() -> Iterator[tuple[str, str, str]]:
    """The name of each property, the names of its variables, and what follows the colon."""
    for name, value in vars(Environment).items():
        if isinstance(value, property):
            text = " ".join((inspect.getdoc(value.fget) or "").split())
            head, colon, rest = text.partition(": ")
            if not (colon and head.startswith("``")):
                raise ValueError(f"env.{name}: its docstring must begin with ``VARIABLE``: ...")
            yield name, head, rest


def _default_in(text: str) -> str:
    found = _DEFAULT_IN_TEXT.search(text)
    return found[1].replace("``", "`") if found else ""


def _kind(name: str) -> str:
    """What a variable may hold: from the reader that its property calls."""
    source = inspect.getsource(getattr(Environment, name).fget)
    called = re.findall(r"self\.(_\w+)\(", source)
    return "; ".join(dict.fromkeys(_READERS[each] for each in called if each in _READERS))


def _readers() -> dict[str, set[str]]:
    """The programs that read each property of `Environment`."""
    found: dict[str, set[str]] = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        place = file.relative_to(_PACKAGE)
        program = _PROGRAMS.get(place.parts[0], _EVERYBODY)
        program = _ELSEWHERE.get(place.as_posix(), program)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _is_environment(node.value):
                found.setdefault(node.attr, set()).add(program)
    return found


def _is_environment(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.endswith(("environment", "Environment()"))


def _sentence(text: str) -> str:
    text = text.replace("``", "`").replace("|", "\\|")
    return text[:1].upper() + text[1:]


def _with_flags(found: list[Variable]) -> list[Variable]:
    """Add what only a command's flag reads, and which command reads it."""
    known = {name: variable for variable in found for name in variable.names}
    for program, command in _commands():
        for parameter in command.params:
            for name in _variables_of(parameter):
                if name not in known:
                    kind, default = _flag_kind(parameter), _flag_default(parameter)
                    known[name] = Variable([name], kind, default, _help(parameter))
                    found.append(known[name])
                known[name].programs.add(f"`{program.split()[0]}`")
    return found


# -- flags -----------------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, click.Command]]:
    """Each command line with its parser."""
    yield "lighthouse", lighthouse_cli.main
    yield from ((f"lighthouse {command.name}", command) for command in LIGHTHOUSE_COMMANDS)
    yield "torchft-manager", manager_cli.main
    yield from ((f"torchft-manager {command.name}", command) for command in MANAGER_COMMANDS)
    yield "torchft-buddy", buddy_cli.main


def _variables_of(parameter: click.Parameter) -> list[str]:
    given = parameter.envvar
    names = [given] if isinstance(given, str) else list(given or [])
    return names + re.findall(r"\[env: (\w+)\]", getattr(parameter, "help", None) or "")


def _help(parameter: click.Parameter) -> str:
    text = re.sub(r"\s*\[env: \w+\]", "", getattr(parameter, "help", None) or "")
    return _sentence(text)


def _flag_kind(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return "flag"
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    names = {"integer": "whole number", "float": "number", "ms": "milliseconds"}
    name = str(kind.name)
    return names.get(name.removesuffix(" range"), name)


def _flag_default(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return ""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.required:
        return "required"
    value = parameter.to_info_dict()["default"]
    return "" if parameter.is_flag or value in (None, "") else f"`{value}`"


def _command_table(command: click.Command, *, shared: bool = False) -> list[str]:
    """The flags of a command; ``shared``: those that every command has, else the others."""
    rows = [
        _row(
            f"`{', '.join(parameter.opts)}`",
            _flag_kind(parameter),
            _flag_default(parameter),
            ", ".join(f"`{name}`" for name in _variables_of(parameter)),
            _help(parameter),
        )
        for parameter in command.params
        if isinstance(parameter, click.Option)
        and not parameter.hidden
        and (parameter.opts[0] in _SHARED_FLAGS) is shared
    ]
    return ["| flag | value | default | environment | meaning |", _rule(5), *rows]


def _launcher_table() -> list[str]:
    of_torch = torchrun.get_args_parser()._actions
    torch_flags = {flag for action in of_torch for flag in _flags(action)}
    rows = [
        _row(
            f"`{', '.join(_flags(action))}`",
            "flag" if action.nargs == 0 else f"`{action.metavar or action.dest.upper()}`",
            "" if action.default in (None, False) else f"`{action.default}`",
            f"`PET_{action.dest.upper()}`",
            _sentence(action.help or ""),
        )
        for action in get_args_parser()._actions
        if _flags(action) and not torch_flags & set(_flags(action))
    ]
    return ["| flag | value | default | environment | meaning |", _rule(5), *rows]


def _flags(action: argparse.Action) -> list[str]:
    return [flag for flag in action.option_strings if "_" not in flag]


# -- arguments -------------------------------------------------------------------------------------


def _argument_table(owner: Callable[..., Any]) -> list[str]:
    """The arguments of a class or function, each with the sentence of its docstring."""
    meanings = _described_arguments(owner)
    rows = []
    for name, parameter in inspect.signature(owner).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name not in meanings:
            continue  # takes what is unknown, to refuse it
        assert name in meanings, f"{owner.__name__}: its docstring does not describe {name}"
        rows.append(_row(f"`{name}`", _default(parameter), meanings[name]))
    return ["| argument | default | meaning |", _rule(3), *rows]


def _described_arguments(owner: Callable[..., Any]) -> dict[str, str]:
    """What the section ``Args`` of a docstring says of each name; names may share a sentence."""
    _, _, section = (inspect.getdoc(owner) or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    meanings: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", f"\n{section}"):
        names, colon, text = " ".join(entry.split()).partition(": ")
        if colon:
            for name in names.split(", "):
                meanings[name.lstrip("*")] = _sentence(text)
    return meanings


def _default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required" if parameter.kind is not parameter.VAR_KEYWORD else ""
    if value is None:
        return ""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, Enum):
        return f"`{type(value).__name__}.{value.name}`"
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"`{value.__name__}`"
    return f"`{value!r}`"


# -- the page --------------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the whole page."""
    parts = [_HEAD, "## Environment variables\n", *_variable_table(), ""]
    parts += ["## Arguments in Python\n"]
    parts += ["An argument that is not given is taken from its variable, where it has one.\n"]
    for owner in (Manager, DistributedDataParallel, HTTPTransport, Trainer):
        parts += [f"### `{owner.__name__}`\n", *_argument_table(owner), ""]
    parts += ["## Flags\n", "Every command but `torchft-run` also has these:\n"]
    parts += [*_command_table(lighthouse_cli.main, shared=True), ""]
    for program, command in _commands():
        parts += [f"### `{program}`\n", f"{_sentence(inspect.cleandoc(command.help or ''))}\n"]
        parts += [*_command_table(command), ""]
    parts += ["### `torchft-run`\n"]
    parts += ["It has all flags of torch's `torchrun`, and these:\n", *_launcher_table()]
    return "\n".join(parts) + "\n"


def _variable_table() -> list[str]:
    rows = [
        _row(
            ", ".join(f"`{name}`" for name in variable.names),
            variable.kind,
            variable.default,
            _readers_cell(variable.programs),
            variable.meaning,
        )
        for variable in _with_flags(variables())
    ]
    return ["| variable | value | default | read by | meaning |", _rule(5), *rows]


def _readers_cell(programs: set[str]) -> str:
    return _EVERYBODY if _EVERYBODY in programs else ", ".join(sorted(programs))


def _row(*cells: str) -> str:
    text = " | ".join(" ".join(cell.split()) for cell in cells)
    return re.sub(r"\|  (?=\|)", "| ", f"| {text} |")


def _rule(columns: int) -> str:
    return f"| {' | '.join(['---'] * columns)} |"
