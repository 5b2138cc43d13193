"""All errors that Starling raises on purpose, with their exit codes; and the extras of the package.

A message says which learner, what, where, the value, the limit and the remedy. The command line prints it without a
traceback unless `--debug` is given.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec


class StarlingError(Exception):
    """Base of all errors raised on purpose; exit code 1."""

    exit_code = 1


class ConfigError(StarlingError):
    """A recipe or an argument is wrong; the message lists all problems."""

    exit_code = 2


class MissingExtraError(ConfigError):
    """A command needs an extra that is not installed; the message contains the command that installs it."""


class PeerLost(StarlingError):  # noqa: N818 - the usual term
    """A learner exited or became unreachable while others needed it."""

    exit_code = 3


class NonFiniteError(StarlingError):
    """Losses or gradients were not finite."""

    exit_code = 4


class DataError(StarlingError):
    """Audio, a transcript or a manifest cannot be used; the message names the utterance or the file."""

    exit_code = 5


class CheckpointError(StarlingError):
    """A checkpoint or an experiment is missing, damaged or does not fit; the message names the file."""

    exit_code = 6


class ProtocolError(StarlingError):
    """Learners differ in configuration or version, could not connect, or sent an invalid message."""

    exit_code = 7


class Deadlock(StarlingError):  # noqa: N818 - the usual term
    """No event is pending while learners wait; the message says which learner waits for which."""

    exit_code = 8


class FinishedApart(StarlingError):  # noqa: N818 - an outcome, not a fault of this learner
    """This learner has ended with a model that its peers do not have."""

    exit_code = 9


class ReplayError(StarlingError):
    """A record cannot be replayed, or its replay ended with different weights; the message says where."""

    exit_code = 10


class Stopped(StarlingError):  # noqa: N818 - a request, not an error
    """A signal stopped the run; the exit code is 128 + its number, as in shells.

    `has_saved` says whether all learners saved a checkpoint of their common position before they stopped.
    """

    def __init__(self, message: str, signal_number: int, has_saved: bool = False) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        self.has_saved = has_saved


@contextmanager
def noted(problems: list[str], kind: type[StarlingError]) -> Iterator[None]:
    """Inside the context, an error of that kind ends the context and becomes one of the problems."""
    try:
        yield
    except kind as error:
        problems.append(str(error))


def some(names: Sequence[object], most: int = 5) -> str:
    """The first names in a list, and how many there are besides: `a, b, c and 4 more`."""
    shown = ", ".join(map(str, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one resembles most; None if it resembles none."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'NEAREST'? ` for an unknown name; empty if it resembles no known name."""
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
}
"""The modules that each extra in pyproject.toml installs."""


def require(extra: str, what: str, modules: Sequence[str] = ()) -> None:
    """Check that an extra is installed, without importing its modules. `what` names the command or function that needs
    it, `modules` the needed ones of its modules (default: all).

    Raises:
        MissingExtraError: A module is missing; the message contains the command that installs it.
    """
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(f"{what} needs {', '.join(missing)}: pip install 'starling-asr[{extra}]'")
