"""The importers: what each format means, and what each importer refuses."""

import gzip
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpus_builders import RATE, replace_row, sound, write_table, write_wav
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.kaldi import load_kaldi_data_dir
from lhotse.shar import SharWriter
from pydantic import TypeAdapter, ValidationError

from starling.errors import DataError
from starling.speech.audio import read_audio
from starling.speech.corpora import CorpusConfig, Utterance
from starling.speech.corpora.lhotse_recipe import recipe_names
from starling.speech.corpora.lines import read_lines
from starling.speech.data import DataConfig, set_digest


def _import(kind: str, set_name: str = "train", **settings: object) -> list[Utterance]:
    corpus = TypeAdapter(CorpusConfig).validate_python({"kind": kind, **settings})
    return list(corpus.utterances(set_name))


def _samples(utterance: Utterance) -> np.ndarray:
    samples, rate = utterance.read()
    assert rate == RATE
    return samples * 32768


def _json_lines(path: Path, items: list[dict[str, object]]) -> None:
    text = "".join(json.dumps(item) + "\n" for item in items)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def test_a_table_gives_the_rows_of_each_set(tmp_path: Path) -> None:
    """Rows are chosen by the values of columns; audio is relative to the table."""
    table = write_table(tmp_path, count=6)
    train = _import("tsv", path=table, sets={"train": {"split": "train"}})
    assert [(u.id, u.speaker, u.text) for u in train[:2]] == [("u0", "s0", "word0"), ("u1", "s1", "word1")]
    assert len(train) == 4
    np.testing.assert_array_equal(_samples(train[1]), sound(0.41, seed=1))
    both = _import("tsv", path=table, sets={"train": {"split": ["train", "test"], "speaker": "s1"}})
    assert [u.id for u in both] == ["u1", "u3", "u5"]
    assert len(_import("tsv", path=table, sets={"train": {}})) == 6


def test_each_set_may_have_a_table_of_its_own(tmp_path: Path) -> None:
    """The tables are in a folder, which is not a table for sets that select rows, and which no path may leave."""
    table = write_table(tmp_path, count=6)
    sets = {"train": table.name, "test": "absent.tsv", "dev": {"split": "dev"}, "other": "../x.tsv"}
    assert [u.id for u in _import("tsv", path=tmp_path, sets=sets)] == [f"u{number}" for number in range(6)]
    with pytest.raises(DataError, match=r"set test: .*absent\.tsv does not exist; change data\.corpus\.sets"):
        _import("tsv", "test", path=tmp_path, sets=sets)
    with pytest.raises(DataError, match=r"set dev: .* is a folder; name a table in it .*, such as dev\.tsv"):
        _import("tsv", "dev", path=tmp_path, sets=sets)
    with pytest.raises(DataError, match=r"set other: '\.\./x\.tsv' is not a path inside"):
        _import("tsv", "other", path=tmp_path, sets=sets)


def test_the_first_place_that_exists_is_used_and_all_are_named_when_none_does(tmp_path: Path) -> None:
    """`path` may be a list."""
    table = write_table(tmp_path, count=3)
    assert len(_import("tsv", path=[tmp_path / "absent", table], sets={"train": {}})) == 3
    with pytest.raises(DataError, match=r"absent1.*absent2.*data\.corpus\.path"):
        _import("tsv", path=[tmp_path / "absent1", tmp_path / "absent2"], sets={"train": {}})


def test_a_missing_column_suggests_the_nearest(tmp_path: Path) -> None:
    """A wrong column name is refused, and the message lists the known ones."""
    table = write_table(tmp_path, count=3)
    with pytest.raises(DataError, match=r"no column 'speeker'; did you mean 'speaker'\?.*id, speaker, split"):
        _import("tsv", path=table, sets={"train": {}}, speaker="speeker")


def test_a_missing_column_that_resembles_none_lists_all(tmp_path: Path) -> None:
    """The message consists of complete sentences."""
    table = write_table(tmp_path, count=3)
    with pytest.raises(DataError, match=r"no column 'zzz'; it has: id, speaker, split, audio, text; set"):
        _import("tsv", path=table, sets={"train": {}}, speaker="zzz")


