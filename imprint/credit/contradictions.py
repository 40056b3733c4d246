"""Finds what cannot be true in a credited query or a closed period, from what a single source may see of them.

A source has its own line of each entry, and the header that all lines share. The other lines stay hidden, so these are
bounds; where a source sees all there is, they are equations. `check_statement` calls this.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from imprint.credit.money import PARTS, require_amount
from imprint.credit.policy import AppliedRule, Evidence, Policy
from imprint.plan import Question
from imprint.validation.verdict import Outcome

_NOT_VALIDATED = "not validated"
_KNOWN = {
    "rules": get_args(AppliedRule),
    "questions": get_args(Question),
    "validations": (*get_args(Outcome), _NOT_VALIDATED),
}


@dataclass(frozen=True)
class Basis:
    """What decides by which rule a query is credited."""

    policy: str
    rule: str
    question: Any
    outcome: Any
    has_errors: bool

    @classmethod
    def of(cls, about: Mapping[str, Any], line: Mapping[str, Any]) -> "Basis":
        outcome = None if about["validation"] is None else about["validation"]["outcome"]
        return cls(about["policy"], about["rule"], about["question"], outcome, line["error"] is not None)

    def contradicts(self, policy: Policy) -> bool:
        """Check whether the policy pays for another question, or credits such a query by another rule."""
        errors = np.zeros(0) if self.has_errors else None
        evidence = Evidence(self.question, (), (), np.zeros(0), errors, self.outcome)
        reason = policy.find_reason_against(evidence)
        rule = policy.rule if reason is None else policy.fallback or "nothing"
        return (self.question, self.rule) != (policy.question, rule)


@dataclass
class Sums:
    """Adds up the queries of a statement.

    amount, parts: what the source got of queries with a pot of their own, and its shares of the others.
    pots: what queries with a pot of their own paid. rest, rest_parts: what is unattributed of them, and of the others.
    """

    entries: int = 0
    without_pot: int = 0
    amount: int = 0
    parts: int = 0
    pots: int = 0
    rest: int = 0
    rest_parts: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    questions: Counter[str] = field(default_factory=Counter)
    validations: Counter[str] = field(default_factory=Counter)

    def add(self, about: Mapping[str, Any], line: Mapping[str, Any]) -> None:
        """Add a query in which nothing was found."""
        self.entries += 1
        self.rules[about["rule"]] += 1
        self.questions[about["question"]] += 1
        self.validations[(about["validation"] or {"outcome": _NOT_VALIDATED})["outcome"]] += 1
        rest = about["unattributed"]
        if about["pot"] is None:
            self.without_pot += 1
            self.parts += line["share"]
            self.rest_parts += rest["share"]
        else:
            self.pots += about["pot"]
            self.amount += line["amount"]
            self.rest += rest["amount"]


def find_in_entry(about: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    """Go through what contradicts itself in a credited query."""
    pot, rest, rule = about["pot"], about["unattributed"], about["rule"]
    share, unattributed = require_whole(line["share"]), require_whole(rest["share"])
    if min(share, unattributed) < 0 or share + unattributed > PARTS:
        yield "the share is not between 0 and what is attributed"
    if about["lines"]["count"] == 1 and share + unattributed != PARTS:
        yield "the only source and the unattributed rest are not all of it"
    if rule not in _KNOWN["rules"]:
        yield f"no rule is called {rule!r}"
    whole = {"nothing": (PARTS,), "by_size": (0,), "equal": (0,), "positive_part": (0, PARTS)}
    if unattributed not in whole.get(rule, (unattributed,)):
        yield f"the rule {rule} cannot leave {unattributed / PARTS:.1%} unattributed"
    size, examples = require_whole(line["size"]), require_whole(about["n"])
    if not 0 <= size <= examples or examples < 1:
        yield "the source has more training examples than there are, or fewer than none"
    if pot is None:
        if line["amount"] is not None or rest["amount"] is not None:
            yield "there is an amount, and no pot that pays it"
        return
    amount, left = require_whole(line["amount"]), require_whole(rest["amount"])
    require_amount(pot, "what a query pays")
    if any(abs(each * PARTS - part * pot) >= PARTS for each, part in ((amount, share), (left, unattributed))):
        yield "the amount is not the share of what the query paid"
    if amount + left > pot:
        yield "the source and the unattributed rest get more than the query paid"


def find_unpayable(about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Go through what keeps a credited query from being paid, with the lines of all its sources."""
    amounts = [about["pot"], about["unattributed"]["amount"], *(row["amount"] for row in rows)]
    shares, sizes = [row["share"] for row in rows], [row["size"] for row in rows]
    if not all(each is None or _is_whole(each) for each in amounts) or not all(map(_is_whole, shares)):
        yield "its amounts and shares are not whole numbers"
    if not are_sizes(sizes, about["n"]):
        yield "its sources do not have whole numbers of training examples, of all there are"
    if len({row["source"] for row in rows}) < len(rows):
        yield "two of its lines are of the same source"


