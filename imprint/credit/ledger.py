"""The ledger: credits queries to sources, in a tamper-evident log.

Everything that matters is a leaf of the log: the policies, the tariff, every credited query, every closed period, every
erasure and every settled dispute. Each call is one transaction: once it returns, its entries are on disk; if it fails,
nothing was written.
"""

import os
import secrets
import uuid
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from sqlalchemy import Connection, insert, select

from imprint.attribution.labels import Labels
from imprint.attribution.result import Attribution
from imprint.credit import log, tables
from imprint.credit.drafting import Draft, check_creditable, check_labels, draft_entries, require_ids, require_payload
from imprint.credit.erasing import (
    erase_expired_queries,
    erase_queries,
    find_expiry,
    keep_payloads,
    require_payloads,
    require_places,
    truncate_wal,
    vacuum,
)
from imprint.credit.heads import Head, publish_head, refuse_other_heads, sign_head
from imprint.credit.leaves import Kind, Leaf, compose
from imprint.credit.log import format_time, now_or_last
from imprint.credit.merkle import Frontier, find_root
from imprint.credit.money import Tariff
from imprint.credit.opening import check_schema, make_private_file, refuse_missing_file, refuse_tables
from imprint.credit.policy import Policy
from imprint.credit.reading import find_tariff, read_kept_heads, read_policies, read_tariff
from imprint.credit.requests import (
    bind_request,
    describe_request,
    find_entries,
    keep_request,
    make_request,
    require_asked,
    require_name,
    spread_pots,
)
from imprint.errors import CreditError, ReliabilityWarning
from imprint.keys import PrivateKey, PublicKey, identify_key, load_private_key, load_public_key
from imprint.store.manifest import versions

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True)
class Receipt:
    """The entries that one call wrote.

    repeated: whether an earlier call with the same key wrote them.
    """

    entries: tuple[Leaf, ...]
    repeated: bool = False

    @property
    def sequences(self) -> tuple[int, ...]:
        """The places of the entries in the log, by which disputes name them."""
        return tuple(entry.sequence for entry in self.entries)


