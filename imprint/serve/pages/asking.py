"""Turns what somebody enters on the page *Query* into a query, and says what is wrong with it."""

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from imprint.errors import DataError
from imprint.forms import Form, NumbersForm
from imprint.serve.errors import ApiError
from imprint.serve.pages.picture import draw_picture
from imprint.serve.requests import read_json

OWN = "own"
"""The choice of the picture that somebody drew, beside the examples."""
_EXAMPLES = 24
_TOKEN = re.compile("[A-Za-z0-9_-]{16}")
_DRAWN = 32  # pixels: wider pictures are not drawn by hand


class Mistyped(Exception):
    """What was entered is no query. name: of the field that is wrong."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name, self.message = name, message


@dataclass(frozen=True)
class Asking:
    """The form of the page, for one kind of query.

    fields: what was typed, by the names of fields.
    token: names this form; what is credited from it twice is credited once.
    """

    form: Form
    examples: Sequence[tuple[Any, str]]
    fields: Mapping[str, str] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    wrong: str = ""
    message: str = ""

    @property
    def kind(self) -> str:
        """Which fields are shown: those of a picture, of a completion, of numbers, or one for JSON."""
        kind = self.form.kind
        if kind == "completion":
            return kind
        if not isinstance(self.form, NumbersForm):
            return "json"
        return "picture" if kind == "picture" and len(self.form.shape) >= 2 else "numbers"

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes that may be attributed in place of the model's answer."""
        return self.form.names if isinstance(self.form, NumbersForm) else ()

    @property
    def pictures(self) -> list[tuple[str, str, str]]:
        """The example pictures: the value of the choice, the picture, and its caption."""
        shown = self.examples[:_EXAMPLES] if self.kind == "picture" else []
        return [(str(place), self.draw(query), caption) for place, (query, caption) in enumerate(shown)]

    @property
    def links(self) -> list[tuple[int, str]]:
        """The examples that fill the form: the place of each, and its caption."""
        shown = self.examples[:_EXAMPLES] if self.kind != "picture" else []
        return [(place, caption) for place, (_, caption) in enumerate(shown)]

    @property
    def canvas(self) -> dict[str, Any] | None:
        """What drawing a picture needs to know; None where pictures are too large to draw by hand."""
        form = self.form
        if self.kind != "picture" or not isinstance(form, NumbersForm) or form.shape[-1] > _DRAWN:
            return None
        black, white = self._shades([])
        return {"width": form.shape[-1], "height": form.size // form.shape[-1], "black": black, "white": white}

    @property
    def blank(self) -> str:
        """The example of the form, as it would be typed."""
        return describe_typed(self.form, self.form.example).get(self.main, "")

    @property
    def main(self) -> str:
        """The name of the field that a query is mostly in."""
        return {"completion": "completion", "json": "query"}.get(self.kind, "values")

    def with_token(self, token: str) -> "Asking":
        """Return the form with the token that it came back with; with a new one if that is none."""
        return replace(self, token=token) if _TOKEN.fullmatch(token) else self

    def typed(self, name: str) -> str:
        """Return what was typed into a field."""
        return self.fields.get(name, "")

    def draw(self, query: Any) -> str:
        """Return the picture that a query is."""
        assert isinstance(self.form, NumbersForm)
        pixels = query[self.form.field]
        return draw_picture(pixels, self.form.shape[-1], *self._shades(pixels))

    def _shades(self, pixels: Sequence[float]) -> tuple[float, float]:
        assert isinstance(self.form, NumbersForm)
        low, high = self.form.low, self.form.high
        return (
            (min(pixels, default=0.0) if low is None else low),
            (max(pixels, default=1.0) if high is None else high),
        )

    def read(self) -> Any:
        """Return the query that was typed, or refuse it with the field that is wrong."""
        query = self._parse()
        try:
            self.form.read(query)
        except DataError as error:
            message = str(error)
            named = [name for name in self.fields if f'"{name}"' in message]
            raise Mistyped(named[0] if named else self.main, message[:1].upper() + message[1:]) from error
        return query

    def _parse(self) -> Any:
        if self.kind == "completion":
            return {name: self.typed(name).replace("\r\n", "\n") for name in ("prompt", "completion")}
        if self.kind == "json":
            try:
                return read_json(self.typed("query").encode())
            except (ApiError, UnicodeEncodeError) as error:
                raise Mistyped("query", "This is not JSON.") from error
        assert isinstance(self.form, NumbersForm)
        chosen = self.typed("choice")
        query: dict[str, Any]
        if self.kind == "picture" and chosen != OWN:
            if not is_index(chosen, len(self.examples)):
                raise Mistyped("choice", "Choose a picture, or draw one.")
            query = {self.form.field: self.examples[int(chosen)][0][self.form.field]}
        else:
            query = {self.form.field: _read_numbers(self.typed("values"))}
        label = self.typed("label")
        if label:
            if not is_index(label, len(self.classes)):
                raise Mistyped("label", "Choose one of the classes.")
            query["label"] = int(label)
        return query

    def name_request(self, query: Any) -> str:
        """Return the idempotency key of crediting a query from this form: another query has another one."""
        digest = hashlib.sha256(encode(query).encode()).hexdigest()
        return f"page-{self.token}-{digest[:24]}"


def is_index(text: str, count: int) -> bool:
    """Tell whether a text is the place of one of so many things."""
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) < count


def _read_numbers(text: str) -> list[float]:
    words = text.replace(",", " ").replace("[", " ").replace("]", " ").split()
    numbers = []
    for place, word in enumerate(words):
        try:
            numbers.append(float(word))
        except ValueError as error:
            shown = word if len(word) <= 20 else f"{word[:20]}…"
            raise Mistyped("values", f"“{shown}”, in place {place + 1}, is not a number.") from error
    return numbers


def encode(query: Any) -> str:
    """Return a query as JSON on one line."""
    return json.dumps(query, sort_keys=True)


def describe_typed(form: Form, query: Any) -> dict[str, str]:
    """Return the fields of the form as they would be typed for a query."""
    if form.kind == "completion":
        return {name: str(query.get(name, "")) for name in ("prompt", "completion")}
    if not isinstance(form, NumbersForm):
        return {"query": encode(query)}
    label = query.get("label")
    values = " ".join(f"{value:g}" for value in query[form.field])
    return {"values": values, "choice": OWN, "label": "" if label is None else str(label)}
