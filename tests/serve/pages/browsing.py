"""Runs a service for a real browser, and keeps what the browser complains about."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
)
WIDE, NARROW = 1280, 360


@contextmanager
def run_server(app: FastAPI) -> Iterator[str]:
    """Serve an application on this machine alone, in a thread; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    ready = threading.Event()
    startup = server.startup

    async def start(sockets: Any = None) -> None:
        await startup(sockets)
        ready.set()

    server.startup = start  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)


@contextmanager
def run_chromium() -> Iterator[Browser]:
    """Start a browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(_FLAGS))
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page of the browser, at an address of a service.

    complaints: errors in the console, which has violations of the content policy too, and requests elsewhere.
    """

    page: Page
    address: str
    name: str
    pictures: Path
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._check(request.url))

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _check(self, url: str) -> None:
        if not url.startswith((self.address, "data:")):
            self.complaints.append(f"asks for {url}")

    def open(self, path: str) -> None:
        self.page.goto(self.address + path)

    def keep(self, name: str) -> None:
        """Keep a picture of the whole page, to be looked at."""
        self.page.screenshot(path=self.pictures / f"{name}-{self.name}.png", full_page=True)

    def fits(self) -> bool:
        """Tell whether the page is no wider than the window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def choose_folder(folder: Path) -> Path:
    """Return where pictures are kept: where IMPRINT_SCREENSHOTS says, else in a folder of the test's."""
    chosen = Path(os.environ.get("IMPRINT_SCREENSHOTS", folder))
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def open_tab(browser: Browser, address: str, pictures: Path, *, scheme: Any = "light", width: int = WIDE) -> Tab:
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce", accept_downloads=True
    )
    return Tab(context.new_page(), address, f"{scheme}-{width}", pictures)
