"""A table as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_GAP = "  "


class Row:
    """One row of a table; notes stand indented below it."""

    def __init__(self, columns: Sequence[Any]) -> None:
        self.columns = [str(column) for column in columns]
        self.annotations: list[PTable] = []

    def append_annotation_table(self, table: PTable) -> None:
        """Let a table of notes stand below this row."""
        self.annotations.append(table)


class PTable:
    """Rows whose columns are aligned.

    Args:
        sortable: rows are printed in the order of their first column.
    """

    def __init__(self, sortable: bool = False) -> None:
        self._rows: list[Row] = []
        self._sortable = sortable

    def add_row(self, columns: Sequence[Any]) -> Row:
        """Add a row; columns are whatever ``str`` makes of them."""
        row = Row(columns)
        self._rows.append(row)
        return row

    def get_string(self, first_column_width: int | None = None, second_column_width: int | None = None) -> str:
        """The table as text, a line for each row.

        Args:
            first_column_width: characters of the first column, at least; None for what it needs.
            second_column_width: the same for the second.
        """
        rows = sorted(self._rows, key=lambda r: r.columns[:1]) if self._sortable else self._rows
        count = max((len(row.columns) for row in rows), default=0)
        widths = [max(len(r.columns[i]) for r in rows if i < len(r.columns)) for i in range(count)]
        for place, width in enumerate((first_column_width, second_column_width)):
            if width is not None and place < count:
                widths[place] = max(widths[place], width)
        lines: list[str] = []
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row.columns, widths, strict=False))
            lines.append(_GAP.join(cells).rstrip())
            notes = (line for table in row.annotations for line in table.get_string().splitlines())
            lines += [f"{_GAP}{line}" for line in notes]
        return "\n".join(lines)