def test_a_table_without_a_header_is_refused(tmp_path: Path) -> None:
    """The file is empty, or has an empty first line."""
    for content in ("", "\n"):
        (tmp_path / "empty.tsv").write_text(content)
        with pytest.raises(DataError, match=r"empty\.tsv: no column .id.; it has: none, for its first line is empty"):
            _import("tsv", path=tmp_path / "empty.tsv", sets={"train": {}})


def test_a_row_with_too_few_columns_is_refused_by_line(tmp_path: Path) -> None:
    """The message has the file and the line."""
    table = write_table(tmp_path, count=3)
    table.write_text(table.read_text() + "u9\ts0\n")
    with pytest.raises(DataError, match=r"corpus.tsv:5: 2 columns, the header has 5"):
        _import("tsv", path=table, sets={"train": {}})


@pytest.mark.parametrize(
    "name", ["../outside.wav", "/etc/../etc/hostname", "audio/../../outside.wav", "", "a\0b", "link.wav"]
)
def test_audio_outside_of_the_corpus_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """'..' and links that leave the corpus are refused before a file is opened."""
    write_wav(tmp_path / "outside.wav")
    folder = tmp_path / "corpus"
    table = write_table(folder, count=3)
    (folder / "link.wav").symlink_to(tmp_path / "outside.wav")
    replace_row(table, "u1", audio=name)
    with pytest.raises(DataError, match=r"corpus.tsv:3: .*audio"):
        _import("tsv", path=table, sets={"train": {}})


def test_audio_is_found_by_its_absolute_name(tmp_path: Path) -> None:
    """This is usual in manifests of Kaldi and NeMo; if `audio_root` is set, the file must be inside it."""
    write_wav(tmp_path / "elsewhere" / "a.wav")
    table = write_table(tmp_path / "corpus", count=3)
    replace_row(table, "u1", audio=str(tmp_path / "elsewhere" / "a.wav"))
    utterances = _import("tsv", path=table, sets={"train": {}})
    assert len(utterances[1].read()[0]) == 4000
    with pytest.raises(DataError, match=r"corpus.tsv:3: audio .*a.wav' is outside .*corpus;"):
        _import("tsv", path=table, sets={"train": {}}, audio_root=tmp_path / "corpus")


def test_audio_elsewhere_may_be_allowed_by_naming_its_root(tmp_path: Path) -> None:
    """Relative names start at `audio_root`, and absolute ones must be inside it."""
    write_wav(tmp_path / "elsewhere" / "a.wav")
    table = write_table(tmp_path / "corpus", count=3)
    replace_row(table, "u0", audio="elsewhere/a.wav")
    replace_row(table, "u1", audio=str(tmp_path / "elsewhere" / "a.wav"))
    replace_row(table, "u2", audio="corpus/audio/u2.wav")
    utterances = _import("tsv", path=table, sets={"train": {}}, audio_root=tmp_path)
    assert [len(u.read()[0]) for u in utterances] == [4000, 4000, 3360]


def _kaldi_folder(folder: Path, segments: bool) -> Path:
    for i in range(3):
        write_wav(folder / "wav" / f"r{i}.wav", 2.0, seed=i)
    (folder / "wav.scp").write_text("".join(f"r{i} {folder}/wav/r{i}.wav\n" for i in range(3)))
    names = [f"s{i}-r{i}" for i in range(3)] if segments else [f"r{i}" for i in range(3)]
    if segments:
        rows = [f"{name} r{i} {0.25 * i} {1.5 if i else -1}\n" for i, name in enumerate(names)]
        (folder / "segments").write_text("".join(rows))
    (folder / "text").write_text("".join(f"{name} some words {i}\n" for i, name in enumerate(names)))
    (folder / "utt2spk").write_text("".join(f"{name} s{i}\n" for i, name in enumerate(names)))
    return folder


