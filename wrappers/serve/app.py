"""The routes: what a request must be before anybody works on it, and the work handed on.

A request is looked at in this order: the host that it names, its key, its size and how long it takes to arrive, its form, its fields, the model, how
many texts it asks for and how long they may become, and at last whether there is a place in the queue. Nothing that a client sends ends the server.
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
from nntask.inference import TextIds, TokenBytes

from . import schema
from .answers import Form
from .engine import TextEngine
from .errors import ApiError
from .jobs import ChatPrompts, Desk, Progress, Prompt, encoded, full_queue, job_of
from .loopback import is_loopback
from .metrics import Metrics
from .page import page

Handler = Callable[[Request], Awaitable[Response]]
_SSE: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
IGNORED: Final = "x-ignored-fields"
"""Header of answers to requests with fields that nobody knows."""
_LONGEST_HEADER: Final = 500
_MOST_NAMED: Final = 100
_SMALL: Final = 16 << 10
"""Bytes of a body, and characters of prompts, that are read at once, which takes some milliseconds at most."""
_MOST_LARGE: Final = 2
"""Larger ones that are read at a time."""
T = TypeVar("T")
_LEFT: Final = 499
"""What is counted where the client has left before its answer; nobody reads it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What is served.

    Args:
        name: of the model.
        created: seconds since 1970.
        fingerprint: of the software and the model.
        template: of conversations; None where the tokenizer has none.
        key: that requests must bring; "" for none.
        most_bytes: of a request's body.
        receive_seconds: in which it must arrive.
        is_local: whether only this machine is listened to.
        is_strict: whether fields that nobody knows are refused.
    """

    name: str
    created: int
    fingerprint: str
    ids: TextIds
    template: ChatPrompts | None
    key: str
    most_bytes: int
    receive_seconds: float
    is_local: bool
    is_strict: bool = False


class Application:
    """The application for an ASGI server, and what it knows.

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
        """Tell everybody that the server shuts down."""
        self.is_ending = True
        self._engine.end()
        if self._service.template is not None:
            self._service.template.close()
        self._service.ids.tokenizer.close()

    def _route(self, path: str, handler: Handler, method: str, *, is_open: bool = False) -> Route:
        """A route whose refusals have OpenAI's shape."""

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
        """A page of another site may make a browser send requests to this machine under a name of its own (DNS rebinding)."""
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._service.is_local and not is_loopback(name):
            raise ApiError(
                403, f"this server answers to localhost and addresses of loopback, got the host {host[:80]!r}; start it with --host for others"
            )

    def _check_key(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if self._service.key and not (scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._service.key.encode())):
            headers = {"www-authenticate": "Bearer"}
            raise ApiError(401, "the key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key", headers=headers)

    async def _body(self, request: Request) -> bytes:
        """The body of a request that has the right type, within limits of size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what pages of other sites may send without asking is of other types
            raise ApiError(415, f"the body must be of type application/json, got {kind[:80] or 'none'}; set content-type")
        most, found = self._service.most_bytes, bytearray()
        too_large = ApiError(413, f"the body must have at most {most:,} bytes; send less", code="request_too_large", headers={"connection": "close"})
        length = request.headers.get("content-length", "")
        if length.isdigit() and (len(length) > 18 or int(length) > most):
            raise too_large
        try:
            async with asyncio.timeout(self._service.receive_seconds):
                async for piece in request.stream():
                    found += piece
                    if len(found) > most:
                        raise too_large
        except TimeoutError:
            headers = {"connection": "close"}
            raise ApiError(408, f"the body must arrive within {self._service.receive_seconds:g} s; send it faster", headers=headers) from None
        return bytes(found)

    async def _texts(self, request: Request) -> Response:
        """``/v1/completions`` and ``/v1/chat/completions``."""
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
        assert self._engine.batch is not None  # it has been opened
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
        """Name fields that are ignored in the log, each once; no more than `_MOST_NAMED`, since clients choose them."""
        for name in names:
            if name not in self._ignored and len(self._ignored) < _MOST_NAMED:
                self._ignored.add(name)
                print(f"nntask: the field {name} of requests is not known here and is ignored; --strict-fields refuses it", file=sys.stderr)

    async def _beside(self, work: Callable[[], T]) -> T:
        """Do what may take seconds beside the event loop, with little else of the kind at once, so that others are answered meanwhile."""
        async with self._large:
            return await asyncio.to_thread(work)

    async def _encoded(self, asked: schema.Asked) -> list[Prompt]:
        """The prompts of a request, made beside the event loop. The template renders one conversation at a time; texts that wait for it are open."""
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
            raise ApiError(400, str(error).replace("mend or remove the line", "change the messages"), param=param) from None
        finally:
            self._num_unwritten -= count

    def _check_model(self, name: str) -> None:
        if name != self._service.name:
            raise ApiError(404, f"the model here is {self._service.name!r}, got {name[:80]!r}; ask for that", param="model", code="model_not_found")

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
        assert self._engine.batch is not None  # it has been opened
        tokens = min(256, max(1, self._engine.batch.shape.longest // 2))
        text, policy = page(self._service.name, is_chat=self._service.template is not None, has_key=bool(self._service.key), tokens=tokens)
        return HTMLResponse(text, headers={"content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"})


def _read(body: bytes, *, is_chat: bool, is_strict: bool) -> schema.Asked:
    """The request in a body.

    Raises:
        ApiError: it breaks a rule.
    """
    return (schema.chat if is_chat else schema.completion)(schema.parsed(body), is_strict=is_strict)


def _ignored_header(names: Sequence[str]) -> dict[str, str]:
    """The header that names the fields of a request that were ignored, if there are any."""
    return {IGNORED: ", ".join(names)[:_LONGEST_HEADER]} if names else {}


def _check_framing(request: Request) -> None:
    """Refuse a request with two lengths: where a proxy believes the other one, a second request would hide in its body (RFC 9112, section 6.3)."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise ApiError(400, "a request has content-length or transfer-encoding, got both; send one of them", headers={"connection": "close"})


class _EventStream(StreamingResponse):
    """Server-sent events; `held` is let go when they end, or the client leaves."""

    def __init__(self, events: Any, held: contextlib.ExitStack, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_SSE | headers)
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


async def _unless_left(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """What `work` gives, unless the client leaves before.

    Raises:
        ClientDisconnect: it has.
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
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 404:
        says = f"no such path, {path!r}; there are GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
    else:
        says = f"{path!r} takes {(error.headers or {}).get('Allow', 'other methods')}, got {request.method}; use that method"
    found = ApiError(error.status_code, says)
    return JSONResponse(found.body(), error.status_code, error.headers)


async def _as_bug(request: Request, error: Exception) -> Response:
    """What nobody expected; its traceback is written to stderr."""
    return JSONResponse(ApiError(500, "internal server error; see the server log").body(), 500)
