"""A corpus whose faults are all known: distinct sentences and voices, and planted faults."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from starling.speech.data import DataConfig

RATE = 8000
WORDS = [
    *("amber", "basket", "candle", "dragon", "ember", "forest", "garden", "hammer", "island", "jungle", "kettle"),
    *("lantern", "marble", "needle", "orange", "pepper", "quarter", "river", "saddle", "timber", "umbrella"),
    *("velvet", "window", "yellow", "zebra", "anchor", "butter", "copper", "dinner", "eleven", "feather"),
]
Row = dict[str, str]
Expected = set[tuple[str, str, str]]
"""Kind, set and id of every expected finding."""


def sentence(seed: int) -> str:
    """Six to eight words; a different sentence for each seed."""
    random = np.random.default_rng([7, seed])
    return " ".join(random.choice(WORDS, random.integers(6, 9), replace=False))


def voice(seed: int, seconds: float) -> NDArray[np.float32]:
    """A gliding harmonic tone at its own level, with a little noise, [T], at `RATE`."""
    random = np.random.default_rng([8, seed])
    time = np.arange(round(seconds * RATE)) / RATE
    pitch = np.interp(time, np.linspace(0, seconds, 5), random.uniform(100, 220, 5))
    loudness = np.interp(time, np.linspace(0, seconds, 12), random.uniform(0.05, 1, 12))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    tone = sum(np.sin(n * phase + random.uniform(0, 6)) / n for n in range(1, 8))
    return (0.12 * loudness * tone + 0.001 * random.standard_normal(len(time))).astype(np.float32)


class Planted:
    """The corpus on disk, changed plant by plant; `expected` is what a check has to find."""

    def __init__(self, folder: Path, train: int = 24, test: int = 8) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self.expected: Expected = set()
        self._seed = 0
        for i in range(train + test):
            split, number = ("train", i) if i < train else ("test", i - train)
            self.add(f"{split}-{number}", split)

    def add(self, name: str, split: str, **own: str) -> Row:
        """Add an utterance with its own sentence, voice and speaker, except for those given."""
        self._seed += 1
        row = {"id": name, "split": split, "speaker": f"{split}-speaker-{self._seed % 3}", "audio": f"{name}.wav"}
        row |= {"text": sentence(self._seed), **own}
        if "audio" not in own:
            self.write(row["audio"], voice(self._seed, 0.075 * len(row["text"])))
        self.rows.append(row)
        return row

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row["id"] == name)

    def sound(self, name: str) -> NDArray[np.float32]:
        samples: NDArray[np.float32] = soundfile.read(self.folder / self.row(name)["audio"], dtype="float32")[0]
        return samples

    def write(self, name: str, samples: NDArray[np.float32], **format_: str) -> str:
        """Write an audio file, and return its name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(self.folder / name, samples, RATE, **format_)
        return name

    def find(self, *found: tuple[str, str, str]) -> None:
        self.expected |= set(found)

    def config(self, data: Path, **settings: object) -> DataConfig:
        """The corpus as a recipe's `data:` section."""
        return DataConfig.model_validate(self.tree(data) | settings)

    def tree(self, data: Path) -> dict[str, object]:
        columns = ("id", "speaker", "split", "audio", "text")
        table = self.folder / "corpus.tsv"
        lines = ["\t".join(columns), *("\t".join(row[column] for column in columns) for row in self.rows)]
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
        corpus = {
            "kind": "tsv", "path": str(table), "sets": {"train": {"split": "train"}, "test": {"split": "test"}},
        }  # fmt: skip
        return {"folder": str(data), "corpus": corpus, "sampling_rate": RATE, "valid": None}


def same_samples_as_flac(corpus: Planted) -> None:
    """Lossless coding, a different text and a different speaker hide nothing."""
    corpus.add("again", "train", audio=corpus.write("again.flac", corpus.sound("train-1")))
    corpus.find(("same-audio", "train", "again"))


def three_times_the_same_file(corpus: Planted) -> None:
    """The first of three identical files stays."""
    for name in ("second", "third"):
        corpus.add(name, "train", audio="train-2.wav")
        corpus.find(("same-audio", "train", name))


def the_same_recording_as_vorbis(corpus: Planted) -> None:
    """Lossy coding at a different level, with the same text."""
    audio = corpus.write("vorbis.ogg", 0.7 * corpus.sound("train-3"), format="OGG", subtype="VORBIS")
    corpus.add("vorbis", "train", audio=audio, text=corpus.row("train-3")["text"])
    corpus.find(("same-text-and-length", "train", "vorbis"), ("near-text", "train", "vorbis"))


def another_take_of_the_same_length(corpus: Planted) -> None:
    """Text and length alone do not make a duplicate of the audio."""
    corpus.add("take", "train", text=corpus.row("train-4")["text"])
    corpus.find(("near-text", "train", "take"))


