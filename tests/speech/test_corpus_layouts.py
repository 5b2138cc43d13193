"""Recipes for well-known corpora, run on miniature copies of their real folders, from download to shards."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpus_layouts import LAYOUTS, gigaspeech, librispeech, switchboard, voice
from lhotse.audio.backend import get_current_audio_backend
from numpy.typing import NDArray

from starling.errors import ConfigError, DataError
from starling.speech.data import set_digest
from starling.speech.prepare import prepare_all
from starling.speech.recipe import Recipe, load_recipe
from starling.speech.store import SpeechSet

RECIPES = Path(__file__).parents[2] / "recipes"
ONLY_TRAIN = ("data.valid=null", "data.test=train")
MORE = {  # lhotse starts processes for each part of Common Voice, so one part has to do
    "common_voice": ("data.corpus.options.num_jobs=1", *ONLY_TRAIN),
    "mls": ("data.corpus.options.num_jobs=1", "data.corpus.options.output_dir=OUTPUT"),
}
S, COUNCIL = "SESSION_", "GOOD MORNING COUNCIL"
# number of utterances, the first one's id, speaker, transcript, and what its audio was made of: seconds, Hz, seed
EXPECTED = {
    ("librispeech100", "train"): (4, "100-7-0000", "100", "CHAPTER SEVEN SENTENCE A OF SPEAKER 100", (1.1, 16000, 100)),
    ("librispeech100", "dev"): (8, "101-7-0000", "101", "CHAPTER SEVEN SENTENCE A OF SPEAKER 101", (1.1, 16000, 101)),
    ("mini_librispeech", "dev"): (4, "101-7-0000", "101", "CHAPTER SEVEN SENTENCE A OF SPEAKER 101", (1.1, 16000, 101)),
    ("common_voice", "train"): (3, "common_voice_en_17000000", "0a" * 64, "HE SAID WAIT IT'S LATE", (1.3, 32000, 0)),
    ("mls", "train"): (2, "4001_77_000000", "4001", "ZAŻÓŁĆ GĘŚLĄ JAŹŃ A", (1.2, 16000, 4001)),
    ("mls", "test"): (2, "4003_77_000000", "4003", "ZAŻÓŁĆ GĘŚLĄ JAŹŃ A", (1.2, 16000, 4003)),
    ("peoples_speech", "train"): (2, f"{S}0_DOT_mp3_00000", f"{S}0_DOT_mp3", COUNCIL, (1.0, 16000, 0)),
    ("peoples_speech", "dev"): (2, f"{S}4_DOT_mp3_00000", f"{S}4_DOT_mp3", COUNCIL, (1.0, 16000, 40)),
    ("gigaspeech", "train"): (2, "POD0000000_S0000000", "POD0000000", "AND SO WE BEGIN", None),
    ("gigaspeech", "test"): (2, "POD0000002_S0000000", "POD0000002", "AND SO WE BEGIN", None),
    ("timit", "train"): (2, "FCJF0-SA1", "FCJF0", "EVEN THEN IF SHE TOOK ONE STEP FORWARD", (1.5, 16000, 0)),
    ("timit", "test"): (2, "FELC0-SA1", "FELC0", "EVEN THEN IF SHE TOOK ONE STEP FORWARD", (1.5, 16000, 0)),
    ("yesno", "train"): (30, "0_0_0_0_0_0_0_0", "unknown", "NO NO NO NO NO NO NO NO", (0.6, 8000, 0)),
    ("yesno", "test"): (30, "0_0_0_0_0_0_0_1", "unknown", "NO NO NO NO NO NO NO YES", (0.6, 8000, 1)),
}


def recipe_for(name: str, corpus: Path, folder: Path, *more: str) -> Recipe:
    overrides = [f"data.corpus.path={corpus}", f"data.folder={folder / f'{name}-prepared'}"]
    overrides += [each.replace("OUTPUT", str(folder / "manifests")) for each in (*MORE.get(name, ()), *more)]
    return load_recipe(RECIPES / f"{name}.yaml", overrides)


def likeness(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """The largest correlation at shifts of up to 100 samples; decoders of lossy formats may delay."""
    length = min(len(first), len(second)) - 200
    middle = first[100 : 100 + length]
    return max(float(np.corrcoef(middle, second[shift : shift + length])[0, 1]) for shift in range(200))


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "switchboard"])
def test_a_recipe_prepares_the_corpus_as_it_is_downloaded(name: str, tmp_path: Path) -> None:
    """`starling prepare` with the recipe gives each set's utterances, speakers, transcripts and audio."""
    if name == "gigaspeech":
        pytest.importorskip("speechcolab", reason="lhotse reads GigaSpeech.json by speechcolab")
    recipe = recipe_for(name, LAYOUTS[name](tmp_path), tmp_path)
    prepare_all(recipe)
    expected = {of_set: row for (of, of_set), row in EXPECTED.items() if of == name}
    assert expected
    for of_set, (count, first, speaker, text, source) in expected.items():
        found = SpeechSet.open(recipe.data.set_folder(of_set))
        assert (len(found), found.id(0), found.speaker(0), found.text(0)) == (count, first, speaker, text)
        audio = found.audio(0)
        if source is not None and source[1] == found.sampling_rate:
            assert likeness(audio, voice(*source)) > 0.95
        elif source is not None:
            assert len(audio) == pytest.approx(source[0] * found.sampling_rate, abs=found.sampling_rate // 10)


def test_switchboards_two_sides_are_two_speakers_with_audio_of_their_own(tmp_path: Path) -> None:
    """Each side's transcript goes with its channel; marks are not words, and segments without words are left out."""
    corpus = switchboard(tmp_path)
    recipe = recipe_for("switchboard", corpus, tmp_path, "data.hold_out=null", *ONLY_TRAIN)
    prepare_all(recipe)
    found = SpeechSet.open(recipe.data.set_folder("train"))
    places = {found.id(place): place for place in range(len(found))}
    both, rate = soundfile.read(next(corpus.rglob("sw02001.sph")), dtype="float32")
    first, end = round(0.2 * rate), round(0.2 * rate) + round(1.2 * rate)
    for channel, side in enumerate("AB"):
        place = places[f"sw2001{side}-ms98-a-0000"]
        assert found.speaker(place) == f"sw2001{side}"
        np.testing.assert_allclose(found.audio(place), both[first:end, channel], atol=1 / 32768)
    texts = [found.text(places[f"sw2001A-ms98-a-{number:04d}"]) for number in (2, 4)]
    assert texts == ["YEAH THAT'S FINE YOU KNOW", "ABOUT WEATHERWISE ESPECIALLY SO"]
    dropped = (recipe.data.set_folder("train") / "dropped.tsv").read_text(encoding="utf-8")
    assert "sw2001A-ms98-a-0003\t0.000\tno words, only [vocalized-noise]" in dropped
    assert len(dropped.splitlines()) == 1 + 4  # one of each side; lhotse leaves [silence] out


def test_switchboard_without_its_transcripts_is_an_error_and_not_a_download(tmp_path: Path) -> None:
    """lhotse's function would fetch them into the working folder."""
    corpus = switchboard(tmp_path)
    (corpus / "swb_ms98_transcriptions").rename(tmp_path / "elsewhere")
    with pytest.raises(
        DataError, match=r"swb_ms98_transcriptions: no such folder; put .* set data\.corpus\.options\.transcripts_dir"
    ):
        prepare_all(recipe_for("switchboard", corpus, tmp_path))
    where = f"data.corpus.options.transcripts_dir={tmp_path / 'elsewhere'}"
    prepare_all(recipe_for("switchboard", corpus, tmp_path, where, "data.hold_out=null", *ONLY_TRAIN))


def test_compressed_sphere_files_are_named_and_not_read_as_noise(tmp_path: Path) -> None:
    """libsndfile cannot decode shorten."""
    corpus = switchboard(tmp_path)
    file = next(corpus.rglob("sw02001.sph"))
    header, rest = file.read_bytes()[:1024], file.read_bytes()[1024:]
    shortened = header.replace(b"-s4 ulaw", b"-s27 ulaw,embedded-shorten-v2.00")[:1024]
    file.write_bytes(shortened + rest)
    with pytest.raises(DataError, match=r"switchboard cannot prepare .*sw02001\.sph"):
        prepare_all(recipe_for("switchboard", corpus, tmp_path))


def test_a_missing_part_lists_the_available_ones(tmp_path: Path) -> None:
    """The error is raised before lhotse reads anything."""
    corpus = librispeech(tmp_path, ("train-clean-100", "dev-clean", "dev-other"))
    with pytest.raises(DataError, match=r"set test-clean: .* no part 'test-clean', only dev-clean, dev-other, train-"):
        prepare_all(recipe_for("librispeech100", corpus, tmp_path, "data.valid=null"))
    common_voice = LAYOUTS["common_voice"](tmp_path)
    with pytest.raises(DataError, match=r"no part 'de/train', only cy/dev, .*, en/train"):
        prepare_all(recipe_for("common_voice", common_voice, tmp_path, "data.corpus.sets.train=de/train"))
    peoples_speech = LAYOUTS["peoples_speech"](tmp_path)
    (peoples_speech / "train" / "dirty.json").unlink()
    with pytest.raises(
        DataError, match=r"no part 'train/dirty', only train/dirty_sa, train/clean_sa, train/clean, val"
    ):
        prepare_all(recipe_for("peoples_speech", peoples_speech, tmp_path, "data.corpus.sets.train=train/dirty"))
    pytest.importorskip("speechcolab")
    with pytest.raises(DataError, match=r"no part 'XXL', only XS, S, M, L, XL, DEV, TEST"):
        prepare_all(recipe_for("gigaspeech", gigaspeech(tmp_path), tmp_path, "data.corpus.sets.train=XXL"))


def test_lhotses_way_of_reading_audio_is_restored_even_after_an_error(tmp_path: Path) -> None:
    """Starling makes lhotse read through libsndfile only while a recipe runs."""
    before = get_current_audio_backend()
    corpus = LAYOUTS["yesno"](tmp_path)
    next(corpus.glob("*.wav")).unlink()
    with pytest.raises(DataError, match="yesno cannot prepare"):
        prepare_all(recipe_for("yesno", corpus, tmp_path))
    assert get_current_audio_backend() is before


def test_a_set_depends_on_its_rewriting_but_not_on_how_many_processes_look_at_files(tmp_path: Path) -> None:
    """Changing `num_jobs` or `output_dir` does not ask for another preparation."""
    usual = set_digest(recipe_for("mls", tmp_path, tmp_path).data, "train")
    elsewhere = ("data.corpus.options.num_jobs=7", f"data.corpus.options.output_dir={tmp_path / 'b'}")
    assert set_digest(recipe_for("mls", tmp_path, tmp_path, *elsewhere).data, "train") == usual
    assert set_digest(recipe_for("mls", tmp_path, tmp_path, "data.corpus.options.opus=false").data, "train") != usual
    rewritten = set_digest(recipe_for("mls", tmp_path, tmp_path, "data.corpus.rewrite=[[a, b]]").data, "train")
    assert rewritten != usual
    assert set_digest(recipe_for("mls", tmp_path, tmp_path, "data.corpus.rewrite=null").data, "train") == usual


@pytest.mark.parametrize("rewrite", [r"[['[', a]]", r"[[a, '\2']]"])
def test_an_invalid_regular_expression_is_a_problem_of_the_recipe(rewrite: str, tmp_path: Path) -> None:
    """It is found before anything is read."""
    with pytest.raises(ConfigError, match=r"data\.corpus.*not a regular expression and replacement"):
        recipe_for("yesno", tmp_path, tmp_path, f"data.corpus.rewrite={rewrite}")
