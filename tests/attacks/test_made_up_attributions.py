"""Files that pass for saved attributions: impossible ones that the library has sealed itself, and what is none at all.

Labels that cannot be, scores that are no numbers and queries that do not fit must be refused, where they are saved or
where they are loaded; hostile texts must come back as they were and have no effect where they are shown. Pipes,
devices, pickles and headers that lie stand in the place of a file, for `Attribution.load` and for `imprint evaluate`.
"""

import json
import math
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Attribution, ImprintError
from imprint.attribution.replicates import Replicates
from tests.attacks.judging import UNPRINTABLE, attacked, strange_tags
from tests.attacks.saved import is_same, joined, parts
from tests.attacks.stores import Attack, Bases, Scene, command
from tests.attacks.test_damaged_attributions import BYTES
from tests.attacks.test_hostile_folders import THINGS, Make
from tests.attacks.test_hostile_names import HTML, SEQUENCES

pytestmark = pytest.mark.long


def labels(**values: Any) -> Callable[[Attribution], Attribution]:
    return lambda result: replace(result, labels=replace(result.labels, **values))


def queries(*values: Any) -> Callable[[Attribution], Attribution]:
    return lambda result: replace(result, queries=values)


ZEROS = torch.zeros(2, 2, 5)


def with_runs(
    result: Attribution,
    deviations: torch.Tensor = ZEROS,
    shares: Any = (0.5, 0.5),
    names: Any = ("a", "b"),
) -> Attribution:
    return replace(result, replicates=(Replicates(deviations, shares, names),))


IMPOSSIBLE: dict[str, Callable[[Attribution], Attribution]] = {
    "n of 0": labels(n=0),
    "negative n": labels(n=-12),
    "n as text": labels(n="12"),
    "n of null": labels(n=None),
    "n a fraction": labels(n=11.5),
    "n a flag": labels(n=True),
    "ids of one less": labels(source_ids=("a", "b", "c", "d")),
    "ids of one more": labels(source_ids=tuple("abcdef")),
    "ids twice": labels(source_ids=("a",) * 5),
    "ids of numbers": labels(source_ids=(1, 2, 3, 4, 5)),
    "ids of one text": labels(source_ids="abcde"),
    "no names": labels(source_names=()),
    "names of null": labels(source_names=(None,) * 5),
    "names of lists": labels(source_names=([],) * 5),
    "sizes of one less": labels(source_sizes=(1, 1, 1, 1)),
    "sizes of 0": labels(source_sizes=(0,) * 5),
    "negative sizes": labels(source_sizes=(-1,) * 5),
    "sizes of text": labels(source_sizes=("1",) * 5),
    "a measure of null": labels(measure=None),
    "a measure of a list": labels(measure=["loss"]),
    "a direction that is none": labels(better="sideways"),
    "a direction of a number": labels(better=1),
    "a question that is none": labels(question="why"),
    "a question of a list": labels(question=["this_run"]),
    "removals as text": labels(removes="no"),
    "sums of one less": labels(summed=(1, 1, 1, 1)),
    "sums of 0": labels(summed=(0,) * 5),
    "a difference of null": labels(difference=None),
    "noise of one query": lambda result: replace(result, noise_changes=torch.zeros(2, 1)),
    "noise of NaN": lambda result: replace(result, noise_changes=torch.full((2, 2), math.nan)),
    "no noise at all": lambda result: replace(result, noise_changes=torch.zeros(0, 2)),
    "runs of one query": lambda result: with_runs(result, torch.zeros(2, 1, 5)),
    "runs of NaN": lambda result: with_runs(result, torch.full((2, 2, 5), math.nan)),
    "runs without shares": lambda result: with_runs(result, ZEROS, shares=()),
    "shares of NaN": lambda result: with_runs(result, ZEROS, shares=(math.nan, 1.0)),
    "shares of text": lambda result: with_runs(result, ZEROS, shares=("1", "0")),
    "names of numbers": lambda result: with_runs(result, ZEROS, names=(1, 2)),
    "three sets of runs": lambda result: replace(result, replicates=3 * with_runs(result).replicates),
    "an error of a number": labels(details={"error": 1}),
    "details of a list": labels(details=[1]),
    "fingerprints of a list": labels(fingerprints=[1]),
    "a query less": lambda result: replace(result, queries=(0,)),
    "a query more": lambda result: replace(result, queries=(0, 1, 2)),
    "queries of text": queries("0", "<script>"),
    "queries of lists": queries([], []),
    "negative queries": lambda result: replace(result, queries=(-1, -2)),
    "NaN": lambda result: replace(result, scores=result.scores * math.nan),
    "infinity": lambda result: replace(result, scores=result.scores / 0),
    "whole numbers": lambda result: replace(result, scores=result.scores.long()),
    "flags": lambda result: replace(result, scores=result.scores > 0),
    "flat scores": lambda result: replace(result, scores=result.scores.flatten()),
    "scores of three dimensions": lambda result: replace(result, scores=result.scores[None]),
    "no scores": lambda result: replace(result, scores=result.scores[:, :0]),
    "complex scores": lambda result: replace(result, scores=result.scores.to(torch.complex64)),
}