def nearly_the_same_text(corpus: Planted) -> None:
    """One letter of the text is wrong."""
    corpus.add("spelt", "train", text=corpus.row("train-5")["text"] + "s")
    corpus.find(("near-text", "train", "spelt"))


def audio_in_training(corpus: Planted) -> None:
    """The same audio in training and test, with different text and speaker; both sides are reported."""
    corpus.add("leaked", "train", audio=corpus.write("leaked.flac", corpus.sound("test-1")))
    corpus.find(("overlap-audio", "train", "leaked"), ("overlap-audio", "test", "test-1"))


def recording_in_training(corpus: Planted) -> None:
    """The same recording, encoded again."""
    audio = corpus.write("mp3.mp3", corpus.sound("test-2"), format="MP3", subtype="MPEG_LAYER_III")
    corpus.add("mp3", "train", audio=audio, text=corpus.row("test-2")["text"].upper())
    for kind in ("overlap-audio", "overlap-text"):
        corpus.find((kind, "train", "mp3"), (kind, "test", "test-2"))


def text_in_training(corpus: Planted) -> None:
    """Different case and more spaces are still the same text."""
    corpus.add("said", "train", text=corpus.row("test-3")["text"].title().replace(" ", "  "))
    corpus.find(("overlap-text", "train", "said"), ("overlap-text", "test", "test-3"))


def text_nearly_in_training(corpus: Planted) -> None:
    """The text has one letter more."""
    corpus.add("nearly", "train", text=corpus.row("test-4")["text"] + "s")
    corpus.find(("overlap-near-text", "train", "nearly"), ("overlap-near-text", "test", "test-4"))


def speaker_in_training(corpus: Planted) -> None:
    """A speaker in training and test causes one finding, at the first utterance in the test set."""
    for name in ("known-1", "known-2"):
        corpus.add(name, "test", speaker="train-speaker-1")
    corpus.find(("overlap-speaker", "test", "known-1"))


def silence(corpus: Planted) -> None:
    """Zeros, and inaudible noise."""
    quiet = np.random.default_rng(1).standard_normal(4 * RATE).astype(np.float32) * 3e-4
    corpus.add("quiet", "train", audio=corpus.write("quiet.wav", quiet))
    corpus.add("zeros", "train", audio=corpus.write("zeros.wav", 0 * quiet))
    corpus.find(("silence", "train", "quiet"), ("silence", "train", "zeros"))


def clipping(corpus: Planted) -> None:
    """The audio is twenty times too loud."""
    row = corpus.add("loud", "test")
    corpus.write(row["audio"], np.clip(20 * corpus.sound("loud"), -1, 1))
    corpus.find(("clipping", "test", "loud"))


def a_transcript_that_cannot_fit(corpus: Planted) -> None:
    """The speech is fast but possible, and has too few frames for CTC."""
    row = corpus.add("fast", "train")
    corpus.write(row["audio"], voice(901, 0.036 * len(row["text"])))
    corpus.find(("too-short", "train", "fast"))


def seconds_per_character(corpus: Planted) -> None:
    """A transcript cut off, and one of a different recording."""
    corpus.add("slow", "train", text="cut", audio=corpus.write("slow.wav", voice(902, 4.5)))
    row = corpus.add("long", "test")
    corpus.write(row["audio"], voice(903, 0.015 * len(row["text"])))
    corpus.find(
        ("seconds-per-character", "train", "slow"), ("seconds-per-character", "test", "long"),
        ("too-short", "test", "long"),
    )  # fmt: skip


def unreadable_files(corpus: Planted) -> None:
    """Files without audio, cut off, missing, and not finite."""
    (corpus.folder / "bytes.wav").write_bytes(b"not audio" * 100)
    whole = (corpus.folder / "train-6.wav").read_bytes()
    (corpus.folder / "half.wav").write_bytes(whole[: len(whole) // 2])
    corpus.write("nan.wav", np.full(RATE, np.nan, np.float32), subtype="FLOAT")
    for name in ("bytes", "half", "missing", "nan"):
        corpus.add(name, "train", audio=f"{name}.wav")
        corpus.find(("unreadable", "train", name))


def an_empty_transcript(corpus: Planted) -> None:
    """An empty transcript, and an id used twice, whose first utterance is used."""
    corpus.add("mute", "train", text=" ")
    corpus.add("train-7", "train")
    corpus.find(("unusable", "train", "mute"), ("unusable", "train", "train-7"))


PLANTS: tuple[Callable[[Planted], None], ...] = (
    same_samples_as_flac,
    three_times_the_same_file,
    the_same_recording_as_vorbis,
    another_take_of_the_same_length,
    nearly_the_same_text,
    audio_in_training,
    recording_in_training,
    text_in_training,
    text_nearly_in_training,
    speaker_in_training,
    silence,
    clipping,
    a_transcript_that_cannot_fit,
    seconds_per_character,
    unreadable_files,
    an_empty_transcript,
)
