"""Errors as the OpenAI protocol has them."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Fault(Exception):  # noqa: N818 (a request is refused: it is an answer)
    """A request is answered with an error. param: the field at fault; code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")  # noqa: PLR2004
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """As it is sent: in ASCII, since what it quotes may be half of a surrogate pair."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """The request itself is at fault."""
    return Fault(400, message, param=param, code=code)
