"""How fast a ledger is: appends singly and in batches beside plain inserts of the same bytes, and verification.

    OMP_NUM_THREADS=1 python benchmarks/ledger.py --out runs/ledger                # SQLite, a million entries
    python benchmarks/ledger.py --entries 20000 --url postgresql://user@host/name  # an empty database

Entries have twelve sources. The plain insert writes the same rows (header, lines, salt, hash) into a table of the same
shape, with the same durability, in transactions of the same size; both go through SQLAlchemy. "append" writes entries
that are already composed; "credit" is all of `Ledger.credit`: the policy, the hashes of the lines, idempotency and
payloads. Ratios come from one run; figures are medians of several. The processor's seconds are this process's own, on
a machine that others share.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import MetaData, insert
from sqlalchemy.schema import CreateTable

from imprint.attribution.labels import Labels
from imprint.attribution.result import Attribution
from imprint.credit import Ledger, Policy, Tariff, log, tables
from imprint.credit.drafting import draft_entries
from imprint.credit.leaves import Leaf, compose, join_lines
from imprint.credit.verifying import verify
from imprint.validation.verdict import Figures, Verdict

SOURCES = tuple(f"publisher-{place:02}" for place in range(12))
POLICY = Policy("benchmark", question="expected", floor=0.01)
FIGURES = Figures(100, 8, 8, 3, correlation=0.9, p=0.001, slope=1.0, slope_low=0.8, slope_high=1.25, by_size=0.2)
BATCH = 1_000


def make_result(count: int, seed: int) -> Attribution:
    """Make up the scores of some queries."""
    labels = Labels(
        n=1000,
        source_ids=SOURCES,
        source_names=SOURCES,
        source_sizes=(80,) * 12,
        measure="loss",
        better="lower",
        details={"readout": "jvp", "examples_of_several_sources": 0},
        fingerprints={"store": "5" * 64, "model": "a" * 64, "sources": "b" * 64},
        validation=Verdict("expected", FIGURES),
    )
    generator = torch.Generator().manual_seed(seed)
    return Attribution(labels, -100 * torch.randn(count, len(SOURCES), generator=generator))


def make_leaves(first: int, count: int, seed: int) -> list[Leaf]:
    """Compose entries for places in the log from `first` on."""
    names, drafts_of = [f"q{first + place}" for place in range(count)], make_result(count, seed)
    drafts = draft_entries(drafts_of, POLICY, [2_000] * count, names, [None] * count)
    now = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime())
    return [compose("credit", first + place, now, draft.about, draft.lines) for place, draft in enumerate(drafts)]


def append(ledger: Ledger, leaves: list[Leaf]) -> None:
    """Append composed entries in one transaction."""
    with tables.writing(ledger.engine) as (connection, frontier, _):
        log.append(connection, frontier, leaves)


plain = tables.leaves.to_metadata(MetaData(), name="plain")


def insert_plainly(ledger: Ledger, leaves: list[Leaf]) -> None:
    """Insert the same bytes into a plain table, in one transaction."""
    rows = [
        {
            "sequence": leaf.sequence,
            "kind": "credit",
            "time": leaf.about["time"],
            "hash": leaf.hash,
            "header": leaf.header,
            "lines": join_lines(leaf.lines),
            "salt": leaf.salt,
        }
        for leaf in leaves
    ]
    with ledger.engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(insert(plain), rows)


def measure_rate(write: Callable[[list[Leaf]], None], batches: list[list[Leaf]]) -> float:
    """Return entries per second."""
    began = time.perf_counter()
    for batch in batches:
        write(batch)
    return sum(map(len, batches)) / (time.perf_counter() - began)


def compare_appends(ledger: Ledger, repeats: int) -> dict[str, Any]:
    """Compare appends with plain inserts, one at a time and in batches."""
    ledger.credit(make_result(1, seed=0), POLICY)  # with which the policy comes into the log
    with ledger.engine.begin() as connection:
        connection.execute(CreateTable(plain, if_not_exists=True))
    found: dict[str, Any] = {}
    for name, size, count in (("singly", 1, 200), ("in batches", BATCH, 10)):
        rates: dict[str, list[float]] = {"append": [], "plain insert": [], "credit": []}
        for repeat in range(repeats):
            first = len(ledger)
            batches = [make_leaves(first + size * turn, size, seed=repeat * count + turn) for turn in range(count)]
            for batch in batches:
                for leaf in batch:
                    _ = leaf.hash  # both write it, and composing is not what is measured
            rates["plain insert"].append(measure_rate(lambda batch: insert_plainly(ledger, batch), batches))
            rates["append"].append(measure_rate(lambda batch: append(ledger, batch), batches))
            results = [make_result(size, seed=turn) for turn in range(count)]
            began = time.perf_counter()
            for result in results:
                ledger.credit(result, POLICY)
            rates["credit"].append(size * count / (time.perf_counter() - began))
        medians = {each: statistics.median(values) for each, values in rates.items()}
        ratio = statistics.median(
            one / other for one, other in zip(rates["append"], rates["plain insert"], strict=True)
        )
        found[name] = {**medians, "append / plain insert": ratio}
    return found


def fill(ledger: Ledger, entries: int) -> float:
    """Credit entries until the ledger has so many; return entries per second."""
    began, first = time.perf_counter(), len(ledger)
    while (left := entries - len(ledger)) > 0:
        ledger.credit(make_result(min(BATCH, left), seed=left), POLICY)
    return (entries - first) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000, help="in the ledger that is verified")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--url", help="of an empty database; by default a SQLite file")
    parser.add_argument("--out", type=Path, help="a folder for the SQLite file; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tariff = Tariff("EUR", per_query=2_000)
        (folder / "appends.db").unlink(missing_ok=True)
        ledger = Ledger.create(options.url or folder / "appends.db", tariff)
        found = compare_appends(ledger, options.repeats)
        if options.url is None:
            there = (folder / "credit.db").exists()  # of an earlier run: verified again, not filled
            ledger = Ledger(folder / "credit.db") if there else Ledger.create(folder / "credit.db", tariff)
        if len(ledger) < options.entries:
            found["filled at"] = fill(ledger, len(ledger) + options.entries)
        began = time.process_time()
        checked = verify(ledger)
        found["verification"] = {
            "entries": checked.entries,
            "seconds": checked.seconds,
            "seconds of the processor": time.process_time() - began,
            "per second": checked.entries / checked.seconds,
            "holds": checked.holds,
        }
        if options.url is None:
            found["bytes per entry"] = (folder / "credit.db").stat().st_size / len(ledger)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
