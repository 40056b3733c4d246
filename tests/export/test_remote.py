"""Scores through a server are those of PEFT, and every known way of serving them wrongly is refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import ReadoutError
from imprint.export import Export, RemoteReader, Scores, completions, read_peft, read_remote
from imprint.export.completions import Server, ServerGone
from tests.export import served
from tests.export.fake import CUT, Body, Fake, running


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return served.path_export(tmp_path_factory.mktemp("path"))[2]


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return served.removal_export(tmp_path_factory.mktemp("removals"))[2]


@pytest.fixture
def fake(exported: Export, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(completions, "_PAUSE", 0.01)
    with running(exported) as server:
        yield server


def by_peft(export: Export, asked: dict[str, Tensor] | None = None) -> Scores:
    return read_peft(export, served.plain(export), served.queries() if asked is None else asked)


def far(found: Scores, expected: Scores) -> float:
    return float((found.measured - expected.measured).norm() / expected.measured.norm())


def test_scores_of_pairs_are_those_of_peft(fake: Fake) -> None:
    found = read_remote(fake.export.folder, fake.url + "/v1/", served.queries())
    assert far(found, by_peft(fake.export)) < 1e-4
    assert found.source_ids == fake.export.ids and found.measured.shape == (6, 3)


def test_scores_of_removals_are_those_of_peft(removed: Export) -> None:
    with running(removed) as fake:
        found = read_remote(removed, fake.url, served.queries())
    assert far(found, by_peft(removed)) < 1e-4
    effect = served.values(removed, "adapters/0001-without", served.queries())
    effect = effect - served.values(removed, "adapters/base", served.queries())
    assert found.removal_effect(0, found.source_ids[1]) == pytest.approx(float(effect[0]), abs=1e-3)


def test_a_server_is_compared_with_pytorch_under_every_adapter(fake: Fake) -> None:
    check = RemoteReader(fake.export, fake.url).check()
    assert (check.adapters, check.probes) == (7, 4) and check.deviation < 1e-4 and 0 < (check.moves or 0) < 1e-3
    assert {request["model"] for request in fake.requests} == set(fake.names)
    assert "7 adapters on 4 probes" in str(check)


def test_it_is_compared_once_for_many_calls(fake: Fake) -> None:
    reader = RemoteReader(fake.export, fake.url)
    reader.scores(served.queries())
    before = len(fake.requests)
    reader.scores(served.queries())
    assert len(fake.requests) - before == 7 * 6


def test_padding_is_not_sent(fake: Fake) -> None:
    read_remote(fake.export, fake.url, served.queries())
    lengths = {len(request["prompt"]) for request in fake.requests}
    assert lengths == {served.LENGTH - row for row in range(4)}


def test_a_query_without_weight_asks_nothing_and_scores_0(fake: Fake) -> None:
    asked = served.queries()
    asked["weights"][2] = 0
    reader = RemoteReader(fake.export, fake.url)
    reader.check()
    before = len(fake.requests)
    assert reader.scores(asked).measured[2].tolist() == [0, 0, 0]
    assert len(fake.requests) - before == 7 * 5


def test_requests_run_at_the_same_time_and_no_more_than_asked(fake: Fake) -> None:
    fake.slow = 0.02
    read_remote(fake.export, fake.url, served.queries(), at_once=3)
    assert fake.most == 3


def test_the_key_of_a_server_is_sent(fake: Fake) -> None:
    read_remote(fake.export, fake.url, served.queries(), api_key="secret")
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}


URLS: dict[str, tuple[str, str]] = {
    "no scheme": ("127.0.0.1:8000", "must be that of a server, as in .* got '127.0.0.1:8000'"),
    "no host": ("http://:8000", "must be that of a server"),
    "a port of letters": ("http://h:abc", "a port from 1 to 65535 after it, if any; got 'http://h:abc'"),
    "a port too large": ("http://h:99999", "a port from 1 to 65535"),
    "a bracket": ("http://[::1", "must have a host"),
    "a user": ("http://me:secret@h:80", "must not have a user name or a password: give the key"),
    "a user and no port": ("http://me:secret@h:abc", "a port from 1 to 65535"),
    "a user with a slash": ("http://me:secret/more@h", "a port from 1 to 65535"),
    "a user and no scheme": ("me:secret@h", "must be that of a server"),
    "a query": ("http://h?key=secret", "has a query"),
    "a fragment": ("http://h/v1#secret", "has a query .* or a fragment"),
}


@pytest.mark.parametrize(("url", "reason"), URLS.values(), ids=URLS)
def test_what_is_no_address_of_a_server_is_refused_without_repeating_secrets(url: str, reason: str) -> None:
    with pytest.raises(ReadoutError, match=reason) as refused:
        Server(url)
    assert "secret" not in str(refused.value) and refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "warns"),
    [
        ("http://models.example:8000", True),
        ("http://10.0.0.7/v1", True),
        ("https://models.example", False),
        ("http://127.0.0.2:8000", False),
        ("http://[::1]:8000", False),
        ("http://localhost", False),
    ],
)
def test_a_key_over_plain_http_to_another_machine_is_warned_of(
    url: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert "secret" not in repr(Server(url, api_key="secret")) and "secret" not in caplog.text
    assert ("over plain http, where others can read it: use https" in caplog.text) == warns
    caplog.clear()
    Server(url)
    assert not caplog.records


def _without(*keys: str) -> Any:
    """An answer that lacks what can be recognised by its keys."""

    def change(_: Body, answer: Body) -> tuple[int, Body]:
        for key in keys:
            for choice in answer.get("choices", ()):
                choice.pop(key, None)
            answer.pop(key, None)
        return 200, answer

    return change


def _values(change: Any) -> Any:
    def changed(_: Body, answer: Body) -> tuple[int, Body]:
        logprobs = answer["choices"][0]["logprobs"]
        logprobs["token_logprobs"] = change(logprobs["token_logprobs"])
        return 200, answer

    return changed


def _begin_with_a_token(_: Body, answer: Body) -> tuple[int, Body]:
    answer["choices"][0]["prompt_token_ids"].insert(0, 0)
    return 200, answer


def _count_more(_: Body, answer: Body) -> tuple[int, Body]:
    answer["usage"]["prompt_tokens"] += 1
    del answer["choices"][0]["prompt_token_ids"]
    return 200, answer


def _rename(_: Body, answer: Body) -> tuple[int, Body]:
    return 200, {**answer, "model": "plain"}


TRAPS = {
    "ignores logprobs": (_without("logprobs"), "ignores `echo` or `logprobs`, as `transformers serve` does"),
    "no choices": (_without("choices"), "returns no log-probabilities"),
    "ignores echo": (_values(lambda values: values[-1:]), r"for 1 of \d+ tokens: it ignores `echo`"),
    "prefix cache, nulls": (_values(lambda values: [None] * 16 + values[16:]), "--no-enable-prefix-caching"),
    "prefix cache, shorter": (_values(lambda values: values[16:]), "--no-enable-prefix-caching"),
    "generates": (_values(lambda values: [*values, -1.0]), "ignores `max_tokens: 0`"),
    "adds a token": (_begin_with_a_token, "read other tokens than were sent: .* first difference at position 0"),
    "counts another": (_count_more, r"read \d+ tokens, and \d+ were sent"),
    "one model for all": (_rename, "answers as 'plain': it does not serve adapters by name"),
    "clamped": (_values(lambda values: [None, -9999.0, *values[2:]]), "token 1, which cannot be one"),
    "not a number": (_values(lambda values: [None, "-1", *values[2:]]), "returns '-1' as the log-probability"),
    "positive": (_values(lambda values: [None, 0.5, *values[2:]]), "which cannot be one"),
    "a page": (lambda _, answer: (200, "<html>hello</html>"), "something else than JSON"),
    "a list": (lambda _, answer: (200, "[]"), "something else than JSON"),
    "refuses": (lambda _, answer: (400, {"error": {"message": "too long"}}), "with status 400: too long"),
    "forbids": (lambda _, answer: (401, {"error": "Unauthorized"}), "with status 401: Unauthorized"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_an_answer_that_cannot_be_believed_is_refused(trap: str, fake: Fake) -> None:
    fake.change, message = TRAPS[trap]
    with pytest.raises(ReadoutError, match=message):
        read_remote(fake.export, fake.url, served.queries())


def test_a_server_that_says_little_is_believed_by_its_values(fake: Fake) -> None:
    fake.change, fake.lists = _without("model", "usage", "prompt_token_ids"), False
    assert far(read_remote(fake.export, fake.url, served.queries()), by_peft(fake.export)) < 1e-4


def test_another_base_model_is_refused_before_any_score(fake: Fake) -> None:
    with torch.no_grad():
        fake.model.get_input_embeddings().weight.mul_(1.1)
    reader = RemoteReader(fake.export, fake.url)
    with pytest.raises(ReadoutError, match=r"does not serve the model of this export: .* serve\.sh"):
        reader.scores(served.queries())
    assert len(fake.requests) == 7 * 4  # the probes


@pytest.mark.parametrize("wrong", ["base", "0001-minus"], ids=["left out", "exchanged"])
def test_another_adapter_of_the_same_name_is_refused(wrong: str, fake: Fake) -> None:
    fake.answers_as = lambda name: wrong if name == "0001-plus" else name
    with pytest.raises(ReadoutError, match="does not serve the adapter '0001-plus' of this export"):
        read_remote(fake.export, fake.url, served.queries())


def test_adapters_that_are_all_left_out_are_refused_though_the_base_is_right(fake: Fake) -> None:
    fake.answers_as = lambda _: "base"
    with pytest.raises(ReadoutError, match="or the server leaves some of its layers out"):
        RemoteReader(fake.export, fake.url).check()


def test_a_server_without_the_adapters_is_refused_with_the_way_out(fake: Fake) -> None:
    fake.names = ["base", "0000-plus"]
    with pytest.raises(ReadoutError, match=r"lacks 5 adapters .*\(0000-minus, 0001-plus, .*serves plain.*load_from="):
        read_remote(fake.export, fake.url, served.queries())
    fake.lists = False
    with pytest.raises(ReadoutError, match=r"does not serve '0\d\d\d-\w+': The model `0\d\d\d-\w+` does not exist"):
        read_remote(fake.export, fake.url, served.queries())


def test_adapters_that_a_server_lacks_are_loaded(fake: Fake) -> None:
    fake.names, loaded = ["base", "0000-plus"], []

    def load(body: Body) -> tuple[int, str]:
        loaded.append(body)
        fake.names.append(body["lora_name"])
        return 200, "Success"

    fake.loads = load
    found = read_remote(fake.export, fake.url, served.queries(), load_from="/models/news")
    assert far(found, by_peft(fake.export)) < 1e-4
    assert loaded[0] == {"lora_name": "0000-minus", "lora_path": "/models/news/adapters/0000-minus"}
    assert len(loaded) == 5


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (500, "Worker failed with error 'LoRA rank 8 is greater than max_lora_rank 1.'", "raise --max-lora-rank"),
        (404, "Loading lora base failed: No adapter found for /x/adapters/base", "No adapter found for /x"),
        (404, "Not Found", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
    ],
    ids=["rank", "path", "forbidden"],
)
def test_a_server_that_does_not_load_says_why(status: int, message: str, expected: str, fake: Fake) -> None:
    fake.names = []
    fake.loads = lambda body: (status, json.dumps({"error": {"message": message}}))
    with pytest.raises(ReadoutError, match=expected):
        read_remote(fake.export, fake.url, served.queries(), load_from="/x")
    assert len(fake.requests) == 1  # what cannot help is not tried again


@pytest.mark.parametrize("status", [0, CUT, 429, 500, 503], ids=["broken", "cut", "busy", "error", "unavailable"])
def test_a_request_that_fails_is_sent_again(status: int, fake: Fake) -> None:
    failed: set[str] = set()

    def change(request: Body, answer: Body) -> tuple[int, Body]:
        key = json.dumps(request)
        if key in failed:
            return 200, answer
        failed.add(key)
        return status, {}

    fake.change = change
    assert far(read_remote(fake.export, fake.url, served.queries()), by_peft(fake.export)) < 1e-4
    assert len(failed) == 7 * 6 and len(fake.requests) == 7 * 4 + 7 * 6 + len(failed)


def test_a_server_that_asks_to_wait_is_waited_for(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_LONGEST", 0.3)
    fake.retry_after, fake.change = "7", lambda _, answer: (429, {})
    began = monotonic()
    with pytest.raises(ServerGone, match="status 429"):
        Server(fake.url, retries=1).log_probs("base", [1, 2])
    assert 0.3 <= monotonic() - began < 5


def test_a_server_that_is_too_slow_is_given_up(fake: Fake) -> None:
    fake.slow = 0.5
    with pytest.raises(ServerGone, match=r"timed out\): 1 attempt in"):
        Server(fake.url, timeout=0.1, retries=0).log_probs("base", [1, 2])
    with pytest.raises(ServerGone, match=r"timed out\): 2 attempts"):
        Server(fake.url, timeout=0.1, retries=1).log_probs("base", [1, 2])


def _dies_after(fake: Fake, count: int) -> None:
    """The server breaks every connection once it has answered so many requests."""
    answered = iter(range(count))
    fake.change = lambda _, answer: (0, {}) if next(answered, None) is None else (200, answer)


def test_a_server_that_dies_in_the_middle_loses_nothing(fake: Fake) -> None:
    reader = RemoteReader(fake.export, fake.url, at_once=2, retries=1)
    reader.check()
    _dies_after(fake, 10)
    with pytest.raises(ServerGone, match=r"10 of 42 log-likelihoods are finished and kept: call scores again"):
        reader.scores(served.queries())
    fake.change = lambda _, answer: (200, answer)
    before = len(fake.requests)
    assert far(reader.scores(served.queries()), by_peft(fake.export)) < 1e-4
    assert len(fake.requests) - before == 7 * 4 + 32  # the probes again, then what was not finished


def test_what_was_finished_is_not_given_to_other_queries_nor_read_from_another_server(fake: Fake) -> None:
    reader = RemoteReader(fake.export, fake.url, at_once=2, retries=1)
    reader.check()
    _dies_after(fake, 10)
    with pytest.raises(ServerGone):
        reader.scores(served.queries())
    fake.change = lambda _, answer: (200, answer)
    others = served.columns(5, seed=9)
    assert far(reader.scores(others), by_peft(fake.export, others)) < 1e-4
    _dies_after(fake, 10)
    with pytest.raises(ServerGone):
        reader.scores(served.queries())
    fake.change, fake.answers_as = (lambda _, answer: (200, answer)), lambda _: "base"
    with pytest.raises(ReadoutError, match="does not serve the adapter"):
        reader.scores(served.queries())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://"])
def test_a_url_that_is_none_is_refused(url: str, exported: Export) -> None:
    with pytest.raises(ReadoutError, match=r"as in http://127\.0\.0\.1:8000"):
        RemoteReader(exported, url)


@pytest.mark.parametrize("option", [{"at_once": 0}, {"timeout": 0}, {"retries": -1}], ids=str)
def test_settings_that_cannot_work_are_refused(option: dict[str, Any], exported: Export) -> None:
    with pytest.raises(ReadoutError, match=f"{next(iter(option))} must be|{next(iter(option))} at least"):
        RemoteReader(exported, "http://127.0.0.1:1", **option)


def test_a_place_without_a_server_is_named(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PAUSE", 0.01)
    with running(exported) as fake:
        url = fake.url
    with pytest.raises(ServerGone, match=rf"{url} does not answer /v1/models \(.*refused\): 3 attempts"):
        read_remote(exported, url, served.queries(), retries=2)


def test_queries_that_the_model_cannot_take_are_refused_before_they_are_sent(fake: Fake) -> None:
    asked = served.queries()
    asked["input_ids"][0, 0] = served.VOCABULARY
    with pytest.raises(ValueError, match="knows tokens from 0 to"):
        read_remote(fake.export, fake.url, asked)
    assert fake.requests == []


def test_an_export_of_before_adapters_were_probed_is_compared_by_its_base(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Export, "probe_ends", lambda _: None)
    check = RemoteReader(fake.export, fake.url).check()
    assert check.moves is None and check.deviation < 1e-4 and "what adapters change" not in str(check)


def test_an_export_for_half_precision_allows_for_its_rounding_and_no_more(tmp_path: Path) -> None:
    half = served.path_export(tmp_path, dtype="bfloat16")[2]
    with running(half) as fake:
        fake.model.to(torch.bfloat16)
        check = RemoteReader(half, fake.url).check()
        assert 1e-3 < check.deviation < 1
        fake.answers_as = lambda _: "base"
        with pytest.raises(ReadoutError, match="does not serve the adapter"):
            RemoteReader(half, fake.url).check()


def test_a_folder_that_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds no export"):
        RemoteReader(tmp_path, "http://127.0.0.1:1")
