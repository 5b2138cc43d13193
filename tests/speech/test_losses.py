"""The CTC loss against the sum over all paths, and the check that utterances are long enough."""

import itertools
import math

import numpy as np
import pytest
import torch

from benchmarks.speech_writer import SpeechWriter
from starling.errors import DataError
from starling.speech.augmentation import AugmentConfig
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import build_model, model_config
from starling.speech.store import SpeechSet
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.workload import Batch, load_batch, speech_loss
from starling.speech.usable import frames_needed, too_short_for_ctc, transcripts


class Fixed(torch.nn.Module):
    """A model whose log-probabilities are its input."""

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return features.log_softmax(2), lengths


def path_sum(log_probs: torch.Tensor, tokens: list[int]) -> float:
    """Negative log of the summed probability of every path that collapses to `tokens`."""
    num_frames, vocab_size = log_probs.shape
    total = 0.0
    for path in itertools.product(range(vocab_size), repeat=num_frames):
        if [token for token, _ in itertools.groupby(path) if token] == tokens:
            total += math.exp(sum(float(log_probs[frame, token]) for frame, token in enumerate(path)))
    return -math.log(total)


def batch_of(features: torch.Tensor, lengths: list[int], tokens: list[list[int]]) -> Batch:
    return Batch(
        features=features,
        lengths=torch.tensor(lengths),
        tokens=torch.tensor([token for each in tokens for token in each]),
        token_lengths=torch.tensor([len(each) for each in tokens]),
        seconds=1.0,
        ids=tuple(str(row) for row in range(len(lengths))),
    )


def test_the_loss_is_the_sum_over_all_paths_per_token():
    """Losses are summed over the batch and divided by its tokens, with blank 0 and lengths respected."""
    features = torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(0))
    lengths, tokens = [6, 4, 5], [[1, 2, 2], [2], [1, 2]]
    log_probs = features.log_softmax(2)
    expected = sum(path_sum(log_probs[row, : lengths[row]], tokens[row]) for row in range(3)) / 6
    assert float(speech_loss(Fixed(), batch_of(features, lengths, tokens), model_config())) == pytest.approx(
        expected, rel=1e-5
    )


def test_an_impossible_utterance_gives_infinity():
    """Nothing is silently set to zero: the loss shows too few frames."""
    loss = speech_loss(Fixed(), batch_of(torch.zeros(1, 2, 3), [2], [[1, 1]]), model_config())
    assert math.isinf(float(loss))


@pytest.mark.parametrize(("tokens", "needed"), [([1], 1), ([1, 2, 3], 3), ([1, 1, 1], 5), ([1, 2, 2, 1], 5)])
def test_equal_neighbours_need_a_blank_between_them(tokens, needed):
    """The number of frames needed is exactly where the loss turns finite."""
    assert frames_needed(tokens) == needed
    for frames in (needed - 1, needed):
        loss = speech_loss(Fixed(), batch_of(torch.zeros(1, max(frames, 1), 4), [frames], [tokens]), model_config())
        assert math.isinf(float(loss)) == (frames < needed)


@pytest.fixture
def pair(tmp_path) -> SpeechSet:
    """An utterance with plenty of frames, and one that has exactly as many as CTC needs at speed 1."""
    with SpeechWriter(tmp_path / "pair", "pair", 8000) as writer:
        writer.write("long", "s", "ABBA", np.zeros(8000, np.float32))
        writer.write("tight", "s", "ABBA", np.zeros(5 * 4 * 80 - 3 * 80, np.float32))  # 17 frames, 5 after subsampling
        writer.finish(digest="pair")
    return SpeechSet.open(tmp_path / "pair")


def test_utterances_too_short_for_ctc_are_found_before_training(pair):
    """An utterance that fits at speed 1.0 need not fit at 1.1."""
    log_mel, model, tokens = LogMel(FeatureConfig(), 8000), model_config(preset="tiny"), CharacterTokenizer("AB")
    assert too_short_for_ctc(transcripts(pair), tokens, model, log_mel) == []
    found = too_short_for_ctc(transcripts(pair), tokens, model, log_mel, AugmentConfig())
    assert found == [("tight", 4, 5, 1)]


def test_the_check_predicts_the_frames_of_real_batches(pair):
    """The frames it counts are those that speed perturbation and the network actually leave."""
    log_mel, config, tokens = LogMel(FeatureConfig(), 8000), model_config(preset="tiny"), CharacterTokenizer("AB")
    fast = AugmentConfig(speed=(1.1,), spec_augment=None)
    batch = load_batch(pair, np.array([1]), log_mel, fast, tokens, seed=0)
    _, lengths = build_model(config, 40, 3, seed=0)(batch.features, batch.lengths)
    assert too_short_for_ctc(transcripts(pair), tokens, config, log_mel, fast) == [("tight", int(lengths), 5, 1)]


def test_characters_outside_the_alphabet_are_found_before_training(pair):
    """The check encodes every transcript, so no run starts that would stop in the middle."""
    with pytest.raises(DataError, match=r"'long' contains the character 'B'"):
        too_short_for_ctc(transcripts(pair), CharacterTokenizer("A"), model_config(), LogMel(FeatureConfig(), 8000))
