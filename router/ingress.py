"""The Serve deployment: HTTP in, OpenAI-shaped answers out.

Routes, bodies, errors, streaming. What a request means is in api, tokenization and answering; where it goes
is in dispatch.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from pdserve.cluster.base.clock import SystemClock
from pdserve.cluster.base.config import AdmissionConfig, IngressConfig
from pdserve.cluster.base.errors import EngineError, InvalidRequestError, PdserveError, WorkerLostError
from pdserve.cluster.base.ids import IngressId, RequestId
from pdserve.cluster.base.logs import configure_logging
from pdserve.cluster.base.metrics import IngressMetrics, merge_metrics
from pdserve.cluster.base.request import Request as EngineRequest
from pdserve.cluster.base.request import SamplingParams, forks_of
from pdserve.cluster.base.timeline import Timelines
from pdserve.cluster.base.wire import ChannelSettings
from pdserve.cluster.base.worker_info import Endpoint
from pdserve.router.answering import AnswerPlan, Answers
from pdserve.router.answers import (
    ChatShape,
    CompletionShape,
    Scoring,
    Shape,
    WholeChoice,
    error_body,
    model_list,
)
from pdserve.router.api import GenerationBody, parse_chat, parse_completion
from pdserve.router.choice import ChoicePlan
from pdserve.router.dispatch import Dispatcher
from pdserve.router.explanation import explanation_body
from pdserve.router.http_errors import describe_error
from pdserve.router.replay import Replayer, ReplaySettings
from pdserve.router.slo import ttft_limit_s
from pdserve.router.sse import ClosingStream, stream_events
from pdserve.router.tokenization import FALLBACK_STOP, Tokenizer

logger = logging.getLogger(__name__)

MAX_SCORED_PROMPT = 65536
"""Their log probabilities travel in one frame."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions; chat answers default to all that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressSettings:
    """Everything a replica needs to know."""

    config: IngressConfig
    admission: AdmissionConfig
    channel: ChannelSettings
    served_name: str
    model_folder: str
    vocab_size: int
    max_model_len: int