@pytest.mark.parametrize("segments", [False, True])
def test_a_kaldi_folder_means_what_it_means_to_lhotse(tmp_path: Path, segments: bool) -> None:
    """Ids, speakers, texts and samples agree with lhotse's importer, with segments and without."""
    folder = _kaldi_folder(tmp_path / "train", segments)
    recordings, supervisions, _ = load_kaldi_data_dir(folder, RATE)
    cuts = CutSet.from_manifests(recordings, supervisions).trim_to_supervisions()
    expected = {cut.supervisions[0].id: cut for cut in cuts}
    utterances = _import("kaldi", path=tmp_path, sets={"train": "train"})
    assert len(utterances) == len(expected) == 3
    for utterance in utterances:
        cut = expected[utterance.id]
        assert (utterance.speaker, utterance.text) == (cut.supervisions[0].speaker, cut.supervisions[0].text)
        np.testing.assert_array_equal(_samples(utterance), cut.load_audio()[0] * 32768)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wav.scp", "r0 sox r0.wav -t wav - |\nr1 a.wav\n", r"wav.scp:1: recording r0 is a pipe"),
        ("wav.scp", "r0 a.wav\nr0 b.wav\n", r"wav.scp:2: duplicate key r0, first in line 1"),
        ("wav.scp", "r0\n", r"wav.scp:1: r0 has no value"),
        ("text", "r0 one\n", r"no transcript for r1"),
        ("segments", "a r9 0 1\n", r"segments:1: recording 'r9' is not in wav.scp"),
        ("segments", "r0 r0 1 0.5\n", r"segments:1: invalid segment from 1.0 s to 0.5 s"),
        ("segments", "r0 r0 nan 2\n", r"segments:1: invalid segment"),
        ("segments", "r0 r0 1\n", r"segments:1: 'r0 1' is not 'recording start end'"),
    ],
)
def test_a_faulty_kaldi_folder_is_refused_by_file_and_line(
    tmp_path: Path, file: str, content: str, message: str
) -> None:
    """Pipes are never run; duplicates, dangling names and impossible segments are named."""
    folder = _kaldi_folder(tmp_path / "train", segments=False)
    (folder / file).write_text(content)
    with pytest.raises(DataError, match=message):
        _import("kaldi", path=tmp_path, sets={"train": "train"})


@pytest.mark.parametrize(("segments", "origin"), [(False, "wav.scp:2"), (True, "segments:2")])
def test_a_kaldi_utterance_comes_from_a_line_of_a_file(tmp_path: Path, segments: bool, origin: str) -> None:
    """Messages then name a file that can be opened."""
    _kaldi_folder(tmp_path / "train", segments)
    utterances = _import("kaldi", path=tmp_path, sets={"train": "train"})
    assert utterances[1].origin == str(tmp_path / "train" / origin)


def test_nemo_lines_may_name_a_stretch_of_a_file(tmp_path: Path) -> None:
    """`offset` and `duration` select samples; speaker and id are optional."""
    samples = write_wav(tmp_path / "wav" / "a b.wav", 2.0)
    _json_lines(
        tmp_path / "train.json",
        [
            {"audio_filepath": "wav/a b.wav", "text": "all", "duration": 2.0},
            {"audio_filepath": "wav/a b.wav", "text": "part", "offset": 0.5, "duration": 1.0, "speaker": 7, "id": "x"},
            {"audio_filepath": "wav/a b.wav", "text": "rest", "offset": 1.5},
        ],
    )
    whole, part, rest = _import("nemo", path=tmp_path, sets={"train": "train.json"})
    assert [(u.id, u.speaker) for u in (whole, part, rest)] == [
        ("wav-a_b", "unknown"),
        ("x", "7"),
        ("wav-a_b-1.500", "unknown"),
    ]
    np.testing.assert_array_equal(_samples(whole), samples)
    np.testing.assert_array_equal(_samples(part), samples[4000:12000])
    np.testing.assert_array_equal(_samples(rest), samples[12000:])


