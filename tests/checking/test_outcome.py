"""`check` says beforehand what `simulate` and `attribute` then do."""

from typing import Any

import pytest
import torch

from imprint import ImprintError, Plan, Store, attribute
from imprint.readout.choice import list_readouts
from tests.checking.members import PLANS, checked, row_bytes, simulated
from tests.zoo import ZOO, Member


@pytest.mark.parametrize("name", ZOO)
def test_check_says_what_simulate_and_attribute_do(name: str) -> None:
    member = ZOO[name].make(torch.device("cpu"), torch.float32)
    for engine, plan in PLANS.items():
        if engine == "spectral" and member.task.outputs is None:
            (possibility,) = (each for each in checked(member).engines if each.name == engine)
            assert not possibility.works and possibility.remark == str(_outcome(member, plan))
            continue
        found, store = checked(member, plan), _outcome(member, plan)
        (possibility,) = (each for each in found.engines if each.name == engine)
        assert possibility.works == found.ok == isinstance(store, Store)
        if isinstance(store, ImprintError):
            assert found.problems == (possibility.remark,) == (str(store),)
            assert found.estimate is None
            continue
        alone = store.checkpoints[0].measured.one_by_one
        assert possibility.remark == _remark(alone)
        assert found.estimate is not None and found.estimate.one_by_one == alone
        assert found.estimate.bytes_per_source * len(store) == row_bytes(store)

    assert isinstance(store, Store)  # of trajectories, from which everything can be read out
    assert [readout.name for readout in found.readouts] == list_readouts(store)
    for readout in found.readouts:
        options: Any = {"readout": readout.name, "collate_fn": member.collate_fn, "progress": False}
        details = attribute(member.task, store, member.queries, **options).details
        assert readout.works == ("fallback" not in details)
        assert readout.remark.startswith(details.get("fallback") or _remark(details.get("one_by_one")))


def _remark(alone: str | None) -> str:
    return f"sources one by one, {alone}" if alone else "many sources at once"


def _outcome(member: Member, plan: Plan) -> Store | ImprintError:
    try:
        return simulated(member, plan)
    except ImprintError as error:
        return error
