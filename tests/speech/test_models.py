"""Models: padding has no effect, sizes are those of the presets, and seeds determine weights."""

import math
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from starling import load_recipe
from starling.configuration import checked
from starling.errors import ConfigError
from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import (
    MODELS as ALL_MODELS,
)
from starling.speech.models import (
    Architecture,
    ModelConfig,
    build_model,
    conformer,
    count_parameters,
    model_config,
    zipformer,
)
from starling.speech.models.architectures import PublishedConfig
from starling.speech.models.recurrent import BidirectionalLayer, reversal
from starling.speech.models.transformer import Block, Sight, distances, phases, rotate, sinusoids
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import CharacterTokenizer
from tests.code_blocks import code_blocks

MODELS = {name: kind for name, kind in ALL_MODELS.items() if not issubclass(kind, PublishedConfig)}


class Holder(BaseModel):
    """An object with the section `model:`, like a recipe."""

    model: ModelConfig


SMALL_CONFIGS = [
    model_config(name=name, preset="tiny", subsampling=subsampling, **sizes)
    for name, variants in {
        "blstm": ({"layers": 2}, {"layers": 2, "bottleneck": 8}),
        "lstm": ({"layers": 2}, {"layers": 2, "bottleneck": 8}),
        "transformer": ({"positions": "rotary"}, {"positions": "sinusoidal"}),
        "conformer": ({"positions": "rotary"}, {"positions": "relative", "kernel": 5}),
        "zipformer": ({}, {"stack_rates": (1, 4, 3)}),
        "deep-speech": ({}, {"context": 3}),
    }.items()
    for subsampling, sizes in ((1, variants[0]), (2, variants[1]), (4, variants[0]))
] + [
    model_config(name="transformer", preset="tiny", subsampling=2, span=3),
    *(
        model_config(name="blstm", preset="tiny", subsampling=subsampling, conv2d_channels=3, layer_norm=True)
        for subsampling in (1, 2, 4)
    ),
]


def names(config: Architecture) -> str:
    return f"{config.name}-{config.subsampling}" + ("-conv2d" if getattr(config, "conv2d_channels", 0) else "")


def utterances(lengths: list[int], num_features: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, num_features, generator=generator) for length in lengths]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_padding_never_changes_an_utterance(config):
    """Alone, or beside a longer one with random values in the padding, its output is the same to 1e-5."""
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


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_padding_never_changes_a_gradient(config):
    """The gradients of a short utterance and of a single frame are the same to 1e-5 whatever is in the padding, and
    never NaN."""
    gradients = []
    for padding in (0.0, 1e3):
        model = build_model(config, 40, 20, seed=1)
        features = torch.full((3, 90, 40), padding)
        for row, matrix in enumerate(utterances([50, 71, 1])):
            features[row, : len(matrix)] = matrix
        log_probs, lengths = model(features, torch.tensor([50, 71, 1]))
        (log_probs[0, : int(lengths[0]), 3].mean() + log_probs[2, 0, 3]).backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=0)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize("normed", [False, True])
