"""Loading batches: the same bits everywhere, from an explicit seed, and nothing unusable passes."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from tones import song_set

from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.batches import Batch, load_batch
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.shard_writer import SpeechWriter
from starling.speech.store import SpeechSet
from starling.speech.tokens import CharacterTokenizer, Tokenizer

INDICES = np.array([3, 0, 7, 5])
EVERYTHING = AugmentConfig(noise_snr=(5, 30), noise_probability=0.5)


@pytest.fixture(scope="module")
def songs(tmp_path_factory) -> SpeechSet:
    return song_set(tmp_path_factory.mktemp("songs") / "train", 12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return CharacterTokenizer(" ADEFIMOR")


def equal(first: Batch, second: Batch) -> bool:
    same = all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("features", "feature_lengths", "tokens", "token_lengths")
    )
    return same and (first.seconds, first.ids) == (second.seconds, second.ids)


def test_a_batch_holds_its_utterances_padded_with_zeros(songs, tokenizer):
    """Without augmentation each row is the utterance's own features, then zeros, and its own tokens."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    batch = load_batch(songs, INDICES, log_mel, None, tokenizer, seed=1)
    tokens = batch.tokens.split(batch.token_lengths.tolist())
    for row, index in enumerate(INDICES.tolist()):
        length = batch.feature_lengths[row]
        assert torch.equal(batch.features[row, :length], log_mel(torch.from_numpy(songs.audio(index))))
        assert not batch.features[row, length:].any()
        assert tokenizer.decode(tokens[row].tolist()) == songs.text(index)
    assert batch.ids == ("song-3", "song-0", "song-7", "song-5")
    assert batch.num_examples == 4
    assert batch.num_frames == int(batch.feature_lengths.sum())
    assert batch.seconds == pytest.approx(sum(len(songs.audio(index)) for index in INDICES) / 8000)


def test_seeds_decide_about_everything_random(songs, tokenizer):
    """The same seed gives the same bits, another seed others, and the global generators stand still."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (load_batch(songs, INDICES, log_mel, EVERYTHING, tokenizer, seed) for seed in (1, 1, 2))
    assert equal(first, again)
    assert not equal(first, other)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])


def _load_elsewhere(songs: SpeechSet, tokenizer: Tokenizer, threads: int, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(threads)
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    batch = load_batch(songs, INDICES, log_mel, EVERYTHING, tokenizer, seed=5)
    results.put((batch.features.numpy(), batch.tokens.numpy()))


@pytest.mark.parametrize("threads", [1, 2])
def test_another_process_loads_the_same_bits(songs, tokenizer, threads):
    """A fresh process with its own generators and number of threads makes the same batch."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_load_elsewhere, args=(songs, tokenizer, threads, results))
    process.start()
    features, tokens = results.get()
    process.join()
    here = load_batch(songs, INDICES, LogMel(FeatureConfig(), songs.sampling_rate), EVERYTHING, tokenizer, seed=5)
    assert np.array_equal(features, here.features.numpy())
    assert np.array_equal(tokens, here.tokens.numpy())


def test_a_batch_moves_to_a_device_whole(songs, tokenizer):
    """All tensors move, everything else stays."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    batch = load_batch(songs, INDICES, log_mel, None, tokenizer, seed=1).to("meta")
    tensors = (batch.features, batch.feature_lengths, batch.tokens, batch.token_lengths)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.num_examples == 4


def test_an_utterance_that_cannot_be_used_is_named(tmp_path, songs):
    """A transcript outside the alphabet, or audio under one window, is a DataError with the id."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    with pytest.raises(DataError, match=r"'song-3' holds the character"):
        load_batch(songs, INDICES, log_mel, None, CharacterTokenizer("XYZ"), seed=1)
    with SpeechWriter(tmp_path / "short", "short", 8000) as writer:
        writer.write("click", "nobody", "DO", np.zeros(100, np.float32))
        writer.finish(digest="short")
    with pytest.raises(DataError, match=r"'click' has 100 samples"):
        load_batch(SpeechSet.open(tmp_path / "short"), np.array([0]), log_mel, None, CharacterTokenizer("DO"), seed=1)
