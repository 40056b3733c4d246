"""Turns an attribution into drafts of entries: everything except their places in the log and their time."""

import hashlib
import math
import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from imprint.attribution.labels import LAST_STEPS, LEFT_OUT, OUT_OF_BATCHES, SHARED, SHARED_EXAMPLES, Labels
from imprint.attribution.result import Attribution
from imprint.attribution.uncertainty import ERROR
from imprint.credit import tables
from imprint.credit.canonical import encode
from imprint.credit.contradictions import are_sizes
from imprint.credit.leaves import SALT_BYTES, Leaf, Lines
from imprint.credit.money import PARTS, apportion, require_amount
from imprint.credit.policy import Evidence, Policy
from imprint.errors import CreditError
from imprint.statistics import Array
from imprint.validation.verdict import Verdict

SIGNS = {"lower": 1.0, "higher": -1.0}
"""The sign of a removal effect that means help, by which values of the measurement are better."""
_QUERY = re.compile("[A-Za-z0-9._:-]{1,100}")
CALIBRATION = "calibration"
"""The factor that scores were multiplied by, in the details of a result and of its entries."""
_DETAILS = ("readout", "central_step", CALIBRATION, LAST_STEPS, OUT_OF_BATCHES, ERROR)


@dataclass(frozen=True)
class Draft:
    """An entry before it has a place in the log.

    payload: the salt of its hash, and the query in bytes; None if it is not kept.
    """

    about: dict[str, Any]
    rows: list[dict[str, Any]]
    lines: Lines
    payload: tuple[bytes, bytes] | None


def draft_entries(
    result: Attribution,
    policy: Policy,
    pots: Sequence[int | None],
    ids: Sequence[str],
    payloads: Sequence[bytes | None],
    request: str | None = None,
    model: str | None = None,
    expires: str | None = None,
    tariffs: Sequence[int | None] | None = None,
) -> list[Draft]:
    """Make a draft for each query of a result.

    pots: what each query pays, in micro-units; None where a pot for the whole period will pay.
    ids: what the caller calls the queries.
    payloads: the queries in bytes, for disputes; None where they are not to be kept.
    request: the salted hash of the request that credits them.
    expires: when the payloads are to be erased; None for never.
    model: the hash of the served model; by default that of the models which the scores were read from.
    tariffs: the place in the log of the tariff that each pot is from; None where the caller gave the pot.
    """
    labels = result.labels
    tariffs = [None] * len(result) if tariffs is None else tariffs
    check_creditable(result)
    policy.check_question(labels.question)
    if len(set(ids)) < len(ids):
        raise CreditError("two queries of this result have the same id: give each its own.")
    for name, given in (("pots", pots), ("ids", ids), ("payloads", payloads), ("tariffs", tariffs)):
        if len(given) != len(result):
            raise CreditError(f"there are {len(result)} queries and {len(given)} {name}: give one for each.")
    order = sorted(range(len(labels.source_ids)), key=labels.source_ids.__getitem__)
    common = {
        **_describe(labels, model),
        **_describe_runs(result),
        "policy": policy.sha256,
        "request": request,
        "expires": expires,
    }
    scores, spread = _values(result.scores), _find_errors(result)
    helps = SIGNS[str(labels.better)] * -scores / labels.n
    verdict, freedom = find_verdict(labels), _find_freedom(result)
    deviations = [_values(each.deviations) for each in result.replicates]
    noise = None if result.noise_changes is None else _values(result.noise_changes)
    drafts = []
    for place, (pot, query, payload, tariff) in enumerate(zip(pots, ids, payloads, tariffs, strict=True)):
        known = Evidence(
            question=labels.question,
            sources=labels.source_ids,
            sizes=labels.source_sizes,
            helps=helps[place],
            errors=None if spread is None else spread[place],
            outcome=None if verdict is None else verdict.outcome,
            freedom=freedom,
        )
        division = policy.divide(known)
        amounts, rest = _divide_pot(pot, [division.shares[b] for b in order], division.unattributed)
        rows = [
            {
                "source": labels.source_ids[b],
                "size": labels.source_sizes[b],
                "score": float(scores[place, b]),
                "helps": float(helps[place, b]),
                "error": None if spread is None else float(spread[place, b]),
                "deviations": [float(each[run, place, b]) for each in deviations for run in range(len(each))],
                "share": division.shares[b],
                "amount": amount,
            }
            for b, amount in zip(order, amounts, strict=True)
        ]
        about = {
            **common,
            "query": require_query(query),
            "freedom": freedom,
            "noise": None if noise is None else [float(change) for change in noise[:, place]],
            "rule": division.rule,
            "reason": division.reason,
            "pot": pot,
            "tariff": tariff,
            "unattributed": {"share": division.unattributed, "amount": rest},
        }
        drafts.append(_with_payload(about, rows, payload))
    return drafts


