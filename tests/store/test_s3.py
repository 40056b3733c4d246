"""Stores in an S3 bucket, with the command line and a real server on 127.0.0.1; `make s3-server` installs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.conftest import require

pytestmark = pytest.mark.system
SERVER = Path(__file__).parents[2] / ".venv-s3" / "bin" / "moto_server"
SIGNED = {  # which the server does not compare: it only wants to see that somebody signs
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=a"
}
STARTS_WITHIN = 60.0  # seconds
SECRET = "hush-hush-hush"
SHARD = "checkpoint-000/imprints-00000.safetensors"
TASK = """
import torch, imprint
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(240, 30), torch.randint(0, 3, (240,))
data, queries = (x, y), (x[:5], y[:5])
sources = imprint.Sources.by_label([f"press-{i % 12}" for i in range(240)])
plan = imprint.Plan(engine="trajectories", steps=STEPS, lr=0.05)
task = imprint.Task.classifier(nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)))
"""


class Server:
    """An S3 server of this test alone, whose memory goes with it."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        with log.open("wb") as file:
            command = [str(SERVER), "-H", "127.0.0.1", "-p", str(self.port)]
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        end = time.monotonic() + STARTS_WITHIN
        while True:
            try:
                self.send("PUT", "bucket")
                return
            except OSError:
                assert time.monotonic() < end and self.process.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.1)

    def send(self, method: str, path: str, content: bytes | None = None) -> bytes:
        with urlopen(Request(f"{self.url}/{path}", data=content, method=method, headers=SIGNED), timeout=20) as answer:
            found: bytes = answer.read()
            return found

    def names(self, path: str) -> bool:
        """Tell whether the folder's list names a file."""
        try:
            files = json.loads(self.send("GET", f"bucket/{path.split(':')[0]}/contents.json"))["files"]
        except HTTPError as error:
            if error.code != 404:
                raise
            return False
        return any(entry["path"] == path.split(":")[1] for entry in files)

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require("s3", SERVER.exists(), "the S3 server is not installed: make s3-server")
    made = Server(tmp_path_factory.mktemp("s3") / "log")
    yield made
    made.stop()


class Machine:
    """A machine with a cache of its own, on which commands run."""

    def __init__(self, server: Server, folder: Path, name: str) -> None:
        self._folder = folder
        credentials = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
        endpoint = {"AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true"}
        cache = {"IMPRINT_CACHE": str(folder / f"cache-{name}"), "OMP_NUM_THREADS": "1"}
        self._environment = {**os.environ, **credentials, **endpoint, **cache}

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "imprint", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment,
            text=True,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        done = self.start(*arguments)
        out, errors = done.communicate(timeout=200)
        assert done.returncode == status, errors
        assert SECRET not in out + errors
        return out + errors


def test_simulated_killed_resumed_attributed_and_damaged(server: Server, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK.replace("STEPS", "300"))
    (tmp_path / "short.py").write_text(TASK.replace("STEPS", "3"))
    one, two = Machine(server, tmp_path, "one"), Machine(server, tmp_path, "two")
    simulate = ("simulate", "mine.py:task", "--no-check", "--memory", "1MiB", "--json", "--out")
    place = "s3://bucket/runs/news"

    begun = one.start(*simulate, place)
    end = time.monotonic() + 120
    while not server.names(f"runs/news:{SHARD}"):
        assert begun.poll() is None and time.monotonic() < end, begun.communicate()[1]
        time.sleep(0.05)
    os.killpg(begun.pid, signal.SIGKILL)
    begun.communicate()
    assert not server.names("runs/news:manifest.json")
    assert "holds an unfinished simulation" in two.run("inspect", place, status=1)
    assert "is being written to by process" in two.run(*simulate, place, status=1)  # it may still be at work

    shard = server.send("GET", f"bucket/runs/news/{SHARD}")
    store = json.loads(one.run(*simulate, place).splitlines()[0])
    assert store["path"] == place and store["sources"] == 12
    assert server.send("GET", f"bucket/runs/news/{SHARD}") == shard
    one.run(*simulate, str(tmp_path / "local"))
    given = ("--task", "mine.py:task", "--json")
    attributed = json.loads(two.run("attribute", place, *given).splitlines()[0])
    assert attributed == json.loads(one.run("attribute", str(tmp_path / "local"), *given).splitlines()[0])
    assert (tmp_path / "local" / SHARD).read_bytes() == shard

    two.run("verify", place)
    server.send("PUT", f"bucket/runs/news/{SHARD}", bytes([*shard[:-1], shard[-1] ^ 1]))
    assert f"{place}/{SHARD} is damaged" in " ".join(two.run("verify", place, status=1).split())
    assert "made otherwise" in one.run("simulate", "short.py:task", "--no-check", "--out", place, status=1)


def test_what_a_server_refuses_is_said_without_secrets(server: Server, tmp_path: Path) -> None:
    machine = Machine(server, tmp_path, "one")
    assert "there is nothing at s3://bucket/nowhere" in machine.run("inspect", "s3://bucket/nowhere", status=1)
    assert "there is no bucket" in machine.run("inspect", "s3://another/nowhere", status=1)
