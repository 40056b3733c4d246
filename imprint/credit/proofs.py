"""Proofs of statements: what a publisher needs to check its own credit, and no line of anybody else's.

The proofs are a file of JSON lines. The first names the source, the period and the signed head; each of the others is a
leaf of the log with the proof that it is in the tree of that head: the closed period, every credited query, the
policies and the tariff. Of a leaf with lines it has the source's own line alone. `check_statement` needs the file and
the public key.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imprint.credit.canonical import decode_object
from imprint.credit.contradictions import Basis, Sums, find_in_entry, find_in_period, require_whole
from imprint.credit.heads import Head, require_heads
from imprint.credit.leaves import LINE_SALT, Leaf, hash_line
from imprint.credit.merkle import (
    Node,
    check_consistency,
    check_inclusion,
    hash_leaf,
    prove_consistency,
)
from imprint.credit.money import format_amount
from imprint.credit.policy import Policy
from imprint.display import count_of, for_terminal
from imprint.errors import CreditError, StoreError
from imprint.keys import PublicKey, load_public_keys
from imprint.store.values import parsed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_KIND, _GROWTH = "imprint statement", "growth"
_SCHEMA = 1
_LONGEST = 1 << 20  # bytes of a line of a statement
_MOST = 20  # problems that are listed


def describe_statement(source: str, period: str, head: Head) -> dict[str, Any]:
    """Return the first line of a file of proofs."""
    return {"kind": _KIND, "schema": _SCHEMA, "source": source, "period": period, **head.to_json()}


def prove_leaf(leaf: Leaf, path: Sequence[bytes]) -> dict[str, Any]:
    """Return a leaf with its audit path: the proof that it is in the log."""
    return {"header": leaf.header.decode(), "proof": [each.hex() for each in path]}


def prove_growth(old: Head, head: Head, node: Node) -> dict[str, Any]:
    """Return the proof that the log of an earlier head grew into that of a later one, whose nodes are given."""
    path = prove_consistency(old.size, head.size, node)
    if not check_consistency(old.size, head.size, old.root, head.root, path):
        raise CreditError(
            f"the log did not grow from the head of {old.size} entries that was signed at {old.time}: run `imprint "
            "credit verify`."
        )
    return {"kind": _GROWTH, "old": old.size, "root": old.root.hex(), "proof": [each.hex() for each in path]}


def encode_proof(proof: dict[str, Any]) -> str:
    """Return a line of a file of proofs; refuse one that is too long to be read again."""
    line = json.dumps(proof, ensure_ascii=False) + "\n"
    if len(line.encode()) > _LONGEST:
        raise CreditError(
            f"a line of this statement would have more than {_LONGEST:,} bytes, and nobody could check it: an id of a "
            "source or a name of a measurement is too long."
        )
    return line


@dataclass(frozen=True)
class CheckedStatement:
    """What a statement proves.

    first, stop: the entries of the period are those from `first` up to `stop`; the next period must begin there.
    entries: how many queries it has. amount: in micro-units. units: what is paid, in the smallest unit of the currency.
    heads: how many earlier heads, of those that were given, the log is proved to have grown from.
    later: how many of them were signed after this statement, so that it can say nothing about them.
    """

    source: str
    period: str
    first: int
    stop: int
    entries: int
    amount: int
    units: int
    smallest: int
    currency: str
    head: Head
    heads: int
    later: int
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether every claim of the statement was proved."""
        return not self.problems

    def __repr__(self) -> str:
        who = for_terminal(f"{self.source}, {self.period}")
        if not self.holds:
            listed = [f"  {for_terminal(problem)}" for problem in self.problems[:_MOST]]
            return "\n".join([f"does not hold: {who}", *listed])
        paid = f"{format_amount(self.units * self.smallest)} {self.currency}"
        held = f"; it grew from {count_of(self.heads, 'head')} that you hold" if self.heads else ""
        if self.later:
            held += f"; {count_of(self.later, 'head')} that you hold came later, and a later statement must prove them"
        return for_terminal(
            f"holds: {who}: {paid} for {count_of(self.entries, 'query', 'queries')}, all of them in the log "
            f"{self.head.log} of {self.head.size} entries that the key {self.head.key} signed at {self.head.time}{held}"
        )


