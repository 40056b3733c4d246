"""A service reads as many queries at once as fit its memory, refuses what does not fit alone, and finds the same."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import imprint
from imprint.attribution.scoring import Scorer
from imprint.errors import TooLarge
from imprint.readout.reader import Reader
from imprint.runtime.memory import peak_bytes
from imprint.serve import service as serving
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.batching import DeadlinePassed
from imprint.serve.reading import divide
from imprint.serve.service import Answered, Service
from imprint.serve.settings import Settings
from tests.serve.calling import Caller
from tests.serve.news import News


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries are read at once, in turn."""
    found, read = list[int](), Reader.scores_with_deviations

    def note(reader: Reader, batch: Any, count: int) -> Any:
        found.append(count)
        return read(reader, batch, count)

    monkeypatch.setattr(Reader, "scores_with_deviations", note)
    return found


def ask(service: Service, *queries: Any) -> Answered:
    return asyncio.run(service.attribute(queries))


def test_scores_and_errors_do_not_depend_on_how_many_queries_fit(
    news: News, service: Service, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = [news.ask(place, labelled=place % 2 == 0) for place in range(7)]
    whole = ask(service, *queries)
    monkeypatch.setattr(Reader, "fit", lambda reader, batch, count: 3)
    parts = ask(service, *queries)
    assert sizes == [7, 3, 3, 1] and parts.answers == whole.answers
    torch.testing.assert_close(parts.result.scores, whole.result.scores)
    assert whole.result.standard_error is not None and parts.result.standard_error is not None
    torch.testing.assert_close(parts.result.standard_error, whole.result.standard_error)
    assert parts.result.warnings == whole.result.warnings


def test_a_query_that_does_not_fit_alone_is_refused_and_the_others_of_its_batch_are_not(
    news: News, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Reader.fit
    large = {**news.ask(0), "values": [9.0, 9.0, 9.0, 9.0]}
    monkeypatch.setattr(
        Reader, "fit", lambda reader, batch, count: 0 if bool((batch[0] == 9).any()) else fit(reader, batch, count)
    )

    async def run() -> list[object]:
        requests = [service.attribute([query]) for query in (news.ask(1), large, news.ask(2))]
        return await asyncio.gather(*requests, return_exceptions=True)

    first, refused, last = asyncio.run(run())
    assert isinstance(refused, TooLarge) and isinstance(first, Answered) and isinstance(last, Answered)
    access = Access(tmp_path / "access.db")
    caller = Caller(create_app(Settings(metrics=""), service, access), access.create("app", "query").secret)
    body = json.dumps({"query": large}).encode()
    answer = caller.call("/v1/attributions", [(b"content-type", b"application/json")], [body], method="POST")
    assert answer.status == 413 and b'"too_long"' in answer.body and b"memory=" not in answer.body
    access.close()


def test_queries_are_padded_to_about_their_own_length() -> None:
    lengths = [4, 1000, 5, 3, 900, 4]
    rows = [{"input_ids": torch.zeros(1, length), "weights": torch.zeros(1, length)} for length in lengths]
    groups = divide(rows)
    assert sorted(map(tuple, groups)) == [(0, 2, 3, 5), (1, 4)]


@pytest.mark.wide
def test_completions_of_different_lengths_are_scored_as_if_they_were_alone(written: Service, sizes: list[int]) -> None:
    queries = [{"prompt": "the cat", "completion": " sails" * count} for count in (1, 15, 2, 14, 1)]
    together = ask(written, *queries)
    assert sorted(sizes) == [2, 3]
    for place, query in enumerate(queries):
        alone = ask(written, query)
        torch.testing.assert_close(together.result.scores[place], alone.result.scores[0], rtol=1e-4, atol=1e-6)
        assert together.answers[place] == alone.answers[0]
    assert [len(batch["input_ids"][0]) for batch in together.batches] == [3, 17, 4, 16, 3]


@pytest.mark.wide
@pytest.mark.parametrize("width", [4, 12, 24])
def test_as_many_completions_are_read_at_once_as_fit(language: tuple[imprint.Task, imprint.Store], width: int) -> None:
    task, store = language
    allowed = 2_000_000
    scorer = Scorer(task, store, memory=f"{2 * allowed}B")  # half of which keeps imprints
    rows = {"input_ids": torch.arange(1, width + 1).repeat(200, 1), "weights": torch.ones(200, width)}
    scorer.read({name: column[:1] for name, column in rows.items()}, 1)
    fit = scorer.reader.fit(rows, 200)
    assert 1 <= fit < 200
    some = {name: column[:fit] for name, column in rows.items()}
    assert peak_bytes(lambda: scorer.reader.scores(some, fit)) <= allowed
    tight = Scorer(task, store, memory="8KiB")
    with pytest.raises(TooLarge):
        tight.read({name: column[:1] for name, column in rows.items()}, 1)


def test_the_documents_inside_a_few_sources_are_kept_open_and_no_more(
    news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[Path]()

    def open_scorer(task: imprint.Task, store: imprint.Store) -> Scorer:
        opened.append(Path(store.place))
        return Scorer(task, store)

    names = [f"source-{place}" for place in range(5)]
    for name in names:
        (tmp_path / name).symlink_to(news.store.place)
    made = news.serve(documents=tmp_path)
    monkeypatch.setattr(serving, "Scorer", open_scorer)
    query = ask(made, news.ask(0)).batches[0]
    for name in (*names, names[1], names[0], names[1], names[2]):
        assert len(asyncio.run(made.documents(name, query))) == 1
    assert opened == [tmp_path / name for name in (*names, names[0], names[2])]
    made.close()


def test_words_and_documents_have_the_deadline_of_queries(news: News) -> None:
    made, over = news.serve(deadline=0.01), threading.Event()
    with pytest.raises(DeadlinePassed):
        asyncio.run(made.run(lambda: over.wait(60)))
    over.set()
    made.close()
