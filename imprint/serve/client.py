"""A client of the service, for which the extra `serve` is not needed.

    client = Client("http://127.0.0.1:8080", key)
    answer = client.attribute({"prompt": "The old ship", "completion": " sails on"}, credit=True)

Whatever fails on the way is tried again. A crediting request has an idempotency key of its own, which is the same each
time it is tried, so it credits once however often it is sent. If it is given up, the error has this key.
"""

import http.client
import json
import random
import re
import ssl
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from imprint.errors import ConfigurationError, DataError, ServiceError

_AGAIN = (429, 503, 504)
_FIRST, _LONGEST = 0.1, 10.0  # seconds between tries, which double
_MOST_BYTES = 64 << 20  # of an answer
_NAMING = "Idempotency-Key"
_KEY = re.compile("[!-~]{1,200}")


@dataclass(frozen=True)
class Effect:
    """What one source does to a query.

    removal_effect: the change of the measurement if the source were removed.
    standard_error: of the effect; None where it is unknown.
    distinguishable: whether the effect can be told from 0; None where that is unknown.
    share: of what the query pays, under the service's policy; None without one.
    """

    source: str
    name: str
    removal_effect: float
    standard_error: float | None
    distinguishable: bool | None
    share: float | None


@dataclass(frozen=True)
class Query:
    """What the sources do to one query, those with the largest effects first.

    answer: what was attributed: the class, or the completion; None if an earlier request credited the query, and it
        cannot be shown any more.
    entry: the entry of the ledger; None if the query was not credited.
    """

    answer: str | None
    effects: tuple[Effect, ...]
    unattributed: float | None
    entry: int | None


@dataclass(frozen=True)
class Answer:
    """What a request was answered with.

    question, meaning: which question the effects answer. validation, warnings: how far they can be trusted.
    measure, unit: what the effects change, and the meaning of their sign. better: whether the measure is better "lower"
        or "higher"; None where that is unknown. A source without which a log-likelihood falls, helps.
    repeated: whether the request had been credited before, by an earlier try.
    milliseconds: that the service took, and for what.
    json: all of the answer.
    """

    question: str
    meaning: str
    measure: str
    unit: str
    better: str | None
    queries: tuple[Query, ...]
    validation: dict[str, Any]
    warnings: tuple[str, ...]
    repeated: bool
    milliseconds: dict[str, float]
    json: dict[str, Any] = field(repr=False)


