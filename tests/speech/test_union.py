"""Several prepared sets as one: the same utterances, with their own numbers and names."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from tones import RATE

from benchmarks.speech_writer import SpeechWriter
from starling.errors import DataError
from starling.speech.store import Member, SpeechSet, SpeechSets


def written(folder: Path, count: int, speakers: int = 2, rate: int = RATE, shard_size: int = 3) -> SpeechSet:
    """A set of short noise; ids are the same in all sets."""
    generator = np.random.default_rng(len(folder.name) + count)
    with SpeechWriter(folder, folder.name, rate, shard_size) as writer:
        for number in range(count):
            audio = generator.uniform(-0.1, 0.1, 400 + number).astype(np.float32)
            writer.write(f"utt-{number}", f"speaker-{number % speakers}", f"TEXT {folder.name} {number}", audio)
        writer.finish(digest=folder.name)
    return SpeechSet.open(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sets of 7, 4 and 5 utterances."""
    folder = tmp_path_factory.mktemp("sets")
    for name, count in (("calls", 7), ("talks", 4), ("more", 5)):
        written(folder / name, count)
    return [folder / name for name in ("calls", "talks", "more")]


@pytest.fixture
def union(folders: list[Path]) -> SpeechSets:
    """One domain of one set, and one of two."""
    return SpeechSets([Member("calls", folders[0]), Member("talks", folders[1]), Member("talks", folders[2])])


def test_each_utterance_is_that_of_its_set(union: SpeechSets, folders: list[Path]) -> None:
    """Id, text, duration and audio agree, one by one and several at a time, in any order and repeated."""
    alone = [(SpeechSet.open(folder), number) for folder in folders for number in range(len(SpeechSet.open(folder)))]
    assert len(union) == len(alone) == 16
    for index, (each, number) in enumerate(alone):
        assert union.text(index) == each.text(number)
        assert union.durations[index] == each.durations[number]
    asked = [*range(16), 15, 0, 9, 15, 3]
    for index, utterance in zip(asked, union.read(asked), strict=True):
        each, number = alone[index]
        assert (utterance.id, utterance.text) == (union.id(index), each.text(number))
        assert not isinstance(utterance.samples, DataError)
        assert np.array_equal(utterance.samples, each.audio(number))


def test_ids_are_unique_and_say_the_domain(union: SpeechSets) -> None:
    """Every set of this corpus has an utt-0."""
    ids = [union.id(index) for index in range(len(union))]
    assert len(set(ids)) == 16
    assert (ids[0], ids[7], ids[11]) == ("calls/utt-0", "talks.1/utt-0", "talks.2/utt-0")


def test_a_single_set_is_unchanged(folders: list[Path]) -> None:
    """Its ids stay, and so do its arrays, which remain on disk."""
    union = SpeechSets([Member("calls", folders[0])])
    assert [union.id(index) for index in range(3)] == ["utt-0", "utt-1", "utt-2"]
    assert union.durations is union.sets[0].durations


def test_shards_and_domains_are_numbered_consecutively(union: SpeechSets) -> None:
    """Numbers ascend, and no two sets share one."""
    assert union.shards.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 6, 6]
    assert union.domain_bounds == [0, 7, 16]
    assert union.labels("domain").tolist() == [0] * 7 + [1] * 9


def test_a_name_in_one_domain_is_one_speaker(union: SpeechSets) -> None:
    """In a different domain it is a different speaker."""
    labels = union.labels("speaker")
    names = [
        (member.domain, each.speaker(number))
        for member, each in zip(union.members, union.sets, strict=True)
        for number in range(len(each))
    ]
    assert len(set(labels.tolist())) == len(set(names)) == 4
    assert len(set(zip(labels.tolist(), names, strict=True))) == 4


def test_selected_utterances_form_a_separate_set(union: SpeechSets) -> None:
    """This holds when chosen repeatedly, and in a copy in another process, for everything about them, under new
    numbers."""
    chosen = union.only(np.array([1, 5, 6, 8, 12, 15])).only(np.array([0, 2, 3, 5]))
    for each in (chosen, pickle.loads(pickle.dumps(chosen))):  # noqa: S301 - our own bytes
        assert len(each) == 4 and each.numbers.tolist() == [1, 6, 8, 15]
        assert [each.id(index) for index in range(4)] == [union.id(number) for number in (1, 6, 8, 15)]
        assert each.durations.tolist() == union.durations[[1, 6, 8, 15]].tolist()
        assert (each.shards.tolist(), each.domain_bounds) == ([0, 2, 3, 6], [0, 2, 4])
        assert each.labels("speaker").tolist() == union.labels("speaker")[[1, 6, 8, 15]].tolist()
        assert [stored.text for stored in each.read([3, 0])] == [union.text(15), union.text(1)]
        with pytest.raises(IndexError, match=r"utterance 4 of .*, which has 4"):
            each.id(4)


def test_all_utterances_are_the_set_itself_and_a_repeated_one_is_not(union: SpeechSets) -> None:
    """Frames at two speeds name each utterance twice: as many numbers as utterances need not be all utterances."""
    assert union.only(np.arange(16)) is union
    assert union.only(np.repeat(np.arange(8), 2)).numbers.tolist() == np.repeat(np.arange(8), 2).tolist()


def test_a_copy_carries_no_data(union: SpeechSets) -> None:
    """Loading processes open the sets themselves."""
    sent = pickle.dumps(union)
    assert len(sent) < 2000
    assert pickle.loads(sent).id(11) == "talks.2/utt-0"  # noqa: S301 - our own bytes


def test_sets_of_different_sampling_rates_are_refused(folders: list[Path], tmp_path: Path) -> None:
    """The error has both rates and places."""
    written(tmp_path / "wide", 3, rate=16000)
    with pytest.raises(DataError, match=rf"calls at {RATE} Hz, .*wide at 16000 Hz"):
        SpeechSets([Member("calls", folders[0]), Member("wide", tmp_path / "wide")])


def test_a_repeated_set_is_refused(folders: list[Path]) -> None:
    """The path to its folder does not matter."""
    again = folders[0].parent / "talks" / ".." / "calls"
    with pytest.raises(DataError, match="in the mixture twice"):
        SpeechSets([Member("a", folders[0]), Member("b", again)])


def test_numbers_outside_the_union_are_refused(union: SpeechSets) -> None:
    """Numbers below and above its range are tested."""
    for index in (-1, 16):
        with pytest.raises(IndexError, match=rf"utterance {index} of calls \+ talks \+ more, which has 16"):
            union.text(index)
