"""Preparation: what is kept, what is refused, and that nothing half-written looks finished."""

import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpus_builders import RATE, replace_row, sound, write_table, write_wav
from pydantic import ValidationError

from starling.errors import ConfigError, DataError
from starling.recipe import read_recipe
from starling.speech.audio import read_audio
from starling.speech.corpora.synthetic import LANGUAGES
from starling.speech.data import DataConfig, set_digest
from starling.speech.prepare import Summary, describe, prepare
from starling.speech.store import SpeechSet
from starling.speech.usable import resampled

_RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def _config(folder: Path, table: Path, **settings: object) -> DataConfig:
    return DataConfig.model_validate(
        {
            "folder": folder,
            "corpus": {
                "kind": "tsv",
                "path": table,
                "sets": {"train": {"split": "train"}, "test": {"split": "test"}},
            },
            "sampling_rate": RATE,
            "valid": None,
            **settings,
        }
    )


def _state(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def _leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_every_utterance_of_a_set_is_written_in_order(tmp_path: Path) -> None:
    """Ids, texts (upper case by default, single spaces), speakers and 16-bit samples are those of the corpus."""
    table = write_table(tmp_path / "corpus")
    replace_row(table, "u0", text="  two\u00a0 words ")
    summary = prepare(_config(tmp_path / "data", table))
    train, test = (SpeechSet.open(tmp_path / "data" / name) for name in ("train", "test"))
    assert [train.id(i) for i in range(len(train))] == ["u0", "u1", "u3", "u4", "u6", "u7", "u9", "u10"]
    assert [test.id(i) for i in range(len(test))] == ["u2", "u5", "u8", "u11"]
    assert (train.text(0), train.text(1), train.speaker(1)) == ("TWO WORDS", "WORD1", "s1")
    np.testing.assert_array_equal(test.audio(0) * 32768, sound(0.42, seed=2))
    assert [(each.name, each.utterances, each.speakers, each.dropped) for each in summary.sets] == [
        ("train", 8, 2, 0),
        ("test", 4, 2, 0),
    ]
    assert summary.sets[0].seconds == pytest.approx(sum(train.durations))
    assert re.search(r"train: 8 utterances, \d\.\d s, 2 speakers, stored at 8000 Hz, written", describe(summary))


def test_a_second_call_does_nothing(tmp_path: Path) -> None:
    """No file changes, no utterance is reported, and the corpus need not exist any more."""
    table = write_table(tmp_path / "corpus")
    config = _config(tmp_path / "data", table)
    first = prepare(config)
    before = _state(tmp_path / "data")
    table.unlink()
    calls: list[object] = []
    second = prepare(config, lambda *call: calls.append(call))
    assert calls == []
    assert (first.written, second.written) == (("train", "test"), ())
    assert second.sets == first.sets
    assert _state(tmp_path / "data").keys() == before.keys()
    assert {k: v for k, v in _state(tmp_path / "data").items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sampling_rate": 16000}, "train, test prepared with data.sampling_rate=8000 (now 16000);"),
        ({"filter": {"max_seconds": 9.0}}, "prepared with data.filter.max_seconds=20.0 (now 9.0);"),
        ({"text": "lower", "shard_size": 2}, "data.shard_size=1000 (now 2), data.text=upper (now lower);"),
    ],
)
def test_sets_of_other_settings_are_not_replaced_unasked(tmp_path: Path, change: dict[str, object], said: str) -> None:
    """The error names each key with both values, and two remedies; no file changes until it is asked for."""
    table = write_table(tmp_path / "corpus")
    prepare(_config(tmp_path / "data", table))
    before = _state(tmp_path / "data")
    other = _config(tmp_path / "data", table, **change)
    with pytest.raises(ConfigError) as caught:
        prepare(other)
    assert said in str(caught.value)
    assert "set data.folder to another folder, or replace" in str(caught.value)
    after = _state(tmp_path / "data")
    assert {name: time for name, time in after.items() if name != ".lock"} == {
        name: time for name, time in before.items() if name != ".lock"
    }
    assert prepare(other, overwrite=True).written == ("train", "test")
    assert prepare(other).written == ()


