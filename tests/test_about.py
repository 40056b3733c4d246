"""Sources carry what is known of them: owner, licence and address, as text that does nothing."""

from typing import Any

import pytest

from imprint import About, Sources, SourcesError
from imprint.store.fingerprint import of_sources

TIMES = About("The Times", "CC-BY-4.0", "https://times.example/archive")
SOURCES = Sources.by_label(["times", "post", "times", "wire"], names={"wire": "The Wire"})


def test_a_source_is_named_by_its_id_or_by_its_name() -> None:
    found = SOURCES.describe({"times": TIMES, "The Wire": {"owner": "Wire Ltd"}})
    assert found.ids == ("post", "times", "wire")
    assert found.about == (About(), TIMES, About("Wire Ltd"))


def test_sources_that_are_not_named_keep_what_is_known_and_an_empty_one_removes_it() -> None:
    found = SOURCES.describe({"times": TIMES}).describe({"post": {"owner": "Post"}})
    assert found.about == (About("Post"), TIMES, About())
    assert found.describe({"post": {}, "times": About()}).about == ()


def test_imprints_do_not_depend_on_it() -> None:
    assert of_sources(SOURCES.describe({"times": TIMES})) == of_sources(SOURCES)


def test_whatever_is_made_of_sources_keeps_it() -> None:
    found = SOURCES.describe({"times": TIMES, "post": About("The Times", "MIT")})
    assert found.select([1]).about == (TIMES,) and SOURCES.select([1]).about == ()
    assert found.inside("times", None, 4).about == (TIMES, TIMES)
    assert found.group({"press": ["times", "post"], "web": ["wire"]}).about == (About("The Times"), About())


WRONG: list[tuple[Any, str]] = [
    ({"tims": TIMES}, "no source 'tims'; did you mean times"),
    ({"times": TIMES, "wire": {}, "The Wire": {}}, "source 'wire' is described twice, as 'wire' and as 'The Wire'"),
    ({"times": {"licens": "MIT"}}, "source 'times' has 'licens'; did you mean licence"),
    ({"times": {"owner": 5}}, "owner must be a valid Unicode string, got 5"),
    ({"times": {"owner": "\ud800"}}, "valid Unicode"),
    ({"times": {"owner": "x" * 301}}, "owner has at most 300 characters, got 301"),
    ({"times": {"url": "https://x.example/" + "x" * 2000}}, "url has at most 2,000 characters"),
    ({"times": "The Times"}, "a mapping of owner, licence, url; got a str"),
    ([("times", TIMES)], "descriptions are given by source, .* got a list"),
]


@pytest.mark.parametrize(("about", "words"), WRONG)
def test_what_is_no_description_is_refused(about: Any, words: str) -> None:
    with pytest.raises(SourcesError, match=words):
        SOURCES.describe(about)


@pytest.mark.parametrize(
    "url",
    [
        *("javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "file:///etc/passwd", "//times.example"),
        *(
            "times.example",
            "https://",
            "http:///x",
            "https://a b",
            "https://x\x1b[2J.example",
            "https://[x",
            "\x01https://x",
        ),
        *("https://x.example/\u202egnp.exe", "https://me:secret@times.example", "https://times.example@evil.example"),
    ],
)
def test_only_an_address_of_the_web_is_an_address(url: str) -> None:
    with pytest.raises(SourcesError, match="a source's url must"):
        About(url=url)


def test_a_licence_that_is_an_address_can_be_linked_and_another_cannot() -> None:
    assert About(licence="https://spdx.org/licenses/MIT").licence_url == "https://spdx.org/licenses/MIT"
    assert About(licence="javascript:alert(1)").licence_url == About(licence="MIT").licence_url == ""


def test_a_text_is_one_line() -> None:
    assert About("  The\n Times ").owner == "The Times"
