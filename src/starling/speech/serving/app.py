"""A server that transcribes audio over HTTP and WebSockets until it is stopped.

GET  /               a page on which users drop files or speak
GET  /health         the state of the server, and the number of clients that wait
POST /transcribe     a file as `multipart/form-data`, or as the body; ?format=json, txt, srt, vtt, ctm or jsonl
WS   /live?rate=R    raw PCM in binary messages; the server answers with final segments and partial text as JSON
POST /v1/audio/transcriptions, GET /v1/models, GET /v1/models/{model}     as in OpenAI's API

`/transcribe` and `/live` accept phrases to boost as `?boost=`. Forms may contain them in the field `boost`.
"""

import asyncio
import errno
import json
import logging
import math
import signal
import socket
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from importlib.resources import files
from pathlib import Path, PurePath
from time import time
from types import FrameType
from typing import IO, Literal, Self, TypeVar

import numpy as np
import uvicorn
from numpy.typing import NDArray
from pydantic import ValidationError, field_validator, model_validator
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from starling.configuration import Config, ProblemsError, describe
from starling.errors import ConfigError, DataError, StarlingError
from starling.reporting.progress import Say
from starling.speech.audio import Sound, check_rate, opened, pcm
from starling.speech.features import attempt
from starling.speech.serving.guard import LOOPBACK, OPENAI, Guard, Limits, problem
from starling.speech.tokens import Tokenizer
from starling.speech.transcribing.files import load_model
from starling.speech.transcribing.segmenter import Segmentation
from starling.speech.transcribing.transcriber import Transcriber
from starling.speech.transcribing.transcript import FORMATS, Seconds, Segment, Transcript, Update, formatted
from starling.timeouts import ANSWERS_END

_Result = TypeVar("_Result")

_LARGEST_MESSAGE = 1 << 20  # bytes of a WebSocket message: half a minute of audio at 16 kHz
_WAITING_MESSAGES = 32
_BACKLOG = 1024
_TOGETHER: Seconds = 30.0
"""Amount of one client's audio that is decoded before it is the next client's turn."""
_BUSY = 8
"""Number of waiting clients at which live clients stop getting partial results."""
_MOST_BOOSTED = 20_000
"""Maximum number of characters in the phrases of a request."""
_MOST_FIELDS = 1000
_WHISPER = "whisper-1"
"""Name of a model that many clients of OpenAI's API always request."""
_PAGE_FILES = {"page.html": "text/html", "page.js": "text/javascript", "microphone.js": "text/javascript"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:",
    "X-Content-Type-Options": "nosniff",
}


class _Options(Config):
    """The options of a request to OpenAI's API, which are fields of its form."""

    model: str = ""
    language: str = ""
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = 0.0
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = ()
    stream: bool = False
    chunking_strategy: Literal["auto"] = "auto"
    boost: tuple[str, ...] = ()

    @field_validator("prompt", "temperature")
    @classmethod
    def _is_not_used(cls, value: str | float) -> str | float:
        if value:
            raise ValueError(f"this server does not support it; leave it out, got {str(value)[:60]!r}")
        return value

    @model_validator(mode="after")
    def _fits_its_format(self) -> Self:
        form = self.response_format
        if self.stream and form != "json":
            raise ProblemsError(f"stream: needs response_format json, got {form}")
        if self.timestamp_granularities and form != "verbose_json":
            raise ProblemsError(f"timestamp_granularities: needs response_format verbose_json, got {form}")
        return self

    @classmethod
    def of(cls, form: FormData) -> Self:
        """The options in a form. The names of fields that are lists end in `[]`. Raises _FieldError, naming all
        problems."""
        lists = {name: form.getlist(name) for name in form if isinstance(form[name], str)}
        fields = {
            name.removesuffix("[]"): each if name.endswith(("[]", "granularities", "boost")) else each[-1]
            for name, each in lists.items()
        }
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = describe(error, cls, fields)
        raise _FieldError(problems[0].split(":")[0].split(".")[0], "; ".join(problems))