def find_verdict(labels: Labels) -> Verdict | None:
    """Return the verdict that decides whether sources may be credited: that of the store's own validation.

    The one on the queries of a result depends on which of them are credited together. It counts only for measurements
    of the user's own, which the store's verdict is not known to be about.
    """
    return labels.store_validation or labels.validation


def _find_errors(result: Attribution) -> Array | None:
    """Return the standard errors; None where they are unknown.

    Those over the checkpoints of a single run count as unknown: what the seed does is not in them, and a threshold from
    them would pay for its luck.
    """
    alone = result.noise_changes is None and any(each.over != "runs" for each in result.replicates)
    return None if alone or result.standard_error is None else _values(result.standard_error)


def _find_freedom(result: Attribution) -> int | None:
    """Return the degrees of freedom that standard errors are known with."""
    if _find_errors(result) is None:
        return None
    return len(result.noise_changes) if result.noise_changes is not None else result.replicates[0].freedom


def find_help(about: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return by how much a source helped a query, from its score: how much worse F would be without the source."""
    return float(SIGNS[about["better"]] * -row["score"] / about["n"])


def read_evidence(leaf: Leaf) -> Evidence:
    """Return what a credited query was divided by, from its entry."""
    about, rows = leaf.about, leaf.rows
    helps = np.array([find_help(about, row) for row in rows], dtype=np.float64)
    known = [row["error"] for row in rows]
    return Evidence(
        question=about["question"],
        sources=tuple(row["source"] for row in rows),
        sizes=tuple(row["size"] for row in rows),
        helps=helps,
        errors=None if None in known else np.array(known, dtype=np.float64),
        outcome=None if about["validation"] is None else about["validation"]["outcome"],
        freedom=about["freedom"],
    )


def check_creditable(result: Attribution) -> None:
    """Refuse results that cannot be credited."""
    if not isinstance(result, Attribution):
        raise CreditError(
            f"an Attribution is credited, with all sources of every query; got a {type(result).__name__}."
        )
    if not len(result):
        raise CreditError("there are no queries to credit.")
    if "mean" in result.queries:
        raise CreditError("this result is a mean over queries: credit the queries themselves.")
    check_labels(result.labels)


def check_labels(labels: Labels) -> None:
    """Refuse results whose sources or measurement cannot be credited, whatever the queries are."""
    if labels.difference:
        raise CreditError("a difference of two results is no contribution to a query: credit each of them.")
    if labels.better not in SIGNS:
        raise CreditError(
            f"cannot tell whether a source helps, because the task does not say which values of {labels.measure!r} are "
            "better: give it better='lower' or 'higher'."
        )
    if not is_calibration(factor := labels.details.get(CALIBRATION, 1.0)):
        raise CreditError(f"these scores were calibrated by {factor!r}: a calibration is a positive number.")
    if not are_sizes(labels.source_sizes, labels.n):
        raise CreditError("sources have whole numbers of training examples, of all there are; some must have one.")
    if len(set(labels.source_ids)) < len(labels.source_ids):
        raise CreditError("two sources of this result have the same id, so nobody could tell whom to pay.")
    if left_out := labels.details.get(LEFT_OUT):
        raise CreditError(
            f"{left_out} sources are in no group, and their part would go to the others: give every source a group."
        )
    if labels.details.get(SHARED):
        raise CreditError("some sources are in several groups, and would be paid twice: give groups without overlap.")
    if (shared := labels.details.get(SHARED_EXAMPLES)) is None:
        raise CreditError(
            "the store does not say whether its sources overlap, because an earlier version made it: simulate it again."
        )
    if shared:
        raise CreditError(
            f"{shared} training examples belong to more than one source, and would be paid for twice: give sources "
            "that do not overlap."
        )


def is_calibration(factor: Any) -> bool:
    """Tell whether scores may be multiplied by a factor: it must not turn help into harm."""
    return isinstance(factor, int | float) and not isinstance(factor, bool) and 0 < factor < math.inf


def require_ids(ids: Sequence[str] | None, count: int) -> list[str]:
    """Return the ids of queries, one for each; random ones if none are given."""
    if ids is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise CreditError(f"ids are a list of texts, one for each query; got a {type(ids).__name__}.")
    return [require_query(name) for name in ids]


def require_query(name: str) -> str:
    """Return the id of a query; refuse one that could reveal the query."""
    if not isinstance(name, str) or not _QUERY.fullmatch(name):
        raise CreditError(
            f"the id of a query has up to 100 letters, digits and . _ : -, got {name!r}. Publishers see it, so it must "
            "not reveal the query."
        )
    return name


def hash_payload(salt: bytes, payload: bytes) -> str:
    """Return the salted hash by which an entry knows its query; without the salt it reveals nothing."""
    if len(salt) != SALT_BYTES:
        raise CreditError("the salt of a query is damaged.")
    return hashlib.sha256(b"payload" + salt + payload).hexdigest()


def require_payload(entry: Leaf, row: Any) -> bytes:
    """Return the query of an entry from its row in the database; refuse one that differs from its hash."""
    payload = tables.read_bytes(row.payload)
    if hash_payload(tables.read_bytes(row.salt), payload) != entry.about["payload"]:
        raise CreditError(f"the query of entry {entry.sequence} was changed: it differs from its hash.")
    return payload


def _with_payload(about: dict[str, Any], rows: list[dict[str, Any]], payload: bytes | None) -> Draft:
    lines = Lines.of(rows)
    if payload is None:
        return Draft({**about, "payload": None}, rows, lines, None)
    salt = secrets.token_bytes(SALT_BYTES)
    return Draft({**about, "payload": hash_payload(salt, payload)}, rows, lines, (salt, payload))


def _describe(labels: Labels, model: str | None) -> dict[str, Any]:
    """Return what all queries of a result have in common."""
    prints, verdict = labels.fingerprints, find_verdict(labels)
    if not isinstance(model, str | None):
        raise CreditError(f"the served model is named by a hash, a text; got a {type(model).__name__}.")
    about = {
        "model": prints.get("model") if model is None else model,
        "store": prints.get("store"),
        "recording": prints.get("recording"),
        "signer": prints.get("signer"),
        "sources": prints.get("sources"),
        "question": labels.question,
        "measure": labels.measure,
        "better": labels.better,
        "n": labels.n,
        "details": {name: labels.details[name] for name in _DETAILS if name in labels.details},
        "validation": None if verdict is None else {"outcome": verdict.outcome, **asdict(verdict)},
    }
    encode(about)  # whatever cannot be written is refused here, before anything is
    return about


def _describe_runs(result: Attribution) -> dict[str, Any]:
    """Say whether the deviations of lines are over runs, or over the checkpoints of one."""
    each = result.replicates[0] if result.replicates else None
    return {"runs": None if each is None else {"over": each.over, "shares": list(each.shares)}}


def _divide_pot(pot: int | None, shares: list[int], unattributed: int) -> tuple[list[int | None], int | None]:
    """Divide a pot by shares in billionths; return the amounts of the sources, and what is unattributed."""
    if pot is None:
        return [None] * len(shares), None
    require_amount(pot, "the pot of a query")
    assert sum(shares) + unattributed == PARTS
    *amounts, rest = apportion(pot, [*shares, unattributed])
    return list(amounts), rest


def _values(tensor: Tensor) -> Array:
    found: Array = tensor.detach().double().cpu().numpy()
    if not np.isfinite(found).all():
        raise CreditError("a score is not a finite number, so it cannot be credited.")
    return found
