"""Words and their times, in recordings of any length and rate, and in audio as it is spoken."""

import math
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from starling.errors import DataError
from starling.speech.decoding.decoders import emissions_of
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.hybrid.viterbi import aligned
from starling.speech.models import model_config
from starling.speech.models.architectures import AttentionConfig, ChunkConfig, TransducerConfig
from starling.speech.models.network import StreamingNetwork
from starling.speech.recogniser import Recogniser
from starling.speech.resampling import resampled
from starling.speech.tokens import CharacterTokenizer
from starling.speech.transcribing.segmenter import Segmentation
from starling.speech.transcribing.transcriber import Transcriber, beginnings
from starling.speech.transcribing.transcript import Segment, Transcript
from tests.speech.tones import RATE, WORDS, performance

TONES = Path(__file__).parents[1] / "data" / "tones"
"""A trained recogniser of tones; tests/data/make_tones.py made it."""
WITHIN = 0.08
"""Largest error of a time in seconds."""


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(Recogniser.load(TONES))


def song(count: int, seed: int = 5) -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """Sentences of one to six words."""
    generator = np.random.default_rng(seed)
    words, gaps = [], []
    for _ in range(count):
        size = int(generator.integers(1, 7))
        words += generator.choice(list(WORDS), size).tolist()
        gaps += [generator.uniform(0.7, 1.5), *generator.uniform(0.05, 0.4, size - 1)]
    return performance(words, [*gaps, 0.8], generator)


def check(transcript: Transcript, spans: list[tuple[str, float, float]]) -> None:
    """Check the words and their times."""
    assert transcript.text == " ".join(word for word, _, _ in spans)
    for word, (text, start, end) in zip(transcript.words, spans, strict=True):
        assert word.text == text
        assert abs(word.start - start) <= WITHIN, (word, start)
        assert abs(word.end - end) <= WITHIN, (word, end)
        assert 0.0 < word.confidence <= 1.0


def test_words_are_within_80_ms_of_their_true_times(transcriber: Transcriber) -> None:
    """A recording of many sentences is tested at its own rate, at another rate, and in stereo."""
    waveform, spans = song(12)
    check(transcriber.transcribe(waveform, RATE), spans)
    wide = resampled(torch.from_numpy(waveform), RATE, 22050)
    check(transcriber.transcribe(torch.stack([wide, wide]), 22050), spans)
    check(transcriber.transcribe((32767 * waveform).astype(np.int16), RATE), spans)


def test_the_text_of_a_long_recording_is_that_of_its_pieces(transcriber: Transcriber) -> None:
    """Each segment alone gives the same text, and offsets are kept."""
    waveform, _ = song(8)
    whole = transcriber.transcribe(waveform, RATE)
    assert len(whole.segments) >= 8
    for segment in whole.segments:
        piece = waveform[round(segment.start * RATE) : round(segment.end * RATE)]
        assert transcriber.recogniser.transcribe(piece, RATE).split() == segment.text.split()
        alone = transcriber.transcribe(piece, RATE)
        assert alone.text == segment.text
        assert [round(word.start + segment.start - other.start, 1) for word, other in zip(
            alone.words, segment.words or (), strict=True)] == [0.0] * len(alone.words)  # fmt: skip
    streamed = [each for some in transcriber.stream(np.array_split(waveform, 37), RATE, 3.0) for each in some]
    assert [each.text for each in streamed] == [each.text for each in whole.segments]


def test_a_word_beside_a_cut_is_heard_once(transcriber: Transcriber) -> None:
    """Speech without pauses is cut where it is quietest, also inside words. The segments on either side hear a little
    of each other, and each keeps the words of its own part: without that, words are lost or heard twice."""
    wrong = {0.0: 0, 0.6: 0}
    for seed, overlap in product(range(4), wrong):
        generator = np.random.default_rng(seed)
        words = generator.choice(list(WORDS), 60).tolist()
        waveform, _ = performance(words, [0.05] * 61, generator)
        segmentation = Segmentation(longest=2.4, overlap=overlap)
        found = Transcriber(transcriber.recogniser, segmentation=segmentation).transcribe(waveform, RATE)
        assert all(before.end <= after.start for before, after in pairwise(found.segments))
        assert all(before.start <= after.start for before, after in pairwise(found.words))
        wrong[overlap] += found.text.split() != words
    assert wrong[0.0] > wrong[0.6] == 0


