"""Carries out an attack and lists what went wrong.

That is: code of the attacker's that ran, a traceback on the command line or an exception that is none of the library's,
other scores than those of the untouched store without an error or a warning, a hang, a process that ran out of its
memory, a changed file outside the store, control characters or HTML or formulas that come through to where they have
an effect.
"""

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.attacks.stores import Attack, Bases

UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_TAGS = {"table", "caption", "tr", "th", "td", "b", "p", "thead", "tbody", "div", "span", "i", "em", "strong", "br"}


class _Tags(HTMLParser):
    """The tags of a page that are none of the library's own."""

    def __init__(self) -> None:
        super().__init__()
        self.strange: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _TAGS or any(name.startswith("on") or name in ("src", "href") for name, _ in attrs):
            self.strange.append(f"{tag} {attrs}")


def attacked(attack: Attack, bases: Bases, place: Path) -> list[str]:
    """Carry out an attack; everything that went wrong, in words."""
    scene = bases.scene(attack.base, place)
    attack.change(scene)
    before = contents(scene.outside)
    report = bases.server.perform(scene.folder, attack.steps)
    wrong = [f"the process {report['died']}"] if report["died"] else []
    for step in report["steps"]:
        untouched = bases.untouched(attack.base, step["step"])
        wrong += [f"{step['step']}: {fault}" for fault in judged(step, untouched, attack.forged)]
    if scene.canary.exists():
        wrong.append(f"planted code ran as {scene.canary.read_text()!r}")
    wrong += [f"ran: {event}" for event in report["ran"] if _is_hostile(event, attack.imports)]
    if (after := contents(scene.outside)) != before:
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        wrong.append(f"changed outside the store: {', '.join(changed)}")
    if (table := scene.folder / "scores.csv").is_file():
        wrong += [f"the table has the cell {cell!r}" for cell in hostile_cells(table)]
    return wrong


def _is_hostile(event: str, imports: tuple[str, ...]) -> bool:
    if not event.startswith("import "):
        return True
    name = event.removeprefix("import ")
    return any(name == each or name.startswith(f"{each}.") for each in imports)


def judged(step: dict[str, Any], untouched: dict[str, Any], forged: bool) -> list[str]:
    """What is wrong with what one call gave."""
    wrong = []
    kinds = step["raised"] or []
    if kinds and (step["code"] is None or step["step"].startswith("$")) and "ImprintError" not in kinds:
        wrong.append(f"raised {kinds[0]}: {step['message'][:200]}")
    if kinds and "ImprintError" in kinds and ("\n" in step["message"] or len(step["message"]) > 2000):
        wrong.append("the message is no line of bounded length")
    wrong += _command_faults(step) if step["code"] is not None else []
    told = (step.get("message", ""), *step["warnings"])
    for text in (step["out"], step["err"], *step.get("shown", ()), step.get("html", ""), *told):
        if found := UNPRINTABLE.search(text):
            wrong.append(f"shows {found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 20]!r}")
    return wrong + strange_tags(step.get("html", "")) + _score_faults(step, untouched, forged)


def strange_tags(html: str) -> list[str]:
    """_Tags of a page that are none of the library's own, and would do something."""
    tags = _Tags()
    tags.feed(html)
    return [f"HTML with {tag}" for tag in tags.strange]


def _command_faults(step: dict[str, Any]) -> list[str]:
    code, lines = step["code"], [line for line in step["err"].splitlines() if line.strip()]
    if code not in (0, 1, 2):
        return [f"exit code {code}"]
    if "Traceback" in step["err"]:
        return ["a traceback"]
    if code == 1 and not (lines and lines[-1].startswith("error:")):
        return [f"exit code 1 with the last line {(lines or ['(none)'])[-1][:200]!r}"]
    if code == 0 and "--json" in step["step"]:
        try:
            json.loads(step["out"], parse_constant=lambda constant: [][0])
        except (ValueError, IndexError):
            return ["output that is no JSON"]
    return []


def _score_faults(step: dict[str, Any], untouched: dict[str, Any], forged: bool) -> list[str]:
    if "scores" not in step:
        return []
    told = set(step["warnings"]) - set(untouched["warnings"])
    if not all(
        abs(value) < float("inf") for name in ("scores", "effects") for row in step.get(name, ()) for value in row
    ):
        return ["scores that are no numbers"]
    for name in [name for name in ("ids", "scores", "effects") if name in step]:
        if not forged and not told and not _close(step[name], untouched[name]):
            return [f"other {name} without a word: {step[name]}, not {untouched[name]}"]
    return []


def _close(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(_close, found, expected))
    if isinstance(expected, float):
        return abs(float(found) - expected) <= 1e-6 * max(1e-3, abs(expected))
    return bool(found == expected)


def hostile_cells(table: Path) -> list[str]:
    """Cells of a table that a spreadsheet would run, or a terminal obey; numbers may have a sign."""
    with table.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    return [cell for cell in cells if UNPRINTABLE.search(cell) or (cell[:1] in set("=+-@\t\r") and not _number(cell))]


def _number(cell: str) -> bool:
    try:
        return bool(float(cell) == float(cell))
    except ValueError:
        return False


def contents(folder: Path) -> dict[str, tuple[str, int, int]]:
    """All there is in a folder that is not to be touched: contents, permissions and times of change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = path.read_bytes().hex() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (content, about.st_mode, about.st_mtime_ns if path.is_file() else 0)
    return found
