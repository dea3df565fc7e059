"""Writes SVG pictures: shapes and text on a white card, readable in light and in dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

INK, QUIET, LINE = "#1f2933", "#5f6b7a", "#c5ccd5"
BLUE, ORANGE, GREEN = "#3568b8", "#d9772b", "#2f8f5b"
RED, YELLOW, PALE = "#c0392b", "#e3a008", "#eef1f5"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def number(value: float) -> str:
    """A coordinate, as short as a tenth of a pixel allows."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


@dataclass(slots=True)
class Picture:
    """A picture of ``width`` and ``height`` pixels; ``title`` is read out by screen readers."""

    width: float
    height: float
    title: str
    _parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, color: str = INK,
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        style = f'font-size="{number(size)}" fill="{color}" text-anchor="{anchor}"'
        style += ' font-weight="600"' if bold else ""
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}" {style}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str = "none",
        stroke: str = "none", radius: float = 0, opacity: float = 1,
    ) -> None:  # fmt: skip
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        round_ = f' rx="{number(radius)}"' if radius else ""
        faint = f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
        self._parts.append(f'<rect {place}{round_} fill="{fill}" stroke="{stroke}"{faint}/>')

    def path(
        self, path: str, *, stroke: str = INK, width: float = 1.2, dash: str = "",
        arrow: bool = False,
    ) -> None:  # fmt: skip
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += ' marker-end="url(#arrow)"' if arrow else ""
        shape = f'd="{path}" fill="none" stroke="{stroke}" stroke-width="{number(width)}"'
        self._parts.append(f"<path {shape}{more}/>")

    def render(self, description: str = "") -> str:
        """The whole file; ``description`` is for those who read its source."""
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        box = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        arrow = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0.5L8 4L0 7.5z" fill="{QUIET}"/></marker>'
        )
        card = f'<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="{LINE}"/>'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img" '
                f'font-family="{_FONT}">',
                f"<title>{escape(self.title)}</title>",
                *([f"<desc>{escape(description)}</desc>"] if description else []),
                f"<defs>{arrow}</defs>",
                card,
                *self._parts,
                "</svg>\n",
            ]
        )

    def write(self, path: Path, description: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.render(description), encoding="utf-8")