def test_speech_is_transcribed_while_it_is_spoken(transcriber: Transcriber) -> None:
    """Partial texts grow towards the final texts, which are those of the whole recording."""
    waveform, _ = song(4)
    live, finals, partials = transcriber.live(16_000), list[Segment](), list[str]()
    for block in np.array_split(resampled(torch.from_numpy(waveform), RATE, 16_000).numpy(), 60):
        update = live.feed(block)
        finals += update.final
        partials.append(update.partial)
    update = live.end()
    finals += update.final
    assert update.partial == ""
    assert [each.text for each in finals] == [each.text for each in transcriber.transcribe(waveform, RATE).segments]
    beginnings = [" ".join(finals[-1].text.split()[:count]) for count in range(1, 7)]
    assert set(partials) & set(beginnings)
    assert "" in partials


@pytest.mark.parametrize("name", ["lstm", "conformer"])
def test_a_streaming_model_hears_live_audio_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each partial text equals that of the whole with a chunk mask, as early as the stated latency says, and its cost
    does not grow with the segment. The final text is that of the recording."""
    generator = np.random.default_rng(2)
    words = generator.choice(list(WORDS), 12).tolist()
    waveform, _ = performance(words, [*generator.uniform(0.05, 0.4, 12), 0.2], generator)
    config = model_config(name=name, preset="tiny", chunk=ChunkConfig(seconds=0.16, left=2))
    features = LogMel(FeatureConfig(normalise="global"), RATE)
    (bands,) = features.energies([torch.from_numpy(waveform)])
    features.statistics = {"mean": bands.mean(0), "deviation": bands.std(0)}
    recogniser = Recogniser.create(config, features, CharacterTokenizer(" AB"), seed=4)
    transcriber, network = Transcriber(recogniser), recogniser.model
    assert isinstance(network, StreamingNetwork)
    assert network.chunks is not None
    listened = recogniser.waveform(waveform, RATE)
    network.output.bias.data -= recogniser.listen([listened]).log_probs.mean((0, 1))  # so that it hears all letters
    heard = recogniser.listen([listened])
    whole = heard.log_probs
    ends = range(0, whole.shape[1], network.chunks.frames)
    texts = [recogniser.texts(heard._replace(lengths=torch.tensor([end])))[0].split() for end in ends]
    assert len(set(map(tuple, texts))) > 10
    expected = transcriber.transcribe(waveform, RATE)

    frames = Counter[str]()

    def count(name: str) -> None:
        compute = getattr(network, name)

        def counted(*args: torch.Tensor) -> object:
            frames[name] += args[0].shape[1]
            return compute(*args)

        monkeypatch.setattr(network, name, counted)

    count("encode")
    count("encode_chunk")
    live, late = transcriber.live(RATE), (recogniser.latency or 0.0) - 0.16
    *blocks, last = np.split(waveform, range(RATE // 10, len(waveform), RATE // 10))
    for number, block in enumerate(blocks, 1):
        before = frames["encode_chunk"]
        update = live.feed(block)
        chunks = math.floor((number / 10 - late) / 0.16 + 1e-6)
        assert number < 10 or update.partial.split() == texts[chunks]
        assert number < 10 or frames["encode_chunk"] - before <= network.window()[0]
    assert frames["encode"] == 0
    assert (*live.feed(last).final, *live.end().final) == expected.segments


def test_confidence_falls_where_words_are_unclear(transcriber: Transcriber) -> None:
    """Two simultaneous words have lower confidence than one."""
    generator = np.random.default_rng(1)
    clear, _ = performance(["DO", "MI"], [0.3, 0.2, 0.3], generator)
    mixed = 0.5 * clear + 0.5 * np.roll(clear, 1500)
    (first,), found = transcriber.transcribe(clear, RATE).segments, transcriber.transcribe(mixed, RATE)
    assert first.confidence is not None and first.confidence > 0.9
    assert min([word.confidence for word in found.words], default=0.0) < first.confidence


@pytest.mark.parametrize(
    ("waveform", "rate", "message"),
    [
        (np.zeros(0, np.float32), RATE, r"shape \[0\]"),
        (np.zeros((1, 2, 9), np.float32), RATE, r"shape \[1, 2, 9\]"),
        (np.full(900, np.nan, np.float32), RATE, "not finite"),
        (np.zeros(900, np.float32), 0, "rate of 0 Hz"),
    ],
)
def test_audio_that_cannot_be_transcribed_is_refused(
    transcriber: Transcriber, waveform: np.ndarray, rate: int, message: str
) -> None:
    """It is a DataError with the numbers."""
    with pytest.raises(DataError, match=message):
        transcriber.transcribe(waveform, rate)


def test_silence_has_no_words(transcriber: Transcriber) -> None:
    """Silence is not an error."""
    found = transcriber.transcribe(np.zeros(5 * RATE, np.float32), RATE)
    assert (found.text, found.words, found.segments, found.seconds) == ("", (), (), 5.0)


@pytest.mark.parametrize(
    "decoder", [AttentionConfig(kind="attention", width=16, heads=2), TransducerConfig(kind="transducer", width=16)]
)
def test_texts_of_decoders_have_times_by_ctc(decoder: AttentionConfig | TransducerConfig) -> None:
    """With random weights, the decoder's words have times in order, inside their segment."""
    config = model_config(preset="tiny", subsampling=2, decoder=decoder)
    recogniser = Recogniser.create(config, LogMel(FeatureConfig(), RATE), CharacterTokenizer(" AB"), seed=3)
    waveform, _ = song(2)
    found = Transcriber(recogniser).transcribe(waveform, RATE)
    assert found.segments
    for segment in found.segments:
        if segment.words is not None:
            assert " ".join(word.text for word in segment.words) == segment.text
            times = [time for word in segment.words for time in (word.start, word.end)]
            assert times == sorted(times)
            assert not times or segment.start <= times[0] <= times[-1] <= segment.end + 0.001


