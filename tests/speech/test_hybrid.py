"""Sub-sequences, stored frames, forced alignment and tied states, each against an oracle."""

from collections import Counter
from contextlib import closing
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starling.configuration import read_saved
from starling.errors import CheckpointError, ConfigError, DataError
from starling.speech.decoding import DecodingConfig
from starling.speech.features import spliced
from starling.speech.hybrid import AlignedFrames, Frames, FrameWriter, SequencesConfig, save_states
from starling.speech.hybrid.alignment import (
    SPLICE,
    Gaussians,
    StateSequences,
    align_with_gaussians,
    flat_start,
    from_ctc,
    tie_states,
)
from starling.speech.hybrid.tying import (
    STATES_FILE,
    StateSpeller,
    Statistics,
    TiedStates,
    check_words,
    grow_tree,
    read_words,
)
from starling.speech.hybrid.viterbi import ctc_row
from starling.speech.models import build_model, count_parameters, model_config
from starling.speech.tokens import CharacterTokenizer
from starling.speech.training.plan import SequencePlanner
from starling.speech.training.workload import PADDING, FrameBatch, frame_loss


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    frames=st.integers(1, 25),
    batch=st.integers(1, 9),
    accumulate=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_every_frame_is_in_one_sub_sequence_of_an_epoch(
    lengths: list[int], frames: int, batch: int, accumulate: int, epoch: int
) -> None:
    """For any lengths, no sub-sequence is too long, and mini-batches are about equally large."""
    config = SequencesConfig(frames=frames, batch=batch)
    planner = SequencePlanner(np.asarray(lengths), config, accumulate, seed=3)
    seen: Counter[tuple[int, int]] = Counter()
    sizes = []
    for index in range(planner.num_batches(epoch)):
        micro = planner.batch(epoch, index)
        sizes.append(sum(map(len, micro)))
        assert len(micro) <= accumulate and all(len(each) <= batch for each in micro)
        for utterance, first, end in np.concatenate(micro).tolist():
            assert 0 < end - first <= frames
            seen.update((utterance, frame) for frame in range(first, end))
    assert seen == Counter({(u, frame): 1 for u, length in enumerate(lengths) for frame in range(length)})
    assert max(sizes) - min(sizes) <= 1
    assert sum(sizes) == planner.num_examples


def test_epochs_differ_in_order_and_in_where_utterances_are_cut() -> None:
    """Every process, with its own planner, gives the same."""
    lengths = np.asarray([50, 64, 43])
    planner, other = (SequencePlanner(lengths, SequencesConfig(frames=21, batch=4), 1, seed) for seed in (1, 1))
    first = [np.concatenate(planner.batch(0, index)).tolist() for index in range(planner.num_batches(0))]
    second = [np.concatenate(planner.batch(1, index)).tolist() for index in range(planner.num_batches(0))]
    assert first == [np.concatenate(other.batch(0, index)).tolist() for index in range(other.num_batches(0))]
    assert {tuple(each) for batch in first for each in batch} != {tuple(each) for batch in second for each in batch}


def test_a_learner_draws_only_from_its_own_part() -> None:
    """Draws are random, without repeating a sub-sequence while there are enough."""
    planner = SequencePlanner(np.full(10, 42), SequencesConfig(frames=21, batch=6), 1, seed=1)
    parts = np.asarray([0, 1] * 5, np.int32)
    drawn = [np.concatenate(planner.draw(1, step, parts)) for step in range(3)]
    assert all((parts[pieces[:, 0]] == 1).all() for pieces in drawn)
    assert all(len({(u, first > 0) for u, first, _ in pieces.tolist()}) == 6 for pieces in drawn)
    assert drawn[0].tolist() != drawn[1].tolist()


def stored(folder: Path, matrices: list[np.ndarray]) -> Frames:
    with closing(FrameWriter(folder)) as writer:
        for number, matrix in enumerate(matrices):
            writer.write(2 * number, matrix.astype(np.float32))
    return Frames(folder, matrices[0].shape[1])