class Ledger:
    """A ledger in a database: the path of a SQLite file, or the URL of a PostgreSQL database.

    `Ledger.create` makes one, `Ledger(place)` opens it; in a `with` block it is closed at the end.

    wait: seconds to wait for a connection, or for another writer.
    """

    def __init__(self, place: str | os.PathLike[str], *, wait: int = tables.WAIT) -> None:
        self.engine = tables.connect(place, wait)
        try:
            refuse_missing_file(self.engine)
            with tables.reading(self.engine) as connection:
                check_schema(connection)
                first = log.read_leaf(connection, 0).about
            self.name, self.signer = str(first["log"]), first["signer"]
        except KeyError as error:
            self.close()
            raise CreditError(f"the log is damaged: its first entry has no {error}.") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, place: str | os.PathLike[str], tariff: Tariff, *, signed_by: PublicKey | None = None) -> "Ledger":
        """Make a new ledger, with the currency in which it pays.

        signed_by: a public key: only results of stores that were opened with it (`Store(path, signed_by=...)`) are
            credited.
        """
        signer = None if signed_by is None else identify_key(load_public_key(signed_by))
        engine = tables.connect(place)
        try:
            make_private_file(engine)
            tables.write_ahead(engine)
            with tables.translated_errors(engine, "writing"), engine.begin() as connection:
                refuse_tables(connection)
                tables.metadata.create_all(connection)
                connection.execute(insert(tables.log).values(id=1, schema=tables.SCHEMA, size=0, peaks=b"", time=""))
                about = {"log": uuid.uuid4().hex, "signer": signer, "versions": versions()}
                first = compose("log", 0, now_or_last(), about)
                second = compose("tariff", 1, now_or_last(), {"tariff": asdict(tariff)})
                log.append(connection, Frontier(), [first, second])
        finally:
            engine.dispose()
        return cls(place)

    def __repr__(self) -> str:
        return f"Ledger({tables.describe(self.engine)!r}: {len(self):,} entries, {self.tariff.describe()})"

    def __len__(self) -> int:
        with tables.reading(self.engine) as connection:
            return log.read_size(connection)

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to the database."""
        self.engine.dispose()

    @property
    def tariff(self) -> Tariff:
        """What queries pay now."""
        with tables.reading(self.engine) as connection:
            return read_tariff(connection)

    def set_tariff(self, tariff: Tariff) -> Leaf:
        """Change what queries pay from now on. The currency and its smallest unit stay what they are."""
        with tables.writing(self.engine) as (connection, frontier, last):
            before = read_tariff(connection)
            if (tariff.currency, tariff.smallest) != (before.currency, before.smallest):
                raise CreditError(
                    f"this ledger pays in {before.currency}, in multiples of {before.smallest} micro-units, and that "
                    "cannot be changed: make another ledger."
                )
            leaf = compose("tariff", frontier.size, now_or_last(last), {"tariff": asdict(tariff)})
            log.append(connection, frontier, [leaf])
        return leaf

    def credit(
        self,
        result: Attribution,
        policy: Policy,
        *,
        pot: int | Sequence[int] | None = None,
        ids: Sequence[str] | None = None,
        payloads: Sequence[bytes] | None = None,
        retention: timedelta | None = None,
        model: str | None = None,
        caller: str = "-",
        key: str | None = None,
        asked: bytes | None = None,
    ) -> Receipt:
        """Credit the queries of a result to its sources: all of them, or, if this fails, none.

        pot: what each query pays, in micro-units; by default what the tariff says, or a pot for the whole period.
        ids: your identifiers for the queries. Publishers see them. By default they are random.
        payloads: the queries in bytes (`imprint.credit.encode_queries`), kept apart for disputes. Without them, entries
            cannot be disputed.
        retention: how long to keep the payloads before `erase_expired` erases them; by default forever.
        model: a hash of the model you serve; by default that of the models the scores were read from.
        caller, key: name a request. The same request again returns the stored entries, and another one with the same
            key is refused. Pass a key whenever you might try again.
        asked: what makes a request the same, such as the bytes in which it was sent to you. By default everything
            above: with another policy or store it is another request. `find` knows a request by it.
        """
        check_creditable(result)
        if not isinstance(policy, Policy):
            raise CreditError(f"policy must be an imprint.credit.Policy, got a {type(policy).__name__}.")
        count, kept = len(result), require_payloads(result, payloads, retention)
        pots = spread_pots(pot, count)
        self._check_signer(result.labels)
        names = require_ids(ids, count)
        described = describe_request(result, policy, pots, ids, payloads, model)
        content = described if asked is None else require_asked(asked)
        key = secrets.token_hex(16) if key is None else key
        expires = find_expiry(retention)
        request = make_request(require_name(caller, "caller"), require_name(key, "key"), content)
        bound = bind_request(request)
        while True:
            with tables.reading(self.engine) as connection:
                place, tariff = find_tariff(connection)
                if (before := find_entries(connection, caller, key, content, count)) is not None:
                    return Receipt(before, repeated=True)
            priced = [tariff.per_query if each is None else each for each in pots]
            tariffs = [place if each is None else None for each in pots]
            drafts = draft_entries(result, policy, priced, names, kept, bound, model, expires, tariffs)  # takes long
            with tables.writing(self.engine) as (connection, frontier, last):
                if (before := find_entries(connection, caller, key, content, count)) is not None:
                    return Receipt(before, repeated=True)
                if find_tariff(connection)[0] == place:  # else it was changed in the meantime
                    entries = _append_entries(connection, frontier, now_or_last(last), policy, drafts)
                    keep_payloads(connection, entries[0].sequence, drafts, expires)
                    keep_request(connection, request, entries[0].sequence, count)
                    break
        _warn_of_nothing(entries)
        return Receipt(entries)

    def find(self, asked: bytes, count: int, *, caller: str = "-", key: str) -> Receipt | None:
        """Return what a request was credited with before; None if it is new.

        asked, caller, key: as they were given to `credit`. Another request with the same key is refused.
        count: how many queries it has.
        """
        content = require_asked(asked)
        caller, key = require_name(caller, "caller"), require_name(key, "key")
        with tables.reading(self.engine) as connection:
            before = find_entries(connection, caller, key, content, count)
        return None if before is None else Receipt(before, repeated=True)

    def check(self, labels: Labels, policy: Policy) -> None:
        """Refuse a policy, and results with some labels, that `credit` would refuse whatever the queries are."""
        check_labels(labels)
        policy.check_question(labels.question)
        self._check_signer(labels)
        with tables.reading(self.engine) as connection:
            _require_policy(connection, policy)

    def _check_signer(self, labels: Labels) -> None:
        """Refuse results of stores that the owner of the ledger's key has not signed."""
        if self.signer is not None and labels.fingerprints.get("signer") != self.signer:
            raise CreditError(
                f"this ledger credits only stores that the key {self.signer} has signed: sign the store (`imprint "
                "sign`), open it with the public key, Store(path, signed_by=...), and attribute in the same process: "
                "a saved result may have been changed."
            )

    def entry(self, sequence: int) -> Leaf:
        """Return one leaf of the log."""
        with tables.reading(self.engine) as connection:
            return log.read_leaf(connection, sequence)

    def entries(self, start: int = 0, stop: int | None = None, kind: Kind | None = None) -> Iterator[Leaf]:
        """Iterate over the leaves of the log, as it is now."""
        with tables.reading(self.engine) as connection:
            end = log.read_size(connection) if stop is None else stop
            yield from log.read_leaves(connection, log.require_place(start), log.require_place(end), kind)

    def policy(self, sha256: str) -> Policy:
        """Return a policy that entries name by its hash."""
        with tables.reading(self.engine) as connection:
            found = read_policies(connection)
        if sha256 not in found:
            raise CreditError(f"the log has no policy {sha256}.")
        return found[sha256]

    def sign_head(
        self, key: PrivateKey, publish: str | os.PathLike[str] | None = None, *, exchange: bool = False
    ) -> Head:
        """Sign the size and the root of the log as it is now, keep that, and append it to a file if one is given.

        publish: a file of heads. The log must have grown from the newest one there.

        exchange: whether this key replaces the one that signed the last head. Without it, another key is refused.
        """
        signer = load_private_key(key)
        with tables.writing(self.engine) as (connection, frontier, _):
            known, name = [head.key for head in read_kept_heads(connection)][-1:], identify_key(signer.public_key())
            if known and known != [name] and not exchange:
                raise CreditError(
                    f"the last head was signed with key {known[0]}, and this is {name}: use that key, or say that this "
                    "one replaces it (exchange=True, --exchange) and tell everybody who checks statements."
                )
            _refuse_rewritten(connection, frontier)
            if publish is not None:
                node = log.read_nodes(connection)
                refuse_other_heads(publish, self.name, frontier.size, lambda size: find_root(size, node))
            head = sign_head(signer, self.name, frontier.size, frontier.root, now_or_last())
            if publish is not None:
                publish_head(publish, head)
            kept = {"size": head.size, "time": head.time, "head": head.content, "signature": head.signature}
            connection.execute(insert(tables.heads).values(**kept))
        return head

    def heads(self) -> list[Head]:
        """Return the signed heads that the database keeps, in their order."""
        with tables.reading(self.engine) as connection:
            return read_kept_heads(connection)

    def payload(self, sequence: int) -> bytes | None:
        """Return the query of an entry, in bytes; None if it was never kept, or erased."""
        with tables.reading(self.engine) as connection:
            place = log.require_place(sequence)
            row = connection.execute(select(tables.payloads).where(tables.payloads.c.sequence == place)).one_or_none()
            return None if row is None else require_payload(log.read_leaf(connection, place), row)

    def erase(self, sequences: Sequence[int], reason: str = "on request") -> int:
        """Erase the queries of some entries for good, with the salts of their hashes; return how many there were.

        The entries stay and can still be verified, but nobody can dispute them any more. The log notes the erasure.
        """
        count = erase_queries(self.engine, require_places(sequences), reason)
        truncate_wal(self.engine)
        return count

    def erase_expired(self, now: datetime | None = None) -> int:
        """Erase the queries whose retention has ended; return how many there were."""
        count = erase_expired_queries(self.engine, format_time(datetime.now(UTC) if now is None else now))
        truncate_wal(self.engine)
        return count

    def vacuum(self) -> None:
        """Rewrite a SQLite ledger without the traces that erased queries may have left in free space; takes long."""
        vacuum(self.engine)


