"""The effect of silence, faint noise and a different level on the word errors of a trained recogniser.

    python -m benchmarks.silence EXPERIMENT PREPARED_SET

Each utterance of the set is transcribed alone, with digital silence or noise around it, and louder or softer; then all
of them are transcribed as one recording with gaps, as a file and through the WebSocket of `starling serve`. The exit
code is 1 if a bar is missed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from websockets.sync.client import connect

from benchmarks.measuring import Bar, Seconds
from starling.speech.recogniser import by_duration
from starling.speech.scoring import count_errors
from starling.speech.store import SpeechSet
from starling.speech.trained import load_recogniser
from starling.speech.transcribing.transcriber import Transcriber

Samples = NDArray[np.float32]
PADS: tuple[Seconds, ...] = (0.1, 0.4, 1.0, 2.0)
"""Lengths of silence before and after an utterance."""
NOISES = (0.0, 0.001)
"""Standard deviations of the noise; 0 is digital silence."""
GAINS = (-30, -20, -10, 6)
"""Changes of level in dB."""
GAPS: tuple[Seconds, ...] = (0.6, 2.0)
"""Gaps between utterances."""
BLOCK: Seconds = 0.2
TOGETHER: Seconds = 60.0
WORST, MEAN, JOINED = 1.5, 0.5, 1.5
"""Bars in points of word error rate above the utterances alone: the worst cell, the mean of all, and as one
recording."""


def of_experiment(experiment: Path, speech_set: SpeechSet) -> Iterator[Bar]:
    """Points of word error rate above the utterances alone."""
    recogniser = load_recogniser(experiment)
    stored = speech_set.read(range(len(speech_set)))
    references = {each.id: each.text for each in stored}
    rate = speech_set.sampling_rate

    def errors(change: Callable[[Samples], Samples]) -> float:
        waveforms = [torch.from_numpy(change(np.asarray(each.samples, np.float32))) for each in stored]
        texts = {}
        for places in by_duration(np.array([len(each) for each in waveforms]) / rate, TOGETHER):
            found = recogniser.texts(recogniser.listen([waveforms[place] for place in places]))
            texts.update(zip([stored[place].id for place in places], found, strict=True))
        return count_errors(references, texts)[0].rate

    alone = errors(lambda samples: samples)
    cells = {f"{gain:+d} dB": errors(lambda samples, gain=gain: louder(samples, gain)) - alone for gain in GAINS}
    for noise in NOISES:
        for seconds in PADS:
            generator = np.random.default_rng(1)
            cells[f"{seconds} s of {said(noise)}"] = (
                errors(lambda samples, n=noise, s=seconds, g=generator: between(samples, n, round(s * rate), g)) - alone
            )
    shown = f"alone {alone:.2f} %; " + ", ".join(f"{name} {points:+.2f}" for name, points in cells.items())
    yield Bar.at_most("silence, noise and levels: points of WER more, worst cell", max(cells.values()), WORST, shown)
    yield Bar.at_most("the same, mean of the cells", fmean(cells.values()), MEAN)
    whole, worst = " ".join(references.values()), dict[str, float]()
    with served(experiment) as address:
        ways: dict[str, Callable[[Samples], str]] = {
            "file": lambda samples: as_file(Transcriber(recogniser), samples, rate),
            "stream": lambda samples: as_stream(address, samples, rate),
        }
        for noise, gap in product(NOISES, GAPS):
            generator = np.random.default_rng(1)
            recording = np.concatenate(
                [between(each.samples, noise, round(gap * rate / 2), generator) for each in stored]
            )
            for way, transcribe in ways.items():
                rate_of_all = count_errors({"all": whole}, {"all": transcribe(recording)})[0].rate
                worst[f"{way} with {gap} s of {said(noise)}"] = rate_of_all - alone
    shown = ", ".join(f"{name} {points:+.2f}" for name, points in worst.items())
    yield Bar.at_most("as one recording: points of WER more, worst", max(worst.values()), JOINED, shown)


def said(noise: float) -> str:
    return f"noise of {noise}" if noise else "digital silence"


def louder(samples: Samples, decibels: float) -> Samples:
    return np.asarray(samples * 10 ** (decibels / 20), np.float32)


def between(samples: Samples, noise: float, length: int, generator: np.random.Generator) -> Samples:
    """Samples with noise of standard deviation `noise`: `length` samples before them and as many after."""
    before, after = (noise * generator.standard_normal(length) for _ in range(2))
    return np.concatenate([before, samples, after]).astype(np.float32)


def as_file(transcriber: Transcriber, recording: Samples, rate: int) -> str:
    return " ".join(segment.text for segment in transcriber.transcribe(recording, rate).segments)


@contextmanager
def served(experiment: Path) -> Iterator[str]:
    """A context with the address of `starling serve` with the newest model, in a separate process."""
    command = [sys.executable, "-u", "-m", "starling", "serve", str(experiment), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if " at http" not in line:
                raise SystemExit(f"starling serve did not start: {line}")
            yield line.split(" at http")[1].split("/;")[0]
        finally:
            server.terminate()


def as_stream(address: str, recording: Samples, rate: int) -> str:
    """The text of a recording that is sent through the WebSocket in short blocks."""
    pcm, hop = np.clip(recording * 32768.0, -32768, 32767).astype("<i2"), round(BLOCK * rate)
    texts = list[str]()
    with connect(f"ws{address}/live?rate={rate}", max_queue=None) as client:
        for place in range(0, len(pcm), hop):
            client.send(pcm[place : place + hop].tobytes())
        client.send("end")
        while not (said := json.loads(client.recv())).get("end"):
            texts += [segment["text"] for segment in said["final"]]
        texts += [segment["text"] for segment in said["final"]]
    return " ".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("experiment", type=Path)
    parser.add_argument("speech_set", type=Path, metavar="PREPARED_SET")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bars = list(of_experiment(given.experiment, SpeechSet.open(given.speech_set)))
    for bar in bars:
        sys.stdout.write(
            f"{bar.name}: {bar.ratio:+.2f} of {bar.bar}{'' if bar.holds else ', MISSED'}\n  {bar.detail}\n"
        )
    return 0 if all(bar.holds for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
