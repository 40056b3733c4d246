"""Reads the forms of pages, as browsers send them."""

from urllib.parse import parse_qsl

from fastapi import Request

from imprint.serve.errors import ApiError

_KIND = "application/x-www-form-urlencoded"
_FIELDS = 1000


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form; refuse one that is not well formed, or has a field twice.

    Called again for the same request, it returns the same.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != _KIND:
        raise ApiError(415, "not_a_form", f"the body must be {_KIND}.")
    try:
        text = (await request.body()).decode("ascii")
        fields = parse_qsl(
            text, keep_blank_values=True, strict_parsing=bool(text), errors="strict", max_num_fields=_FIELDS
        )
    except ValueError as error:
        raise ApiError(400, "bad_form", "the form is not well formed.") from error
    found = dict(fields)
    if len(found) < len(fields):
        raise ApiError(400, "bad_form", "a field of the form is given twice.")
    return found
