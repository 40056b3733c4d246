"""A server on this machine that answers as it is told, and remembers what it was asked."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER: dict[str, Any] = {
    "question": "this_run",
    "meaning": "this run: …",
    "measure": "logprob",
    "unit": "change of logprob if the source were removed: − means the source helps",
    "better": "higher",
    "validation": {"outcome": "ranks validated"},
    "warnings": ["careful"],
    "repeated": False,
    "queries": [
        {
            "answer": "3",
            "sources": [
                {
                    "source": "int:4",
                    "name": "Elm",
                    "removal_effect": -0.25,
                    "standard_error": 0.125,
                    "distinguishable": None,
                    "share": 0.5,
                    "more": "ignored",
                }
            ],
            "unattributed": 0.5,
            "rule": "above_noise",
            "reason": "",
            "entry": 7,
        }
    ],
    "milliseconds": {"queued": 0.0, "read": 1.0, "credited": 0.0, "total": 1.0},
}


@dataclass
class Reply:
    """An answer; or, where the status is 0, none: the connection is closed once the request was read.

    missing: bytes at the end before which the connection is closed.
    """

    status: int = 200
    body: Any = field(default_factory=lambda: ANSWER)
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: int = 0

    @property
    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def refuse(status: int, code: str, **headers: str) -> Reply:
    body = {"error": {"code": code, "message": f"because of {code}."}}
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


class FakeService:
    """Replies in turn; the last reply is repeated."""

    def __init__(self, server: ThreadingHTTPServer, replies: list[Reply]) -> None:
        self.url, self.replies, self.asked = f"http://127.0.0.1:{server.server_port}", replies, list[Asked]()
        self.lock = threading.Lock()


@contextmanager
def serving(*replies: Reply) -> Iterator[FakeService]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(size)) if size else None
            with service.lock:
                headers = {name.lower(): value for name, value in self.headers.items()}
                service.asked.append(Asked(self.command, self.path, headers, body))
                reply = service.replies.pop(0) if len(service.replies) > 1 else service.replies[0]
            if not reply.status:
                self.close_connection = True
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content[: len(reply.content) - reply.missing])
            self.close_connection = self.close_connection or reply.missing > 0

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    service = FakeService(server, [*replies] or [Reply()])
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
