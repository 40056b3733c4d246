"""What a request is refused with: a status, a code for programs, and a message for people."""

from collections.abc import Mapping

from imprint.errors import first_line

NO_NUMBER = (
    "the measurement of a query, or a score of it, is no finite number. If one query does this and others do not, look "
    "for very large numbers in it."
)
"""Said of a query whose attribution is undefined, without what the model or the store are made of."""
TOO_LONG = "a query is too long to be read with the memory of this service: shorten it."
"""Said of a query that does not fit even alone."""


class ApiError(Exception):
    """A request that is refused; `imprint.serve.app` turns it into JSON, or into a page.

    code: a stable word for programs, such as "not_found".
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})

    @property
    def content(self) -> dict[str, dict[str, str]]:
        """What programs get."""
        return {"error": {"code": self.code, "message": self.message}}


def is_for_programs(path: str) -> bool:
    """Tell whether programs ask at a path, which get refusals as JSON; people get pages."""
    return path.startswith(("/v1/", "/healthz", "/readyz"))


def describe_cause(error: Exception) -> str:
    """Return why a database failed, as its driver says in a line: for the log, without what was to be written."""
    cause = error.__cause__ or error
    return first_line(getattr(cause, "orig", None) or cause)