def test_a_piece_of_stored_frames_is_that_piece_of_the_spliced_utterance(tmp_path: Path) -> None:
    """This holds at the ends of an utterance, where the outermost frame is repeated; zeros and PADDING follow a short
    piece."""
    generator = np.random.default_rng(1)
    matrices = [generator.standard_normal((length, 3)).astype(np.float16) for length in (30, 5, 12)]
    stored(tmp_path, matrices)
    save_states(tmp_path, [np.arange(len(matrix), dtype=np.int32) for matrix in matrices])
    frames = copy(AlignedFrames(tmp_path, 3))  # as a loading process gets it
    pieces = np.asarray([[0, 0, 10], [1, 0, 5], [2, 6, 12]])
    found, states = frames.cut(pieces, 2), frames.states(pieces, PADDING)
    for row, (utterance, first, end) in enumerate(pieces.tolist()):
        whole = spliced(torch.from_numpy(matrices[utterance].astype(np.float32)), 2).numpy()
        assert np.array_equal(found[row, : end - first], whole[first:end])
        assert not found[row, end - first :].any()
        assert states[row].tolist() == [*range(first, end), *[PADDING] * (10 - end + first)]
    assert frames.utterances.tolist() == [0, 2, 4]


def test_frames_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Both are refused by name: a file that is too short, and an alignment of other frames."""
    stored(tmp_path, [np.zeros((4, 2))])
    save_states(tmp_path, [np.zeros(3, np.int32)])
    with pytest.raises(DataError, match="3 frames are aligned"):
        AlignedFrames(tmp_path, 2)
    with pytest.raises(DataError, match="the frames cannot be read"):
        Frames(tmp_path, 3)


def test_the_loss_is_the_cross_entropy_of_the_frames_without_padding() -> None:
    """The loss equals torch's own, frame by frame."""
    model = build_model(model_config(name="blstm-hybrid", preset="tiny"), 4, 5, seed=1)
    features, lengths = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([6, 2])
    states = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 1, *[PADDING] * 4]])
    batch = FrameBatch(features, lengths, 0.08, ("a[0:6]", "b[0:2]"), states)
    log_posteriors, _ = model(features, lengths)
    singles = [
        torch.nn.functional.cross_entropy(log_posteriors[row, frame], states[row, frame])
        for row, length in enumerate(lengths.tolist())
        for frame in range(length)
    ]
    assert frame_loss(model, batch).item() == pytest.approx(torch.stack(singles).mean().item(), rel=1e-6)
    assert (batch.num_frames, batch.num_examples) == (8, 2)


def test_the_feed_forward_network_hears_one_frame_at_a_time() -> None:
    """Rectified dense layers, a bottleneck and a softmax, against the same sums in numpy in float64."""
    config = model_config(name="dnn-hybrid", preset="tiny", layers=2, hidden=7, bottleneck=3)
    model = build_model(config, 4, 5, seed=1)
    features = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
    log_posteriors, lengths = model(features, torch.tensor([6, 2]))
    weights = {name: value.double().numpy() for name, value in model.state_dict().items()}
    hidden = features.double().numpy()
    for layer in ("layers.0", "layers.1", "bottleneck", "output"):
        hidden = hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        hidden = np.maximum(hidden, 0.0) if layer.startswith("layers") else hidden
    expected = hidden - np.log(np.exp(hidden).sum(2, keepdims=True))
    np.testing.assert_allclose(log_posteriors.detach().numpy(), expected, atol=1e-5)
    assert lengths.tolist() == [6, 2]


def test_gradients_of_feed_forward_learners_are_computed_in_one_call() -> None:
    """`vmap` over stacked weights gives the gradients of one learner after another, on padded sub-sequences."""
    config = model_config(name="dnn-hybrid", preset="tiny")
    models = [build_model(config, 4, 5, seed=seed) for seed in (1, 2, 3)]
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 2, 6, 4, generator=generator)
    states = torch.randint(5, (3, 2, 6), generator=generator)
    states[0, 1, 2:] = PADDING
    lengths = torch.tensor([[6, 2], [6, 6], [6, 6]])

    def loss(model: dict[str, torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        network, (features, lengths, states) = _Functional(models[0], model), tensors
        return frame_loss(network, FrameBatch(features, lengths, 0.0, (), states))

    stacked = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models])
        for name, _ in models[0].named_parameters()
    }
    together = torch.func.vmap(torch.func.grad(loss))(stacked, features, lengths, states)
    for learner, model in enumerate(models):
        frame_loss(model, FrameBatch(features[learner], lengths[learner], 0.0, (), states[learner])).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(together[name][learner], parameter.grad, atol=1e-6, rtol=1e-4)
            assert parameter.grad.abs().max() > 0


