"""Answers with a model server, and has each answer attributed and credited afterwards, without delaying it.

    vllm serve my-model --port 8000                          # or any server with the OpenAI API
    imprint serve runs/news my_model.py:task --ledger credit.db --policy policy.toml
    IMPRINT_KEY=imprint_... python examples/beside_vllm.py --model my-model "The old ship" "The new mayor"

What was answered is written to a spool, a SQLite file, before it is returned. A thread posts from there, under an
idempotency key that is kept with the answer: if this program or the service is restarted, nothing is lost, and nothing
is credited twice. What the service refuses because of the answer itself stays in the spool; --retry posts it again.
Any other refusal, such as that of a service without a ledger, is for its operator to mend: everything waits meanwhile.
"""

import argparse
import json
import logging
import os
import sqlite3
import sys
import threading
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from imprint.errors import ServiceError
from imprint.serve.client import Client

logger = logging.getLogger("beside_vllm")
FOR_GOOD = ("invalid", "no_number", "too_large", "too_long", "conflict")  # codes of refusals of the answer itself
TABLE = "CREATE TABLE IF NOT EXISTS spool (key TEXT PRIMARY KEY, query TEXT NOT NULL, refused TEXT)"


class Spool:
    """Answers on disk that are still to be credited, and a thread that posts them, the oldest first.

    most: how many may wait. Beyond that, answers are returned without being attributed, and `lost` counts them.
    """

    def __init__(self, place: Path, client: Client, most: int = 100_000) -> None:
        self._client, self._most, self.lost = client, most, 0
        self._database = sqlite3.connect(place, check_same_thread=False, isolation_level=None)
        place.chmod(0o600)  # prompts are in it
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")  # no wait for the disk: only a power cut loses an answer
        self._database.execute(TABLE)
        self._changed, self._closing = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="spool")
        self._thread.start()

    def __len__(self) -> int:
        """How many answers wait."""
        with self._changed:
            (count,) = self._database.execute("SELECT count(*) FROM spool WHERE refused IS NULL").fetchone()
        return int(count)

    def add(self, prompt: str, completion: str) -> None:
        """Keep an answer, to be credited in a moment."""
        query = json.dumps({"prompt": prompt, "completion": completion})
        if len(self) >= self._most:
            self.lost += 1
            logger.error("the spool is full: %d answers were not kept", self.lost)
            return
        with self._changed:
            self._database.execute("INSERT INTO spool (key, query) VALUES (?, ?)", (uuid.uuid4().hex, query))
            self._changed.notify_all()

    def retry(self) -> None:
        """Post once more what was refused, under the same keys."""
        with self._changed:
            self._database.execute("UPDATE spool SET refused = NULL")
            self._changed.notify_all()

    def close(self) -> None:
        """Post what waits as long as that succeeds; the rest stays for the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._database.close()

    def _work(self) -> None:
        while (row := self._take()) is not None:
            key, query = row
            try:
                self._client.attribute(json.loads(query), credit=True, idempotency_key=key)
            except ServiceError as error:
                if error.code not in FOR_GOOD:
                    logger.warning("%s", error)
                    with self._changed:
                        if self._closing or self._changed.wait_for(lambda: self._closing, timeout=5):
                            return
                    continue
                logger.error("an answer was refused: %s", error)  # it stays in the file, for a person to look at
                self._settle("UPDATE spool SET refused = ? WHERE key = ?", (str(error), key))
            else:
                self._settle("DELETE FROM spool WHERE key = ?", (key,))

    def _take(self) -> Any:
        """Wait for an answer to post; None once nothing is left and the spool is closing."""
        oldest = "SELECT key, query FROM spool WHERE refused IS NULL ORDER BY rowid LIMIT 1"
        with self._changed:
            while (row := self._database.execute(oldest).fetchone()) is None and not self._closing:
                self._changed.wait()
            return row

    def _settle(self, statement: str, values: tuple[str, ...]) -> None:
        with self._changed:
            self._database.execute(statement, values)


def complete(url: str, model: str, prompt: str) -> str:
    """Ask the model server for a completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="Default: the lines of standard input.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="The model server.")
    parser.add_argument("--service", default="http://127.0.0.1:8080", help="The service of Imprint.")
    parser.add_argument("--spool", type=Path, default=Path("answers.spool"))
    parser.add_argument("--retry", action="store_true", help="Post again what the service refused.")
    arguments = parser.parse_args()
    spool = Spool(arguments.spool, Client(arguments.service, os.environ["IMPRINT_KEY"], patience=10))
    if arguments.retry:
        spool.retry()
    try:
        for prompt in arguments.prompts or map(str.rstrip, sys.stdin):
            completion = complete(arguments.server, arguments.model, prompt)
            spool.add(prompt, completion)
            print(completion, flush=True)
    finally:
        spool.close()


if __name__ == "__main__":
    main()
