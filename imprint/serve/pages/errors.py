"""The page that a request is refused with: what happened, and what to do."""

from fastapi import Request
from fastapi.responses import HTMLResponse

from imprint.serve.errors import ApiError
from imprint.serve.pages.rendering import render

_TITLES = {
    400: "That request is not right",
    401: "Please log in",
    403: "Not with this key",
    404: "Nothing here",
    405: "Nothing here",
    409: "That clashes with something",
    413: "Too much at once",
    415: "Not in this form",
    422: "That is not a query",
    429: "Too much going on",
    500: "Something went wrong",
    503: "Not available right now",
    504: "That took too long",
}
_ADVICE = {
    401: "Log in with your key and try again.",
    403: "Log in with another key, or ask the operator of this service for one that may see this.",
    404: "Check the address, or start from the first page.",
    405: "Check the address, or start from the first page.",
    409: "Go back, reload the page and try again.",
    413: "Go back and send less.",
    422: "Go back and change what you entered.",
    500: "Try again. If it happens again, tell the operator of this service when it happened.",
    503: "Try again in a moment.",
    504: "Try again in a moment.",
}
_UNEXPLAINED = ("Not Found", "Method Not Allowed")  # what the framework says


def render_error(request: Request, refusal: ApiError) -> HTMLResponse:
    """Return the page of a refused request."""
    wait = refusal.headers.get("Retry-After")
    advice = f"Try again in {wait} s." if wait else _ADVICE.get(refusal.status, "Go back and try again.")
    title = _TITLES.get(refusal.status, "That did not work")
    said = "there is no page at this address." if refusal.message in _UNEXPLAINED else refusal.message
    message = said[:1].upper() + said[1:]
    identity = getattr(request.state, "identity", None)
    page = render(
        request, "error.html.j2", identity, refusal.status, title=title, message=message, advice=advice, refusal=refusal
    )
    page.headers.update(refusal.headers)
    return page