def test_tokens_begin_where_the_best_path_without_blanks_has_them() -> None:
    """Each path of six frames is tried."""
    generator = np.random.default_rng(1)
    for tokens in ([1, 2, 1], [2], [1, 2, 3, 1, 2, 3]):
        log_probs = np.log(generator.dirichlet(np.ones(4), 6)).astype(np.float32)

        def score(path: tuple[int, ...], tokens: list[int] = tokens, rows: np.ndarray = log_probs) -> float:
            return float(sum(rows[frame, tokens[place]] for frame, place in enumerate(path)))

        paths = [path for path in product(range(len(tokens)), repeat=6) if sorted({*path}) == list(range(len(tokens)))]
        best = max((path for path in paths if list(path) == sorted(path)), key=score)
        assert beginnings(log_probs, tokens).tolist() == [best.index(place) for place in range(len(tokens))]


def test_an_alignment_is_the_best_of_all_paths() -> None:
    """Each path of five frames is tried."""
    generator = np.random.default_rng(1)
    for tokens in ([1, 2], [1, 1], [2], []):
        log_probs = np.log(generator.dirichlet(np.ones(3), 5)).astype(np.float32)
        best = max(
            (
                (sum(log_probs[frame, token] for frame, token in enumerate(path)), path)
                for path in product(range(3), repeat=5)
                if [each.token for each in emissions_of(np.asarray(path))] == tokens
            ),
        )[1]
        expected = emissions_of(np.asarray(best))
        found = aligned(log_probs, tokens)
        assert found is not None
        assert [(each.token, each.first, each.last) for each in found] == [
            (each.token, each.first, each.last) for each in expected
        ]
    assert aligned(log_probs[:2], [1, 1]) is None
    assert aligned(log_probs[:1], [1, 2]) is None
