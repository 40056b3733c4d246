"""Policies: pure functions from signed effects, standard errors and a verdict to the shares of sources.

A policy names the question that it pays for. `this_run` pays for what happened in one training run, and so largely for
the luck of its seed; `expected` pays for what the data does on average (docs/credit.md).

With h_b how much source b helps a query, s_b the standard error of that, t Student's quantile of the policy's level
with the degrees of freedom that s_b is known with, and the threshold f_b = max(t·s_b, floor):

    above_noise     w_b = h_b where h_b > f_b; what other sources help stays unattributed
    positive_part   w_b = max(h_b, 0)
    fixed_plus      a fixed part of the pot in equal shares, the rest as above_noise has it

Shares are w_b over the sum of all positive h. Noise has a positive part, so `positive_part` pays for noise, and pays
more to a source that splits into four.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args

import numpy as np

from imprint.credit.canonical import encode
from imprint.credit.money import PARTS, apportion, make_whole
from imprint.errors import CreditError
from imprint.plan import Question
from imprint.statistics import Array, student_quantile
from imprint.validation.verdict import Outcome

Rule = Literal["above_noise", "positive_part", "fixed_plus"]
Fallback = Literal["by_size", "equal"]
AppliedRule = Literal["above_noise", "positive_part", "fixed_plus", "by_size", "equal", "nothing"]
"""The rule that was applied: that of the policy, its fallback, or "nothing"."""
_MANY = 200  # degrees of freedom, beyond which quantiles hardly change
_PASSING: dict[str, tuple[Outcome, ...]] = {
    "ranks validated": ("ranks validated", "sizes validated"),
    "sizes validated": ("sizes validated",),
}


@dataclass(frozen=True)
class Evidence:
    """What is known of one query.

    helps: by how much each source helps it, in the unit of the measurement; negative where it harms.
    errors: the standard error of each; None where they are unknown.
    freedom: the degrees of freedom that these are known with: one less than the number of runs.
    sizes: how many training examples each source has.
    outcome: what a validation found; None where there was none.
    """

    question: Question
    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    helps: Array
    errors: Array | None
    outcome: Outcome | None
    freedom: int | None = None


@dataclass(frozen=True)
class Division:
    """How the pot of one query is divided: shares in billionths, which add up to all of it with the unattributed rest.

    rule: which rule divided it.
    reason: why it was not that of the policy; empty where it was.
    """

    shares: tuple[int, ...]
    unattributed: int
    rule: AppliedRule
    reason: str = ""


@dataclass(frozen=True)
class Policy:
    """Decides who is credited for a query, and how much.

    name, version: for people to read; raise the version when you change the policy.
    question: the one it pays for; results that answer the other one are refused.
    level: how sure it must be that a source helps: its interval of this level must lie above 0.
    floor: what its help must exceed in any case, in the unit of the measurement; with unknown errors, only this.
    fixed: the part of the pot that `fixed_plus` shares equally, from 0 to 1.
    requires: what a validation must have found. "ranks validated" says that effects are better than chance, and not
        that their ratios are right; a common scale of all effects does not change shares. With a `floor`, sizes must
        have been validated in any case.
    fallback: the rule for results that do not meet `requires`; by default they credit nobody.

    >>> policy = Policy("house rules", question="expected")
    >>> names, helps, errors = ("times", "post", "wire", "blog"), np.array([0.6, 0.2, 0.1, -0.1]), np.full(4, 0.06)
    >>> evidence = Evidence("expected", names, (5, 5, 5, 5), helps, errors, "ranks validated", freedom=7)
    >>> policy.divide(evidence).shares, policy.divide(evidence).unattributed
    ((666666667, 222222222, 0, 0), 111111111)
    """

    name: str
    question: Question
    rule: Rule = "above_noise"
    level: float = 0.95
    floor: float = 0.0
    fixed: float = 0.0
    requires: Literal["ranks validated", "sizes validated"] = "ranks validated"
    fallback: Fallback | None = None
    version: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= 100 or not self.name.isprintable():
            raise CreditError(f"a policy has a name of 1 to 100 printable characters, got {self.name!r}.")
        for name, allowed in (
            ("question", get_args(Question)),
            ("rule", get_args(Rule)),
            ("requires", tuple(_PASSING)),
            ("fallback", (None, *get_args(Fallback))),
        ):
            if getattr(self, name) not in allowed:
                known = ", ".join(map(repr, allowed))
                raise CreditError(f"a policy's {name} is one of {known}; got {getattr(self, name)!r}.")
        for name in ("level", "floor", "fixed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise CreditError(f"a policy's {name} is a number of at least 0, got {value!r}.")
            try:
                object.__setattr__(self, name, float(value))  # so that 2 and 2.0 are the same policy
            except OverflowError as error:
                raise CreditError(f"a policy's {name} is too large.") from error
        if not self.level < 1:
            raise CreditError(f"a policy's level is below 1, such as 0.95, got {self.level!r}.")
        if self.fixed > 1 or (self.fixed > 0) != (self.rule == "fixed_plus"):
            raise CreditError(
                "`fixed` is the part of the pot that the rule 'fixed_plus' shares equally, above 0 and at most 1, and "
                f"0 for other rules; got {self.fixed!r} for {self.rule!r}."
            )
        if isinstance(self.version, bool) or not isinstance(self.version, int) or not 1 <= self.version < 2**63:
            raise CreditError("a policy's version is a whole number from 1 to 2⁶³ - 1.")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Policy":
        """Read what `to_json` returned; refuse fields that a policy does not have, and values that it cannot have."""
        if not isinstance(values, Mapping):
            raise CreditError(f"a policy is an object with names and values, got a {type(values).__name__}.")
        known = {each.name for each in fields(cls)}
        if unknown := set(map(str, values)) - known:
            raise CreditError(f"a policy has no field {min(unknown)!r}; it has {', '.join(sorted(known))}.")
        if missing := {"name", "question"} - set(values):
            raise CreditError(f"a policy needs a {min(missing)}.")
        return cls(**values)

    @property
    def sha256(self) -> str:
        """Identifies the policy: entries of the log name it by this."""
        return hashlib.sha256(encode(self.to_json())).hexdigest()

    def divide(self, evidence: Evidence) -> Division:
        """Divide the pot of a query among its sources."""
        self.check_question(evidence.question)
        if (reason := self.find_reason_against(evidence)) is not None:
            if self.fallback is None:
                return Division((0,) * len(evidence.sources), PARTS, "nothing", reason)
            weights: Sequence[float] = evidence.sizes if self.fallback == "by_size" else (1,) * len(evidence.sources)
            shares, _ = _share(PARTS, evidence.sources, weights, ())
            return Division(shares, 0, self.fallback, reason)
        fixed = round(self.fixed * PARTS)
        paid, unpaid = self.weigh(evidence.helps, evidence.errors, evidence.freedom)
        shares, rest = _share(PARTS - fixed, evidence.sources, paid.tolist(), unpaid.tolist())
        if not fixed:
            return Division(shares, rest, self.rule)
        equal = _share(fixed, evidence.sources, (1,) * len(evidence.sources), ())[0]
        return Division(tuple(map(sum, zip(shares, equal, strict=True))), rest, self.rule)

    def explain(self, rule: AppliedRule) -> str:
        """Say how a rule divides what a query pays, for people who read no code.

        >>> Policy("p", "expected").explain("positive_part")
        'The share of a source is its help divided by the help of all sources with positive help.'
        """
        share = "share of a source is its help divided by the help of all sources with positive help"
        floor = f", and in any case above {self.floor:g}" if self.floor else ""
        noise = (
            ", also of those with too little to be credited. It is credited only if it is above “needed”: a quantile "
            f"times its standard error, so that the {100 * self.level:g}% interval of the help lies above 0{floor}. "
            "What is not credited stays unattributed."
        )
        texts: dict[AppliedRule, str] = {
            "above_noise": f"The {share}{noise}",
            "positive_part": f"The {share}.",
            "fixed_plus": f"All sources share {100 * self.fixed:g}% equally. Of the rest, the {share}{noise}",
            "by_size": "Every source gets a share in proportion to its number of training examples.",
            "equal": "All sources get equal shares.",
            "nothing": "Nobody is credited.",
        }
        return texts[rule]

    def find_quantile(self, freedom: int | None) -> float:
        """Return how many standard errors an effect must exceed, which are known with some degrees of freedom."""
        return _find_quantile(min(freedom or _MANY, _MANY), self.level)

    def find_threshold(self, error: float | None, freedom: int | None) -> float | None:
        """Return what an effect with some standard error must exceed to be credited; None if there is no threshold."""
        if self.rule == "positive_part":
            return None
        return max(0.0 if error is None else self.find_quantile(freedom) * error, self.floor)

    def check_question(self, question: Question) -> None:
        """Refuse effects that answer another question than the policy pays for."""
        if question != self.question:
            raise CreditError(
                f"policy {self.name!r} pays for {self.question!r}, and these effects answer {question!r}: use a store "
                "that answers it, or a policy for the question these effects answer."
            )

    def find_reason_against(self, evidence: Evidence) -> str | None:
        """Explain why the rule of the policy does not apply to a query; None if it does."""
        if (reason := self.find_lacking_validation(evidence.outcome)) is not None:
            return reason
        if self.rule != "positive_part" and evidence.errors is None and self.floor == 0:
            return "standard errors unknown, and the policy has no floor"
        return None

    def find_lacking_validation(self, outcome: Outcome | None) -> str | None:
        """Explain why what a validation found is not enough for the policy; None if it is."""
        required = "sizes validated" if self.floor else self.requires
        if outcome is None:
            return "not validated"
        return None if outcome in _PASSING[required] else f"validation: {outcome}, the policy requires {required}"

    def weigh(self, helps: Array, errors: Array | None, freedom: int | None) -> tuple[Array, Array]:
        """Return what is credited of the positive effects, and what is not; both have the shape (…, sources)."""
        positive = np.maximum(helps, 0.0)
        if self.rule == "positive_part":
            return positive, np.zeros_like(positive)
        above = helps > np.maximum(0.0 if errors is None else self.find_quantile(freedom) * errors, self.floor)
        return np.where(above, positive, 0.0), np.where(above, 0.0, positive)


@cache
def _find_quantile(freedom: int, level: float) -> float:
    return student_quantile(freedom, level) if level > 0 else 0.0


def _share(
    total: int, sources: Sequence[str], paid: Sequence[float], unpaid: Sequence[float]
) -> tuple[tuple[int, ...], int]:
    """Divide a total by largest remainder, ties by source id; return the sources' shares and the unattributed rest."""
    order = sorted(range(len(sources)), key=sources.__getitem__)
    whole = make_whole([*(paid[place] for place in order), *unpaid])
    weights = [*whole[: len(order)], sum(whole[len(order) :])]
    if not sum(weights):  # nobody helps
        return (0,) * len(sources), total
    parts = apportion(total, weights)
    found = dict(zip(order, parts, strict=False))
    return tuple(found[place] for place in range(len(sources))), parts[-1]
