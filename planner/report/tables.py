"""How tables and headings of reports look."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def table(*columns: str) -> Table:
    """A table whose columns named with a leading ``>`` are flush right and stay on one line."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left", no_wrap=right)
    return made