class _Functional(torch.nn.Module):
    """A model with replaced weights."""

    def __init__(self, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._call = lambda *inputs: torch.func.functional_call(model, weights, inputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._call(*inputs)


def test_the_published_network_has_the_published_number_of_parameters() -> None:
    """6 bidirectional layers of 512 units per direction, 260 inputs, a bottleneck of 256 and 32,000 states have 43.15 M
    parameters."""
    model = build_model(model_config(name="blstm-hybrid", preset="ibm"), 260, 32_000, seed=1)
    layers = sum(2 * 4 * 512 * (inputs + 512 + 2) for inputs in (260, *[1024] * 5))
    assert count_parameters(model) == layers + 1025 * 256 + 257 * 32_000 == 43_154_944


def test_a_text_becomes_states_in_context_with_silences_that_may_be_skipped() -> None:
    """Contexts end at word boundaries."""
    speller = StateSpeller(CharacterTokenizer(" ab"), per_unit=2, context=1)
    states, optional = speller.text("ab a", "u")
    a, b, silence = 2, 3, (0, 0, 0, 0)
    assert states == [
        silence,
        *[(0, a, 0, b), (1, a, 0, b), (0, b, a, 0), (1, b, a, 0)],
        silence,
        *[(0, a, 0, 0), (1, a, 0, 0)],
        silence,
    ]
    assert [place for place, each in enumerate(optional) if each] == [0, 5, 8]
    with pytest.raises(DataError, match="'u' is empty"):
        speller.text(" ", "u")


def speech(
    transcripts: StateSequences, means: np.ndarray, generator: np.random.Generator
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Features of each utterance, 2 to 8 frames a state with noise around the state's mean; and the true positions."""
    matrices, truth = [], []
    for row in transcripts.rows:
        durations = generator.integers(2, 9, len(row))
        positions = np.repeat(np.arange(len(row)), durations)
        noise = generator.standard_normal((len(positions), means.shape[1]))
        matrices.append(means[row[positions]] + 0.3 * noise)
        truth.append(positions)
    return matrices, truth


@pytest.fixture
def spoken(tmp_path: Path) -> tuple[Frames, StateSequences, list[np.ndarray]]:
    """Made-up speech of a known alignment: 60 utterances of the words ab, ba and cab."""
    generator = np.random.default_rng(1)
    speller = StateSpeller(CharacterTokenizer(" abc"), per_unit=2, context=1)
    words = ["ab", "ba", "cab"]
    texts = [(str(n), " ".join(generator.choice(words, generator.integers(1, 4)))) for n in range(60)]
    transcripts = StateSequences.of(texts, speller)
    keys = sorted({state[:2] for state in transcripts.states})
    means = 2.0 * generator.standard_normal((len(keys), 6))
    of_state = np.stack([means[keys.index(state[:2])] for state in transcripts.states])
    matrices, truth = speech(transcripts, of_state, generator)
    return stored(tmp_path / "frames", matrices), transcripts, truth


def test_a_flat_start_divides_equally_and_rounds_find_the_true_boundaries(spoken) -> None:
    """Wrong frames fall from many to none; for other made-up speech, rounds may end in a worse local optimum."""
    frames, transcripts, truth = spoken
    flat = flat_start(transcripts, frames.lengths)
    counts = [np.bincount(path, minlength=len(row)) for path, row in zip(flat, transcripts.rows, strict=True)]
    assert all(each.max() - each.min() <= 1 for each in counts)

    def share_wrong(positions: list[np.ndarray]) -> float:
        return float(np.mean(np.concatenate(positions) != np.concatenate(truth)))

    aligned, changed = align_with_gaussians(frames, transcripts, flat, rounds=8)
    assert share_wrong(flat) > 0.2
    assert share_wrong(aligned) < 0.005
    assert changed < 0.005


def test_no_round_lowers_the_likelihood(spoken) -> None:
    """With the best Gaussians for an alignment, the likelihood falls with the logarithm of the determinant of their
    covariance."""
    frames, transcripts, _ = spoken
    keys = sorted({state[:2] for state in transcripts.states})
    labels = transcripts.labelled([keys.index(state[:2]) for state in transcripts.states])
    flat, determinants = flat_start(transcripts, frames.lengths), []
    for rounds in range(5):
        positions, _ = align_with_gaussians(frames, transcripts, flat, rounds)
        gaussians = Gaussians(len(keys), 5 * frames.num_bands)
        for each, path in enumerate(positions):
            own = torch.from_numpy(labels[each][path]).long()
            gaussians.add(torch.from_numpy(frames.features(each, SPLICE)), own)
        determinants.append(float(torch.linalg.slogdet(gaussians.within()).logabsdet))
    assert determinants == sorted(determinants, reverse=True)
    assert determinants[-1] < determinants[0] - 1.0


def test_a_flat_start_of_few_frames_leaves_silences_out() -> None:
    """Silences may be skipped; states of characters may not."""
    transcripts = StateSequences.of([("u", "ab")], StateSpeller(CharacterTokenizer("ab"), 1, 0))
    assert flat_start(transcripts, np.asarray([3]))[0].tolist() == [1, 1, 2]
    assert flat_start(transcripts, np.asarray([8]))[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_gaussians_scores_differ_as_the_densities_do() -> None:
    """The oracle is scipy's multivariate normal with the pooled covariance."""
    from scipy.stats import multivariate_normal

    generator = np.random.default_rng(2)
    labels = generator.integers(3, size=400)
    frames = generator.standard_normal((400, 3)) + 2.0 * np.eye(3)[labels]
    gaussians = Gaussians(3, 3)
    gaussians.add(torch.from_numpy(frames[:150]), torch.from_numpy(labels[:150]))
    gaussians.add(torch.from_numpy(frames[150:]), torch.from_numpy(labels[150:]))
    weights, biases = gaussians.linear()
    scores = frames[:5] @ weights.double().numpy() + biases.double().numpy()
    covariance = gaussians.within().numpy()
    densities = np.stack(
        [multivariate_normal(frames[labels == k].mean(0), covariance).logpdf(frames[:5]) for k in range(3)], 1
    )
    assert np.allclose(np.diff(scores, axis=1), np.diff(densities, axis=1), atol=1e-4)
    gaussians.counts[2], gaussians.sums[2] = 0.0, 0.0
    assert torch.equal(gaussians.means()[2], gaussians.sums.sum(0) / gaussians.counts.sum())  # a label without frames
    residuals = frames - np.stack([frames[labels == k].mean(0) for k in range(3)])[labels]
    pooled = residuals.T @ residuals / 400
    assert np.allclose(covariance - pooled, np.eye(3) * (covariance - pooled)[0, 0], atol=1e-9)


def test_a_ctc_path_becomes_positions_with_boundaries_halfway() -> None:
    """Tokens are emitted in encoder frames 2, 5 and 6 of 8, each of 2 feature frames; the space is silence."""
    labels, optional = ctc_row([1, 1, 2])
    assert labels.tolist() == [0, 1, 0, 1, 0, 2, 0]
    assert optional.tolist() == [True, False, False, False, True, False, True]
    path = np.asarray([0, 0, 1, 2, 2, 3, 5, 6], np.int32)
    positions = from_ctc(path, 2, 16, "a b", per_unit=2)
    assert positions.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6]


def statistics() -> Statistics:
    """Unit 1 after 1, 2, 3 or 4: after 1 and 2 it sounds like one thing, after 3 and 4 like another."""
    states = [(0, 1, before, 0) for before in (1, 2, 3, 4)]
    means = np.asarray([[0.0, 0.0], [0.1, 0.0], [5.0, 0.0], [5.1, 0.2]])
    counts = np.asarray([50.0, 40.0, 60.0, 30.0])
    return Statistics(states, counts, means * counts[:, None])


def likelihood(known: Statistics, labels: list[int]) -> float:
    """Twice the log-likelihood of all frames under a Gaussian for each label, up to a constant."""
    total = 0.0
    for label in set(labels):
        own = np.asarray(labels) == label
        total += float(np.square(known.sums[own].sum(0)).sum() / known.counts[own].sum())
    return total


def test_the_tree_makes_the_split_that_gains_most() -> None:
    """All questions about a single neighbour are tried one by one."""
    known = statistics()
    tree = grow_tree(known, number=2, min_frames=20)
    tied = [tree.tied(state) for state in known.states]
    singles = [[int(place == chosen) for place in range(4)] for chosen in range(4)]
    assert likelihood(known, tied) == pytest.approx(max(likelihood(known, labels) for labels in singles))


def test_a_question_may_be_about_units_that_sound_alike() -> None:
    """Units 1 and 2 have close means, and so do 3 and 4: a question about a neighbour therefore asks for one of the
    pair."""
    own = statistics()
    others = np.asarray([[0.1, 9.0], [9.0, 0.0], [9.1, 0.1]])
    own.sums[:] = own.sums[:, ::-1]
    known = Statistics(
        own.states + [(0, unit, 0, 0) for unit in (2, 3, 4)],
        np.concatenate([own.counts, np.full(3, 10.0)]),
        np.concatenate([own.sums, 10.0 * others]),
    )
    tree = grow_tree(known, number=5, min_frames=1)
    first, second, third, fourth = (tree.tied(state) for state in own.states)
    assert first == second != third == fourth


def test_a_tree_grows_to_its_limit_or_as_far_as_frames_allow() -> None:
    """The tree also answers for contexts that were never seen."""
    known = statistics()
    assert [grow_tree(known, number, 1).num_states for number in (2, 3, 4, 100)] == [2, 3, 4, 4]
    assert grow_tree(known, 100, 40).num_states == 3
    assert grow_tree(known, 100, 91).num_states == 1
    assert 0 <= grow_tree(known, 100, 1).tied((0, 1, 9, 9)) < 4
    with pytest.raises(DataError, match="token 7"):
        grow_tree(known, 100, 1).tied((0, 7, 1, 1))
    two_units = Statistics([(0, 1, 0, 0), (0, 2, 0, 0), (1, 2, 0, 0)], np.ones(3), np.eye(3))
    with pytest.raises(DataError, match=r"states\.number is 2, .* have 3 states of units"):
        grow_tree(two_units, 2, 1)


def test_frames_get_the_tied_state_of_their_position(spoken) -> None:
    """With as many states as there are without context, each of these has its own; with many more, each context
    does."""
    frames, transcripts, truth = spoken
    positions = [path.astype(np.int32) for path in truth]
    tree, tied = tie_states(frames, transcripts, positions, number=7, min_frames=1)
    assert tree.num_states == 7
    named = {
        (state, transcripts.states[each][:2])
        for own, row, path in zip(tied, transcripts.rows, positions, strict=True)
        for state, each in zip(own.tolist(), row[path].tolist(), strict=True)
    }
    assert len(named) == len({state for state, _ in named}) == len({key for _, key in named}) == 7
    larger, _ = tie_states(frames, transcripts, positions, number=1000, min_frames=1)
    assert larger.num_states == len(transcripts.states)


@pytest.fixture
def states() -> TiedStates:
    tree = grow_tree(Statistics([(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0)], np.ones(3), np.eye(3)), 3, 1)
    priors, decoding = np.log([0.5, 0.25, 0.25]).tolist(), DecodingConfig(word_penalty=2.0)
    own = {"per_unit": 1, "context": 1, "log_priors": priors, "words": ("a", "aa"), "decoding": decoding}
    return TiedStates(roots=tree.roots, nodes=tree.nodes, **own)


def test_saved_states_come_back_and_damaged_ones_are_refused(states: TiedStates, tmp_path: Path) -> None:
    """Damaged ones are refused by the file's name; a tree with a cycle would never end."""
    path = tmp_path / STATES_FILE
    path.write_text(states.model_dump_json(), encoding="utf-8")
    again = read_saved(TiedStates, path)
    assert again.means_the_same(states)
    assert again.log_priors == states.log_priors
    assert (again.words, again.decoding) == (states.words, states.decoding)
    whole = path.read_text(encoding="utf-8")
    for wrong in (
        whole[:50],
        whole.replace('"yes":2', '"yes":1'),
        whole.replace('"log_priors":[', '"log_priors":[0.0,'),
    ):
        assert wrong != whole
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"states\.json cannot be read"):
            read_saved(TiedStates, tmp_path / STATES_FILE)


def test_a_word_that_has_no_states_is_named(states: TiedStates) -> None:
    """A word has none because of an unknown character, or of one in no training text."""
    tokenizer = CharacterTokenizer("ab")
    check_words(states, tokenizer)
    for words in (("a", "ax"), ("ab",)):
        unknown = states.model_copy(update={"words": words})
        with pytest.raises(DataError, match=f"the word '{words[-1]}' cannot be recognised"):
            check_words(unknown, tokenizer)


def test_a_word_list_has_one_word_per_line(tmp_path: Path) -> None:
    """A missing or empty list and two words in a line are errors that name the list."""
    path = tmp_path / "words.txt"
    path.write_text("ONE\n\nTWO\nONE\n", encoding="utf-8")
    assert read_words(path) == ["ONE", "TWO"]
    for content in ("\n", "ONE TWO\n"):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"decoding\.word_list: .*words\.txt"):
            read_words(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_words(tmp_path / "none.txt")