class _FieldError(DataError):
    """An error about a field of a form with an invalid or unsupported value."""

    def __init__(self, name: str, message: str, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.name, self.status, self.code = name, status, code


def serve(
    experiment: Path,
    tell: Say,
    host: str,
    port: int,
    is_best: bool,
    with_beam: bool,
    limits: Limits,
    segmentation: Segmentation | None = None,
) -> None:
    """Load a model as `load_model` does, and answer requests until SIGINT or SIGTERM.

    The address is passed to `tell` as soon as the server accepts requests. Raises ConfigError if the port is in use.
    """
    with _bound(host, port) as listener:
        transcriber = load_model(experiment, is_best, with_beam, segmentation=segmentation)
        silence = np.random.default_rng(0).normal(0.0, 0.1, transcriber.rate).astype(np.float32)
        transcriber.transcribe(silence, transcriber.rate)  # warm-up: the first request is then as fast as later ones
        decoding = ThreadPoolExecutor(1, "starling-decoding")
        config = uvicorn.Config(
            Service(transcriber, str(experiment), limits, decoding).app(host in LOOPBACK),
            ws="websockets-sansio",
            ws_max_size=_LARGEST_MESSAGE,
            ws_max_queue=_WAITING_MESSAGES,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(ANSWERS_END),
        )
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client receives the error
        server = uvicorn.Server(config)

        def stop(number: int, frame: FrameType | None) -> None:
            server.should_exit = True

        # for signals that arrive before uvicorn installs its handlers, or that it raises again after it has stopped
        handlers = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            listener.listen(_BACKLOG)
            where, chosen = listener.getsockname()[:2]
            tell(f"serving {experiment} at http://{f'[{where}]' if ':' in where else where}:{chosen}/; Ctrl-C stops it")
            asyncio.run(server.serve([listener]))
        finally:
            decoding.shutdown(cancel_futures=True)
            for each, handler in handlers.items():
                signal.signal(each, handler)
    tell("stopped")


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address but does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        reason = "the port is taken; choose another one with --port, or 0 for a free one" if taken else str(error)
        raise ConfigError(f"cannot serve at {host}, port {port}: {reason}") from error
    return listener


class Service:
    """Answers requests with a model.

    The executor `decoding` has one thread. Each client has at most one task in its queue, so that clients take turns.
    """

    def __init__(self, transcriber: Transcriber, name: str, limits: Limits, decoding: Executor) -> None:
        self._transcriber = transcriber
        self._name = name
        self._model = {
            "id": Path(name).resolve().name,
            "object": "model",
            "created": int(time()),
            "owned_by": "starling",
        }
        self._limits = limits
        self._decoding = decoding
        self._waiting = 0

    def app(self, is_local: bool) -> ASGIApp:
        """The ASGI application. With `is_local`, it answers only requests to this machine's loopback address."""
        inner = Starlette(
            routes=[
                Route("/", self._page),
                Route("/{file}.js", self._page),
                Route("/health", self._health),
                Route("/transcribe", self._transcribe, methods=["POST"]),
                WebSocketRoute("/live", self._live),
                Route(f"{OPENAI}models", self._models),
                Route(f"{OPENAI}models/{{model}}", self._models),
                Route(f"{OPENAI}audio/transcriptions", self._transcribe_form, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys((HTTPException, DataError, ClientDisconnect), _refused)
            | {Exception: _failed},
        )
        return Guard(inner, self._limits, is_local)

    async def _decoded(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` in the decoding thread when it is its turn, and return the result."""
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._decoding, work)
        finally:
            self._waiting -= 1

    async def _page(self, request: Request) -> Response:
        name = f"{request.path_params['file']}.js" if "file" in request.path_params else "page.html"
        if name not in _PAGE_FILES:
            raise HTTPException(404, f"no page /{name}")
        content = (files("starling.speech.serving") / name).read_text(encoding="utf-8")
        return Response(content, media_type=_PAGE_FILES[name], headers=_PAGE_HEADERS)

    async def _health(self, request: Request) -> Response:
        state = {"status": "ok", "model": self._name, "rate": self._transcriber.rate, "waiting": self._waiting}
        return JSONResponse(state)

    async def _transcribe(self, request: Request) -> Response:
        form = request.query_params.get("format", "json")
        if form not in (*FORMATS, "jsonl"):
            raise DataError(f"format {form[:100]!r} is unknown; known are {', '.join(FORMATS)}, jsonl")
        if form == "ctm" and not self._transcriber.has_times:
            raise DataError("this model gives no word times, which CTM needs")
        rate = None
        if (given := request.query_params.get("raw_pcm")) is not None:
            rate = _rate(given, "raw_pcm", f"raw_pcm {given[:100]!r} is not a sampling rate in Hz")
        async with AsyncExitStack() as stack:
            audio, name, fields = await _upload(request, stack)
            transcriber = self._boosted(request.query_params.getlist("boost") + fields.getlist("boost"))
            first, growing = await self._begun(transcriber, audio, name, rate, stack)
            if form == "jsonl":
                lines = self._lines(name, first, growing, stack.pop_all())
                return StreamingResponse(lines, media_type="application/x-ndjson")
            whole = await self._whole(request, first, growing)
            text = formatted(whole, form, name if form == "json" else PurePath(name).stem or name)
        return Response(text, media_type=FORMATS[form])

    async def _models(self, request: Request) -> Response:
        """Answer a request for the list of models, which has one entry, or for a single model."""
        if (asked := request.path_params.get("model")) is None:
            return JSONResponse({"object": "list", "data": [self._model]})
        self._check_model(asked)
        return JSONResponse(self._model)

    def _check_model(self, asked: str) -> None:
        known = self._model["id"]
        if asked not in (known, _WHISPER):
            message = f"model {asked[:100]!r} is unknown; this server has {known!r}, also by the name {_WHISPER!r}"
            raise _FieldError("model", message, 404, "model_not_found")

    async def _transcribe_form(self, request: Request) -> Response:
        """Transcribe the audio file in a form, and answer as OpenAI's API does."""
        async with AsyncExitStack() as stack:
            audio, name, form = await _upload(request, stack)
            options = _Options.of(form)
            self._check_model(options.model or _WHISPER)
            if "word" in options.timestamp_granularities and not self._transcriber.has_times:
                raise _FieldError("timestamp_granularities", "this model gives no word times; ask for segments only")
            first, growing = await self._begun(self._boosted(options.boost), audio, name, None, stack)
            if options.stream:
                return StreamingResponse(self._events(first, growing, stack.pop_all()), media_type="text/event-stream")
            whole = await self._whole(request, first, growing)
        if options.response_format == "json":
            return JSONResponse({"text": whole.text})
        if options.response_format == "verbose_json":
            return JSONResponse(_verbose(whole, options, self._transcriber.recogniser.tokenizer))
        if options.response_format == "text":
            return Response(f"{whole.text}\n", media_type=FORMATS["txt"])
        return Response(formatted(whole, options.response_format, name), media_type=FORMATS[options.response_format])

    def _boosted(self, texts: Sequence[object]) -> Transcriber:
        """A transcriber that boosts the phrases in `texts`, which have one phrase on each line."""
        lines = "\n".join(text for text in texts if isinstance(text, str))
        if len(lines) > _MOST_BOOSTED:
            raise _FieldError("boost", f"boost: phrases of at most {_MOST_BOOSTED} characters, got {len(lines)}")
        try:
            return self._transcriber.boosted(lines.splitlines(), "boost") if lines else self._transcriber
        except (ConfigError, DataError) as error:
            raise _FieldError("boost", str(error)) from error

    async def _begun(
        self, transcriber: Transcriber, audio: IO[bytes], name: str, rate: int | None, stack: AsyncExitStack
    ) -> tuple[Transcript, Iterator[Transcript]]:
        """The first stage of an upload's transcript, and an iterator over the later stages. Because the first stage is
        computed before the response begins, its errors can set the HTTP status."""
        growing = self._growing(transcriber, audio, name, rate)
        stack.push_async_callback(self._decoded, growing.close)
        return await self._decoded(partial(next, growing)), growing

    async def _whole(self, request: Request, first: Transcript, rest: Iterator[Transcript]) -> Transcript:
        """The last stage of a transcript. Raises ClientDisconnect as soon as the client has disconnected."""
        async for stage in self._all(first, rest):
            if await request.is_disconnected():
                raise ClientDisconnect
            whole = stage
        return whole

    def _growing(
        self, transcriber: Transcriber, audio: IO[bytes], name: str, raw_rate: int | None
    ) -> Generator[Transcript, None, None]:
        """Yield the transcript of an upload after each part, and the whole transcript at the end. Raises DataError if
        the upload is not audio or is too long."""

        def blocks(sound: Sound) -> Iterator[NDArray[np.float32]]:
            for block in sound:
                if sound.heard > self._limits.audio_seconds:
                    raise DataError(f"{name}: longer than {self._limits.audio_seconds / 60:g} minutes (--max-minutes)")
                yield block

        segments: tuple[Segment, ...] = ()
        with opened(audio, name, raw_rate) as sound:
            for some in transcriber.stream(blocks(sound), sound.rate, _TOGETHER):
                segments += tuple(some)
                yield Transcript(segments, sound.heard, sound.note)
            yield Transcript(segments, sound.heard, sound.note)

    async def _all(self, first: Transcript, rest: Iterator[Transcript]) -> AsyncIterator[Transcript]:
        """Yield the first stage of a transcript, and then each later stage as soon as it has been computed."""
        stage: Transcript | None = first
        while stage is not None:
            yield stage
            stage = await self._decoded(partial(next, rest, None))

    async def _lines(
        self, name: str, first: Transcript, rest: Iterator[Transcript], stack: AsyncExitStack
    ) -> AsyncIterator[str]:
        """Yield a JSON object for each segment as soon as it is known, and one with the whole text at the end."""
        async with stack:
            told = 0
            try:
                async for whole in self._all(first, rest):
                    for segment in whole.segments[told:]:
                        yield _line({"segment": segment.as_json()})
                    told = len(whole.segments)
            except StarlingError as error:
                yield _line({"error": str(error)})
                return
            yield _line({key: value for key, value in whole.as_json(name).items() if key != "segments"})

    async def _events(self, first: Transcript, rest: Iterator[Transcript], stack: AsyncExitStack) -> AsyncIterator[str]:
        """Yield events of OpenAI's API: new text as soon as it is known, and the whole text at the end."""
        async with stack:
            told = ""
            try:
                async for whole in self._all(first, rest):
                    if whole.text != told:
                        yield _event({"type": "transcript.text.delta", "delta": whole.text.removeprefix(told)})
                    told = whole.text
            except StarlingError as error:
                yield _event(problem(OPENAI, str(error)))
                return
            yield _event({"type": "transcript.text.done", "text": told})

    async def _live(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            await self._listen(socket)
        except (WebSocketDisconnect, TimeoutError):
            pass
        except StarlingError as error:
            if socket.client_state is WebSocketState.CONNECTED:
                await socket.send_json({"error": str(error)})
                await socket.close(1008, str(error)[:100])

    async def _listen(self, socket: WebSocket) -> None:
        missing = "say the sampling rate of the audio in Hz: /live?rate=16000"
        rate = _rate(socket.query_params.get("rate", ""), "/live", missing)
        live = self._boosted(socket.query_params.getlist("boost")).live(rate)
        rest, shown = b"", Update()
        while True:
            try:
                message = await asyncio.wait_for(socket.receive(), self._limits.stall)
            except TimeoutError:
                raise DataError(f"no audio for {self._limits.stall:g} s") from None
            if message["type"] == "websocket.disconnect":
                return
            if message.get("bytes") is not None:
                samples, rest = pcm(rest + message["bytes"])
                update = await self._decoded(partial(live.feed, samples, self._waiting < _BUSY))
                if update.final or update.partial != shown.partial:
                    await socket.send_json(update.as_json())
                shown = update
            elif message.get("text") == "end":
                update = await self._decoded(live.end)
                await socket.send_json(update.as_json() | {"end": True})
                await socket.close()
                return
            else:
                raise DataError('send binary messages with PCM of 16 bits, and the text "end" after the last')


async def _upload(request: Request, stack: AsyncExitStack) -> tuple[IO[bytes], str, FormData]:
    """The audio of a request (in memory or in a temporary file), its name, and the form that contains it."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        form = await stack.enter_async_context(
            request.form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=4 * _MOST_BOOSTED)
        )
        for value in form.values():
            if not isinstance(value, str):
                return value.file, PurePath(value.filename or "upload").name, form
        raise DataError("the form has no file")
    copy = stack.enter_context(tempfile.SpooledTemporaryFile(1 << 20))  # noqa: SIM115 - the stack closes it
    async for chunk in request.stream():
        copy.write(chunk)
    if not copy.tell():
        raise DataError("the request has no audio: send a file as the body, or as multipart/form-data")
    copy.seek(0)
    return copy, "upload", FormData()


def _rate(text: str, name: str, otherwise: str) -> int:
    """The sampling rate in a query's parameter. `otherwise` is the error message for a text that is not a number."""
    if not text.isdecimal():
        raise DataError(otherwise)
    check_rate(int(text), name)
    return int(text)


def _line(content: dict[str, object]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"


def _event(content: dict[str, object]) -> str:
    return f"data: {_line(content)}\n"


def _verbose(whole: Transcript, options: _Options, tokenizer: Tokenizer) -> dict[str, object]:
    """The transcript as OpenAI's `verbose_json`, with the `note`, if there is one. Clients of OpenAI's API need all
    fields of a segment. `no_speech_prob` is 0, because only stretches with speech are decoded."""
    language = options.language or "und"  # ISO 639 code of an undetermined language
    said = {"task": "transcribe", "language": language, "duration": round(whole.seconds, 3), "text": whole.text}
    if whole.note:
        said["note"] = whole.note
    if "word" in options.timestamp_granularities:
        said["words"] = [{"word": word.text, "start": word.start, "end": word.end} for word in whole.words]
    if set(options.timestamp_granularities) == {"word"}:
        return said
    segments = [segment for segment in whole.segments if segment.text]
    tokens = [attempt(tokenizer.encode, segment.text) for segment in segments]
    said["segments"] = [
        {
            "id": number,
            "seek": round(100 * segment.start),  # in frames of 10 ms; each segment is decoded separately
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "tokens": [] if isinstance(spelled, DataError) else spelled,
            "temperature": 0.0,
            "avg_logprob": _log_confidence(segment),
            "compression_ratio": len(segment.text.encode()) / len(zlib.compress(segment.text.encode())),
            "no_speech_prob": 0.0,
        }
        for number, (segment, spelled) in enumerate(zip(segments, tokens, strict=True))
    ]
    return said


def _log_confidence(segment: Segment) -> float:
    """The mean over words of the logarithm of their confidence; 0 without words."""
    logs = [math.log(max(word.confidence, 1e-4)) for word in segment.words or ()]  # may be rounded to 0
    return sum(logs) / max(1, len(logs))


async def _refused(request: Request, error: Exception) -> Response:
    """The response that states the error in a request. A client that has disconnected does not read it."""
    path = request.scope["path"]
    if isinstance(error, HTTPException):
        return JSONResponse(problem(path, error.detail), error.status_code, error.headers)
    if isinstance(error, _FieldError):
        return JSONResponse(problem(path, str(error), error.name, error.code), error.status)
    return JSONResponse(problem(path, str(error)), 400)


async def _failed(request: Request, error: Exception) -> Response:
    """The response to a request on which the server failed. The traceback is in the server's log."""
    path = request.scope["path"]
    return JSONResponse(problem(path, "the server failed; its log says why", kind="server_error"), 500)