def test_the_bidirectional_layer_is_that_of_torch_on_packed_sequences(normed: bool) -> None:
    """With the same weights, `nn.LSTM(bidirectional=True)` on packed sequences gives the same frames, which may be
    normalised."""
    layer = BidirectionalLayer(12, 16, normed)
    oracle = torch.nn.LSTM(12, 16, batch_first=True, bidirectional=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(oracle, f"{name}_l0").data.copy_(getattr(layer.onward, f"{name}_l0"))
        getattr(oracle, f"{name}_l0_reverse").data.copy_(getattr(layer.backward_in_time, f"{name}_l0"))
    lengths = torch.tensor([9, 4, 1])
    frames = torch.randn(3, 9, 12, generator=torch.Generator().manual_seed(0))
    packed = torch.nn.utils.rnn.pack_padded_sequence(frames, lengths, batch_first=True)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(oracle(packed)[0], batch_first=True)
    if normed:
        expected = (expected - expected.mean(2, keepdim=True)) / (
            expected.var(2, correction=0, keepdim=True) + 1e-5
        ).sqrt()
    ours = layer(frames, reversal(lengths, 9))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(ours[row, :length], expected[row, :length], atol=1e-6, rtol=0)


def test_the_unidirectional_model_hears_no_later_than_its_convolutions():
    """Changing the end of an utterance does not change the outputs of its beginning."""
    model = build_model(model_config(name="lstm", preset="tiny"), 40, 20, seed=1).eval()
    features = utterances([100])[0][None]
    changed = features.clone()
    changed[:, 60:] += 1
    outputs, other = (model(each, torch.tensor([100]))[0] for each in (features, changed))
    torch.testing.assert_close(outputs[:, :13], other[:, :13], atol=1e-6, rtol=0)
    assert not torch.allclose(outputs[:, 15:], other[:, 15:], atol=1e-6)


def pre_norm_oracle(block: Block, width: int, heads: int, feed_forward: int) -> torch.nn.TransformerEncoderLayer:
    """torch's own pre-norm layer with the weights of `block`."""
    oracle = torch.nn.TransformerEncoderLayer(
        width, heads, feed_forward, dropout=0.0, batch_first=True, norm_first=True
    )
    ours = {
        "self_attn.in_proj_": block.attention.inputs,
        "self_attn.out_proj.": block.attention.outputs,
        "linear1.": block.widening,
        "linear2.": block.narrowing,
        "norm1.": block.attention_norm,
        "norm2.": block.feed_forward_norm,
    }
    oracle.load_state_dict(
        {f"{prefix}{kind}": getattr(layer, kind) for prefix, layer in ours.items() for kind in ("weight", "bias")}
    )
    return oracle


def test_a_block_without_positions_is_the_pre_norm_layer_of_torch():
    """With the same weights, `nn.TransformerEncoderLayer(norm_first=True)` gives the same frames and gradients."""
    torch.manual_seed(0)
    block = Block(model_config(name="transformer", width=24, heads=3, feed_forward=40, dropout=0.0))
    for norm in (block.attention_norm, block.feed_forward_norm):
        torch.nn.init.normal_(norm.weight)
    oracle = pre_norm_oracle(block, 24, 3, 40)
    frames, visible = torch.randn(3, 9, 24), torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    ours = block(frames, Sight(visible[:, :, None], visible[:, None, None], None))[0][visible]
    theirs = oracle(frames, src_key_padding_mask=~visible)[visible]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(block.attention.inputs.weight.grad, oracle.self_attn.in_proj_weight.grad)


def test_sinusoids_are_those_of_the_paper():
    """PE(p, 2i) and PE(p, 2i + 1) are sine and cosine of p / 10000^(2i / width)."""
    ours = sinusoids(50, 16)
    for place in (0, 1, 7, 49):
        for pair in range(8):
            angle = place / 10000 ** (2 * pair / 16)
            assert ours[place, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-5)
            assert ours[place, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)


def test_rotary_positions_turn_complex_numbers():
    """Unit i and unit i + D / 2 form one complex number, multiplied by exp(j p / 10000^(2i / D))."""
    vectors = torch.randn(2, 30, 3, 8, generator=torch.Generator().manual_seed(0))
    numbers = vectors.numpy()[..., :4] + 1j * vectors.numpy()[..., 4:]
    numbers = numbers * np.exp(1j * np.arange(30)[:, None] / 10000 ** (np.arange(4) / 4))[None, :, None]
    expected = np.concatenate([numbers.real, numbers.imag], axis=-1)
    np.testing.assert_allclose(rotate(vectors, phases(30, 8)).numpy(), expected, atol=1e-5)


def test_rotary_attention_hears_distances_only():
    """Unheard frames before the others, which shift them all, change nothing; reordering the frames does."""
    torch.manual_seed(0)
    block = Block(model_config(name="transformer", width=16, heads=2, feed_forward=32, dropout=0.0)).double()
    frames = torch.randn(1, 12, 16, dtype=torch.float64)

    def outputs(frames: torch.Tensor, unheard: int = 0) -> torch.Tensor:
        moved = torch.cat([torch.randn(1, unheard, 16, dtype=torch.float64), frames], dim=1)
        visible = (torch.arange(moved.shape[1]) >= unheard)[None, None, None]
        return block(moved, Sight(visible, visible, phases(moved.shape[1], 8)))[0][:, unheard:]

    torch.testing.assert_close(outputs(frames, unheard=70), outputs(frames), atol=1e-5, rtol=0)
    assert not torch.allclose(outputs(frames.flip(1)).flip(1), outputs(frames), atol=1e-3)


class NoConvolutions(torch.nn.Module):
    """A replacement for the subsampling: a Transformer then knows the order only from its positions."""

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return features, lengths


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_positions_are_heard(positions):
    """A reversed utterance gives different outputs than the reversed outputs of the original."""
    config = model_config(name="transformer", preset="tiny", positions=positions)
    model = build_model(config, 40, 20, seed=1).eval()
    model.subsampling = NoConvolutions()
    frames = utterances([50], config.channels)[0][None]
    onward, backward = (model(each, torch.tensor([50]))[0] for each in (frames, frames.flip(1)))
    assert (onward - backward.flip(1)).abs().max() > 1e-2


def test_a_frame_hears_no_further_than_its_span_in_each_block():
    """With two blocks and a span of 3, the gradient of frame 25's outputs is 0 beyond 6 frames on either side."""
    config = model_config(name="transformer", preset="tiny", subsampling=1, span=3)
    model = build_model(config, 40, 20, seed=1).eval()
    model.subsampling = NoConvolutions()
    frames = utterances([50], config.channels)[0][None].requires_grad_()
    model(frames, torch.tensor([50]))[0][0, 25, 0].backward()
    heard = frames.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert heard == list(range(25 - 6, 25 + 7))


def test_a_span_over_the_whole_utterance_changes_nothing():
    everywhere, near = (
        build_model(model_config(name="transformer", preset="tiny", subsampling=1, span=span), 40, 20, seed=1).eval()
        for span in (0, 50)
    )
    frames, lengths = torch.stack(utterances([50])), torch.tensor([50])
    torch.testing.assert_close(near(frames, lengths)[0], everywhere(frames, lengths)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "positions"), [("transformer", "sinusoidal"), ("transformer", "rotary"), ("conformer", "rotary")]
)
def test_memory_of_attention_grows_with_an_utterance_and_not_with_its_square(name, positions):
    """The memory kept for the backward pass doubles from 20 s to 40 s, with dropout: it contains no `[T, T]` matrix."""

    def kept(num_frames: int) -> int:
        storages = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        config = model_config(name=name, preset="tiny", positions=positions, dropout=0.1)
        model = build_model(config, 40, 20, seed=1)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            log_probs, _ = model(torch.randn(1, num_frames, 40), torch.tensor([num_frames]))
        log_probs.sum().backward()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        return sum(storages.values()) - parameters

    assert kept(2000) > 0
    assert kept(4000) < 2.2 * kept(2000)


