"""A writer that is killed loses nothing it has acknowledged, and writes nothing twice when it tries again."""

import multiprocessing
import random
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from imprint.credit import Ledger
from imprint.credit.verifying import verify
from tests.credit.crediting import EXPECTED, make_ledger, make_result

pytestmark = pytest.mark.system
KEYS = 5_000  # requests of a writer: more than it gets to
LONGEST = 0.02  # seconds, about what a request takes
FORKS = multiprocessing.get_context("forkserver")  # imports once: a writer then starts in milliseconds, not in seconds
FORKS.set_forkserver_preload([__name__])


def write(place: str, first: int, answers: Connection) -> None:
    """Credit one request after another, and say so once it is acknowledged; requests from `first` on are new."""
    torch.set_num_threads(1)
    ledger = Ledger(place)
    for number in range(max(0, first - 3), KEYS):  # tries again what it may have been killed in, as a caller does
        count = 1 + number % 4
        result, payloads = make_result(count, seed=number), [f"{number}-{each}".encode() for each in range(count)]
        receipt = ledger.credit(result, EXPECTED, payloads=payloads, key=f"key-{number}")
        answers.send((number, receipt.sequences))


def kill_writers(place: str, times: int) -> None:
    """Kill a writer at random moments, start another, and compare what is there with what was acknowledged."""
    ledger, draw, acknowledged = Ledger(place), random.Random(0), dict[int, tuple[int, ...]]()
    for _ in range(times):
        answers, given = FORKS.Pipe(duplex=False)
        writer = FORKS.Process(target=write, args=(place, len(acknowledged), given))
        writer.start()
        given.close()  # so that the answers end when the writer does
        for _ in range(draw.randrange(4, 8)):  # waits for this many requests, then kills it within the next one
            note(acknowledged, *answers.recv())
        time.sleep(draw.uniform(0, LONGEST))
        writer.kill()
        try:
            while True:
                note(acknowledged, *answers.recv())
        except EOFError:
            answers.close()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
    written = {leaf.sequence: leaf for leaf in ledger.entries(kind="credit")}
    places = [place for places in acknowledged.values() for place in places]
    assert len(set(places)) == len(places) and set(places) <= set(written)
    unacknowledged = set(written) - set(places)
    assert len(unacknowledged) <= 4  # those of one request, that was written when the last writer was killed
    assert len({(leaf.about["payload"]) for leaf in written.values()}) == len(written)
    asked = [ledger.payload(sequence) for sequence in written]
    assert len(set(asked)) == len(asked)
    assert verify(ledger, progress=False).holds
    ledger.close()


def note(acknowledged: dict[int, tuple[int, ...]], number: int, sequences: tuple[int, ...]) -> None:
    assert acknowledged.setdefault(number, sequences) == sequences, "the same request, other entries"


def test_a_killed_writer_loses_nothing_and_repeats_nothing(place: str) -> None:
    make_ledger(place).close()
    kill_writers(place, 5)


@pytest.mark.long
def test_a_writer_that_is_killed_a_hundred_times_loses_nothing(place: str) -> None:
    make_ledger(place).close()
    kill_writers(place, 100)


def test_a_ledger_that_is_killed_while_it_is_made_is_made_again(tmp_path: Path) -> None:
    """Making a ledger is one transaction: there is none, or a whole one."""
    code = (
        "import os, signal\nfrom imprint.credit import log\nfrom tests.credit.crediting import make_ledger\n"
        "before = log.append\n"
        "log.append = lambda *given: (before(*given), os.kill(os.getpid(), signal.SIGKILL))\n"
        f"make_ledger({str(tmp_path / 'credit.db')!r})"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == -signal.SIGKILL
    ledger = make_ledger(tmp_path / "credit.db")
    assert len(ledger) == 2 and verify(ledger, progress=False).holds
