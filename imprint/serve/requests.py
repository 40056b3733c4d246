"""Requests and answers of the API: bodies in strict JSON, and the models that describe them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from imprint.display import suggest_names
from imprint.errors import StoreError
from imprint.serve.access.guard import Guard
from imprint.serve.errors import ApiError
from imprint.store.values import parsed

_LARGE = 16 << 10  # bytes of a body


def read_json(body: bytes) -> Any:
    """Return the JSON of a body; refuse NaN, fields that are given twice, deep nesting, and what is no UTF-8."""
    try:
        return parsed(body, Path("the body")).content
    except StoreError as error:
        raise ApiError(400, "bad_json", str(error)) from error


class _StrictRequest(Request):
    async def json(self) -> Any:
        return self.state.strict_json


class StrictRoute(APIRoute):
    """A route whose body is strict JSON, and says so by its content type. It is not read for whoever may not ask."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        guards = [each.call for each in self.dependant.dependencies if isinstance(each.call, Guard)]

        async def read_strictly(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            for guard in guards:  # whoever may not ask costs no more than this
                await guard(strict, None)
            if body := await strict.body():
                kind = strict.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    raise ApiError(415, "not_json", "the body must be application/json.")
                # nobody else should wait while a large body is parsed; a small one takes less than a thread does
                large = len(body) > _LARGE
                strict.state.strict_json = await asyncio.to_thread(read_json, body) if large else read_json(body)
            return await handle(strict)

        return read_strictly


class Strict(BaseModel):
    """A body without further fields, and without conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, given: Any) -> Any:
        """Name the first unknown field; pydantic would take seconds to name a hundred thousand of them."""
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if unknown:
            name = unknown[0][:80]
            text = f"unknown field {name!r}{suggest_names(name, cls.model_fields)}"
            raise PydanticCustomError("unknown_field", "{text}", {"text": text})
        return given


class AttributionRequest(Strict):
    """One query, or several."""

    query: Any = Field(None, description="One query.")
    queries: list[Any] | None = Field(None, min_length=1, description="Several queries, in place of `query`.")
    top: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="How many sources to list for each query, those with the largest effects; null for all. Over all "
        "queries an answer lists at most 100,000.",
    )
    credit: bool = Field(False, description="Credit the queries in the ledger. Needs the header Idempotency-Key.")

    @model_validator(mode="after")
    def _check(self) -> "AttributionRequest":
        if (self.query is None) == (self.queries is None):
            raise ValueError('give either "query" or "queries"')
        return self


class SourceEffect(BaseModel):
    """What one source does to a query."""

    source: str
    name: str
    removal_effect: float = Field(description="Change of the measurement if the source were removed.")
    standard_error: float | None
    distinguishable: bool | None = Field(description="Whether the effect can be told from 0; null if that is unknown.")
    share: float | None = Field(description="The share under the policy of the service, from 0 to 1.")


class QueryEffects(BaseModel):
    """What the sources do to one query."""

    answer: str | None = Field(
        description="What is attributed: the class, or the completion; null if the query was credited before, and can "
        "no longer be shown."
    )
    sources: list[SourceEffect]
    unattributed: float | None = Field(description="The share that no source is credited with.")
    rule: str | None = Field(description="The rule of the policy that divided the query.")
    reason: str = Field("", description="Why it was not the policy's own rule.")
    entry: int | None = Field(None, description="The entry of the ledger, if the query was credited.")
    id: str | None = Field(None, description="The name of the query in the ledger, which publishers see.")


class Milliseconds(BaseModel):
    """How long a request took, and where."""

    queued: float
    read: float
    credited: float
    total: float


class AttributionAnswer(BaseModel):
    """Effects of removing each source, with what they mean and how sure they are."""

    question: str
    meaning: str
    unit: str
    measure: str
    better: str | None
    n: int = Field(description="How many training examples there were.")
    store: str
    model: str
    validation: dict[str, Any]
    warnings: list[str]
    repeated: bool = Field(description="Whether an earlier request with the same key was credited, and is answered.")
    queries: list[QueryEffects]
    milliseconds: Milliseconds


class Refusal(BaseModel):
    """Why a request was refused: a word for programs, and a sentence for people."""

    code: str
    message: str


class ErrorAnswer(BaseModel):
    """The answer to a request that was refused."""

    error: Refusal


def describe_refusals(texts: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Return what the description of the API says of refused requests, by status."""
    return {status: {"model": ErrorAnswer, "description": text} for status, text in texts.items()}


REFUSALS = describe_refusals(
    {
        400: "The request is malformed, or names a host that the service does not answer by.",
        401: "The key is missing, unknown, expired or revoked.",
        403: "The role of the key may not do this, or a session did not send its CSRF token.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        414: "The URL is too long.",
        415: "The body is compressed, or is no JSON.",
        429: "The key sends too many requests: try again after Retry-After seconds.",
        431: "The headers are too long.",
        503: "Keys cannot be checked at the moment: try again after Retry-After seconds.",
    }
)
"""Of every route of the API; routes may say more."""
