"""Transcribes waveforms, streams of any length, and live speech.

The times of words are derived from CTC's outputs in each frame and from pauses in the audio.
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
    """Computes the features of one recording that arrives in blocks. The frames of all blocks together equal those that
    `LogMel` computes for the whole recording, up to rounding.

    Raises ConfigError for features that need the whole recording because of `normalise`, `pauses` or `splice`.
    """

    def __init__(self, features: LogMel) -> None:
        if not _comes_in_blocks(features):
            raise ConfigError(
                f"features.normalise: {', '.join(WHOLE)}, features.pauses and features.splice need the whole "
                "recording: streaming needs normalise: global or none, without pauses and splice"
            )
        self._features = features
        self._received = 0  # number of samples
        self._made = 0  # number of frames
        self._samples = torch.zeros(0)  # samples that later frames need; before the first frame, all samples so far
        self._has_begun = False

    def accept(self, samples: torch.Tensor) -> torch.Tensor:
        """The frames `[n, F]` that are completed by the next samples `[T]` of the recording."""
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
        """The frames `[n, F]` whose windows extend past the end of the recording; none if the recording is shorter than
        a window."""
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
    """Whether features can be computed before a recording has ended."""
    config = features.config
    return config.normalise not in WHOLE and config.pauses is None and not config.splice


class Stream:
    """Recognises one recording as it arrives, with greedy CTC decoding.

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
        self._last = BLANK  # the likeliest token in the last frame
        self.log_probs: list[torch.Tensor] = []
        """The log-probabilities `[T', V]` of each step, kept for other searches."""

    def accept(self, samples: torch.Tensor) -> str:
        """Add the next samples `[T]`, and return the text of the recording so far."""
        return self._step(self._features.accept(samples), is_last=False)

    def finish(self) -> str:
        """End the recording, and return its whole text."""
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
    """The network of a recogniser that can stream. Raises ConfigError if the recogniser cannot."""
    network = recogniser.model
    if not isinstance(network, StreamingNetwork) or network.chunks is None:
        raise ConfigError(
            f"this {recogniser.model_config.name} needs whole recordings: to stream, train it with model.chunk"
        )
    return network


Search: TypeAlias = Callable[[NDArray[np.float32]], str]
"""A function, such as a beam search, that returns the text for CTC's log-probabilities `[T, V]`."""
Waveform: TypeAlias = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int16] | NDArray[np.int32] | torch.Tensor

TOGETHER: Seconds = 240.0
"""Seconds of audio whose segments are decoded together, in batches of segments with similar lengths."""
_BATCH: Seconds = 120.0
"""Maximum seconds of audio in a batch, including padding."""
_OFTEN: Seconds = 0.4
_GROWTH = 0.25
"""Growth of a live segment, as a fraction of its length, after which the segment is decoded again; the growth is at
least `_OFTEN` seconds. The total work is then at most six times that of decoding the segment once, whatever its
length."""
_MOVED: Seconds = 0.1
"""Largest shift of a live segment's beginning, in either direction, that does not cause its partial text to be decoded
again from the new beginning."""
_PAUSE: Seconds = 0.15
"""Minimum length of a quiet stretch that counts as a pause. A shorter stretch may be part of a weak consonant that is
masked by noise."""
_DROWNED: Seconds = 0.05
"""Longest time by which CTC may hear a word before the word's sound rises above the noise."""
_LATE: Seconds = 0.08
"""A word that ends within this time after a cut without a pause belongs to the segment before the cut. The time is the
length of a consonant, because audio is cut in a gap or at the closure of a consonant."""
_SHORTEST = 2
"""Length, in frames, of the shortest quiet stretch that is considered."""