def test_relative_attention_is_that_of_the_paper():
    """Computing it frame by frame from the equation, with random u and v, gives the same sums."""
    torch.manual_seed(0)
    layer, width, heads, num_frames = conformer.RelativeAttention(12, 2), 12, 2, 7
    for bias in (layer.content_bias, layer.distance_bias):
        torch.nn.init.normal_(bias)
    frames, visible = torch.randn(num_frames, width), 5
    queries, keys, values = layer.inputs(frames).view(num_frames, 3, heads, 6).unbind(1)
    sums = torch.zeros(num_frames, heads, 6)
    for head in range(heads):
        for here in range(num_frames):
            scores = []
            for there in range(visible):
                periods = 10000 ** (-torch.arange(0, 12, 2) / 12)
                turns = (here - there) * periods
                place = layer.distances(torch.stack([turns.sin(), turns.cos()], dim=1).flatten()).view(heads, 6)[head]
                content = (queries[here, head] + layer.content_bias[head]) @ keys[there, head]
                scores.append((content + (queries[here, head] + layer.distance_bias[head]) @ place) / 6**0.5)
            sums[here, head] = torch.stack(scores).softmax(0) @ values[:visible, head]
    seen = (torch.arange(num_frames) < visible)[None, None, None]
    ours, _ = layer(frames[None], seen, distances(num_frames, width))
    torch.testing.assert_close(ours[0], layer.outputs(sums.flatten(1)), atol=1e-5, rtol=1e-5)


