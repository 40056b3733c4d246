"""Requests that nobody means well with, drawn from a seed: bodies, parameters, headers, methods, and who asks.

Each has a marker that must never come back as markup, and says whether whoever asks has a key at all.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from imprint.serve.access.roles import Role
from tests.serve.calling import HOST, Raw

MARKUP = "<script>alert(7777)</script>"
VALID: dict[str, Any] = {"values": [0.1, -0.2, 0.3, 0.4], "label": 1}
TEXTS: tuple[str, ...] = (
    MARKUP,
    f"\"'><img src=x onerror=alert(7777)>{MARKUP}",
    "' OR '1'='1' --",
    "'; DROP TABLE keys; --",
    "{{7*7}} {% raw %} ${7*7} #{7*7}",
    "../../../../etc/passwd",
    "\x00\x01\x1b[31m",
    "\u202e\u200b\ufeff\u2028",
    "\r\nSet-Cookie: imprint=stolen\r\n\r\n",
    "%s%n%x {0.__class__} %(asctime)s",
    "𝕬" * 300,
    "a" * 20_000,
    "٣",
    "-0",
    "1e999",
    "NaN",
    "99999999999999999999999999",
    "null",
    "",
    " ",
    "publisher-0",
    "rule:positive_part",
    "publisher-0.csv",
    "2026-10",
    "2026-11-31",
    "9999-12-31T23:59:59.999999+23:59",
    "0001-01-01T00:00:00-23:59",
    "=cmd|' /C calc'!A0",
)
_JSON: tuple[Callable[[random.Random], bytes], ...] = (
    lambda r: b"[" * r.choice((10, 500, 100_000)),
    lambda r: b'{"query":' * r.choice((10, 500, 50_000)) + b"1",
    lambda r: b'{"query": {"values": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    lambda r: b'{"query": {"values": [NaN, Infinity, -Infinity, 1]}}',
    lambda r: b'{"query": {"values": [1e999, 1, 1, 1]}}',
    lambda r: b'{"query": {"values": [1e30, -1e30, 1e30, 1e30]}}',
    lambda r: b'{"query": {"values": [' + b"9" * 5000 + b", 1, 1, 1]}}",
    lambda r: b'{"query": {"values": [1, 1, 1, 1], "label": ' + b"9" * 5000 + b"}}",
    lambda r: b'{"query": {"values": [1, 1, 1, 1]}, "query": {"values": [2, 2, 2, 2]}}',
    lambda r: b'{"query": {"values": [1, 1, 1, 1]}, "credit": true, "credit": false}',
    lambda r: b"\xff\xfe{\x00}\x00",
    lambda r: b"\xef\xbb\xbf" + json.dumps({"query": VALID}).encode(),
    lambda r: b'{"query": "\xff\xfe\x80"}',
    lambda r: b'{"query": "\\ud800", "\\udfff": 1}',
    lambda r: json.dumps({"query": VALID}).encode() + b"{}",
    lambda r: b"\x00" * r.choice((1, 1000)),
    lambda r: b"x" * r.choice((1, 70_000)),
    lambda r: bytes(r.randrange(256) for _ in range(r.randrange(1, 200))),
    lambda r: b"",
    lambda r: json.dumps(r.choice([None, True, 7, "x", [], [[]], {}])).encode(),
    lambda r: json.dumps({"query": VALID, r.choice(TEXTS): 1}).encode(),
    lambda r: json.dumps({"query": draw_value(r, 3)}).encode(),
    lambda r: json.dumps({"query": {**VALID, "label": draw_value(r, 1)}}).encode(),
    lambda r: json.dumps({"query": {"values": [draw_value(r, 1) for _ in range(4)]}}).encode(),
    lambda r: json.dumps({"queries": draw_value(r, 3)}).encode(),
    lambda r: json.dumps({"queries": [VALID] * r.choice((0, 1, 65, 3000))}).encode(),
    lambda r: json.dumps({"query": VALID, "queries": [VALID]}).encode(),
    lambda r: json.dumps({"query": VALID, "top": draw_value(r, 1)}).encode(),
    lambda r: json.dumps({"query": VALID, "credit": draw_value(r, 1)}).encode(),
    lambda r: json.dumps({"query": VALID, "credit": True}).encode(),
    lambda r: json.dumps({"query": VALID}).encode("utf-16"),
    lambda r: json.dumps({"query": VALID}).encode(),
)
_KINDS = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json\t",
    "",
    "a" * 500,
)
_METHODS = ("GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "get", "G" * 300)
_PARAMETERS = ("source", "from", "until", "period", "rule", "query", "before", "limit", "policy", "next", "top", "page")
_FIELDS = (
    *("csrf", "key", "next", "name", "role", "sources", "days", "values", "label", "credit", "choice", "token"),
    *("query", "prompt", "completion", "source", "policy"),
)
_FORMS: tuple[tuple[str, str], ...] = (
    ("values", "0.1 0.2 0.3 0.4"),
    ("values", "NaN 1 1 1"),
    ("values", "1e999, 1, 1, 1"),
    ("values", "9" * 5000),
    ("label", "1"),
    ("label", "-1"),
    ("label", "9" * 5000),
    ("choice", "0"),
    ("choice", "99999999999999999999"),
    ("query", json.dumps(VALID)),
    ("query", "[" * 50_000),
    ("query", '{"values": [NaN]}'),
    ("query", '"\\ud800"'),
    ("credit", "1"),
    ("token", "a" * 500),
    ("role", "publisher"),
    ("sources", "publisher-0\r\npublisher-99"),
    ("days", "0"),
)
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("x-forwarded-for", ("127.0.0.1", MARKUP)),
    ("x-forwarded-host", ("evil.example",)),
    ("x-original-url", ("/keys",)),
    ("x-http-method-override", ("DELETE",)),
    ("x-request-id", (MARKUP, "a\tb", "x" * 5000, "ok-1")),
    ("idempotency-key", ("", "a" * 300, "é", MARKUP, "a b", "good-1", "good-2", "good-3")),
    ("x-csrf-token", ("", "wrong", "é" * 50)),
    ("range", ("bytes=0-99999999999", "bytes=-1", "x" * 300, "bytes=" + "0-1," * 2000)),
    ("if-none-match", ("*", '"' * 3000)),
    ("if-modified-since", ("x", "Thu, 99 Foo 99999")),
    ("accept", ("text/html", "*/*;q=nan", "x" * 4000)),
    ("accept-language", ("x-" * 4000,)),
    ("origin", ("https://evil.example", "null")),
    ("sec-fetch-site", ("cross-site",)),
    ("content-encoding", ("gzip", "br")),
    ("content-length", ("0", "5", "-1", "1e3", "99999999999999999999")),
    ("transfer-encoding", ("chunked", "gzip, chunked")),
    ("expect", ("100-continue", "x")),
    ("upgrade", ("websocket", "h2c")),
    ("connection", ("close", "upgrade", "keep-alive, authorization")),
    ("x-note", ("a\r\nset-cookie: imprint=stolen", "a\0b", "\x7f")),
    ("cookie", ("imprint=" + "A" * 43, "imprint=; imprint=x", "imprint=" + "é" * 43, ";" * 3000, "a=b" * 5000)),
)


@dataclass(frozen=True)
class Attack:
    """A request. role: whose key or session it has; None for nobody's."""

    method: str
    path: bytes
    query: bytes
    headers: Raw
    pieces: list[bytes]
    role: Role | None
    route: str

    def __str__(self) -> str:
        shown = [(name, value[:60]) for name, value in self.headers]
        where = f"{self.method[:20]} {self.path[:100]!r}?{self.query[:100]!r}"
        return f"{where} as {self.role} {shown} {self.pieces[:1]!r:.200}"


