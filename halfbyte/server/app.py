"""The routes. Each reads its body, makes a wish of it, and answers with what the scheduler delivers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import metrics
from . import messages, responses, schema, tables
from .answers import Answer, ChatAnswer, CompletionAnswer, Whole
from .body import read_json
from .gate import Gate
from .messages import MessagesAnswer
from .openapi import Operation, describe
from .page import Page
from .refusals import Refused, wrong
from .responses import ResponsesAnswer
from .schema import Given, Wish
from .service import Service
from .settings import Settings
from .streams import EventStream, unless_gone, whole
from .tables import Model

log = logging.getLogger("halfbyte.server")
WATCH_SECONDS = 0.25
Labels = metrics.Labels
Wished = Callable[[Given, Model, Settings], Wish]
OPERATIONS = (
    Operation("/v1/chat/completions", "chat", "A reply to a conversation (OpenAI).", tables.chat, streams=True),
    Operation("/v1/completions", "completions", "Texts that go on (OpenAI).", tables.completion, streams=True),
    Operation("/v1/responses", "responses", "A reply as items (OpenAI), stateless.", responses.table, streams=True),
    Operation("/v1/messages", "messages", "A reply as blocks (Anthropic).", messages.table, streams=True),
    Operation("/v1/messages/count_tokens", "count_tokens", "Tokens of a conversation (Anthropic).", messages.count),
    Operation("/v1/models", "models", "The models that are served."),
    Operation("/v1/models/{name:path}", "model", "One of them."),
    Operation("/tokenize", "tokenize", "Token ids of a text, or of a conversation.", tables.tokenize),
    Operation("/detokenize", "detokenize", "The text of token ids.", tables.detokenize),
    Operation("/health", "health", "Whether the process should live."),
    Operation("/ready", "ready", "Whether it should be sent more work."),
    Operation("/metrics", "numbers", "Numbers for Prometheus.", media="text/plain"),
    Operation("/openapi.json", "description", "This description."),
)


class Counted:
    """Counts and logs every request: its route, status and time; nothing of what was said."""

    def __init__(self, app: ASGIApp, counts: Counter[Labels], routes: frozenset[str]) -> None:
        self.app, self.counts, self.routes = app, counts, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status = time.monotonic(), 499
        scope["request_id"] = secrets.token_hex(8)
        route = scope["path"] if scope["path"] in self.routes else "other"

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                mine = (b"x-request-id", scope["request_id"].encode())
                message = {**message, "headers": [*message.get("headers", ()), mine]}  # the list may be everybody's
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except Exception:
            status = 500
            raise
        finally:
            self.counts[(("route", route), ("code", str(status)))] += 1
            log.info("%s %s %d %.3f s", scope["request_id"], route, status, time.monotonic() - begun)


class Api:
    def __init__(self, service: Service, guarded: bool) -> None:
        self.service, self.settings = service, service.settings
        self.tables = {
            one.path: one.body(service.described, service.settings) for one in OPERATIONS if one.body is not None
        }
        self.described = describe(OPERATIONS, self.tables, guarded)
        self.name = service.described.names[0]
        self.started = int(time.time())
        self.requests: Counter[Labels] = Counter()

    async def chat(self, request: Request) -> Any:
        return await self._answer(request, schema.chat, ChatAnswer)

    async def completions(self, request: Request) -> Any:
        return await self._answer(request, schema.completion, CompletionAnswer)

    async def responses(self, request: Request) -> Any:
        return await self._answer(request, responses.wish, ResponsesAnswer)

    async def messages(self, request: Request) -> Any:
        return await self._answer(request, messages.wish, MessagesAnswer)

    async def count_tokens(self, request: Request) -> Response:
        wish = messages.wish(await self._body(request), self.service.described, self.settings)
        ids = (await unless_gone(request.receive, self.service.prepared(wish)))[0][0]
        return JSONResponse({"input_tokens": len(ids)})

    async def _body(self, request: Request) -> Given:
        """The body, every field of it checked by the route's table."""
        if self.service.draining:
            raise Refused(503, "The server is shutting down.", code="shutting_down")
        return self.tables[request.scope["path"]].read(await read_json(request, self.settings))

    async def _answer(self, request: Request, wished: Wished, kind: type[Answer]) -> Any:
        service = self.service
        wish = wished(await self._body(request), service.described, self.settings)
        jobs = await unless_gone(request.receive, service.jobs(wish, request.scope["owner"]))
        ticket = service.desk.submit(jobs)
        answer = kind(wish.given["model"] or self.name, service.tokenizer, wish, jobs)
        if wish.stream:
            return EventStream(service.desk, ticket, answer, self.settings.ping_seconds)
        return Whole(await whole(service.desk, ticket, answer, request.receive))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.service.described.names]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self.service.described.names:
            raise Refused(404, "There is no such model here.", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        known = {"id": name, "object": "model", "created": self.started, "owned_by": "halfbyte"}
        return {**known, "max_model_len": self.service.described.context}

    async def tokenize(self, request: Request) -> Response:
        service, given = self.service, await self._body(request)
        if given["messages"] is not None:
            wish = schema.chat(given, service.described, self.settings)
            wish.opens = given["add_generation_prompt"] is not False
            ids = (await unless_gone(request.receive, service.prepared(wish)))[0][0]
        else:
            text = given["content"] if given["prompt"] is None else given["prompt"]
            if text is None:
                raise wrong("prompt", "a text")
            special = given["add_special_tokens"] or given["add_special"]
            tokenizer = service.tokenizer
            encode = tokenizer.prompt_ids if special else partial(tokenizer.encode, special=False)
            ids = await unless_gone(request.receive, service.preparing.run(partial(encode, text)))
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.described.context})

    async def detokenize(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.service.tokenizer.decode, (await self._body(request))["tokens"])
        return JSONResponse({"prompt": text, "content": text})

    async def description(self, request: Request) -> Response:
        return JSONResponse(self.described)

    async def health(self, request: Request) -> Response:
        """Whether the process should live."""
        trouble = self.service.scheduler.trouble
        return JSONResponse({"status": "ok" if trouble is None else trouble}, 200 if trouble is None else 503)

    async def ready(self, request: Request) -> Response:
        """Whether it should be sent more work."""
        scheduler = self.service.scheduler
        full = "the queue is full" if scheduler.full else None
        why = scheduler.trouble or ("shutting down" if self.service.draining else full)
        return JSONResponse({"status": why or "ready"}, 200 if why is None else 503)

    async def numbers(self, request: Request) -> Response:
        values = await asyncio.to_thread(self._numbers)  # some may wait for a GPU
        return PlainTextResponse(metrics.text(values), media_type="text/plain; version=0.0.4")

    def _numbers(self) -> dict[str, tuple[str, metrics.Value]]:
        scheduler, counts = self.service.scheduler, self.service.scheduler.counts
        ended = list(scheduler.aborts.items())  # at once: the engine's thread adds to it
        aborts: dict[Labels, float] = {(("reason", reason),): count for reason, count in ended}
        return {
            "requests_total": ("Requests by route and status.", self.requests),
            "requests_running": ("Replies that are being computed.", scheduler.running),
            "requests_waiting": ("Replies that wait for a slot.", len(scheduler.waiting)),
            "prompt_tokens_total": ("Tokens of prompts, kept ones too.", counts["prompt_tokens"]),
            "generation_tokens_total": ("Tokens of replies.", counts["generation_tokens"]),
            "time_to_first_token_seconds": ("From joining the line to the first token.", scheduler.first_token),
            "inter_token_seconds": ("Between two tokens of a reply.", scheduler.between_tokens),
            "kv_bytes": ("Memory of all slots.", self.service.cache.nbytes),
            "prefix_cache_bytes": ("Memory of the beginnings of prompts.", scheduler.prefixes.held),
            "prefix_cache_hit_tokens_total": ("Tokens of prompts not computed.", counts["prefix_cache_hit_tokens"]),
            "aborts_total": ("Replies that ended before their time.", aborts),
            "engine_up": ("1 while the engine answers.", int(scheduler.trouble is None)),
            **self._of_experts(),
        }

    def _of_experts(self) -> dict[str, tuple[str, metrics.Value]]:
        """Of a model whose experts are on disk, or beside a GPU."""
        residency, reads = self.service.model.residency, self.service.scheduler.reads.value
        if residency is None or reads is None:
            return {}
        return {
            "expert_cache_bytes": ("Memory of experts.", residency.nbytes),
            "expert_cache_hits_total": ("Experts that were where they are computed.", reads.needed - reads.missing),
            "expert_cache_misses_total": ("Experts that had to be read or copied.", reads.missing),
            "expert_read_bytes_total": ("Bytes of experts read or copied.", reads.bytes),
            "expert_read_seconds_total": ("Time in which they were read.", reads.seconds),
            "expert_read_stalls_total": ("Times that a read seemed to have no end.", residency.stalls),
        }


