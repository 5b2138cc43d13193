"""Models: padding never shows, sizes are those of the presets, seeds decide about weights."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from starling.speech.features import FeatureConfig, LogMel
from starling.speech.models import MODELS, ModelConfig, build_model, count_parameters
from starling.speech.models.blstm import BidirectionalLayer, reversal
from starling.speech.models.positions import phases, rotate, sinusoids
from starling.speech.models.transformer import Block
from starling.speech.recogniser import Recogniser
from starling.speech.tokens import CharacterTokenizer

SMALL_CONFIGS = [
    ModelConfig(name=name, preset="tiny", subsampling=subsampling, **sizes)
    for name, variants in {
        "blstm": ({"layers": 2}, {"layers": 2, "bottleneck": 8}),
        "lstm": ({"layers": 2}, {"layers": 2, "bottleneck": 8}),
        "transformer": ({"positions": "rotary"}, {"positions": "sinusoidal"}),
        "deep-speech": ({}, {"context": 3}),
    }.items()
    for subsampling, sizes in ((1, variants[0]), (2, variants[1]), (4, variants[0]))
] + [ModelConfig(name="transformer", preset="tiny", subsampling=2, span=3)]


def names(config: ModelConfig) -> str:
    return f"{config.name}-{config.subsampling}"


def utterances(lengths: list[int], num_features: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, num_features, generator=generator) for length in lengths]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
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


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=names)
def test_padding_never_changes_a_gradient(config):
    """That of a short one and of a single frame are the same to 1e-5 whatever stands in the padding, and never NaN."""
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
    block = Block(width=24, heads=3, feed_forward=40, dropout=0.0)
    for norm in (block.attention_norm, block.feed_forward_norm):
        torch.nn.init.normal_(norm.weight)
    oracle = pre_norm_oracle(block, 24, 3, 40)
    frames, visible = torch.randn(3, 9, 24), torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    ours = block(frames, visible[:, None, None], None)[visible]
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
    """Unit i and unit i + D / 2 are one complex number, multiplied by exp(j p / 10000^(2i / D))."""
    vectors = torch.randn(2, 30, 3, 8, generator=torch.Generator().manual_seed(0))
    numbers = vectors.numpy()[..., :4] + 1j * vectors.numpy()[..., 4:]
    numbers = numbers * np.exp(1j * np.arange(30)[:, None] / 10000 ** (np.arange(4) / 4))[None, :, None]
    expected = np.concatenate([numbers.real, numbers.imag], axis=-1)
    np.testing.assert_allclose(rotate(vectors, phases(30, 8)).numpy(), expected, atol=1e-5)


def test_rotary_attention_hears_distances_only():
    """Unheard frames in front, which move all others, change nothing; another order of the frames does."""
    torch.manual_seed(0)
    block = Block(width=16, heads=2, feed_forward=32, dropout=0.0).double()
    frames = torch.randn(1, 12, 16, dtype=torch.float64)

    def outputs(frames: torch.Tensor, unheard: int = 0) -> torch.Tensor:
        moved = torch.cat([torch.randn(1, unheard, 16, dtype=torch.float64), frames], dim=1)
        visible = (torch.arange(moved.shape[1]) >= unheard)[None, None, None]
        return block(moved, visible, phases(moved.shape[1], 8))[:, unheard:]

    torch.testing.assert_close(outputs(frames, unheard=70), outputs(frames), atol=1e-5, rtol=0)
    assert not torch.allclose(outputs(frames.flip(1)).flip(1), outputs(frames), atol=1e-3)


class NoConvolutions(torch.nn.Module):
    """In place of the subsampling: a Transformer then knows of order by its positions alone."""

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return features, lengths


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_positions_are_heard(positions):
    """Backwards, an utterance gives other outputs than its own backwards."""
    config = ModelConfig(name="transformer", preset="tiny", positions=positions)
    model = build_model(config, 40, 20, seed=1).eval()
    model.subsampling = NoConvolutions()
    frames = utterances([50], config.shape.channels)[0][None]
    onward, backward = (model(each, torch.tensor([50]))[0] for each in (frames, frames.flip(1)))
    assert (onward - backward.flip(1)).abs().max() > 1e-2


def test_a_frame_hears_no_further_than_its_span_in_each_block():
    """With two blocks and a span of 3, the gradient of frame 25's outputs is 0 beyond 6 frames on either side."""
    config = ModelConfig(name="transformer", preset="tiny", subsampling=1, span=3)
    model = build_model(config, 40, 20, seed=1).eval()
    model.subsampling = NoConvolutions()
    frames = utterances([50], config.shape.channels)[0][None].requires_grad_()
    model(frames, torch.tensor([50]))[0][0, 25, 0].backward()
    heard = frames.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert heard == list(range(25 - 6, 25 + 7))


