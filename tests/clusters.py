"""A Ray cluster of two workers on this machine, for the tests that need one."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback only, as on Windows
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # on a busy machine workers would wait for everything else
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a cluster of two CPUs, which this process is connected to; nothing of it is left in the end."""
    os.environ |= {**_SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # read where Ray is imported
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "imprint-attribution[cluster]"')
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets have no longer names
    limits = {"num_cpus": 2, "object_store_memory": 200 << 20}
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(**limits, **quiet, _node_ip_address="127.0.0.1", _temp_dir=folder)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        deadline = time.monotonic() + 10
        while (left := _find_processes(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"processes were left behind: {left}"


def _find_processes(words: str) -> list[str]:
    """Find processes with these words in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if words in line:
            found.append(f"{path.parent.name}: {line[:200]}")
    return found
