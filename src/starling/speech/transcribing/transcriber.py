"""Transcribes waveforms, streams of any length, and audio while it is spoken.

The places of words follow from what CTC hears in each frame and from pauses in the sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from starling.errors import ConfigError, DataError
from starling.speech.audio import check_rate, checked
from starling.speech.decoding.decoders import Emission, Phrases, emissions_of, words_in
from starling.speech.features import WHOLE, LogMel
from starling.speech.hybrid.viterbi import aligned, path_of
from starling.speech.models.network import StreamingNetwork
from starling.speech.recogniser import Recogniser, by_duration, mono
from starling.speech.tokens import BLANK
from starling.speech.transcribing.segmenter import Piece, Segmentation, Segmenter, gathered, quiet_stretches
from starling.speech.transcribing.transcript import Seconds, Segment, Transcript, Update, Word


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


Search: TypeAlias = Callable[[NDArray[np.float32]], str]
"""A function that returns the text of CTC's log-probabilities `[T, V]`, such as a beam search."""
Waveform: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int16] | NDArray[np.int32] | torch.Tensor

TOGETHER: Seconds = 240.0
"""Seconds of audio whose segments are decoded together, in batches of similar lengths."""
_BATCH: Seconds = 120.0
"""Seconds of padded audio in a batch."""
_OFTEN: Seconds = 0.4
_GROWTH = 0.25
"""Growth of a live segment after which it is decoded again, as a share of its length; at least `_OFTEN` seconds. All
the work is then at most six times that of decoding it once, however long it is."""
_MOVED: Seconds = 0.1
"""Largest correction, earlier or later, of a live segment's beginning without its partial text being decoded from the
new beginning."""
_PAUSE: Seconds = 0.15
"""Minimum length of a quiet stretch that counts as a pause; a shorter one may be part of a consonant, since weak ones
drown in noise."""
_DROWNED: Seconds = 0.05
"""Longest time for which a word is heard before its sound rises above the noise."""
_LATE: Seconds = 0.08
"""Time within which a word that ends after a cut without a pause belongs to the segment before it. It is the length of
a consonant: cuts are in gaps, or where a word's sound is closed off."""
_SHORTEST = 2
"""Number of frames of the shortest quiet stretch that is considered."""


