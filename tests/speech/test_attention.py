"""The attention decoder: torch's own layer as oracle, one token at a time, and its searches against all texts."""

import itertools
import json

import pytest
import torch
from pydantic import ValidationError

from starling.speech.decoding import decoders as decoding
from starling.speech.models import build_model, model_config
from starling.speech.models.architectures import AttentionConfig, TransducerConfig
from starling.speech.models.transformer import END, AttentionDecoder, DecoderBlock

FRAMES = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(3))
LENGTHS = torch.tensor([7, 4, 1])


def decoder(vocab_size: int = 5, **sizes: object) -> AttentionDecoder:
    torch.manual_seed(0)
    config = AttentionConfig.model_validate({"kind": "attention", "width": 16, "heads": 2} | sizes)
    made = AttentionDecoder(config, 6, vocab_size).eval()
    torch.nn.init.normal_(made.output.weight)
    return made


def test_a_block_is_the_decoder_layer_of_torch():
    """With the same weights, `nn.TransformerDecoderLayer(norm_first=True)` gives the same values and gradients."""
    torch.manual_seed(0)
    block = DecoderBlock(16, 2, dropout=0.0)
    oracle = torch.nn.TransformerDecoderLayer(16, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
    for norm in (block.self_norm, block.norm, block.feed_forward_norm):
        torch.nn.init.normal_(norm.weight)
    ours = {
        "self_attn.in_proj_": block.self_inputs,
        "self_attn.out_proj.": block.self_outputs,
        "multihead_attn.out_proj.": block.outputs,
        "linear1.": block.widening,
        "linear2.": block.narrowing,
        "norm1.": block.self_norm,
        "norm2.": block.norm,
        "norm3.": block.feed_forward_norm,
    }
    weights = {f"{prefix}{kind}": getattr(layer, kind) for prefix, layer in ours.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        parts = [getattr(block.queries, kind), getattr(block.memory, kind)]
        weights[f"multihead_attn.in_proj_{kind}"] = torch.cat(parts)
    oracle.load_state_dict(weights)
    inputs, memory = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    visible = torch.arange(7) < LENGTHS[:, None]
    mine, _ = block(inputs, block.split(block.memory(memory), 2), visible[:, None, None], None)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    theirs = oracle(inputs, memory, tgt_mask=causal, memory_key_padding_mask=~visible)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    mine.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(block.widening.weight.grad, oracle.linear1.weight.grad)
    torch.testing.assert_close(block.self_inputs.weight.grad, oracle.self_attn.in_proj_weight.grad)


def test_one_token_at_a_time_gives_the_same_as_all_at_once():
    """With keys and values kept, each step's log-probabilities are those of the whole text, to 1e-5."""
    made = decoder()
    tokens = torch.tensor([[END, 1, 2, 3], [END, 4, 4, 1], [END, 2, 1, 1]])
    with torch.inference_mode():
        memory, past = made.hear(FRAMES, LENGTHS), None
        whole, _ = made.log_probs(tokens, memory)
        for place in range(4):
            step, past = made.log_probs(tokens[:, place : place + 1], memory, past)
            torch.testing.assert_close(step[:, 0], whole[:, place], atol=1e-5, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_smoothed_cross_entropy_with_the_end(smoothing):
    """The loss follows its equation, token by token, for texts of different lengths, one of them empty."""
    made = decoder(label_smoothing=smoothing)
    texts = [[1, 2, 3], [4], []]
    loss = made(FRAMES, LENGTHS, torch.tensor([1, 2, 3, 4]), torch.tensor([3, 1, 0]))
    expected = 0.0
    for row, text in enumerate(texts):
        memory = made.hear(FRAMES[row : row + 1, : LENGTHS[row]], LENGTHS[row : row + 1])
        log_probs = made.log_probs(torch.tensor([[END, *text]]), memory)[0][0].detach()
        for step, target in zip(log_probs, [*text, END], strict=True):
            expected -= (1 - smoothing) * float(step[target]) + smoothing * float(step.mean())
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def all_texts(vocab_size: int, longest: int) -> list[list[int]]:
    return [
        list(text) for length in range(longest + 1) for text in itertools.product(range(1, vocab_size), repeat=length)
    ]


def test_probabilities_of_all_texts_sum_to_one():
    """A decoder always ends after at most two tokens: the probabilities of all its texts sum to one."""
    made, frames = decoder(vocab_size=3), FRAMES[0]
    log_probs = made.log_probs

    def ends_soon(tokens, memory, past=None):
        found, pasts = log_probs(tokens, memory, past)
        found[:, 2:] = torch.tensor([0.0, -1e9, -1e9])
        return found, pasts

    made.log_probs = ends_soon
    with torch.inference_mode():
        scores = torch.tensor(decoding.scores(made, frames, all_texts(3, 2)))
    assert float(scores.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert decoding.scores(made, frames, []) == []


def test_a_wide_beam_finds_the_likeliest_texts_of_all():
    """All texts of up to four tokens are compared; their scores equal those of texts scored separately."""
    made, frames = decoder(vocab_size=4), FRAMES[0]
    texts = all_texts(4, 4)
    with torch.inference_mode():
        found = decoding.attention_beam(made, frames, beam=400, num_best=5, most_tokens=4)
        scores = decoding.scores(made, frames, texts)
    expected = sorted(zip(texts, scores, strict=True), key=lambda each: -each[1])[:5]
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_greedy_search_is_a_beam_of_one_token_after_another():
    """Utterances in one batch give the same as each one alone: the likeliest token, up to the end or as many as
    frames."""
    made = decoder()
    with torch.inference_mode():
        found = decoding.greedy(made, FRAMES, LENGTHS)
        for row, length in enumerate(LENGTHS.tolist()):
            memory = made.hear(FRAMES[row : row + 1, :length], LENGTHS[row : row + 1])
            text: list[int] = []
            while len(text) < length:
                token = int(made.log_probs(torch.tensor([[END, *text]]), memory)[0][0, -1].argmax())
                if token == END:
                    break
                text.append(token)
            assert found[row] == text
    assert any(found)


def test_a_decoder_is_chosen_by_its_kind_and_has_its_own_keys():
    """The message of a wrong key names it."""
    config = model_config(**{"preset": "tiny", "decoder": {"kind": "transducer", "context": 3}})
    assert config.decoder == TransducerConfig(kind="transducer", context=3)
    assert model_config(**json.loads(config.model_dump_json())) == config
    for tree, words in (
        ({"kind": "attention", "context": 3}, "context"),
        ({"kind": "listener"}, "'attention', 'transducer'"),
        ({"kind": "attention", "width": 30, "heads": 4}, "take a width that is a multiple of 8"),
        ({"kind": "attention", "ctc_weight": 0}, "greater than 0"),
    ):
        with pytest.raises(ValidationError, match=words):
            model_config(**{"decoder": tree})


def test_a_model_with_a_decoder_has_the_weights_of_the_one_without():
    """The decoder's weights come after the others, so that the encoder starts out the same."""
    plain = model_config(name="transformer", preset="tiny")
    both = plain.model_copy(update={"decoder": AttentionConfig(kind="attention", width=16, heads=2)})
    model, other = (build_model(each, 40, 5, seed=1).state_dict() for each in (both, plain))
    assert all(torch.equal(model[name], value) for name, value in other.items())
    assert {name.split(".")[0] for name in model.keys() - other.keys()} == {"decoder"}
