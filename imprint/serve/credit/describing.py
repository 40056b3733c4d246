"""Says what an entry of the log means: who got what of a query, why, and what in it does not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from imprint.attribution.noise import TIMES
from imprint.credit import log
from imprint.credit.auditing import Problem
from imprint.credit.leaves import Leaf
from imprint.credit.money import PARTS, format_share
from imprint.credit.policy import Policy
from imprint.display import count_of
from imprint.errors import CreditError
from imprint.serve.credit.answers import Amount, ChangedEntry, Entry, Line, PolicyName
from imprint.serve.credit.faults import CHANGED, find_wrong
from imprint.serve.credit.reading import Found
from imprint.serve.credit.scope import Scope
from imprint.serve.credit.tally import is_clear

HIDDEN = "something in it is not as it was written"
_UNEXPLAINED = "This does not follow from the scores and the policy: see what does not fit."


class Describer:
    """Describes entries for somebody.

    names: of sources, by their ids. problems: what the last verification found.
    """

    def __init__(
        self,
        scope: Scope,
        policies: Mapping[str, Policy],
        names: Mapping[str, str],
        currency: str,
        problems: Sequence[Problem] = (),
    ) -> None:
        self._scope, self._policies, self._names, self._currency = scope, policies, names, currency
        self._problems: dict[int, list[str]] = {}
        for problem in problems:
            if problem.sequence is not None:
                self._problems.setdefault(problem.sequence, []).append(problem.text)

    def describe(self, entry: Found) -> Entry | ChangedEntry:
        """Describe a credited query; of one that was changed, only what is wrong."""
        if entry.leaf is None:
            return self._refuse(entry.sequence)
        try:
            with log.translated_damage(f"entry {entry.sequence}"):
                return self._describe(entry.leaf)
        except CreditError:  # written by hand, with its hash
            return self._refuse(entry.sequence)

    def _refuse(self, sequence: int) -> ChangedEntry:
        known = self._problems.get(sequence, [])
        return ChangedEntry(sequence=sequence, problems=self._show(list(dict.fromkeys([CHANGED, *known]))))

    def _show(self, problems: list[str]) -> list[str]:
        """Return problems for those who may see all lines; others learn that there are some."""
        if self._scope.is_all or not problems:
            return problems
        return [CHANGED if CHANGED in problems else HIDDEN]

    def find_problems(self, entry: Found) -> list[str]:
        """Return what is known to be wrong with an entry of any kind."""
        first = [CHANGED] if entry.leaf is None else []
        return self._show(list(dict.fromkeys([*first, *self._problems.get(entry.sequence, [])])))

    def _describe(self, leaf: Leaf) -> Entry:
        about, policy = leaf.about, self._policies.get(leaf.about["policy"])
        faults = find_wrong(leaf, self._policies, self._currency)
        rest = about["unattributed"]
        return Entry(
            sequence=leaf.sequence,
            time=about["time"],
            query=about["query"],
            question=about["question"],
            measure=about["measure"],
            validation=(about["validation"] or {"outcome": "not validated"})["outcome"],
            policy=None if policy is None else name_policy(policy),
            rule=about["rule"],
            reason=about["reason"],
            explanation="" if policy is None else policy.explain(about["rule"]),
            n=about["n"],
            sources=len(leaf.lines),
            pot=Amount.maybe(about["pot"], self._currency),
            unattributed=rest["share"] / PARTS,
            unattributed_amount=Amount.maybe(rest["amount"], self._currency),
            lines=[self._describe_line(leaf, row, policy, bool(faults)) for row in self._scope.choose(leaf.rows)],
            problems=self._show(list(dict.fromkeys([*self._problems.get(leaf.sequence, []), *faults]))),
        )

    def _describe_line(self, leaf: Leaf, row: Mapping[str, Any], policy: Policy | None, is_wrong: bool) -> Line:
        about, needed = leaf.about, None
        if policy is not None and about["rule"] == policy.rule:
            needed = policy.find_threshold(row["error"], about["freedom"])
        return Line(
            source=row["source"],
            name=self._names.get(row["source"], row["source"]),
            size=row["size"],
            helped_by=row["helps"],
            standard_error=row["error"],
            needed=needed,
            share=row["share"] / PARTS,
            amount=Amount.maybe(row["amount"], self._currency),
            why=_UNEXPLAINED if is_wrong else explain_line(leaf, row, needed, policy),
        )


def name_policy(policy: Policy) -> PolicyName:
    """Return what a policy is called, and what it does."""
    return PolicyName(
        sha256=policy.sha256,
        name=policy.name,
        version=policy.version,
        question=policy.question,
        rule=policy.rule,
    )


def explain_line(leaf: Leaf, row: Mapping[str, Any], needed: float | None, policy: Policy | None) -> str:
    """Say why a source has its share of a query.

    What all others helped is said only where it follows from the share, so that a publisher learns no more than that.
    """
    about, share = leaf.about, format_share(row["share"])
    match about["rule"]:
        case "nothing":
            return f"Nobody is credited: {about['reason']}."
        case "by_size":
            return f"It has {row['size']:,} of {count_of(about['n'], 'training example')}; shares go by size."
        case "equal":
            return f"All {len(leaf.lines)} sources get equal shares."
    fixed = "" if policy is None or not policy.fixed else f" {100 * policy.fixed:g}% is shared equally."
    helps = row["helps"]
    if helps <= 0:
        unclear = ", which is not clear" if _is_clear(about, row) is False else ""
        harm = "." if helps == 0 else f": the result was worse by {-helps:.3g} because of it{unclear}."
        text = f"It did not help{harm}"
    elif needed is not None and helps <= needed:
        text = f"It helped by {helps:.3g}, which is not more than the {needed:.3g} that is needed."
    else:
        all_help = sum(max(0.0, each["helps"]) for each in leaf.rows)
        above = "" if not needed else f", more than the {needed:.3g} that is needed"
        text = f"It helped by {helps:.3g}{above}. All sources that helped come to {all_help:.3g}."
        text = text if fixed else f"{text[:-1]}: {share} of it."
    return f"{text}{fixed}"


def _is_clear(about: Mapping[str, Any], row: Mapping[str, Any]) -> bool | None:
    """Tell whether an effect is clear, as where the query was answered; None if its error is unknown."""
    if row["error"] is None:
        return None
    if about.get("noise") is not None:
        return bool(abs(row["helps"]) > TIMES * row["error"])
    return is_clear(row["helps"], row["error"], about["freedom"])
