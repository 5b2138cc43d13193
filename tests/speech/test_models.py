"""Models: padding never shows, sizes are those of the presets, seeds decide about weights."""

import pytest
import torch
from pydantic import ValidationError

from starling.speech.models import MODELS, PRESETS, ModelConfig, build_model, count_parameters
from starling.speech.models.blstm import BidirectionalLayer, reversal

SMALL_CONFIGS = [
    ModelConfig(name=name, preset="tiny", layers=2, subsampling=subsampling, bottleneck=bottleneck)
    for name in MODELS
    for subsampling, bottleneck in ((1, 0), (2, 8), (4, 0))
]


def utterances(lengths: list[int], num_features: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, num_features, generator=generator) for length in lengths]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=lambda config: f"{config.name}-{config.subsampling}")
def test_padding_never_changes_an_utterance(config):
    """Alone, or beside a longer one with rubbish in the padding: the same output to 1e-5."""
    model = build_model(config, 40, 20, seed=1).eval()
    matrices = utterances([37, 120, 1, 64, 3])
    lengths = torch.tensor([len(matrix) for matrix in matrices])
    padded = torch.full((5, 150, 40), 1e3)
    for row, matrix in enumerate(matrices):
        padded[row, : len(matrix)] = matrix
    together, together_lengths = model(padded, lengths)
    for row, matrix in enumerate(matrices):
        alone, alone_lengths = model(matrix[None], lengths[row : row + 1])
        assert int(alone_lengths) == int(together_lengths[row]) == config.encoder_frames(len(matrix))
        torch.testing.assert_close(together[row, : int(alone_lengths)], alone[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=lambda config: f"{config.name}-{config.subsampling}")
def test_padding_never_changes_a_gradient(config):
    """The gradient of one utterance is the same to 1e-5 whatever stands in its padding, and never NaN."""
    gradients = []
    for padding in (0.0, 1e3):
        model = build_model(config, 40, 20, seed=1)
        features = torch.full((2, 90, 40), padding)
        for row, matrix in enumerate(utterances([50, 71])):
            features[row, : len(matrix)] = matrix
        log_probs, lengths = model(features, torch.tensor([50, 71]))
        log_probs[0, : int(lengths[0]), 3].mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=0)
    assert gradients[0].abs().max() > 0


def test_the_bidirectional_layer_is_that_of_torch_on_packed_sequences():
    """With the same weights, `nn.LSTM(bidirectional=True)` on packed sequences gives the same frames."""
    layer = BidirectionalLayer(12, 16)
    oracle = torch.nn.LSTM(12, 16, batch_first=True, bidirectional=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(oracle, f"{name}_l0").data.copy_(getattr(layer.onward, f"{name}_l0"))
        getattr(oracle, f"{name}_l0_reverse").data.copy_(getattr(layer.backward_in_time, f"{name}_l0"))
    lengths = torch.tensor([9, 4, 1])
    frames = torch.randn(3, 9, 12, generator=torch.Generator().manual_seed(0))
    packed = torch.nn.utils.rnn.pack_padded_sequence(frames, lengths, batch_first=True)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(oracle(packed)[0], batch_first=True)
    ours = layer(frames, reversal(lengths, 9))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(ours[row, :length], expected[row, :length], atol=1e-6, rtol=0)


def test_the_unidirectional_model_hears_no_later_than_its_convolutions():
    """Changing the end of an utterance leaves the outputs of its beginning alone."""
    model = build_model(ModelConfig(name="lstm", preset="tiny"), 40, 20, seed=1).eval()
    features = utterances([100])[0][None]
    changed = features.clone()
    changed[:, 60:] += 1
    outputs, other = (model(each, torch.tensor([100]))[0] for each in (features, changed))
    torch.testing.assert_close(outputs[:, :13], other[:, :13], atol=1e-6, rtol=0)
    assert not torch.allclose(outputs[:, 15:], other[:, 15:], atol=1e-6)


def test_outputs_are_log_probabilities():
    """Every frame's probabilities sum to one, in float32 even under autocast."""
    model = build_model(ModelConfig(preset="tiny"), 40, 20, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = model(utterances([30])[0][None], torch.tensor([30]))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(2), torch.ones(1, 8))


@pytest.mark.parametrize("name", MODELS)
def test_seeds_decide_about_weights(name):
    """The same seed gives the same weights, another seed others, and the global generator stands still."""
    before = torch.get_rng_state()
    config = ModelConfig(name=name, preset="tiny")
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in build_model(config, 40, 20, seed).parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_presets_have_their_published_sizes():
    """`ibm` is 6 x 512 in each direction with a bottleneck of 256; `small` trains quickly on a CPU."""
    ibm = PRESETS["ibm"]
    assert (ibm.layers, ibm.hidden, ibm.bottleneck) == (6, 512, 256)
    model = build_model(ModelConfig(preset="ibm", layers=1), 80, 32, seed=0)
    assert sum(parameter.numel() for parameter in model.bottleneck.parameters()) == 1024 * 256 + 256
    for name in MODELS:
        assert 0.2e6 < count_parameters(build_model(ModelConfig(name=name), 40, 20, seed=0)) < 1.5e6
    assert all(not isinstance(module, torch.nn.BatchNorm1d) for module in model.modules())


def test_a_size_replaces_that_of_the_preset():
    """Single sizes override the preset, the others stay; impossible ones and unknown keys are refused."""
    config = ModelConfig(preset="tiny", hidden=48, dropout=0.5)
    assert (config.shape.hidden, config.shape.dropout, config.shape.layers) == (48, 0.5, PRESETS["tiny"].layers)
    for wrong in ({"subsampling": 3}, {"hidden": 0}, {"preset": "huge"}, {"heads": 4}):
        with pytest.raises(ValidationError):
            ModelConfig.model_validate(wrong)


@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_encoder_frames_are_known_without_computing_them(subsampling):
    """`encoder_frames` and the network agree for every length, since CTC feasibility relies on it."""
    config = ModelConfig(preset="tiny", subsampling=subsampling)
    model = build_model(config, 40, 5, seed=0)
    for num_frames in range(1, 20):
        log_probs, lengths = model(torch.zeros(1, num_frames, 40), torch.tensor([num_frames]))
        assert log_probs.shape[1] == int(lengths) == config.encoder_frames(num_frames)
