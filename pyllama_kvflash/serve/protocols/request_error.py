"""The error of a refused request, in the form of the OpenAI protocol."""

from collections.abc import Mapping
from typing import Any

_MOST = 600  # most characters of a message
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """An error that a request gets as its answer.

    status: the HTTP status. param: the field that is wrong. code: a word for programs. headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        line = " ".join(message.splitlines())  # it may quote the request
        super().__init__(line if len(line) <= _MOST else f"{line[:_MOST]}...")
        self.status, self.message, self.param, self.code = status, str(self), param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")  # noqa: PLR2004
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Answered(Exception):  # noqa: N818 (it is an answer)
    """A request is answered without the model. body: the answer, in the form of the request's protocol."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__()
        self.body = body


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """Return the RequestError for an invalid request (400)."""
    return RequestError(400, message, param=param, code=code)