def check_statement(
    place: str | os.PathLike[str], key: PublicKey | Sequence[PublicKey], earlier: Sequence[Head] = ()
) -> CheckedStatement:
    """Check the proofs of a statement, without the ledger.

    key: the public key of the ledger, or several if it was exchanged.
    earlier: heads of the same log that you hold: the log must have grown from each of them.
    """
    keys, earlier = load_public_keys(key), require_heads(earlier)
    if not keys:
        raise CreditError("give the public key of the ledger, which its heads must be signed with.")
    if not isinstance(place, str | os.PathLike):
        raise CreditError(f"a statement is a file, got a {type(place).__name__}.")
    try:
        lines = _read_lines(place)
        checker = _Checker(next(lines, {}), keys, earlier)
        for line in lines:
            checker.check(line)
        return checker.conclude()
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CreditError(
            f"{os.fspath(place)} is not a statement, or is damaged: {type(error).__name__} {error}."
        ) from error


class _Checker:
    """Goes through a statement once."""

    def __init__(self, first: Any, keys: "Sequence[Ed25519PublicKey]", earlier: Sequence[Head]) -> None:
        if first.get("kind") != _KIND or first.get("schema") != _SCHEMA:
            raise CreditError("this is not a statement that this version reads.")
        self.source, self.period = str(first["source"]), str(first["period"])
        self.head = Head.from_json(first)
        self.head.check(*keys)
        self.problems, self.later = list[str](), 0
        self.earlier = dict[tuple[int, bytes], Head]()
        for other in earlier:
            other.check(*keys)
            if other.log != self.head.log:
                self.problems.append(f"you hold a head of another log, {other.log}")
            elif other.size > self.head.size and other.time > self.head.time:
                self.later += 1
            else:
                self.earlier[other.size, other.root] = other
        self.grown = {(self.head.size, self.head.root)}
        self.closing: dict[str, Any] | None = None
        self.line: dict[str, Any] = {}
        self.seen = set[int]()
        self.sums, self.bases, self.policies = Sums(), set[Basis](), dict[str, Policy]()
        self.units = set[tuple[str, int]]()

    def check(self, item: dict[str, Any]) -> None:
        """Check one line of the statement."""
        if item.get("kind") == _GROWTH:
            self._check_growth(item)
            return
        header = item["header"].encode()
        about = decode_object(header)
        place, path = require_whole(about["sequence"]), [bytes.fromhex(node) for node in item["proof"]]
        if place in self.seen:
            self.problems.append(f"entry {place} is listed twice")
            return
        self.seen.add(place)
        if not check_inclusion(hash_leaf(header), place, self.head.size, path, self.head.root):
            self.problems.append(f"entry {place} is not in the signed log")
            return
        if about["kind"] == "policy":
            policy = Policy.from_json(about["policy"])
            self.policies[policy.sha256] = policy
        elif about["kind"] == "tariff":
            self.units.add((about["tariff"]["currency"], about["tariff"]["smallest"]))
        elif about["kind"] in ("period", "credit"):
            self._check_line(about, item)

    def _check_growth(self, item: dict[str, Any]) -> None:
        old, root = require_whole(item["old"]), bytes.fromhex(item["root"])
        path = [bytes.fromhex(node) for node in item["proof"]]
        if check_consistency(old, self.head.size, root, self.head.root, path):
            self.grown.add((old, root))

    def _check_line(self, about: dict[str, Any], item: dict[str, Any]) -> None:
        """Check that a line is the one that the header vouches for, and take it into account."""
        content, lines = item["line"].encode(), about["lines"]
        salt = bytes.fromhex(item["salt"])
        if len(salt) != LINE_SALT:
            raise ValueError("the salt of a line has another length")
        hashed = hash_line(salt, content)
        path = [bytes.fromhex(node) for node in item["path"]]
        if not check_inclusion(
            hashed, require_whole(item["place"]), lines["count"], path, bytes.fromhex(lines["root"])
        ):
            self.problems.append(f"the line of entry {about['sequence']} is not the one that the log has")
            return
        line = decode_object(content)
        if line["source"] != self.source:
            self.problems.append(f"the line of entry {about['sequence']} is that of another source")
        elif about["kind"] == "period":
            self._take_period(about, line)
        else:
            self._take_credit(about, line)

    def _take_period(self, about: dict[str, Any], line: dict[str, Any]) -> None:
        if self.closing is not None or about["period"] != self.period:
            self.problems.append(f"the statement closes another period: {about['period']}")
        else:
            self.closing, self.line = about, line

    def _take_credit(self, about: dict[str, Any], line: dict[str, Any]) -> None:
        closing = self.closing or {"first": 0, "stop": 0}
        if not closing["first"] <= about["sequence"] < closing["stop"]:
            self.problems.append(f"entry {about['sequence']} is outside this period")
        found = list(find_in_entry(about, line))
        self.problems += [f"entry {about['sequence']}: {each}" for each in found]
        self.bases.add(Basis.of(about, line))
        if not found:
            self.sums.add(about, line)

    def conclude(self) -> CheckedStatement:
        """Compare the entries with what the closed period says about the source."""
        if self.closing is None:
            why = f": {self.problems[0]}" if self.problems else ""
            raise CreditError(f"the statement does not prove how its period was closed{why}.")
        closing, line = self.closing, self.line
        self.problems += find_in_period(closing, line, self.sums)
        if closing["sequence"] >= self.head.size:
            self.problems.append("the period was closed after the head was signed")
        if self.units != {(closing["currency"], closing["smallest"])}:
            self.problems.append("the tariff, which says in what is paid, is missing or another one")
        for (size, root), other in self.earlier.items():
            if (size, root) not in self.grown:
                self.problems.append(
                    f"nothing proves that the log grew from the head of {size} entries that you hold, signed at "
                    f"{other.time}: ask the payer for that proof; if there is none, the log was rewritten"
                )
        for basis in self.bases:
            if (policy := self.policies.get(basis.policy)) is None:
                self.problems.append("a policy that queries were credited by is not in the statement")
            elif basis.contradicts(policy):
                self.problems.append(
                    f"queries about {basis.question} with validation {basis.outcome} are credited by the rule "
                    f"{basis.rule}, and their policy, {policy.name}, does not say so"
                )
        return CheckedStatement(
            source=self.source,
            period=self.period,
            first=closing["first"],
            stop=closing["stop"],
            entries=self.sums.entries,
            amount=line["amount"],
            units=line["units"],
            smallest=closing["smallest"],
            currency=closing["currency"],
            head=self.head,
            heads=len(self.earlier.keys() & self.grown),
            later=self.later,
            problems=tuple(self.problems),
        )


def _read_lines(place: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Iterate over the lines of a file, each of which must be a JSON object of bounded size and depth."""
    path = Path(place)
    try:
        if not path.is_file():
            raise CreditError(f"there is no file {path}.")
        with path.open("rb") as file:
            while line := file.readline(_LONGEST + 1):
                if len(line) > _LONGEST:
                    raise CreditError(f"{path} is not a statement: a line is too long.")
                found = parsed(line, path).content
                if not isinstance(found, dict):
                    raise CreditError(f"{path} is not a statement: a line is not an object.")
                yield found
    except StoreError as error:
        raise CreditError(str(error)) from error
    except OSError as error:
        raise CreditError(f"could not read {path}: {error.strerror or error}.") from error
