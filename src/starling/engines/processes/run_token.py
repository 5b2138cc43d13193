"""The secret token of a run, known to its learners only: they sign their handshakes with it and never send it.

`starling train` creates a new one for each run. Other launchers may set `STARLING_RUN_TOKEN` for all learners.
"""

import hmac
import json
import os
import secrets

from starling.errors import ProtocolError

VARIABLE = "STARLING_RUN_TOKEN"
_LENGTH = 64
"""The length of a signature: the hexadecimal digits of a SHA-256."""


def new_token() -> str:
    """A token for one run: 256 random bits."""
    return secrets.token_hex(32)


def sign(rank: int, text: str) -> str:
    """`text`, signed as learner `rank` of this process's run. Without a token, any process can forge the signature."""
    return _signature(rank, text.encode()).decode() + text


def proof(token: str, *said: str) -> str:
    """Shows that the process that computed it knows the token. To be fresh, it must be over a random number of the
    other side."""
    return hmac.new(token.encode(), json.dumps(said).encode(), "sha256").hexdigest()


def own_token() -> str:
    """The token of this process; empty if it has none."""
    return os.environ.get(VARIABLE, "")


def verified(rank: int, other: int, message: bytes) -> str:
    """The text that learner `other` signed, verified by learner `rank`.

    Raises `ProtocolError`, without showing a token, if a learner of another run signed it.
    """
    signature, text = message[:_LENGTH], message[_LENGTH:]
    if not hmac.compare_digest(signature, _signature(other, text)):
        own = "this learner has one" if _token() else "this learner has none"
        raise ProtocolError(
            f"learner {rank} and learner {other} differ in their run token ({own}): learner {other} does not belong to "
            f"this run; set {VARIABLE} to the same value for all learners of a run, or for none of them"
        )
    return text.decode()


def _token() -> bytes:
    return os.environb.get(VARIABLE.encode(), b"")


def _signature(rank: int, text: bytes) -> bytes:
    return hmac.new(_token(), b"handshake of learner %d\n" % rank + text, "sha256").hexdigest().encode()
