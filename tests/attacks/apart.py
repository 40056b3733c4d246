"""Runs calls on hostile files apart from the tests: each in a fork of this process, with little memory and time.

The process imports the library once and waits for requests, one line of JSON each; a child does what is asked, notes
what came of every step, and ends. So a call that hangs, eats the memory, dies of a signal, imports what it should not
or changes the interpreter harms no other, and hundreds of them cost one start of torch. `tests.attacks.stores` talks
to it.
"""

import ast
import contextlib
import gc
import io
import json
import logging
import os
import resource
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS, WAITING = 20, 10  # of computing, and of waiting
MEMORY = 3 << 29  # bytes beyond what the process has at its fork
_WATCHED = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.bind", "socket.connect", "pty.spawn")


def serve() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.remove(str(Path(__file__).parent))  # a child finds no file of the tests
    _warm_up()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_in_a_child(json.loads(line))), file=answers, flush=True)


def _warm_up() -> None:
    """Load what every child needs; no store is read, so that a child finds the library as a process would."""
    import torch
    from torch.func import functional_call, grad, jvp, vmap

    import imprint.cli.app  # noqa: F401

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    theta = {name: p.detach() for name, p in model.named_parameters()}

    def loss(theta: Any) -> torch.Tensor:
        out: torch.Tensor = functional_call(model, theta, torch.ones(3, 2))
        return torch.nn.functional.cross_entropy(out, torch.zeros(3, dtype=torch.long))

    stacked = {name: torch.ones(2, *p.shape) for name, p in theta.items()}
    vmap(lambda u: jvp(loss, (theta,), (u,))[1])(stacked)
    jvp(grad(loss), (theta,), (theta,))
    with contextlib.redirect_stdout(io.StringIO()):
        _command(["inspect", "--help"])
    gc.collect()
    gc.freeze()


def _in_a_child(request: dict[str, Any]) -> dict[str, Any]:
    """What a child did, or how it ended."""
    place = Path(request["report"])
    child = os.fork()
    if child == 0:
        try:
            _limit()
            place.write_text(json.dumps(_perform(request)))
        except BaseException as error:
            place.write_text(json.dumps({"steps": [], "ran": [], "died": f"of {type(error).__name__}: {error}"}))
        os._exit(0)
    ended = _awaited(child)
    if ended is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return {"steps": [], "ran": [], "died": "hung"}
    if os.WIFSIGNALED(ended):
        return {"steps": [], "ran": [], "died": f"of {signal.Signals(os.WTERMSIG(ended)).name}"}
    if not place.exists():  # a library in C may end the process by itself
        return {"steps": [], "ran": [], "died": f"ended with {os.WEXITSTATUS(ended)} by itself"}
    report: dict[str, Any] = json.loads(place.read_text())
    return report


