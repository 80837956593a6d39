"""OpenAI's error envelope, and which status an error of the library has.

No message here repeats anything of a prompt or an answer: errors of the library are made without values, and of any
other error only its type is told.
"""

from typing import Any

from starlette.responses import JSONResponse

from private_llm.errors import CorrectionsUsedUp, PartiesBusy, PrivateLLMError, ProtocolAbort, TransportError

INVALID = "invalid_request_error"
SERVER = "server_error"
_MOST_TOLD = 1000


class ApiError(Exception):
    """What a client is told, in 1,000 characters at most. status: of HTTP. param: the field that is wrong."""

    def __init__(
        self, status: int, message: str, kind: str = INVALID, param: str | None = None, code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message if len(message) <= _MOST_TOLD else f"{message[:_MOST_TOLD]}..."
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The envelope."""
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told}

    def headers(self) -> dict[str, str]:
        """Those that belong to the status."""
        made = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status in (408, 413):  # the rest of the body is not read
            made["Connection"] = "close"
        return {**made, "WWW-Authenticate": "Bearer"} if self.status == 401 else made

    def response(self, **more: str) -> JSONResponse:
        """The answer that says so. more: further headers."""
        return JSONResponse(self.body(), self.status, {**self.headers(), **more})


def bad(param: str, told: str, code: str = "invalid_value") -> ApiError:
    """400 for a field, which the message names first."""
    return ApiError(400, f"{param}: {told}", INVALID, param, code)


def in_words(error: BaseException) -> ApiError:
    """What a client is told of any error of an engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PartiesBusy):
        return ApiError(503, f"the parties are busy: {error}", SERVER, None, "parties_busy", 5)
    if isinstance(error, TransportError):
        return ApiError(503, f"a party cannot be reached: {error}", SERVER, None, "party_unavailable", 5)
    if isinstance(error, CorrectionsUsedUp):
        return ApiError(503, str(error), SERVER, None, "corrections_used_up")
    if isinstance(error, ProtocolAbort):
        told = f"the parties' answers did not fit together, so nothing of this answer may be trusted: {error}"
        return ApiError(500, told, SERVER, None, "protocol_abort")
    if isinstance(error, PrivateLLMError):
        return ApiError(500, str(error), SERVER, None, "model_error")
    return ApiError(500, f"unforeseen {type(error).__name__} in the gateway", SERVER, None, "internal_error")