class Transcriber:
    """Transcribes with a trained recogniser. `starling.load_model` makes one.

    Methods may be called from one thread at a time.
    """

    def __init__(
        self,
        recogniser: Recogniser,
        search: Search | None = None,
        segmentation: Segmentation | None = None,
        phrases: Phrases | None = None,
    ) -> None:
        self.recogniser = recogniser
        self._search = search
        self._segmentation = segmentation
        self._phrases = phrases

    def boosted(self, phrases: Iterable[str], source: str = "phrases") -> Transcriber:
        """A transcriber with the same model that replaces words where phrases of a list were nearly recognised.

        Args:
            phrases: `PHRASE` or `PHRASE<tab>WEIGHT`; the weight is in natural logarithms for each token. Blank phrases,
                and those that begin with #, are ignored.
            source: The origin of the phrases, for messages.

        Raises:
            ConfigError: The model's texts are not those of CTC.
            DataError: The model's tokens cannot spell a phrase, or a weight is not a number.
        """
        found = self.recogniser.phrases(phrases, source, self._search is not None)
        return Transcriber(self.recogniser, self._search, self._segmentation, found)

    @property
    def rate(self) -> int:
        """The sampling rate of the recogniser in Hz. Audio of other rates is resampled."""
        return self.recogniser.features.sampling_rate

    @property
    def has_times(self) -> bool:
        """Whether words have times, which models trained frame by frame do not give."""
        return self.recogniser.states is None

    def transcribe(self, waveform: Waveform, rate: int) -> Transcript:
        """Transcribe a recording `[T]` or `[channels, T]` (averaged), sampled at `rate` Hz.

        Floating-point samples are in [-1, 1]; integers of 16 or 32 bits are scaled.

        Raises:
            DataError: The audio is empty or not finite, or its shape or rate is impossible.
        """
        samples = mono(waveform).detach().cpu().numpy()
        segments = tuple(segment for some in self.stream([samples], rate) for segment in some)
        return Transcript(segments, len(samples) / rate)

    def stream(
        self, blocks: Iterable[NDArray[np.float32]], rate: int, together: Seconds = TOGETHER
    ) -> Iterator[list[Segment]]:
        """The segments of audio that comes in blocks `[T]` of one channel, in bounded memory.

        Segments of up to `together` seconds are decoded and yielded together.
        """
        for some in gathered(self.pieces(blocks, rate), together * self.rate):
            yield self.decode(some)

    def pieces(self, blocks: Iterable[NDArray[np.float32]], rate: int) -> Iterator[Piece]:
        """The audio of the segments, at the rate of the recogniser."""
        segmenter = self._segmenter(rate)
        for block in blocks:
            yield from segmenter.feed(block)
        yield from segmenter.end()

    def live(self, rate: int) -> Live:
        """Transcribe audio while it is spoken."""
        return Live(self, self._segmenter(rate))

    def _segmenter(self, rate: int) -> Segmenter:
        check_rate(rate, "audio")
        chosen = self._segmentation or Segmentation()
        return Segmenter(self.rate, chosen if self.has_times else replace(chosen, overlap=0.0), rate)

    def decode(self, pieces: Sequence[Piece]) -> list[Segment]:
        """Transcribe pieces of audio at the recogniser's rate, in batches of similar lengths."""
        found: dict[int, Segment] = {}
        for batch in by_duration(np.array([len(each.samples) for each in pieces]) / self.rate, _BATCH):
            decoded = self._decode_batch([pieces[place] for place in batch])
            found.update(zip(batch, decoded, strict=True))
        return [found[place] for place in range(len(pieces))]

    def _decode_batch(self, pieces: Sequence[Piece]) -> list[Segment]:
        recogniser, is_searched = self.recogniser, self._search is not None
        heard = recogniser.listen([self._tensor(piece) for piece in pieces])
        rows = heard.rows
        texts = recogniser.texts(heard) if self._search is None else [self._search(row) for row in rows]
        return [
            self._segment(piece, row, *recogniser.placed(row, text, is_searched, self._phrases))
            for piece, text, row in zip(pieces, texts, rows, strict=True)
        ]

    def timed(self, samples: NDArray[np.float32], text: str) -> tuple[Word, ...]:
        """The words of a recording `[T]` at the recogniser's rate, whose text is known, with the times at which CTC
        hears them.

        Raises DataError for a text that is empty, has more tokens than CTC has frames, or contains an unknown token.
        """
        words = text.split()
        if not self.has_times or not words:
            raise DataError(
                "the text is empty" if self.has_times else "a model that was trained frame by frame has no CTC"
            )
        piece = Piece(0, samples)
        (row,) = self.recogniser.listen([self._tensor(piece)]).rows
        emissions = aligned(row, self.recogniser.tokenizer.encode(" ".join(words)))
        found = () if emissions is None else tuple(self._words(piece, row, emissions))
        if len(found) != len(words):
            raise DataError(f"{len(samples) / self.rate:.2f} s of audio are too short for {len(words)} words")
        return found

    def _tensor(self, piece: Piece) -> torch.Tensor:
        """The samples as a tensor, padded to at least one window."""
        shortest = round(self.recogniser.features.config.frame_length * self.rate) + 1
        return torch.from_numpy(np.pad(piece.samples, (0, max(0, shortest - len(piece.samples)))))

    def _segment(
        self, piece: Piece, log_probs: NDArray[np.float32], text: str, emissions: Sequence[Emission] | None
    ) -> Segment:
        own = piece.own
        start, end = own.start / self.rate, (own.start + len(own.samples)) / self.rate
        words = None if emissions is None else tuple(self._words(piece, log_probs, emissions))
        if words and len(own.samples) < len(piece.samples):
            first, last = (start + _LATE if piece.lead else -math.inf), (end + _LATE if piece.trail else math.inf)
            words = tuple(each for each in words if first < each.end <= last)
            text = " ".join(each.text for each in words)
        return Segment(round(start, 3), round(end, 3), " ".join(text.split()), words)

    def _words(self, piece: Piece, log_probs: NDArray[np.float32], emissions: Sequence[Emission]) -> Iterator[Word]:
        """The words of a piece of audio whose tokens CTC emits in `log_probs` `[T', V]`.

        A word begins where its first token begins on the best path without blanks. Next to a pause, it begins and ends
        with its sound.
        """
        tokenizer, seconds, offset = self.recogniser.tokenizer, self.recogniser.output_seconds, piece.start / self.rate
        words = words_in(emissions, tokenizer.names)
        if not words:
            return
        places = beginnings(log_probs, [each.token for each in emissions]).tolist()
        begin_of = dict(zip(emissions, places, strict=True))
        begins = [begin_of[word[0]] * seconds for word in words]
        firsts = [word[0].first * seconds for word in words]
        begins[0] = firsts[0]  # the first token has all frames before it
        lasts = [(word[-1].last + 1) * seconds for word in words]
        for word, (start, end) in zip(words, _placed(begins, firsts, lasts, piece.samples, self.rate), strict=True):
            if text := tokenizer.decode([each.token for each in word]).strip():
                best = [log_probs[each.first : each.last + 1, each.token].max() for each in word]
                confidence = round(min(1.0, float(np.exp(np.mean(best, dtype=np.float64)))), 4)
                yield Word(text, round(offset + start, 3), round(offset + end, 3), confidence)