class Ingress:
    """One replica. Serve builds its ASGI application after the constructor."""

    def __init__(self, settings: IngressSettings, resolve_controller: Callable[[], Awaitable[Endpoint]]) -> None:
        configure_logging()
        self._settings = settings
        self._resolve_controller = resolve_controller

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; called by Serve."""
        return build_app(self._settings, self._resolve_controller)


def build_app(settings: IngressSettings, resolve_controller: Callable[[], Awaitable[Endpoint]]) -> FastAPI:
    """Return the ASGI application of one replica."""
    service = _Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start(resolve_controller)
        yield
        await service.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(PdserveError, service.on_error)
    app.add_exception_handler(Exception, service.on_error)
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/cluster/requests/{client_id}", service.explain, methods=["GET"])
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/ready", service.ready, methods=["GET"])
    app.add_api_route("/metrics", service.metrics, methods=["GET"])
    return app


class _Service:
    """The handlers and what they share."""

    def __init__(self, settings: IngressSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._metrics = IngressMetrics()
        self._timelines = Timelines(self._clock)
        self._created = int(time.time())
        self._started: tuple[Tokenizer, Answers] | None = None

    async def start(self, resolve_controller: Callable[[], Awaitable[Endpoint]]) -> None:
        """Load the tokenizer and connect."""
        settings = self._settings
        tokenizer = await asyncio.to_thread(
            Tokenizer,
            Path(settings.model_folder),
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )
        dispatcher = Dispatcher(
            IngressId(secrets.token_hex(4)),
            settings.channel,
            resolve_controller,
            route_timeout_s=settings.config.route_timeout_s,
            token_timeout_s=settings.config.token_timeout_s,
            metrics_text=self._metrics.text,
            traces=self._timelines.matching,
        )
        dispatcher.start()
        replays = ReplaySettings(
            max_attempts=settings.config.max_attempts, replay_timeout_s=settings.config.replay_timeout_s
        )
        metrics = self._metrics
        replayer = Replayer(dispatcher, replays, self._timelines, self._clock, metrics.replays.inc, metrics.moves.inc)
        self._started = tokenizer, Answers(replayer, tokenizer, self._metrics, self._clock)

    async def stop(self) -> None:
        """Disconnect; streams that still run end with an error."""
        await self._answers.replayer.dispatcher.stop()
        await self._answers.stop()

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._started is not None, "the lifespan starts the service before any request"
        return self._started[0]

    @property
    def _answers(self) -> Answers:
        assert self._started is not None, "the lifespan starts the service before any request"
        return self._started[1]

    # Handlers.

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        start_time = self._clock.now()
        self._metrics.requests.labels(CompletionShape.endpoint).inc()
        body = parse_completion(await self._read_json(request))
        self._check_model(body.model)
        limit_s = ttft_limit_s(request.headers, self._settings.admission)
        base = _draw_id(CompletionShape.id_prefix)
        encoded = await asyncio.to_thread(self._completion_requests, base, body.prompts, body)
        requests = [replace(one, ttft_limit_s=limit_s) for one in encoded]
        scoring = Scoring(tokens=self._tokenizer, num_logprobs=body.num_logprobs)
        shape = CompletionShape(base, self._settings.served_name, int(time.time()), scoring)
        choices = [
            self._choice_plan(request, body, body.stop_strings, prompt)
            for request, prompt in zip(requests, body.prompts, strict=True)
            for _ in range(body.num_samples)
        ]
        samples = [sample for request in requests for sample in (request, *forks_of(request))]
        plan = AnswerPlan(requests=samples, choices=choices, endpoint=shape.endpoint, start_time=start_time)
        return await self._answer(plan, shape, body)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        start_time = self._clock.now()
        self._metrics.requests.labels(ChatShape.endpoint).inc()
        body = parse_chat(await self._read_json(request))
        self._check_model(body.model)
        tokenizer = self._tokenizer
        ids = await asyncio.to_thread(tokenizer.encode_chat, body.messages)
        base = _draw_id(ChatShape.id_prefix)
        limit_s = ttft_limit_s(request.headers, self._settings.admission)
        first = replace(self._engine_request(base, ids, body, None, "messages"), ttft_limit_s=limit_s)
        stops = body.stop_strings if tokenizer.has_chat_template else (*body.stop_strings, FALLBACK_STOP)
        scoring = Scoring(tokens=tokenizer, num_logprobs=body.num_logprobs)
        shape = ChatShape(base, self._settings.served_name, int(time.time()), scoring)
        choices = [self._choice_plan(first, body, stops, "") for _ in range(body.num_samples)]
        samples = [first, *forks_of(first)]
        plan = AnswerPlan(requests=samples, choices=choices, endpoint=shape.endpoint, start_time=start_time)
        return await self._answer(plan, shape, body)

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse(model_list([self._settings.served_name], self._created))

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        self._check_model(name)
        return JSONResponse({"id": name, "object": "model", "created": self._created, "owned_by": "pdserve"})

    async def explain(self, client_id: str) -> Response:
        """GET /cluster/requests/ID: why a request went where it went, and what every process noted of it."""
        found = await self._answers.replayer.dispatcher.controller.explain(client_id)
        if not found.decisions and not found.traces:
            raise InvalidRequestError(
                f"nobody remembers a request {client_id!r}", param="id", code="request_not_found", status=404
            )
        return JSONResponse(explanation_body(client_id, found))

    async def health(self) -> Response:
        """GET /health: this replica runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: a request sent now finds a worker."""
        if self._answers.replayer.dispatcher.has_worker:
            return JSONResponse(
                {"status": "ready", "controller": self._answers.replayer.dispatcher.controller.is_connected}
            )
        return JSONResponse(error_body("no worker is ready", "service_unavailable"), status_code=503)

    async def metrics(self) -> Response:
        """GET /metrics: every process of the deployment, merged."""
        texts = await self._answers.replayer.dispatcher.controller.metrics()
        return PlainTextResponse(merge_metrics({text.process: text.text for text in texts}))

    async def on_error(self, request: Request, error: Exception) -> Response:
        """Turn an error before the first byte into its status and body."""
        status, body, headers = describe_error(error)
        if status == 500:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        if not isinstance(error, EngineError | WorkerLostError):
            # Those two ended in the engine, and are counted as endings.
            self._metrics.rejected.labels(str(status)).inc()
        return JSONResponse(body, status_code=status, headers=headers)

    # Steps of a generation.

    async def _read_json(self, request: Request) -> object:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise InvalidRequestError(
                f"content-type must be application/json, not {kind or 'absent'}",
                code="unsupported_media_type",
                status=415,
            )
        limit = self._settings.config.max_body_bytes
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise InvalidRequestError(f"the body is over {limit} bytes", code="body_too_large", status=413)
            chunks.append(chunk)
        try:
            return json.loads(b"".join(chunks), parse_constant=_refuse_constant)
        except RecursionError as error:
            raise InvalidRequestError("the body is nested too deeply", code="invalid_json") from error
        except ValueError as error:
            raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error

    def _check_model(self, name: str) -> None:
        if name != self._settings.served_name:
            raise InvalidRequestError(
                f"model {name!r} does not exist; served: {self._settings.served_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _completion_requests(
        self, base: RequestId, prompts: list[str | list[int]], body: GenerationBody
    ) -> list[EngineRequest]:
        encoded = [self._tokenizer.encode_prompt(prompt) for prompt in prompts]
        ids = [base] if len(prompts) == 1 else [RequestId(f"{base}-{number}") for number in range(len(prompts))]
        return [
            self._engine_request(request_id, prompt_ids, body, DEFAULT_COMPLETION_TOKENS, "prompt")
            for request_id, prompt_ids in zip(ids, encoded, strict=True)
        ]

    def _engine_request(
        self, request_id: RequestId, ids: tuple[int, ...], body: GenerationBody, default_tokens: int | None, param: str
    ) -> EngineRequest:
        seed = body.seed if body.seed is not None else secrets.randbits(63)
        self._tokenizer.check_token_ids(body.stop_token_ids or (), "stop_token_ids")
        self._tokenizer.check_token_ids((bias.token_id for bias in body.biases), "logit_bias")
        # To score a prompt alone, one token is sampled and dropped.
        limit = 1 if body.token_limit == 0 else body.token_limit
        max_tokens = self._tokenizer.output_limit(len(ids), limit, default_tokens, param)
        if body.has_echo and body.num_logprobs is not None and len(ids) > MAX_SCORED_PROMPT:
            raise InvalidRequestError(
                f"logprobs with echo: the prompt has {len(ids)} tokens, at most {MAX_SCORED_PROMPT} are scored",
                param="logprobs",
            )
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {min_tokens}; {max_tokens} tokens can be generated", param="min_tokens"
            )
        return EngineRequest(
            request_id=request_id,
            attempt=0,
            prompt_token_ids=ids,
            forks=tuple(RequestId(f"{request_id}.{sample}") for sample in range(1, body.num_samples)),
            priority=body.priority or 0,
            tenant=body.user or "",
            cache_salt=body.cache_salt or "",
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_k=max(0, body.top_k or 0),
                top_p=1.0 if body.top_p is None else body.top_p,
                min_p=body.min_p or 0.0,
                seed=seed % 2**64,
                frequency_penalty=body.frequency_penalty or 0.0,
                presence_penalty=body.presence_penalty or 0.0,
                repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
                logit_bias=body.biases,
                min_tokens=min_tokens,
                stop_token_ids=tuple(body.stop_token_ids or ()),
                ignore_eos=bool(body.ignore_eos),
                num_logprobs=body.num_logprobs,
                num_prompt_logprobs=body.num_logprobs if body.has_echo else None,
            ),
        )

    def _choice_plan(
        self, request: EngineRequest, body: GenerationBody, stops: Sequence[str], prompt: str | list[int]
    ) -> ChoicePlan:
        echo = None
        if body.has_echo:
            echo = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        return ChoicePlan(
            prompt_token_ids=request.prompt_token_ids,
            stops=stops,
            min_tokens=request.sampling.min_tokens,
            echo=echo,
            has_output=body.token_limit != 0,
        )

    async def _answer(self, plan: AnswerPlan, shape: Shape, body: GenerationBody) -> Response:
        # Placed here, so that an error before the first token is an HTTP status, not an event.
        firsts = [request for request in plan.requests if request.sample == 0]
        self._metrics.prompt_tokens.inc(sum(len(request.prompt_token_ids) for request in firsts))
        answer = await self._answers.start(plan)
        if body.stream:
            events = stream_events(answer, shape, wants_usage=body.wants_usage_chunk)
            return ClosingStream(events, answer.close)
        try:
            choices = [WholeChoice() for _ in answer.choices]
            async for item in answer.pieces():
                choice, piece = choices[item.index], item.piece
                choice.text += piece.text
                choice.scores += piece.scores
                choice.finish_reason = piece.finish_reason or choice.finish_reason
            return JSONResponse(shape.whole(choices, answer.usage))
        finally:
            answer.close()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _draw_id(prefix: str) -> RequestId:
    return RequestId(prefix + secrets.token_hex(12))


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: f"no such path: {request.url.path}", 405: f"{request.method} is not allowed on {request.url.path}"}
    headers = error.headers if isinstance(error, HTTPException) else None
    body = error_body(messages.get(status, "the request cannot be served"), "invalid_request_error")
    return JSONResponse(body, status_code=status, headers=headers)