def test_other_rows_of_the_corpus_are_named(tmp_path: Path) -> None:
    """They are named by the column that selects them; a set with the same settings is not mentioned."""
    table = write_table(tmp_path / "corpus")
    prepare(_config(tmp_path / "data", table))
    sets = {"train": {"split": "train"}, "test": {"split": "dev"}}
    with pytest.raises(
        ConfigError, match=r"data: test prepared with data\.corpus\.sets\.test\.split=test \(now dev\);"
    ):
        prepare(_config(tmp_path / "data", table, corpus={"kind": "tsv", "path": table, "sets": sets}))


def test_a_set_with_unrecorded_settings_is_replaced_only_on_request(tmp_path: Path) -> None:
    """For a set that an earlier version prepared, only the digest tells that it differs."""
    table = write_table(tmp_path / "corpus")
    prepare(_config(tmp_path / "data", table))
    for name in ("train", "test"):
        (tmp_path / "data" / name / "settings.json").unlink()
    assert prepare(_config(tmp_path / "data", table)).written == ()
    with pytest.raises(ConfigError, match="prepared with other settings, which"):
        prepare(_config(tmp_path / "data", table, text="as-is"))


def test_changed_settings_prepare_again_and_other_sets_do_not_matter(tmp_path: Path) -> None:
    """The stamp covers what a set is made from: its own selection, but not other sets."""
    table = write_table(tmp_path / "corpus")
    config = _config(tmp_path / "data", table)
    prepare(config)
    assert prepare(_config(tmp_path / "data", table, text="as-is"), overwrite=True).written == ("train", "test")
    sets = {"train": {"split": "train"}, "test": {"split": "test"}, "more": {}}
    more = _config(
        tmp_path / "data",
        table,
        corpus={"kind": "tsv", "path": table, "sets": sets},
        text="as-is",
        test=["test", "more"],
    )
    assert prepare(more).written == ("more",)
    assert set_digest(config, "train") != set_digest(more, "train")
    assert set_digest(config, "train") != set_digest(config, "test")


def test_a_damaged_set_is_prepared_again(tmp_path: Path) -> None:
    """A set with a shortened shard does not count as finished."""
    config = _config(tmp_path / "data", write_table(tmp_path / "corpus"))
    prepare(config)
    shard = tmp_path / "data" / "test" / "shar" / "recording.000000.tar"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert prepare(config).written == ("test",)


def _spoil(table: Path, utterance: str, how: str) -> None:
    path = table.parent / "audio" / f"{utterance}.wav"
    samples = soundfile.read(path, dtype="float32")[0]
    if how == "missing":
        path.unlink()
    elif how == "empty file":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif how == "not finite":
        samples[100] = np.nan
        soundfile.write(path, samples, RATE, subtype="FLOAT")
    elif how == "wrong scale":
        soundfile.write(path, samples * 32768, RATE, subtype="FLOAT")
    elif how == "silent":
        soundfile.write(path, samples * 0, RATE)
    elif how == "odd rate":
        soundfile.write(path, samples, 44101)
    elif how == "empty transcript":
        replace_row(table, utterance, text=" ")
    elif how == "duplicate":
        replace_row(table, utterance, id="u1")
    elif how == "id":
        replace_row(table, utterance, id="../u4")


_FAULTS = {
    "missing": "u4.wav: audio file cannot be opened: No such file",
    "empty file": r"u4.wav: audio file is empty \(0 bytes\)",
    "truncated": r"u4.wav: truncated: 956 bytes of audio, but the header declares 7040",
    "not finite": "1 of 3520 samples of the audio are not finite",
    "wrong scale": "the audio has a peak of .*, but full scale is -1 to 1",
    "silent": "the audio is silent: all 3520 samples are 0",
    "odd rate": "the audio has 44101 Hz, which cannot be resampled to 8000 Hz",
    "empty transcript": "its transcript is empty",
    "duplicate": "an earlier utterance has the same id",
    "id": "its id is invalid",
}