def find_in_period(closing: Mapping[str, Any], line: Mapping[str, Any], sums: Sums) -> Iterator[str]:
    """Go through what contradicts itself, or the queries of the source, in a closed period."""
    first, stop, entries, without_pot, total = (
        require_whole(closing[name]) for name in ("first", "stop", "entries", "without_pot", "total")
    )
    amount, pot = require_whole(line["amount"]), closing["pot"]
    if (pot is None) != (without_pot == 0):
        yield "the period has a pot that nobody waits for, or queries that wait for none"
    if not (0 <= without_pot <= entries <= stop - first and sums.entries <= entries and first >= 0):
        yield "the period has more queries than entries, or fewer than this statement"
    if pot is not None and require_amount(pot, "the pot of a period") > total:
        yield "the pot of the period is larger than the total"
    yield from _find_in_units(closing, line)
    yield from _find_in_share(closing, line)
    if line["entries"] != sums.entries:
        yield f"the period has {line['entries']} queries, the statement {sums.entries}"
    if _is_apart(amount - sums.amount, closing, sums.parts):
        yield "the queries do not add up to what the source got"
    yield from _find_in_counts(closing, sums)
    if closing["stop"] > closing["sequence"]:
        yield "the period was closed before it ended"


def _find_in_units(closing: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    """Compare what is paid with the amounts that it was rounded from."""
    total, units, remainder, smallest = (
        require_whole(closing[name]) for name in ("total", "units", "remainder", "smallest")
    )
    own, rest = (
        (require_whole(each["amount"]), require_whole(each["units"])) for each in (line, closing["unattributed"])
    )
    if smallest < 1 or (units, remainder) != divmod(total, smallest):
        yield "the units and the remainder are not those of the total"
    if min(*own, *rest) < 0 or own[0] + rest[0] > total or own[1] + rest[1] > units:
        yield "the source and the unattributed rest get more than everybody together, or less than nothing"
    if closing["lines"]["count"] == 1 and own[0] + rest[0] != total:
        yield "the only source and the unattributed rest are not all of the total"
    if any(abs(paid * smallest - amount) >= smallest for amount, paid in (own, rest)):
        yield "what is paid differs from the amount by a unit or more"
    if not 0 <= require_whole(line["by_size"]) <= total:
        yield "a rule by size would pay more than the total, or less than nothing"


def _find_in_share(closing: Mapping[str, Any], line: Mapping[str, Any]) -> Iterator[str]:
    """Compare the share with the amount, and its interval with it."""
    total, share, low, high = closing["total"], line["share"], line["low"], line["high"]
    if share != (line["amount"] / total if total else None):
        yield "the share is not the amount divided by the total"
    elif (low is None) != (high is None) or (share is None and low is not None):
        yield "the interval of the share has one end, or there is no share"
    elif low is not None and not 0 <= low <= share <= high <= 1:
        yield "the interval of the share does not hold the share"


def _find_in_counts(closing: Mapping[str, Any], sums: Sums) -> Iterator[str]:
    """Compare the counts and the totals of the period with the queries of the source, which may not be all of them."""
    entries, is_all = closing["entries"], closing["entries"] == sums.entries
    for name, known in _KNOWN.items():
        counts, own = closing[name], getattr(sums, name)
        numbers = [require_whole(count) for count in counts.values()]
        if not set(counts) <= set(known) or any(count < 1 for count in numbers) or sum(numbers) != entries:
            yield f"the {name} of the period are not those of {entries} queries"
        elif counts != dict(own) if is_all else any(counts.get(each, 0) < count for each, count in own.items()):
            yield f"the {name} of the period are not those of its queries"
    paid, rest = closing["total"] - (closing["pot"] or 0), closing["unattributed"]["amount"]
    if sums.pots > paid or sums.without_pot > closing["without_pot"] or sums.rest > rest:
        yield "the period has less than the queries of this statement together"
    elif is_all and (sums.pots, sums.without_pot) != (paid, closing["without_pot"]):
        yield "the total is not what the queries paid"
    elif is_all and _is_apart(rest - sums.rest, closing, sums.rest_parts):
        yield "the queries do not add up to what is unattributed"


def _is_apart(amount: int, closing: Mapping[str, Any], parts: int) -> bool:
    """Check whether an amount is not what shares of queries get of the period's pot, up to rounding."""
    whole = closing["without_pot"] * PARTS
    return abs(amount * whole - (closing["pot"] or 0) * parts) >= whole if whole else amount != 0


def require_whole(value: Any) -> int:
    """Return a whole number; refuse anything else, such as true."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("a whole number is expected")
    return value


def are_sizes(sizes: Sequence[Any], examples: Any) -> bool:
    """Check whether sources can have so many training examples each, of so many; some must have one."""
    return all(map(_is_whole, [*sizes, examples])) and sum(sizes) > 0 and max(sizes) <= examples


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