def loaded_again(
    change: Callable[[Attribution], Attribution], result: Attribution, file: Path
) -> tuple[Attribution, Attribution]:
    """A changed attribution, and what is loaded once it was saved."""
    other = change(result)
    other.save(file)
    return other, Attribution.load(file)


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_attribution_is_refused_even_if_it_is_sealed(
    change: Callable[[Attribution], Attribution], saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    """Where it is made, where it is saved, or where it is loaded."""
    with pytest.raises(ImprintError) as refused:
        loaded_again(change, saved[0], tmp_path / "scores.safetensors")
    assert "\n" not in str(refused.value) and not UNPRINTABLE.search(str(refused.value))


TEXTUAL = {**SEQUENCES, **{text: text for text in HTML}}


@pytest.mark.parametrize("field", ["source_names", "source_ids", "measure"])
@pytest.mark.parametrize("text", TEXTUAL.values(), ids=TEXTUAL.keys())
def test_a_hostile_text_is_loaded_as_it_was_and_shown_without_effect(
    field: str, text: str, saved: tuple[Attribution, Path], tmp_path: Path
) -> None:
    value = text if field == "measure" else tuple(f"{text}{number}" for number in range(5))
    hostile, found = loaded_again(labels(**{field: value}), saved[0], tmp_path / "scores.safetensors")
    assert is_same(found, hostile)
    for shown in (repr(found), repr(found.top(3)), repr(found.mean()), found._repr_html_()):
        assert not UNPRINTABLE.search(shown), repr(shown)
    assert not strange_tags(found._repr_html_())


@pytest.mark.parametrize("field", ["source_names", "measure"])
@pytest.mark.parametrize("text", ["$\\frac{$", "$", "100$ and $\\bad$", "\\$x$"])
def test_a_hostile_text_is_drawn_as_it_is(field: str, text: str, saved: tuple[Attribution, Path]) -> None:
    from matplotlib import pyplot as plt

    value = text if field == "measure" else tuple(f"{text}{number}" for number in range(5))
    figure = labels(**{field: value})(saved[0]).plot().figure
    figure.canvas.draw()
    plt.close("all")


# --- what is no such file, on the command line too

EVALUATE = ("load scores.safetensors", command("evaluate", "scores.safetensors", "truth"))


def instead(make: Make) -> Attack:
    """Something else in the place of the file."""

    def change(scene: Scene) -> None:
        place = scene.folder / "scores.safetensors"
        place.unlink()
        make(scene, place)

    return Attack(change, EVALUATE)


def content(change: Callable[[bytes], bytes]) -> Attack:
    def rewrite(scene: Scene) -> None:
        place = scene.folder / "scores.safetensors"
        place.write_bytes(change(place.read_bytes()))

    return Attack(rewrite, EVALUATE)


class Planted:
    """What runs code where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return (open, (str(self.canary), "w"))


def of_store(name: str) -> Make:
    return lambda scene, place: place.write_bytes((scene.gift / name).read_bytes())


FILES = {
    **{name: instead(make) for name, make in THINGS.items()},
    "empty": content(lambda c: b""),
    "a pickle": instead(lambda scene, place: place.write_bytes(pickle.dumps(Planted(scene.canary)))),
    "a checkpoint of torch": instead(lambda scene, place: torch.save({"scores": Planted(scene.canary)}, place)),
    "a table": instead(lambda scene, place: place.write_text("query,source,score\n0,ann,1.0\n")),
    "JSON": instead(lambda scene, place: place.write_text('{"scores": [[1.0]]}')),
    "the manifest of a store": instead(of_store("manifest.json")),
    "a shard of a store": instead(of_store("checkpoint-000/imprints-00000.safetensors")),
    "a base of a store": instead(of_store("checkpoint-000/base.safetensors")),
    "noise": content(lambda c: bytes((31 * i * i + 7 * i) % 251 for i in range(4096))),
    "a header that says 2⁶³": content(lambda c: struct.pack("<Q", 2**63) + c[8:]),
    "a header that says 2⁶⁴ − 1": content(lambda c: struct.pack("<Q", 2**64 - 1) + c[8:]),
    "a header that says 100 MB": content(lambda c: struct.pack("<Q", 10**8) + c[8:]),
    "a header of 90 MB of spaces": content(
        lambda c: joined(json.dumps(parts(c)[0]).encode() + b" " * 9 * 10**7, parts(c)[1])
    ),
    "a header of 30,000 tensors": content(
        lambda c: joined(
            {
                **parts(c)[0],
                **{f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]} for i in range(30_000)},
            },
            parts(c)[1],
        )
    ),
    "a text of 5 MB": content(
        lambda c: joined({**parts(c)[0], "__metadata__": {"imprint": "[" + "1," * 2_500_000 + "1]"}}, parts(c)[1])
    ),
    "cut short": content(lambda c: c[:-1]),
    "a bit flipped": content(lambda c: c[:-1] + bytes([c[-1] ^ 1])),
    "NaN": content(BYTES["NaN"]),
    "rows exchanged": content(BYTES["rows exchanged"]),
}  # fmt: skip


@pytest.mark.parametrize("attack", FILES.values(), ids=FILES.keys())
def test_what_is_no_saved_attribution_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, os.fsdecode(b"not \xff UTF-8"), "", "nowhere/x", "\ud800"])
def test_a_path_that_no_file_has_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ImprintError):
        Attribution.load(tmp_path / name)