def test_a_conformers_block_is_the_equation_with_the_attention_of_torch():
    """Half feed-forward, attention, convolution, half feed-forward and a norm, written out for one utterance."""
    torch.manual_seed(0)
    config = model_config(name="conformer", preset="tiny", kernel=3, width=16, heads=2)
    block = conformer.Block(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    oracle = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    oracle.in_proj_weight.data.copy_(block.attention.inputs.weight)
    oracle.in_proj_bias.data.copy_(block.attention.inputs.bias)
    oracle.out_proj.load_state_dict(block.attention.outputs.state_dict())

    def feed_forward(part: conformer.FeedForward, frames: torch.Tensor) -> torch.Tensor:
        wide = part.norm(frames) @ part.widening.weight.T + part.widening.bias
        return (wide * wide.sigmoid()) @ part.narrowing.weight.T + part.narrowing.bias

    start = torch.randn(9, 16)
    frames = start + feed_forward(block.first, start) / 2
    normed = block.attention_norm(frames)[None]
    frames = frames + oracle(normed, normed, normed)[0][0]
    part = block.convolution
    first, second = part.gates(part.norm(frames)).chunk(2, dim=1)
    gated = torch.nn.functional.pad(first * second.sigmoid(), (0, 0, 1, 1))
    mixed = sum(gated[step : step + 9] * part.convolution.weight[:, 0, step] for step in range(3))
    inner = part.inner_norm(mixed + part.convolution.bias)
    frames = frames + part.outputs(inner * inner.sigmoid())
    frames = block.norm(frames + feed_forward(block.second, frames) / 2)
    no_turns = torch.zeros(9, 4)
    inside = torch.ones(1, 9, 1, dtype=torch.bool)
    ours, *_ = block(start[None], Sight(inside, inside[:, None, None, :, 0], no_turns))
    torch.testing.assert_close(ours[0], frames, atol=1e-4, rtol=1e-4)


def test_swoosh_and_bias_norm_are_those_of_the_paper():
    """Swoosh follows its equation, with SwooshR(0) = 0, and BiasNorm its own."""
    values = torch.linspace(-20, 20, 81, dtype=torch.float64)
    left = torch.log(1 + torch.exp(values - 4)) - 0.08 * values - 0.035
    right = torch.log(1 + torch.exp(values - 1)) - 0.08 * values - 0.313261687
    torch.testing.assert_close(zipformer.swoosh_l(values), left, atol=1e-7, rtol=0)
    torch.testing.assert_close(zipformer.swoosh_r(values), right, atol=1e-7, rtol=0)
    assert zipformer.swoosh_r(torch.zeros(1)).abs() < 1e-6
    norm = zipformer.BiasNorm(4)
    torch.nn.init.normal_(norm.bias)
    torch.nn.init.constant_(norm.log_scale, 0.7)
    frame = torch.tensor([1.0, -2.0, 0.5, 3.0])
    length = math.sqrt(sum(unit**2 for unit in (frame - norm.bias).tolist()) / 4)
    torch.testing.assert_close(norm(frame), frame / length * math.exp(0.7), atol=1e-5, rtol=0)


def test_a_zipformers_block_shares_the_attention_of_its_input():
    """The block follows its equation, with attention written out head by head."""
    torch.manual_seed(0)
    block = zipformer.Block(width=16, heads=2, kernel=3, dropout=0.0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    start, inside = torch.randn(9, 16), torch.ones(1, 9, 1, dtype=torch.bool)
    queries, keys = block.weights.inputs(start).view(9, 2, 2, 32).unbind(1)
    weights = [(queries[:, head] @ keys[:, head].T / 32**0.5).softmax(1) for head in range(2)]

    def attention(part: zipformer.Attention, frames: torch.Tensor) -> torch.Tensor:
        values = part.values(frames)
        return part.outputs(torch.cat([weights[head] @ values[:, 12 * head : 12 * head + 12] for head in (0, 1)], 1))

    def convolution(part: zipformer.Convolution, frames: torch.Tensor) -> torch.Tensor:
        first, second = part.gates(frames).chunk(2, dim=1)
        gated = torch.nn.functional.pad(first * second.sigmoid(), (0, 0, 1, 1))
        mixed = sum(gated[step : step + 9] * part.convolution.weight[:, 0, step] for step in range(3))
        return part.outputs(zipformer.swoosh_r(mixed + part.convolution.bias))

    frames = start + block.feed_forward[0](start)
    gates, values, factors = block.non_linear.inputs(frames).split(12, dim=1)
    frames = frames + block.non_linear.outputs(weights[0] @ (gates.tanh() * values) * factors)
    frames = frames + attention(block.attention[0], frames)
    frames = frames + convolution(block.convolution[0], frames)
    frames = frames + block.feed_forward[1](frames)
    frames = (1 - block.middle.scale) * start + block.middle.scale * frames
    frames = frames + attention(block.attention[1], frames)
    frames = frames + convolution(block.convolution[1], frames)
    frames = frames + block.feed_forward[2](frames)
    frames = (1 - block.end.scale) * start + block.end.scale * block.norm(frames)
    ours = block(start[None], inside, torch.zeros(9, 16))
    torch.testing.assert_close(ours[0], frames, atol=1e-4, rtol=1e-4)


def test_existing_frames_are_joined_with_learned_weights():
    """5 frames are joined 3 at a time: the last two share the weights of the first two places."""
    layer = zipformer.Downsample(3)
    torch.nn.init.normal_(layer.weights)
    first, second, third = layer.weights.softmax(0).tolist()
    frames = torch.full((1, 7, 2), 1e3)
    frames[0, :5] = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    joined, inside = layer(frames, (torch.arange(7) < 5)[None, :, None])
    assert inside[0, :, 0].tolist() == [True, True, False]
    expected = first * frames[0, 0] + second * frames[0, 1] + third * frames[0, 2]
    torch.testing.assert_close(joined[0, 0], expected, atol=1e-6, rtol=0)
    expected = (first * frames[0, 3] + second * frames[0, 4]) / (first + second)
    torch.testing.assert_close(joined[0, 1], expected, atol=1e-6, rtol=0)


def test_each_output_of_a_zipformer_comes_from_the_last_stack_that_has_it():
    """From stacks 3, 5, 4 and 2 wide, 2 units come from the last, 2 from the third, and 1 from the second."""
    outputs = [torch.full((1, 1, width), float(number)) for number, width in enumerate((3, 5, 4, 2))]
    assert zipformer.widest(outputs)[0, 0].tolist() == [3, 3, 2, 2, 1]


@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_deep_speech_hears_no_later_than_its_window(subsampling):
    """The output of encoder frame t depends on feature frames up to and including t * subsampling + 9."""
    model = build_model(model_config(name="deep-speech", preset="tiny", subsampling=subsampling), 40, 20, seed=1)
    features = utterances([80])[0][None].requires_grad_()
    log_probs, _ = model(features, torch.tensor([80]))
    for frame in (0, 5, 10):
        (gradient,) = torch.autograd.grad(log_probs[0, frame, 1], features, retain_graph=True)
        heard = gradient[0].abs().amax(1).nonzero()
        assert int(heard.max()) == frame * subsampling + 9
        assert int(heard.min()) == 0


@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_deep_speech_is_dense_layers_on_stacked_frames(subsampling):
    """The naive form, 19 frames side by side and clipped at 20, gives the same outputs."""
    model = build_model(model_config(name="deep-speech", preset="tiny", subsampling=subsampling), 40, 20, seed=1).eval()
    features = 30 * utterances([50])[0]
    outside = torch.zeros(9, 40)
    windows = torch.cat([outside, features, outside]).unfold(0, 19, 1)[::subsampling].flatten(1)
    first = (windows @ model.window.weight.flatten(1).T + model.window.bias).relu().clamp(max=20)
    assert first.max() == 20
    third = first
    for layer in model.dense:
        third = layer(third).relu().clamp(max=20)
    fifth = model.last_dense(model.recurrent(third[None])[0][0]).relu().clamp(max=20)
    ours, _ = model(features[None], torch.tensor([50]))
    torch.testing.assert_close(ours[0], model.output(fifth).log_softmax(1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_outputs_are_log_probabilities(config):
    """Every frame's probabilities sum to one, in float32 even under autocast."""
    model = build_model(config, 40, 20, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, _ = model(utterances([30])[0][None], torch.tensor([30]))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(2), torch.ones(1, config.encoder_frames(30)))


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed(name):
    """The same seed gives the same weights, a different seed different ones, and the global generator does not
    change."""
    before = torch.get_rng_state()
    config = model_config(name=name, preset="tiny")
    first, again, other = (
        torch.cat([parameter.flatten() for parameter in build_model(config, 40, 20, seed).parameters()])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


PARAMETERS = {
    "blstm": {"tiny": 29_908, "small": 772_884, "medium": 9_261_076, "ibm": 35_300_116},
    "lstm": {"tiny": 20_820, "small": 375_060, "medium": 3_591_956, "ibm": 12_600_084},
    "transformer": {
        "tiny": 115_220,
        "small": 837_908,
        "medium": 4_885_524,
        "large": 29_476_692,
        "huge": 100_263_876,
    },
    "conformer": {"tiny": 124_580, "small": 906_996, "medium": 7_928_516, "large": 24_818_452, "huge": 103_551_508},
    "zipformer": {"tiny": 91_008, "small": 1_287_235, "medium": 6_009_465, "large": 21_541_783, "huge": 104_616_411},
    "deep-speech": {"tiny": 95_764, "small": 823_700, "original": 47_759_380},
    "blstm-hybrid": {"tiny": 20_244, "small": 236_180, "ibm": 34_034_964},
    "dnn-hybrid": {"tiny": 3_924, "small": 213_012, "seide": 25_303_060},
}


@pytest.mark.parametrize("name", MODELS)
def test_presets_have_their_published_sizes(name):
    """With 40 mel bands and 20 outputs, they agree to the parameter; there is a `tiny`, and a `small` for a CPU."""
    counted = {}
    for preset in MODELS[name].PRESETS:
        with torch.device("meta"):
            model = build_model(model_config(name=name, preset=preset), 40, 20, seed=0)
        counted[preset] = count_parameters(model)
        assert all(not isinstance(module, torch.nn.BatchNorm1d) for module in model.modules())
    assert counted == PARAMETERS[name]
    assert counted["tiny"] < 0.15e6
    assert 0.2e6 < counted["small"] < 1.5e6


def test_the_documentation_lists_every_preset_with_its_parameters():
    """The table of docs/models.md is `PARAMETERS`, which the test above counts."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| `([a-z]+)` \| ([\d,]+) \|$", page, re.MULTILINE)
    listed = {(name, preset): int(count.replace(",", "")) for name, preset, count in rows}
    assert listed == {(name, preset): count for name, counts in PARAMETERS.items() for preset, count in counts.items()}


def test_presets_named_after_others_have_their_shape():
    """`ibm` is 6 x 512 in each direction with a bottleneck of 256; `original` 2048 units that hear 9 frames around."""
    ibm = model_config(preset="ibm")
    assert (ibm.layers, ibm.hidden, ibm.bottleneck) == (6, 512, 256)
    model = build_model(model_config(preset="ibm", layers=1), 80, 32, seed=0)
    assert sum(parameter.numel() for parameter in model.bottleneck.parameters()) == 1024 * 256 + 256
    original = model_config(name="deep-speech", preset="original")
    assert (original.hidden, original.context) == (2048, 9)


def test_every_size_of_an_architecture_can_be_given():
    """The preset's sizes, written out, make the same model."""
    sections = {"name": None, "preset": "small", "decoder": None, "phones": None, "chunk": None}
    for name, kind in MODELS.items():
        config = model_config(name=name)
        own = {key: getattr(config, key) for key in kind.model_fields.keys() - sections}
        assert own.keys() >= {"subsampling", "dropout"}
        assert model_config(name=name, **own) == config


def test_a_size_replaces_that_of_the_preset():
    """Single sizes override the preset; the others stay."""
    config = model_config(preset="tiny", hidden=48, dropout=0.5)
    assert (config.hidden, config.dropout, config.layers) == (48, 0.5, 1)
    config = model_config(name="transformer", width=96, heads=6)
    assert (config.width, config.heads, config.layers) == (96, 6, 4)


@pytest.mark.parametrize(
    ("tree", "place", "words"),
    [
        ({"name": "transfomer"}, "name", "'transfomer' is unknown; did you mean 'transformer'? known are blstm, lstm"),
        ({"name": 7}, "name", "'7' is unknown; known are blstm, lstm"),
        ({"preset": "huge"}, "preset", "blstm has no preset 'huge'; known are tiny, small, medium, ibm"),
        ({"name": "transformer", "preset": "ibm"}, "preset", "transformer has no preset 'ibm'; known are tiny, small,"),
        ({"heads": 4}, "heads", "only for name: transformer, conformer, zipformer; leave it out"),
        (
            {"name": "deep-speech", "layers": 3},
            "layers",
            "only for name: blstm, lstm, transformer, conformer, blstm-hybrid, dnn-hybrid; leave it out",
        ),
        ({"name": "transformer", "hidden": 3}, "hidden", "only for name: blstm, lstm, deep-speech, blstm-hybrid, dnn"),
        ({"name": "transformer", "heads": 3}, "", "3 heads cannot share a width of 128: each needs the same even"),
        ({"name": "transformer", "width": 36, "heads": 4}, "", "take a width that is a multiple of 8"),
        (
            {"name": "deep-speech", "context": 0},
            "",
            "would never hear some at subsampling 4: take a context of at least 2",
        ),
        (
            {"name": "transformer", "positions": "shaw"},
            "positions",
            "input should be 'sinusoidal' or 'rotary', got 'shaw'",
        ),
        ({"name": "transformer", "positions": "relative"}, "positions", "input should be 'sinusoidal' or 'rotary'"),
        ({"name": "conformer", "positions": "sinusoidal"}, "positions", "input should be 'rotary' or 'relative'"),
        (
            {"name": "conformer", "kernel": 4},
            "kernel",
            "a kernel of 4 frames has no middle: take an odd number, such as 5",
        ),
        ({"name": "zipformer", "stack_rates": [1, 2]}, "", "there are stack_rates 2, stack_layers 4, stack_widths 4"),
        ({"name": "zipformer", "stack_widths": [8, 8, 6, 8]}, "", "stack_widths: 6 is not a multiple of 4"),
        ({"subsampling": 3}, "subsampling", "input should be 1, 2 or 4"),
        ({"hidden": 0}, "hidden", "input should be greater than or equal to 1"),
        ({"hiden": 4}, "hiden", "unknown key; did you mean model.hidden?"),
    ],
)
def test_a_value_that_an_architecture_lacks_is_one_problem_of_its_key(tree, place, words):
    """The message names the known values; sizes that don't fit together are a problem of the whole section."""
    with pytest.raises(ConfigError) as caught:
        checked(Holder, {"model": tree}, "here")
    first, problem = str(caught.value).splitlines()
    assert first == "here: a problem"
    assert problem.startswith(f"  model{'.' if place else ''}{place}: ")
    assert words in problem


def test_all_problems_of_a_model_are_reported_at_once():
    """A preset and two sizes that it doesn't have are three problems."""
    with pytest.raises(ConfigError) as caught:
        checked(Holder, {"model": {"name": "transformer", "preset": "ibm", "hidden": 3, "context": 2}}, "here")
    _, *problems = str(caught.value).splitlines()
    assert [problem.partition(":")[0].strip() for problem in problems] == [
        "model.preset",
        "model.hidden",
        "model.context",
    ]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_a_saved_recogniser_of_any_model_loads_again(config, tmp_path: Path):
    """Its configuration and its weights are those that were saved."""
    saved = Recogniser.create(config, LogMel(FeatureConfig(), 8000), CharacterTokenizer("AB"), seed=1)
    saved.save(tmp_path)
    loaded = Recogniser.load(tmp_path)
    assert loaded.model_config == config
    wanted = saved.model.state_dict()
    assert wanted.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(wanted[name], value) for name, value in loaded.model.state_dict().items())


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_encoder_frames_are_known_without_computing_them(config):
    """`encoder_frames` and the network agree for every length, since CTC feasibility relies on it."""
    model = build_model(config, 40, 5, seed=0)
    for num_frames in range(1, 20):
        log_probs, lengths = model(torch.zeros(1, num_frames, 40), torch.tensor([num_frames]))
        assert log_probs.shape[1] == int(lengths) == config.encoder_frames(num_frames)


def test_the_network_of_the_page_has_the_shapes_that_the_page_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the page's own command: with and without a decoder, and with outputs that no padding changes."""
    blocks = code_blocks(Path(__file__).parents[2] / "docs" / "models.md")
    (program,) = [block for block in blocks if block.saved_as == "my_gru.py"]
    (command,) = [block.text for block in blocks if "my_gru:Gru" in block.text and block.language == "sh"]
    (tmp_path / "my_gru.py").write_text(program.text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    variable, *words, recipe, name, model = shlex.split(command)
    assert (variable, words) == ("PYTHONPATH=.", ["starling", "train"])
    config = load_recipe(Path(recipe), [name, model]).model
    assert (config.preset, config.hidden, model_config(name=config.name).hidden) == ("tiny", 32, 128)
    assert isinstance(build_model(config, 40, 12, 1).gru, torch.nn.GRU)
    for subsampling in (1, 2, 4):
        sized = model_config(name=config.name, preset="tiny", subsampling=subsampling)
        network = build_model(sized, 40, 12, 1).eval()
        short, long = utterances([29, 90])
        features = torch.full((2, 90, 40), 1e3)
        features[0, :29], features[1] = short, long
        log_probs, lengths = network(features, torch.tensor([29, 90]))
        assert lengths.tolist() == [sized.encoder_frames(29), sized.encoder_frames(90)]
        assert log_probs.shape == (2, sized.encoder_frames(90), 12)
        (alone,), _ = network(short[None], torch.tensor([29]))
        torch.testing.assert_close(log_probs[0, : len(alone)], alone, rtol=0.0, atol=1e-5)
    assert build_model(model_config(name=config.name, decoder={"kind": "attention"}), 40, 12, 1).decoder is not None
    del sys.modules["my_gru"]
