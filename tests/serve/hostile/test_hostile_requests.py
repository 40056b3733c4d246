"""Thousands of hostile requests: nothing breaks, hangs, leaks or opens, and the ledger still verifies."""

import asyncio
import random
import re
from pathlib import Path

import pytest

from imprint.credit import verify
from imprint.serve.access.roles import ROLES
from tests.serve.access.doors import KEYS
from tests.serve.access.test_routes import ROUTES
from tests.serve.calling import Answer
from tests.serve.hostile.corpus import MARKUP, Attack, Held, draw_attack
from tests.serve.hostile.target import SECONDS, Target

ROOT = Path(__file__).parents[3]
LEAKS = re.compile(
    rb"Traceback|File \"|site-packages|"
    + re.escape(str(ROOT).encode())
    + rb"|/tmp/|\.py\b|sqlalchemy|sqlite|psycopg|OperationalError|pydantic"
    rb"|starlette|access_keys|imprint_leaves|torch\.|<class|object at 0x",
    re.IGNORECASE,
)
OTHERS = re.compile(rb"publisher-[1-9]")
TARGETS = [route for route in ROUTES if route != "POST /logout"]  # after which the rest would come from nobody


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
