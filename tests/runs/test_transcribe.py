"""Files, folders and standard input are transcribed, in every format, to the screen and to files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pysubs2
import pytest
import soundfile
from typer.testing import CliRunner

import starling
from starling.cli import app
from starling.errors import CheckpointError, ConfigError
from tests.speech.tones import RATE, performance

TONES = Path(__file__).parents[1] / "data" / "tones"


def sung(path: Path, words: list[str], seed: int = 1, rate: int = RATE) -> Path:
    """A file with some words, with a pause in the middle."""
    gaps = [0.3] * (len(words) + 1)
    gaps[len(words) // 2] = 1.0
    waveform, _ = performance(words, gaps, np.random.default_rng(seed), rate)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, waveform, rate)
    return path


def transcribed(*arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, output and errors of `starling transcribe`."""
    result = CliRunner().invoke(app, ["transcribe", str(TONES), *map(str, arguments)], input=stdin)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A folder with audio of two rates in two folders, and a file that is not audio."""
    sung(tmp_path / "talks" / "a.wav", ["DO", "RE", "MI"])
    sung(tmp_path / "talks" / "deep" / "b c.flac", ["FA", "DO"], rate=16_000)
    (tmp_path / "talks" / "notes.md").write_text("no audio")
    return tmp_path / "talks"


def test_a_folder_is_transcribed_file_by_file(talks: Path) -> None:
    """Each file has a line with its path, a tab and the text."""
    assert transcribed(talks) == (0, f"{talks}/a.wav\tDO RE MI\n{talks}/deep/b c.flac\tFA DO\n", "")


def test_transcripts_are_written_to_a_folder_as_they_were_found(talks: Path, tmp_path: Path) -> None:
    """Files have the suffix of the format; a file with the same name and another suffix keeps its own."""
    sung(talks / "a.flac", ["MI"])
    assert transcribed(talks, "--format", "srt", "--output", tmp_path / "out") == (0, "", "")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert found == ["a.flac.srt", "a.wav.srt", "deep/b c.srt"]
    cues = pysubs2.load(str(tmp_path / "out" / "a.wav.srt"))
    assert " ".join(cue.plaintext for cue in cues) == "DO RE MI"


def test_one_transcript_is_written_to_a_file(talks: Path, tmp_path: Path) -> None:
    """This holds for one input; the folder of the file is created. Transcripts of a folder go to a folder, even if it
    has one file."""
    path = tmp_path / "new" / "talk.json"
    assert transcribed(talks / "a.wav", "--format", "json", "--output", path)[0] == 0
    assert transcribed(talks / "deep", "--output", tmp_path / "texts")[0] == 0
    assert (tmp_path / "texts" / "b c.txt").read_text() == "FA\nDO\n"
    found = json.loads(path.read_text())
    assert (found["file"], found["text"], len(found["segments"])) == (str(talks / "a.wav"), "DO RE MI", 2)
    assert found["seconds"] == pytest.approx(soundfile.info(talks / "a.wav").duration, abs=1e-3)


def test_a_bad_file_is_named_and_the_others_are_done(talks: Path) -> None:
    """The exit code is that of unusable data; a truncated file is bad, too."""
    (talks / "bad.wav").write_bytes(b"RIFF of nothing")
    whole = (talks / "a.wav").read_bytes()
    (talks / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (talks / "empty.flac").touch()
    code, out, err = transcribed(talks, talks / "absent.wav")
    assert code == 5
    assert out == f"{talks}/a.wav\tDO RE MI\n{talks}/deep/b c.flac\tFA DO\n"
    assert err.startswith("error: 4 of 6 files cannot be transcribed: ")
    for name in ("bad.wav: cannot be read as audio", "cut.wav: truncated", "empty.flac: ", "absent.wav: "):
        assert name in err
    code, _, err = transcribed(talks / "notes.md")
    assert (code, err.count("\n")) == (5, 1)
    (talks / "none").mkdir()
    code, _, err = transcribed(talks / "none")
    assert (code, "none: this folder has no audio files" in err) == (5, True)


def test_a_file_with_less_audio_than_declared_and_one_without_speech_are_reported(talks: Path, tmp_path: Path) -> None:
    """They are named on standard error: the existing audio of a file is transcribed, and silence has no words."""
    whole = (talks / "a.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[: round(0.95 * len(whole))])
    soundfile.write(tmp_path / "silent.wav", np.zeros(2 * RATE), RATE)
    code, out, err = transcribed(tmp_path / "cut.wav", tmp_path / "silent.wav")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith(f"{tmp_path}/cut.wav\tDO") and second == f"{tmp_path}/silent.wav\t"
    assert f"{tmp_path}/cut.wav: 5.0% of the audio that its header declares is missing; the rest is used\n" in err
    assert f"{tmp_path}/silent.wav: no speech was recognised in 2.0 s of audio\n" in err
    code, out, _ = transcribed(tmp_path / "silent.wav", "--format", "ctm")
    assert (code, out) == (0, "")
    code, out, _ = transcribed(tmp_path / "cut.wav", "--format", "json")
    assert json.loads(out)["note"].startswith(f"{tmp_path}/cut.wav: 5.0% of the audio")


def test_standard_input_is_transcribed(talks: Path) -> None:
    """The input is a file of any kind that libsndfile reads, or raw PCM; the output has no name, and a line for each
    segment."""
    assert transcribed("-", stdin=(talks / "a.wav").read_bytes()) == (0, "DO\nRE MI\n", "")
    assert transcribed("-", stdin=(talks / "deep" / "b c.flac").read_bytes()) == (0, "FA\nDO\n", "")
    samples, _ = soundfile.read(talks / "a.wav", dtype="int16")
    raw = samples.astype("<i2").tobytes()
    assert transcribed("-", "--raw-pcm", RATE, stdin=raw) == (0, "DO\nRE MI\n", "")
    code, out, _ = transcribed("-", "--raw-pcm", RATE, "--format", "ctm", stdin=raw)
    assert code == 0
    assert [line.split()[4] for line in out.splitlines()] == ["DO", "RE", "MI"]
    assert {line.split()[0] for line in out.splitlines()} == {"stdin"}
    code, _, err = transcribed("-", "--raw-pcm", RATE, stdin=raw + b"x")
    assert (code, "ends within a sample" in err) == (5, True)
    code, _, err = transcribed("-", stdin=b"")
    assert (code, err.startswith("error: standard input: cannot be read as audio")) == (5, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.wav", "--format", "str"], "--format str: unknown; did you mean 'srt'? known are txt, json, srt, vtt, ctm"),
        (["a.wav", "deep/b c.flac", "--format", "vtt"], "subtitles of 2 files need --output FOLDER"),
        (["a.wav", "deep/b c.flac", "--output", "a.wav"], "--output a.wav: is a file; give a folder for 2 transcripts"),
        (["a.wav", ".", "--output", "out"], "--output out: 1 names are given twice, such as a.wav; run them apart"),
        (["a.wav", "--raw-pcm", "8000"], "give - as a file"),
        (["a.wav", "--beam"], "the best model and the beam search belong to an experiment"),
    ],
)
def test_contradictions_are_refused(
    talks: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """They are refused before anything is transcribed."""
    monkeypatch.chdir(talks)
    code, out, err = transcribed(*arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_files_are_decoded_together_and_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even if one of them is longer than what is decoded at once."""
    monkeypatch.setattr("starling.speech.transcribing.files.TOGETHER", 3.0)
    texts = [["DO"], ["RE", "MI", "FA", "DO", "RE", "MI", "FA"], ["MI"], ["FA", "FA"]]
    for number, words in enumerate(texts):
        sung(tmp_path / f"{number}.wav", words, seed=number)
    code, out, _ = transcribed(tmp_path)
    assert code == 0
    assert [line.split("\t")[1].split() for line in out.splitlines()] == texts


