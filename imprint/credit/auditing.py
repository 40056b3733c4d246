"""Goes through a log once, entry by entry, and collects what is not as it was written; `verifying` begins it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from sqlalchemy import Connection, func, select

from imprint.credit import log, tables
from imprint.credit.differences import find_exchanged, name_closed
from imprint.credit.drafting import hash_payload
from imprint.credit.heads import Head
from imprint.credit.leaves import SALT_BYTES, Leaf
from imprint.credit.merkle import Frontier, hash_tree
from imprint.credit.money import Tariff
from imprint.credit.periods import describe_period
from imprint.credit.policy import Policy
from imprint.credit.reading import read_kept_heads
from imprint.credit.recomputing import SKIPPED, agree_intervals, agree_lines, find_faults
from imprint.credit.requests import bind_request, find_request, seal_secret
from imprint.credit.spread import ESTIMATOR
from imprint.display import for_terminal, name_some
from imprint.errors import CreditError, DamagedLog

UNREADABLE = (CreditError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
"""What reading an entry that somebody wrote by hand may raise."""
_SUSPECTS = 20  # entries that are named; with more, amounts are so alike that they say nothing


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written.

    sequence: its place in the log, if it has one.
    span: the first and the last of the entries among which it is, where it is no single one, or where it follows from
        others.
    suspects: those of them each of which would explain it alone, if two sources exchanged their figures there.
    """

    text: str
    sequence: int | None = None
    span: tuple[int, int] | None = None
    suspects: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.sequence is None:
            return for_terminal(self.text)
        among = "" if self.span is None else f". It was changed, or one of entries {self.span[0]} to {self.span[1]} was"
        some = name_some([f"entry {place}" for place in self.suspects], 3)
        alone = f". Look at {some} first: two sources may have exchanged their figures there" if some else ""
        return for_terminal(f"entry {self.sequence}: {self.text}{among}{alone}")


