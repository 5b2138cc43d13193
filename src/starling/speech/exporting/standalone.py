"""Transcribes audio files with the model beside this script, without Starling and without PyTorch.

    pip install numpy onnxruntime soundfile
    python transcribe.py hello.wav

Prints a line for each file: its name, a tab, and the text found by greedy CTC decoding. With --stream, a streaming
model processes the file chunk by chunk, and the text so far is printed on standard error after each chunk.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import soundfile
from numpy.typing import NDArray

from starling.speech.levels import SCALE, loud_frames, normalised, without_long_pauses

Array = NDArray[Any]

_PRE_EMPHASIS = 0.97
_SMALLEST_DEVIATION = 1e-5
_BLOCK = 1024  # frames computed at a time


class Transcriber:
    """The model in a folder that `starling export --onnx` has written."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.config: dict[str, Any] = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))
        with np.load(folder / "frontend.npz") as arrays:
            self._arrays = dict(arrays)
        self._session = cache(lambda name: session_of(folder / name, threads))

    def transcribe(self, audio: Array, rate: int) -> str:
        """The text of samples `[T]` or `[T, channels]` in [-1, 1]."""
        return self.text(self.log_probs(self.features(audio, rate)).argmax(1))

    def stream(self, audio: Array, rate: int) -> Iterator[str]:
        """Yield the text so far after each chunk, as in live recognition."""
        best = list[int]()
        for log_probs in self.chunks(self.features(audio, rate)):
            best += log_probs.argmax(1).tolist()
            yield self.text(np.array(best))

    def features(self, audio: Array, rate: int) -> Array:
        """Log-mel features `[frames, F]`, computed as in training."""
        mono = audio.mean(1) if audio.ndim == 2 else audio
        samples = resample(mono.astype(np.float32), rate, self.config["sampling_rate"])
        window, bank = self._arrays["window"], self._arrays["bank"]
        length, shift = len(window), int(self.config["shift"])
        if len(samples) < length:
            raise ValueError(f"{len(samples)} samples are too few: one window needs {length}")
        count = (len(samples) + shift // 2) // shift
        left, whole = (length - shift) // 2, (count - 1) * shift + length
        right = max(0, whole - left - len(samples))
        mirrored = np.concatenate([samples[:left][::-1], samples, samples[len(samples) - right :][::-1]])
        frames = np.lib.stride_tricks.sliding_window_view(mirrored, length)[::shift][:count]
        energies = [self._energies(frames[begin : begin + _BLOCK], window, bank) for begin in range(0, count, _BLOCK)]
        features = np.concatenate(energies)
        if self.config["pauses"] is not None:
            features = features[without_long_pauses([np.exp(features)], self.config["pauses"])[0]]
        if self.config["normalise"] == "active":
            (features,) = normalised([features])
        elif self.config["normalise"] == "utterance":
            centred = features - features.mean(0)
            features = centred / np.maximum(np.sqrt(np.square(centred).mean(0)), _SMALLEST_DEVIATION)
        elif self.config["normalise"] == "speech":
            features = (features - features[loud_frames(features.mean(1))].mean(0)) / SCALE
        elif self.config["normalise"] == "global":
            features = (features - self._arrays["mean"]) / self._arrays["deviation"]
        return features.astype(np.float32)

    def _energies(self, frames: Array, window: Array, bank: Array) -> Array:
        """The log energies `[n, F]` of windows of samples `[n, length]`, as Kaldi defines them."""
        centred = frames - frames.mean(1, keepdims=True)
        before = np.concatenate([centred[:, :1], centred[:, :-1]], axis=1)
        spectrum = np.fft.rfft((centred - _PRE_EMPHASIS * before) * window, n=int(self.config["fft_length"]))
        power = spectrum.real**2 + spectrum.imag**2
        energies: Array = np.log(np.maximum(power @ bank, self.config["floor"])).astype(np.float32)
        return energies

    def log_probs(self, features: Array) -> Array:
        """The log-probabilities `[T', V]` of a whole recording with features `[T, F]`."""
        inputs = {"features": features[None], "lengths": np.array([len(features)])}
        log_probs, lengths = self._session("model.onnx").run(None, inputs)
        found: Array = log_probs[0, : int(lengths[0])]
        return found

    def chunks(self, features: Array) -> Iterator[Array]:
        """Yield the log-probabilities `[C, V]` of a streaming model, chunk by chunk."""
        streaming = self.config["streaming"]
        if streaming is None:
            raise ValueError("this model needs whole recordings: leave out --stream")
        session = self._session("streaming.onnx")
        size, hop, reach = streaming["window"], streaming["hop"], streaming["reach"]
        caches = {name: np.zeros([1, *each["shape"]], each["type"]) for name, each in streaming["caches"].items()}
        chunk = hop // streaming["subsampling"]
        remaining = math.ceil(len(features) / streaming["subsampling"])
        for begin in range(0, len(features), hop):
            places = np.arange(begin - reach, begin - reach + size)  # some lie before the first frame or after the last
            inside = (places >= 0) & (places < len(features))
            window = np.where(inside[:, None], features[places.clip(0, len(features) - 1)], np.float32(0.0))
            log_probs, *left = session.run(None, {"window": window[None], "inside": inside[None], **caches})
            caches = dict(zip(caches, left, strict=True))
            yield log_probs[0, : min(chunk, remaining)]
            remaining -= chunk

    def text(self, best: Array) -> str:
        """The text for the best token of each frame `[T']`. Repeated tokens are merged, and blanks (0) are dropped."""
        starts = np.diff(best, prepend=-1) != 0
        joined = "".join(self.config["tokens"][token] for token in best[starts & (best != 0)])
        return joined.replace("\u2581", " ").removeprefix(" ") if self.config["has_pieces"] else joined


def session_of(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open an ONNX network on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def resample(samples: Array, rate: int, wanted: int) -> Array:
    """Resample samples `[T]` from `rate` Hz to `wanted` Hz as torchaudio does: with a sinc under a Hann window that has
    6 zero crossings on either side, cut off at 0.99 of the lower Nyquist frequency."""
    if rate == wanted:
        return samples
    step, phases = rate // math.gcd(rate, wanted), wanted // math.gcd(rate, wanted)
    edge = 0.99 * min(step, phases)
    width = math.ceil(6 * step / edge)
    time = (np.arange(-width, width + step) / step - np.arange(phases)[:, None] / phases) * edge
    time = time.clip(-6.0, 6.0)
    kernels = (np.sinc(time) * np.cos(time * np.pi / 12) ** 2 * edge / step).astype(np.float32)  # [phases, taps]
    padded = np.pad(samples, (width, width + step))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernels.shape[1])[::step]
    resampled = [windows[begin : begin + _BLOCK] @ kernels.T for begin in range(0, len(windows), _BLOCK)]
    return np.concatenate(resampled).reshape(-1)[: math.ceil(len(samples) * wanted / rate)]


def main() -> int:
    """Read the command line and transcribe the files. Returns 1 if some files cannot be read, otherwise 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="WAV, FLAC, OGG, MP3")
    parser.add_argument("--stream", action="store_true", help="process each file chunk by chunk")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    transcriber = Transcriber(Path(__file__).resolve().parent, arguments.threads)
    problems = 0
    for file in arguments.files:
        try:
            audio, rate = soundfile.read(file, dtype="float32")
            if arguments.stream:
                text = ""
                for text in transcriber.stream(audio, rate):
                    sys.stderr.write(f"{file}\t{text}\n")
            else:
                text = transcriber.transcribe(audio, rate)
        except (OSError, ValueError, RuntimeError) as error:  # soundfile's own error is a RuntimeError
            sys.stderr.write(f"error: {file}: {error}\n")
            problems += 1
        else:
            sys.stdout.write(f"{file}\t{text}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