@pytest.mark.parametrize("how", _FAULTS)
def test_an_unusable_utterance_ends_the_preparation_with_its_id_and_place(tmp_path: Path, how: str) -> None:
    """With `on_bad: fail`: the message has id, line and reason, and no folder remains."""
    table = write_table(tmp_path / "corpus")
    _spoil(table, "u4", how)
    name = {"duplicate": "u1", "id": r"\.\./u4"}.get(how, "u4")
    with pytest.raises(DataError, match=rf"set train: utterance '{name}' \(.*corpus.tsv:6\): .*{_FAULTS[how]}.*on_bad"):
        prepare(_config(tmp_path / "data", table, filter={"on_bad": "fail"}))
    assert _leftovers(tmp_path / "data") == []


@pytest.mark.parametrize("how", _FAULTS)
def test_skipped_utterances_are_counted_and_listed(tmp_path: Path, how: str) -> None:
    """By default, the rest is prepared; the skipped one is in the summary and in dropped.tsv with the reason."""
    table = write_table(tmp_path / "corpus")
    _spoil(table, "u4", how)
    config = _config(tmp_path / "data", table, filter={"max_skipped": 0.2})
    summary = prepare(config)
    assert (summary.sets[0].utterances, summary.sets[0].dropped) == (7, 1)
    header, row = (tmp_path / "data" / "train" / "dropped.tsv").read_text().splitlines()
    assert header == "id\tseconds\treason"
    assert row.startswith({"duplicate": "u1", "id": "../u4"}.get(how, "u4") + "\t")
    assert re.search(
        rf"dropped 1 \([\d.]+ s\), listed in .*dropped\.tsv: \S+ \(.*{_FAULTS[how]}.*\)", describe(summary)
    )
    assert describe(prepare(config)).splitlines()[0].endswith("dropped.tsv")  # told by name when it is written


def test_files_that_are_a_little_shorter_than_their_headers_say_are_used_and_named(tmp_path: Path) -> None:
    """Up to a tenth may be missing, with any executor; a segment may end where the header says that the file does. More
    makes them unusable."""
    table = write_table(tmp_path / "corpus")
    for name, share in (("u1", 0.91), ("u3", 0.999), ("u4", 0.89)):
        path = table.parent / "audio" / f"{name}.wav"
        path.write_bytes(path.read_bytes()[: 44 + 2 * round(share * soundfile.info(path).frames)])
    config = _config(tmp_path / "data", table, shard_size=3, filter={"max_skipped": 0.2})
    summary = prepare(config)
    assert (summary.sets[0].utterances, summary.sets[0].dropped) == (7, 1)
    listed = tmp_path / "data" / "train" / "short.tsv"
    assert listed.read_text() == "id\nu1\nu3\n"
    said = "train: the files of 2 utterances have up to a tenth less audio than their headers declare, and are used as "
    assert f"{said}they are: u1, u3; listed in {listed}" in describe(summary)
    assert "less audio" not in describe(prepare(config))  # told when it is written
    path = table.parent / "audio" / "u1.wav"
    whole = 0.4 + 0.01
    assert len(read_audio(path, 0.1, whole - 0.1)[0]) == soundfile.info(path).frames - round(0.1 * RATE)
    for start, duration in ((0.1, whole), (whole - 0.06, 0.06)):  # the second would lose more than half of itself
        with pytest.raises(DataError, match=r"does not fit"):
            read_audio(path, start, duration)


def test_more_than_one_percent_skipped_fails(tmp_path: Path) -> None:
    """2 of 8 are too many by default; the message has the numbers and the first of them."""
    table = write_table(tmp_path / "corpus")
    _spoil(table, "u4", "silent")
    _spoil(table, "u6", "silent")
    with pytest.raises(
        DataError,
        match=r"2 of 8 utterances are unusable, more than .*1\.00%.*\n  'u4': the audio is silent: .*\n  'u6': ",
    ):
        prepare(_config(tmp_path / "data", table))
    assert _leftovers(tmp_path / "data") == []


