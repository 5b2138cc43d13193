"""Frame-level training, from a corpus to recognised words."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from rich.console import Console

from starling.comparing.compare import run_comparison
from starling.errors import CheckpointError, ConfigError, DataError
from starling.experiment.claim import claim_folder
from starling.experiment.folder import ExperimentFolder
from starling.experiment.record import audit
from starling.experiment.simulate import simulate_recipe
from starling.recipe.run import dump_recipe
from starling.speech.commands.evaluate import evaluate
from starling.speech.comparison import check_comparison
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.recogniser import Recogniser
from starling.speech.task import SPEECH
from starling.speech.trained import load_recogniser
from starling.speech.training import frames
from starling.speech.training.set_up import load_workload, set_up
from starling.speech.training.workload import PADDING, FrameWorkload
from starling.speech.transcribing.files import transcribe_files
from starling.strategies import STRATEGIES
from starling.training.loading import Loader
from starling.workload import Ticket
from tests.speech.tones import RATE, sing

Tree = dict[str, Any]
OPTIONS: dict[str, dict[str, object]] = {"hadpsgd": {"per_node": 2}, "parameter-server": {}, "delayed": {"delay": 1}}


@pytest.fixture
def tree(tree: Tree) -> Tree:
    """A recipe that trains a hybrid model on the songs in seconds."""
    del tree["batches"]
    return tree | {
        "loss": "frames",
        "features": {"splice": 2},
        "sequences": {"frames": 21, "batch": 16},
        "states": {"number": 30, "per_unit": 2, "min_frames": 5},
        "alignment": {"rounds": 3},
        "model": {"name": "blstm-hybrid", "preset": "tiny"},
        "optimizer": {"lr": 0.02},
    }


def ready(tree: Tree) -> tuple[Recipe, FrameWorkload, list[str]]:
    """A recipe that is set up, its workload, and the messages."""
    recipe = check_recipe(tree, "r.yaml")
    folder = claim_folder(recipe, print)
    lines: list[str] = []
    set_up(recipe, folder, lines.append)
    workload = load_workload(recipe, folder)
    assert isinstance(workload, FrameWorkload)
    return recipe, workload, lines


def simulated(tree: Tree) -> tuple[Path, list[str]]:
    """The experiment of a simulation, and its results."""
    recipe = check_recipe(tree, "r.yaml")
    lines: list[str] = []
    simulate_recipe(SPEECH, recipe, lines.append, Console(file=io.StringIO()))
    return recipe.exp / f"{recipe.name}-virtual", lines


@pytest.fixture(scope="module")
def trained(songs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that learned the songs on the virtual engine."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = {"kind": "tsv", "path": str(songs), "sets": {"train": {"split": "train"}, "test": {"split": "test"}}}
    data = {"folder": str(folder / "data"), "corpus": corpus, "sampling_rate": RATE, "valid": None}
    experiment, _ = simulated(
        {
            "name": "hybrid",
            "exp": str(folder / "exp"),
            "data": data,
            "learners": 2,
            "budget": {"epochs": 8},
            "loss": "frames",
            "features": {"splice": 2},
            "sequences": {"batch": 8},
            "alignment": {"rounds": 6},
            "states": {"number": 30, "per_unit": 2, "min_frames": 5},
            "model": {"name": "blstm-hybrid", "preset": "tiny"},
            "optimizer": {"lr": 0.02},
        }
    )
    return experiment


@pytest.mark.wide
def test_the_whole_chain_recognises_songs_that_it_never_heard(trained: Path, tmp_path: Path) -> None:
    """Alignment, tied states, training and search work together: WER is at most 5 %, and a file is transcribed."""
    lines: list[str] = []
    evaluate(trained, None, lines.append, Console(file=io.StringIO()))
    assert lines[0] == "test"
    assert float(lines[1].split()[1]) <= 5.0
    soundfile.write(tmp_path / "a.wav", sing(["DO", "FA", "MI"], np.random.default_rng(9)), RATE)
    transcribe_files(trained, [tmp_path / "a.wav"], lines.append)
    with pytest.raises(ConfigError, match="the beam search is for CTC, but it was trained with frames"):
        transcribe_files(trained, [tmp_path / "a.wav"], lines.append, with_beam=True)
    assert lines[-1] == f"{tmp_path / 'a.wav'}\tDO FA MI"


@pytest.mark.wide
def test_the_audit_counts_sub_sequences(trained: Path) -> None:
    """Each was seen exactly once in each epoch."""
    said: list[str] = []
    audit(trained, said.append, Console(file=io.StringIO(), width=200))
    assert "8 of 8 complete epochs saw each of " in said[-1]
    assert said[-1].endswith(" sub-sequences exactly once")


def share_right(workload: FrameWorkload) -> float:
    """The share of frames for which the alignment knows whether there is a gap: 0.08 s, then 0.25 s of each word."""
    frames, states = workload.plan.frames, Recogniser.load(workload.initial).states
    assert states is not None
    silence = states.tied((0, 0, 0, 0))
    right = []
    for utterance, length in enumerate(frames.lengths.tolist()):
        is_gap = (np.arange(length) + 0.5) * 0.01 * frames.speeds[utterance] % 0.33 < 0.08
        found = frames.states(np.asarray([[utterance, 0, length]]), PADDING)[0] == silence
        right.append(found == is_gap)
    return float(np.concatenate(right).mean())


def test_a_flat_start_and_a_model_of_ours_find_words_and_gaps(tree: Tree, trained: Path) -> None:
    """Words and gaps of these songs have known lengths; a model of tied states aligns by its scaled likelihoods."""
    _, flat, lines = ready(tree)
    assert any("aligned from a flat start, 3 rounds" in line for line in lines)
    _, own, lines = ready(tree | {"name": "again", "alignment": {"experiment": str(trained)}})
    assert any("aligned from the tied states of" in line for line in lines)
    assert min(share_right(flat), share_right(own)) > 0.9


@pytest.mark.wide
def test_rounds_repair_the_alignment_of_a_ctc_model_that_has_learned_little(tree: Tree) -> None:
    """The model emits tokens in the right order, but not yet in the right places."""
    of_frames = ("sequences", "states", "alignment", "features", "loss")
    ctc = {key: value for key, value in tree.items() if key not in of_frames} | {
        "name": "ctc",
        "model": {"preset": "tiny"},
        "batches": {"max_duration": 5},
        "budget": {"epochs": 8},
        "optimizer": {"lr": 0.01},
    }
    source, _ = simulated(ctc)
    shares = []
    for rounds in (0, 5):
        aligned = {"name": f"by-ctc-{rounds}", "alignment": {"experiment": str(source), "rounds": rounds}}
        _, by_ctc, lines = ready(tree | aligned)
        assert any(f"aligned from the CTC model of {source}" in line for line in lines)
        shares.append(share_right(by_ctc))
    assert shares[1] > shares[0] + 0.1


@pytest.mark.wide
def test_mini_batches_are_a_function_only_of_the_ticket(tree: Tree) -> None:
    """A loading process gives the same bits, for any number of learners; each frame occurs once in an epoch."""
    _, workload, _ = ready(tree)
    _, others, _ = ready(tree | {"name": "others", "learners": 3, "strategy": "adpsgd"})
    tickets = [Ticket(1, index, index) for index in range(workload.num_batches(1))]

    def drawn() -> Iterator[Ticket]:
        while not loader.is_ahead:
            yield Ticket(0, 0, 0)
        yield from tickets

    with Loader(workload, num_workers=1) as loader:
        loaded = dict(loader.load(drawn()))
    frames = 0
    for ticket in tickets:
        (mine,), (theirs,), (another,) = workload.load(ticket), loaded[ticket], others.load(ticket)
        for name in ("features", "lengths", "states"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name))
            assert torch.equal(getattr(mine, name), getattr(another, name))
        assert mine.ids == theirs.ids == tuple(workload.plan.ids(ticket))
        assert workload.planned_size(ticket, "frames") == mine.num_frames == workload.weight(mine)
        assert workload.planned_size(ticket, "utterances") == mine.num_examples
        frames += mine.num_frames
    assert frames == workload.plan.frames.ends[-1]


@pytest.mark.wide
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_frames(tree: Tree, name: str) -> None:
    """Each of four learners gets a mini-batch, and the weights change."""
    given = {"learners": 4, "budget": {"steps": 4}, "data": tree["data"] | {"test": []}}
    experiment, lines = simulated(tree | given | {"strategy": {"name": name, **OPTIONS.get(name, {})}})
    assert lines[-1].startswith("event hash")
    trained = load_recogniser(experiment).model.state_dict()
    initial = Recogniser.load(experiment / "initial").model.state_dict()
    assert any(not torch.equal(trained[each], initial[each]) for each in initial)


def test_each_speed_is_stored_aligned_and_counted(tree: Tree, trained: Path) -> None:
    """This holds for a flat start, and for a model that hears the same speeds; names include the speed."""
    slow, fast = 0.96, 1.04  # words are notes here
    change: Tree = {"augment": {"speed": [fast, slow]}}
    recipe, workload, _ = ready(tree | {"name": "speeds"} | change)
    _, aligned, _ = ready(tree | {"name": "aligned", "alignment": {"experiment": str(trained)}} | change)
    frames = workload.plan.frames
    assert frames.speeds.tolist() == [slow, fast] * (len(frames) // 2)
    assert (frames.utterances[::2] == frames.utterances[1::2]).all()
    assert frames.lengths[::2] / frames.lengths[1::2] == pytest.approx(fast / slow, rel=0.02)
    assert aligned.plan.frames.lengths.tolist() == frames.lengths.tolist()
    for each in (workload, aligned):
        assert share_right(each) > 0.9
    names = [name for index in range(workload.num_batches(0)) for name in workload.plan.ids(Ticket(0, index, index))]
    assert len(set(names)) == len(names) == workload.plan.num_examples
    assert {name.rpartition("[")[0].rpartition("@")[2] for name in names} == {"0.96", "1.04"}
    assert recipe.augment.spec_augment is None


def test_two_simulations_are_the_same(tree: Tree) -> None:
    """One seed has one event hash, whose events hold the bits of every loss."""
    tree |= {"learners": 3, "strategy": "adpsgd", "budget": {"steps": 6}, "data": tree["data"] | {"test": []}}
    assert simulated(tree)[1] == simulated(tree)[1]


def test_a_comparison_of_models_aligns_once(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model and each seed has its own weights, and the labels of the one alignment."""
    aligned: list[str] = []

    def counted(recipe: Recipe, *given: Any) -> Any:
        aligned.append(recipe.name)
        return align(recipe, *given)

    align = frames._align
    monkeypatch.setattr(frames, "_align", counted)
    settings = {"blstm": {}, "dnn": {"model": {"name": "dnn-hybrid"}}}
    section = {"arms": {"one": {"strategy": "allreduce", "learners": 1}}, "settings": settings, "seeds": [1, 2]}
    given = {"budget": {"steps": 2}, "compare": section, "data": tree["data"] | {"valid": "test"}}
    run_comparison(check_comparison(tree | given, "c.yaml"), print, Console(file=io.StringIO()))
    assert len(aligned) == 1
    folders = [ExperimentFolder(each) for each in (Path(tree["exp"]) / tree["name"] / "ready").iterdir()]
    assert len(folders) == 4
    assert len({next(each.initial.glob("*.safetensors")).read_bytes() for each in folders}) == 4
    for path in folders[0].frames.iterdir():
        assert {(each.frames / path.name).read_bytes() for each in folders} == {path.read_bytes()}


