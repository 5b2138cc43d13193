"""How fast recordings are transcribed: ten minutes by a 5 M model with beam search, and one second from the shell and
by a warm server.

The 5 M model has random weights, whose outputs are of no use to a search: a beam search among equally likely tokens
takes far longer than one after training. The search therefore gets planted outputs, in which the right token has a
probability of 0.9 in each frame; the encoder still computes its own outputs, with which texts are aligned.
"""

import io
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from benchmarks.measuring import Bar, Seconds
from starling.speech.decoding.beam import BeamSearch, Weights
from starling.speech.decoding.ngram import estimate
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import count_parameters, model_config
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import BLANK, CharacterTokenizer
from starling.speech.transcribing.transcriber import Transcriber

RATE = 16_000
MODEL = model_config(name="transformer", preset="medium")
MINUTES = 10
WORDS, BEAM = 1_000, 64
KEPT = Path(__file__).parents[1] / "tests" / "data" / "kept-0.2" / "exp" / "kept"
"""An experiment that is small enough to be part of the repository."""
ROUNDS = 5


def measure(folder: Path) -> list[Bar]:
    """Speed in seconds of audio per second, and times in seconds."""
    return [_long(folder), *_short(folder)]


def _long(folder: Path) -> Bar:
    generator = np.random.default_rng(1)
    tokenizer = CharacterTokenizer(" ABCDEFGHIJKLMNOPQRSTUVWXYZ'")
    recogniser = Recogniser.create(MODEL, LogMel(FeatureConfig(), RATE), tokenizer, seed=1)
    letters = [*tokenizer.alphabet[1:]]
    words = sorted({"".join(generator.choice(letters, generator.integers(2, 9))) for _ in range(WORDS)})
    shares = 1.0 / np.arange(1, len(words) + 1)
    texts = [generator.choice(words, 12, p=shares / shares.sum()).tolist() for _ in range(2_000)]
    estimate(texts, 3).write(folder / "words.arpa")
    search = BeamSearch(tokenizer, folder / "words.arpa", words, recogniser.output_seconds)
    seconds_searching = 0.0

    def text(log_probs: NDArray[np.float32]) -> str:
        nonlocal seconds_searching
        begin = time.process_time()
        rows = planted(len(log_probs), tokenizer, texts[int(generator.integers(len(texts)))], generator)
        found = search(rows, Weights(beam=BEAM))
        seconds_searching += time.process_time() - begin
        return found[0].text if found else ""

    transcriber = Transcriber(recogniser, text)
    waveform = speech_like(60 * MINUTES, generator)
    transcriber.transcribe(waveform[: 30 * RATE], RATE)
    seconds_searching = 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begin = time.process_time()
    found = transcriber.transcribe(waveform, RATE)
    taken = time.process_time() - begin
    torch.set_num_threads(threads)
    size = count_parameters(recogniser.model) / 1e6
    return Bar.at_least(
        f"{MINUTES} minutes by a {size:.1f} M {MODEL.name} with beam {BEAM}: audio seconds / seconds of one core",
        60 * MINUTES / taken,
        50,
        f"{taken:.1f} s, of which {seconds_searching:.1f} s searching; {len(found.segments)} segments",
    )


def speech_like(seconds: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Noise that rises and falls four times a second, with a pause after some seconds."""
    time_axis = np.arange(seconds * RATE) / RATE
    loudness = np.abs(np.sin(4 * np.pi * time_axis)) * (time_axis % 9 < 8)
    return np.asarray((0.1 * loudness + 1e-3) * generator.standard_normal(len(time_axis)), np.float32)


def planted(
    num_frames: int, tokenizer: CharacterTokenizer, words: list[str], generator: np.random.Generator
) -> NDArray[np.float32]:
    """Log-probabilities `[T, V]` of a text: each token in one frame, then a blank, at 0.9."""
    tokens = tokenizer.encode(" ".join(words * (1 + num_frames // 20)))
    path = np.full(num_frames, BLANK)
    path[::2] = tokens[: len(path[::2])]
    probabilities = generator.dirichlet(np.full(tokenizer.vocab_size, 0.1), num_frames) * 0.1
    probabilities[np.arange(num_frames), path] += 0.9
    return np.log(np.maximum(probabilities, 1e-10)).astype(np.float32)


def _short(folder: Path) -> list[Bar]:
    path = folder / "second.wav"
    samples = speech_like(1, np.random.default_rng(1))
    soundfile.write(path, samples, RATE)
    starling = [sys.executable, "-m", "starling"]
    command, bare = [*starling, "transcribe", str(KEPT), str(path)], [sys.executable, "-c", "import torch"]
    pairs = [(processor_seconds(command), processor_seconds(bare)) for _ in range(ROUNDS)]
    shell = Bar.at_most(
        "one second of audio from the shell / `import torch` alone, processor seconds",
        median(ours / torch_alone for ours, torch_alone in pairs),
        1.5,
        f"{median(ours for ours, _ in pairs):.2f} s and {median(alone for _, alone in pairs):.2f} s",
    )
    audio = io.BytesIO()
    soundfile.write(audio, samples, RATE, format="WAV")
    with subprocess.Popen([*starling, "serve", str(KEPT), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the server has no output")
            address = process.stdout.readline().split(" at ")[1].split("/;")[0]
            answers = []
            with httpx.Client(base_url=address) as client:
                for _ in range(4 * ROUNDS):
                    begin = time.monotonic()
                    client.post("/transcribe", content=audio.getvalue()).raise_for_status()
                    answers.append(time.monotonic() - begin)
        finally:
            process.terminate()
    server = Bar.at_most(
        "one second of audio by a warm server, seconds", median(answers), 0.3, f"the slowest of {len(answers)}: "
        f"{max(answers):.3f} s",
    )  # fmt: skip
    return [shell, server]


def processor_seconds(command: list[str]) -> Seconds:
    """Processor seconds of a program until it ends. Other programs on the machine delay it, but hardly change this
    figure."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