def test_one_unusable_utterance_does_not_block_a_small_set(tmp_path: Path) -> None:
    """1 of 8 is left out, and listed with its reason; with a limit of 0, it is an error."""
    table = write_table(tmp_path / "corpus")
    _spoil(table, "u4", "silent")
    with pytest.raises(DataError, match=r"1 of 8 utterances are unusable, more than .*0\.00%"):
        prepare(_config(tmp_path / "none", table, filter={"max_skipped": 0}))
    assert prepare(_config(tmp_path / "data", table)).sets[0].dropped == 1
    assert "the audio is silent" in (tmp_path / "data" / "train" / "dropped.tsv").read_text()


def test_one_percent_is_left_out_by_default(tmp_path: Path) -> None:
    """The one of 104 utterances that is left out is named."""
    table = write_table(tmp_path / "corpus", count=155)
    _spoil(table, "u4", "silent")
    summary = prepare(_config(tmp_path / "data", table))
    assert (summary.sets[0].utterances, summary.sets[0].dropped) == (103, 1)
    assert re.search(
        r"dropped\.tsv: u4 \(the audio is silent: all \d+ samples are 0\)$", describe(summary), re.MULTILINE
    )


def test_utterances_outside_the_limits_of_duration_are_dropped_and_their_hours_counted(tmp_path: Path) -> None:
    """Utterances that are too short or too long are not faults; bounds are inclusive."""
    table = write_table(tmp_path / "corpus")
    config = _config(tmp_path / "data", table, filter={"min_seconds": 0.41, "max_seconds": 0.48})
    (train, _) = prepare(config).sets
    kept = SpeechSet.open(tmp_path / "data" / "train")
    assert [kept.id(i) for i in range(len(kept))] == ["u1", "u3", "u4", "u6", "u7"]
    assert train.dropped_seconds == pytest.approx(0.40 + 0.49 + 0.50)
    assert "u0\t0.400\tlasts 0.400 s, limits are 0.41 to 0.48 s" in (kept.folder / "dropped.tsv").read_text()


def test_one_speaker_is_not_several(tmp_path: Path) -> None:
    """The summary reads well for small sets, too."""
    table = write_table(tmp_path / "corpus", count=3, speakers=1)
    told = describe(prepare(_config(tmp_path / "data", table)))
    assert re.search(r"test: 1 utterance, [\d.]+ s, 1 speaker, stored at 8000 Hz", told)


def test_a_set_with_nothing_left_is_an_error(tmp_path: Path) -> None:
    """An empty set is never written; the message says why it is empty."""
    table = write_table(tmp_path / "corpus")
    with pytest.raises(DataError, match=r"set train: all 8 utterances were dropped\. The first 5:\n  'u0': lasts"):
        prepare(_config(tmp_path / "data", table, filter={"min_seconds": 5}))
    corpus = {"kind": "tsv", "path": table, "sets": {"train": {"split": "nothing"}}}
    with pytest.raises(
        DataError, match=r"set train: the corpus has no utterances for this set; correct data\.corpus\.sets\.train"
    ):
        prepare(_config(tmp_path / "data", table, corpus=corpus, test=[]))


@pytest.mark.parametrize(("rate", "wanted"), [(16000, 8000), (22050, 8000), (44100, 16000), (8000, 16000)])
def test_resampling_keeps_a_tone(rate: int, wanted: int) -> None:
    """A 1 kHz tone at one rate is the same tone at the other, away from the ends."""
    tone = np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32)
    expected = np.sin(2 * np.pi * 1000 * np.arange(wanted) / wanted)
    result = resampled(tone, rate, wanted)
    assert len(result) == wanted
    np.testing.assert_allclose(result[500:-500], expected[500:-500], atol=2e-3)


def test_audio_of_another_rate_is_resampled_to_that_of_the_set(tmp_path: Path) -> None:
    """The prepared set has one rate, and durations stay."""
    table = write_table(tmp_path / "corpus")
    write_wav(tmp_path / "corpus" / "audio" / "u0.wav", 0.7, rate=16000)
    prepare(_config(tmp_path / "data", table))
    train = SpeechSet.open(tmp_path / "data" / "train")
    assert (train.sampling_rate, len(train.audio(0)), train.durations[0]) == (RATE, 5600, np.float32(0.7))


