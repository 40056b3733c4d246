"""What a request is refused with: a status, a code for programs, and a message for people."""

from collections.abc import Mapping


class ApiError(Exception):
    """A request that is refused; `imprint.serve.app` turns it into JSON, or into a page.

    code: a stable word for programs, such as "not_found".
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, dict(headers or {})
