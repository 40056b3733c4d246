"""`check` changes nothing, reads little, and can be read."""

import gc
import logging
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import DataError, Task
from tests.checking.members import PLANS, checked, classifier
from tests.zoo import ZOO, Member


def test_nothing_is_written_and_nothing_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    member = classifier()
    member.task.model.train()
    before = {name: tensor.clone() for name, tensor in member.task.state().items()}
    assert checked(member, PLANS["tangent"], out=tmp_path / "out" / "store").ok
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "out").iterdir())
    assert all(torch.equal(tensor, before[name]) for name, tensor in member.task.state().items())
    assert member.task.model.training
    assert all(parameter.grad is None for parameter in member.task.model.parameters())


@pytest.mark.parametrize("level", [logging.NOTSET, logging.INFO])
def test_nothing_is_logged_and_the_level_is_put_back(level: int, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("imprint")
    log.setLevel(level)
    try:
        member = ZOO["custom_function"].make(torch.device("cpu"), torch.float32)
        assert checked(member, PLANS["trajectories"]).ok
        assert log.level == level and not caplog.records
        with pytest.raises(DataError):
            checked(member, queries=[])
        assert log.level == level
    finally:
        log.setLevel(logging.NOTSET)


def test_half_precision_is_warned_of_once() -> None:
    member = classifier()
    half = member._replace(
        task=Task.classifier(nn.Linear(4, 3).bfloat16()), data=(member.data[0].bfloat16(), member.data[1])
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checked(half, PLANS["tangent"], queries=None)
    assert [str(each.message)[:36] for each in told] == ["the selected parameters are torch.bf"]


def test_it_works_inside_inference_mode() -> None:
    member = classifier()
    with torch.inference_mode():
        assert checked(member, PLANS["tangent"]).ok


def test_threads_that_check_at_once_leave_everything_as_it_was() -> None:
    log, members = logging.getLogger("imprint"), [classifier() for _ in range(3)]
    level, filters = log.level, list(warnings.filters)
    found: list[bool] = []

    def one(member: Member) -> None:
        found.append(checked(member, PLANS["tangent"]).ok)

    threads = [threading.Thread(target=one, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 3
    assert log.level == level and warnings.filters == filters


def test_only_a_few_queries_are_read() -> None:
    member, read = classifier(), []

    class Long(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return member.data[0][index % 12], member.data[1][index % 12]

    assert checked(member, PLANS["tangent"], queries=Long()).ok
    assert 0 < len(read) <= 16 and max(read) < 16

    def endless() -> Iterator[Any]:
        while True:
            read.append(-1)
            yield member.data

    read.clear()
    assert checked(member, PLANS["tangent"], queries=endless()).ok
    assert len(read) == 1


def test_a_check_can_be_read() -> None:
    text = str(checked(classifier(), PLANS["tangent"]))
    tried, _, rest = text.partition("\n")
    assert "one step of the tangent engine ran on 12 examples and was read out by jvp, central" in tried
    assert "will work" not in text
    assert rest.startswith("15 of 15 values of the parameters, 3 sources of 60 bytes each\nabout 0:0")
    assert "\nengine trajectories: works, many sources at once\n" in text
    member = classifier()
    member.data[0][3] = torch.nan
    text = str(checked(member, PLANS["tangent"]))
    assert text.startswith("problem: the loss of training example 3 is nan: look for NaN")
