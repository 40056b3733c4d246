"""Serves the fine-tune of benchmarks/publishers.py with vLLM, and reads from it what every president moved."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

from publishers_case import Case
from publishers_results import Results

from imprint import Store, attribute
from imprint.export import Export, RemoteReader, to_vllm
from imprint.language import Completions

STARTS_WITHIN = 300  # seconds


def serve(case: Case, results: Results, python: str) -> None:
    """Export the model without each president, serve all by vLLM, and compare what it says with PyTorch.

    python: the interpreter of the environment that has vLLM.
    """
    tuned, _ = case.recorded()
    store, folder = Store(case.folder / "store"), case.folder / "served"
    some = case.asked[len(case.passages) :]
    answers = Completions([prompt for prompt, _ in some], [answer for _, answer in some], case.tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    with results.timed("exporting for vLLM"):
        export = to_vllm(tuned, store, folder, answers)
    with results.timed("starting vLLM"), _serving(export, python) as url:
        reader = RemoteReader(export, url)
        check = reader.check()
        with results.timed(f"asking vLLM for {len(answers)} answers"):
            served = reader.scores(answers).measured
    effects = attribute(tuned, store, answers).removal_effect
    off = (-served / export.n - effects.cpu()).abs().max()
    found = {"adapters": check.adapters, "probes": check.deviation, "effects": float(off), "answers": len(answers)}
    results.keep(served=found)
    print(found)


@contextmanager
def _serving(export: Export, python: str) -> Iterator[str]:
    """Start the server of an export for a while, and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHON": str(Path(python).absolute()), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    log = export.folder.parent / "vllm.log"
    command = [str(export.folder / "serve.sh"), "--port", str(port), "--enforce-eager"]
    with log.open("wb") as written:
        server = subprocess.Popen(command, env=environment, stdout=written, stderr=written, start_new_session=True)
    try:
        _wait(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        _stop(server)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, how)
            server.wait(60)
            return


def _wait(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    began = time.monotonic()
    while server.poll() is None and time.monotonic() - began < STARTS_WITHIN:
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-2000:]}")
