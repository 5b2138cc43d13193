"""The secret token of a run, known to its learners only. They prove that they know it, and never send it.

There is one protocol: each side sends a fresh random number, its challenge, and the other answers with a code over it
(HMAC-SHA-256). So an answer that was recorded earlier proves nothing. Nodes and the launcher use a connection for this
(`launch.link`), joined loops and their coordinator as well (`launch.coordinator`), and learners the store
(`handshake`).

`starling train` creates a new token for each run. Other launchers may set `STARLING_RUN_TOKEN` for all learners.
"""

import hmac
import json
import os
import secrets

from starling.errors import ProtocolError

VARIABLE = "STARLING_RUN_TOKEN"
_LENGTH = 64
"""Length of a proof: the number of hexadecimal digits of a SHA-256."""


def new_token() -> str:
    """A token for one run: 256 random bits."""
    return secrets.token_hex(32)


def own_token() -> str:
    """The token of this process; empty if it has none, so that any process can forge its proofs."""
    return os.environ.get(VARIABLE, "")


def new_challenge() -> str:
    """A random number that was never used before, for the other side's proof."""
    return secrets.token_hex(16)


def proof(token: str, *said: str) -> str:
    """A proof that the process that computed it knows the token and sends the texts `said`. One of these must be the
    other side's challenge, or contain it."""
    return hmac.new(os.fsencode(token), json.dumps(said).encode(), "sha256").hexdigest()


def is_proof(given: str, token: str, *said: str) -> bool:
    """Whether `given`, which may be any text, is the `proof` over `said`."""
    return hmac.compare_digest(given.encode(errors="replace"), proof(token, *said).encode())


def sign(rank: int, challenge: str, text: str) -> str:
    """`text`, with learner `rank`'s proof over it and over the challenges of all learners."""
    return proof(own_token(), "handshake", str(rank), challenge, text) + text


def verified(rank: int, other: int, challenge: str, message: bytes) -> str:
    """The text that learner `other` signed, verified by learner `rank`.

    Raises `ProtocolError`, without showing a token, if a learner of another run signed it, or for other challenges.
    """
    said = message.decode(errors="replace")
    given, text = said[:_LENGTH], said[_LENGTH:]
    if not is_proof(given, own_token(), "handshake", str(other), challenge, text):
        own = "this learner has one" if own_token() else "this learner has none"
        raise ProtocolError(
            f"learner {rank} and learner {other} differ in their run token ({own}), or learner {other}'s message is of "
            f"an earlier run: learner {other} does not belong to this run; set {VARIABLE} to the same value for all "
            "learners of a run, or for none of them"
        )
    return text