def test_wenet_lines_have_key_wav_and_txt(tmp_path: Path) -> None:
    """`start` and `end` select samples."""
    samples = write_wav(tmp_path / "a.wav", 2.0)
    items = [
        {"key": "k1", "wav": "a.wav", "txt": "一 二"},
        {"key": "k2", "wav": "a.wav", "txt": "b", "start": 0.5, "end": 1},
    ]
    _json_lines(tmp_path / "train.list", items)
    first, second = _import("wenet", path=tmp_path, sets={"train": "train.list"})
    assert (first.id, first.text, second.id) == ("k1", "一 二", "k2")
    np.testing.assert_array_equal(_samples(first), samples)
    np.testing.assert_array_equal(_samples(second), samples[4000:8000])


def test_coqui_rows_may_hold_quotes_and_commas(tmp_path: Path) -> None:
    """The CSV dialect is Python's; ids come from file names."""
    samples = write_wav(tmp_path / "clips" / "a.wav")
    (tmp_path / "train.csv").write_text(
        'wav_filename,wav_filesize,transcript\nclips/a.wav,8044,"well, ""yes"""\n', encoding="utf-8-sig"
    )
    (utterance,) = _import("coqui", path=tmp_path, sets={"train": "train.csv"})
    assert (utterance.id, utterance.text) == ("clips-a", 'well, "yes"')
    np.testing.assert_array_equal(_samples(utterance), samples)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("nemo", '{"audio_filepath": "a.wav"}', "m:1: field 'text' is missing"),
        ("nemo", '{"text": "a"}', "m:1: field 'audio_filepath' is missing"),
        ("nemo", '{"audio_filepath": "a.wav", "text": "x", "duration": -1}', "m:1: field 'duration' is -1"),
        ("nemo", '{"audio_filepath": "a.wav", "text": "x", "offset": "1"}', "m:1: field 'offset' is '1'"),
        ("nemo", '\n{"text": ', "m:2: not JSON"),
        ("nemo", "[1]", "m:1: expected a JSON object, found list"),
        ("nemo", "[" * 100_000, "m:1: not JSON"),
        ("wenet", '{"key": ["a"], "wav": "a", "txt": "b"}', "m:1: field 'key' is"),
        ("coqui", "wav_filename,transcript\na.wav\n", "m:2: 1 columns, the header has 2"),
        ("coqui", "file,text\na.wav,b\n", "m: expected the columns wav_filename, transcript, found file, text"),
        ("coqui", 'wav_filename,transcript\na.wav,"b\n', "m:2: not CSV"),
        ("lhotse", '{"id": "a"}', "m:1: not a lhotse cut"),
    ],
)
def test_a_faulty_manifest_is_refused_by_line(tmp_path: Path, kind: str, content: str, message: str) -> None:
    """Missing fields, wrong types and broken syntax are DataErrors with file and line."""
    (tmp_path / "m").write_text(content)
    with pytest.raises(DataError, match=message):
        _import(kind, path=tmp_path, sets={"train": "m"})


@pytest.mark.parametrize("name", ["../m", "/m", "absent"])
def test_a_set_that_is_not_inside_the_corpus_is_refused(tmp_path: Path, name: str) -> None:
    """The files of sets must be below `path`."""
    with pytest.raises(DataError, match=r"set train: .*data\.corpus\.sets"):
        _import("nemo", path=tmp_path, sets={"train": name})


