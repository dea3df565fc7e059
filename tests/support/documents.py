"""The code blocks of the documents: found, saved as files, run in a shell, compared with output."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from support.programs import Program

_FENCE = re.compile(r"^( *)```([\w{}-]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
# What a test has done already: it runs in an environment of its own, in an empty folder.
_INSTALLS = ("python3 -m venv", ".venv/bin/python -m pip", "export PATH=", "mkdir tutorial")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line where it begins.

    ``language``: empty for output, in braces for a directive of Sphinx. ``section``: the last title
    above it.
    """

    language: str
    text: str
    line: int
    section: str


def code_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            language,
            "".join(f"{line.removeprefix(indent)}\n" for line in body.splitlines()),
            text.count("\n", 0, match.start()) + 1,
            text[: match.start()].rpartition("\n## ")[2].partition("\n")[0],
        )
        for match in _FENCE.finditer(text)
        for indent, language, body in [match.groups()]
    ]


def apply_diff(diff: str, text: str) -> str:
    """``text`` with each hunk of ``diff`` applied where its lines are; ``@@`` separates hunks."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        assert text.count(old) == 1, f"these lines are not in the file:\n{old}"
        text = text.replace(old, new)
    return text


def sides(diff: str) -> tuple[str, str]:
    """The program before and after a diff that contains all of its lines."""
    lines = diff.splitlines()
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    return before, after


def plain(line: str) -> str:
    """A line without what differs from run to run; the number of groups stays."""
    line = re.sub(r"^[\d-]+ [\d:,]+ ", "", line)
    line = re.sub(r":[0-9a-f]{8}-[0-9a-f-]{27}: .*$", ":...", line)  # a group, and how it was lost
    line = re.sub(r"\((its session ended|the process of .*|group rank 0 .*)\)$", "(...)", line)
    # What is noticed first of a process that was killed.
    line = re.sub(
        r"(the process of group rank 0 is [a-z ]+|group rank 0 is gone: [a-z, ]+)$", "...", line
    )
    # Why a group is gone may be known a moment after the next quorum, on a busy machine.
    line = re.sub(r"(gone: \w+) \(.*\)", r"\1", line)
    line = re.sub(r"(?<!\S)-(?!\S)", "N", line)  # a time that is not known
    line = re.sub(r"\d+(\.\d+)?( [kM]?B)?(?! groups?\b)", "N", line)
    line = re.sub(r"N \(N\)", "N", line)
    return re.sub(r" +", " ", line)  # the columns of a table


def shows(seen: str, wanted: str) -> bool:
    """Whether a line is one that a page shows, or the same of a later step of its program."""
    own = re.match(r"(\w+: )?step (\d+), ", wanted)
    if own is not None:
        steps = re.findall(rf"{own[1] or ''}step (\d+), ", seen)
        if not any(int(step) >= int(own[2]) for step in steps):
            return False
    begin, dots, end = plain(wanted).partition("...")
    found = plain(seen)
    return begin in found and end in found if dots else begin in found


class Page:
    """A page that is followed as a reader does: programs are saved, commands typed, output read.

    A Python block is the file that its first line names; a diff changes the last one.
    """

    def __init__(self, path: Path, folder: Path, changes: dict[str, str]) -> None:
        """``changes``: what is replaced in each block, such as ports."""
        self._path, self._folder, self._changes = path, folder, changes
        self._file = folder / "none"
        self._pipe = folder / "go"
        os.mkfifo(self._pipe)
        # One shell for all blocks, which runs each file whose name arrives.
        reads = f'while read -r file <&3; do . "./$file" 3<&-; done 3< {self._pipe}'
        self.command = ["bash", "-c", f"cd {folder}\n{reads}\nwait\n"]

    def follow(
        self, shell: Program, deadline_s: float, looks: Mapping[str, Callable[[], None]]
    ) -> int:
        """Follow the page to its end; return the number of outputs that were seen.

        ``shell`` runs ``command``; it ends when all that the page has started has ended.
        ``looks``: what is looked at, after each section of the page, by its title.
        """
        num_outputs = 0
        with self._pipe.open("w", buffering=1) as pipe:
            section = ""
            for block in self._blocks():
                if block.section != section:
                    looks.get(section, int)()
                    section = block.section
                if block.language == "python":
                    self._file = self._folder / block.text.split()[1]
                    self._file.write_text(block.text)
                elif block.language == "diff":
                    self._file.write_text(apply_diff(block.text, self._file.read_text()))
                elif block.language == "sh":
                    file = self._folder / f"line-{block.line}.sh"
                    file.write_text(_commands(block.text))
                    shell.read_so_far().clear()
                    pipe.write(f"{file.name}\n")
                else:
                    num_outputs += 1
                    self._compare(block, shell, deadline_s)
        return num_outputs

    def _blocks(self) -> Iterator[Block]:
        for block in code_blocks(self._path):
            text = block.text
            for old, new in self._changes.items():
                text = text.replace(old, new)
            yield replace(block, text=text)

    def _compare(self, block: Block, shell: Program, deadline_s: float) -> None:
        """Wait for each line, in any order, since several programs write."""
        for line in block.text.splitlines():
            if line.strip() == "...":  # lines that the page leaves out
                continue
            where = f"{self._path.name}, from line {block.line} on: {line}"
            shell.wait_until(lambda seen: shows(seen, line), where, deadline_s)  # noqa: B023


def _commands(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith(_INSTALLS)]
    return "\n".join([*lines, ""])
