"""Writes the statements of a closed period: for each source a page to read or print, tables, and proofs to check.

    NAME.html      who is paid what, why, how sure that is, and how to check it
    NAME.csv       every credited query, one row each; NAME.parquet has the same
    NAME.jsonl     the same with proofs: `imprint credit check NAME.jsonl --public-key credit.key.pub`

Entries are read once for many sources, and nothing but the figures of a page is kept in memory.
"""

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imprint.credit import log, tables
from imprint.credit.heads import Head
from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.merkle import Node, check_inclusion, prove_inclusion
from imprint.credit.money import MICRO, PARTS
from imprint.credit.naming import name_files
from imprint.credit.pages import render_statement
from imprint.credit.policy import Policy
from imprint.credit.proofs import describe_statement, encode_proof, prove_growth, prove_leaf
from imprint.credit.reading import find_period, read_kept_heads, read_policies
from imprint.display import for_csv
from imprint.errors import CreditError, DamagedLog, MissingExtra
from imprint.runtime.progress import Advance, Progress
from imprint.store.files import refuse_irregular, temporary_folder

COLUMNS = (
    *("entry", "recorded", "query", "question", "validation", "rule"),
    *("helped_by", "standard_error", "needed", "share", "pot", "amount", "currency"),
)
"""The columns of the tables, by the names that the page has for them. `share` is from 0 to 1; `pot` is what the query
paid and `amount` what the source gets of it, in units of the currency, both empty where the pot of the period pays."""
LISTED = 12
"""How many queries the page lists."""
_AT_ONCE = 100  # sources whose files are written at once
_BUFFER = 10_000  # rows of a Parquet table that are written together
_SUFFIXES = (".html", ".csv", ".parquet", ".jsonl")


@dataclass
class Figures:
    """What the page of a source says about its queries.

    outcomes: how many were "paid", clearly "harmed", "unclear", or "uncredited" by a rule without a threshold.
    reasons: how many were credited by each rule and policy, with the reason if it was a fallback.
    questions, validations: how many answer each question, with the details of a replay, and have each validation.
    """

    entries: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    validations: Counter[str] = field(default_factory=Counter)
    measures: Counter[str] = field(default_factory=Counter)
    pots: Counter[int | None] = field(default_factory=Counter)
    sizes: set[tuple[int, int]] = field(default_factory=set)
    times: list[str] = field(default_factory=list)
    runs: set[int] = field(default_factory=set)
    freedoms: set[int | None] = field(default_factory=set)
    largest: list[dict[str, Any]] = field(default_factory=list)

    def add(self, about: dict[str, Any], row: dict[str, Any], values: dict[str, Any]) -> None:
        """Take a query into account."""
        self.entries += 1
        self.outcomes[_find_outcome(row["share"], values["helped_by"], values["needed"])] += 1
        self.freedoms.add(about["freedom"])
        self.reasons[about["policy"], about["rule"], about["reason"]] += 1
        self.questions[json.dumps([about["question"], about["details"]], sort_keys=True)] += 1
        self.validations[json.dumps(about["validation"], sort_keys=True)] += 1
        self.measures[about["measure"]] += 1
        self.pots[about["pot"]] += 1
        self.sizes.add((row["size"], about["n"]))
        self.times = [min([about["time"], *self.times]), max([about["time"], *self.times])]
        if about["runs"] is not None and about["runs"]["over"] == "runs":
            self.runs.add(len(about["runs"]["shares"]))
        if row["share"]:
            self.largest = sorted([*self.largest, values], key=lambda each: (-each["share"], each["entry"]))[:LISTED]


def _find_outcome(share: int, helps: float, needed: float | None) -> str:
    """Say what became of a query; harm counts only if help of the same size would have been credited."""
    if share:
        return "paid"
    if needed is None:
        return "uncredited"
    return "harmed" if needed > 0 and helps < -needed else "unclear"


def write_statements(
    ledger: Ledger,
    period: str,
    folder: str | os.PathLike[str],
    *,
    head: Head | None = None,
    sources: Sequence[str] | None = None,
    terms: Mapping[str, str] | None = None,
    prefix: str = "",
    progress: bool | Advance = True,
) -> list[Path]:
    """Write the statements of all sources of a period, or of some, into a folder; return the pages.

    head: the signed head that proofs lead to; by default the last one that the ledger keeps.
    terms: what else the page should say at its top, such as the payer, the contract, whom to write to and by when.
    prefix: what the names of the files begin with, such as the period where those of several are sent to one folder.
    """
    signed = head or next(iter(reversed(ledger.heads())), None)
    if signed is None:
        raise CreditError("a statement needs a signed head of the log: sign one after the period is closed.")
    with tables.reading(ledger.engine) as connection:
        closing = find_period(connection, period)
    if signed.log != ledger.name or signed.size <= closing.sequence:
        raise CreditError(f"this head was signed before the period {period} was closed: sign another one first.")
    names = [row["source"] for row in closing.rows]
    if unknown := set(sources or ()) - set(names):
        raise CreditError(f"source {min(unknown)!r} was not credited in the period {period}.")
    wanted = [name for name in names if sources is None or name in sources]
    files = {name: f"{prefix}{file}" for name, file in name_files(names).items()}
    place, pages = Path(folder), list[Path]()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CreditError(f"could not make the folder {place}: {error.strerror or error}.") from error
    rounds = range(0, len(wanted), _AT_ONCE)
    bar = Progress("writing statements", closing.about["entries"] * len(rounds), "queries", progress)
    try:
        for start in rounds:
            group = {name: files[name] for name in wanted[start : start + _AT_ONCE]}
            pages += _write_group(ledger, closing, signed, group, place, dict(terms or {}), bar)
    finally:
        bar.close()
    return pages


