"""Calls an application as a server does, without one: with any headers, and a body that comes in pieces."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.types import Message

Raw = list[tuple[bytes, bytes]]
HOST = (b"host", b"127.0.0.1:8080")


class Caller:
    """Calls an application as a server would, with whatever headers and pieces of a body."""

    def __init__(self, app: FastAPI, secret: str) -> None:
        self.app, self.secret, self.pieces = app, secret, Pieces(None)

    def call(
        self,
        path: str = "/v1/store",
        headers: Raw | None = None,
        pieces: list[bytes] | AsyncIterator[bytes] | None = None,
        *,
        method: str = "GET",
        host: bool = True,
        shown: str | None = None,
        **scope: Any,
    ) -> "Answer":
        """Return what a request with the key is answered with; nothing if it is not answered.

        shown: the path as it is decoded, if that differs.
        """
        given = [*([HOST] if host else []), (b"authorization", f"Bearer {self.secret}".encode()), *(headers or [])]
        raw, _, query = path.partition("?")
        about = make_scope(method, raw.encode("latin-1"), query.encode("latin-1"), given)
        about |= {"path": raw if shown is None else shown, **scope}
        self.pieces = Pieces(pieces)
        return asyncio.run(answer(self.app, about, self.pieces))

    @property
    def read(self) -> int:
        """How many bytes of the last body were read."""
        return self.pieces.read


class Answer(NamedTuple):
    """A status, headers, and the body; all empty if nothing was sent."""

    status: int
    headers: dict[str, str]
    body: bytes


class Pieces:
    """A body that comes in pieces, and then a client that leaves; counts the bytes that are read of it."""

    def __init__(self, pieces: list[bytes] | AsyncIterator[bytes] | None) -> None:
        self.read, self._messages = 0, self._list(pieces)

    async def __call__(self) -> Message:
        return await anext(self._messages)

    async def _list(self, pieces: list[bytes] | AsyncIterator[bytes] | None) -> AsyncIterator[Message]:
        if isinstance(pieces, list | None):
            for piece in pieces or []:
                self.read += len(piece)
                yield {"type": "http.request", "body": piece, "more_body": True}
            yield {"type": "http.request", "body": b"", "more_body": False}
        else:
            async for piece in pieces:
                self.read += len(piece)
                yield {"type": "http.request", "body": piece, "more_body": True}
        while True:
            yield {"type": "http.disconnect"}


def make_scope(method: str, raw: bytes, query: bytes, headers: Raw) -> dict[str, Any]:
    """Return what a server tells an application of a request."""
    return {
        "type": "http",
        "method": method,
        "path": unquote(raw.decode("latin-1")),
        "raw_path": raw,
        "query_string": query,
        "headers": headers,
        "client": ("10.0.0.1", 1),
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 8080),
    }


async def answer(app: FastAPI, scope: dict[str, Any], receive: Pieces) -> Answer:
    """Return what an application answers; headers that are given twice are an error."""
    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    if not sent:
        return Answer(0, {}, b"")
    assert [message["type"] for message in sent].count("http.response.start") == 1
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    assert len(headers) == len(sent[0]["headers"])
    return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))