def test_a_model_is_loaded_from_an_experiment_a_checkpoint_or_its_folder(kept: Path) -> None:
    """All three are the same model here; others are refused."""
    experiment = kept / "exp" / "kept"
    checkpoint = next((experiment / "checkpoints").glob("step-*"))
    samples, rate = soundfile.read(kept / "corpus" / "8.flac", dtype="float32")
    texts = {starling.load_model(path).transcribe(samples, rate).text for path in (
        experiment, str(checkpoint), checkpoint / "model")}  # fmt: skip
    assert texts == {"BA"}
    with pytest.raises(ConfigError, match=r"no config\.yaml here"):
        starling.load_model(kept)
    with pytest.raises(CheckpointError):
        starling.load_model(experiment, best=True)


PEAK = """
import resource, sys
import numpy as np
import starling
from tests.speech.tones import RATE, performance
import torch
torch.set_num_threads(1)

model = starling.load_model(sys.argv[1])
words = ["DO", "RE", "MI", "FA"] * 40
generator = np.random.default_rng(1)
waveform, _ = performance(words, [0.1, 0.2, 0.8, 0.1] * 40 + [0.8], generator)
peaks = []
for minutes in map(int, sys.argv[2:]):
    rounds = round(60 * minutes * RATE / len(waveform))
    found = [each for some in model.stream((waveform for _ in range(rounds)), RATE) for each in some]
    assert sum(len(each.text.split()) for each in found) >= 0.9 * len(words) * rounds
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(*peaks)
"""


@pytest.mark.soak
def test_three_hours_take_no_more_memory_than_ten_minutes() -> None:
    """The process may grow by 60 MB, a tenth of the audio as floats."""
    run = subprocess.run(
        [sys.executable, "-c", PEAK, str(TONES), "10", "180"], capture_output=True, text=True, check=True
    )
    first, second = map(int, run.stdout.split())
    assert second - first < 60_000, (first, second)


def test_phrases_of_a_list_are_boosted(talks: Path, tmp_path: Path) -> None:
    """This holds in every file; an unusable list is named, with its line, before anything is transcribed."""
    waveform, _ = performance(["DO", "RE", "MI"], [0.3, 0.1, 0.05, 0.3], np.random.default_rng(3))
    soundfile.write(talks / "a.wav", waveform, RATE)
    words = tmp_path / "words.txt"
    words.write_text("# names\nREMI\t5\nDORADO\n")
    expected = f"{talks}/a.wav\tDO REMI\n{talks}/deep/b c.flac\tFA DO\n"
    assert transcribed(talks, "--boost", words) == (0, expected, "")
    code, out, _ = transcribed(talks / "a.wav", "--boost", words, "--format", "ctm")
    assert (code, [line.split()[4] for line in out.splitlines()]) == (0, ["DO", "REMI"])
    words.write_text("REMI\nRémi\n")
    code, out, err = transcribed(talks, "--boost", words)
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert (
        f"--boost {words}, line 2: 'Rémi' has the character 'é' (U+00E9), which the recogniser's tokens cannot" in err
    )
    code, out, err = transcribed(talks, "--boost", tmp_path / "absent.txt")
    assert (code, out) == (5, "")
    assert f"--boost {tmp_path}/absent.txt: cannot be read" in err
