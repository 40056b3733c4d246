"""Of a language model, the page shows the words of a completion with what sources contribute to each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import imprint
from imprint.credit import Policy
from imprint.errors import ReadoutError
from imprint.serve.batching import Closing, DeadlinePassed, Overloaded
from imprint.serve.service import Service
from tests.serve.access.doors import Browser, Doors
from tests.serve.news import make_ledger
from tests.serve.pages.conftest import open_doors
from tests.serve.pages.reading import read_page

PROMPT, COMPLETION = "the <b>cat", " sails over\n the naïve sea"


@pytest.fixture
def doors(written: Service, tmp_path: Path) -> Iterator[Doors]:
    made = open_doors(written, tmp_path, [({"prompt": PROMPT, "completion": COMPLETION}, "a ship")])
    yield made
    made.access.close()


@pytest.fixture
def reader(doors: Doors) -> Browser:
    return doors.browse("auditor")


@pytest.mark.wide
def test_words_are_shaded_as_the_library_scores_them(written: Service, reader: Browser) -> None:
    from imprint.language import LanguageTask, token_scores

    answer = reader.post("/query", data={"prompt": PROMPT, "completion": COMPLETION.replace("\n", "\r\n")})
    page = read_page(answer.text)
    assert isinstance(written.task, LanguageTask)
    found = token_scores(written.task, written.store, PROMPT, COMPLETION, written.task.tokenizer)
    shaded = page.find("p", class_="words")
    assert len(shaded) == 3 and shaded[0].full == PROMPT + COMPLETION
    names = [each.one("h3").text for each in page.find("summary") if each.find("h3")]
    for paragraph, heading in zip(shaded, names, strict=True):
        name, _, way = heading.partition(" makes this completion ")
        words = [word for word in found.rate_words(name) if word.text.strip()]
        spans = [each for each in paragraph.find("span") if "w" in each.attributes["class"].split()]
        assert [span.full for span in spans] == [word.text.lstrip() for word in words]
        for span, word in zip(spans, words, strict=True):
            kind = "helps" if word.contribution > 0 else "harms"
            step = round(5 * abs(word.contribution) / max(abs(each.contribution) for each in words))
            assert span.attributes["class"].split() == (["w", kind, f"s{step}"] if step else ["w"])
        assert way.startswith("likelier" if found.total(name).contribution > 0 else "less likely")


@pytest.mark.wide
def test_a_completion_that_is_too_long_keeps_what_was_typed(reader: Browser) -> None:
    typed = {"prompt": "the cat\n\n", "completion": " sea" * 40}
    answer = reader.post("/query", data=typed)
    page = read_page(answer.text)
    assert answer.status_code == 422 and page.one("div", class_="note bad").text
    assert [page.one("textarea", name=name).full for name in typed] == ["\n" + text for text in typed.values()]
    assert reader.post("/query", data={"prompt": "a", "completion": ""}).status_code == 422


@pytest.mark.wide
def test_an_example_fills_prompt_and_completion(reader: Browser) -> None:
    page = read_page(reader.get("/query?example=0").text)
    assert page.one("textarea", name="prompt").full == "\n" + PROMPT
    assert page.one("textarea", name="completion").full == "\n" + COMPLETION
    assert [link.text for link in read_page(reader.get("/query").text).find("a", href="/query?example=0")] == ["a ship"]


def read_warnings(doors: Doors, **body: object) -> list[str]:
    answer = doors.client.request("POST", "/v1/attributions", json=body, headers=doors.bear("query"))
    warnings: list[str] = answer.json()["warnings"]
    return warnings


@pytest.mark.wide
def test_a_completion_without_its_space_is_warned_of(doors: Doors) -> None:
    joined, apart = [{"prompt": "the cat", "completion": completion} for completion in ("sails", " sails")]
    (warning,) = read_warnings(doors, query=joined)
    assert "no space between it and its prompt: 'the cat' + 'sails'" in warning and "' sails'" in warning
    assert read_warnings(doors, queries=[apart, joined]) == [f"query 1: {warning}"]
    assert read_warnings(doors, query=apart) == []
    reader = doors.browse("auditor")
    assert "no space between it and its prompt" in read_page(reader.post("/query", data=joined).text).text
    assert "no space" not in read_page(reader.post("/query", data=apart).text).text


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore:nobody is credited")
@pytest.mark.parametrize("error", [DeadlinePassed(), Overloaded(1), Closing(), ReadoutError("no words")])
def test_an_answer_whose_words_cannot_be_read_is_shown_and_credited_all_the_same(
    language: tuple[imprint.Task, imprint.Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger:
        task, store = language
        service = Service(task, store, policy=Policy("house", question=store.question), ledger=ledger)
        before = len(ledger)

        async def fail(query: object) -> None:
            assert len(ledger) == before  # whatever happens here, nothing was credited behind the reader's back
            raise error

        monkeypatch.setattr(service, "words", fail)
        doors = open_doors(service, tmp_path, [])
        answer = doors.browse("admin").post("/query", data={"prompt": "the", "completion": " cat", "credit": "yes"})
        page = read_page(answer.text)
        assert answer.status_code == 200 and "could not be read this time" in page.text and "Credited." in page.text
        assert not page.find("p", class_="words") and len(list(ledger.entries(kind="credit"))) == 1
        service.close()
        doors.access.close()
