"""Exports credited queries as a CSV table, entry by entry, so that a long log needs no memory."""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from imprint.credit import log, tables
from imprint.credit.leaves import Leaf
from imprint.credit.statements import COLUMNS, describe_entry
from imprint.display import for_csv
from imprint.serve.credit.describing import HIDDEN
from imprint.serve.credit.desk import CreditDesk
from imprint.serve.credit.faults import CHANGED, find_wrong
from imprint.serve.credit.reading import Filters, find_place, read_chunk
from imprint.serve.credit.scope import Scope

EXPORTED = ("entry", "source", *COLUMNS[1:], "problem")
_AT_ONCE = 500


def export_entries(desk: CreditDesk, scope: Scope, filters: Filters) -> Iterator[str]:
    """Iterate over the lines of a table with one row for each source of each query, the oldest first.

    An entry that was changed has one row, which says so.
    """
    policies, currency = desk.policies(), desk.currency
    with tables.reading(desk.ledger.engine) as connection:
        size = log.read_size(connection)
        start = 0 if filters.since is None else find_place(connection, filters.since, size)
        stop = size if filters.until is None else find_place(connection, filters.until, size)
    yield _join(EXPORTED)
    for first in range(start, stop, _AT_ONCE):
        rows = list[str]()
        with tables.reading(desk.ledger.engine) as connection:
            for entry in read_chunk(connection, first, min(stop, first + _AT_ONCE)):
                leaf = entry.leaf
                if leaf is None:
                    rows.append(_refuse(entry.sequence, CHANGED))
                elif filters.match(leaf) and (lines := _choose(leaf, scope, filters)):
                    if wrong := find_wrong(leaf, policies, currency):
                        rows.append(_refuse(entry.sequence, "; ".join(wrong) if scope.is_all else HIDDEN))
                        continue
                    for row in lines:
                        values = describe_entry(leaf, dict(row), policies[leaf.about["policy"]], currency)
                        cells = [values[name] for name in COLUMNS[1:]]
                        rows.append(_join((entry.sequence, row["source"], *cells, "")))
        yield "".join(rows)


def _choose(leaf: Leaf, scope: Scope, filters: Filters) -> list[Mapping[str, Any]]:
    """Return the lines of a query that are wanted, and may be shown."""
    return [row for row in scope.choose(leaf.rows) if filters.sources is None or row["source"] in filters.sources]


def _refuse(sequence: int, problem: str) -> str:
    return _join((sequence, *[""] * (len(EXPORTED) - 2), problem))


def _join(cells: tuple[object, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(["" if cell is None else for_csv(cell) for cell in cells])
    return buffer.getvalue()
