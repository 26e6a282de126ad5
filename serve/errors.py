"""Errors as the OpenAI API words them: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsjax.errors import DsjaxError, EngineDeadError, RequestError
from dsjax.serve.disconnect import ClientDisconnected

logger = logging.getLogger("dsjax")

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; for whatever sits between
MOST_PROBLEMS_TOLD = 5


class ModelNotFoundError(RequestError):
    """The model that a request asks for is not served here."""

    def __init__(self, model: str, served: Sequence[str]):
        super().__init__(f"There is no model {model!r} here. This server has: {', '.join(served)}.", param="model")


class DuplicateRequestError(RequestError):
    """The id of a request belongs to one that is still open."""

    def __init__(self, request_id: str):
        message = f"A request with id {request_id!r} is still open. Choose another id, or leave it out."
        super().__init__(message, param="request_id")


class BodyTooLargeError(RequestError):
    """The body of a request has more than `most` bytes."""

    def __init__(self, most: int):
        super().__init__(f"The body is larger than {most} bytes, the most that this server reads. Send less at once.")


class ShuttingDownError(DsjaxError):
    """The server ends before the request has."""


_INTERNAL = (500, "internal_error")
_STATUS_AND_CODE: dict[type[DsjaxError], tuple[int, str | None]] = {  # the first that fits
    ModelNotFoundError: (404, "model_not_found"),
    DuplicateRequestError: (409, "duplicate_request_id"),
    BodyTooLargeError: (413, "body_too_large"),
    RequestError: (400, None),
    EngineDeadError: (503, "engine_dead"),
    ShuttingDownError: (503, "shutting_down"),
}


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for `error`. Unexpected errors keep their text to themselves: that is for the log."""
    status, code = next((v for kind, v in _STATUS_AND_CODE.items() if isinstance(error, kind)), _INTERNAL)
    message = str(error)
    if (status, code) == _INTERNAL:
        message = "The server failed to handle this request; its log says why."
    return status, _body(status, message, getattr(error, "param", None), code)


def error_response(error: Exception) -> Response:
    """The HTTP response that tells the client about `error`."""
    return _response(*describe_error(error))


def install_error_handlers(app: FastAPI) -> None:
    """Make every error response of `app` one of these."""

    async def known(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def unexpected(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(error)

    app.add_exception_handler(DsjaxError, known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _gone)
    app.add_exception_handler(Exception, unexpected)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI hides what happened while it read the body
        return error_response(_body_error(error.__cause__))
    message = error.detail
    if error.status_code == 404:
        message = f"There is nothing at {request.url.path}. GET /docs lists what there is."
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}. GET /docs says what it takes."
    return _response(error.status_code, _body(error.status_code, message, None, None), error.headers)


def _body_error(cause: BaseException) -> Exception:
    """The error to tell about a body that cannot be read or parsed because of `cause`."""
    match cause:
        case DsjaxError():
            return cause
        case UnicodeDecodeError():
            encoding = cause.encoding.upper()
            return RequestError(f"The body is not valid {encoding}: {cause.reason} at byte {cause.start}.")
        case RecursionError():
            return RequestError("The body is nested too deeply.")
        case ValueError():  # all others that json raises are JSONDecodeError, which FastAPI tells itself
            return RequestError(f"The body holds an integer of more than {sys.get_int_max_str_digits()} digits.")
        case _:
            return RequestError(f"The body cannot be read ({type(cause).__name__}).")


async def _invalid(_: Request, error: Exception) -> Response:
    """400, not FastAPI's 422, with a message that names the fields at fault."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    place = problems[0]["loc"][1:]
    param = place[0] if place and isinstance(place[0], str) else None
    told = [_describe_problem(problem) for problem in problems[:MOST_PROBLEMS_TOLD]]
    return error_response(RequestError(" ".join(told), param))


def _describe_problem(problem: dict[str, Any]) -> str:
    place = problem["loc"][1:]
    if problem["type"] == "json_invalid":
        return f"The body is not valid JSON: {problem['ctx']['error']} at position {place[0]}."
    if problem["type"] == "string_unicode":  # of a value, or of a field's name: then `place` is what has the field
        return f"{_name(place)} holds text that is not valid Unicode: {problem['input']!r:.64}."
    if not place:
        return "The body must be a JSON object, sent with the header Content-Type: application/json."
    text = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{_name(place)}: {text}."


def _name(place: Sequence[int | str]) -> str:
    """A field such as messages[0].content."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return name or "The body"


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: Any = None) -> Response:
    # ASCII, since a message may quote text from the request that is not valid Unicode.
    return Response(json.dumps(body), status, headers, media_type="application/json")