class Client:
    """Asks a service for attributions.

    key: an API key, as `imprint access create` shows it.
    timeout: seconds for each try. patience: seconds after which a request is given up, with all its tries.
    insecure: allow http to other machines, by which anybody on the way can read the key.

    Every thread has a connection of its own, so one client serves all of them.
    """

    def __init__(
        self, url: str, key: str, *, timeout: float = 60.0, patience: float = 300.0, insecure: bool = False
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigurationError("the address of a service is such as https://imprint.example.org.")
        if parts.username is not None:
            raise ConfigurationError("an address has no user: the service takes an API key.")
        if parts.scheme == "http" and not insecure and not _is_loopback(parts.hostname):
            raise ConfigurationError(
                f"{parts.hostname} is another machine, and http would show it the key unencrypted: use https, or "
                "insecure=True on a network that you trust."
            )
        if not _KEY.fullmatch(key):
            raise ConfigurationError("this is no API key: it has characters that no key has.")
        self.host, self.port, self._https = parts.hostname, parts.port, parts.scheme == "https"
        self._path, self._key, self.timeout, self.patience = parts.path.rstrip("/"), key, timeout, patience
        self._context = ssl.create_default_context() if self._https else None
        self._local = threading.local()

    def __repr__(self) -> str:
        return f"Client({'https' if self._https else 'http'}://{self.host}:{self.port or ''}{self._path})"

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection of this thread."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
            self._local.connection = None

    def attribute(
        self,
        query: Any = None,
        *,
        queries: Sequence[Any] | None = None,
        top: int | None = None,
        credit: bool = False,
        idempotency_key: str | None = None,
    ) -> Answer:
        """Return the effect of removing each source on one query, or on several.

        top: how many sources to list; by default, as many as the service chooses.
        credit: credit the queries in the service's ledger, once.
        idempotency_key: names what is credited. Give one of your own, such as the id of an answer, where the request
            may also be sent by another process, or after a restart; else the client makes one. A `ServiceError` has it
            too: whether a request was credited that was given up is unknown until it is sent again.
        """
        if (query is None) == (queries is None):
            raise ConfigurationError("give either a query, or queries=[...].")
        if idempotency_key is not None and not credit:
            raise ConfigurationError("an idempotency key names what is credited: it goes with credit=True.")
        if idempotency_key is not None and not _KEY.fullmatch(idempotency_key):
            raise ConfigurationError("an idempotency key has 1 to 200 printable ASCII characters without spaces.")
        body: dict[str, Any] = {"query": query} if queries is None else {"queries": list(queries)}
        body |= {"top": top} if top is not None else {}
        if not credit:
            return _read_answer(self._ask("POST", "/v1/attributions", body))
        name = idempotency_key or uuid.uuid4().hex
        try:
            return _read_answer(self._ask("POST", "/v1/attributions", {**body, "credit": True}, {_NAMING: name}))
        except ServiceError as error:
            error.idempotency_key = name
            raise

    def sources(self) -> list[dict[str, Any]]:
        """Return the sources of the store, with their sizes and what is known of them."""
        sources: list[dict[str, Any]] = self._ask("GET", "/v1/sources")
        return sources

    def store(self) -> dict[str, Any]:
        """Return what is served, and what a query is."""
        about: dict[str, Any] = self._ask("GET", "/v1/store")
        return about

    def ready(self) -> bool:
        """Tell whether the service can answer, without trying again."""
        try:
            return self._send("GET", "/readyz", None, {})[0] == 200
        except (OSError, http.client.HTTPException):
            self.close()
            return False

    def _ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """Return the JSON of an answer; try again as long as that may help."""
        content = None if body is None else _write_json(body)
        given_up, pause = time.monotonic() + self.patience, _FIRST
        while True:
            refusal: ServiceError
            kept = getattr(self._local, "connection", None) is not None
            try:
                status, answered, after = self._send(method, path, content, headers or {})
                if status == 200:
                    return _parse(answered)
                refusal = _explain(status, answered)
                if status not in _AGAIN:
                    raise refusal
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise ServiceError(f"{self!r} has no certificate to be trusted: {error.verify_message}.") from error
                self.close()
                if kept and not isinstance(error, TimeoutError):
                    continue  # the service closes idle connections: a new one may be answered at once
                after, refusal = 0.0, ServiceError(f"{self!r} cannot be reached: {type(error).__name__}.")
                refusal.__cause__ = error
            wait = max(after, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait >= given_up:
                raise refusal
            time.sleep(wait)
            pause = min(2 * pause, _LONGEST)

    def _send(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, float]:
        """Send a request once; return the status, the body, and the seconds to wait before another try."""
        connection = self._connect()
        sent = {"Authorization": f"Bearer {self._key}", "Accept": "application/json", **headers}
        if content is not None:
            sent["Content-Type"] = "application/json"
        connection.request(method, self._path + path, content, sent)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES + 1)
        if len(body) > _MOST_BYTES:
            self.close()
            raise ServiceError(f"the answer of {self!r} is larger than {_MOST_BYTES:,} bytes.")
        if response.length:  # of a service that was killed: `read` returns what there is
            raise http.client.IncompleteRead(body, response.length)
        after = response.getheader("Retry-After", "")
        return response.status, body, float(after) if re.fullmatch("[0-9]{1,4}", after) else 0.0

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            if self._https:
                connection = http.client.HTTPSConnection(
                    self.host, self.port, timeout=self.timeout, context=self._context
                )
            else:
                connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
            self._local.connection = connection
        return connection


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _write_json(body: Any) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"a query is made of JSON values: {error}.") from error


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ServiceError("the answer is no JSON: is this the address of a service?") from error


def _explain(status: int, body: bytes) -> ServiceError:
    """Return the error that an answer stands for."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        code, message = "unknown", "the answer does not say why."
    return ServiceError(f"refused with status {status} ({code}): {message}", status=status, code=code)


def _read_answer(content: Any) -> Answer:
    try:
        return Answer(
            content["question"],
            content["meaning"],
            content["measure"],
            content["unit"],
            content["better"],
            tuple(map(_read_query, content["queries"])),
            content["validation"],
            tuple(content["warnings"]),
            content["repeated"],
            content["milliseconds"],
            content,
        )
    except (KeyError, TypeError) as error:
        raise ServiceError("the answer is not that of a service of this version.") from error


def _read_query(content: Any) -> Query:
    names = Effect.__dataclass_fields__
    effects = tuple(Effect(**{name: effect[name] for name in names}) for effect in content["sources"])
    return Query(content["answer"], effects, content["unattributed"], content["entry"])