def test_lines_are_bounded(tmp_path: Path) -> None:
    """Invalid UTF-8, a line of 10 MB and a gzip bomb are refused by name, without being held in memory."""
    (tmp_path / "latin").write_bytes(b"good\nb\xe4d\n")
    with pytest.raises(DataError, match=r"latin:2: not UTF-8"):
        list(read_lines(tmp_path / "latin"))
    (tmp_path / "long").write_bytes(b"x" * 10_000_000)
    with pytest.raises(DataError, match=r"long:1: a line of more than 1048576 bytes"):
        list(read_lines(tmp_path / "long"))
    (tmp_path / "bomb.gz").write_bytes(gzip.compress((b"x" * 999 + b"\n") * 100_000))
    with pytest.raises(DataError, match=r"bomb.gz: expands to more than"):
        for _ in read_lines(tmp_path / "bomb.gz"):
            pass
    (tmp_path / "short.gz").write_bytes(gzip.compress(b"a\nb\n" * 1000)[:-20])
    with pytest.raises(DataError, match=r"short.gz: cannot be read"):
        list(read_lines(tmp_path / "short.gz"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: not a regular file"):
        list(read_lines(tmp_path / "pipe"))


def _cuts(folder: Path) -> CutSet:
    cuts = []
    for i in range(3):
        write_wav(folder / f"c{i}.wav", 1.0 + 0.1 * i, seed=i)
        recording = Recording.from_file(folder / f"c{i}.wav")
        supervision = SupervisionSegment(f"u{i}", recording.id, 0, 0.5, text=f"text {i}", speaker=f"s{i}")
        cuts.append(MonoCut(f"u{i}", 0.25, 0.5, 0, supervisions=[supervision], recording=recording))
    return CutSet.from_cuts(cuts)


@pytest.mark.parametrize("form", ["cuts.jsonl", "cuts.jsonl.gz", "shar"])
def test_lhotse_cuts_are_read_from_manifests_and_shar(tmp_path: Path, form: str) -> None:
    """All three forms give the same ids, texts, speakers and samples as lhotse."""
    cuts = _cuts(tmp_path / "wav")
    if form == "shar":
        (tmp_path / "shar").mkdir()
        with SharWriter(tmp_path / "shar", fields={"recording": "flac"}, shard_size=2) as writer:
            for cut in cuts:
                writer.write(cut)
    else:
        cuts.to_file(tmp_path / form)
    corpus = TypeAdapter(CorpusConfig).validate_python({"kind": "lhotse", "path": tmp_path, "sets": {"train": form}})
    for i, utterance in enumerate(corpus.utterances("train")):
        assert (utterance.id, utterance.speaker, utterance.text) == (f"u{i}", f"s{i}", f"text {i}")
        # lhotse scales by 32767 when it writes FLAC and by 32768 when it reads
        np.testing.assert_allclose(_samples(utterance), sound(1.0 + 0.1 * i, seed=i)[2000:6000], atol=1)
    assert i == 2


@pytest.mark.parametrize("kind", ["command", "url"])
def test_a_cut_whose_audio_is_a_command_is_refused_and_the_command_never_runs(tmp_path: Path, kind: str) -> None:
    """lhotse would run it."""
    item = _cuts(tmp_path)[0].to_dict()
    item["recording"]["sources"][0] |= {"type": kind, "source": f"touch {tmp_path}/ran"}
    _json_lines(tmp_path / "cuts.jsonl", [item])
    (utterance,) = _import("lhotse", path=tmp_path, sets={"train": "cuts.jsonl"})
    with pytest.raises(DataError, match=f"its audio source is a {kind}"):
        utterance.read()
    assert not (tmp_path / "ran").exists()


def test_a_cut_needs_exactly_one_transcript(tmp_path: Path) -> None:
    """Cuts with none or several are refused by id."""
    item = _cuts(tmp_path)[0].to_dict()
    for supervisions in ([], item["supervisions"] * 2):
        _json_lines(tmp_path / "cuts.jsonl", [item | {"supervisions": supervisions}])
        with pytest.raises(DataError, match=f"cut u0 has {len(supervisions)} transcribed"):
            _import("lhotse", path=tmp_path, sets={"train": "cuts.jsonl"})


def test_a_broken_shar_folder_is_a_data_error(tmp_path: Path) -> None:
    """A truncated tar, or a folder without cuts, is refused by name."""
    (tmp_path / "shar").mkdir()
    with pytest.raises(DataError, match=r"no cuts"):
        _import("lhotse", path=tmp_path, sets={"train": "shar"})
    with SharWriter(tmp_path / "shar", fields={"recording": "flac"}) as writer:
        for cut in _cuts(tmp_path / "wav"):
            writer.write(cut)
    tar = tmp_path / "shar" / "recording.000000.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"recording\.000000\.tar: cannot be read as Shar"):
        _import("lhotse", path=tmp_path, sets={"train": "shar"})


@pytest.fixture
def yesno(tmp_path: Path) -> Iterator[Path]:
    """A folder laid out as the yesno corpus: 60 files named after their words."""
    for i in range(60):
        words = "_".join(f"{i:08b}")
        write_wav(tmp_path / "waves_yesno" / f"{words}.wav", 0.3, seed=i)
    yield tmp_path / "waves_yesno"


def test_a_corpus_that_lhotse_knows_is_prepared_by_its_recipe(yesno: Path) -> None:
    """Parts become sets; ids and texts are those of lhotse's supervisions."""
    settings = {"recipe": "yesno", "path": yesno, "sets": {"train": "train", "all": ["train", "test"]}}
    train = _import("lhotse-recipe", **settings)
    assert len(train) == 30
    assert (train[1].id, train[1].text) == ("0_0_0_0_0_0_1_0", "NO NO NO NO NO NO YES NO")
    np.testing.assert_array_equal(_samples(train[1]), sound(0.3, seed=2))
    assert len(_import("lhotse-recipe", set_name="all", **settings)) == 60


def test_an_unknown_recipe_part_or_option_names_the_known_ones(yesno: Path) -> None:
    """Each is a DataError with the nearest or all known names."""
    settings = {"recipe": "yesno", "path": yesno, "sets": {"train": "train"}}
    with pytest.raises(ValidationError, match=r"no recipe 'librispech'; did you mean 'librispeech'\?"):
        _import("lhotse-recipe", **(settings | {"recipe": "librispech"}))
    with pytest.raises(DataError, match=r"no part 'dev', only train, test"):
        _import("lhotse-recipe", **(settings | {"sets": {"train": "dev"}}))
    with pytest.raises(DataError, match=r"has no option speed, only corpus_dir"):
        _import("lhotse-recipe", **settings, options={"speed": 1})
    next(yesno.glob("*.wav")).unlink()
    with pytest.raises(DataError, match=r"yesno cannot prepare .*AssertionError"):
        _import("lhotse-recipe", **settings)


def test_lhotse_still_has_the_corpora_that_we_promise() -> None:
    """The names in our documents exist in the installed lhotse."""
    promised = {"librispeech", "commonvoice", "mls", "peoples_speech", "gigaspeech", "switchboard", "timit", "yesno"}
    assert promised <= set(recipe_names())


def _several(folder: Path, **changes: object) -> dict[str, object]:
    tables = {"far": write_table(folder / "far", count=6), "near": write_table(folder / "near", count=3, speakers=1)}
    sets = {"train": {"split": "train"}, "test": {"split": "test"}}
    corpora = {name: {"kind": "tsv", "path": path, "sets": sets} for name, path in tables.items()}
    return {"kind": "several", "corpora": corpora | changes}


def test_several_corpora_are_one_with_the_sets_of_all(tmp_path: Path) -> None:
    """The set `test` of the corpus `near` is `near-test`."""
    corpus = TypeAdapter(CorpusConfig).validate_python(_several(tmp_path))
    assert list(corpus.sets) == ["far-train", "far-test", "near-train", "near-test"]
    assert [u.id for u in corpus.utterances("far-test")] == ["u2", "u5"]
    assert [u.id for u in corpus.utterances("near-test")] == ["u2"]
    with pytest.raises(ValidationError, match="tvs"):
        TypeAdapter(CorpusConfig).validate_python(_several(tmp_path, worse={"kind": "tvs"}))
    with pytest.raises(ValidationError, match="cannot hold another kind: several"):
        TypeAdapter(CorpusConfig).validate_python(_several(tmp_path, more=_several(tmp_path)))


def test_a_corpus_of_several_that_is_missing_is_named(tmp_path: Path) -> None:
    """The message names the key that has to change."""
    missing = {"kind": "tsv", "path": tmp_path / "absent.tsv", "sets": {"train": {}}}
    corpus = TypeAdapter(CorpusConfig).validate_python(_several(tmp_path, calls=missing))
    with pytest.raises(DataError, match=r"data\.corpus\.corpora\.calls: corpus not found: .*absent\.tsv"):
        list(corpus.utterances("calls-train"))


def test_a_set_of_several_corpora_depends_on_its_own_corpus_only(tmp_path: Path) -> None:
    """Another corpus may change or be added without preparing it again; its own may not."""

    def digest(**changes: object) -> str:
        tree = {"folder": tmp_path, "corpus": _several(tmp_path, **changes), "train": "far-train", "valid": None}
        return set_digest(DataConfig.model_validate(tree | {"test": ["near-test"]}), "far-train")

    usual = digest()
    table = {"kind": "tsv", "path": tmp_path / "other.tsv", "sets": {"train": {}, "test": {}}}
    assert digest(near=table) == digest(third=table) == usual
    assert digest(far=table) != usual


def test_stereo_needs_a_channel(tmp_path: Path) -> None:
    """Several channels are refused unless one is chosen."""
    path = tmp_path / "stereo.wav"
    soundfile.write(path, np.stack([sound(0.1, 1), sound(0.1, 2)], axis=1), RATE)
    with pytest.raises(DataError, match=r"stereo.wav: 2 channels; set data.corpus.channel"):
        read_audio(path)
    np.testing.assert_array_equal(read_audio(path, channel=1)[0] * 32768, sound(0.1, 2))
    with pytest.raises(DataError, match="there is no channel 2"):
        read_audio(path, channel=2)


def _spoilt(folder: Path, how: str) -> Path:
    path = folder / f"{how}.wav"
    write_wav(path, 1.0)
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        endless = content[:24] + (8000).to_bytes(4, "little") + content[28:40]
        path.write_bytes(
            {
                "empty": b"",
                "header-only": content[:44],
                "truncated": content[:9000],
                "random": np.random.default_rng(0).bytes(5000),
                "no-samples": content[:40] + b"\0\0\0\0",
                "two-gigabytes": endless + (0x70000000).to_bytes(4, "little") + content[44:],
            }[how]
        )
    return path


@pytest.mark.parametrize(
    "how", ["missing", "folder", "fifo", "empty", "header-only", "truncated", "random", "no-samples", "two-gigabytes"]
)
def test_spoilt_audio_is_a_data_error_that_names_the_file(tmp_path: Path, how: str) -> None:
    """Whatever replaces the audio, the message begins with its path."""
    path = _spoilt(tmp_path, how)
    with pytest.raises(DataError, match=str(path)):
        read_audio(path)


@pytest.mark.parametrize(("start", "duration"), [(0.5, 0.6), (1.1, None), (-0.1, 0.5)])
def test_a_segment_beyond_the_file_is_refused_with_the_numbers(
    tmp_path: Path, start: float, duration: float | None
) -> None:
    """The message has the requested segment and the length of the file."""
    write_wav(tmp_path / "a.wav", 1.0)
    with pytest.raises(DataError, match=r"from .* s does not fit: the file has 1.000 s"):
        read_audio(tmp_path / "a.wav", start, duration)


@pytest.mark.parametrize("form", ["wav", "flac", "ogg", "mp3"])
def test_mutated_audio_never_hangs_and_raises_nothing_but_data_errors(tmp_path: Path, form: str) -> None:
    """500 seeded mutations of each format give samples that fit a file this small, or a DataError."""
    path = tmp_path / f"a.{form}"
    soundfile.write(path, sound(0.25), RATE)
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    refused = 0
    for _ in range(500):
        spoilt = bytearray(whole[: random.integers(1, len(whole) + 1)] if random.random() < 0.3 else whole)
        for position in random.integers(0, min(len(spoilt), 200), random.integers(0, 8)):
            spoilt[position] = random.integers(256)
        path.write_bytes(spoilt)
        began = time.thread_time()
        try:
            samples, rate = read_audio(path)
            assert len(samples) <= 3600 * rate
        except DataError:
            refused += 1
        assert time.thread_time() - began < 1
    assert refused > 0
