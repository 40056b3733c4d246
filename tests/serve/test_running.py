"""A service starts, or says in a line why it does not; it stops as it is told; its demo works as the README says."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from imprint.errors import ConfigurationError
from imprint.serve import demo, running
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.client import Client
from imprint.serve.running import bind, run
from imprint.serve.settings import Settings
from tests.cli.commands import Command
from tests.cli.conftest import command as command
from tests.conftest import require
from tests.serve.calling import Caller
from tests.serve.news import News
from tests.serve.processes import Served, Site, make_site

ROOT = Path(__file__).parents[2]
Start = Callable[..., None]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def site(news: News, tmp_path: Path) -> Site:
    return make_site(news, tmp_path, str(tmp_path / "credit.db"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the store to serve"),
        (["runs/news", "--demo"], "either --demo or a store"),
        (["runs/news", "--folder", "x"], "--folder is that of the demo"),
        (["--demo", "--ledger", "x.db", "--policy", "x.toml"], "a ledger and keys of its own"),
        (["runs/nothing"], "runs/nothing"),
        (["runs/news", "--ledger", "credit.db"], "a ledger needs a policy"),
        (["runs/news", "--config", "nothing.toml"], "nothing.toml cannot be read as TOML"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    left = command("serve", *arguments)
    assert left.code == 1 and left.err.startswith("error:") and message in left.err and left.out == ""
    assert left.err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="is no folder of the demo"):
        demo.prepare(tmp_path, Settings())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_made_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    left = command("serve", "--demo", "--folder", str(tmp_path / "file" / "demo"))
    assert left.code == 1 and left.err.count("\n") == 1
    assert "the demo cannot be made in" in left.err and "Not a directory. Give another folder with --folder" in left.err


def test_a_demo_that_is_stopped_is_removed_and_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(folder: Path, log: demo.Log) -> None:
        logging.getLogger("imprint.simulation.runner").warning("stopped: the same call again resumes it in %s", folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_make_store", stop)
    with pytest.raises(KeyboardInterrupt):
        demo.prepare(tmp_path / "demo", Settings())
    assert list(tmp_path.iterdir()) == [] and "resumes" not in caplog.text
    logging.getLogger("imprint.simulation.runner").warning("stopped: again")
    assert "stopped: again" in caplog.text


def test_a_port_that_is_taken_is_named(taken: int) -> None:
    with pytest.raises(ConfigurationError, match=f"cannot listen on 127.0.0.1, port {taken}: Address already in use"):
        bind("127.0.0.1", taken)
    with bind("127.0.0.1", 0) as free:
        assert free.getsockname()[1] > 0 and free.proto == socket.IPPROTO_TCP  # else asyncio leaves Nagle's delays on


@pytest.fixture
def start(news: News, tmp_path: Path) -> Iterator[Start]:
    """Runs a service in this thread until it is told to stop."""
    access = Access(tmp_path / "access.db")
    secret = access.create("app", "query").secret
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def serve(then: Callable[[Client], None], metrics: str = "", drain: float = 0.0) -> None:
        settings, bound = Settings(metrics=metrics, drain=drain), bind("127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{bound.getsockname()[1]}", secret, patience=10)
        run(create_app(settings, news.serve(), access), settings, bound, lambda: then(client))

    yield serve
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    access.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_and_the_program_goes_on(start: Start, number: signal.Signals) -> None:
    start(lambda client: os.kill(os.getpid(), number))


def test_an_address_for_figures_that_is_taken_is_named_and_nothing_is_served(
    start: Start, taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigurationError, match=f"metrics cannot be served on 127.0.0.1:{taken}"):
        start(lambda client: pytest.fail("it was announced"), metrics=f"127.0.0.1:{taken}")
    assert "Traceback" not in caplog.text and "ConfigurationError" not in caplog.text


def test_what_nobody_foresaw_at_the_start_is_logged_with_its_place(
    news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("imprint.serve.app.Exporter", fail)
    access = Access(tmp_path / "access.db")
    settings = Settings(metrics="127.0.0.1:0")
    with pytest.raises(SystemExit):
        run(create_app(settings, news.serve(), access), settings, bind("127.0.0.1", 0), lambda: None)
    access.close()
    assert "RuntimeError while starting or stopping:" in caplog.text and "in fail" in caplog.text


def test_while_it_drains_it_answers_but_is_not_ready(start: Start, news: News, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    servers: list[running._Server] = []

    class Server(running._Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            servers.append(self)
            await super().startup(sockets)

    monkeypatch.setattr(running, "_Server", Server)

    def look(client: Client) -> None:
        try:
            while client.ready():
                pass
            seen.append(client.attribute(news.ask(0)).question)
        finally:
            servers[0].should_exit = True  # as once it has drained

    def then(client: Client) -> None:
        thread = threading.Thread(target=look, args=(client,))
        seen.append(thread)
        thread.start()
        os.kill(os.getpid(), signal.SIGTERM)

    start(then, drain=3600.0)
    thread, question = seen
    assert isinstance(thread, threading.Thread) and question == "this_run"
    thread.join()


def test_a_service_that_stops_is_not_ready(news: News, tmp_path: Path) -> None:
    access, service = Access(tmp_path / "access.db"), news.serve()
    caller = Caller(create_app(Settings(metrics=""), service, access), access.create("app", "query").secret)
    assert caller.call("/readyz").status == 200
    caller.app.state.stopping = True
    answer = caller.call("/readyz")
    assert answer.status == 503 and b"shutting down" in answer.body
    service.close()
    access.close()


@pytest.mark.parametrize("drain", [-1.0, 1e9, float("nan")])
def test_a_time_to_drain_is_some_seconds(drain: float) -> None:
    with pytest.raises(ConfigurationError, match="drain must be from 0 to 3600"):
        Settings(drain=drain)


@pytest.mark.system
def test_a_process_that_cannot_listen_says_so_and_leaves(site: Site, taken: int) -> None:
    with pytest.raises(AssertionError, match=f"exit code 1: .*cannot listen on 127.0.0.1, port {taken}"):
        Served(site, taken).wait_until_ready()


@pytest.mark.system
def test_a_second_signal_stops_it_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (site.folder / "serve.toml").write_text("drain = 3600\n")
    with Served(site, more=("--config", str(site.folder / "serve.toml"))) as served:
        client = Client(served.url, site.secret)
        served.process.terminate()
        while client.ready():
            pass
        assert served.stop() == -signal.SIGTERM


@pytest.mark.system
def test_the_demo_answers_as_the_readme_says_and_a_second_start_serves_the_same(tmp_path: Path) -> None:
    require("curl", shutil.which("curl") is not None, "curl is not installed")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (serving,) = re.findall(r"^\$ make serve .*\((imprint serve .*)\)", readme, re.MULTILINE)
    assert f"serve: $(VENV)/.serve\n\t$(BIN)/{serving}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (asking,) = re.findall(r"^\$ (curl (?:.*\\\n)*.*)$", readme, re.MULTILINE)
    stores = set()
    for _ in range(2):
        with _start_demo(serving, tmp_path) as process:
            address, link, shown = _read_announcement(process)
            assert shown == re.sub(r"\\\n +", "", asking).replace("http://127.0.0.1:8080", address)
            answer = _run_shell(asking.replace("http://127.0.0.1:8080", address), tmp_path)
            assert '"question":"this_run"' in answer and '"removal_effect":' in answer
            stores.update(re.findall(r'"store":"(\w{64})"', answer))
            page = _run_shell(f"curl -sS -w '%{{http_code}}' {link}", tmp_path)
            assert page.endswith("200")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert len(stores) == 1
    assert (tmp_path / "imprint-serve-demo").stat().st_mode & 0o077 == 0


def _start_demo(words: str, folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "IMPRINT_SERVE_PORT": "0", "IMPRINT_SERVE_METRICS": "127.0.0.1:0"}
    command = [sys.executable, "-m", *words.split()]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


def _read_announcement(process: "subprocess.Popen[str]") -> tuple[str, str, str]:
    """Return the address, the link and the request that a demo shows."""
    found = {}
    assert process.stdout is not None
    for line in process.stdout:
        name, _, text = line.strip().partition("  ")
        found[name] = text
        if name == "ask":
            return found["address"], found["log in"].split()[0], text
    raise AssertionError(f"exit code {process.wait()}: {found}")


def _run_shell(line: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
