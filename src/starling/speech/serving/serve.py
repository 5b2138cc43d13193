"""Runs the server until it is stopped."""

import asyncio
import errno
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

import numpy as np
import uvicorn

from starling.errors import ConfigError
from starling.reporting.progress import Say
from starling.speech.commands.transcribe import load_model
from starling.speech.serving.app import Service
from starling.speech.serving.guard import LOOPBACK, Limits
from starling.timeouts import ANSWERS_END

_LARGEST_MESSAGE = 1 << 20  # bytes of a WebSocket's message: half a minute of audio at 16 kHz
_WAITING_MESSAGES = 32
_BACKLOG = 1024


def serve(
    experiment: Path,
    tell: Say,
    host: str = "127.0.0.1",
    port: int = 8000,
    is_best: bool = False,
    with_beam: bool = False,
    limits: Limits | None = None,
) -> None:
    """Answer requests with a model, as `load_model` takes it, until SIGINT or SIGTERM.

    The address is passed to `tell` as soon as the server answers. Raises ConfigError for a port that is taken.
    """
    with _bound(host, port) as listener:
        transcriber = load_model(experiment, is_best, with_beam)
        silence = np.random.default_rng(0).normal(0.0, 0.1, transcriber.rate).astype(np.float32)
        transcriber.transcribe(silence, transcriber.rate)  # the first request is then as fast as later ones
        service = Service(transcriber, str(experiment), limits)
        config = uvicorn.Config(
            service.app(host in LOOPBACK),
            ws="websockets-sansio",
            ws_max_size=_LARGEST_MESSAGE,
            ws_max_queue=_WAITING_MESSAGES,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(ANSWERS_END),
        )
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # the client is told what is wrong
        server = uvicorn.Server(config)

        def stop(number: int, frame: FrameType | None) -> None:
            server.should_exit = True

        # before uvicorn has its own handlers, and when it sends itself the signal again after it has stopped
        handlers = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            listener.listen(_BACKLOG)
            where, chosen = listener.getsockname()[:2]
            tell(f"serving {experiment} at http://{f'[{where}]' if ':' in where else where}:{chosen}/; Ctrl-C stops it")
            asyncio.run(server.serve([listener]))
        finally:
            service.turns.close()
            for each, handler in handlers.items():
                signal.signal(each, handler)
    tell("stopped")


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, but does not listen yet."""
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