def test_a_partition_gives_each_learner_its_own_utterances(tree: Tree) -> None:
    """Every mini-batch of a part is drawn from that part."""
    _, workload, _ = ready(tree | {"learners": 2, "partition": {"kind": "dirichlet", "alpha": 100.0}})
    utterances = [
        {name.split("[")[0] for step in range(12) for name in workload.plan.ids(Ticket(0, 0, step, part))}
        for part in (0, 1)
    ]
    assert utterances[0] and utterances[1]
    assert not utterances[0] & utterances[1]


def test_fewer_contexts_than_states_are_reported(tree: Tree) -> None:
    """The message has both numbers."""
    _, workload, lines = ready(tree | {"states": {"number": 32_000, "per_unit": 2, "min_frames": 1}})
    (line,) = [line for line in lines if "tied states, and states.number is 32000" in line]
    assert "the training texts have " in line
    states = Recogniser.load(workload.initial).states
    assert states is not None and line.startswith(f"{states.num_states} tied states")
    assert any("mini-batches of up to 16 sub-sequences of 21 frames" in line for line in lines)


def test_utterances_with_fewer_frames_than_states_are_an_error_or_left_out(tree: Tree) -> None:
    """The filter decides; they are listed."""
    tree["states"] |= {"per_unit": 10}
    tree["features"] |= {"frame_shift": 0.04}
    tree["data"] |= {"filter": {"on_bad": "fail"}}
    with pytest.raises(DataError, match=r"fewer frames than states, such as song-.*lower states\.per_unit"):
        ready(tree)
    tree["data"] |= {"filter": {"max_skipped": 1.0}}
    recipe = check_recipe(tree, "r.yaml")
    with pytest.raises(DataError, match="there are no frames to train on"):
        set_up(recipe, claim_folder(recipe, print), lambda line: None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"loss": "ctc", "features": {}, "model": {}}, r"sequences: only for loss: frames"),
        ({"loss": "ctc", "sequences": None, "states": None, "model": {}}, r"features\.splice: only for loss: frames"),
        ({"tokens": {"kind": "sentencepiece"}}, r"tokens\.kind: loss: frames has states of characters"),
        ({"model": {"preset": "tiny"}}, r"model\.subsampling: loss: frames has an output for each frame, .* not 4"),
        ({"model": {"name": "blstm-hybrid", "subsampling": 2}}, r"model\.subsampling: input should be 1, got 2"),
        ({"model": {"name": "dnn-hybrid", "subsampling": 2}}, r"model\.subsampling: input should be 1, got 2"),
        ({"augment": {"noise_snr": [5, 10]}}, r"augment: loss: frames trains on features that are stored once"),
        ({"batches": {"max_duration": 5}}, r"batches\.max_duration: groups whole utterances"),
        ({"states": {"nummber": 5}}, r"states\.nummber: unknown key; did you mean states\.number"),
        ({"alignment": {"rounds": -1}}, r"alignment\.rounds: "),
        ({"decoding": {"words": "many"}}, r"decoding\.words: "),
        ({"loss": "frame"}, r"loss: "),
    ],
)
def test_a_key_that_does_not_fit_the_loss_is_one_problem(tree: Tree, change: Tree, problem: str) -> None:
    """The message says what to do."""
    with pytest.raises(ConfigError, match=problem):
        check_recipe(tree | change, "r.yaml")