def _write_group(
    ledger: Ledger,
    closing: Leaf,
    head: Head,
    files: Mapping[str, str],
    folder: Path,
    terms: dict[str, str],
    bar: Progress,
) -> list[Path]:
    """Write the statements of some sources, in one pass over the entries; each file is there in full, or not at all."""
    with ExitStack() as stack:
        beside = stack.enter_context(temporary_folder(folder))
        writers = {
            name: stack.enter_context(_Writer(name, beside / file, closing.about["currency"]))
            for name, file in files.items()
        }
        connection = stack.enter_context(tables.reading(ledger.engine))
        policies, node = read_policies(connection), log.read_nodes(connection)
        older = {each.size: each for each in read_kept_heads(connection) if 0 < each.size < head.size}
        growth = [prove_growth(each, head, node) for each in older.values()]
        for name, writer in writers.items():
            for proof in (describe_statement(name, closing.about["period"], head), *growth):
                writer.add_proof(proof)
            place = closing.find_line(name)
            assert place is not None
            writer.add_proof(_prove(closing, head, node) | closing.prove_line(place))
        named = set[str]()
        for entry in log.read_leaves(connection, closing.about["first"], closing.about["stop"], "credit"):
            proof = _prove(entry, head, node)
            for place, row in enumerate(entry.rows):
                if (writer_of := writers.get(row["source"])) is not None:
                    writer_of.add_entry(entry, row, policies, proof | entry.prove_line(place))
            named.add(entry.about["policy"])
            bar.advance()
        for leaf in _read_terms(connection, closing.about["stop"], named):
            proof = _prove(leaf, head, node)
            for writer in writers.values():
                writer.add_proof(proof)
        for name, writer in writers.items():
            row = closing.rows[closing.find_line(name) or 0]
            writer.finish(
                render_statement(name, closing.about, row, writer.figures, policies, head, terms, files[name])
            )
        for file in files.values():
            for suffix in _SUFFIXES:
                refuse_irregular(folder / f"{file}{suffix}")
                (beside / f"{file}{suffix}").replace(folder / f"{file}{suffix}")
    return [folder / f"{file}.html" for file in files.values()]


def _prove(leaf: Leaf, head: Head, node: Node) -> dict[str, Any]:
    """Return a leaf with its proof; refuse one that is not in the signed log, whose numbers nobody should print."""
    path = prove_inclusion(leaf.sequence, head.size, node)
    if not check_inclusion(leaf.hash, leaf.sequence, head.size, path, head.root):
        raise DamagedLog(f"entry {leaf.sequence} is not in the log that was signed: run `imprint credit verify`.")
    return prove_leaf(leaf, path)


def _read_terms(connection: Any, stop: int, named: set[str]) -> Iterator[Leaf]:
    """Go through the tariffs, and the policies that queries were credited by."""
    for kind in ("tariff", "policy"):
        for leaf in log.read_leaves(connection, 0, stop, kind):
            if kind == "tariff" or Policy.from_json(leaf.about["policy"]).sha256 in named:
                yield leaf


class _Writer:
    """Writes the files of one source."""

    def __init__(self, source: str, stem: Path, currency: str) -> None:
        self.source, self.figures, self._stem, self._currency = source, Figures(), stem, currency
        self._proofs = self._file(".jsonl").open("w", encoding="utf-8")
        self._table = self._file(".csv").open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._table, lineterminator="\n")
        self._rows.writerow(COLUMNS)
        self._parquet, self._buffer = _open_parquet(self._file(".parquet")), list[dict[str, Any]]()

    def _file(self, suffix: str) -> Path:
        return self._stem.with_name(f"{self._stem.name}{suffix}")

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self._proofs, self._table, self._parquet):
            file.close()

    def add_proof(self, proof: dict[str, Any]) -> None:
        """Write a line of the proofs."""
        self._proofs.write(encode_proof(proof))

    def add_entry(
        self, entry: Leaf, row: dict[str, Any], policies: Mapping[str, Policy], proof: dict[str, Any]
    ) -> None:
        """Write a credited query."""
        values = describe_entry(entry, row, policies[entry.about["policy"]], self._currency)
        self.add_proof(proof)
        self._rows.writerow([for_csv("" if values[name] is None else values[name]) for name in COLUMNS])
        self._buffer.append(values)
        if len(self._buffer) == _BUFFER:
            self._flush()
        self.figures.add(entry.about, row, values)

    def finish(self, page: str) -> None:
        """Write the page, and everything that waits."""
        self._flush()
        self._file(".html").write_text(page, encoding="utf-8")
        self.__exit__()

    def _flush(self) -> None:
        import pyarrow

        self._parquet.write_table(pyarrow.Table.from_pylist(self._buffer, schema=self._parquet.schema))
        self._buffer.clear()


def describe_entry(entry: Leaf, row: dict[str, Any], policy: Policy, currency: str) -> dict[str, Any]:
    """Return a credited query as a row of the tables."""
    about = entry.about
    validation = "not validated" if about["validation"] is None else about["validation"]["outcome"]
    needed = policy.find_threshold(row["error"], about["freedom"]) if about["rule"] == policy.rule else None
    values = (
        *(entry.sequence, about["time"], about["query"], about["question"], validation, about["rule"]),
        *(row["helps"], row["error"], needed, row["share"] / PARTS),
        *(None if micro is None else micro / MICRO for micro in (about["pot"], row["amount"])),
        currency,
    )
    return dict(zip(COLUMNS, values, strict=True))


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("Parquet", "serve") from error
    kinds = [pyarrow.int64(), *[pyarrow.string()] * 5, *[pyarrow.float64()] * 6, pyarrow.string()]
    return parquet.ParquetWriter(path, pyarrow.schema(list(zip(COLUMNS, kinds, strict=True))))