@dataclass(frozen=True)
class Held:
    """What attackers may hold: keys and sessions by role, CSRF tokens, and secrets that open nothing any more."""

    keys: dict[Role, str]
    sessions: dict[Role, str]
    csrf: dict[Role, str]
    stale: tuple[str, ...]


def draw_value(r: random.Random, depth: int) -> Any:
    """Return some JSON value."""
    if depth and r.random() < 0.5:
        if r.random() < 0.5:
            return [draw_value(r, depth - 1) for _ in range(r.randrange(5))]
        keys = (*TEXTS[:6], "values", "label", "prompt", "completion")
        return {r.choice(keys): draw_value(r, depth - 1) for _ in range(r.randrange(4))}
    plain = (None, True, False, -1, 0, 3, 10**40, -(2**63), 0.1, 1e308, -0.0, 5e-324, 1.5)
    return r.choice((*plain, *TEXTS))


def draw_attack(r: random.Random, routes: Sequence[str], held: Held) -> Attack:
    """Return a request against some route, from somebody."""
    route = r.choice(routes)
    method, _, path = route.partition(" ")
    role: Role | None = r.choice((None, *held.keys))
    headers = _draw_host(r) + _draw_credentials(r, route, role, held)
    if r.random() < 0.1:
        method = r.choice(_METHODS)
    body, kind = _draw_body(r, route, role, held)
    headers += [(b"content-type", kind.encode())] if r.random() < 0.95 else []
    for _ in range(r.choice((0, 0, 0, 1, 2, 5))):
        name, values = r.choice(_HEADERS)
        headers.append((name.encode(), r.choice(values).encode("utf-8")))
    at = r.randrange(len(body) + 1)
    pieces = [body] if r.random() < 0.8 else [body[:at], b"", body[at:]]
    return Attack(method, _draw_path(r, path), _draw_query(r), headers, pieces, role, route)


