"""Closes periods: adds up what was credited, divides a pot if there is one, and rounds to payable amounts.

A period is everything in the log since the last one was closed, up to a time. Closing it is itself a leaf of the log,
with one line for each source.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, func, select

from imprint.credit import log, tables
from imprint.credit.contradictions import find_unpayable
from imprint.credit.leaves import Leaf, Lines, compose
from imprint.credit.ledger import Ledger
from imprint.credit.log import format_time, now_or_last
from imprint.credit.money import PARTS, Tariff, apportion, require_amount, round_amounts
from imprint.credit.policy import Policy
from imprint.credit.reading import read_periods, read_policies, read_tariff
from imprint.credit.spread import ESTIMATOR, ShareEstimator, is_sampled
from imprint.errors import CreditError, DamagedLog

_NAME = re.compile("[A-Za-z0-9._-]{1,50}")


@dataclass
class Account:
    """What one source has in a period, or what is unattributed: amounts in micro-units, shares in billionths.

    parts, parts_by_size: of the queries that a pot for the whole period will pay.
    """

    entries: int = 0
    amount: int = 0
    parts: int = 0
    by_size: int = 0
    parts_by_size: int = 0

    def merge(self, other: "Account") -> None:
        """Add what another account has."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class Totals:
    """Adds up the credited queries of a period.

    without_pot: how many queries have no pot of their own.
    rules, questions, validations: how many queries each rule credited, answer each question, have each validation.
    """

    entries: int = 0
    without_pot: int = 0
    pot: int = 0
    sources: defaultdict[str, Account] = field(default_factory=lambda: defaultdict(Account))
    unattributed: Account = field(default_factory=Account)
    rules: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    validations: Counter[str] = field(default_factory=Counter)

    def add(self, entry: Leaf) -> None:
        """Add a credited query."""
        for reason in find_unpayable(entry.about, entry.rows):
            raise DamagedLog(f"entry {entry.sequence} cannot be paid: {reason}. Run `imprint credit verify`.")
        self.add_lines(entry.about, entry.rows)

    def add_lines(self, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a query that can be paid, by its header and the lines of its sources."""
        self.entries += 1
        self.without_pot += about["pot"] is None
        self.pot += about["pot"] or 0
        self.rules[about["rule"]] += 1
        self.questions[about["question"]] += 1
        self.validations[(about["validation"] or {"outcome": "not validated"})["outcome"]] += 1
        by_size = _share_by_size(about["pot"], tuple(row["size"] for row in rows))
        for row, size in zip(rows, by_size, strict=True):
            account = self.sources[row["source"]]
            account.entries += 1
            if row["amount"] is None:
                account.parts, account.parts_by_size = account.parts + row["share"], account.parts_by_size + size
            else:
                account.amount, account.by_size = account.amount + row["amount"], account.by_size + size
        rest = about["unattributed"]
        if rest["amount"] is None:
            self.unattributed.parts += rest["share"]
        else:
            self.unattributed.amount += rest["amount"]

    def merge(self, other: "Totals") -> None:
        """Add the queries of other totals, none of which are among these."""
        self.entries, self.without_pot = self.entries + other.entries, self.without_pot + other.without_pot
        self.pot += other.pot
        for name, account in other.sources.items():
            self.sources[name].merge(account)
        self.unattributed.merge(other.unattributed)
        self.rules.update(other.rules)
        self.questions.update(other.questions)
        self.validations.update(other.validations)

    def divide(self, pot: int | None) -> None:
        """Divide a pot for the period equally among the queries that have none of their own."""
        if pot is None and self.without_pot:
            raise CreditError(
                f"{self.without_pot} queries of this period have no pot of their own: give the period one (pot=, "
                "in micro-units; --pot)."
            )
        if pot is None:
            return
        if not self.without_pot:
            raise CreditError("every query of this period has a pot of its own: leave out pot=.")
        require_amount(pot, "the pot of a period")
        accounts = [self.sources[name] for name in sorted(self.sources)]
        *amounts, rest = apportion(pot, [*(account.parts for account in accounts), self.unattributed.parts])
        by_size = apportion(pot, [account.parts_by_size for account in accounts])
        for account, amount, size in zip(accounts, amounts, by_size, strict=True):
            account.amount, account.by_size = account.amount + amount, account.by_size + size
        self.unattributed.amount += rest
        self.pot += pot

    def summarise(self, tariff: Tariff) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the header of a closed period, and a line for each source, in amounts that can be paid."""
        names = sorted(self.sources)
        amounts = [*(self.sources[name].amount for name in names), self.unattributed.amount]
        if sum(amounts) != self.pot:
            raise DamagedLog("the log is damaged: what sources were credited does not add up to what queries paid.")
        units, remainder = divmod(self.pot, tariff.smallest)
        *paid, rest = round_amounts(amounts, tariff.smallest)
        rows = [
            {
                "source": name,
                "entries": self.sources[name].entries,
                "amount": self.sources[name].amount,
                "units": each,
                "by_size": self.sources[name].by_size,
                "share": self.sources[name].amount / self.pot if self.pot else None,
            }
            for name, each in zip(names, paid, strict=True)
        ]
        about = {
            "entries": self.entries,
            "without_pot": self.without_pot,
            "currency": tariff.currency,
            "smallest": tariff.smallest,
            "total": self.pot,
            "units": units,
            "remainder": remainder,
            "unattributed": {"amount": self.unattributed.amount, "units": rest},
            "rules": dict(self.rules),
            "questions": dict(self.questions),
            "validations": dict(self.validations),
        }
        return about, rows


def close_period(ledger: Ledger, name: str, *, until: datetime | None = None, pot: int | None = None) -> Leaf:
    """Close a period: everything since the last one, up to a time or until now. Return the leaf of the log that does.

    pot: what queries without a pot of their own share, in micro-units.

    Amounts are rounded to the smallest unit of the currency by largest remainder, ties by source id, and add up to the
    total; the remainder, less than one unit, is recorded.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CreditError(f"the name of a period has up to 50 letters, digits and . _ -, as in 2026-11; got {name!r}.")
    limit = None if until is None else format_time(until)
    if limit is not None and limit > now_or_last():
        raise CreditError(f"{limit} is in the future: close a period when it has ended.")
    while True:
        with tables.reading(ledger.engine) as connection:  # what is in the log stays as it is, so nobody has to wait
            size = log.read_size(connection)
            with log.translated_damage("what was credited"):
                first, stop = _find_ends(connection, size, name, limit)
                about, rows = describe_period(connection, first, stop, pot)
        lines = Lines.of(rows)
        with tables.writing(ledger.engine) as (connection, frontier, last):
            found = _find_ends(connection, size if limit is None else frontier.size, name, limit)
            if found[0] != first:
                raise CreditError("another process closed a period in the meantime. Look at it, then try again.")
            if found == (first, stop):  # else a writer was slower than its own clock
                leaf = compose("period", frontier.size, now_or_last(last), {"period": name, **about}, lines)
                log.append(connection, frontier, [leaf])
                return leaf


def describe_period(
    connection: Connection, first: int, stop: int, pot: int | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of the period from one leaf up to another, and its lines."""
    totals, estimator = _add_up(connection, first, stop)
    if not totals.entries:
        raise CreditError("nothing was credited since the last period was closed.")
    totals.divide(pot)
    about, rows = totals.summarise(read_tariff(connection))
    apart = estimator.estimate(pot / totals.without_pot if pot and totals.without_pot else 0.0)
    rows = [{**row, **_describe_interval(row["share"], apart.get(row["source"]))} for row in rows]
    return {"first": first, "stop": stop, "pot": pot, "estimator": ESTIMATOR, **about}, rows


def _describe_interval(share: float | None, apart: tuple[float, float] | None) -> dict[str, float | None]:
    """Return the ends of the interval of a share; None where there is none."""
    if share is None or apart is None:
        return {"low": None, "high": None}
    return {"low": max(0.0, share - apart[0]), "high": min(1.0, share + apart[1])}


def _find_ends(connection: Connection, size: int, name: str, limit: str | None) -> tuple[int, int]:
    """Return where the next period starts and stops; refuse a name that was used."""
    closed = read_periods(connection)
    if any(leaf.about["period"] == name for leaf in closed):
        raise CreditError(f"the period {name} is closed already: give the next one another name.")
    first, table = int(closed[-1].about["stop"]) if closed else 0, tables.leaves
    if limit is None:
        return first, size
    query = select(func.min(table.c.sequence)).where(table.c.sequence >= first, table.c.time >= limit)
    found = connection.execute(query).scalar_one()
    if found is None:
        return first, size
    return first, log.read_leaf(connection, found).sequence  # refused if the column of its time was changed


def _add_up(connection: Connection, first: int, stop: int) -> tuple[Totals, ShareEstimator]:
    totals, estimator, policies = Totals(), ShareEstimator(), read_policies(connection)
    queries, expected = stop - first, first
    for entry in log.read_leaves(connection, first, stop):
        if entry.sequence != expected:
            break
        expected += 1
        if entry.kind != "credit":
            continue
        totals.add(entry)
        if is_sampled(entry.sequence, queries, len(entry.lines)):
            estimator.add(entry, _require_policy(policies, entry.about["policy"]))
    if expected != stop:
        raise DamagedLog(f"entry {expected} is missing: run `imprint credit verify`.")
    return totals, estimator


def _require_policy(policies: Mapping[str, Policy], sha256: str) -> Policy:
    if sha256 not in policies:
        raise DamagedLog(f"the log is damaged: an entry names the policy {sha256}, which is not in it.")
    return policies[sha256]


@lru_cache(maxsize=1024)
def _share_by_size(pot: int | None, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a rule by size alone would have paid each source of a query: of its pot, or of a whole share."""
    return tuple(apportion(PARTS if pot is None else pot, sizes))


def list_periods(ledger: Ledger) -> list[Leaf]:
    """Return the leaves that closed periods, in their order."""
    with tables.reading(ledger.engine) as connection:
        return read_periods(connection)
