"""Streaming: chunk by chunk gives the same as the whole with a chunk mask, and a single chunk the same as full
context."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from starling.errors import ConfigError
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import Architecture, build_model, model_config
from starling.speech.models.architectures import ChunkConfig, Chunks
from starling.speech.models.network import StreamingNetwork
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import CharacterTokenizer
from starling.speech.transcribing.transcriber import Stream, StreamingLogMel
from tests.speech.tones import RATE, sing

CONFIGS = [
    model_config(name=name, preset="tiny", subsampling=subsampling, chunk=ChunkConfig(seconds=0.16, left=2))
    for name, rates in (("lstm", (2, 4)), ("transformer", (1, 4)), ("conformer", (1, 2)))
    for subsampling in rates
]


def network_of(config: Architecture, chunks: Chunks | None = None) -> StreamingNetwork:
    network = build_model(config, 10, 7, seed=1).eval()
    assert isinstance(network, StreamingNetwork)
    if chunks is not None:
        network.chunks = chunks
    return network


def features_of(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, length, 10, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def streamed(network: StreamingNetwork, features: torch.Tensor, block: int) -> torch.Tensor:
    """The log-probabilities of features that come in blocks of the given sizes."""
    state = network.initial_state(len(features))
    outputs = []
    for begin in range(0, features.shape[1], block):
        log_probs, state = network.step(features[:, begin : begin + block], state)
        outputs.append(log_probs)
    outputs.append(network.step(features[:, :0], state, is_last=True)[0])
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.subsampling}")
def test_chunk_by_chunk_is_the_whole_with_a_mask(config: Architecture) -> None:
    """They agree to 1e-5, for every size of chunk and context, of blocks, and of utterances that end inside a chunk."""
    for chunks in (Chunks(1, 5), Chunks(2, 1), Chunks(3, 2), Chunks(11, 3), Chunks(40, 1)):
        network = network_of(config, chunks)
        for length, block in ((1, 1), (37, 5), (64, 1000)):
            features = features_of(length, rows=2)
            with torch.inference_mode():
                whole, lengths = network(features, torch.tensor([length, length]))
            ours = streamed(network, features, block)
            assert ours.shape[1] == int(lengths[0]) == config.encoder_frames(length)
            torch.testing.assert_close(ours, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.subsampling}")
def test_one_chunk_is_full_context(config: Architecture) -> None:
    """With the same weights, utterances in one chunk, in full context, and in the model without chunks give the
    same."""
    features, lengths = features_of(90, rows=2), torch.tensor([90, 61])
    plain = build_model(config.model_copy(update={"chunk": None}), 10, 7, seed=1).eval()
    chunked, full = network_of(config, Chunks(1000, 1)), network_of(config, Chunks(2, 1))
    full.full_context = True
    with torch.inference_mode():
        expected, ends = plain(features, lengths)
        for network in (chunked, full):
            ours, _ = network(features, lengths)
            for row, end in enumerate(ends.tolist()):
                torch.testing.assert_close(ours[row, :end], expected[row, :end], atol=1e-5, rtol=0)
        torch.testing.assert_close(streamed(chunked, features, 90)[0], expected[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.name}-{config.subsampling}")
def test_the_stated_latency_is_the_true_one(config: Architecture) -> None:
    """The outputs of the first chunk hear a sound up to that time, and nothing later."""
    shift, length = 0.010, 0.025
    latency = config.latency(shift, length)
    assert latency is not None
    network = network_of(config)
    assert network.chunks is not None
    last = round((latency - (shift + length) / 2) / shift)  # the last feature frame whose window ends by then
    features = features_of(200)
    moved = []
    for frame in (last, last + 1):
        changed = features.clone()
        changed[:, frame] += 10.0
        first = slice(0, network.chunks.frames)
        with torch.inference_mode():
            before, after = (network(each, torch.tensor([200]))[0][:, first] for each in (features, changed))
        moved.append(not torch.equal(before, after))
    assert moved == [True, False]
    state = network.initial_state()
    assert network.step(features[:, :last], state)[0].shape[1] == 0
    assert network.step(features[:, : last + 1], state)[0].shape[1] == network.chunks.frames


def test_padding_never_changes_an_utterance_in_chunks() -> None:
    """The utterance is beside a longer one, with random values in the padding."""
    for config in CONFIGS:
        network = network_of(config)
        padded = torch.full((2, 120, 10), 1e3)
        padded[0], padded[1, :50] = features_of(120)[0], features_of(50, seed=1)[0]
        with torch.inference_mode():
            together, lengths = network(padded, torch.tensor([120, 50]))
            alone, _ = network(padded[1:, :50], torch.tensor([50]))
        torch.testing.assert_close(together[1, : int(lengths[1])], alone[0], atol=1e-5, rtol=0)


def test_training_draws_chunks_and_full_context() -> None:
    """They come from dropout's generator, so that a learner's seed determines them; gradients are finite."""
    config = model_config(name="conformer", preset="tiny", chunk=ChunkConfig(seconds=0.16, left=2))
    network = network_of(config).train()
    torch.manual_seed(0)
    drawn = [network.pass_chunks() for _ in range(200)]
    torch.manual_seed(0)
    assert [network.pass_chunks() for _ in range(200)] == drawn
    assert 70 < sum(each is None for each in drawn) < 130
    sizes = {each.frames for each in drawn if each is not None}
    assert sizes == set(range(1, 9))  # twice the four frames of 0.16 s
    assert all(each.left * each.frames >= 8 for each in drawn if each is not None)
    for _ in range(4):
        log_probs, _ = network(features_of(60, rows=2), torch.tensor([60, 1]))
        log_probs[:, 0].mean().backward()
    assert all(bool(each.grad.isfinite().all()) for each in network.parameters() if each.grad is not None)


@pytest.mark.parametrize("normalise", ["global", "none"])
@pytest.mark.parametrize(("rate", "length", "shift"), [(8000, 0.025, 0.010), (16000, 0.025, 0.010), (8000, 0.02, 0.02)])
def test_blocks_give_the_frames_of_the_whole(normalise: str, rate: int, length: float, shift: float) -> None:
    """This holds for blocks and recordings of any length."""
    config = FeatureConfig(num_mels=20, normalise=normalise, frame_length=length, frame_shift=shift)
    features = LogMel(config, rate)
    features.statistics = {"mean": torch.randn(20), "deviation": torch.rand(20) + 0.5}
    generator = torch.Generator().manual_seed(0)
    for size in (round(length * rate), 1234, 8077):
        waveform = torch.randn(size, generator=generator) * 0.1
        whole = features(waveform)
        for block in (37, 400, size) if size < 1500 else (1333, size):
            stream = StreamingLogMel(features)
            parts = [stream.accept(waveform[begin : begin + block]) for begin in range(0, size, block)]
            torch.testing.assert_close(torch.cat([*parts, stream.finish()]), whole, atol=1e-4, rtol=0)


def test_a_recording_shorter_than_a_window_has_no_frames() -> None:
    """An empty recording has none, either."""
    stream = StreamingLogMel(LogMel(FeatureConfig(normalise="none"), 8000))
    assert stream.accept(torch.zeros(10)).shape == (0, 40)
    assert stream.finish().shape == (0, 40)


def recogniser_of(config: Architecture, normalise: str = "none") -> Recogniser:
    features = LogMel(FeatureConfig(normalise=normalise, num_mels=10), RATE)
    return Recogniser.create(config, features, CharacterTokenizer("ADEFIMOR "), seed=3)


@pytest.mark.parametrize("name", ["lstm", "conformer"])
def test_a_stream_ends_with_the_text_of_the_whole(name: str) -> None:
    """Tokens of consecutive steps are joined as within one step; partial texts grow."""
    recogniser = recogniser_of(model_config(name=name, preset="tiny", chunk=ChunkConfig(seconds=0.08, left=2)))
    waveform = torch.from_numpy(sing(["DO", "RE", "MI"], np.random.default_rng(0)))
    stream = Stream(recogniser)
    texts = [stream.accept(block) for block in waveform.split(700)]
    texts.append(stream.finish())
    assert texts[-1] == recogniser.transcribe(waveform, RATE)
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    with pytest.raises(ValueError, match="the stream has ended"):
        stream.accept(waveform)


def test_what_needs_the_whole_recording_cannot_stream() -> None:
    """The error names the key to set."""
    with pytest.raises(ConfigError, match=r"model\.chunk"):
        Stream(recogniser_of(model_config(name="lstm", preset="tiny")))
    chunk = ChunkConfig()
    with pytest.raises(ConfigError, match="normalise"):
        Stream(recogniser_of(model_config(name="lstm", preset="tiny", chunk=chunk), normalise="utterance"))
    for sizes in (
        {"name": "blstm"},
        {"name": "conformer", "positions": "relative"},
        {"name": "transformer", "span": 3},
    ):
        with pytest.raises(ValueError, match="chunk"):
            model_config(**{"chunk": chunk, **sizes})
