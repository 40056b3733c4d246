"""A request that is sent again is answered from the ledger, whatever a restart or other queries made of it."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint.about import NOTHING
from imprint.batches import Batch
from imprint.credit import Ledger, Policy, verify
from imprint.errors import CreditError
from imprint.forms import Ask, Form, NumbersForm
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.recalling import describe_asked, recall_answers, recall_result
from imprint.serve.service import Service
from tests.credit.crediting import EXPECTED, THIS_RUN, make_result
from tests.credit.crediting import make_ledger as make_small_ledger
from tests.serve.calling import Answer, Caller
from tests.serve.news import POLICY, News, make_ledger

Open = Callable[..., Caller]


class ContraryForm(NumbersForm):
    """Stands for a model that finds another class likelier, as beside other queries it may for a near-tie."""

    def fill(self, ask: Ask, batch: Batch) -> Batch:
        return super().fill(lambda inputs: -ask(inputs), batch)


CONTRARY = ContraryForm((4,), classes=3)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with make_ledger(tmp_path / "credit.db") as made:
        yield made


@pytest.fixture
def start(news: News, ledger: Ledger, tmp_path: Path) -> Iterator[Open]:
    """Starts a process, as it were, on the same ledger and with the same keys."""
    access, services = Access(tmp_path / "access.db"), list[Service]()
    secret = access.create("app", "query").secret

    def open_service(policy: Policy = POLICY, form: Form | None = None) -> Caller:
        service = Service(news.task, news.store, form=form, policy=policy, ledger=ledger)
        services.append(service)
        return Caller(create_app(service.settings, service, access), secret)

    yield open_service
    for service in services:
        service.close()
    access.close()


def ask(caller: Caller, *queries: Any, key: str = "a", top: int | None = None) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"idempotency-key", key.encode())]
    body = json.dumps({"queries": queries, "credit": True, "top": top}).encode()
    return caller.call("/v1/attributions", headers, [body], method="POST")


def read(answer: Answer) -> dict[str, Any]:
    """Return an answer without what may differ when a request is sent again."""
    assert answer.status == 200, answer.body
    content: dict[str, Any] = json.loads(answer.body)
    return {name: value for name, value in content.items() if name not in ("repeated", "warnings", "milliseconds")}


def forbid_reading(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was read again")

    for name in ("_parse", "_read", "list_warnings"):
        monkeypatch.setattr(caller.app.state.service, name, fail)


def test_a_request_is_answered_alike_after_a_restart_with_another_policy(
    news: News, ledger: Ledger, start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = [news.ask(0), news.ask(1, labelled=False), news.ask(2)]
    first = ask(start(), *queries)
    restarted = start(replace(POLICY, version=2, rule="above_noise"))
    fresh = ask(restarted, *queries, key="b")
    forbid_reading(restarted, monkeypatch)
    again = ask(restarted, *queries)
    assert read(again) == read(first) != read(fresh)
    content = json.loads(again.body)
    assert content["repeated"] and "credited before" in content["warnings"][0] and content["milliseconds"]["read"] == 0
    assert any(source["distinguishable"] for query in content["queries"] for source in query["sources"])
    assert len(list(ledger.entries(kind="credit"))) == 6 and verify(ledger, progress=False).holds


def test_a_label_that_the_model_chooses_otherwise_beside_other_queries_makes_no_other_request(
    news: News, ledger: Ledger, start: Open
) -> None:
    first = read(ask(start(), news.ask(3, labelled=False)))
    caller = start(form=CONTRARY)
    other = read(ask(caller, news.ask(3, labelled=False), key="b"))
    assert other["queries"][0]["answer"] != first["queries"][0]["answer"]
    assert read(ask(caller, news.ask(3, labelled=False))) == first
    assert len(list(ledger.entries(kind="credit"))) == 2


def test_of_two_who_credit_the_same_at_once_both_get_what_the_first_one_credited(
    news: News, ledger: Ledger, start: Open
) -> None:
    """Neither found the request in the ledger, and each has read it; the model chose another label for one."""
    one, other = (start(form=form).app.state.service for form in (None, CONTRARY))
    query, named = [news.ask(4, labelled=False)], {"caller": "key:app", "key": "a"}

    async def run() -> Any:
        assert await one.recall(query, **named) is None and await other.recall(query, **named) is None
        read = [await service.attribute(query, divide=False) for service in (one, other)]
        assert read[0].answers != read[1].answers
        first = await one.credit(read[0], **named)
        return first, await other.credit(read[1], **named)

    first, second = asyncio.run(run())
    assert second.receipt.repeated and second.receipt.entries == first.receipt.entries
    assert second.answered.answers == tuple(first.answered.answers)
    torch.testing.assert_close(second.answered.result.scores, first.answered.result.scores.double())
    assert len(list(ledger.entries(kind="credit"))) == 1 and verify(ledger, progress=False).holds


def test_other_queries_with_the_same_key_are_a_conflict(news: News, ledger: Ledger, start: Open) -> None:
    caller = start()
    read(ask(caller, news.ask(0), news.ask(1)))
    labelled, unlabelled = news.ask(0), news.ask(0, labelled=False)
    for queries in ([labelled], [news.ask(1), labelled], [labelled, news.ask(1), labelled], [unlabelled, news.ask(1)]):
        answer = ask(caller, *queries)
        assert answer.status == 409 and b'"conflict"' in answer.body and b"a new key for each request" in answer.body
    assert len(list(ledger.entries(kind="credit"))) == 2


def test_how_many_sources_are_listed_makes_no_other_request(news: News, start: Open) -> None:
    caller = start()
    (whole,) = read(ask(caller, news.ask(0)))["queries"]
    (part,) = read(ask(caller, news.ask(0), top=2))["queries"]
    assert part["sources"] == whole["sources"][:2] and len(whole["sources"]) == len(news.store)


def test_queries_that_were_erased_are_not_credited_again(news: News, ledger: Ledger, start: Open) -> None:
    caller = start()
    (query,) = read(ask(caller, news.ask(0)))["queries"]
    ledger.erase([query["entry"]])
    answer = ask(caller, news.ask(0))
    assert answer.status == 409 and b"They stay credited" in answer.body


def test_a_query_is_the_same_however_its_json_is_written() -> None:
    assert describe_asked([{"a": 1, "b": "ü"}]) == describe_asked([{"b": "\u00fc", "a": 1}])
    assert len({describe_asked(queries) for queries in ([{"a": 1}], [{"a": 2}], [{"a": "1"}], [{"a": 1}] * 2, [])}) == 5
    describe_asked(["\ud800"])  # half of a character is text in JSON


@pytest.mark.parametrize("policy", [EXPECTED, THIS_RUN])
def test_what_is_recalled_is_what_was_credited(tmp_path: Path, policy: Policy) -> None:
    """Errors and what can be told from 0 follow from the entries, whether from several runs or the noise of one."""
    result = make_result(3, question=policy.question)
    if policy is THIS_RUN:
        changes = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        result = replace(result, noise_changes=changes, replicates=())
    with make_small_ledger(tmp_path / "credit.db") as ledger:
        entries = ledger.credit(result, policy).entries
    ids = result.labels.source_ids
    found = recall_result(entries, make_store(ids[::-1][:3]))
    places = [found.labels.source_ids.index(id) for id in ids]
    torch.testing.assert_close(found.scores[:, places], result.scores)
    assert found.standard_error is not None and result.standard_error is not None
    torch.testing.assert_close(found.standard_error[:, places], result.standard_error)
    marks = [[(each.source, each.distinguishable) for each in credits] for credits in found.top(4)]
    assert marks == [[(each.source, each.distinguishable) for each in credits] for credits in result.top(4)]
    assert found.labels.validation == result.labels.validation and found.labels.unit == result.labels.unit
    assert found.labels.source_names == ("name of wire", "name of times", "name of post", "blog")


def make_store(ids: tuple[str, ...]) -> Any:
    """A store that knows some of the sources."""

    class Known:
        source_ids, source_names, about = ids, tuple(f"name of {id}" for id in ids), (NOTHING,) * len(ids)

        def __len__(self) -> int:
            return len(ids)

    return Known()


def test_an_answer_that_cannot_be_shown_any_more_is_unknown(news: News, tmp_path: Path) -> None:
    with make_small_ledger(tmp_path / "credit.db") as ledger:
        entries = ledger.credit(make_result(2), EXPECTED, payloads=[b"no query of this form", b"nor this"]).entries
        assert recall_answers(ledger, entries, news.task.form) == [None, None]  # type: ignore[arg-type]
        ledger.erase([entries[0].sequence])
        assert recall_answers(ledger, entries, news.task.form) == [None, None]  # type: ignore[arg-type]


def test_a_service_whose_ledger_would_refuse_every_query_does_not_start(news: News, tmp_path: Path) -> None:
    from imprint.credit import Tariff
    from imprint.keys import make_keys

    with make_ledger(tmp_path / "credit.db") as ledger:
        service = news.serve(ledger)
        asyncio.run(credit(service, news))
        service.close()
        other = replace(POLICY, rule="above_noise")
        with pytest.raises(CreditError, match="the log has another policy 'house rules', version 1"):
            Service(news.task, news.store, policy=other, ledger=ledger)
    make_keys(tmp_path / "key")
    with (
        Ledger.create(tmp_path / "signed.db", Tariff("EUR", 1), signed_by=tmp_path / "key.pub") as signed,
        pytest.raises(CreditError, match=r"only stores that the key .* has signed"),
    ):
        news.serve(signed)


async def credit(service: Service, news: News) -> None:
    answered = await service.attribute([news.ask(0)], divide=False)
    await service.credit(answered, caller="key:app", key="a")
