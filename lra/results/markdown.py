"""A table of text, and text as Markdown shows it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lra.results.leaderboard import Cell
from lra.results.published import FAIL


@dataclass(frozen=True)
class Table:
    """Plain text cells; `best` holds (row, column) of those in bold."""

    header: list[str]
    rows: list[list[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def is_numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column]]
        # A variant may be called 256, and is no quantity.
        return (
            bool(cells)
            and self.header[column] != "Variant"
            and all(re.match(rf"[-+]?\d|-$|{FAIL}|out of memory|too slow", cell) for cell in cells)
        )

    def without_empty_columns(self) -> Table:
        """The same, of those columns where some row has a text."""
        kept = [j for j in range(len(self.header)) if any(row[j] for row in self.rows)]
        return Table(
            [self.header[j] for j in kept],
            [[row[j] for j in kept] for row in self.rows],
            frozenset((i, kept.index(j)) for i, j in self.best),
        )

    def markdown(self) -> str:
        sides = ["---:" if self.is_numeric(j) else "---" for j in range(len(self.header))]
        lines = ["| " + " | ".join(self.header) + " |", "|" + "|".join(sides) + "|"]
        for i, row in enumerate(self.rows):
            cells = [escape_markdown(cell) for cell in row]
            cells = [f"**{c}**" if (i, j) in self.best else c for j, c in enumerate(cells)]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown and the HTML in it show as it stands, on one line."""
    text = re.sub(r"[\\`*|<>]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])", r"\\\g<0>", text)
    return " ".join(text.replace("&", "&amp;").split())


def marked(cell: Cell) -> str:
    """A cell's text and the letters of its marks."""
    return f"{cell} [{','.join(cell.marks)}]" if cell.marks else str(cell)
