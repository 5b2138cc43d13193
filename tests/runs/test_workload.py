"""A speech workload is a pure function of the recipe and the ticket."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.errors import ConfigError, DataError
from starling.experiment.claim import claim_folder
from starling.speech.comparison import Remembered
from starling.speech.recipe import Recipe, check_recipe
from starling.speech.training.set_up import load_workload, set_up
from starling.speech.training.workload import SpeechWorkload
from starling.training.loading import Loader
from starling.workload import Ticket

Tree = dict[str, Any]


def ready(tree: Tree) -> tuple[Recipe, SpeechWorkload]:
    """A recipe that is set up, and its workload."""
    recipe = check_recipe(tree, "r.yaml")
    folder = claim_folder(recipe, print)
    set_up(recipe, folder, lambda line: None)
    return recipe, load_workload(recipe, folder)


@pytest.mark.wide
def test_every_process_loads_the_same_bits(tree: Tree) -> None:
    """A loading process gives the same batches as the learner itself would."""
    _, workload = ready(tree)
    chosen = [Ticket(0, 1, 1), Ticket(1, 1, 9)]

    def tickets() -> Iterator[Ticket]:
        while not loader.is_ahead:
            yield Ticket(0, 0, 0)
        yield from chosen

    with Loader(workload, num_workers=1) as loader:
        loaded = dict(loader.load(tickets()))
    for ticket in chosen:
        for mine, other in zip(workload.load(ticket), loaded[ticket], strict=True):
            assert torch.equal(mine.features, other.features)
            assert torch.equal(mine.tokens, other.tokens)


def test_models_are_the_same_at_every_call(tree: Tree) -> None:
    """All learners start with the same weights."""
    _, workload = ready(tree)
    torch.manual_seed(1)
    first = workload.make_model().state_dict()
    torch.manual_seed(2)
    second = workload.make_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.wide
@pytest.mark.parametrize("learners", [1, 3, 6])
def test_an_epoch_holds_every_utterance_once_for_any_learners(tree: Tree, learners: int) -> None:
    """The mini-batches are the same for any number of learners and any strategy."""
    _, workload = ready({**tree, "learners": learners, "strategy": "allreduce"})
    _, others = ready({**tree, "learners": 2, "strategy": "adpsgd", "name": "others"})
    for epoch in (0, 3, 1):
        batches = workload.num_batches(epoch)
        ids = [tuple(part.ids for part in workload.load(Ticket(epoch, index, 0))) for index in range(batches)]
        assert ids == [tuple(part.ids for part in others.load(Ticket(epoch, k, 0))) for k in range(batches)]
        assert sorted(each for batch in ids for part in batch for each in part) == sorted(
            f"song-{number}" for number in range(24)
        )


def test_epochs_differ_in_order_and_augmentation(tree: Tree) -> None:
    """The same batch number has different utterances, and the same utterance is played at a different speed."""
    _, workload = ready(tree)
    batches = [[workload.load(Ticket(epoch, index, 0))[0] for index in range(4)] for epoch in (0, 1)]
    assert batches[0][0].ids != batches[1][0].ids
    frames = [
        {name: int(length) for batch in epoch for name, length in zip(batch.ids, batch.lengths, strict=True)}
        for epoch in batches
    ]
    assert any(frames[0][name] != frames[1][name] for name in frames[0].keys() & frames[1].keys())


@pytest.mark.parametrize("partition", ["identical", "domain"])
def test_the_planned_size_of_a_mini_batch_is_that_of_what_is_loaded(tree: Tree, partition: str) -> None:
    """It counts utterances, and frames without padding, except for the last ones of each utterance; it is known before
    loading."""
    tree["augment"] = {"speed": [1.0]}
    tree["batches"] |= {"accumulate": 2}
    if partition == "domain":
        tree["mixture"] = {"domains": {"new": {"sets": "test"}, "old": {"sets": "train"}}}
        tree["partition"] = partition
    _, workload = ready(tree)
    remembered, sizes = Remembered(workload, {}), set()
    for step in range(4):
        ticket = Ticket(0, step % workload.num_batches(0), step, step % workload.num_parts)
        loaded = workload.load(ticket)
        num_utterances = sum(part.num_examples for part in loaded)
        num_frames = sum(part.num_frames for part in loaded)
        assert workload.planned_size(ticket, "utterances") == num_utterances
        assert remembered.planned_size(ticket, "utterances") == num_utterances
        assert [remembered.weight(part) for part in loaded] == [len(part.tokens) for part in loaded]
        assert workload.planned_size(ticket, "frames") == pytest.approx(num_frames, abs=3 * num_utterances)
        sizes.add(num_frames)
    assert len(sizes) > 1


def test_more_learners_than_utterances_are_refused_before_they_start(tree: Tree) -> None:
    """Both numbers are named."""
    tree["learners"] = 25
    with pytest.raises(DataError, match="24 utterances cannot be shared by 25 learners"):
        ready(tree)


def test_a_character_outside_the_alphabet_is_found_before_training(tree: Tree) -> None:
    """The error has the utterance and the character."""
    tree["tokens"] = {"alphabet": "DOREMI "}
    with pytest.raises(DataError, match=r"'song-\d+' contains the character '[FA]'"):
        ready(tree)


def test_utterances_too_short_for_ctc_are_an_error_or_left_out_and_listed(tree: Tree) -> None:
    """The recipe's filter decides; more than it allows is an error in any case."""
    tree["model"]["subsampling"] = 4
    tree["augment"] = {"speed": [2.0]}
    tree["features"] = {"frame_shift": 0.02}
    tree["data"]["filter"] = {"on_bad": "fail"}
    such = r"at speed 2, such as \S+ \(\d+ frames, \d+ needed\).*subsampling \(now 4\).*on_bad=skip"
    with pytest.raises(DataError, match=f"utterances have too few encoder frames for CTC {such}"):
        ready(tree)
    del tree["data"]["filter"]
    with pytest.raises(DataError, match=r"max_skipped allows 1\.00%"):
        ready(tree)
    tree["data"]["filter"] = {"max_skipped": 0.9}
    recipe, workload = ready(tree)
    listed = [line.split("\t")[0] for line in (recipe.folder / "too_short.tsv").read_text().splitlines()[1:]]
    assert 0 < len(listed) < 24
    ids = [
        each
        for index in range(workload.num_batches(0))
        for part in workload.load(Ticket(0, index, 0))
        for each in part.ids
    ]
    assert sorted([*ids, *listed]) == sorted(f"song-{number}" for number in range(24))


