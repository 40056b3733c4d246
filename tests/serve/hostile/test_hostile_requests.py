"""Thousands of hostile requests: nothing breaks, hangs, leaks or opens, and the ledger still verifies."""

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from imprint.credit import Ledger, verify
from imprint.credit.periods import close_period
from imprint.keys import make_keys
from imprint.serve.access import Access
from imprint.serve.access.roles import ROLES
from imprint.serve.access.secret import derive_csrf
from imprint.serve.app import create_app
from imprint.serve.pages import login
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import KEYS
from tests.serve.access.test_routes import ROUTES
from tests.serve.calling import Answer, Pieces, answer, make_scope
from tests.serve.hostile.corpus import MARKUP, Attack, Held, draw_attack
from tests.serve.news import News, make_ledger

LEAKS = re.compile(
    rb"Traceback|File \"|site-packages|/work/|/tmp/|\.py\b|sqlalchemy|sqlite|psycopg|OperationalError|pydantic"
    rb"|starlette|access_keys|imprint_leaves|torch\.|<class|object at 0x",
    re.IGNORECASE,
)
OTHERS = re.compile(rb"publisher-[1-9]")
TARGETS = [route for route in ROUTES if route != "POST /logout"]  # after which the rest would come from nobody
SECONDS = 30.0


class Target:
    """An application, what attackers hold, and its ledger."""

    def __init__(self, app: FastAPI, access: Access, ledger: Ledger) -> None:
        self.app, self.access, self.ledger = app, access, ledger
        keys = {
            role: access.create(name, role, sources=["publisher-0"] * (role == "publisher")).secret
            for role, name in KEYS.items()
        }
        sessions = {role: str(access.open_session(key, 3600)) for role, key in keys.items()}
        revoked = access.create("revoked", "admin").secret
        ended = str(access.open_session(revoked, 3600))
        access.revoke("revoked")
        csrf = {role: derive_csrf(token) for role, token in sessions.items()}
        self.held = Held(keys, sessions, csrf, (revoked, ended))

    async def send(self, attack: Attack) -> Answer:
        scope = make_scope(attack.method, attack.path, attack.query, attack.headers)
        async with asyncio.timeout(SECONDS):
            return await answer(self.app, scope, Pieces(attack.pieces))


@pytest.fixture
def target(news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(login, "_BURST", 1e9)
    with make_ledger(tmp_path / "credit.db") as ledger:
        access, service = Access(tmp_path / "access.db"), news.serve(ledger)
        app = create_app(Settings(metrics="", rate=1e9, body_bytes=100_000), service, access)
        fill(service, ledger, tmp_path)
        yield Target(app, access, ledger)
        access.close()


def fill(service: Service, ledger: Ledger, folder: Path) -> None:
    """Credit some queries, and close a period that a statement can be asked of."""
    queries = [{"values": [0.1 * place, -0.2, 0.3, 0.4], "label": place % 3} for place in range(8)]
    answered = asyncio.run(service.attribute(queries))
    asyncio.run(service.credit(answered, caller="key:app", key="first"))
    close_period(ledger, "2026-10")
    ledger.sign_head(make_keys(folder / "credit.key")[0])


def find_wrong(attack: Attack, found: Answer, held: Held) -> str | None:
    """Return what is wrong with an answer."""
    shown = found.body + repr(found.headers).encode()
    if not 200 <= found.status < 500:
        return "an error of the server"
    if leak := LEAKS.search(shown):
        return f"a leak: {leak[0]!r}"
    secrets = [*held.keys.values(), *held.sessions.values(), *held.stale]
    if any(secret.encode() in shown for secret in secrets):
        return "a secret"
    if "stolen" in found.headers.get("set-cookie", ""):
        return "a header that somebody sent"
    if "text/html" in found.headers.get("content-type", "") and MARKUP.encode() in found.body:
        return "markup that somebody sent"
    if "default-src 'none'" not in found.headers.get("content-security-policy", ""):
        return "no policy"
    if is_let_in(found) and not may_open(attack):
        return f"access as {attack.role}"
    asked = attack.path + attack.query + b"".join(attack.pieces)
    if attack.role == "publisher" and b"publisher" not in asked and (other := OTHERS.search(found.body)):
        return f"a look at {other[0]!r}"
    return None


def is_let_in(found: Answer) -> bool:
    """Tell whether more was answered than the way to the login, or to the same path without a slash at its end."""
    away = found.status == 307 or found.headers.get("location", "").startswith("/login")
    return found.status < 400 and not away


def may_open(attack: Attack) -> bool:
    """Tell whether the role may open what the path leads to, whatever route the attack set out from."""
    path = attack.path.partition(b"?")[0].decode("latin-1")
    open_ones = ("/healthz", "/readyz", "/static/", "/login", "/v1/openapi.json")
    if path.startswith(open_ones):
        return True
    roles = ROUTES.get(attack.route)
    return attack.role is not None and (roles is None or attack.role in roles)


async def attack_with(target: Target, seed: int, count: int) -> list[str]:
    wrong, r = [], random.Random(seed)
    async with target.app.router.lifespan_context(target.app):
        for number in range(count):
            attack = draw_attack(r, TARGETS, target.held)
            try:
                found = await target.send(attack)
            except TimeoutError:
                wrong.append(f"{number}: no answer within {SECONDS:g} s to {attack}")
                continue
            if problem := find_wrong(attack, found, target.held):
                wrong.append(f"{number}: {problem} ({found.status} {found.body[:300]!r}) in answer to {attack}")
    return wrong


def check_unharmed(target: Target) -> None:
    names = {record.name: record for record in target.access.list()}
    made = {name for name in names if name not in (*KEYS.values(), "revoked")}
    assert all(names[name].revoked is None for name in KEYS.values())
    assert len(made) <= 20  # what the administrator's own form, filled in at random, may make
    assert all(target.access.identify_key(target.held.keys[role]) is not None for role in ROLES)
    assert verify(target.ledger, progress=False).holds


@pytest.mark.system
def test_hundreds_of_hostile_requests_do_no_harm(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    wrong = asyncio.run(attack_with(target, 1, 600))
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:10])
    for secret in (*target.held.keys.values(), *target.held.sessions.values()):
        assert secret not in caplog.text
    check_unharmed(target)


@pytest.mark.long
def test_ten_thousand_hostile_requests_do_no_harm(target: Target) -> None:
    wrong = asyncio.run(attack_with(target, 6, 10_000))
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong[:10])
    check_unharmed(target)
