"""What is attacked: an application, what attackers may hold, and a ledger that has something to show."""

import asyncio
from pathlib import Path

from fastapi import FastAPI

from imprint.credit import Ledger
from imprint.credit.periods import close_period
from imprint.keys import make_keys
from imprint.serve.access import Access
from imprint.serve.access.secret import derive_csrf
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import KEYS
from tests.serve.calling import Answer, Pieces, answer, make_scope
from tests.serve.hostile.corpus import Attack, Held

SECONDS = 30.0


class Target:
    """An application, what attackers hold, and its ledger."""

    def __init__(self, app: FastAPI, settings: Settings, access: Access, ledger: Ledger) -> None:
        self.app, self.settings, self.access, self.ledger = app, settings, access, ledger
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


def fill(service: Service, ledger: Ledger, folder: Path) -> None:
    """Credit some queries, and close a period that a statement can be asked of."""
    queries = [{"values": [0.1 * place, -0.2, 0.3, 0.4], "label": place % 3} for place in range(8)]
    answered = asyncio.run(service.attribute(queries))
    asyncio.run(service.credit(answered, caller="key:app", key="first"))
    close_period(ledger, "2026-10")
    ledger.sign_head(make_keys(folder / "credit.key")[0])
