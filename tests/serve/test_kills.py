"""Every acknowledged credit exists exactly once: under load, with kill -9, with several processes, and at shutdown."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imprint.credit import verify
from imprint.errors import ServiceError
from imprint.serve.client import Client
from tests.serve.news import News
from tests.serve.processes import Served, Site, make_site

pytestmark = pytest.mark.system
THREADS = 4
PATIENCE = 120.0  # seconds that a client tries again, while a process that was killed is started anew
LONGEST = 0.05  # seconds from an acknowledgement to a kill: some requests are then at every stage
Ask = Callable[[Any, str], tuple[int, ...]]


class Load:
    """Threads that credit request after request, and note what was acknowledged."""

    def __init__(self, news: News, asks: list[Ask]) -> None:
        self._news, self._stopping = news, threading.Event()
        self.acknowledged: dict[str, tuple[int, ...]] = {}
        self.errors: list[Exception] = []
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, args=pair) for pair in enumerate(asks)]
        for thread in self._threads:
            thread.start()

    def _work(self, thread: int, ask: Ask) -> None:
        for number in range(100_000):
            if self._stopping.is_set():
                return
            queries = [self._news.ask((number + place) % 40) for place in range(1 + number % 3)]
            key = f"{thread}-{number}"
            try:
                entries = ask(queries, key)
            except Exception as error:
                with self._changed:
                    self.errors.append(error)
                    self._changed.notify_all()
                return
            assert len(entries) == len(queries)
            with self._changed:
                self.acknowledged[key] = entries
                self._changed.notify_all()

    def wait_for(self, more: int, thread: str = "") -> None:
        """Wait until so many further requests, of all threads or of one, were acknowledged."""
        with self._changed:
            target = more + self._count(thread)
            assert self._changed.wait_for(lambda: self._count(thread) >= target or self.errors, PATIENCE)
        assert not self.errors

    def _count(self, thread: str) -> int:
        return sum(key.startswith(thread) for key in self.acknowledged)

    def finish(self) -> None:
        """Send no new requests, and wait for those that were sent."""
        self._stopping.set()
        self.wait_for_threads()
        assert not self.errors

    def wait_for_threads(self) -> None:
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive()


def ask_one(client: Client) -> Ask:
    def ask(queries: Any, key: str) -> tuple[int, ...]:
        answer = client.attribute(queries=queries, credit=True, idempotency_key=key)
        return tuple(query.entry for query in answer.queries if query.entry is not None)

    return ask


def check_ledger(site: Site, acknowledged: dict[str, tuple[int, ...]]) -> None:
    """The ledger has what was acknowledged, once, and nothing else."""
    with site.open_ledger() as ledger:
        places = [place for places in acknowledged.values() for place in places]
        assert len(set(places)) == len(places)
        assert sorted(leaf.sequence for leaf in ledger.entries(kind="credit")) == sorted(places)
        assert verify(ledger, progress=False).holds


@pytest.fixture(params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, news: News, tmp_path: Path) -> Site:
    place = str(tmp_path / "credit.db")
    if request.param == "postgres":
        place = request.getfixturevalue("server").make_database()
    return make_site(news, tmp_path, place)


def kill_and_restart(site: Site, news: News, rounds: int, seed: int) -> None:
    draw, served = random.Random(seed), Served(site).wait_until_ready()
    port, load = served.port, None
    client = Client(served.url, site.secret, patience=PATIENCE)
    try:
        load = Load(news, [ask_one(client)] * THREADS)
        for _ in range(rounds):
            load.wait_for(draw.randrange(3, 12))
            time.sleep(draw.uniform(0, LONGEST))
            served.kill()
            served = Served(site, port).wait_until_ready()
        load.wait_for(THREADS)
        load.finish()
        assert served.stop() == 0
    finally:
        served.__exit__()
    assert len(load.acknowledged) >= 3 * rounds
    check_ledger(site, load.acknowledged)


def test_what_was_acknowledged_is_credited_once_however_often_the_process_is_killed(site: Site, news: News) -> None:
    kill_and_restart(site, news, rounds=5, seed=0)


@pytest.mark.long
def test_the_same_over_more_kills(site: Site, news: News) -> None:
    kill_and_restart(site, news, rounds=20, seed=1)


def test_two_processes_share_a_ledger_and_one_goes_on_when_the_other_is_killed(
    news: News, tmp_path: Path, server: Any
) -> None:
    site = make_site(news, tmp_path, server.make_database())
    with Served(site, name="one") as one, Served(site, name="other") as other:
        hasty, steady = Client(one.url, site.secret, patience=1), Client(other.url, site.secret, patience=PATIENCE)

        def fail_over(queries: Any, key: str) -> tuple[int, ...]:
            """Ask one process; if it does not answer, ask the other, with the same key."""
            try:
                return ask_one(hasty)(queries, key)
            except ServiceError:
                return ask_one(steady)(queries, key)

        load = Load(news, [fail_over, fail_over, ask_one(steady), ask_one(steady)])
        load.wait_for(5, "0-")
        load.wait_for(5, "2-")
        one.kill()
        load.wait_for(5, "2-")  # by the process that is left, which nobody restarts
        load.wait_for(3, "0-")
        load.finish()
        assert other.stop() == 0
    check_ledger(site, load.acknowledged)


def test_a_process_that_is_told_to_stop_answers_what_it_accepted_and_exits_with_0(site: Site, news: News) -> None:
    """Whatever was credited was also answered: no client tries again here."""
    with Served(site) as served:
        client = Client(served.url, site.secret, patience=0.01)
        refused = threading.Event()

        def ask(queries: Any, key: str) -> tuple[int, ...]:
            try:
                return ask_one(client)(queries, key)
            except ServiceError:
                refused.set()
                raise

        load = Load(news, [ask] * THREADS)
        load.wait_for(10)
        assert served.stop() == 0
        assert refused.wait(PATIENCE)
        load.wait_for_threads()
    check_ledger(site, load.acknowledged)
    log = served.log.read_text(encoding="utf-8")
    assert '"event": "stopped"' in log and "Traceback" not in log