class Live:
    """Transcribes audio while it is spoken. `Transcriber.live` makes one.

    The partial text of a streaming model comes from its stream, which hears each sample of a segment once. With any
    other model, the segment that has not ended is decoded repeatedly, at increasing intervals. A segment that has ended
    is decoded as in a recording, so that its text and its times do not depend on the blocks.
    """

    def __init__(self, transcriber: Transcriber, segmenter: Segmenter) -> None:
        self._transcriber = transcriber
        self._segmenter = segmenter
        self._is_streamed = can_stream(transcriber.recogniser)
        self._stream: Stream | None = None
        self._start = self._heard = 0  # samples before the first that the stream heard, and those that it heard
        self._partial = ""
        self._next = 0  # samples after which to decode

    def feed(self, samples: NDArray[np.float32], with_partial: bool = True) -> Update:
        """The segments and the partial text after the next samples `[T]`, in [-1, 1]. Without `with_partial`, the
        partial text may be older."""
        final = tuple(self._transcriber.decode(self._segmenter.feed(checked(samples, "audio"))))
        if (pending := self._segmenter.pending) is not None:
            pending = pending.own
        if final or pending is None:
            self._partial, self._stream = "", None
        if final:
            self._next = 0
        if with_partial and pending is not None:
            self._partial = self._streamed(pending) if self._is_streamed else self._decoded(pending)
        return Update(final, self._partial)

    def end(self) -> Update:
        """The last segments. Nothing can be fed afterwards."""
        return Update(tuple(self._transcriber.decode(self._segmenter.end())))

    def _streamed(self, pending: Piece) -> str:
        """The text of the complete chunks; nothing that has been heard is heard again."""
        moved = abs(pending.start - self._start)  # with more sound, another beginning may be found
        if self._stream is None or moved > min(_MOVED * self._transcriber.rate, self._heard):
            self._stream, self._start, self._heard = Stream(self._transcriber.recogniser), pending.start, 0
        new = pending.samples[self._start + self._heard - pending.start :]
        self._heard += len(new)
        return " ".join(self._stream.accept(torch.from_numpy(new)).split())

    def _decoded(self, pending: Piece) -> str:
        """The text of the whole pending segment, or the previous text while it is recent."""
        if self._segmenter.taken < self._next:
            return self._partial
        pause = max(_OFTEN * self._transcriber.rate, _GROWTH * len(pending.samples))
        self._next = self._segmenter.taken + round(pause)
        return self._transcriber.decode([pending])[0].text


def beginnings(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.int64]:
    """The frame in which each of the tokens begins, `[N]`, on the best path through `[T, V]` without blanks.

    A frame belongs to the token that is likelier in it, however unlikely both are beside the blank. In a network that
    emits tokens late or for one frame only, this locates their sound better than the frames of their emission.
    """
    path = path_of(log_probs[:, tokens], np.zeros(len(tokens), bool))
    return np.searchsorted(path, np.arange(len(tokens)))


def _placed(
    begins: Sequence[Seconds],
    firsts: Sequence[Seconds],
    lasts: Sequence[Seconds],
    samples: NDArray[np.float32],
    rate: int,
) -> list[tuple[Seconds, Seconds]]:
    """The words' beginnings and ends, from the sound: CTC hears words begin at `begins`, and emits their last tokens by
    `lasts`."""
    (quiet, seconds), total = quiet_stretches(samples, rate), len(samples) / rate
    pauses = quiet[quiet[:, 1] - quiet[:, 0] >= _SHORTEST] * seconds
    is_long = pauses[:, 1] - pauses[:, 0] >= _PAUSE - seconds / 2
    before = pauses[(pauses[:, 0] < begins[0]) & (pauses[:, 1] < begins[0] + 2 * _DROWNED)]
    edges = [min(float(before[-1, 1]), begins[0] + _DROWNED) if len(before) else 0.0]
    for begin, first, last in zip(begins[1:], firsts[1:], lasts, strict=False):
        is_between = (pauses[:, 1] > min(last, begin)) & (pauses[:, 0] < max(begin, first))
        found = pauses[is_between & (is_long | (pauses[:, 1] < begin + _DROWNED))]
        if len(found):
            left, right = found[(found[:, 1] - found[:, 0]).argmax()]
            begin = min(float(right), begin + _DROWNED)
            edges.append(min(float(left), begin))
        else:
            edges.append(begin)
        edges.append(begin)
    after = pauses[(pauses[:, 1] > lasts[-1]) & (is_long | (pauses[:, 1] > total - 1.5 * seconds))]
    end = max(float(after[0, 0]), lasts[-1]) if len(after) else total
    edges.append((end + total) / 2 if total - end < _PAUSE else end)  # a weak consonant, or a pause: half of it each
    times = np.minimum(np.maximum.accumulate(edges), total).tolist()
    return list(zip(times[::2], times[1::2], strict=True))
