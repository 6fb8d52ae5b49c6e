"""The routes of the server: checks of a request, and its submission to the engine.

The checks run in this order: the host in the request, the key, size and arrival time of the body, JSON syntax, fields, the model, the number and the
largest length of the texts, and finally room in the queue. No input from a client ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nntask import DataError, ProcessUnavailable
from nntask.data import ChatProcess
from nntask.inference import TextIds, TokenBytes

from . import schema
from .answers import Form
from .engine import TextEngine
from .errors import ApiError
from .jobs import Desk, Progress, Prompt, encoded, full_queue, job_of
from .loopback import is_loopback
from .metrics import Metrics
from .page import page

Handler = Callable[[Request], Awaitable[Response]]
_SSE: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
IGNORED: Final = "x-ignored-fields"
"""Response header that lists the unknown fields of a request."""
_LONGEST_HEADER: Final = 500
_MOST_NAMED: Final = 100
_SMALL: Final = 16 << 10
"""Size of a body in bytes, or of prompts in characters, up to which they are parsed in the event loop; that takes a few milliseconds at most."""
_MOST_LARGE: Final = 2
"""Number of larger bodies or prompts that are parsed at the same time."""
T = TypeVar("T")
_LEFT: Final = 499
"""Status that the metrics count if the client disconnects before its answer; it is never sent."""


@dataclass(frozen=True, slots=True)
class Service:
    """The served model and the settings of the server.

    Args:
        name: name of the model.
        created: seconds since 1970.
        fingerprint: id of the software and the model.
        template: chat template; None if the tokenizer has none.
        key: API key that requests must send; "" for none.
        most_bytes: maximum size of a request's body.
        receive_seconds: time limit for the arrival of a body.
        is_local: whether the server listens to this machine only.
        is_strict: whether unknown fields are refused.
    """

    name: str
    created: int
    fingerprint: str
    ids: TextIds
    template: ChatProcess | None
    key: str
    most_bytes: int
    receive_seconds: float
    is_local: bool
    is_strict: bool = False


class Application:
    """The ASGI application and its state.

    Attributes:
        is_ending: whether new texts are refused.
    """

    def __init__(self, service: Service, engine: TextEngine, desk: Desk, metrics: Metrics) -> None:
        self._service, self._engine, self._desk, self._metrics = service, engine, desk, metrics
        self.is_ending, self._words = False, TokenBytes(service.ids.tokenizer)
        self._ignored: set[str] = set()
        self._rendering, self._num_unwritten = asyncio.Lock(), 0
        self._large = asyncio.Semaphore(_MOST_LARGE)
        routes = [
            self._route("/v1/completions", self._texts, "POST"),
            self._route("/v1/chat/completions", self._texts, "POST"),
            self._route("/v1/models", self._models, "GET"),
            self._route("/v1/models/{name:path}", self._model, "GET"),
            self._route("/metrics", self._told_metrics, "GET"),
            self._route("/health", self._health, "GET", is_open=True),
            self._route("/", self._page, "GET", is_open=True),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _as_error, Exception: _as_bug})

    def end(self) -> None:
        """Shut down: end all jobs with an error and close the template and the tokenizer."""
        self.is_ending = True
        self._engine.end()
        if self._service.template is not None:
            self._service.template.close()
        self._service.ids.tokenizer.close()

    def _route(self, path: str, handler: Handler, method: str, *, is_open: bool = False) -> Route:
        """Return a route that answers errors in OpenAI's format."""

        async def answer(request: Request) -> Response:
            begin = time.monotonic()
            try:
                _check_framing(request)
                self._check_host(request)
                if not is_open:
                    self._check_key(request)
                response = await handler(request)
            except ApiError as error:
                response = JSONResponse(error.body(), error.status, error.headers)
            except ClientDisconnect:
                response = Response(status_code=_LEFT)
            self._metrics.answered(path, response.status_code, time.monotonic() - begin)
            return response

        return Route(path, answer, methods=[method])

    def _check_host(self, request: Request) -> None:
        """Refuse foreign host names: a page of another site can make a browser send requests to this machine under its own name (DNS rebinding)."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._service.is_local and not is_loopback(name):
            raise ApiError(
                403, f"this server answers to localhost and addresses of loopback, got the host {host[:80]!r}; start it with another --host"
            )

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if self._service.key and not (scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._service.key.encode())):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key", headers=headers)

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request after checks of its type, size and arrival time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # pages of other sites can only send other types without a preflight request
            raise ApiError(415, f"the body must be of type application/json, got {kind[:80] or 'none'}; set content-type")
        most, content = self._service.most_bytes, bytearray()
        too_large = ApiError(413, f"the body must have at most {most:,} bytes; send less", code="request_too_large", headers={"connection": "close"})
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise too_large
        try:
            async with asyncio.timeout(self._service.receive_seconds):
                async for piece in request.stream():
                    content += piece
                    if len(content) > most:
                        raise too_large
        except TimeoutError:
            headers = {"connection": "close"}
            raise ApiError(408, f"the body must arrive within {self._service.receive_seconds:g} s; send it faster", headers=headers) from None
        return bytes(content)

    async def _texts(self, request: Request) -> Response:
        """Answer ``/v1/completions`` and ``/v1/chat/completions``."""
        service, is_chat = self._service, "chat" in request.url.path
        if self.is_ending:
            raise ApiError(503, "the server is shutting down; ask another one", code="shutting_down")
        body = await self._body(request)
        read = partial(_read, body, is_chat=is_chat, is_strict=service.is_strict)
        asked = read() if len(body) <= _SMALL else await self._beside(read)
        self._note_ignored(asked.ignored)
        self._check_model(asked.model)
        if (count := asked.num_texts) > self._engine.most_open:
            raise ApiError(400, f"a request may ask for at most {self._engine.most_open} texts, got {count}; ask for fewer at a time", param="n")
        prompts = await self._encoded(asked)
        assert self._engine.batch is not None  # the server opens the batch first
        job = job_of(asked, prompts, service.ids, self._engine.batch)
        form = Form(
            is_chat=is_chat,
            name=("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
            created=int(time.time()),
            model=service.name,
            fingerprint=service.fingerprint,
            words=self._words,
            tells_scores=asked.num_top is not None,
        )
        progress, held = Progress(asked, prompts, form, service.ids.tokenizer.decode, self._words), contextlib.ExitStack()
        queue = held.enter_context(self._desk.submitted(self._engine, job))
        if asked.stream:
            return _EventStream(progress.events(queue), held, _ignored_header(asked.ignored))
        with held:
            return JSONResponse(await _unless_left(request, progress.until_complete(queue)), headers=_ignored_header(asked.ignored))

    def _note_ignored(self, names: Sequence[str]) -> None:
        """Log each ignored field once, and at most `_MOST_NAMED` of them, since clients choose the names."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < _MOST_NAMED:
                self._ignored.add(name)
                print(f"nntask: the field {name} of requests is unknown and is ignored; --strict-fields refuses it", file=sys.stderr)

    async def _beside(self, work: Callable[[], T]) -> T:
        """Run long work in another thread, at most `_MOST_LARGE` calls at a time, so that the event loop keeps answering."""
        async with self._large:
            return await asyncio.to_thread(work)

    async def _encoded(self, asked: schema.Asked) -> list[Prompt]:
        """Return the prompts of a request, encoded in another thread.

        Conversations are rendered one at a time; texts that wait for the template count as open.
        """
        count = asked.num_texts if asked.messages else 0
        if count and self._engine.num_open + self._num_unwritten + count > self._engine.most_open:
            raise full_queue(count)
        self._num_unwritten += count
        encode = partial(encoded, asked, self._service.ids, self._service.template)
        try:
            if sum(map(len, asked.prompts)) > _SMALL:
                return await self._beside(encode)
            async with self._rendering if asked.messages else contextlib.nullcontext():
                return await asyncio.to_thread(encode)
        except ProcessUnavailable as error:
            code = "shutting_down" if self.is_ending else "template_unavailable" if asked.messages else "tokenizer_unavailable"
            raise ApiError(503, str(error), code=code, headers={"retry-after": "1"}) from None
        except DataError as error:
            param = "messages" if asked.messages else "prompt"
            raise ApiError(400, str(error), param=param) from None
        finally:
            self._num_unwritten -= count

    def _check_model(self, name: str) -> None:
        if name != self._service.name:
            message = f"this server has the model {self._service.name!r}, got {name[:80]!r}; set model to that name"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _about(self) -> dict[str, Any]:
        return {"id": self._service.name, "object": "model", "created": self._service.created, "owned_by": "nntask"}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._about())

    async def _health(self, request: Request) -> Response:
        if self._engine.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ending"}, 503) if self.is_ending else JSONResponse({"status": "ok"})

    async def _told_metrics(self, request: Request) -> Response:
        text, kind = self._metrics.text()
        return Response(text, media_type=kind)

    async def _page(self, request: Request) -> Response:
        assert self._engine.batch is not None  # the server opens the batch first
        tokens = min(256, max(1, self._engine.batch.shape.longest // 2))
        text, policy = page(self._service.name, is_chat=self._service.template is not None, has_key=bool(self._service.key), tokens=tokens)
        return HTMLResponse(text, headers={"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"})


def _read(body: bytes, *, is_chat: bool, is_strict: bool) -> schema.Asked:
    """Return the request in a body.

    Raises:
        ApiError: the body breaks a rule.
    """
    return (schema.chat if is_chat else schema.completion)(schema.parsed(body), is_strict=is_strict)


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists the ignored fields of a request; an empty dictionary if there are none."""
    return {IGNORED: ", ".join(names)[:_LONGEST_HEADER]} if names else {}


def _check_framing(request: Request) -> None:
    """Refuse a request with two lengths: if a proxy uses the other one, the body can hide a second request (RFC 9112, section 6.3)."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise ApiError(400, "a request has content-length or transfer-encoding, got both; send one of them", headers={"connection": "close"})


class _EventStream(StreamingResponse):
    """Server-sent events; `held` is closed when the stream ends or the client disconnects."""

    def __init__(self, events: Any, held: contextlib.ExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_SSE | headers)
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _unless_left(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, and cancel it if the client disconnects first.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def leaves() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, left = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        left.cancel()


async def _as_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 404:
        says = f"no such path, {path!r}; there are GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
    else:
        says = f"{path!r} takes {(error.headers or {}).get('Allow', 'other methods')}, got {request.method}; use that method"
    found = ApiError(error.status_code, says)
    return JSONResponse(found.body(), error.status_code, error.headers)


async def _as_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception; its traceback is written to stderr."""
    return JSONResponse(ApiError(500, "internal server error; see the server log").body(), 500)