def test_a_resolved_recipe_is_the_same_recipe(tree: Tree) -> None:
    """Sections that were left out are written out with their defaults."""
    import yaml

    recipe = check_recipe({key: value for key, value in tree.items() if key not in ("sequences", "states")}, "r.yaml")
    resolved = yaml.safe_load(dump_recipe(recipe))
    assert resolved["sequences"] == {"frames": 21, "batch": 128}
    assert check_recipe(resolved, "dumped") == recipe


def test_a_model_that_cannot_align_is_refused_by_name(tree: Tree, trained: Path) -> None:
    """Its states per character or its rate differ, or it is not a model at all."""
    aligned = {"alignment": {"experiment": str(trained)}}
    with pytest.raises(ConfigError, match=r"has 2 states per character, but states\.per_unit is 3"):
        ready(tree | aligned | {"states": {"per_unit": 3}})
    with pytest.raises(ConfigError, match=r"has a frame every 0\.01 s, and features\.frame_shift is 0\.02"):
        ready(tree | aligned | {"features": {"frame_shift": 0.02}})
    with pytest.raises(CheckpointError, match="nowhere"):
        ready(tree | {"alignment": {"experiment": str(trained.parent / "nowhere")}})


def test_words_that_were_not_trained_can_be_recognised(tree: Tree, tmp_path: Path) -> None:
    """They come from a list; the tree has states for contexts that it never saw. An unknown character is named."""
    (tmp_path / "words.txt").write_text("DO\nREDO\nMIFA\n", encoding="utf-8")
    decoding = {"word_list": str(tmp_path / "words.txt"), "words": "one"}
    experiment, _ = simulated(tree | {"budget": {"steps": 2}, "decoding": decoding})
    recogniser = load_recogniser(experiment)
    assert recogniser.states is not None and recogniser.states.words == ("DO", "REDO", "MIFA")
    text = recogniser.transcribe(sing(["DO"], np.random.default_rng(1)), RATE)
    assert text in ("DO", "REDO", "MIFA")
    (tmp_path / "words.txt").write_text("DO\nXY\n", encoding="utf-8")
    with pytest.raises(DataError, match="the word 'XY' cannot be recognised"):
        ready(tree | {"name": "wrong", "decoding": decoding})