def _draw_host(r: random.Random) -> Raw:
    if r.random() < 0.95:
        return [HOST]
    return [(b"host", r.choice(("evil.example", "", "127.0.0.1@evil.example", "127.0.0.1:99:9", MARKUP)).encode())]


def _draw_credentials(r: random.Random, route: str, role: Role | None, held: Held) -> Raw:
    """Return the key or the session of a role; of nobody, one that is made up, expired or revoked, or none."""
    if role is None:
        secret = r.choice((*held.stale, f"imprint_{'A' * 43}", "A" * 43, "", "é" * 43, MARKUP, "a" * 5000))
        form = r.choice(("Bearer {}", "bearer  {}", "Basic {}", "{}", "Bearer {},{}", None, None))
        if form is None:
            return r.choice(([], [(b"cookie", b"imprint=" + secret.encode())]))
        return [(b"authorization", form.replace("{}", secret).encode())]
    if r.random() < (0.6 if "/v1/" in route else 0.1):
        return [(b"authorization", f"Bearer {held.keys[role]}".encode()), *_draw_cookie(r, role, held, 0.2)]
    return _draw_cookie(r, role, held, 1.0)


def _draw_cookie(r: random.Random, role: Role, held: Held, share: float) -> Raw:
    if r.random() >= share:
        return []
    token = [(b"x-csrf-token", held.csrf[role].encode())] if r.random() < 0.5 else []
    return [(b"cookie", f"a=b; imprint={held.sessions[role]}".encode()), *token]


def _draw_path(r: random.Random, path: str) -> bytes:
    while "{" in path:
        before, _, rest = path.partition("{")
        _, _, after = rest.partition("}")
        path = before + r.choice([*(quote(text, safe="")[:3000] for text in TEXTS if text), "0", "1", "A" * 43]) + after
    if r.random() < 0.05:
        path += r.choice(
            ("/", "//", "/..", "/%2e%2e/%2e%2e/etc/passwd", "%00", "%zz", "%ff%fe", ";x=1", "%0d%0aX: y", "?")
        )
    if r.random() < 0.02:
        path = r.choice(("//evil.example/x", "/%2f%2fevil.example", "*", "http://evil.example/", "/" + "a/" * 4000))
    return path.encode()


def _draw_query(r: random.Random) -> bytes:
    if r.random() < 0.5:
        return b""
    if r.random() < 0.1:
        return r.choice((b"%", b"%zz=%f", b"&&&===", b"a" * 9000, b"limit=1&limit=2", b"\xff=\xfe", b"from[]=1"))
    pairs = [(r.choice(_PARAMETERS), r.choice(TEXTS)[:2000]) for _ in range(r.randrange(1, 4))]
    return urlencode(pairs).encode()


def _draw_body(r: random.Random, route: str, role: Role | None, held: Held) -> tuple[bytes, str]:
    if route.startswith("GET") and r.random() < 0.9:
        return b"", ""
    if "/v1/" in route or r.random() < 0.1:
        return r.choice(_JSON)(r), _KINDS[0] if r.random() < 0.85 else r.choice(_KINDS)
    fields = {r.choice(_FIELDS): r.choice(TEXTS) for _ in range(r.randrange(4))}
    fields |= dict(r.choice(_FORMS) for _ in range(r.randrange(6)))
    if role is not None and r.random() < 0.9:
        fields["csrf"] = held.csrf[role]
    body = urlencode(fields).encode()
    if r.random() < 0.1:
        body = r.choice((b"%", b"a=%ff", b"&" * 5000, b"a", b"csrf=1&csrf=2", b"=" * 5000, b"\xff\xfe"))
    return body, _KINDS[3] if r.random() < 0.9 else r.choice(_KINDS)
