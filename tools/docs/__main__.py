"""Writes what the documents have from the code: ``python -m tools.docs``; a test compares both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.docs import diagrams
from tools.docs.metrics import metrics_table
from tools.docs.settings import PAGE, settings_page

ROOT = Path(__file__).parents[2]
_IMAGES = Path("docs/images")
_PICTURES = {
    _IMAGES / "parts.svg": diagrams.parts_picture,
    _IMAGES / "step.svg": diagrams.step_diagram,
    _IMAGES / "link.svg": diagrams.link_diagram,
    _IMAGES / "run.svg": diagrams.run_diagram,
}
# What is between `<!-- NAME -->` and `<!-- end of NAME -->` on these pages.
_TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    Path("docs/concepts.md"): {
        "group states": diagrams.group_states_table,
        "reactions": diagrams.reactions_table,
    },
    Path("docs/observability.md"): {"metrics": metrics_table},
}


def generated() -> dict[Path, str]:
    """The text of each file with generated parts, by its path from the root of the repository."""
    pictures = {path: draw().render() for path, draw in _PICTURES.items()}
    return {PAGE: settings_page()} | pictures | {page: _filled(page) for page in _TABLES}


def _filled(page: Path) -> str:
    """A page with its tables replaced.

    Raises:
        ValueError: it has no place for one of them.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, write in _TABLES[page].items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page}: there is no place for the table of {name}")
        text = f"{before}{begin}\n{write()}\n\n{end}{after}"
    return text


def main() -> None:
    for path, text in generated().items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
