"""A service finds what `attribute` finds, whatever else is in its batch, and credits each request once."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import imprint
from imprint.credit import Policy, verify
from imprint.credit.payloads import decode_query, encode_query
from imprint.errors import ConfigurationError, DataError
from imprint.serve.service import Answered, Service
from tests.serve.news import POLICY, News, make_ledger


def ask_at_once(service: Service, *requests: Sequence[object]) -> list[Answered]:
    async def run() -> list[Answered]:
        return list(await asyncio.gather(*(service.attribute(request) for request in requests)))

    return asyncio.run(run())


def read_together(service: Service, queries: Sequence[object]) -> list[Answered]:
    """Ask each query in a request of its own, while the service is busy, so that one batch has all of them."""
    opened = threading.Event()

    async def run() -> list[Answered]:
        busy = asyncio.create_task(service.run(lambda: opened.wait(60)))
        asking = [asyncio.create_task(service.attribute([query])) for query in queries]
        while service.depth < len(queries):
            await asyncio.sleep(0)
        opened.set()
        await busy
        return list(await asyncio.gather(*asking))

    return asyncio.run(run())


def test_answers_are_those_of_attribute(news: News, service: Service) -> None:
    expected = imprint.attribute(news.task, news.store, (news.inputs[:3], news.labels[:3]), progress=False)
    (found,) = ask_at_once(service, [news.ask(place) for place in range(3)])
    torch.testing.assert_close(found.result.scores, expected.scores)
    assert expected.standard_error is not None and found.result.standard_error is not None
    torch.testing.assert_close(found.result.standard_error, expected.standard_error)
    assert found.result.labels.store_validation == expected.labels.store_validation
    assert found.answers == tuple(map(str, news.labels[:3].tolist()))


def test_an_answer_does_not_depend_on_what_else_is_read_with_it(news: News) -> None:
    sizes: list[int] = []
    service = Service(news.task, news.store, policy=POLICY, observe=lambda count, seconds: sizes.append(count))
    alone = [ask_at_once(service, [news.ask(place)])[0] for place in range(6)]
    assert sizes == [1] * 6
    sizes.clear()
    together = read_together(service, [news.ask(place) for place in range(6)])
    assert sizes == [6]
    service.close()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one.result.scores, other.result.scores)
        assert one.result.warnings == other.result.warnings
        assert one.result.details["chaos"] == pytest.approx(other.result.details["chaos"])
        assert [draft.rows[0]["share"] for draft in one.drafts] == pytest.approx(
            [draft.rows[0]["share"] for draft in other.drafts], rel=1e-4
        )


def test_without_a_label_the_answer_of_the_model_is_attributed(news: News, service: Service) -> None:
    with torch.no_grad():
        likeliest = news.task.model(news.inputs[:8]).argmax(1)
    (found,) = ask_at_once(service, [news.ask(place, labelled=False) for place in range(8)])
    assert found.answers == tuple(map(str, likeliest.tolist()))
    expected = imprint.attribute(news.task, news.store, (news.inputs[:8], likeliest), progress=False)
    torch.testing.assert_close(found.result.scores, expected.scores)


def test_the_query_that_is_kept_is_the_one_that_was_scored(news: News, service: Service) -> None:
    (found,) = ask_at_once(service, [news.ask(5, labelled=False), news.ask(6)])
    inputs, labels = decode_query(encode_query(found.batches[0]))
    assert torch.equal(inputs, news.inputs[5:6]) and labels.tolist() == [int(found.answers[0] or "")]


def test_the_same_request_is_credited_once(news: News, service: Service) -> None:
    (found,) = ask_at_once(service, [news.ask(1), news.ask(2)])
    first = asyncio.run(service.credit(found, caller="key:app", key="a")).receipt
    (again,) = ask_at_once(service, [news.ask(1), news.ask(2)])
    second = asyncio.run(service.credit(again, caller="key:app", key="a")).receipt
    assert second.repeated and second.sequences == first.sequences and not first.repeated
    assert service.ledger is not None and verify(service.ledger, progress=False).holds


def test_what_is_no_query_is_refused_with_its_place(news: News, service: Service) -> None:
    with pytest.raises(DataError, match=r'^"values" is a list of 4 numbers'):
        ask_at_once(service, [{"values": [1, 2]}])
    with pytest.raises(DataError, match=r"^query 1: a query is an object"):
        ask_at_once(service, [news.ask(0), 7])


def test_a_task_without_a_form_and_a_policy_for_another_question_are_refused(news: News, tmp_path: Path) -> None:
    plain = imprint.Task.classifier(news.task.model)
    with pytest.raises(ConfigurationError, match="how JSON becomes a query"):
        Service(plain, news.store)
    with make_ledger(tmp_path / "l.db") as ledger:
        policy = Policy("x", question="expected")
        with pytest.raises(imprint.ImprintError, match="pays for 'expected'"):
            Service(news.task, news.store, policy=policy, ledger=ledger)


def test_a_service_knows_how_its_queries_differ_from_the_validated_ones(news: News, service: Service) -> None:
    ask_at_once(service, [news.ask(place) for place in range(40)])
    asked = service.statistics.summary
    assert (
        asked.answered == asked.different == 40
        and asked.drift is not None
        and not asked.drift.clear
        and asked.drift.outside == 0
    )
    assert asked.judged == 40 and 0 <= asked.silent <= 40 and asked.noise is not None
    far = [{"values": [0.0, 0.0, 0.0, 0.001 * place], "label": place % 3} for place in range(60)]
    other = news.serve()
    for query in far:
        ask_at_once(other, [query])
    drift = other.statistics.summary.drift
    assert drift is not None and drift.clear
    other.close()
