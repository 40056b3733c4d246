"""A client of OpenAI-compatible servers: log-probabilities of given tokens, by `/v1/completions` with `echo`.

Connection errors, timeouts, 429 and 5xx are tried again after a pause. What a server answers is believed only if it
belongs to the tokens that were sent: each known way of getting it wrong is an error that names the cause.
"""

import http.client
import ipaddress
import json
import logging
import math
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from imprint.display import count_of
from imprint.errors import ReadoutError, first_line

logger = logging.getLogger(__name__)
_PAUSE, _LONGEST = 0.5, 30.0  # seconds before the second attempt, doubled for each further one, and at most
_ANSWER = 1 << 28  # bytes of an answer at most
_CLAMPED = -9999.0  # what vLLM reports for −∞
_TRIED_AGAIN = (408, 429, 500, 502, 503, 504)


class ServerGone(ReadoutError):
    """A server did not answer, however often it was asked."""


@dataclass(frozen=True)
class Answer:
    """What a server answered: the status, and the text of the answer."""

    status: int
    text: str

    @property
    def message(self) -> str:
        """The error message of an answer, on one line."""
        try:
            found = json.loads(self.text)
            error = found.get("error", found.get("detail", found))
            found = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, AttributeError):
            found = self.text
        return str(found).strip().split("\n")[0][:400] or "an empty answer"


