"""The client tries again what may succeed, credits once however often it tries, and keeps its key to itself."""

import threading
from types import SimpleNamespace

import pytest

from imprint.errors import ConfigurationError, DataError, ServiceError
from imprint.serve.client import Client, Effect
from tests.serve.fake_service import Reply, refuse, serving

KEY = "imprint_" + "k" * 43
LOST, CUT, HEAD = Reply(0), Reply(missing=1), Reply(missing=len(Reply().content))


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("imprint.serve.client.time", clock)
    return clock


def test_an_answer_is_read_into_small_objects_and_the_key_is_sent_in_a_header() -> None:
    with serving() as service, Client(service.url, KEY) as client:
        answer = client.attribute({"values": [1, 2]}, top=3)
    assert answer.queries[0].effects == (Effect("int:4", "Elm", -0.25, 0.125, None, 0.5),)
    assert answer.queries[0].entry == 7 and answer.warnings == ("careful",) and answer.json["repeated"] is False
    (asked,) = service.asked
    assert asked.body == {"query": {"values": [1, 2]}, "top": 3} and asked.path == "/v1/attributions"
    assert asked.headers["authorization"] == f"Bearer {KEY}" and "idempotency-key" not in asked.headers


def test_an_answer_says_which_sign_helps_and_is_shown_once() -> None:
    with serving() as service, Client(service.url, KEY) as client:
        answer = client.attribute({"values": [1, 2]})
    assert (answer.measure, answer.better) == ("logprob", "higher") and "− means the source helps" in answer.unit
    assert repr(answer).count("Elm") == 1


def test_several_queries_are_one_request() -> None:
    with serving() as service, Client(service.url, KEY) as client:
        client.attribute(queries=[1, 2])
    assert service.asked[0].body == {"queries": [1, 2]}


@pytest.mark.parametrize(
    "trouble", [LOST, CUT, HEAD, refuse(429, "overloaded"), refuse(503, "closing"), refuse(504, "too_late")]
)
def test_what_may_succeed_is_tried_again_with_the_same_idempotency_key(trouble: Reply) -> None:
    with serving(trouble, trouble, Reply()) as service, Client(service.url, KEY) as client:
        assert client.attribute(1, credit=True).queries[0].answer == "3"
        keys = [asked.headers["idempotency-key"] for asked in service.asked]
        assert len(keys) == 3 and len(set(keys)) == 1
        client.attribute(1, credit=True)
        assert service.asked[-1].headers["idempotency-key"] != keys[0]
        client.attribute(1, credit=True, idempotency_key="answer-7")
        assert service.asked[-1].headers["idempotency-key"] == "answer-7"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 415, 422, 500])
def test_what_was_refused_for_good_is_not_tried_again(status: int, clock: Clock) -> None:
    with serving(refuse(status, "nope")) as service:
        client = Client(service.url, KEY)
        with pytest.raises(ServiceError, match=rf"status {status} \(nope\): because of nope") as refused:
            client.attribute(1, credit=True)
    assert (refused.value.status, refused.value.code) == (status, "nope")
    assert len(service.asked) == 1 and clock.slept == []


def test_it_waits_as_long_as_it_is_told_and_ever_longer_where_it_is_not(clock: Clock) -> None:
    told = refuse(429, "overloaded", Retry_After="7")
    with serving(told, LOST, LOST, LOST, LOST, Reply()) as service, Client(service.url, KEY) as client:
        client.attribute(1)
    assert clock.slept[0] == 7
    for tries, seconds in enumerate(clock.slept[1:], 1):
        assert 0.5 * 0.1 * 2**tries <= seconds <= 0.1 * 2**tries


def test_a_connection_that_was_closed_meanwhile_is_replaced_at_once(clock: Clock) -> None:
    with serving(Reply(), LOST, Reply()) as service, Client(service.url, KEY) as client:
        client.attribute(1)
        client.attribute(2, credit=True)
    assert clock.slept == [] and [asked.body["query"] for asked in service.asked] == [1, 2, 2]
    assert len({asked.headers.get("idempotency-key") for asked in service.asked[1:]}) == 1


def test_trying_ends_when_its_patience_does(clock: Clock) -> None:
    with serving(refuse(503, "closing")) as service:
        client = Client(service.url, KEY, patience=60)
        with pytest.raises(ServiceError, match="503") as refused:
            client.attribute(1)
    assert refused.value.code == "closing" and 50 < clock.now < 60
    assert len(service.asked) == len(clock.slept) + 1 < 20