class Transcriber:
    """Transcribes audio with a trained recogniser. `starling.load_model` returns a `Transcriber`.

    Only one thread at a time may call its methods.
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
        """A transcriber with the same model that favours `phrases`: where it nearly recognised one of them, the phrase
        replaces the recognised words.

        Args:
            phrases: `PHRASE` or `PHRASE<tab>WEIGHT`. The weight is added per token, in natural-log units. Blank phrases
                and phrases that begin with # are ignored.
            source: The origin of the phrases, which error messages name.

        Raises:
            ConfigError: CTC does not produce the model's texts.
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
        """Whether words have times. Models trained with `loss: frames` do not provide times."""
        return self.recogniser.states is None

    def transcribe(self, waveform: Waveform, rate: int) -> Transcript:
        """Transcribe a recording sampled at `rate` Hz: `[T]`, or `[channels, T]`, whose channels are averaged.

        Floating-point samples are in [-1, 1]; 16-bit and 32-bit integers are scaled to that range.

        Raises:
            DataError: The audio is empty or not finite, or its shape or rate is invalid.
        """
        samples = mono(waveform).detach().cpu().numpy()
        segments = tuple(segment for some in self.stream([samples], rate) for segment in some)
        return Transcript(segments, len(samples) / rate)

    def stream(
        self, blocks: Iterable[NDArray[np.float32]], rate: int, together: Seconds = TOGETHER
    ) -> Iterator[list[Segment]]:
        """Yield the transcribed segments of single-channel audio that arrives in blocks `[T]`, in bounded memory.

        Segments that total up to `together` seconds are decoded and yielded together.
        """
        for some in gathered(self.pieces(blocks, rate), together * self.rate):
            yield self.decode(some)

    def pieces(self, blocks: Iterable[NDArray[np.float32]], rate: int) -> Iterator[Piece]:
        """Yield the audio of each segment at the recogniser's sampling rate."""
        segmenter = self._segmenter(rate)
        for block in blocks:
            yield from segmenter.feed(block)
        yield from segmenter.end()

    def live(self, rate: int) -> Live:
        """Start to transcribe live speech, sampled at `rate` Hz."""
        return Live(self, self._segmenter(rate))

    def _segmenter(self, rate: int) -> Segmenter:
        check_rate(rate, "audio")
        chosen = self._segmentation or Segmentation()
        return Segmenter(self.rate, chosen if self.has_times else replace(chosen, overlap=0.0), rate)

    def decode(self, pieces: Sequence[Piece]) -> list[Segment]:
        """Transcribe pieces of audio at the recogniser's sampling rate, in batches of pieces with similar lengths."""
        found: dict[int, Segment] = {}
        for batch in by_duration(np.array([len(each.samples) for each in pieces]) / self.rate, _BATCH):
            found.update(zip(batch, self._decode_batch([pieces[place] for place in batch]), strict=True))
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
        """The words of a recording `[T]` whose text is known, with the times at which CTC hears them. The recording is
        at the recogniser's sampling rate.

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
        """Yield the words of a piece of audio with their times, from CTC's `log_probs` `[T', V]` and its emissions.

        A word begins where its first token begins on the best path without blanks. A word next to a pause begins or
        ends where its sound does.
        """
        tokenizer, seconds, offset = self.recogniser.tokenizer, self.recogniser.output_seconds, piece.start / self.rate
        words = words_in(emissions, tokenizer.names)
        if not words:
            return
        places = beginnings(log_probs, [each.token for each in emissions]).tolist()
        begin_of = dict(zip(emissions, places, strict=True))
        begins = [begin_of[word[0]] * seconds for word in words]
        firsts = [word[0].first * seconds for word in words]
        begins[0] = firsts[0]  # the path assigns all earlier frames to the first token
        lasts = [(word[-1].last + 1) * seconds for word in words]
        for word, (start, end) in zip(words, _placed(begins, firsts, lasts, piece.samples, self.rate), strict=True):
            if text := tokenizer.decode([each.token for each in word]).strip():
                best = [log_probs[each.first : each.last + 1, each.token].max() for each in word]
                confidence = round(min(1.0, float(np.exp(np.mean(best, dtype=np.float64)))), 4)
                yield Word(text, round(offset + start, 3), round(offset + end, 3), confidence)


class Live:
    """Transcribes live speech. `Transcriber.live` returns a `Live`.

    A streaming model processes each sample of the current segment once to produce the partial text. With any other
    model, the current segment is decoded repeatedly, at increasing intervals. A completed segment is decoded as part of
    a recording would be, so that its text and times do not depend on how the audio is divided into blocks.
    """

    def __init__(self, transcriber: Transcriber, segmenter: Segmenter) -> None:
        self._transcriber = transcriber
        self._segmenter = segmenter
        recogniser = transcriber.recogniser
        self._is_streamed = recogniser.latency is not None and _comes_in_blocks(recogniser.features)
        self._stream: Stream | None = None
        self._start = self._heard = 0  # position of the first sample that the stream heard; number of samples it heard
        self._partial = ""
        self._next = 0  # number of samples at which to decode again

    def feed(self, samples: NDArray[np.float32], with_partial: bool = True) -> Update:
        """Add the next samples `[T]`, in [-1, 1], and return the completed segments and the partial text. If
        `with_partial` is false, the partial text may be out of date."""
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
        """End the audio, and return the last segments. No samples can be fed afterwards."""
        return Update(tuple(self._transcriber.decode(self._segmenter.end())))

    def _streamed(self, pending: Piece) -> str:
        """The text of the complete chunks. The stream does not process samples again that it has already heard."""
        moved = abs(pending.start - self._start)  # with more audio, the segmenter may find a different beginning
        if self._stream is None or moved > min(_MOVED * self._transcriber.rate, self._heard):
            self._stream, self._start, self._heard = Stream(self._transcriber.recogniser), pending.start, 0
        new = pending.samples[self._start + self._heard - pending.start :]
        self._heard += len(new)
        return " ".join(self._stream.accept(torch.from_numpy(new)).split())

    def _decoded(self, pending: Piece) -> str:
        """The text of the whole pending segment, or the previous text if it is recent enough."""
        if self._segmenter.taken < self._next:
            return self._partial
        pause = max(_OFTEN * self._transcriber.rate, _GROWTH * len(pending.samples))
        self._next = self._segmenter.taken + round(pause)
        return self._transcriber.decode([pending])[0].text


def beginnings(log_probs: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.int64]:
    """The frames `[N]` in which the tokens begin on the best path without blanks through log-probabilities `[T, V]`.

    A frame belongs to whichever adjacent token is likelier in it, even if both are far less likely than the blank. For
    a network that emits tokens late or in single frames, these frames locate the sound of a token better than the
    frames in which the network emits it.
    """
    return np.searchsorted(path_of(log_probs[:, tokens], np.zeros(len(tokens), bool)), np.arange(len(tokens)))


def _placed(
    begins: Sequence[Seconds],
    firsts: Sequence[Seconds],
    lasts: Sequence[Seconds],
    samples: NDArray[np.float32],
    rate: int,
) -> list[tuple[Seconds, Seconds]]:
    """The beginnings and ends of words, refined by pauses in the audio. According to CTC, words begin at `begins`, and
    their last tokens are emitted by `lasts`."""
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
    edges.append((end + total) / 2 if total - end < _PAUSE else end)  # the rest is a weak consonant or a pause
    times = np.minimum(np.maximum.accumulate(edges), total).tolist()
    return list(zip(times[::2], times[1::2], strict=True))
