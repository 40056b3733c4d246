"""Renders what `imprint credit` shows: entries, receipts, and lines of text."""

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from imprint.cli.terminal import cell, console, escape_markup, render_pairs
from imprint.display import count_of

if TYPE_CHECKING:
    from imprint.credit import Receipt
    from imprint.credit.leaves import Leaf

_HIDDEN = ("lines", "details", "runs", "noise", "estimator")


def print_lines(text: str) -> None:
    """Print lines of text as they are."""
    for line in text.split("\n"):
        console.print(escape_markup(line), soft_wrap=True, highlight=False)


def render_receipt(receipt: "Receipt", currency: str) -> dict[str, Any]:
    """Return what a call has credited, as plain values with a text for people."""
    from imprint.credit.money import PARTS, format_amount, format_share

    entries = receipt.entries
    pots = [entry.about["pot"] for entry in entries]
    rest = [entry.about["unattributed"] for entry in entries]
    unattributed = sum(each["share"] for each in rest) / len(rest)
    reasons = sorted({entry.about["reason"] for entry in entries if entry.about["reason"]})
    first, last = receipt.sequences[0], receipt.sequences[-1]
    what = "were recorded before" if receipt.repeated else "recorded"
    places = f"entry {first}" if first == last else f"entries {first} to {last}"
    text = f"{count_of(len(entries), 'query', 'queries')} {what}: {places}"
    if None not in pots:
        paid = sum(pots) - sum(each["amount"] for each in rest)
        text += f"; {format_amount(paid)} of {format_amount(sum(pots))} {currency} credited"
    text += f"; {format_share(unattributed)} unattributed"
    lines = [text, *(f"rule: {rule}" for rule in sorted({entry.about["rule"] for entry in entries}))]
    lines += [f"because: {reason}" for reason in reasons]
    return {
        "entries": list(receipt.sequences),
        "repeated": receipt.repeated,
        "unattributed": unattributed / PARTS,
        "reasons": reasons,
        "text": "\n".join(lines),
    }


def render_entry(leaf: "Leaf", currency: str) -> RenderableType:
    """Render a leaf of the log: its header, and a table of its lines; amounts in units of the currency."""
    pairs = []
    for name, value in leaf.about.items():
        if name not in _HIDDEN and value is not None:
            shown = value.get("outcome") if name == "validation" else _format(name, value, currency)
            pairs.append((name.replace("_", " "), str(shown)))
    head = render_pairs(f"Entry {leaf.sequence}: {leaf.kind}", pairs)
    if not leaf.rows:
        return head
    columns = [name for name in leaf.rows[0] if name not in ("deviations", "score")]
    table = Table(*(name.replace("_", " ") for name in columns))
    for row in leaf.rows:
        table.add_row(*(cell(_format(name, row[name], currency)) for name in columns))
    return Group(head, table)


def _format(name: str, value: Any, currency: str) -> str:
    from imprint.credit.money import PARTS, format_amount, format_share

    if value is None:
        return "–"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format(key, each, currency)}" for key, each in value.items())
    if name in ("amount", "by_size", "pot", "total", "smallest", "remainder", "per_query"):
        return f"{format_amount(value)} {currency}"
    if name in ("share", "low", "high"):
        return format_share(value if isinstance(value, int) else value * PARTS)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
