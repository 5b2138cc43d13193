"""The transducer's loss against the sum over all alignments, its chunks, and its searches."""

import itertools
import math

import pytest
import torch

from starling.speech.decoding import decoders as decoding
from starling.speech.models import build_model, model_config
from starling.speech.models.architectures import TransducerConfig
from starling.speech.models.transducer import Transducer, lattice_loss, transducer_loss

LENGTHS, TOKEN_LENGTHS = torch.tensor([4, 2, 1, 3]), torch.tensor([3, 2, 0, 1])


def lattice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of blanks and of tokens, with random values outside the utterances."""
    generator = torch.Generator().manual_seed(seed)
    blank, emit = (torch.randn(4, 4, width, generator=generator, dtype=torch.float64) for width in (4, 3))
    return blank.requires_grad_(), emit.requires_grad_()


def by_enumeration(blank: torch.Tensor, emit: torch.Tensor, num_frames: int, num_tokens: int) -> torch.Tensor:
    """The negative log of the sum over every way to place the tokens in the frames."""
    totals = []
    for places in itertools.combinations_with_replacement(range(num_frames), num_tokens):
        steps = [emit[frame, token] for token, frame in enumerate(places)]
        steps += [blank[frame, sum(place <= frame for place in places)] for frame in range(num_frames)]
        totals.append(torch.stack(steps).sum())
    return -torch.stack(totals).logsumexp(0)


def test_the_loss_is_the_sum_over_all_alignments():
    """Values and gradients of four utterances of different lengths agree, to 1e-10."""
    blank, emit = lattice()
    ours = lattice_loss(blank, emit, LENGTHS, TOKEN_LENGTHS)
    sizes = zip(LENGTHS.tolist(), TOKEN_LENGTHS.tolist(), strict=True)
    oracle = torch.stack([by_enumeration(blank[row], emit[row], *each) for row, each in enumerate(sizes)])
    torch.testing.assert_close(ours, oracle, atol=1e-10, rtol=0)
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    gradients = [torch.autograd.grad((each * weights).sum(), (blank, emit)) for each in (ours, oracle)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


def test_the_gradient_is_that_of_finite_differences():
    assert torch.autograd.gradcheck(lambda *given: lattice_loss(*given, LENGTHS, TOKEN_LENGTHS), lattice(seed=1))


def test_values_outside_an_utterance_change_nothing():
    """Different values there, even infinite ones, give the same loss, and gradients of 0."""
    blank, emit = (each.detach() for each in lattice())
    before = lattice_loss(blank, emit, LENGTHS, TOKEN_LENGTHS)
    for row, (frames, tokens) in enumerate(zip(LENGTHS.tolist(), TOKEN_LENGTHS.tolist(), strict=True)):
        for each, places in ((blank, tokens + 1), (emit, tokens)):
            each[row, frames:] = math.nan
            each[row, :, places:] = math.inf
    blank.requires_grad_()
    after = lattice_loss(blank, emit, LENGTHS, TOKEN_LENGTHS)
    torch.testing.assert_close(after, before)
    after.sum().backward()
    assert blank.grad[2].count_nonzero() == 1  # one frame, no token: one step
    assert bool(blank.grad.isfinite().all())


def test_a_long_utterance_neither_overflows_nor_loses_its_gradient():
    """For a thousand frames and two hundred tokens, the shares of all steps sum to frames plus tokens."""
    generator = torch.Generator().manual_seed(0)
    blank, emit = (
        (5 * torch.randn(1, 1000, width, generator=generator)).log_softmax(2).requires_grad_() for width in (201, 200)
    )
    loss = lattice_loss(blank, emit, torch.tensor([1000]), torch.tensor([200]))
    loss.sum().backward()
    assert 1000 < float(loss.detach()) < math.inf
    assert float(-blank.grad.sum()) == pytest.approx(1000, rel=1e-5)
    assert float(-emit.grad.sum()) == pytest.approx(200, rel=1e-5)


def decoder(context: int = 2, vocab_size: int = 5) -> Transducer:
    torch.manual_seed(0)
    made = Transducer(TransducerConfig(kind="transducer", width=8, context=context), 6, vocab_size)
    torch.nn.init.normal_(made.output.weight)
    return made


FRAMES = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(3))


def loss_of(made: Transducer, most_numbers: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """The losses, their gradients with respect to all weights and frames, and the bytes kept for them."""
    frames, tokens = FRAMES.clone().requires_grad_(), torch.tensor([[1, 2, 3], [4, 0, 0]])
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        encoded, predicted = made.frames(frames), made.predict(tokens)
        lengths, token_lengths = torch.tensor([7, 5]), torch.tensor([3, 1])
        losses = transducer_loss(made.join, encoded, predicted, tokens, lengths, token_lengths, 5, most_numbers)
    gradients = torch.autograd.grad(losses.sum(), (*made.parameters(), frames))
    return losses, list(gradients), sum(kept.values())


@pytest.mark.parametrize("most_numbers", [1, 2 * 4 * 8 * 3])
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(most_numbers):
    """Chunks of one or three frames agree to 1e-5, and keep less for the backward pass."""
    made = decoder()
    whole, chunked = loss_of(made, 2**24), loss_of(made, most_numbers)
    torch.testing.assert_close(chunked[0], whole[0], atol=1e-5, rtol=0)
    for mine, theirs in zip(chunked[1], whole[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert chunked[2] < 0.7 * whole[2]


def test_the_predictor_knows_only_the_last_tokens():
    """With a context of 2, its prediction after a text depends on the last two tokens, and on their order."""
    made = decoder()
    after = {text: made.predict(torch.tensor([text]))[0, -1] for text in ((1, 2, 3), (4, 2, 3), (2, 3), (3, 2))}
    torch.testing.assert_close(after[1, 2, 3], after[4, 2, 3])
    torch.testing.assert_close(after[1, 2, 3], after[2, 3])
    assert not torch.allclose(after[2, 3], after[3, 2])
    empty = torch.zeros(1, 0, dtype=torch.long)
    torch.testing.assert_close(made.predict(empty)[0, 0], made.predict(torch.tensor([[1]]))[0, 0])


def log_probability(made: Transducer, frames: torch.Tensor, text: list[int]) -> float:
    tokens = torch.tensor(text, dtype=torch.long)
    with torch.inference_mode():
        return -float(made(frames[None], torch.tensor([len(frames)]), tokens, torch.tensor([len(text)])))


def test_a_wide_beam_finds_the_likeliest_text_with_its_probability():
    """All texts of up to four of two tokens are compared; scores are those of the loss, summed over all alignments."""
    made, frames = decoder(vocab_size=3), FRAMES[0, :3]
    with torch.inference_mode():
        made.output.bias[0] += 3.0  # so that long texts are unlikely
        found = decoding.transducer_beam(made, frames, beam=200, num_best=6, most_in_a_frame=4)
    texts = [list(text) for length in range(5) for text in itertools.product((1, 2), repeat=length)]
    likeliest = sorted(texts, key=lambda text: -log_probability(made, frames, text))[:6]
    assert [text for text, _ in found] == likeliest
    for text, score in found:
        assert score == pytest.approx(log_probability(made, frames, text), abs=1e-4)


def test_a_narrow_beam_is_no_better_and_greedy_search_keeps_to_the_lengths():
    """A beam of 1 scores at most as well as one of 8; padding and neighbours change no greedy text."""
    made = decoder()
    with torch.inference_mode():
        best = [decoding.transducer_beam(made, FRAMES[0], beam)[0][1] for beam in (1, 8)]
        assert best[0] <= best[1] + 1e-6
        made.output.bias[0] += 1.0
        together = decoding.greedy(made, FRAMES, torch.tensor([7, 4]))
        alone = decoding.greedy(made, FRAMES[1:, :4], torch.tensor([4]))
    assert together[1] == alone[0]
    assert any(together)


def test_greedy_search_takes_the_likeliest_step_of_each_cell():
    made = decoder()
    with torch.inference_mode():
        made.output.bias[0] += 1.0
        found = decoding.greedy(made, FRAMES[:1], torch.tensor([7]))[0]
        encoded, expected = made.frames(FRAMES[0]), list[int]()
        for frame in range(7):
            for _ in range(decoding.MOST_IN_A_FRAME):
                predicted = made.predict(torch.tensor([expected], dtype=torch.long))[0, -1]
                token = int(made.join(encoded[frame], predicted).argmax())
                if token == 0:
                    break
                expected.append(token)
    assert found == expected


def test_a_model_with_a_transducer_gives_its_loss_beside_ctc():
    """The loss is the third output; the first two are those of the model without a transducer, with the same
    weights."""
    plain = model_config(name="blstm", preset="tiny")
    with_decoder = plain.model_copy(update={"decoder": TransducerConfig(kind="transducer", width=16)})
    model, other = (build_model(each, 40, 5, seed=1) for each in (with_decoder, plain))
    features, lengths = torch.randn(2, 30, 40), torch.tensor([30, 20])
    tokens = torch.tensor([1, 2, 4]), torch.tensor([2, 1])
    log_probs, frames, loss = model(features, lengths, *tokens)
    expected, expected_frames = other(features, lengths)
    assert torch.equal(log_probs, expected)
    assert torch.equal(frames, expected_frames)
    encoded, _ = model.encode(features, lengths)
    parts = [
        log_probability(model.decoder, encoded[row, : frames[row]], text) for row, text in enumerate(([1, 2], [4]))
    ]
    assert float(loss.detach()) == pytest.approx(-sum(parts), rel=1e-5)
