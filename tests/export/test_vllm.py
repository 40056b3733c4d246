"""vLLM serves exported adapters as PyTorch evaluates them; `make serving-engine` installs it."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import urlopen

import pytest
import torch

from imprint import ReadoutError, attribute
from imprint.export import Export, RemoteReader, read_peft, read_remote
from imprint.export.completions import Server, ServerGone
from imprint.export.remote import _queries
from tests.conftest import require
from tests.export import served

pytestmark = pytest.mark.long
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
STARTS_WITHIN = 240  # seconds
NEAR = 1e-3  # nats per completion


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    require("vllm", PYTHON.exists(), "vLLM is not installed: make serving-engine")


class Engine:
    """A server started by serve.sh of an export, in a process group of its own."""

    def __init__(self, export: Export, port: int, *arguments: str) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", export.folder.parent / f"vllm-{port}.log"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PYTHON": str(PYTHON), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        command = [str(export.folder / "serve.sh"), "--port", str(port), "--enforce-eager", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < STARTS_WITHIN and self.process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise AssertionError(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-3000:]}")

    def kill(self, how: int = signal.SIGKILL) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)


@contextmanager
def serving(export: Export, *arguments: str, port: int | None = None) -> Iterator[Engine]:
    engine = Engine(export, port or free_port(), *arguments)
    try:
        engine.wait()
        yield engine
    finally:
        engine.kill(signal.SIGTERM)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Export, Engine]]:
    task, store, export = served.path_export(tmp_path_factory.mktemp("path"))
    with serving(export) as engine:
        yield task, store, export, engine


@pytest.fixture(scope="module")
def removals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Export, Engine]]:
    task, store, export = served.removal_export(tmp_path_factory.mktemp("removals"))
    with serving(export) as engine:
        yield task, store, export, engine


def deviation(export: Export, engine: Engine) -> float:
    """The largest difference of a log-likelihood from PyTorch's, over all adapters and queries, in nats."""
    server, asked = Server(engine.url), served.queries()
    found = 0.0
    for adapter in sorted(
        {str(end) for source in export.sources for end in (source.plus, source.minus)} | {"adapters/base"}
    ):
        for query, expected in zip(_queries([asked]), served.values(export, adapter, asked).tolist(), strict=True):
            log_probs = server.log_probs(adapter.rsplit("/", 1)[-1], list(query.ids))
            value = sum(w * v for w, v in zip(query.weights[1:], log_probs, strict=True))
            found = max(found, abs(value - expected))
    return found


def test_base_and_pairs_agree_with_pytorch(path: Any) -> None:
    _, _, export, engine = path
    found = deviation(export, engine)
    print(f"\nvLLM and PyTorch, pairs of a path: {found:.1e} nats")
    assert found < NEAR
    check = RemoteReader(export, engine.url).check()
    assert check.deviation < NEAR and check.moves is not None and check.moves < 0.01 and check.adapters == 7


def test_scores_are_those_of_the_library(path: Any) -> None:
    task, store, export, engine = path
    found = read_remote(export.folder, engine.url, served.queries())
    model = served.plain(export)
    own = read_peft(export, model, served.queries())
    assert float((found.measured - own.measured).norm() / own.measured.norm()) < 1e-3
    exact = torch.as_tensor(attribute(task, store, served.queries(), progress=False).scores)
    assert float((found.measured - exact).norm() / exact.norm()) < 0.01


def test_removals_are_exact(removals: Any) -> None:
    task, store, export, engine = removals
    found = deviation(export, engine)
    print(f"\nvLLM and PyTorch, adapters without each source: {found:.1e} nats")
    assert found < NEAR
    scores = read_remote(export, engine.url, served.queries())
    effects = torch.as_tensor(attribute(task, store, served.queries(), progress=False).removal_effect)
    assert float(effects.abs().max()) > 1  # or nothing would be compared
    torch.testing.assert_close(-scores.measured / scores.n, effects.double(), rtol=0, atol=2 * NEAR)


def test_adapters_are_loaded_while_the_server_runs(path: Any) -> None:
    _, _, export, engine = path
    server = Server(engine.url)
    for name in ("0001-plus", "0002-minus"):
        assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}).status == 200
    with pytest.raises(ReadoutError, match=r"lacks 2 adapters of the export \(0001-plus, 0002-minus\)"):
        read_remote(export, engine.url, served.queries())
    found = read_remote(export, engine.url, served.queries(), load_from=export.folder)
    assert set(server.models() or []) >= {"0001-plus", "0002-minus"}
    model = served.plain(export)
    own = read_peft(export, model, served.queries())
    assert float((found.measured - own.measured).norm() / own.measured.norm()) < 1e-3


def test_another_export_s_server_is_refused(path: Any, removals: Any) -> None:
    _, _, export, _ = path
    _, _, _, other = removals
    with pytest.raises(ReadoutError, match="does not serve the model of this export"):
        read_remote(export, other.url, served.queries(), load_from=export.folder)


def test_a_higher_rank_than_the_server_s_is_refused_by_name(path: Any, tmp_path: Path) -> None:
    _, _, _, engine = path
    _, _, high = served.path_export(tmp_path, parameters="lora:8")
    with pytest.raises(ReadoutError, match="raise --max-lora-rank"):
        Server(engine.url).load("high", str(high.folder / "adapters" / "0000-plus"))


def test_a_server_killed_in_the_middle_loses_nothing(path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, export, _ = path
    port, asked, answered = free_port(), served.columns(60, seed=8), []
    log_probs = Server.log_probs

    def counted(*given: Any) -> list[float]:
        answered.append(log_probs(*given))
        return answered[-1]

    monkeypatch.setattr(Server, "log_probs", counted)
    with serving(export, port=port) as engine:
        reader = RemoteReader(export, engine.url, at_once=2, retries=1)
        reader.check()
        killer = Thread(target=_kill_after, args=(engine, answered, len(answered) + 20))
        killer.start()
        with pytest.raises(ServerGone, match=r"of 420 log-likelihoods are finished and kept"):
            reader.scores(asked)
        killer.join()
    assert 20 <= len(answered) - 7 * 4 < 420
    with serving(export, port=port):
        found = reader.scores(asked)
    assert len(answered) == 2 * 7 * 4 + 420  # the probes twice, and nothing else
    own = read_peft(export, served.plain(export), asked)
    assert float((found.measured - own.measured).norm() / own.measured.norm()) < 1e-3


def _kill_after(engine: Engine, answered: list[Any], count: int) -> None:
    """Kill a server once it has answered so many requests."""
    until = time.monotonic() + 120
    while len(answered) < count and time.monotonic() < until:
        time.sleep(0.01)
    engine.kill()


def test_half_precision_and_a_prefix_cache_are_allowed_for(tmp_path: Path) -> None:
    _, _, export = served.path_export(tmp_path, dtype="bfloat16")
    ids = list(range(1, 50))
    with serving(export, "--enable-prefix-caching", "--block-size", "32") as engine:
        check = RemoteReader(export, engine.url).check()
        print(f"\nvLLM and PyTorch, in bfloat16: {check.deviation:.1e} nats")
        assert NEAR < check.deviation < 1
        server = Server(engine.url)
        assert server.ask("POST", "/v1/completions", {"model": "base", "prompt": ids, "max_tokens": 1}).status == 200
        assert len(server.log_probs("base", ids)) == len(server.log_probs("base", ids)) == 48