@dataclass
class Audit:
    """Goes through a log once, and collects what is not as it was written.

    sizes: at which the root of the log is wanted, to be compared with heads.
    broken: whether entries are missing or too many, so that the tree cannot be made again.
    gone: entries whose query is not there. stop: where the last period ends.
    credited: entries of the last request.
    tariff: the one that holds, after its place. given: entries whose caller gave the pot.
    """

    connection: Connection
    name: str
    sizes: set[int] = field(default_factory=set)
    entries: int = 0
    problems: list[Problem] = field(default_factory=list)
    remarks: dict[str, None] = field(default_factory=dict)
    roots: dict[int, bytes] = field(default_factory=dict)
    frontier: Frontier = field(default_factory=Frontier)
    broken: bool = False
    time: str = ""
    policies: dict[str, Policy] = field(default_factory=dict)
    erased: set[int] = field(default_factory=set)
    gone: list[int] = field(default_factory=list)
    there: list[int] = field(default_factory=list)
    payloads: dict[int, Any] = field(default_factory=dict)
    kept: int = 0
    nodes: int = 0
    kinds: set[tuple[str, int]] = field(default_factory=set)
    periods: set[str] = field(default_factory=set)
    stop: int = 0
    requests: int = 0
    forgotten: list[tuple[int, int]] = field(default_factory=list)
    request: Any = None
    credited: int = 0
    signer: str | None = None
    unit: tuple[str, int] | None = None
    tariff: tuple[int, Tariff] | None = None
    given: int = 0

    def add(self, text: str, sequence: int | None = None, span: tuple[int, int] | None = None) -> None:
        self.problems.append(Problem(text, sequence, span))

    def check_file(self) -> None:
        """Let the database check itself: an index that lacks rows would hide them from some queries alone."""
        try:
            tables.refuse_foreign_objects(self.connection)
        except CreditError as error:
            self.add(str(error))
        for text in tables.find_damage(self.connection):
            self.add(f"the file of the database is damaged: {text}")

    def read_heads(self) -> list[Head]:
        """Return the heads that the database keeps."""
        try:
            heads = read_kept_heads(self.connection)
        except CreditError as error:
            self.add(str(error))
            return []
        columns = {(row.size, row.time) for row in self.connection.execute(select(tables.heads))}
        if columns != {(head.size, head.time) for head in heads}:
            self.add("the table of heads differs from the heads")
        return heads

    def check_chunk(self, rows: Sequence[Any]) -> None:
        """Check leaves that follow one another."""
        checks: dict[str, Callable[[Leaf], None]] = {
            "log": self._check_log,
            "tariff": self._check_tariff,
            "policy": self._check_policy,
            "credit": self._check_credit,
            "period": self._check_period,
            "erasure": self._check_erasure,
            "dispute": self._check_dispute,
        }
        self._read_payloads(rows[0].sequence, rows[-1].sequence)
        for row in rows:
            self.entries += 1
            self._check_place(row.sequence)
            leaf = Leaf(b"")
            try:
                leaf = log.make_leaf(row)
                self._check_leaf(row, leaf)
                if (check := checks.get(leaf.kind)) is not None:
                    check(leaf)
            except UNREADABLE as error:
                self.add(f"it cannot be read: {error}", row.sequence)
            self._grow(leaf)

    def _read_payloads(self, first: int, last: int) -> None:
        """Read the queries of some entries at once: one by one, that takes longer than checking the entries."""
        table = tables.payloads
        query = select(table).where(table.c.sequence >= first, table.c.sequence <= last)
        self.payloads = {row.sequence: row for row in self.connection.execute(query)}

    def _check_place(self, sequence: int) -> None:
        expected = self.frontier.size
        if self.broken:
            return
        if sequence > expected:
            text = f"entry {expected} is" if sequence == expected + 1 else f"entries {expected} to {sequence - 1} are"
            self.add(f"{text} missing", span=(expected, sequence - 1))
        elif sequence < expected:
            self.add("an entry was inserted before the beginning", sequence)
        self.broken = sequence != expected

    def _check_leaf(self, row: Any, leaf: Leaf) -> None:
        """Compare a leaf with its row, its hash, its lines and its neighbours."""
        if tables.read_bytes(row.hash) != leaf.hash:
            self.add("its content was changed: it differs from its hash", row.sequence)
        about = leaf.about
        if about["sequence"] != row.sequence:
            self.add(f"it was written as entry {about['sequence']}, and has been moved", row.sequence)
        for column in ("kind", "time"):
            if getattr(row, column) != about[column]:
                self.add(f"the database says {column} {getattr(row, column)}, it was {about[column]}", row.sequence)
        if about["time"] < self.time:
            self.add(f"its time, {about['time']}, is before that of the entry before it, {self.time}", row.sequence)
        self.time = max(self.time, about["time"])
        lines = about.get("lines")
        salted = SALT_BYTES if lines is not None else None
        if (lines is None) != (not leaf.lines) or (None if row.salt is None else len(leaf.salt)) != salted:
            self.add("its lines or their salt were removed, or some were added", row.sequence)
        elif lines is not None:
            if lines["count"] != len(leaf.lines) or hash_tree(leaf.line_hashes).hex() != lines["root"]:
                self.add("its lines were changed: they differ from their hash", row.sequence)
            names = [each["source"] for each in leaf.rows]
            if names != sorted(set(names)):
                self.add("its lines are not in the order of their sources", row.sequence)
        if leaf.kind != "credit":
            self.kinds.add((leaf.kind, row.sequence))

    def _grow(self, leaf: Leaf) -> None:
        """Append a leaf to the tree, and compare the nodes that this completes with those of the database."""
        if self.broken:
            return
        self.frontier, completed = self.frontier.extend([leaf.hash])
        for level, index, node in completed:
            if level % log.TILE:
                continue
            table = tables.nodes
            query = select(table.c.hash).where(table.c.level == level, table.c.index == index)
            kept = self.connection.execute(query).scalar_one_or_none()
            self.nodes += 1
            if kept is None or tables.read_bytes(kept) != node:
                first, last = index << level, (index + 1 << level) - 1
                self.add(f"entries {first} to {last} do not match their stored tree node", span=(first, last))
        if self.frontier.size in self.sizes:
            self.roots[self.frontier.size] = self.frontier.root

    def _check_log(self, leaf: Leaf) -> None:
        if leaf.sequence or leaf.about["log"] != self.name:
            self.add("unexpected beginning of a log", leaf.sequence)
        self.signer = leaf.about["signer"]

    def _check_tariff(self, leaf: Leaf) -> None:
        tariff = Tariff(**leaf.about["tariff"])
        unit = (tariff.currency, tariff.smallest)
        if self.unit not in (None, unit):
            self.add("it changes the currency of the ledger", leaf.sequence)
        self.unit, self.tariff = unit, (leaf.sequence, tariff)

    def _check_policy(self, leaf: Leaf) -> None:
        policy = Policy.from_json(leaf.about["policy"])
        self.policies[policy.sha256] = policy

    def _check_erasure(self, leaf: Leaf) -> None:
        erased = leaf.about["erased"]
        if any(not 0 <= each < leaf.sequence for each in erased):
            self.add("it notes the erasure of entries that were not there", leaf.sequence)
        self.erased.update(erased)

    def _check_dispute(self, leaf: Leaf) -> None:
        if not 0 <= leaf.about["disputed"] < leaf.sequence:
            self.add("it notes a dispute about an entry that was not there", leaf.sequence)

    def _check_credit(self, leaf: Leaf) -> None:
        """Divide the pot of a query again, from its scores and its policy."""
        about = leaf.about
        self._check_payload(leaf)
        self._check_request(leaf)
        self._check_pot(leaf)
        if self.signer is not None and about["signer"] != self.signer:
            self.add("its store was not signed with the key that this ledger demands", leaf.sequence)
        policy = self.policies.get(about["policy"])
        if policy is None:
            self.add("it names a policy that is not in the log before it", leaf.sequence)
            return
        for fault in find_faults(leaf, policy, self.unit[0] if self.unit else ""):
            self.add(fault, leaf.sequence)

    def _check_pot(self, leaf: Leaf) -> None:
        """Compare what a query pays with the tariff that held, unless its caller gave the pot."""
        place, pot = leaf.about["tariff"], leaf.about["pot"]
        if place is None:
            self.given += 1
            if pot is None:
                self.add("nobody said what it pays", leaf.sequence)
        elif self.tariff is None or place != self.tariff[0]:
            self.add(f"it names entry {place} as its tariff, which did not hold then", leaf.sequence)
        elif pot != (tariff := self.tariff[1]).per_query:
            own, expected = (tariff.describe_pot(each) for each in (pot, tariff.per_query))
            self.add(f"its pot is {own}, by its tariff it would be {expected}", leaf.sequence)

    def _check_payload(self, leaf: Leaf) -> None:
        """Compare a query with its hash; if it is not there, the log must say so."""
        expected, kept = leaf.about["payload"], self.payloads.get(leaf.sequence)
        self.kept += kept is not None
        if kept is None:
            if expected is not None:
                self.gone.append(leaf.sequence)
            return
        salt, payload = tables.read_bytes(kept.salt), tables.read_bytes(kept.payload)
        if expected is None or hash_payload(salt, payload) != expected:
            self.add("its query was changed: it differs from its hash", leaf.sequence)
        if kept.expires != leaf.about["expires"]:
            self.add("the time at which its query is to be erased was changed", leaf.sequence)
        self.there.append(leaf.sequence)

    def _check_request(self, leaf: Leaf) -> None:
        """Compare an entry with the request that credited it."""
        known = self.request
        if known is None or not known.first <= leaf.sequence < known.first + known.count:
            self.end_request()
            known = self.request = self._read_request(leaf.sequence)
        bound = None if known is None else bind_request(known._mapping)
        if bound != leaf.about["request"]:
            self.add("its request was changed or removed, so that it could be credited again", leaf.sequence)
        else:
            self.credited += 1

    def _read_request(self, sequence: int) -> Any:
        """Return the request whose entries begin here; None if there is none, or one that cannot be read."""
        table = tables.requests
        found = self.connection.execute(select(table).where(table.c.first == sequence)).all()
        self.requests += len(found)
        if len(found) > 1:
            self.add(f"{len(found)} requests claim to have credited it", sequence)
        if len(found) != 1:
            return None
        row = found[0]
        if not isinstance(row.count, int) or row.count < 1:
            self.add(f"its request claims {row.count!r} entries", sequence)
            return None
        if find_request(self.connection, row.caller, row.key) != row:
            self.add("its request is not found by its caller and key, so that it could be credited again", sequence)
        if row.secret is None:
            self.forgotten.append((row.first, row.first + row.count))
        elif seal_secret(tables.read_bytes(row.secret)) != tables.read_bytes(row.sealed):
            self.add("the secret of its request was changed, so that it could be credited again", sequence)
        return row

    def end_request(self) -> None:
        """Check that a request has credited as many entries as it claims."""
        if self.request is not None and self.credited != self.request.count:
            text = f"its request claims {self.request.count} entries, and credited {self.credited}"
            self.add(text, self.request.first)
        self.request, self.credited = None, 0

    def _check_period(self, leaf: Leaf) -> None:
        """Close a period again."""
        about = leaf.about
        if about["period"] in self.periods or about["first"] != self.stop or not about["stop"] <= leaf.sequence:
            self.add(f"period {about['period']} does not follow the one before it", leaf.sequence)
        self.periods.add(about["period"])
        self.stop = about["stop"]
        try:
            header, rows = describe_period(self.connection, about["first"], about["stop"], about["pot"])
        except DamagedLog as error:
            self.add(self._explain_unread(about, error), leaf.sequence)
            return
        again = {**about, **header}
        pairs = list(zip([about, *leaf.rows], [again, *rows], strict=False))
        if len(rows) != len(leaf.rows) or not all(agree_lines(one, other) for one, other in pairs):
            found, expected, span = (about, leaf.rows), (again, rows), (about["first"], about["stop"] - 1)
            text = f"period {about['period']} does not follow from its entries: {name_closed(found, expected, SKIPPED)}"
            entries = log.read_leaves(self.connection, about["first"], about["stop"], "credit")
            suspects = tuple(islice(find_exchanged(entries, found, expected), _SUSPECTS))
            self.problems.append(Problem(text, leaf.sequence, span, suspects))
        elif about["estimator"] != ESTIMATOR:
            version = f"{about['estimator']!r}, and this version knows {ESTIMATOR}"
            self.add(f"the intervals of period {about['period']} are by estimator {version}", leaf.sequence)
        elif not all(agree_intervals(one, other) for one, other in pairs):
            self.add(f"the intervals of period {about['period']} do not follow from its entries", leaf.sequence)

    def _explain_unread(self, about: dict[str, Any], error: DamagedLog) -> str:
        """Say why a period cannot be added up again: because of the first of its entries that was changed."""
        places = [each.span[0] if each.sequence is None and each.span else each.sequence for each in self.problems]
        wrong = [place for place in places if place is not None and about["first"] <= place < about["stop"]]
        why = f", because entry {min(wrong)}, which it covers, was changed or removed" if wrong else f": {error}"
        return f"period {about['period']} cannot be added up again{why}"

    def check_end(self) -> None:
        """Compare what the database says about the whole log."""
        self.end_request()
        state, row = log.read_state(self.connection), self.connection.execute(select(tables.log)).first()
        if row is not None and row.time != self.time:
            self.add(f"the database says that the last entry is of {row.time}, it is of {self.time}")
        if not self.broken and state.size != self.frontier.size:
            self.add(f"the database claims {state.size} entries, but contains {self.frontier.size}")
        elif not self.broken and state != self.frontier:
            text = "the entries do not lead to the root that the database has: some were changed with their hashes"
            self.add(text, span=self.frontier.find_difference(state))
        if self.erased.intersection(self.there):
            self.add("a query that was erased is there again", min(self.erased.intersection(self.there)))
        for sequence in self.gone:
            if sequence not in self.erased:
                self.add("its query is gone, and the log does not say that it was erased", sequence)
        for first, stop in self.forgotten:
            if not any(first <= sequence < stop for sequence in self.erased):
                self.add("what its request asked for is gone, so that a repeated request is credited again", first)
        kinds = {(row.kind, row.sequence) for row in self.connection.execute(select(tables.kinds))}
        if kinds != self.kinds:
            self.add("the table of kinds differs from the entries")
        for table, count, what in (
            (tables.payloads, self.kept, "a query is kept for an entry that does not exist"),
            (tables.requests, self.requests, "a request points to entries that do not exist"),
            (tables.nodes, self.nodes, "the tree has nodes that no entries lead to"),
            (tables.log, 1, "there is more than one log"),
        ):
            if (
                not self.broken
                and self.connection.execute(select(func.count()).select_from(table)).scalar_one() != count
            ):
                self.add(what)
