"""Exports credited queries as a CSV table, entry by entry, so that a long log needs no memory."""

import csv
import io
from collections.abc import Iterator

from imprint.credit import log, tables
from imprint.credit.statements import COLUMNS, describe_entry
from imprint.display import for_csv
from imprint.serve.credit.describing import CHANGED
from imprint.serve.credit.desk import CreditDesk
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
                    rows.append(_join((entry.sequence, *[""] * (len(EXPORTED) - 2), CHANGED)))
                elif filters.match(leaf):
                    policy = policies.get(leaf.about["policy"])
                    for row in scope.choose(leaf.rows):
                        if filters.sources is not None and row["source"] not in filters.sources:
                            continue
                        if policy is None:
                            rows.append(_join((entry.sequence, *[""] * (len(EXPORTED) - 2), "its policy is missing")))
                            break
                        values = describe_entry(leaf, dict(row), policy, currency)
                        cells = [values[name] for name in COLUMNS[1:]]
                        rows.append(_join((entry.sequence, row["source"], *cells, "")))
        yield "".join(rows)


def _join(cells: tuple[object, ...]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(["" if cell is None else for_csv(cell) for cell in cells])
    return buffer.getvalue()