def test_strings_use_every_usable_recording_copies_times(tmp_path: Path) -> None:
    """Each usable recording contributes its words to the texts of the strings as often as copies says; the others are
    listed."""
    table = write_table(tmp_path / "corpus", count=30)
    _spoil(table, "u4", "silent")
    limits = {"on_bad": "skip", "max_skipped": 0.1, "min_seconds": 0.405}
    config = _config(tmp_path / "data", table, strings={"copies": {"train": 3}}, filter=limits)
    summary = prepare(config)
    train = SpeechSet.open(tmp_path / "data" / "train")
    words = " ".join(train.text(i) for i in range(len(train))).split()
    kept = [f"WORD{i}" for i in range(30) if i % 3 != 2 and i not in (0, 4)]
    assert sorted(words) == sorted(kept * 3)
    assert summary.sets[0].dropped == 2
    dropped = (train.folder / "dropped.tsv").read_text()
    assert "u0\t" in dropped
    assert "u4\t" in dropped


def test_the_recordings_of_strings_are_trimmed_and_the_strings_are_not(tmp_path: Path) -> None:
    """A quiet recording between loud ones is no pause."""
    table = write_table(tmp_path / "corpus", count=9)
    lengths = {}
    for place, level in ((0, 0.01), (1, 0.5), (3, 0.5), (4, 0.5), (6, 0.5), (7, 0.01)):
        samples = 1e-4 * np.random.default_rng(place).standard_normal(RATE)
        samples[RATE // 4 : RATE // 2] += level * np.sin(np.arange(RATE // 4))
        soundfile.write(tmp_path / "corpus" / "audio" / f"u{place}.wav", samples, RATE)
    for name, trim in (("whole", None), ("trimmed", 0.05)):
        config = _config(tmp_path / name, table, strings={"gap_seconds": [0.0, 0.0]}, filter={"trim": trim})
        prepare(config)
        train = SpeechSet.open(tmp_path / name / "train")
        lengths[name] = float(train.durations.sum()) / sum(
            len(train.text(place).split()) for place in range(len(train))
        )
    assert lengths["whole"] == pytest.approx(1.0, abs=0.01)
    assert lengths["trimmed"] == pytest.approx(0.25 + 2 * 0.05, abs=0.04)


class _Interruption(BaseException):
    pass


def test_an_interrupted_preparation_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    """A set that was interrupted does not exist, an earlier one is whole, and a new call finishes."""
    config = _config(tmp_path / "data", write_table(tmp_path / "corpus", count=180, seconds=0.1))
    fired = []

    def interrupt(name: str, done: int, total: int) -> None:
        if name == "test" and done >= 25:
            fired.append(done)
            raise _Interruption

    with pytest.raises(_Interruption):
        prepare(config, interrupt)
    assert fired == [25]
    assert _leftovers(tmp_path / "data") == ["train"]
    with pytest.raises(DataError, match="run `starling prepare"):
        SpeechSet.open(tmp_path / "data" / "test")
    assert prepare(config).written == ("test",)


def _prepare_and_die(config: DataConfig) -> None:
    def kill(name: str, done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    prepare(config, kill)


def test_a_killed_preparation_starts_again(tmp_path: Path) -> None:
    """After SIGKILL only a folder `.partial` exists, which the next call completes and renames."""
    config = _config(tmp_path / "data", write_table(tmp_path / "corpus", count=60))
    process = multiprocessing.get_context("fork").Process(target=_prepare_and_die, args=(config,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert _leftovers(tmp_path / "data") == ["train.partial"]
    assert prepare(config).written == ("train", "test")
    assert _leftovers(tmp_path / "data") == ["test", "train"]


def _prepare_and_count(config: DataConfig) -> int:
    return len(prepare(config).written)


def test_two_preparations_at_once_take_turns(tmp_path: Path) -> None:
    """Of four processes one prepares; the others find it done."""
    config = _config(tmp_path / "data", write_table(tmp_path / "corpus", count=60))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert sorted(pool.map(_prepare_and_count, [config] * 4, chunksize=1)) == [0, 0, 0, 2]


def test_progress_is_reported_up_to_the_end(tmp_path: Path) -> None:
    """The last report of a set has all its utterances."""
    calls: list[tuple[str, int, int]] = []
    prepare(_config(tmp_path / "data", write_table(tmp_path / "corpus")), lambda *call: calls.append(call))
    assert calls == [("train", 8, 8), ("test", 4, 4)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"train": "trian"},
            r"set 'trian', which is not in data.corpus.sets \(train, test\); did you mean 'train'\?",
        ),
        ({"test": ["test", "tset"]}, "set 'tset'"),
        ({"sampling_rate": 0}, "sampling_rate"),
        ({"filter": {"min_seconds": 2, "max_seconds": 1}}, r"max_seconds \(1.0\) must be greater"),
        ({"strings": {"copies": {"tain": 2}}}, "strings.copies names unknown sets: tain"),
        ({"corpus": {"kind": "tvs"}}, "kind"),
        ({"text": "UPPER"}, "text"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    """Names of sets, ranges and unknown keys are checked when the recipe is read."""
    with pytest.raises(ValidationError, match=message):
        _config(tmp_path / "data", tmp_path / "corpus.tsv", **settings)
    with pytest.raises(ValidationError, match="cannot be the name of a set"):
        corpus = {"kind": "tsv", "path": "x", "sets": {"../up": {}}}
        _config(tmp_path / "data", tmp_path / "corpus.tsv", corpus=corpus, train="../up", test=[])


def test_a_folder_that_cannot_be_written_is_named_at_the_start(tmp_path: Path) -> None:
    """A file in place of the folder is a DataError, not a traceback."""
    (tmp_path / "data").write_text("in the way")
    with pytest.raises(DataError, match=r"data: cannot be written: .*data\.folder"):
        prepare(_config(tmp_path / "data", write_table(tmp_path / "corpus")))


@pytest.mark.parametrize("name", ["demo", "fsdd", "fsdd_speakers", "speechocean"])
def test_the_data_sections_of_our_recipes_are_valid(name: str) -> None:
    """Every recipe's data section passes its own model."""
    config = DataConfig.model_validate(read_recipe(_RECIPES / f"{name}.yaml")["data"])
    assert set(config.used_sets) <= set(config.corpus.sets)


def test_a_part_is_held_out(tmp_path: Path) -> None:
    """A set and the part held out of it are the whole set; the folds of a cross-validation are disjoint."""
    table = write_table(tmp_path / "corpus", count=60)
    whole, held_out = {f"u{i}" for i in range(60) if i % 3 != 2}, []
    for fold in range(3):
        folder, wanted = tmp_path / f"fold-{fold}", {"folds": 3, "fold": fold}
        prepare(_config(folder, table, hold_out=wanted, valid="dev"))
        parts = {name: SpeechSet.open(folder / name) for name in ("train", "dev")}
        ids = {name: {part.id(index) for index in range(len(part))} for name, part in parts.items()}
        assert ids["train"] | ids["dev"] == whole
        assert not ids["train"] & ids["dev"]
        held_out += sorted(ids["dev"])
    assert sorted(held_out) == sorted(whole)
    config = _config(tmp_path, table, hold_out={"by": "speaker", "folds": 2}, valid="dev")
    speakers = [{each.speaker for each in config.utterances(name)} for name in ("train", "dev")]
    assert all(speakers)
    assert not speakers[0] & speakers[1]
    with pytest.raises(ConfigError, match=r"data.hold_out=.*\(now None\)"):
        prepare(_config(tmp_path / "fold-0", table))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"of": "trian"}, r"data.hold_out.of: 'trian' is not in data.corpus.sets \(train, test\)"),
        ({"set": "test"}, r"data.hold_out.set: data.corpus.sets has a set 'test' already"),
        ({"folds": 5, "fold": 5}, r"data.hold_out.fold: 5 of 5 folds; the last is 4"),
    ],
)
def test_an_impossible_hold_out_is_refused(wrong: dict[str, object], message: str, tmp_path: Path) -> None:
    """The message names the key."""
    with pytest.raises(ValidationError, match=message):
        _config(tmp_path, tmp_path / "table.tsv", hold_out=wrong)


