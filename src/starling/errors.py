"""Every error that Starling raises on purpose, and the exit code the command line gives it.

A message says which learner, what, where, the value, the limit and the remedy. The command line prints it without a
traceback unless `--debug` is given.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class StarlingError(Exception):
    """Base of all errors raised on purpose; exit code 1."""

    exit_code = 1


class ConfigError(StarlingError):
    """A recipe or an argument is wrong; the message lists all problems found at once."""

    exit_code = 2


class MissingExtraError(ConfigError):
    """A command needs an optional part that is not installed; the message has the line that installs it."""


class PeerLost(StarlingError):  # noqa: N818 - the field says "peer lost"
    """A learner ended or became unreachable while others needed it."""

    exit_code = 3


class NonFiniteError(StarlingError):
    """Losses or gradients were not finite."""

    exit_code = 4


class DataError(StarlingError):
    """Audio, a transcript or a manifest cannot be used; the message names the utterance or the file."""

    exit_code = 5


class CheckpointError(StarlingError):
    """A saved experiment is missing, incomplete or does not fit; the message names the file."""

    exit_code = 6


class ProtocolError(StarlingError):
    """Learners that should be alike differ, or did not connect."""

    exit_code = 7


class Deadlock(StarlingError):  # noqa: N818 - the field says "deadlock"
    """No event is pending while learners wait; the message says which learner waits for which."""

    exit_code = 8


class Stopped(StarlingError):  # noqa: N818 - a request, not an error
    """The run was asked to stop by a signal; the exit code is 128 + its number, as shells have it.

    `has_saved` tells whether all learners stopped as asked, with a checkpoint of their position.
    """

    def __init__(self, message: str, signal_number: int, has_saved: bool = False) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number
        self.has_saved = has_saved


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one resembles most; None where there is none like it."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'NEAREST'? ` for an unknown name; empty where no known name resembles it."""
    near = nearest(name, known)
    return f"did you mean {near!r}? " if near else ""