def create(
    service: Service, *, keys: list[str], hosts: list[str], origins: list[str], fatal: Callable[[], None]
) -> ASGIApp:
    """The application. `fatal` is called once when the engine has died or hangs, after every client was told."""
    api = Api(service, guarded=bool(keys))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.desk.loop = asyncio.get_running_loop()
        service.scheduler.start()
        watcher = asyncio.create_task(watch(service, fatal))
        yield
        watcher.cancel()
        service.close()

    routes = [Route("/", Page().answer)]
    routes += [Route(one.path, getattr(api, one.answer), methods=[one.method]) for one in OPERATIONS]
    middleware = [Middleware(Counted, counts=api.requests, routes=frozenset(route.path for route in routes))]
    if origins:
        # Any header: clients of OpenAI and Anthropic send a dozen of their own, and none changes what is allowed here.
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    middleware.append(Middleware(Gate, settings=service.settings, keys=keys, hosts=hosts, origins=origins))
    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        Refused: _refused, HTTPException: _http_error, Exception: _failed,
    }  # fmt: skip
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


async def watch(service: Service, fatal: Callable[[], None]) -> None:
    """Tell the clients when the engine cannot, each time that it falls silent."""
    told = None
    while True:
        trouble = service.scheduler.trouble
        if trouble is not None and told is None:
            log.critical("%s: every request is answered with 503", trouble)
            service.desk.fail_all(trouble)
            fatal()
        told = trouble
        await asyncio.sleep(WATCH_SECONDS)


async def _refused(request: Request, refused: Refused) -> Response:
    return refused.response(request.scope["path"])


async def _http_error(request: Request, error: HTTPException) -> Response:
    said = {404: "There is no such route.", 405: "This route takes another method."}.get(error.status_code, "Refused.")
    response = Refused(error.status_code, said).response(request.scope["path"])
    response.headers.update(error.headers or {})  # the methods that a route does take
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """The client gets an id to quote; what went wrong stands in the log under it."""
    id = request.scope.get("request_id", "")
    log.error("request %s failed", id)
    refused = Refused(500, f"The server failed; its log has this as request {id}.", code="internal_error")
    return refused.response(request.scope["path"])
