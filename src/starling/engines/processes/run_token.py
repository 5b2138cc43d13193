"""The secret token of a run, which only its processes know. They prove that they know the token, and never send it.

There is one protocol. Each side sends a fresh random number, its challenge, and the other side answers with a code
(HMAC-SHA-256) over that challenge. An answer that was recorded earlier therefore proves nothing. Nodes and the launcher
follow the protocol over a connection (`launch.link`), as do joined loops and their coordinator (`launch.coordinator`);
learners follow it through the store (`handshake`).

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
    """Return a token for one run, which consists of 256 random bits."""
    return secrets.token_hex(32)


def own_token() -> str:
    """Return the token of this process. The token is empty if there is none; any process can then forge proofs."""
    return os.environ.get(VARIABLE, "")


def new_challenge() -> str:
    """A random number that was never used before, for the other side's proof."""
    return secrets.token_hex(16)


def proof(token: str, *said: str) -> str:
    """Return a proof that this process knows the token and sends the texts `said`. One of the texts must be, or
    contain, the other side's challenge."""
    return hmac.new(os.fsencode(token), json.dumps(said).encode(), "sha256").hexdigest()


def is_proof(given: str, token: str, *said: str) -> bool:
    """Return whether `given`, which may be any text, is the `proof` over `said`."""
    return hmac.compare_digest(given.encode(errors="replace"), proof(token, *said).encode())


def sign(rank: int, challenge: str, text: str) -> str:
    """`text`, with learner `rank`'s proof over it and over the challenges of all learners."""
    return proof(own_token(), "handshake", str(rank), challenge, text) + text


def verified(rank: int, other: int, challenge: str, message: bytes) -> str:
    """Return the text that learner `other` signed, after learner `rank` has verified it.

    Raises `ProtocolError`, without showing a token, if the text was signed by a learner of a different run, or for
    different challenges.
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