def test_the_set_up_is_reported(tree: Tree) -> None:
    """The messages include sets with their hours, parameters, and how much audio all learners take at a time."""
    recipe = check_recipe(tree, "r.yaml")
    lines: list[str] = []
    set_up(recipe, claim_folder(recipe, lines.append), lines.append)
    text = "\n".join(lines)
    assert "train: 24 utterances" in text
    assert "2 learners take 10 s at a time" in text


def ids_of_an_epoch(workload: SpeechWorkload, epoch: int) -> list[str]:
    """The ids of all utterances in its mini-batches, sorted."""
    indices = range(workload.num_batches(epoch))
    return sorted(each for index in indices for part in workload.load(Ticket(epoch, index, 0)) for each in part.ids)


def test_a_mixture_is_trained_on_instead_of_the_training_set(tree: Tree, tmp_path: Path) -> None:
    """It has sets of the corpus and folders that were prepared elsewhere; in proportion, each utterance occurs once per
    epoch."""
    shutil.copytree(ready(tree)[0].data.set_folder("train"), tmp_path / "elsewhere")
    domains = {"new": {"sets": ["test"]}, "old": {"sets": [str(tmp_path / "elsewhere")]}}
    _, workload = ready({**tree, "mixture": {"domains": domains}})
    expected = [f"old/song-{number}" for number in range(24)] + [f"new/song-{number}" for number in range(24, 30)]
    for epoch in (0, 2):
        assert ids_of_an_epoch(workload, epoch) == sorted(expected)


def test_the_passes_over_each_domain_are_reported(tree: Tree) -> None:
    """6 and 24 utterances in equal shares are 2.5 passes and 0.625."""
    mixture = {"domains": {"new": {"sets": "test"}, "old": {"sets": "train"}}, "by": "utterances", "temperature": 0}
    recipe = check_recipe({**tree, "mixture": mixture}, "r.yaml")
    lines: list[str] = []
    set_up(recipe, claim_folder(recipe, lines.append), lines.append)
    assert "passes over domains in an epoch: new 2.5, old 0.625" in lines


def test_a_mixture_is_of_the_recipes_sampling_rate(tree: Tree, tmp_path: Path) -> None:
    """Folders may have been prepared at any rate."""
    shutil.copytree(ready(tree)[0].data.set_folder("train"), tmp_path / "elsewhere")
    tree["mixture"] = {"domains": {"old": {"sets": str(tmp_path / "elsewhere")}}}
    tree["data"] |= {"sampling_rate": 16000, "folder": str(tmp_path / "wide")}
    with pytest.raises(DataError, match=r"mixture are at 8000 Hz, and data\.sampling_rate is 16000"):
        ready(tree)


def test_learners_of_divided_data_see_only_their_own_part(tree: Tree) -> None:
    """Part 0 is one domain and part 1 the other; the same ticket loads the same bits again."""
    tree["mixture"] = {"domains": {"new": {"sets": "test"}, "old": {"sets": "train"}}}
    lines: list[str] = []
    recipe = check_recipe({**tree, "partition": "domain"}, "r.yaml")
    folder = claim_folder(recipe, print)
    set_up(recipe, folder, lines.append)
    assert any("its own part of the data: 0.00 to 0.01 h, with 1 to 1 of 2 domains" in line for line in lines)
    workload = load_workload(recipe, folder)
    assert workload.num_parts == Remembered(workload, {}).num_parts == 2
    seen: list[set[str]] = [set(), set()]
    for step in range(40):
        for part in (0, 1):
            (batch,) = workload.load(Ticket(0, 0, step, part))
            seen[part] |= set(batch.ids)
            assert len(batch.ids) == len(set(batch.ids))
    assert sorted(len(each) for each in seen) == [6, 24]
    assert {name.partition("/")[0] for name in min(seen, key=len)} == {"new"}
    first, again = (workload.load(Ticket(1, 2, 7, 1))[0] for _ in range(2))
    assert first.ids == again.ids and torch.equal(first.features, again.features)


def test_data_that_cannot_be_divided_among_the_learners_are_refused(tree: Tree) -> None:
    """There are one singer and two learners."""
    with pytest.raises(ConfigError, match="1 speakers cannot be divided among 2 learners"):
        ready({**tree, "partition": "speaker"})


def test_all_learners_share_one_stream_unless_data_are_divided(tree: Tree) -> None:
    """There is then one part, and it does not matter who takes a ticket."""
    _, workload = ready(tree)
    assert workload.num_parts == 1
    assert workload.load(Ticket(0, 1, 1, 0))[0].ids == workload.load(Ticket(0, 1, 1, 5))[0].ids
