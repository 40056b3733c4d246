"""Sources may have names of any characters."""

from pathlib import Path

import pytest

from imprint import Sources, Store, StoreError, attribute
from tests.store.making import N, data, make, task

NAMES = {
    "accents": "Žofia Ångström",
    "combining": "e\u0301 is not \u00e9",
    "emoji": "👩‍👩‍👧‍👦🏴‍☠️",
    "right to left": "שלום \u202eevil\u202c عالم",
    "slashes": "../../etc/passwd\\..\\x",
    "quotes": "\"'`$(rm -rf /)<script>",
    "newlines": "one\ntwo\r\nthree\ttab",
    "spaces": "   ",
    "nothing": "",
    "NUL": "a\0b",
    "control": "\x1b[31mred\x7f\x85\u2028",
    "long": "ü" * 5_000,
    "like JSON": '{"ids": [NaN]}\\ud800',
}


def test_names_of_any_characters_come_back_as_they_were(tmp_path: Path) -> None:
    groups = {name: [index % N] for index, name in enumerate(NAMES.values())}
    sources = Sources.groups(groups, names={name: f"{name}…{name}" for name in groups})
    made = make(tmp_path / "store", sources=sources, memory=None)
    for store in (made, Store(made.path)):
        assert store.source_ids == tuple(NAMES.values())
        assert store.source_names == tuple(f"{name}…{name}" for name in groups)
    x, y = data()
    labels = attribute(task(), made.path, (x[:1], y[:1]), progress=False).labels
    assert labels.source_ids == tuple(NAMES.values())
    assert make(tmp_path / "store", sources=sources, memory=None).source_names == made.source_names


@pytest.mark.parametrize("name", [NAMES["long"], NAMES["newlines"], NAMES["NUL"]], ids=["long", "newlines", "NUL"])
def test_odd_names_do_not_spoil_a_message(name: str, tmp_path: Path) -> None:
    store = make(tmp_path / "store", sources=Sources.groups({name: [0]}))
    next(store.path.rglob("imprints-*")).unlink()
    with pytest.raises(StoreError, match="is missing") as error:
        store.verify()
    assert "\n" not in str(error.value)
    assert "\0" not in str(error.value)
    assert len(str(error.value)) < 400
