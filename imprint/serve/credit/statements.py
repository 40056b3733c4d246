"""The statements of closed periods: written once for all sources of a period, by each process that serves them.

Files that were there before are written again: somebody may have changed them since.
"""

import logging
import tempfile
import threading
from pathlib import Path

from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.naming import name_files
from imprint.credit.statements import write_statements
from imprint.errors import CreditUnavailable, DamagedLog, ImprintError
from imprint.serve.errors import ApiError

logger = logging.getLogger("imprint.serve")
SUFFIXES = ("html", "csv", "parquet", "jsonl")
_WAIT = 5.0  # seconds that a request waits for statements that are being written


class Writing(ApiError):
    """Statements are being written."""

    def __init__(self) -> None:
        text = "the statements of this period are being written. Try again in a moment."
        super().__init__(503, "writing", text, {"Retry-After": "5"})


class NotWritten(ApiError):
    """Statements could not be written, as where the disk is full; the log of the service says why."""

    def __init__(self) -> None:
        text = "the statements of this period could not be written. The operator of this service has to find out why."
        super().__init__(503, "not_written", text, {"Retry-After": "60"})


class Statements:
    """Writes and finds statements."""

    def __init__(self, ledger: Ledger, folder: Path | None) -> None:
        self._ledger, self._folder = ledger, folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._lock, self._jobs = threading.Lock(), dict[Path, _Job]()
        self._written = set[Path]()

    def find(self, closing: Leaf, source: str, suffix: str) -> Path:
        """Return a file of the statement of a source; write those of the period first if they are not there."""
        name = _prefix(closing.about["period"]) + name_files([row["source"] for row in closing.rows])[source]
        folder = self._place(closing)
        file = folder / f"{name}.{suffix}"
        if folder in self._written and self._is_there(folder, name):
            return file
        with self._lock:
            job = self._jobs.get(folder)
            if job is None:
                job = self._jobs[folder] = _Job(self._ledger, closing.about["period"], folder)
        if not job.wait(_WAIT):
            raise Writing
        with self._lock:
            self._jobs.pop(folder, None)
        if isinstance(job.error, DamagedLog | CreditUnavailable):
            raise type(job.error)(str(job.error)) from job.error.__cause__
        if job.error is not None:
            reason = str(job.error) if isinstance(job.error, ImprintError | OSError) else type(job.error).__name__
            logger.error("the statements of %s could not be written: %s", closing.about["period"], reason)
            raise NotWritten from job.error
        self._written.add(folder)
        return file

    def _is_there(self, folder: Path, name: str) -> bool:
        """Tell whether all files of a statement are there; the last one is moved to its place last."""
        return (folder / f"{name}.{SUFFIXES[-1]}").is_file()

    def _place(self, closing: Leaf) -> Path:
        """Return the folder of a period: by the name of its log, because another log may have a period of that name."""
        with self._lock:
            if self._folder is None:
                self._temporary = tempfile.TemporaryDirectory(prefix="imprint-statements-", ignore_cleanup_errors=True)
                self._folder = Path(self._temporary.name)
        return self._folder / self._ledger.name / f"{closing.sequence}-{closing.about['period']}"

    def close(self) -> None:
        """Wait a little for what is being written, and remove the folder if it was a temporary one."""
        for job in list(self._jobs.values()):
            job.wait(_WAIT)
        if self._temporary is not None:
            self._temporary.cleanup()


def _prefix(period: str) -> str:
    """Return what file names begin with: pages name files, and downloads of several periods meet in one folder."""
    return f"{period}-"


class _Job:
    """Writes the statements of one period in a thread."""

    def __init__(self, ledger: Ledger, period: str, folder: Path) -> None:
        self.error: Exception | None = None
        self._ledger, self._period, self._folder = ledger, period, folder
        self._ended = threading.Event()
        threading.Thread(target=self._work, name="imprint-statements", daemon=True).start()

    def _work(self) -> None:
        try:
            prefix = _prefix(self._period)
            write_statements(self._ledger, self._period, self._folder, prefix=prefix, progress=False)
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether it has ended."""
        return self._ended.wait(timeout)