@pytest.mark.parametrize("reply", [LOST, refuse(503, "credit_unknown"), refuse(500, "internal"), Reply(200, b"[]")])
def test_a_request_that_is_given_up_can_be_asked_again_under_the_same_key(reply: Reply) -> None:
    with serving(reply) as service:
        client = Client(service.url, KEY, patience=1)
        with pytest.raises(ServiceError) as refused:
            client.attribute(1, credit=True)
        name = refused.value.idempotency_key
        assert name is not None and {asked.headers["idempotency-key"] for asked in service.asked} == {name}
        service.replies[:] = [Reply()]
        assert client.attribute(1, credit=True, idempotency_key=name).queries[0].entry == 7
        assert service.asked[-1].headers["idempotency-key"] == name


def test_a_request_that_credits_nothing_has_no_key_to_keep() -> None:
    with serving(refuse(422, "invalid")) as service, pytest.raises(ServiceError) as refused:
        Client(service.url, KEY).attribute(1)
    assert refused.value.idempotency_key is None


def test_a_service_that_is_not_there_is_named_without_the_key() -> None:
    with serving() as service:
        pass
    client = Client(service.url, KEY, patience=5)
    with pytest.raises(ServiceError, match=r"http://127\.0\.0\.1.* cannot be reached: ConnectionRefused") as refused:
        client.attribute(1)
    assert refused.value.status is None and KEY not in str(refused.value) + repr(client)
    assert not client.ready()


def test_readiness_is_asked_once() -> None:
    with serving(Reply(503, {"status": "not ready"}), Reply(200, {"status": "ready"})) as service:
        client = Client(service.url, KEY)
        assert [client.ready(), client.ready()] == [False, True]
        assert [asked.path for asked in service.asked] == ["/readyz", "/readyz"]


def test_sources_and_the_store_are_asked_for() -> None:
    with serving(Reply(200, [{"id": "a"}]), Reply(200, {"n": 3})) as service, Client(service.url, KEY) as client:
        assert client.sources() == [{"id": "a"}] and client.store() == {"n": 3}
        assert [asked.path for asked in service.asked] == ["/v1/sources", "/v1/store"]


@pytest.mark.parametrize("url", ["http://imprint.example.org", "http://10.0.0.7:8080", "http://127.0.0.1.example.org"])
def test_a_key_is_sent_to_other_machines_by_https_alone(url: str) -> None:
    with pytest.raises(ConfigurationError, match="unencrypted: use https"):
        Client(url, KEY)
    Client(url, KEY, insecure=True)
    Client(url.replace("http:", "https:"), KEY)


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://127.0.0.1", "http://", "http://localhost/?key=x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the address of a service"):
        Client(url, KEY)


def test_what_cannot_be_a_request_is_refused_before_it_is_sent() -> None:
    with serving() as service:
        client = Client(service.url, KEY)
        with pytest.raises(ConfigurationError, match="either a query, or"):
            client.attribute()
        with pytest.raises(ConfigurationError, match="either a query, or"):
            client.attribute(1, queries=[1])
        with pytest.raises(ConfigurationError, match="goes with credit=True"):
            client.attribute(1, idempotency_key="x")
        with pytest.raises(ConfigurationError, match="1 to 200 printable"):
            client.attribute(1, credit=True, idempotency_key="x\r\nX-Evil: 1")
        with pytest.raises(ConfigurationError, match="no API key"):
            Client(service.url, f"{KEY}\r\n")
        for query in (float("nan"), object()):
            with pytest.raises(DataError, match="made of JSON values"):
                client.attribute(query)
        assert service.asked == []


@pytest.mark.parametrize("body", [b"<html>", b"[1]", {"question": "x"}, {"queries": [{}]}])
def test_an_answer_that_is_not_the_services_is_no_answer(body: object) -> None:
    with serving(Reply(200, body)) as service:
        client = Client(service.url, KEY)
        with pytest.raises(ServiceError, match="the answer is n"):
            client.attribute(1)


def test_a_refusal_that_does_not_say_why_is_passed_on() -> None:
    with serving(Reply(418, b"teapot")) as service:
        client = Client(service.url, KEY)
        with pytest.raises(ServiceError, match=r"418 \(unknown\)"):
            client.attribute(1)


def test_threads_share_a_client() -> None:
    with serving() as service:
        client = Client(service.url, KEY)
        found = SimpleNamespace(answers=[])
        threads = [threading.Thread(target=lambda: found.answers.append(client.attribute(1))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found.answers) == len(service.asked) == 8
