"""Sessions and one-time links: tokens that are kept as hashes, end in time, and open one session each."""

import threading

from imprint.serve.access import Access
from imprint.serve.access.roles import Identity
from imprint.serve.access.secret import derive_csrf, is_same
from imprint.serve.access.sessions import _MOST
from tests.serve.access.doors import Clock


def open_session(access: Access, name: str = "app") -> str:
    token = access.open_session(access.create(name, "query").secret, 3600)
    assert token is not None
    return token


def test_a_session_is_its_keys_with_a_csrf_token_of_its_own(access: Access) -> None:
    one, other = open_session(access, "a"), open_session(access, "b")
    assert access.identify_session(one) == Identity("a", "query", (), derive_csrf(one))
    assert derive_csrf(one) != derive_csrf(other) and one not in derive_csrf(one)
    assert access.identify_key(one) is None


def test_a_session_ends_in_time(access: Access, clock: Clock) -> None:
    token = open_session(access)
    clock.turn(seconds=3599.5)
    assert access.identify_session(token) is not None
    clock.turn(seconds=0.5)
    assert access.identify_session(token) is None


def test_a_session_ends_at_logout_everywhere(access: Access, place: str, clock: Clock) -> None:
    token, other = open_session(access), Access(place, clock=clock)
    assert other.identify_session(token) is not None
    access.end_session(token)
    assert access.identify_session(token) is None
    clock.turn(seconds=2)
    assert other.identify_session(token) is None
    other.close()


def test_a_link_opens_one_session(access: Access) -> None:
    access.create("app", "query")
    link = access.make_link("app")
    assert access.identify_session(link) is None and access.identify_key(link) is None
    token = access.use_link(link, 60)
    assert token is not None and access.identify_session(token) is not None
    assert access.use_link(link, 60) is None


def test_of_many_who_use_a_link_at_once_one_gets_in(access: Access) -> None:
    access.create("app", "query")
    link, barrier, found = access.make_link("app"), threading.Barrier(6), list[str | None]()

    def use() -> None:
        barrier.wait(60)
        found.append(access.use_link(link, 60))

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6 and sum(token is not None for token in found) == 1


def test_a_link_works_for_a_quarter_of_an_hour(access: Access, clock: Clock) -> None:
    access.create("app", "query")
    first, second = access.make_link("app"), access.make_link("app")
    clock.turn(minutes=14, seconds=59)
    assert access.use_link(first, 60) is not None
    clock.turn(seconds=1)
    assert access.use_link(second, 60) is None


def test_the_sessions_of_a_key_are_bounded_and_the_latest_stay(access: Access, clock: Clock) -> None:
    secret = access.create("app", "query").secret
    tokens = []
    for _ in range(_MOST + 3):
        tokens.append(access.open_session(secret, 3600))
        clock.turn(seconds=1)
    clock.turn(seconds=2)
    alive = [token for token in tokens if token is not None and access.identify_session(token)]
    assert alive == tokens[3:]


def test_secrets_are_compared_whatever_is_given() -> None:
    assert is_same("abc", "abc") and not is_same("abd", "abc")
    assert not is_same("", "abc") and not is_same("\ud800é", "abc")
