"""A writer that is killed loses nothing it has acknowledged, and writes nothing twice when it tries again."""

import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from imprint.credit import Ledger
from imprint.credit.verifying import verify
from tests.credit.crediting import EXPECTED, make_ledger, make_result

pytestmark = pytest.mark.system
KEYS = 5_000  # requests of a writer: more than it gets to


def write(place: str, first: int) -> None:
    """Credit one request after another, and say so once it is acknowledged; requests from `first` on are new."""
    ledger = Ledger(place)
    for number in range(max(0, first - 3), KEYS):  # tries again what it may have been killed in, as a caller does
        count = 1 + number % 4
        result, payloads = make_result(count, seed=number), [f"{number}-{each}".encode() for each in range(count)]
        receipt = ledger.credit(result, EXPECTED, payloads=payloads, key=f"key-{number}")
        print(number, *receipt.sequences, flush=True)


def kill_writers(place: str, times: int) -> None:
    """Kill a writer at random moments, start another, and compare what is there with what was acknowledged."""
    ledger, draw, acknowledged = Ledger(place), random.Random(0), dict[int, tuple[int, ...]]()
    for _ in range(times):
        code = f"from tests.credit.test_killing import write; write({place!r}, {len(acknowledged)})"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = itertools.islice(writer.stdout, draw.randrange(4, 12))
            for line in lines:  # waits for this many requests, then kills it within the next one
                note(acknowledged, line)
            os.kill(writer.pid, signal.SIGKILL)
            for line in writer.stdout:
                if line.endswith("\n"):
                    note(acknowledged, line)
        assert writer.returncode == -signal.SIGKILL
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


def note(acknowledged: dict[int, tuple[int, ...]], line: str) -> None:
    number, *sequences = map(int, line.split())
    assert acknowledged.setdefault(number, tuple(sequences)) == tuple(sequences), "the same request, other entries"


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