def _awaited(child: int) -> int | None:
    """How a child ended; None if it computes for too long, or waits for what does not come.

    Both are told by the processor's time, since a busy machine may keep a child waiting for its turn.
    """
    used, moved = 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        user, system = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
        if (now := (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")) > used:
            used, moved = now, time.monotonic()
        if used > SECONDS or time.monotonic() > moved + WAITING:
            return None
        time.sleep(0.005)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _perform(request: dict[str, Any]) -> dict[str, Any]:
    """Do every step; note what each gave, and all that was run on the way."""
    folder = Path(request["folder"])
    os.chdir(folder)
    os.environ |= {"COLUMNS": "200", "TERM": "xterm"}
    for name in ("FORCE_COLOR", "IMPRINT_TRACEBACK"):
        os.environ.pop(name, None)
    sys.path[:] = [path for path in sys.path if path]  # the current folder is the library's to add
    main = sys.modules["__main__"]
    main.__package__ = None  # the program is imprint
    ran: list[str] = []
    known = set(sys.modules)
    sys.addaudithook(_watcher(ran, str(folder)))
    steps = [{"step": step, **_step(step)} for step in request["steps"]]
    ran += [f"import {name}" for name in sys.modules if name not in known]
    return {"steps": steps, "ran": ran, "died": None}


def _watcher(ran: list[str], folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """Notes every process and connection, and all code from the folder but the user's own model.py."""

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            file = getattr(arguments[0], "co_filename", "")
            if file.startswith(folder) and os.path.realpath(file) != os.path.realpath(f"{folder}/model.py"):
                ran.append(f"exec {file}")
        elif event in _WATCHED:
            ran.append(f"{event} {arguments!r}")

    return watch


def _step(step: str) -> dict[str, Any]:
    """One call: "$ …" is a command line, anything else one of `_CALLS` with its arguments."""
    start = time.monotonic()
    out, err = io.StringIO(), io.StringIO()
    found: dict[str, Any] = {"code": None, "raised": None, "warnings": []}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            if step.startswith("$ "):
                found |= _command(ast.literal_eval(step[2:]))
            else:
                name, *arguments = step.split(" ", 1)
                found |= _CALLS[name](*arguments)
        except BaseException as error:  # of any kind: what it is, the tests judge
            found |= {"raised": _kinds(error), "message": str(error)}
    found["warnings"] = [str(warning.message) for warning in seen]
    return {**found, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.monotonic() - start}


def _kinds(error: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(error).__mro__]


def _command(arguments: list[str]) -> dict[str, Any]:
    from imprint.cli.app import main

    for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
        del sys.modules[name]
    sys.argv = ["imprint", *arguments]
    logging.getLogger().handlers.clear()  # else it goes on to write where the last command did
    try:
        main()
    except SystemExit as left:
        return {"code": 0 if left.code is None else left.code}
    return {"code": 0}


def _verify(folder: str) -> dict[str, Any]:
    from imprint import Store

    Store(folder).verify()
    return {}


def _inspect(folder: str) -> dict[str, Any]:
    from imprint import Store
    from imprint.cli.inspection import inspect_store

    store = Store(folder)
    json.dumps(inspect_store(store))
    return {"shown": [repr(store)]}


def _attribute(folder: str, readout: str = "jvp") -> dict[str, Any]:
    """Scores of the user's own task and queries, and all the ways to show them."""
    import imprint

    mine = runpy.run_path("model.py")
    result = imprint.attribute(mine["task"], folder, mine["queries"], readout=readout, progress=False)  # type: ignore[call-overload]
    shown = [repr(result), repr(result.top(3)), repr(result.mean())]
    scores, effects = result.scores.double(), result.removal_effect.double()
    return {
        "scores": scores.tolist(),
        "effects": effects.tolist(),
        "shown": shown,
        "html": result._repr_html_(),
        "ids": list(result.labels.source_ids),
    }


def _literal(folder: str) -> dict[str, Any]:
    return _attribute(folder, "literal")


def _simulate(folder: str) -> dict[str, Any]:
    """Simulate into a folder, as a user who has made the same call before would; then read it."""
    import imprint

    mine = runpy.run_path("model.py")
    given = (mine["task"], mine["data"], mine["sources"], mine["plan"])
    imprint.simulate(*given, checkpoints=mine["checkpoints"], out=folder, progress=False)
    return _attribute(folder)


def _load(file: str) -> dict[str, Any]:
    """A saved attribution, and all the ways to show it."""
    from imprint import Attribution

    result = Attribution.load(file)
    shown = [repr(result), repr(result.top(3)), repr(result.mean())]
    return {"scores": result.scores.double().tolist(), "shown": shown, "html": result._repr_html_()}


def _save(file: str) -> dict[str, Any]:
    """Write an attribution to a place that may be anything."""
    from imprint import Attribution

    Attribution.load("scores.safetensors").save(file)
    return {}


_CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "verify": _verify,
    "inspect": _inspect,
    "attribute": _attribute,
    "literal": _literal,
    "simulate": _simulate,
    "load": _load,
    "save": _save,
}

if __name__ == "__main__":
    serve()
