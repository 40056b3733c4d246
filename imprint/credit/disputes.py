"""Settles disputes: computes a credited query again, from the query as it was kept and the store, and compares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from imprint.attribution.result import Attribution
from imprint.attribution.scoring import ReadoutOptions, attribute
from imprint.credit import log, tables
from imprint.credit.drafting import CALIBRATION, draft_entries, is_calibration, require_payload
from imprint.credit.leaves import Leaf, compose
from imprint.credit.ledger import Ledger
from imprint.credit.log import now_or_last
from imprint.credit.money import PARTS, format_share
from imprint.credit.payloads import decode_query
from imprint.display import for_terminal
from imprint.errors import CreditError
from imprint.store.reading import Store
from imprint.task import Task

TOLERANCE = 1e-3
"""How far recomputed scores and errors may deviate, relative to the largest; rounding differs between machines."""
_SHARE = 0.01  # by how much a share may change if all scores are within the tolerance


class Compared(NamedTuple):
    """One source of a disputed query, as it was credited and as it is computed again; shares are from 0 to 1."""

    source: str
    helped: float
    helps: float
    error: float | None
    error_again: float | None
    share: float
    share_again: float


@dataclass(frozen=True)
class Dispute:
    """A credited query, computed again.

    difference: the largest difference of a score or its standard error, relative to the largest of them.
    others: what else is not as it was recorded, such as the validation of the store, or the shares.
    """

    sequence: int
    rows: tuple[Compared, ...]
    difference: float
    tolerance: float
    others: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether scores, standard errors, validation and shares come out as they were credited."""
        return self.difference <= self.tolerance and not self.others

    def __repr__(self) -> str:
        verdict = "agrees" if self.agrees else "differs"
        title = f"entry {self.sequence} {verdict}: scores differ by {self.difference:.2g} of the largest"
        width = max(6, *(len(for_terminal(row.source)) for row in self.rows))
        lines = [f"{'source':{width}}      helped       again   share   again"]
        lines += [
            f"{for_terminal(row.source):{width}}  {row.helped:+10.4g}  {row.helps:+10.4g}  "
            f"{format_share(row.share * PARTS):>6}  {format_share(row.share_again * PARTS):>6}"
            for row in self.rows
        ]
        return "\n".join([f"{title} ({self.tolerance:g} is tolerated)", *map(for_terminal, self.others), *lines])


def dispute(
    ledger: Ledger,
    sequence: int,
    task: Task,
    store: Store,
    *,
    calibration: float = 1.0,
    tolerance: float = TOLERANCE,
    note: bool = False,
) -> Dispute:
    """Compute a credited query again, and compare.

    task, store: what the query was scored with; another store is refused.
    calibration: the factor by which scores were to be calibrated. The one in the entry is compared with it, not
        believed.
    tolerance: how far scores and standard errors may deviate, relative to the largest.
    note: whether the log notes the outcome.
    """
    entry = ledger.entry(sequence)
    if entry.kind != "credit":
        raise CreditError(f"entry {sequence} is not a credited query (it is a {entry.kind} entry).")
    if store.sha256 != entry.about["store"]:
        raise CreditError(
            f"entry {sequence} was scored with the store {entry.about['store']}, and this is {store.sha256}: give the "
            "store as it was."
        )
    if not is_calibration(calibration):
        raise CreditError(f"calibration must be a positive number, got {calibration!r}.")
    result = _score_again(entry, _require_payload(ledger, entry), task, store, calibration)
    found = _compare(entry, result, ledger, tolerance)
    if note:
        about = {
            **{"disputed": sequence, "agrees": found.agrees, "others": list(found.others)},
            **{"difference": found.difference, "tolerance": tolerance},
        }
        with tables.writing(ledger.engine) as (connection, frontier, last):
            log.append(connection, frontier, [compose("dispute", frontier.size, now_or_last(last), about)])
    return found


