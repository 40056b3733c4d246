"""Small results by hand, ledgers of them, and databases to keep these in."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imprint.attribution.labels import Labels
from imprint.attribution.replicates import Replicates
from imprint.attribution.result import Attribution
from imprint.credit import Ledger, Policy, Tariff
from imprint.plan import Question
from imprint.validation.verdict import Figures, Verdict

SOURCES = ("blog", "post", "times", "wire")
EXPECTED, THIS_RUN = Policy("house", question="expected"), Policy("audit", question="this_run")
GOOD = Figures(100, 8, 8, 3, correlation=0.9, p=0.001, slope=1.0, slope_low=0.8, slope_high=1.25, by_size=0.2,
               ceiling=0.95, agreement=0.001)  # fmt: skip
BAD = Figures(100, 8, 8, 3, correlation=0.01, p=0.6, slope=0.1, slope_low=-0.8, slope_high=1.0, by_size=0.2,
              ceiling=0.95, agreement=0.001)  # fmt: skip


def labels(question: Question = "expected", figures: Figures | None = GOOD, **changes: Any) -> Labels:
    fields: dict[str, Any] = {
        "n": 40,
        "source_ids": SOURCES,
        "source_names": SOURCES,
        "source_sizes": (10, 10, 5, 15),
        "measure": "loss",
        "better": "lower",
        "details": {"readout": "jvp", "examples_of_several_sources": 0},
        "fingerprints": {"store": "5" * 64, "model": "a" * 64, "sources": "b" * 64},
        "question": question,
        "validation": None if figures is None else Verdict(question, figures),
    }
    return Labels(**{**fields, **changes})


def draw_scores(queries: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -40 * (torch.randn(queries, 4, generator=generator, dtype=torch.float64) + torch.tensor([-0.5, 0, 0.5, 1]))


def make_result(queries: int = 3, seed: int = 0, runs: int = 4, **changes: Any) -> Attribution:
    """A result over several runs, whose effects have a standard deviation of a tenth."""
    scores = draw_scores(queries, seed)
    noise = 4 * torch.randn(runs, queries, 4, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    replicates = Replicates(noise - noise.mean(0), (1 / runs,) * runs, tuple(map(str, range(runs))))
    return Attribution(labels(**changes), scores, replicates=(replicates,))


def make_ledger(place: str | Path, per_query: int | None = 2_000) -> Ledger:
    return Ledger.create(place, Tariff("EUR", per_query=per_query))


def fill(ledger: Ledger, batches: Sequence[int] = (3, 1, 4), policy: Policy = EXPECTED, **options: Any) -> None:
    for seed, count in enumerate(batches):
        ledger.credit(make_result(count, seed), policy, **options)


class Server:
    """A private PostgreSQL server in a folder, reached through a socket there alone.

    PostgreSQL does not run as root: there it runs as the user "postgres", or "nobody".
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._binaries = Path(_find_binaries() or "")
        self._user = None if os.geteuid() else _find_user()
        folder.mkdir(mode=0o711)
        if self._user is not None:
            shutil.chown(folder, self._user)
        self._data, self._databases = folder / "data", 0
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c max_connections=40"
        self._run("pg_ctl", "-D", str(self._data), "-o", options, "-w", "-l", str(folder / "log"), "start")

    def _run(self, command: str, *arguments: str) -> None:
        given = [str(self._binaries / command), *arguments]
        if self._user is not None:
            given = ["runuser", "-u", self._user, "--", *given]
        done = subprocess.run(given, capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0, done.stderr + done.stdout

    def make_database(self) -> str:
        """Make an empty database; return its URL."""
        self._databases += 1
        name = f"ledger{self._databases}"
        self._run("createdb", "-h", str(self.folder), "-U", "postgres", name)
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "stop")


def _find_binaries() -> str | None:
    """Return the folder of PostgreSQL's programs; Debian keeps them out of the path."""
    if found := shutil.which("initdb"):
        return str(Path(found).resolve().parent)
    return next((str(path.parent) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))[::-1]), None)


def has_postgres() -> bool:
    return _find_binaries() is not None and (os.geteuid() != 0 or shutil.which("runuser") is not None)


def _find_user() -> str:
    names = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
