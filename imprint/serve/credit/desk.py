"""The credit desk: what the API and the pages ask of one ledger, in bounded work.

Answers come from the log itself, entry by entry, or from totals that are kept up to date as it grows (`tally`).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from imprint.credit import log, tables
from imprint.credit.heads import Head
from imprint.credit.leaves import Kind, Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.merkle import check_inclusion, prove_inclusion
from imprint.credit.periods import Totals
from imprint.credit.policy import Policy
from imprint.credit.proofs import prove_leaf
from imprint.display import name_some
from imprint.errors import CreditError, CreditUnavailable
from imprint.keys import is_signed, load_public_key
from imprint.serve.credit.comparing import Compared, Comparison
from imprint.serve.credit.faults import read_policy
from imprint.serve.credit.reading import Filters, Found, Page, check_row, read_one, read_page
from imprint.serve.credit.statements import Statements
from imprint.serve.credit.tally import Tally
from imprint.serve.credit.verification import CLOSING, Verifier
from imprint.serve.credit.vouching import Vouched, find_vouched
from imprint.serve.errors import ApiError
from imprint.serve.metrics import Metrics
from imprint.serve.service import Service
from imprint.serve.settings import Settings

_TOGETHER = 1 << log.TILE  # entries whose hashes make up one stored node of the tree
_PAUSE = 0.05  # seconds between chunks of a long log, which others compute in
_COMPARISONS = 8  # that are kept, so that the next look at them is quick
MOST_DISPUTES = 200
_STANDARD = ("above_noise", "positive_part")


@dataclass(frozen=True)
class Proof:
    """Whether an entry is in the log that was signed last.

    head: the newest one, or an older one that covers the entry, if the log does not lead to the newest any more.
    path: the proof; None if no head covers the entry, or if it is not in the signed log.
    holds: None if no head covers the entry.
    span: where it does not hold, the first and the last of the entries among which one was changed.
    """

    head: Head | None
    holds: bool | None
    path: dict[str, Any] | None
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Running:
    """The period that is not closed yet: its first entry, where it ends for now, and its totals."""

    first: int
    stop: int
    totals: Totals


class CreditDesk:
    """Reads the ledger of a service for those who may see it."""

    def __init__(self, ledger: Ledger, service: Service, settings: Settings, metrics: Metrics | None = None) -> None:
        self.ledger, self.service, self.settings = ledger, service, settings
        self.verifier, self.tally = Verifier(ledger, settings, metrics), Tally(ledger)
        self.statements = Statements(ledger, settings.statements)
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._comparisons: OrderedDict[tuple[str, int], Comparison] = OrderedDict()
        self._counting: threading.Thread | None = None
        self._currency: str | None = None
        self._key = None if settings.public_key is None else load_public_key(settings.public_key)

    def start_verification(self) -> None:
        """Verify the log in a thread, and add it up in another, so that the first pages need not wait for that."""
        self.verifier.start()
        if self._counting is None:
            self._counting = threading.Thread(target=self._count, name="imprint-counting", daemon=True)
            self._counting.start()

    def _count(self) -> None:
        try:
            self.tally.read_all(lambda: self._closing.wait(_PAUSE))
        except CreditError:
            return  # the database cannot be reached: the next request reads on, or says so

    def close(self) -> None:
        """Stop what runs in threads."""
        self._closing.set()
        self.verifier.close()
        if self._counting is not None:
            self._counting.join(CLOSING)
        self.statements.close()

    def size(self) -> int:
        """Return how many entries the log has."""
        return len(self.ledger)

    def describe_clock(self) -> str | None:
        """Say that the last entry lies in the future by the clock of this machine; None if it does not."""
        with tables.reading(self.ledger.engine) as connection:
            return log.describe_clock(connection)

    @property
    def currency(self) -> str:
        """The currency of the ledger, which never changes; "units" while its tariff cannot be read."""
        if self._currency is None:
            try:
                self._currency = self.ledger.tariff.currency
            except CreditUnavailable:
                raise
            except CreditError:
                pass
        return self._currency or "units"

    @cached_property
    def names(self) -> dict[str, str]:
        """The names of the store's sources, by their ids."""
        store = self.service.store
        return dict(zip(store.source_ids, store.source_names, strict=True))

    def policies(self) -> dict[str, Policy]:
        """Return the policies of the log, by their hashes; without those that were changed."""
        return dict(pair for leaf in self._read_kind("policy") for pair in read_policy(leaf).items())

    def _read_kind(self, kind: Kind) -> list[Leaf]:
        """Return all entries of a kind that is not that of queries; without those that were changed."""
        return [entry.leaf for entry in self._check_kind(kind) if entry.leaf is not None and entry.leaf.kind == kind]

    def _check_kind(self, kind: Kind) -> list[Found]:
        with tables.reading(self.ledger.engine) as connection:
            return [check_row(row) for row in log.read_rows(connection, 0, log.read_size(connection), kind)]

    def read_page(self, filters: Filters, before: int | None, limit: int) -> Page:
        """Return the newest entries before some place."""
        with tables.reading(self.ledger.engine) as connection:
            return read_page(connection, filters, before, limit)

    def read_entry(self, sequence: int) -> Found:
        """Return the entry at a place; refuse a place beyond the end."""
        with tables.reading(self.ledger.engine) as connection:
            found = read_one(connection, sequence)
            size = log.read_size(connection)
        if found is not None:
            return found
        if sequence < size:
            return Found(sequence, None)  # it was removed
        raise ApiError(404, "not_found", f"there is no entry {sequence}: the log has {size}.")

    def heads(self) -> list[Head]:
        """Return the signed heads that the database keeps, in their order."""
        return self.ledger.heads()

    def last_head(self) -> Head | None:
        """Return the newest signed head; None without one, or if it cannot be read."""
        try:
            return next(iter(reversed(self.heads())), None)
        except CreditUnavailable:
            raise
        except CreditError:
            return None

    def is_signed(self, head: Head) -> bool | None:
        """Tell whether the key of the service's settings signed a head; None without a key."""
        if self._key is None:
            return None
        return is_signed(self._key, head.signature, head.content)

    def find_vouched(self) -> Vouched:
        """Find the entries that signed heads vouch for, as the log is now; forged heads do not count."""
        try:
            heads = [head for head in self.heads() if self.is_signed(head) is not False]
            with tables.reading(self.ledger.engine) as connection:
                return find_vouched(heads, self.ledger.name, log.read_nodes(connection))
        except CreditUnavailable:
            raise
        except CreditError:  # a head cannot be read
            return Vouched()

    def prove(self, leaf: Leaf) -> Proof:
        """Prove that an entry is in the log that was signed."""
        return self._prove(leaf, self.last_head(), self.find_vouched())

    def _prove(self, leaf: Leaf, head: Head | None, vouched: Vouched) -> Proof:
        if head is None or leaf.sequence >= head.size:
            return Proof(head, None, None)
        if vouched.broken and vouched.holding and leaf.sequence < vouched.confirmed:
            head = vouched.holding
        first = leaf.sequence // _TOGETHER * _TOGETHER
        span = (first, min(first + _TOGETHER, head.size) - 1)
        if vouched.span and leaf.sequence >= vouched.confirmed:
            span = vouched.span
        try:
            with tables.reading(self.ledger.engine) as connection:
                path = prove_inclusion(leaf.sequence, head.size, log.read_nodes(connection))
        except (CreditError, ValueError):  # the tree has a gap
            return Proof(head, False, None, span)
        if not check_inclusion(leaf.hash, leaf.sequence, head.size, path, head.root):
            return Proof(head, False, None, span)
        return Proof(head, True, prove_leaf(leaf, path))

    def periods(self) -> list[Leaf]:
        """Return the closed periods, in their order; without those that are not as they were written or signed."""
        return self._judge_periods()[0]

    def changed_periods(self) -> list[int]:
        """Return the places of closed periods whose figures are not shown, because nothing confirms them."""
        return self._judge_periods()[1]

    def _judge_periods(self) -> tuple[list[Leaf], list[int]]:
        """Compare closed periods with their hashes, and with the signed log: what is due follows from them alone."""
        kept, changed = list[Leaf](), list[int]()
        head, vouched = self.last_head(), self.find_vouched()
        for entry in self._check_kind("period"):
            leaf = entry.leaf
            if leaf is None or leaf.kind != "period" or self._prove(leaf, head, vouched).holds is False:
                changed.append(entry.sequence)
            else:
                kept.append(leaf)
        return kept, changed

    def period(self, name: str) -> Leaf:
        """Return a closed period by its name."""
        kept, changed = self._judge_periods()
        closing = next((leaf for leaf in kept if leaf.about["period"] == name), None)
        if closing is None and changed:
            places = name_some([f"entry {place}" for place in changed])
            raise ApiError(
                409,
                "changed",
                "some closed periods, perhaps this one, are not as they were written, or not confirmed by the signed "
                f"log. Their figures are not shown: see {places}.",
            )
        if closing is None:
            raise ApiError(404, "not_found", f"no closed period is called {name!r}.")
        return closing

    def running(self) -> Running:
        """Return the period that is not closed yet; refuse if it is still being added up."""
        self.tally.catch_up()
        return Running(*self.tally.running())

    def compare(self, policy: Policy, closing: Leaf | None) -> Compared:
        """Divide the queries of a closed period again, or of the one that runs, by another policy."""
        if closing is None:
            running = self.running()
            first, stop, pot, waiting = running.first, running.stop, None, 0
        else:
            first, stop, pot, waiting = (closing.about[name] for name in ("first", "stop", "pot", "without_pot"))
        key = (policy.sha256, first)
        with self._lock:
            known = self._comparisons.get(key) or Comparison(self.ledger, policy, first)
            self._comparisons[key] = known
            self._comparisons.move_to_end(key)
            while len(self._comparisons) > _COMPARISONS:
                self._comparisons.popitem(last=False)
        if known.passed(stop):
            known = Comparison(self.ledger, policy, first)  # the period ended before what was compared
            with self._lock:
                self._comparisons[key] = known
        return known.finish(stop, pot, waiting)

    def find_policy(self, name: str) -> Policy:
        """Return a policy that the log knows, by its name and version ("house@2"), or a rule as it comes."""
        found = self.choices()
        if name not in found:
            raise ApiError(404, "not_found", f"the log knows no policy {name!r}; it knows {', '.join(found)}.")
        return found[name]

    def choices(self) -> dict[str, Policy]:
        """Return what queries can be compared with, by their names: policies of the log, and the rules as they come."""
        known = list(self.policies().values())
        found = {f"{policy.name}@{policy.version}": policy for policy in known}
        question = known[-1].question if known else self.service.store.question
        for rule in _STANDARD:
            found[f"rule:{rule}"] = Policy(f"rule {rule}", question=question, rule=rule)  # type: ignore[arg-type]
        return found

    def disputes(self) -> list[Found]:
        """Return the entries that note disputes, the newest first; of very many, the newest."""
        self.tally.catch_up()
        with tables.reading(self.ledger.engine) as connection:
            places: Sequence[int] = self.tally.disputes[::-1][:MOST_DISPUTES]
            return [found for place in places if (found := read_one(connection, place)) is not None]
