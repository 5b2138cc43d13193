"""Loading batches: the same bits everywhere, from an explicit seed, and nothing unusable passes."""

import multiprocessing
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tones import song_set

from benchmarks.speech_writer import SpeechWriter
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import build_model, model_config
from starling.speech.store import SpeechSet
from starling.speech.tokens import CharacterTokenizer, Tokenizer
from starling.speech.training.workload import Batch, load_batch, speech_loss

INDICES = np.array([3, 0, 7, 5])
EVERYTHING = AugmentConfig(
    tempo=(0.9, 1.1),
    vocal_tract=(0.9, 1.1),
    reverberation=(0.05, 0.3),
    babble_snr=(5, 30),
    noise_snr=(5, 30),
    noise_colour="random",
    gain_db=(-3, 3),
)


@pytest.fixture(scope="module")
def songs(tmp_path_factory) -> SpeechSet:
    return song_set(tmp_path_factory.mktemp("songs") / "train", 12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return CharacterTokenizer(" ADEFIMOR")


def equal(first: Batch, second: Batch) -> bool:
    same = all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("features", "lengths", "tokens", "token_lengths")
    )
    return same and (first.seconds, first.ids) == (second.seconds, second.ids)


def test_a_batch_holds_its_utterances_padded_with_zeros(songs, tokenizer):
    """Without augmentation each row is the utterance's own features, then zeros, and its own tokens."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    batch = load_batch(songs, INDICES, log_mel, None, tokenizer, seed=1)
    tokens = batch.tokens.split(batch.token_lengths.tolist())
    for row, index in enumerate(INDICES.tolist()):
        length = batch.lengths[row]
        assert torch.equal(batch.features[row, :length], log_mel(torch.from_numpy(songs.audio(index))))
        assert not batch.features[row, length:].any()
        assert tokenizer.decode(tokens[row].tolist()) == songs.text(index)
    assert batch.ids == ("song-3", "song-0", "song-7", "song-5")
    assert batch.num_examples == 4
    assert batch.num_frames == int(batch.lengths.sum())
    assert batch.seconds == pytest.approx(sum(len(songs.audio(index)) for index in INDICES) / 8000)


def test_seeds_determine_all_randomness(songs, tokenizer):
    """The same seed gives the same bits, a different seed different ones, and the global generators do not change."""
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


@pytest.mark.wide
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.wide)])
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


def test_a_whole_batch_moves_to_a_device(songs, tokenizer):
    """All tensors move, and everything else is unchanged."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    batch = load_batch(songs, INDICES, log_mel, None, tokenizer, seed=1).to("meta")
    tensors = (batch.features, batch.lengths, batch.tokens, batch.token_lengths)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.num_examples == 4


def test_an_utterance_that_cannot_be_used_is_named(tmp_path, songs):
    """A transcript outside the alphabet, or audio under one window, is a DataError with the id."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    with pytest.raises(DataError, match=r"'song-3' contains the character"):
        load_batch(songs, INDICES, log_mel, None, CharacterTokenizer("XYZ"), seed=1)
    with SpeechWriter(tmp_path / "short", "short", 8000) as writer:
        writer.write("click", "nobody", "DO", np.zeros(100, np.float32))
        writer.finish(digest="short")
    with pytest.raises(DataError, match=r"'click' has 100 samples"):
        load_batch(SpeechSet.open(tmp_path / "short"), np.array([0]), log_mel, None, CharacterTokenizer("DO"), seed=1)


def damaged(folder: Path, count: int, *victims: int) -> SpeechSet:
    """A set with zeros in the middle of the FLAC of some utterances."""
    whole = song_set(folder, count)
    shard = whole.folder / "shar" / whole.summary.shards[0].file
    content = bytearray(shard.read_bytes())
    for victim in victims:
        place = whole._range(victim)
        content[place.offset : place.offset + place.size // 2] = bytes(place.size // 2)
    shard.write_bytes(content)
    return SpeechSet.open(folder)


def test_a_damaged_utterance_is_left_out_named_and_changes_no_other(tmp_path, songs, tokenizer):
    """With `on_bad` skip, the others have the same bits as beside the intact file, including augmentation."""
    log_mel = LogMel(FeatureConfig(), songs.sampling_rate)
    alone = EVERYTHING.model_copy(update={"babble_snr": None})  # babble is made of the others
    whole = load_batch(songs, INDICES, log_mel, alone, tokenizer, seed=3)
    broken = damaged(tmp_path / "songs", 12, 0)
    batch = load_batch(broken, INDICES, log_mel, alone, tokenizer, seed=3, on_bad="skip")
    assert batch.ids == ("song-3", "song-7", "song-5")
    ((name, reason),) = batch.skipped
    assert name == "song-0" and "the audio of song-0 is damaged" in reason
    assert batch.num_examples == 3 and batch.seconds == pytest.approx(whole.seconds - songs.durations[0])
    for row, other in enumerate([0, 2, 3]):
        length = batch.lengths[row]
        assert length == whole.lengths[other]
        assert torch.equal(batch.features[row, :length], whole.features[other, :length])
    with pytest.raises(DataError, match="the audio of song-0 is damaged"):
        load_batch(broken, INDICES, log_mel, EVERYTHING, tokenizer, seed=3)


def test_a_damaged_utterance_reads_as_its_own_error_beside_the_others(tmp_path):
    """`read` gives the samples of all others; `audio` of the damaged one raises what stands in its place."""
    broken = damaged(tmp_path / "songs", 4, 1)
    first, second, third = (each.samples for each in broken.read([0, 1, 2]))
    assert isinstance(second, DataError)
    assert np.array_equal(first, broken.audio(0)) and np.array_equal(third, broken.audio(2))
    with pytest.raises(DataError, match="the audio of song-1 is damaged"):
        broken.audio(1)


@pytest.mark.parametrize("name", ["blstm", "transformer", "deep-speech"])
def test_a_batch_with_nothing_left_has_a_loss_of_zero_and_gradients_of_zero(tmp_path, tokenizer, name):
    """Every parameter has a gradient, exactly 0, as summing gradients over learners requires."""
    broken = damaged(tmp_path / "songs", 3, 0, 1)
    log_mel = LogMel(FeatureConfig(), broken.sampling_rate)
    batch = load_batch(broken, np.array([0, 1]), log_mel, None, tokenizer, seed=1, on_bad="skip")
    assert [name for name, _ in batch.skipped] == ["song-0", "song-1"]
    assert (batch.num_examples, batch.num_frames, batch.seconds) == (0, 0, 0.0)
    model = build_model(model_config(name=name, preset="tiny"), log_mel.num_features, tokenizer.vocab_size, seed=1)
    loss = speech_loss(model, batch.to("cpu"), model_config())
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_statistics_can_leave_out_damaged_utterances(tmp_path):
    """`fit` names the utterance or leaves it out; it reports when none is left."""
    log_mel = LogMel(FeatureConfig(normalise="global"), 8000)
    broken = damaged(tmp_path / "songs", 6, 2)
    with pytest.raises(DataError, match="the audio of song-2 is damaged"):
        log_mel.fit(broken)
    log_mel.fit(broken, on_bad="skip")
    rows = [log_mel.energies([torch.from_numpy(broken.audio(index))])[0] for index in (0, 1, 3, 4, 5)]
    torch.testing.assert_close(log_mel.statistics["mean"], torch.cat(rows).mean(0), atol=1e-4, rtol=0)
    with pytest.raises(DataError, match="none of 2 utterances"):
        log_mel.fit(damaged(tmp_path / "all", 2, 0, 1), on_bad="skip")
