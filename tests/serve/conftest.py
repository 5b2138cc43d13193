"""A server in a separate process, as `starling serve` starts it."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile

from tests.speech.tones import RATE, WORDS, performance

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")

TONES = Path(__file__).parents[1] / "data" / "tones"
STALL = 1.0
"""Seconds after which the server gives up on a client."""


@pytest.fixture(scope="package")
def server() -> Iterator[str]:
    """The address of a server with narrow limits. SIGTERM stops it, and it must end cleanly."""
    command = [sys.executable, "-u", "-m", "starling", "serve", str(TONES), "--port", "0", "--max-megabytes", "10"]
    command += ["--max-minutes", "6", "--stall-seconds", str(STALL)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(f"serving {TONES} at http://127.0.0.1:"), line + process.stdout.read()
    yield line.split(" at ")[1].split("/;")[0]
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(30) == 0, rest
    assert rest.endswith("stopped\n")
    assert "Traceback" not in rest


@pytest.fixture(scope="package")
def client(server: str) -> Iterator[httpx.Client]:
    """A client that can be used from any thread."""
    with httpx.Client(base_url=server, verify=False, timeout=120) as made:
        yield made


def words_of(seed: int, count: int = 3) -> list[str]:
    """Some words; different ones for each seed."""
    return [str(word) for word in np.random.default_rng(seed).choice(list(WORDS), count)]


def sung(words: Sequence[str], rate: int = RATE, gap: float = 0.2) -> np.ndarray:
    """Samples of words, with a gap before and after each, and a pause at the end."""
    return performance(words, [gap] * len(words) + [0.8], np.random.default_rng(1), rate)[0]


def close_words() -> np.ndarray:
    """DO RE MI, of which the last two are so close that they are nearly recognised as one word."""
    return performance(["DO", "RE", "MI"], [0.3, 0.1, 0.05, 0.8], np.random.default_rng(3))[0]


def file_of(samples: np.ndarray, rate: int = RATE, form: str = "WAV") -> bytes:
    """An audio file of samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form)
    return file.getvalue()
