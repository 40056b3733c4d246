"""The settings of a service: defaults, overridden by a file, the environment, and the command line, in this order."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from imprint.display import suggest_names
from imprint.errors import ConfigurationError

PREFIX = "IMPRINT_SERVE_"
"""Of environment variables: IMPRINT_SERVE_PORT is `port`."""
_NOWHERE = "none"  # for `metrics`


@dataclass(frozen=True)
class Settings:
    """How a store is served.

    host, port: where the service listens. metrics: where Prometheus reads metrics; empty for nowhere, which a file, the
        environment and the command line call `none`.
    ledger: where queries are credited: the path of a SQLite file, or the URL of a PostgreSQL database; None: nowhere.
    access: the database of keys; by default beside the ledger, or `imprint-access.db` in this folder.
    policy: a TOML or JSON file; needed to credit.
    public_key, heads: what the ledger is verified against.
    statements: the folder for statements of closed periods; by default a temporary one.
    documents: the folder with the stores of the documents inside sources, which `imprint inside --keep` prepares.
    signed_by: the public key that must have signed the store.
    hosts: names by which the service may be called, beside those of this machine.
    proxies: addresses of reverse proxies, whose X-Forwarded-For says who asks; without them, everybody behind a proxy
        counts as one address.
    https: whether everybody reaches it by HTTPS, so that cookies are only sent there.
    body_bytes, batch, queue: the largest request, the most queries in one, and the most queries that may wait.
    rate: requests per second and key; twice as many may come at once.
    deadline: seconds after which a query is given up.
    drain: seconds that the service goes on answering once it is told to stop. Meanwhile `/readyz` says 503, so that a
        load balancer notices.
    retention_days: how long credited queries are kept for disputes; None keeps them until they are erased.
    top: how many sources an answer lists, if the request does not say.
    session_hours: how long a login lasts.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    metrics: str = "127.0.0.1:9464"
    ledger: str | None = None
    access: str | None = None
    policy: Path | None = None
    public_key: Path | None = None
    heads: Path | None = None
    statements: Path | None = None
    documents: Path | None = None
    signed_by: Path | None = None
    hosts: tuple[str, ...] = ()
    proxies: tuple[str, ...] = ()
    https: bool = False
    body_bytes: int = 1 << 20
    batch: int = 64
    queue: int = 256
    rate: float = 50.0
    deadline: float = 30.0
    drain: float = 0.0
    retention_days: int | None = None
    top: int = 5
    session_hours: float = 12.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "batch", "queue", "rate", "deadline", "retention_days", "top", "session_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e12:
                raise ConfigurationError(f"{name} must be a positive number, got {value}.")
        if not 0 <= self.drain <= 3600:
            raise ConfigurationError(f"drain must be from 0 to 3600 seconds, got {self.drain}.")
        if not 0 <= self.port < 1 << 16:
            raise ConfigurationError(f"port must be from 0 to 65535, got {self.port}.")
        if self.batch > self.queue:
            raise ConfigurationError(
                f"queue must be at least batch: {self.queue} queries may wait, {self.batch} come at once."
            )
        if self.ledger is not None and self.policy is None:
            raise ConfigurationError("a ledger needs a policy that says who is credited: give policy too.")

    @property
    def access_place(self) -> str:
        """Where keys are kept."""
        if self.access is not None:
            return self.access
        if self.ledger is None:
            return "imprint-access.db"
        return self.ledger if "://" in self.ledger else f"{self.ledger}.access"

    @classmethod
    def load(cls, file: Path | None = None, environment: Mapping[str, str] = os.environ, **given: Any) -> "Settings":
        """Return the settings: those given, then the environment's, then the file's, then the defaults.

        given: None stands for what was not given.
        """
        found = {} if file is None else _read_file(file)
        found |= {name: text for each in fields(cls) if (text := environment.get(PREFIX + (name := each.name).upper()))}
        types = get_type_hints(cls)
        if unknown := [name for name in found if name not in types]:
            raise ConfigurationError(f"unknown setting {unknown[0]!r}{suggest_names(unknown[0], types)}")
        known = {name: _convert(name, value, types[name]) for name, value in found.items()}
        known |= {name: value for name, value in given.items() if value is not None}
        if known.get("metrics") == _NOWHERE:  # an empty variable of the environment counts as not given
            known["metrics"] = ""
        return replace(cls(), **known)


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read as TOML: {error}.") from error


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value of a file or of the environment as the type that the setting has."""
    if isinstance(kind, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    text = isinstance(value, str)
    try:
        if kind is bool:
            if text and value.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
                return value.lower() in ("1", "true", "yes", "on")
            if isinstance(value, bool):
                return value
            raise ValueError
        if kind in (int, float) and not isinstance(value, bool):
            return kind(value)
        if kind in (str, Path) and text:
            return kind(value)
        if get_args(kind):
            return tuple(value.replace(",", " ").split() if text else map(str, value))
    except (ValueError, TypeError):
        pass
    wanted = "names separated by commas" if get_args(kind) else {bool: "true or false"}.get(kind, f"a {kind.__name__}")
    raise ConfigurationError(f"{name} must be {wanted}, got {value!r}.")
