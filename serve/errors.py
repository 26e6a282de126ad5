"""Errors as the OpenAI API words them: {"error": {"message", "type", "param", "code"}}."""

import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from dsjax.errors import DsjaxError, EngineDeadError, RequestError
from dsjax.serve.disconnect import ClientDisconnected

logger = logging.getLogger("dsjax")

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; for whatever sits between


class ModelNotFoundError(RequestError):
    """The model that a request asks for is not served here."""

    def __init__(self, model: str, served: Sequence[str]):
        super().__init__(f"There is no model {model!r} here. This server has: {', '.join(served)}.", param="model")


class DuplicateRequestError(RequestError):
    """The id of a request belongs to one that is still open."""

    def __init__(self, request_id: str):
        message = f"A request with id {request_id!r} is still open. Choose another id, or leave it out."
        super().__init__(message, param="request_id")


class ShuttingDownError(DsjaxError):
    """The server ends before the request has."""


_INTERNAL = (500, "internal_error")
_STATUS_AND_CODE: dict[type[DsjaxError], tuple[int, str | None]] = {  # the first that fits
    ModelNotFoundError: (404, "model_not_found"),
    DuplicateRequestError: (409, "duplicate_request_id"),
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
    message = error.detail
    if error.status_code == 404:
        message = f"There is nothing at {request.url.path}. GET /docs lists what there is."
    elif error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}. GET /docs says what it takes."
    return _response(error.status_code, _body(error.status_code, message, None, None), error.headers)


async def _invalid(_: Request, error: Exception) -> Response:
    """400, not FastAPI's 422, with a message that names the fields at fault."""
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    place = problems[0]["loc"][1:]
    param = place[0] if place and isinstance(place[0], str) else None
    return error_response(RequestError(" ".join(_describe_problem(problem) for problem in problems), param))


def _describe_problem(problem: dict[str, Any]) -> str:
    place = problem["loc"][1:]
    if problem["type"] == "json_invalid":
        return f"The body is not valid JSON: {problem['ctx']['error']} at position {place[0]}."
    if not place:
        return "The body must be a JSON object, sent with the header Content-Type: application/json."
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    text = problem["msg"].removeprefix("Value error, ").rstrip(".")
    return f"{name}: {text}."


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: Any = None) -> Response:
    # ASCII, since a message may quote text from the request that is not valid Unicode.
    return Response(json.dumps(body), status, headers, media_type="application/json")
