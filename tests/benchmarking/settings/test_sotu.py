"""Passages of State of the Union addresses."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from imprint import DataError
from imprint.benchmarking.settings import sotu
from tests.conftest import require


@pytest.fixture
def texts() -> Path:
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "sotu")
    require("data", place.is_dir(), "the addresses are not in the folder that IMPRINT_DATA names")
    return place


def test_sixteen_presidents_have_about_as_many_words_each(texts: Path) -> None:
    found = sotu.load()
    words = Counter[str]()
    for passage in (*found.train, *found.held_out):
        words[passage.president] += len(passage.text.split())
    assert set(words) == set(sotu.PRESIDENTS) and len(words) == 16
    assert all(0.95 * sotu.WORDS < count <= sotu.WORDS for count in words.values())
    assert set(Counter(passage.president for passage in found.held_out).values()) == {sotu.HELD_OUT}


def test_nothing_that_is_held_out_is_learnt_and_all_years_are_there(texts: Path) -> None:
    found = sotu.load(words=4000, presidents=("lincoln", "obama"))
    assert not {passage.text for passage in found.held_out} & {passage.text for passage in found.train}
    assert {passage.year for passage in found.train} == {*range(1861, 1865), *range(2009, 2017)}
    assert min(len(passage.text.split()) for passage in found.train) >= sotu.PASSAGE


def test_a_passage_is_split_at_a_word_and_nothing_is_lost() -> None:
    passage = sotu.Passage("lincoln", 1862, "The dogmas of the quiet past are inadequate to the stormy present.")
    prompt, completion = passage.split(0.5)
    assert prompt + completion == passage.text and completion.startswith(" ") and len(prompt.split()) == 6


def test_a_changed_address_is_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sotu").mkdir()
    for file in texts.glob("*_abraham_lincoln_r.txt"):
        shutil.copyfile(file, tmp_path / "sotu" / file.name)
    with (tmp_path / "sotu" / "1861_abraham_lincoln_r.txt").open("a") as out:
        out.write(" And more.")
    monkeypatch.setenv("IMPRINT_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"1861_abraham_lincoln_r\.txt does not hold the address"):
        sotu.load(presidents=("lincoln",))


def test_more_passages_than_there_are_cannot_be_held_out(texts: Path) -> None:
    with pytest.raises(DataError, match="lincoln has 3 passages, and 5 are to be held out"):
        sotu.load(words=400, presidents=("lincoln",))