def test_a_span_over_the_whole_utterance_changes_nothing():
    everywhere, near = (
        build_model(ModelConfig(name="transformer", preset="tiny", subsampling=1, span=span), 40, 20, seed=1).eval()
        for span in (0, 50)
    )
    frames, lengths = torch.stack(utterances([50])), torch.tensor([50])
    torch.testing.assert_close(near(frames, lengths)[0], everywhere(frames, lengths)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_memory_of_a_transformer_grows_with_an_utterance_and_not_with_its_square(positions):
    """What is kept for the backward pass doubles from 20 s to 40 s, with dropout: no `[T, T]` matrix is among it."""

    def kept(num_frames: int) -> int:
        storages = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        config = ModelConfig(name="transformer", preset="tiny", positions=positions, dropout=0.1)
        model = build_model(config, 40, 20, seed=1)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            log_probs, _ = model(torch.randn(1, num_frames, 40), torch.tensor([num_frames]))
        log_probs.sum().backward()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        return sum(storages.values()) - parameters

    assert kept(2000) > 0
    assert kept(4000) < 2.2 * kept(2000)


@pytest.mark.parametrize("subsampling", [1, 2, 4])
def test_deep_speech_hears_no_later_than_its_window(subsampling):
    """The output of encoder frame t depends on feature frames up to t * subsampling + 9 inclusive, and no later."""
    model = build_model(ModelConfig(name="deep-speech", preset="tiny", subsampling=subsampling), 40, 20, seed=1)
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
    model = build_model(ModelConfig(name="deep-speech", preset="tiny", subsampling=subsampling), 40, 20, seed=1).eval()
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


PARAMETERS = {
    "blstm": {"tiny": 29_908, "small": 772_884, "medium": 9_261_076, "ibm": 35_300_116},
    "lstm": {"tiny": 20_820, "small": 375_060, "medium": 3_591_956, "ibm": 12_600_084},
    "transformer": {"tiny": 115_220, "small": 837_908, "medium": 4_885_524},
    "deep-speech": {"tiny": 95_764, "small": 823_700, "original": 47_759_380},
    "blstm-hybrid": {"tiny": 20_244, "small": 236_180, "ibm": 34_034_964},
    "dnn-hybrid": {"tiny": 3_924, "small": 213_012, "seide": 25_303_060},
}


@pytest.mark.parametrize("name", MODELS)
def test_presets_have_their_published_sizes(name):
    """With 40 mel bands and 20 outputs, to the parameter; there is a `tiny`, and a `small` for a CPU."""
    counted = {}
    for preset in MODELS[name].presets:
        with torch.device("meta"):
            model = build_model(ModelConfig(name=name, preset=preset), 40, 20, seed=0)
        counted[preset] = count_parameters(model)
        assert all(not isinstance(module, torch.nn.BatchNorm1d) for module in model.modules())
    assert counted == PARAMETERS[name]
    assert counted["tiny"] < 0.15e6
    assert 0.2e6 < counted["small"] < 1.5e6


def test_presets_named_after_others_have_their_shape():
    """`ibm` is 6 x 512 in each direction with a bottleneck of 256; `original` 2048 units that hear 9 frames around."""
    ibm = ModelConfig(preset="ibm").shape
    assert (ibm.layers, ibm.hidden, ibm.bottleneck) == (6, 512, 256)
    model = build_model(ModelConfig(preset="ibm", layers=1), 80, 32, seed=0)
    assert sum(parameter.numel() for parameter in model.bottleneck.parameters()) == 1024 * 256 + 256
    original = ModelConfig(name="deep-speech", preset="original").shape
    assert (original.hidden, original.context) == (2048, 9)


def test_every_size_of_an_architecture_can_be_given():
    """Each is a key of the configuration, and no key is of no architecture."""
    sizes = {size for architecture in MODELS.values() for size in architecture.sizes}
    assert sizes == ModelConfig.model_fields.keys() - {"name", "preset"}


def test_a_size_replaces_that_of_the_preset():
    """Single sizes override the preset, the others stay."""
    config = ModelConfig(preset="tiny", hidden=48, dropout=0.5)
    assert (config.shape.hidden, config.shape.dropout, config.shape.layers) == (48, 0.5, 1)
    config = ModelConfig(name="transformer", width=96, heads=6)
    assert (config.shape.width, config.shape.heads, config.shape.layers) == (96, 6, 4)


@pytest.mark.parametrize(
    ("tree", "place", "words"),
    [
        ({"name": "transfomer"}, "name", "'transfomer' is unknown; did you mean 'transformer'? known are blstm, lstm"),
        ({"preset": "huge"}, "preset", "blstm has no preset 'huge'; known are tiny, small, medium, ibm"),
        ({"name": "transformer", "preset": "ibm"}, "preset", "transformer has no preset 'ibm'; known are tiny, small,"),
        ({"heads": 4}, "heads", "blstm has no such size; known are layers, hidden, bottleneck, channels, subsampling"),
        (
            {"name": "deep-speech", "layers": 3},
            "layers",
            "deep-speech has no such size; known are hidden, context, subsampling, dropout",
        ),
        ({"name": "transformer", "hidden": 3}, "hidden", "transformer has no such size; known are "),
        ({"name": "transformer", "heads": 3}, "", "3 heads cannot share a width of 128: each needs the same even"),
        ({"name": "transformer", "width": 36, "heads": 4}, "", "take a width that is a multiple of 8"),
        (
            {"name": "deep-speech", "context": 0},
            "",
            "would never hear some at subsampling 4: take a context of at least 2",
        ),
        ({"name": "transformer", "positions": "shaw"}, "positions", "Input should be 'sinusoidal' or 'rotary'"),
        ({"subsampling": 3}, "subsampling", "Input should be 1, 2 or 4"),
        ({"hidden": 0}, "hidden", "Input should be greater than or equal to 1"),
        ({"hiden": 4}, "hiden", "Extra inputs are not permitted"),
    ],
)
def test_what_an_architecture_does_not_have_is_one_problem_of_its_key(tree, place, words):
    """The message names what there is; sizes that don't go together are a problem of the whole section."""
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate(tree)
    (problem,) = caught.value.errors()
    assert ".".join(map(str, problem["loc"])) == place
    assert words in problem["msg"]


def test_all_that_is_wrong_with_a_model_is_said_at_once():
    """A preset and two sizes that it doesn't have are three problems."""
    with pytest.raises(ValidationError) as caught:
        ModelConfig.model_validate({"name": "transformer", "preset": "ibm", "hidden": 3, "context": 2})
    assert [problem["loc"] for problem in caught.value.errors()] == [("preset",), ("hidden",), ("context",)]


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