def _refuse_rewritten(connection: Connection, frontier: Frontier) -> None:
    """Refuse to sign a root that the tree does not have, or one that did not grow from the last head."""
    node, heads = log.read_nodes(connection), read_kept_heads(connection)
    wanted = [(frontier.size, frontier.root), *((head.size, head.root) for head in heads[-1:])]
    for size, root in wanted:
        if size > frontier.size or find_root(size, node) != root:
            raise CreditError(
                "the log was changed since it was written: run `imprint credit verify` before you sign it."
            )


def _append_entries(
    connection: Connection, frontier: Frontier, now: str, policy: Policy, drafts: Sequence[Draft]
) -> tuple[Leaf, ...]:
    """Append credited queries, and their policy if it is new; return their entries."""
    known = policy.sha256 in _require_policy(connection, policy)
    before = [] if known else [compose("policy", frontier.size, now, {"policy": policy.to_json()})]
    first = frontier.size + len(before)
    entries = [compose("credit", first + at, now, each.about, each.lines) for at, each in enumerate(drafts)]
    log.append(connection, frontier, [*before, *entries])
    return tuple(entries)


def _require_policy(connection: Connection, policy: Policy) -> dict[str, Policy]:
    """Return the policies of the log by their hashes; refuse one whose name and version are another's."""
    policies = read_policies(connection)
    for other in policies.values():
        if (other.name, other.version) == (policy.name, policy.version) and other != policy:
            raise CreditError(
                f"the log has another policy {policy.name!r}, version {policy.version}: raise the version, or give it "
                "another name."
            )
    return policies


def _warn_of_nothing(entries: Sequence[Leaf]) -> None:
    """Warn if queries were credited to nobody, which cannot be taken back."""
    reasons = sorted({entry.about["reason"] for entry in entries if entry.about["rule"] == "nothing"})
    if reasons:
        warnings.warn(
            f"nobody is credited for some of these queries: {'; '.join(reasons)}. What they pay stays unattributed. "
            "Validate the store, or give the policy a fallback.",
            ReliabilityWarning,
            stacklevel=3,
        )