@dataclass(frozen=True)
class Server:
    """A server at a URL such as http://127.0.0.1:8000, with or without /v1.

    timeout: seconds for a connection, and for each part of an answer. retries: attempts after the first one.
    """

    url: str
    timeout: float = 120.0
    retries: int = 4
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        scheme, host = _refuse_url(self.url)
        if scheme == "http" and self.api_key is not None and not _is_loopback(host):
            logger.warning("api_key goes to %s over plain http, where others can read it: use https", host)
        if not self.timeout > 0 or self.retries < 0:
            raise ReadoutError(f"timeout must be above 0 and retries at least 0, got {self.timeout}, {self.retries}.")

    def models(self) -> list[str] | None:
        """Return the names of what is served; None if the server has no list of them."""
        answer = self.ask("GET", "/v1/models")
        if answer.status != 200:
            return None
        listed = self._parse(answer).get("data")
        return [str(item.get("id")) for item in listed if isinstance(item, dict)] if isinstance(listed, list) else None

    def load(self, name: str, path: str) -> None:
        """Have the server load an adapter from a folder, as the server sees it."""
        body = {"lora_name": name, "lora_path": path}
        answer = self.ask("POST", "/v1/load_lora_adapter", body, again=(429, 502, 503, 504))
        if answer.status == 200 or "already been loaded" in answer.message:
            return
        _refuse_rank(answer)
        if answer.status in (404, 405) and path not in answer.message:
            raise ReadoutError(
                f"{self.url} loads no adapters while it runs: start it with the adapters (serve.sh does), or start "
                "vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True."
            )
        raise ReadoutError(f"{self.url} does not load the adapter {name!r} from {path}: {answer.message}.")

    def log_probs(self, model: str, ids: list[int], stop: threading.Event | None = None) -> list[float]:
        """Return the log-probability of every token but the first, given those before it, under a served model."""
        body = {"model": model, "prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0, "return_token_ids": True}
        answer = self.ask("POST", "/v1/completions", body, stop)
        if answer.status == 404:
            raise ReadoutError(f"{self.url} does not serve {model!r}: {answer.message}.")
        _refuse_rank(answer)
        if answer.status != 200:
            raise ReadoutError(
                f"{self.url} refuses {len(ids)} tokens for {model!r} with status {answer.status}: {answer.message}."
            )
        return self._read(self._parse(answer), model, ids)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        stop: threading.Event | None = None,
        again: tuple[int, ...] = _TRIED_AGAIN,
    ) -> Answer:
        """Send a request, again after a pause where that may help; return the answer, whatever its status.

        stop: gives up as soon as it is set.
        """
        began, pause, reason = time.monotonic(), _PAUSE, ""
        for attempt in range(self.retries + 1):
            if stop is not None and stop.is_set():
                break
            wait = pause
            try:
                answer, asked = self._once(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                reason = first_line(error) or type(error).__name__
            else:
                if answer.status not in again or "max_lora_rank" in answer.message:
                    return answer
                reason, wait = f"status {answer.status}, {answer.message}", max(pause, asked)
            if attempt < self.retries:
                (stop or threading.Event()).wait(min(wait, _LONGEST))
                pause *= 2
        raise ServerGone(
            f"{self.url} does not answer {path} ({reason}): {count_of(self.retries + 1, 'attempt')} in "
            f"{time.monotonic() - began:.0f} s."
        )

    def _once(self, method: str, path: str, body: Any) -> tuple[Answer, float]:
        """Send a request; return the answer, and the seconds that the server asks to wait for."""
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        connection: http.client.HTTPConnection
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(host, parts.port, timeout=self.timeout, context=context)
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            place = parts.path.rstrip("/").removesuffix("/v1") + path
            connection.request(method, place, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read(_ANSWER)
            if response.length:  # of a server that was killed: `read` returns what there is
                raise http.client.IncompleteRead(content, response.length)
            wait = response.getheader("Retry-After", "")
        finally:
            connection.close()
        return Answer(response.status, content.decode("utf-8", "replace")), float(wait) if wait.isdigit() else 0.0

    def _parse(self, answer: Answer) -> dict[str, Any]:
        try:
            found = json.loads(answer.text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ReadoutError(f"{self.url} answers something else than JSON ({answer.text[:60]!r}): is it a server?")
        return found

    def _read(self, found: dict[str, Any], model: str, ids: list[int]) -> list[float]:
        """Return the log-probabilities in an answer, once they are known to be those of the tokens."""
        choices = found.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(choice, dict) or not isinstance(values, list):
            raise ReadoutError(
                f"{self.url} returns no log-probabilities: it ignores `echo` or `logprobs`, as `transformers serve` "
                "does. Scores need a server that returns those of the prompt, such as vLLM."
            )
        if isinstance(answered := found.get("model"), str) and answered != model:
            raise ReadoutError(
                f"{self.url} was asked for {model!r} and answers as {answered!r}: it does not serve adapters by name."
            )
        _refuse_tokens(self.url, found, choice, ids)
        if len(values) > len(ids):
            raise ReadoutError(
                f"{self.url} returns {len(values)} log-probabilities for {len(ids)} tokens: it ignores "
                "`max_tokens: 0`, or adds tokens of its own."
            )
        if len(values) < len(ids) or any(value is None for value in values[1:]):
            raise ReadoutError(
                f"{self.url} returns log-probabilities for {sum(value is not None for value in values)} of {len(ids)} "
                "tokens: it ignores `echo`, or omits those of what its prefix cache holds, as some engines do: start "
                "it without that cache (vLLM: --no-enable-prefix-caching)."
            )
        return [_finite(self.url, position, value) for position, value in enumerate(values[1:], 1)]


def _refuse_url(url: str) -> tuple[str, str]:
    """Return the scheme and the host of a server's URL; refuse others, without repeating what may be secret."""
    shown = "one with a user name, a query or a fragment" if set("@?#").intersection(url) else repr(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # which would repeat parts of the URL
        raise ReadoutError(f"url must have a host and a port from 1 to 65535 after it, if any; got {shown}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ReadoutError(f"url must be that of a server, as in http://127.0.0.1:8000, got {shown}.")
    if "@" in parts.netloc:
        raise ReadoutError("url must not have a user name or a password: give the key of a server as api_key=.")
    if set("?#").intersection(url):
        raise ReadoutError(
            "url must end with the server's path, and has a query (?) or a fragment (#): leave that out."
        )
    return parts.scheme, parts.hostname


def _is_loopback(host: str) -> bool:
    """Tell whether a host is this machine.

    >>> _is_loopback("127.0.0.1"), _is_loopback("::1"), _is_loopback("localhost"), _is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _finite(url: str, position: int, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not _CLAMPED < value <= 1e-3:
        raise ReadoutError(f"{url} returns {value!r} as the log-probability of token {position}, which cannot be one.")
    return float(value)


def _refuse_rank(answer: Answer) -> None:
    if answer.status != 200 and "max_lora_rank" in answer.message:
        raise ReadoutError(
            f"the server was started for adapters of a lower rank ({answer.message}): raise --max-lora-rank to the `r` "
            "in adapter_config.json, as serve.sh of an export for vLLM does."
        )


def _refuse_tokens(url: str, found: dict[str, Any], choice: dict[str, Any], ids: list[int]) -> None:
    """Refuse an answer that is of other tokens than those that were sent, as far as it says."""
    seen = choice.get("prompt_token_ids")
    if isinstance(seen, list) and seen != ids:
        place = next((i for i, pair in enumerate(zip(seen, ids, strict=False)) if pair[0] != pair[1]), len(ids))
        raise ReadoutError(
            f"{url} read other tokens than were sent: {len(seen)} instead of {len(ids)}, the first difference at "
            f"position {place}. Its model has another tokenizer, or it adds tokens of its own."
        )
    usage = found.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if isinstance(count, int) and count != len(ids):
        raise ReadoutError(f"{url} read {count} tokens, and {len(ids)} were sent: it adds or drops some.")
