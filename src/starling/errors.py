"""All errors that Starling raises on purpose, with their exit codes, and the extras (optional dependency groups) of the
package.

A message says which learner failed, what happened and where, the value, the limit and the remedy. The command line
prints the message without a traceback unless `--debug` is given.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec


class StarlingError(Exception):
    """Base class of all errors that Starling raises on purpose. Its exit code is 1."""

    exit_code = 1


class ConfigError(StarlingError):
    """A recipe or an argument is wrong. The message lists all problems."""

    exit_code = 2


class MissingExtraError(ConfigError):
    """A command needs an extra that is not installed. The message contains the command that installs the extra."""


class PeerLost(StarlingError):  # noqa: N818 - the usual term
    """A learner exited or became unreachable while other learners needed it."""

    exit_code = 3


class NonFiniteError(StarlingError):
    """Losses or gradients were not finite."""

    exit_code = 4


class DataError(StarlingError):
    """Audio, a transcript or a manifest cannot be used. The message names the utterance or the file."""

    exit_code = 5


class CheckpointError(StarlingError):
    """A checkpoint or an experiment is missing, is damaged or does not fit. The message names the file."""

    exit_code = 6


class ProtocolError(StarlingError):
    """Learners differ in configuration, version or weights, could not connect, or sent an invalid message; or a
    strategy or loop called a method at a time or with arguments that do not allow it."""

    exit_code = 7


class Deadlock(StarlingError):  # noqa: N818 - the usual term
    """Learners wait although no event is pending. The message says which learner waits for which."""

    exit_code = 8


class FinishedApart(StarlingError):  # noqa: N818 - an outcome, not a fault of this learner
    """This learner has ended with a model that its peers do not have."""

    exit_code = 9


class ReplayError(StarlingError):
    """A record cannot be replayed, or its replay ended with different weights. The message says where they differ."""

    exit_code = 10


class Stopped(StarlingError):  # noqa: N818 - a request, not an error
    """A signal stopped the run. The exit code is 128 plus the signal's number, as in shells.

    `has_saved` says whether all learners saved a checkpoint of their common position before they stopped.
    """

    def __init__(self, message: str, signal_number: int, has_saved: bool = False) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        self.has_saved = has_saved


@contextmanager
def noted(problems: list[str], kind: type[StarlingError]) -> Iterator[None]:
    """Return a context that ends at an error of type `kind` and appends the error's message to `problems`."""
    try:
        yield
    except kind as error:
        problems.append(str(error))


def some(names: Sequence[object], most: int = 5) -> str:
    """Return the first names in a list and the number of remaining names, as in `a, b, c and 4 more`."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that resembles `name` most, or None if no known name resembles it."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `did you mean 'NEAREST'? ` for an unknown name, or "" if no known name resembles it."""
    near = nearest(name, known)
    return f"did you mean {near!r}? " if near else ""


SPEECH = ("lhotse", "urllib3", "soundfile", "kaldialign", "sentencepiece", "rensa", "fsspec", "scipy", "tensorboard")
EXTRAS = {
    "compare": ("scipy",),
    "speech": SPEECH,
    "demo": (*SPEECH, "espeakng_loader"),
    "media": (*SPEECH, "av"),
    "vad": (*SPEECH, "onnxruntime", "silero_vad"),
    "cloud": (*SPEECH, "s3fs"),
    "decoding": ("flashlight", "num2words"),
    "report": ("jinja2", "plotly"),
    "serve": (*SPEECH, "python_multipart", "starlette", "uvicorn", "websockets"),
    "lightning": ("lightning",),
    "huggingface": ("accelerate", "transformers"),
    "export": (*SPEECH, "onnx", "onnxruntime", "onnxscript"),
    "ray": ("ray",),
    "monitoring": ("prometheus_client",),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk"),
}
"""Modules that each extra in pyproject.toml installs, by the name of the extra."""


def require(extra: str, what: str, modules: Sequence[str] = ()) -> None:
    """Check that an extra is installed, without importing its modules. `what` names the command or function that needs
    the extra. `modules` lists the modules that it needs; by default, it needs all modules of the extra.

    Raises:
        MissingExtraError: A module is missing; the message contains the command that installs it.
    """
    missing = [module for module in modules or EXTRAS[extra] if not _is_installed(module)]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: pip install 'starling-asr[{extra}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that would contain the module
        return False
