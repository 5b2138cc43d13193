"""Recognises speech while it is spoken: features of blocks of samples, and the text recognised so far."""

from __future__ import annotations

import numpy as np
import torch

from starling.errors import ConfigError
from starling.speech.decoding.decoders import emissions_of
from starling.speech.features import WHOLE, LogMel
from starling.speech.models.network import StreamingNetwork
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import BLANK

Seconds = float


class StreamingLogMel:
    """The features of one recording that comes in blocks. Together, they are the frames that `LogMel` gives for the
    whole recording, to rounding.

    Raises ConfigError for features that need the whole recording because of `normalise`, `pauses` or `splice`.
    """

    def __init__(self, features: LogMel) -> None:
        if not _comes_in_blocks(features):
            raise ConfigError(
                f"features.normalise: {', '.join(WHOLE)}, features.pauses and features.splice need the whole "
                "recording: a stream needs normalise: global or none, without pauses and splice"
            )
        self._features = features
        self._received = 0  # samples
        self._made = 0  # frames
        self._samples = torch.zeros(0)  # those that later frames need; before the first frame, those of the beginning
        self._has_begun = False

    def accept(self, samples: torch.Tensor) -> torch.Tensor:
        """The frames `[n, F]` that these samples `[T]`, which follow the previous ones, complete."""
        layer = self._features
        self._received += len(samples)
        self._samples = torch.cat([self._samples, samples.float()])
        if not self._has_begun:
            if len(self._samples) < layer.length:
                return self._frames(0)
            self._samples = torch.cat([self._samples[: layer.left].flip(0), self._samples])
            self._has_begun = True
        return self._frames((len(self._samples) - layer.length) // layer.shift + 1)

    def finish(self) -> torch.Tensor:
        """The frames `[n, F]` whose windows end after the recording; none if it is shorter than a window."""
        if not self._has_begun:
            return self._frames(0)
        layer = self._features
        missing = layer.num_frames(self._received) - self._made
        needed = (missing - 1) * layer.shift + layer.length - len(self._samples)
        if needed > 0:
            self._samples = torch.cat([self._samples, self._samples[-needed:].flip(0)])
        return self._frames(missing)

    def _frames(self, count: int) -> torch.Tensor:
        layer = self._features
        if count <= 0:
            return torch.zeros(0, layer.num_features)
        energies = layer.of_samples(self._samples[: (count - 1) * layer.shift + layer.length], count)
        self._samples = self._samples[count * layer.shift :]
        self._made += count
        return layer.normalised([energies])[0]


def _comes_in_blocks(features: LogMel) -> bool:
    """Whether features can be computed before the end of a recording."""
    config = features.config
    return config.normalise not in WHOLE and config.pauses is None and not config.splice


class Stream:
    """One recording that is recognised as it arrives, by greedy CTC.

    ```python
    stream = Stream(recogniser)
    for block in blocks:                 # [T] in [-1, 1], at the recogniser's sampling rate
        print(stream.accept(block))      # the text so far
    print(stream.finish())
    ```

    Raises ConfigError for a recogniser whose model has no `model.chunk`.
    """

    def __init__(self, recogniser: Recogniser) -> None:
        self._network = streaming_network(recogniser)
        self._recogniser = recogniser
        self._features = StreamingLogMel(recogniser.features)
        with recogniser.evaluating():
            self._state = self._network.initial_state()
        self._tokens: list[int] = []
        self._last = BLANK  # the best token of the last frame
        self.log_probs: list[torch.Tensor] = []
        """The log-probabilities of each step, `[T', V]`, for other searches."""

    def accept(self, samples: torch.Tensor) -> str:
        """The text of all samples so far, including these samples `[T]`, which follow the previous ones."""
        return self._step(self._features.accept(samples), is_last=False)

    def finish(self) -> str:
        """The text of the whole recording, which ends here."""
        return self._step(self._features.finish(), is_last=True)

    def _step(self, features: torch.Tensor, is_last: bool) -> str:
        device = self._network.output.weight.device
        with self._recogniser.evaluating():
            log_probs, self._state = self._network.step(features[None].to(device), self._state, is_last)
        if log_probs.shape[1]:
            path = np.array([self._last, *log_probs[0].argmax(1).tolist()])
            self._tokens += [each.token for each in emissions_of(path) if each.first > 0]
            self._last = int(path[-1])
            self.log_probs.append(log_probs[0].cpu())
        return self._recogniser.tokenizer.decode(self._tokens)


def streaming_network(recogniser: Recogniser) -> StreamingNetwork:
    """The network of a recogniser that can stream. Raises ConfigError for any other."""
    network = recogniser.model
    if not isinstance(network, StreamingNetwork) or network.chunks is None:
        raise ConfigError(
            f"this {recogniser.model_config.name} needs whole recordings: to stream, train it with model.chunk"
        )
    return network


def can_stream(recogniser: Recogniser) -> bool:
    """Whether a recogniser can be used with `Stream`."""
    network = recogniser.model
    has_chunks = isinstance(network, StreamingNetwork) and network.chunks is not None
    return has_chunks and _comes_in_blocks(recogniser.features)