def _require_payload(ledger: Ledger, entry: Leaf) -> bytes:
    with tables.reading(ledger.engine) as connection:
        query = tables.payloads.select().where(tables.payloads.c.sequence == entry.sequence)
        row = connection.execute(query).one_or_none()
    if row is None and entry.about["payload"] is None:
        raise CreditError(f"the query of entry {entry.sequence} was not kept, so it cannot be disputed.")
    if row is None:
        raise CreditError(f"the query of entry {entry.sequence} was erased, so it cannot be disputed any more.")
    return require_payload(entry, row)


def _score_again(entry: Leaf, payload: bytes, task: Task, store: Store, calibration: float) -> Attribution:
    details: dict[str, Any] = entry.about["details"]
    options: ReadoutOptions = {"readout": details["readout"], "step": details.get("central_step"), "progress": False}
    result = attribute(task, store, iter([decode_query(payload)]), **options)
    if calibration != 1.0:
        result = _calibrate(result, calibration)
    if set(result.labels.source_ids) != {row["source"] for row in entry.rows}:
        raise CreditError(f"entry {entry.sequence} credits unions of sources, which this store does not have.")
    if result.labels.measure != entry.about["measure"]:
        raise CreditError(
            f"entry {entry.sequence} was measured by {entry.about['measure']!r}, and this task measures "
            f"{result.labels.measure!r}."
        )
    return result


def _calibrate(result: Attribution, factor: float) -> Attribution:
    """Multiply all scores by a factor; see `Attribution.calibrate`."""
    labels = result.labels
    own, other = (
        None if each is None else each.rescaled(factor) for each in (labels.validation, labels.store_validation)
    )
    details = {**labels.details, CALIBRATION: factor}
    return replace(
        result,
        labels=replace(labels, details=details, validation=own, store_validation=other),
        scores=factor * result.scores,
        replicates=tuple(each.change(lambda values: factor * values) for each in result.replicates),
        noise_changes=None if result.noise_changes is None else factor * result.noise_changes,
    )


def _compare(entry: Leaf, result: Attribution, ledger: Ledger, tolerance: float) -> Dispute:
    about, policy = entry.about, ledger.policy(entry.about["policy"])
    draft = draft_entries(result, policy, [about["pot"]], [about["query"]], [None])[0]
    again = draft.rows
    rows = tuple(
        Compared(
            one["source"],
            one["helps"],
            other["helps"],
            one["error"],
            other["error"],
            one["share"] / PARTS,
            other["share"] / PARTS,
        )
        for one, other in zip(entry.rows, again, strict=True)
    )
    difference = max(
        _differ([row.helped for row in rows], [row.helps for row in rows]),
        _differ([row.error for row in rows], [row.error_again for row in rows]),
    )
    others = [
        f"{what} was recorded as {about[name]}, and is {draft.about[name]}"
        for name, what in (
            ("n", "the number of training examples"),
            ("better", "which values are better"),
            ("freedom", "the number of degrees of freedom"),
        )
        if about[name] != draft.about[name]
    ]
    others += [
        f"the size of {one['source']} was recorded as {one['size']}, and is {other['size']}"
        for one, other in zip(entry.rows, again, strict=True)
        if one["size"] != other["size"]
    ]
    recorded, given = (each["details"].get(CALIBRATION, 1.0) for each in (about, draft.about))
    if not is_calibration(recorded) or not math.isclose(recorded, given, rel_tol=tolerance):
        others.append(
            f"the calibration was recorded as {recorded!r}, and was given as {given:g}: pass calibration= if you know "
            "another one to be right"
        )
    outcomes = [each["validation"] and each["validation"]["outcome"] for each in (about, draft.about)]
    if outcomes[0] != outcomes[1]:
        others.append(f"the validation was recorded as {outcomes[0] or 'none'}, and is {outcomes[1] or 'none'}")
    if max(abs(row.share - row.share_again) for row in rows) > _SHARE:
        others.append("the shares come out otherwise")
    return Dispute(entry.sequence, rows, difference, tolerance, tuple(others))


def _differ(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """Return the largest difference of two lists, relative to the largest number; infinite if only one has any."""
    if None in one or None in other:
        return 0.0 if list(one) == list(other) else float("inf")
    before, after = np.array(one, dtype=np.float64), np.array(other, dtype=np.float64)
    return float(np.abs(before - after).max() / (max(np.abs(before).max(), np.abs(after).max()) or 1.0))
