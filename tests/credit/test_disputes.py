"""A disputed query is computed again from what was asked, and compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from imprint import Attribution, Plan, Sources, Store, Task, attribute, simulate
from imprint.credit import Ledger, Policy, encode_queries
from imprint.credit.disputes import dispute
from imprint.credit.payloads import decode_query, encode_query
from imprint.credit.verifying import verify
from imprint.errors import CreditError
from tests.credit.crediting import EXPECTED, fill
from tests.credit.insider import change_entry, rebuild, run

FALLING_BACK = Policy("by size", "expected", fallback="by_size")  # the store is not validated


class Scored(NamedTuple):
    task: Task
    store: Store
    queries: tuple[Tensor, Tensor]


@pytest.fixture
def scored(tmp_path: Path) -> Scored:
    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.arange(24) % 2
    task = Task.classifier(nn.Linear(3, 2))
    sources = Sources.by_label(["ann", "bob", "cid"] * 8)
    store = simulate(task, (x, y), sources, Plan(steps=3, lr=0.1), out=tmp_path / "store", progress=False)
    return Scored(task, store, (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))


def credit(ledger: Ledger, scored: Scored) -> tuple[int, ...]:
    result = attribute(scored.task, scored.store, scored.queries, progress=False)
    return ledger.credit(result, FALLING_BACK, payloads=encode_queries(scored.queries)).sequences


def test_an_honest_entry_agrees(ledger: Ledger, scored: Scored) -> None:
    for sequence in credit(ledger, scored):
        found = dispute(ledger, sequence, scored.task, scored.store)
        assert found.agrees and found.difference < 1e-6
        assert [row.source for row in found.rows] == ["ann", "bob", "cid"]
        assert (
            [row.share for row in found.rows] == [row.share_again for row in found.rows] == pytest.approx([1 / 3] * 3)
        )
        assert f"entry {sequence} agrees" in repr(found)


def test_an_entry_with_other_scores_differs_and_the_log_notes_it(ledger: Ledger, scored: Scored) -> None:
    result = attribute(scored.task, scored.store, scored.queries, progress=False)
    wrong = replace(result, scores=result.scores + 0.05 * result.scores.abs().max())
    sequence = ledger.credit(wrong, FALLING_BACK, payloads=encode_queries(scored.queries)).sequences[0]
    found = dispute(ledger, sequence, scored.task, scored.store, note=True)
    assert not found.agrees and found.difference > found.tolerance and "differs" in repr(found)
    assert dispute(ledger, sequence, scored.task, scored.store, tolerance=10).agrees
    noted = next(iter(ledger.entries(kind="dispute"))).about
    assert noted["disputed"] == sequence and noted["agrees"] is False
    assert verify(ledger, progress=False).holds


@pytest.mark.parametrize("factor", [0.0, 1e-3, 2.0, 1e3])
def test_scores_that_were_all_shrunk_or_blown_up_differ(factor: float, ledger: Ledger, scored: Scored) -> None:
    """Shares do not depend on a common factor, but thresholds do; and nothing would have helped is no small error."""
    result = attribute(scored.task, scored.store, scored.queries, progress=False)
    wrong = replace(result, scores=factor * result.scores)
    sequence = ledger.credit(wrong, FALLING_BACK, payloads=encode_queries(scored.queries)).sequences[0]
    assert not dispute(ledger, sequence, scored.task, scored.store).agrees


def test_a_size_that_was_changed_differs(ledger: Ledger, scored: Scored) -> None:
    """A fallback pays by size."""
    result = attribute(scored.task, scored.store, scored.queries, progress=False)
    wrong = replace(result, labels=replace(result.labels, source_sizes=(9, 8, 8)))
    sequence = ledger.credit(wrong, FALLING_BACK, payloads=encode_queries(scored.queries)).sequences[0]
    found = dispute(ledger, sequence, scored.task, scored.store)
    assert "the size of ann was recorded as 9, and is 8" in found.others


def calibrate(result: Attribution, factor: float) -> Attribution:
    details = {**result.details, "calibration": factor}
    return replace(result, scores=factor * result.scores, labels=replace(result.labels, details=details))


def test_the_calibration_of_an_entry_is_compared_and_not_believed(ledger: Ledger, scored: Scored) -> None:
    result = calibrate(attribute(scored.task, scored.store, scored.queries, progress=False), 2.0)
    sequence = ledger.credit(result, FALLING_BACK, payloads=encode_queries(scored.queries)).sequences[0]
    found = dispute(ledger, sequence, scored.task, scored.store)
    assert not found.agrees and "the calibration was recorded as 2.0, and was given as 1" in found.others[0]
    assert dispute(ledger, sequence, scored.task, scored.store, calibration=2.0).agrees
    with pytest.raises(CreditError, match="calibration must be a positive number"):
        dispute(ledger, sequence, scored.task, scored.store, calibration=-1.0)


def test_scores_that_were_turned_round_by_a_calibration_differ(ledger: Ledger, scored: Scored) -> None:
    sequence = credit(ledger, scored)[0]

    def turn(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        about["details"]["calibration"] = -1.0
        for row in rows:
            row.update(score=-row["score"], helps=-row["helps"])

    run(ledger, change_entry(sequence, turn), rebuild)
    found = dispute(ledger, sequence, scored.task, scored.store)
    assert not found.agrees and found.difference > 1 and "recorded as -1.0" in found.others[0]


def test_what_was_erased_or_never_kept_cannot_be_disputed(ledger: Ledger, scored: Scored) -> None:
    sequence = credit(ledger, scored)[0]
    ledger.erase([sequence])
    with pytest.raises(CreditError, match="was erased, so it cannot be disputed any more"):
        dispute(ledger, sequence, scored.task, scored.store)
    result = attribute(scored.task, scored.store, scored.queries, progress=False)
    kept_nothing = ledger.credit(result, FALLING_BACK).sequences[0]
    with pytest.raises(CreditError, match="was not kept"):
        dispute(ledger, kept_nothing, scored.task, scored.store)
    with pytest.raises(CreditError, match="is not a credited query"):
        dispute(ledger, 0, scored.task, scored.store)
    with pytest.raises(CreditError, match="there is no entry 999"):
        dispute(ledger, 999, scored.task, scored.store)


def test_another_store_is_refused(ledger: Ledger, scored: Scored) -> None:
    fill(ledger, (1,), EXPECTED, payloads=[b"a"])
    with pytest.raises(CreditError, match="was scored with the store 5555"):
        dispute(ledger, 3, scored.task, scored.store)


def test_queries_are_kept_as_tensors_and_nothing_else(scored: Scored) -> None:
    kept = encode_queries(scored.queries)
    assert len(kept) == 4 and len(set(kept)) == 4
    x, y = decode_query(kept[2])
    assert torch.equal(x, scored.queries[0][2:3]) and torch.equal(y, scored.queries[1][2:3])
    nested = {"ids": torch.arange(3)[None], "deep": {"mask": torch.ones(1, 2)}, "name": "q"}
    found = decode_query(encode_query(nested))
    assert found["name"] == "q" and torch.equal(found["deep"]["mask"], torch.ones(1, 2))
    with pytest.raises(CreditError, match="cannot be kept"):
        encode_query((torch.ones(1), object()))


@pytest.mark.parametrize("payload", [b"", b"prompt", b"imprint query 1\n", b"imprint query 1\n" + bytes(8) + b"x"])
def test_what_is_no_query_is_refused(payload: bytes) -> None:
    with pytest.raises(CreditError):
        decode_query(payload)
