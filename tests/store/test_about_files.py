"""Owners and licences come from tables and from Croissant files, which anybody may have written."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from imprint import About, ImprintError, read_about

TIMES, POST = About("The Times", "CC-BY-4.0", "https://times.example"), About("Post, Inc.")
CROISSANT: dict[str, Any] = {
    "@context": {"@language": "en", "@vocab": "https://schema.org/", "cr": "http://mlcommons.org/croissant/"},
    "@type": "sc:Dataset",
    "conformsTo": "http://mlcommons.org/croissant/1.0",
    "name": "times",
    "license": "CC-BY-4.0",
    "url": "https://times.example",
    "creator": {"@type": "Organization", "name": "The Times", "url": "https://times.example"},
    "publisher": {"@type": "Organization", "name": "A platform"},
    "distribution": [{"@type": "cr:FileObject", "@id": "a.csv", "contentUrl": "a.csv"}],
    "recordSet": [{"@type": "cr:RecordSet", "name": "articles", "field": []}],
}


def write(folder: Path, text: object, name: str = "about.json") -> Path:
    file = folder / name
    if isinstance(text, bytes):
        file.write_bytes(text)
    else:
        file.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return file


TABLES: dict[str, object] = {
    "a.csv": 'source,owner,licence,url\ntimes,The Times,CC-BY-4.0,https://times.example\npost,"Post, Inc.",,\n',
    "excel.csv": "\ufeffurl,source,owner,licence\r\nhttps://times.example,times,The Times,CC-BY-4.0\r\n"
    '\r\n,post,"Post, Inc.",\r\n',
    "rows.json": [{"source": "times", **vars(TIMES)}, {"source": "post", "owner": "Post, Inc."}],
    "by source.json": {"times": vars(TIMES), "post": {"owner": "Post, Inc."}},
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_describes_many_sources(name: str, tmp_path: Path) -> None:
    assert read_about(write(tmp_path, TABLES[name], name)) == {"times": TIMES, "post": POST}


WRONG_TABLES: list[tuple[str, object, str]] = [
    (
        "a.csv",
        "source,owner,licens,colour\nx,,,\n",
        "line 2 has unknown columns: 'licens', 'colour'; did you mean licence",
    ),
    ("a.csv", "owner,licence\nx,y\n", "must begin with a header of the columns source, owner"),
    ("a.csv", "source,source\nx,y\n", "must begin with a header"),
    ("a.csv", "", "got nothing"),
    ("a.csv", "source,owner\n", "describes no source"),
    ("a.csv", "source,owner\nx,The, Times\n", "line 2 has 3 cells, and the header has 2"),
    ("a.csv", "source,owner\nx,A\ny,B\nx,C\n", "line 4 describes source 'x' again"),
    ("a.csv", "source,owner\n ,A\n", "line 2 must name its source"),
    ("a.csv", "source,url\nx,ftp://x\n", "line 2: the description of source 'x' .* must begin with http"),
    ("a.csv", b"source,owner\nx,\xff\n", "no table of comma-separated values in UTF-8"),
    ("a.csv", 'source,owner\nx,"A\n', "no table of comma-separated values"),
    ("a.csv", "source,owner\nx," + "A" * 200_000 + "\n", "no table of comma-separated values"),
    ("a.json", [{"source": "x", "color": 1}], "row 0 has unknown columns: 'color'"),
    ("a.json", [{"owner": "x"}], "row 0 must name its source"),
    ("a.json", [{"source": 5}], "row 0 must name its source"),
    ("a.json", [{"source": "x", "owner": ["a"]}], "owner must be a valid Unicode string"),
    ("a.json", [5], r"\[0\] must be an object"),
    ("a.json", {"x": "The Times"}, "x must be an object"),
    ("a.json", "5", "a list of rows, an object by source, or a Croissant file"),
    ("a.json", "{", "cannot be read"),
    ("a.json", "[" * 100 + "]" * 100, "nested more than"),
    (
        "a.json",
        {"@context": {}, "@type": "sc:Person"},
        "no Croissant file: its '@type' must be 'sc:Dataset', got 'sc:Per",
    ),
    ("a.txt", "x", r"a \.csv, \.json or \.jsonld file"),
]


@pytest.mark.parametrize(("name", "text", "words"), WRONG_TABLES)
def test_what_is_no_table_is_refused_by_its_place(name: str, text: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ImprintError, match=words):
        read_about(write(tmp_path, text, name))


def test_a_croissant_file_describes_one_source(tmp_path: Path) -> None:
    file = write(tmp_path, CROISSANT)
    assert read_about(file) == {"times": TIMES}
    assert read_about(file, "newspaper") == {"newspaper": TIMES}
    with pytest.raises(ImprintError, match="is a table, which names its sources itself"):
        read_about(write(tmp_path, TABLES["rows.json"], "rows.json"), "times")


READ: list[tuple[dict[str, Any], About]] = [
    ({"license": ["MIT", "https://x.example/terms"]}, About("The Times", "MIT; https://x.example/terms", TIMES.url)),
    ({"license": {"@type": "CreativeWork", "name": "CC BY", "url": "x:"}}, About("The Times", "CC BY", TIMES.url)),
    ({"license": {"@id": "https://x.example"}}, About("The Times", "https://x.example", TIMES.url)),
    ({"license": None, "url": None, "creator": None}, About("A platform")),
    ({"creator": [{"name": "Ann"}, {"name": "Bob"}, {"name": "Ann"}]}, About("Ann, Bob", "CC-BY-4.0", TIMES.url)),
    ({"creator": {"name": ["Ann", "A."]}}, About("Ann", "CC-BY-4.0", TIMES.url)),
    ({"creator": [*"abcdefghijkl"]}, About("a, b, c, d, e, f, g, h, i, j and 2 more", "CC-BY-4.0", TIMES.url)),
    ({"copyrightHolder": {"name": "Holder"}}, About("Holder", "CC-BY-4.0", TIMES.url)),
    ({"creator": {"@value": "The Times", "@language": "en"}}, TIMES),
    ({"url": {"@id": "https://times.example"}}, TIMES),
    ({"@type": ["Dataset", "Thing"]}, TIMES),
    ({"@type": "https://schema.org/Dataset"}, TIMES),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), READ)
def test_fields_of_schema_org_are_read_in_all_their_forms(
    changes: dict[str, Any], expected: About, tmp_path: Path
) -> None:
    assert read_about(write(tmp_path, {**CROISSANT, **changes})) == {"times": expected}


def test_prefixes_of_schema_org_are_understood(tmp_path: Path) -> None:
    plain = {name: CROISSANT.get(name) for name in ("name", "license", "url", "creator")}
    for prefix in ("sc:", "schema:", "https://schema.org/", "http://schema.org/"):
        dataset = {"@type": f"{prefix}Dataset", **{f"{prefix}{name}": value for name, value in plain.items()}}
        assert read_about(write(tmp_path, dataset)) == {"times": TIMES}


def test_missing_fields_are_not_known_but_a_name_is_needed(tmp_path: Path) -> None:
    assert read_about(write(tmp_path, {"@type": "Dataset", "name": "times"})) == {"times": About()}
    with pytest.raises(ImprintError, match=r"has no name, so say which source it describes: SOURCE=.*about\.json"):
        read_about(write(tmp_path, {"@type": "Dataset", "license": "MIT"}))


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"license": 4}, "license must be a text, or an object with name or url or @id, got 4"),
    ({"license": ["MIT", 4]}, r"license\[1\] must be a text"),
    ({"creator": {"email": "x"}}, "creator must be a text, or an object with name"),
    ({"creator": {"name": 5}}, "name"),
    ({"url": ["https://a", "https://b"]}, "url must be a text"),
    ({"url": "javascript:alert(1)"}, r"about\.json: a source's url must begin with http"),
    ({"name": ["a", "b"]}, "name must be a text"),
    ({"sc:name": "other"}, "gives its name twice"),
    ({"license": ["x" * 200, "y" * 200]}, "licence has at most 300 characters"),
]


@pytest.mark.parametrize(("changes", "words"), WRONG_FIELDS)
def test_a_field_of_a_wrong_type_is_refused_by_its_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ImprintError, match=words):
        read_about(write(tmp_path, {**CROISSANT, **changes}))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    for name in ("a.csv", "a.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate((64 << 20) + 1)
        with pytest.raises(ImprintError, match="at most 67,108,864 are expected"):
            read_about(tmp_path / name)


def test_a_small_file_takes_little_memory_and_a_short_message(tmp_path: Path) -> None:
    """The name of the outer object must not be repeated for every value inside."""
    file = write(tmp_path, {"k" * 1_000_000: {f"a{i}": "" for i in range(2_000)}})
    tracemalloc.start()
    with pytest.raises(ImprintError, match="unknown columns") as error:
        read_about(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6 and len(str(error.value)) < 1000