def test_the_two_digit_recipes_share_their_folder(tmp_path: Path) -> None:
    """Sets of the same name mean the same in both, so that one preparation serves both."""
    configs = [
        DataConfig.model_validate(read_recipe(_RECIPES / f"{name}.yaml")["data"]) for name in ("fsdd", "fsdd_speakers")
    ]
    for name in configs[0].corpus.sets:
        assert set_digest(configs[0], name) == set_digest(configs[1], name)


def test_new_voices_or_words_remake_the_demo_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stamp includes what the synthesiser has to say, although no recipe names it."""
    config = DataConfig.model_validate(read_recipe(_RECIPES / "demo.yaml")["data"])
    before = set_digest(config, "train")
    monkeypatch.setitem(LANGUAGES, "en", replace(LANGUAGES["en"], commands=("JUMP",)))
    assert set_digest(config, "train") != before


def test_real_digits_become_strings_with_the_right_words(tmp_path: Path, shared_data: Path | None) -> None:
    """The held-out speakers of the digit corpus are used if it is available, otherwise made-up audio."""
    table = (shared_data / "fsdd.tsv") if shared_data else write_table(tmp_path / "corpus", count=60)
    column, names = ("official_split", "utt_id") if shared_data else ("split", "id")
    corpus = {"kind": "tsv", "path": table, "id": names, "sets": {"test": {column: "test"}}}
    summary = prepare(_config(tmp_path / "data", table, corpus=corpus, train="test", strings={}))
    test = SpeechSet.open(tmp_path / "data" / "test")
    assert isinstance(summary, Summary)
    assert sum(len(test.text(i).split()) for i in range(len(test))) == (300 if shared_data else 20)
    assert all(len(test.audio(i)) == test.num_samples[i] for i in range(len(test)))


@pytest.mark.parametrize("has_speakers", [False, True])
def test_preparing_a_corpus_without_speakers_warns(tmp_path: Path, has_speakers: bool) -> None:
    """A Kaldi folder without `utt2spk` would be one speaker, which would hide leakage between sets; one line warns of
    it, once."""
    folder = tmp_path / "kaldi" / "train"
    for name in ("a", "b"):
        write_wav(folder / f"{name}.wav")
    (folder / "wav.scp").write_text("".join(f"{name} {folder}/{name}.wav\n" for name in ("a", "b")))
    (folder / "text").write_text("a one\nb two\n")
    if has_speakers:
        (folder / "utt2spk").write_text("a s\nb s\n")
    corpus = {"kind": "kaldi", "path": tmp_path / "kaldi", "sets": {"train": "train"}}
    config = _config(tmp_path / "data", tmp_path, corpus=corpus, test=[])
    warnings = [line for line in describe(prepare(config)).splitlines() if line.startswith("warning")]
    assert [line.split(",")[0] for line in warnings] == (
        [] if has_speakers else ["warning: train: the corpus names no speakers"]
    )
    assert "warning" not in describe(prepare(config))


def test_the_line_of_a_set_names_the_rate_at_which_it_is_stored(tmp_path: Path) -> None:
    """A reader with files of 8 kHz took the rate of the prepared audio for theirs."""
    samples = np.random.default_rng(1).standard_normal(8000) * 0.1
    soundfile.write(tmp_path / "a.wav", samples, 8000)
    table = tmp_path / "all.tsv"
    table.write_text("id\tspeaker\tsplit\taudio\ttext\na\ts\ttrain\ta.wav\tONE\n", encoding="utf-8")
    corpus = {"kind": "tsv", "path": str(table), "sets": {"train": {"split": "train"}}}
    given = {"folder": tmp_path / "prepared", "corpus": corpus, "sampling_rate": 16000, "valid": None, "test": []}
    line = describe(prepare(DataConfig.model_validate(given)))
    assert line == "train: 1 utterance, 1.0 s, 1 speaker, stored at 16000 Hz, written"
