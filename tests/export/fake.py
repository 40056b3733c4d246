"""A server on 127.0.0.1 that answers `/v1/completions` as vLLM 0.32.0 does, from PyTorch's values; and as others do."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import peft
import torch
from transformers import LlamaForCausalLM

from imprint.export import Export

CUT = 1  # in place of a status: the server is killed after the head of its answer
Body = dict[str, Any]
Change = Callable[[Body, Body], "tuple[int, Any]"]


class Fake:
    """What the server has and does; tests change it.

    change(request, answer): returns the status and the answer to send instead.
    """

    def __init__(self, export: Export) -> None:
        self.export, self.url = export, ""
        self.names = [path.name for path in sorted((export.folder / "adapters").iterdir())]
        self.change: Change = lambda request, answer: (200, answer)
        self.loads: Callable[[Body], tuple[int, str]] | None = None
        self.answers_as: Callable[[str], str] = lambda name: name
        self.lists, self.slow = True, 0.0
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.under_way = self.most = 0
        self.retry_after: str | None = None
        self._known: dict[tuple[str, tuple[int, ...]], list[float | None]] = {}
        self._lock = threading.Lock()
        plain = LlamaForCausalLM.from_pretrained(export.folder / "model")
        self.model: Any = plain
        for name in self.names:
            place = export.folder / "adapters" / name
            if self.model is plain:
                self.model = peft.PeftModel.from_pretrained(plain, place, adapter_name=name)
            else:
                self.model.load_adapter(place, adapter_name=name)
        self.model.eval()

    @torch.no_grad()
    def log_probs(self, name: str, ids: list[int]) -> list[float | None]:
        """Log-probabilities of tokens under an adapter; the first has none."""
        with self._lock:
            key = (name, tuple(ids))
            if key not in self._known:
                self.model.set_adapter(name)
                rows = torch.tensor([ids])
                logits = self.model(input_ids=rows).logits[0, :-1].log_softmax(-1)
                self._known[key] = [None, *logits.gather(-1, rows[0, 1:, None])[:, 0].tolist()]
            return list(self._known[key])

    def complete(self, body: Body) -> tuple[int, Any]:
        """Answer a request for completions."""
        if body["model"] not in self.names:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        assert (body["echo"], body["max_tokens"], body["logprobs"]) == (True, 0, 0)
        values = self.log_probs(self.answers_as(body["model"]), body["prompt"])
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {"token_logprobs": values, "tokens": [f"w{token}" for token in body["prompt"]]},
            "finish_reason": "length",
            "prompt_token_ids": body["prompt"],
        }
        usage = {"prompt_tokens": len(body["prompt"])}
        return self.change(body, {"model": body["model"], "choices": [choice], "usage": usage})


class _Handler(BaseHTTPRequestHandler):
    fake: Fake

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        listed = {"data": [{"id": name} for name in ("plain", *self.fake.names)]}
        self._answer(*((200, listed) if self.path == "/v1/models" and self.fake.lists else (404, {})))

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with fake._lock:
            fake.requests.append(body)
            fake.headers.append(dict(self.headers))
            fake.under_way += 1
            fake.most = max(fake.most, fake.under_way)
        try:
            time.sleep(fake.slow)
            if self.path == "/v1/completions":
                status, answer = fake.complete(body)
            elif fake.loads is not None:
                status, answer = fake.loads(body)
            else:
                status, answer = 404, {"detail": "Not Found"}
        finally:
            with fake._lock:
                fake.under_way -= 1
        self._answer(status, answer)

    def _answer(self, status: int, answer: Any) -> None:
        if status == 0:  # the connection breaks
            self.close_connection = True
            return
        content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        cut = status == CUT
        self.send_response(200 if cut else status)
        if self.fake.retry_after is not None:
            self.send_header("Retry-After", self.fake.retry_after)
        self.send_header("Content-Length", str(len(content)))
        with suppress(ConnectionError):  # a client that no longer waits
            self.end_headers()
            self.wfile.write(b"" if cut else content)
        self.close_connection |= cut


@contextmanager
def running(export: Export) -> Iterator[Fake]:
    """Serve an export until the end of the block."""
    fake = Fake(export)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"fake": fake}))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
