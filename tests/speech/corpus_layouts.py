"""Miniature copies of well-known corpora, in the folders, files and audio formats in which they are distributed."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray


def voice(seconds: float, rate: int, seed: int, channels: int = 1) -> NDArray[np.float32]:
    """Noise below 1 kHz, [T] or [T, channels], which lossy codecs keep."""
    generator = np.random.default_rng(seed)
    count = round(seconds * rate)
    samples = np.empty((count, channels), np.float32)
    for channel in range(channels):
        spectrum = np.fft.rfft(generator.standard_normal(count))
        spectrum[round(1000 * seconds) :] = 0
        wave = np.fft.irfft(spectrum, count)
        samples[:, channel] = 0.5 * wave / np.abs(wave).max()
    return samples[:, 0] if channels == 1 else samples


def _write(path: Path, samples: NDArray[np.float32], rate: int, kind: str, subtype: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, format=kind, subtype=subtype)


def _lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def librispeech(
    root: Path, parts: tuple[str, ...] = ("train-clean-100", "dev-clean", "dev-other", "test-clean", "test-other")
) -> Path:
    """LibriSpeech/<part>/<speaker>/<chapter>/<speaker>-<chapter>-<number>.flac, with one .trans.txt per chapter."""
    for place, part in enumerate(parts):
        for speaker in (100 + place, 200 + place):
            folder = root / "LibriSpeech" / part / str(speaker) / "7"
            texts = []
            for number in range(2):
                name = f"{speaker}-7-{number:04d}"
                _write(folder / f"{name}.flac", voice(1.1 + 0.1 * number, 16000, speaker + number), 16000, "FLAC")
                texts.append(f"{name} CHAPTER SEVEN SENTENCE {'AB'[number]} OF SPEAKER {speaker}")
            _lines(folder / f"{speaker}-7.trans.txt", texts)
    _lines(root / "LibriSpeech" / "SPEAKERS.TXT", ["; ID |SEX| SUBSET |MINUTES| NAME"])
    return root / "LibriSpeech"


def mini_librispeech(root: Path) -> Path:
    return librispeech(root, ("train-clean-5", "dev-clean-2"))


def common_voice(root: Path) -> Path:
    """cv-corpus/<language>/{train,dev,test}.tsv and clips/*.mp3."""
    columns = ["client_id", "path", "sentence", "up_votes", "down_votes"]
    columns += ["age", "gender", "accents", "variant", "locale", "segment"]
    for place, (language, sentence) in enumerate(
        {"en": 'He said: "Wait, it\'s late!"', "cy": "Bore da, Siôn."}.items()
    ):
        folder = root / "cv-corpus-13.0-2023-03-09" / language
        for split, numbers in {"train": range(3), "dev": range(3, 4), "test": range(4, 5)}.items():
            rows = []
            for number in numbers:
                clip = f"common_voice_{language}_{17000000 + number}.mp3"
                samples = voice(1.3 + 0.1 * number, 32000, 10 * place + number)
                _write(folder / "clips" / clip, samples, 32000, "MP3")
                rows.append([f"{number:x}a" * 64, clip, sentence, 2, 0, "twenties", "female", "", "", language, ""])
            with (folder / f"{split}.tsv").open("w", encoding="utf-8", newline="") as file:
                table = csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n")
                table.writerows([columns, *rows])
    return root / "cv-corpus-13.0-2023-03-09"


def mls(root: Path) -> Path:
    """mls_<language>_opus/<split>/audio/<speaker>/<book>/*.opus, transcripts.txt and metainfo.txt."""
    folder = root / "mls" / "mls_polish_opus"
    _lines(
        folder / "metainfo.txt",
        [
            " SPEAKER   |   GENDER   | PARTITION  |  MINUTES   |  BOOK ID  | TITLE | CHAPTER",
            *(f"  {speaker}  |  M  |  {split}  | 2.1 | 77 | Lalka | Tom I" for speaker, split in _MLS.items()),
        ],
    )
    for speaker, split in _MLS.items():
        texts = []
        for number in range(2):
            name = f"{speaker}_77_{number:06d}"
            path = folder / split / "audio" / str(speaker) / "77" / f"{name}.opus"
            _write(path, voice(1.2 + 0.1 * number, 16000, speaker + number), 16000, "OGG", "OPUS")
            texts.append(f"{name}\tzażółć gęślą jaźń {'ab'[number]}")
        _lines(folder / split / "transcripts.txt", texts)
    (root / "mls" / "mls_lm_polish").mkdir()
    return root / "mls"


_MLS = {4001: "train", 4002: "dev", 4003: "test"}


def peoples_speech(root: Path) -> Path:
    """<split>/<part>.json, JSON Lines with several utterances per recording session, and <split>/<part>/*.flac."""
    parts = ["train/clean", "train/clean_sa", "train/dirty", "train/dirty_sa", "validation/validation", "test/test"]
    for place, part in enumerate(parts):
        names = [f"SESSION_{place}_DOT_mp3_{number:05d}.flac" for number in range(2)]
        for number, name in enumerate(names):
            path = root / "peoples_speech" / part / f"{place:02d}" / name
            _write(path, voice(1.0 + 0.2 * number, 16000, 10 * place + number), 16000, "FLAC")
        training = {
            "duration_ms": [1000, 1200],
            "label": ["good morning council", "the motion carries"],
            "name": [f"{place:02d}/{name}" for name in names],
        }
        line = json.dumps({"identifier": f"SESSION_{place}", "training_data": training})
        _lines(root / "peoples_speech" / f"{part}.json", [line])
    return root / "peoples_speech"


def gigaspeech(root: Path) -> Path:
    """GigaSpeech.json, and long Opus recordings of which segments are transcribed, with tags in the text."""
    audios = []
    for place, subset in enumerate(("XS", "DEV", "TEST")):
        name = f"POD000000{place}"
        path = root / "GigaSpeech" / "audio" / "podcast" / f"P000{place}" / f"{name}.opus"
        _write(path, voice(6.0, 16000, place), 16000, "OGG", "OPUS")
        subsets = [f"{{{each}}}" for each in (("XS", "S", "M", "L", "XL") if subset == "XS" else (subset,))]
        texts = ["AND SO <COMMA> WE BEGIN <PERIOD>", "<MUSIC>", "IS THAT SO <QUESTIONMARK>"]
        segments = [
            {
                "sid": f"{name}_S{number:07d}",
                "speaker": "N/A",
                "begin_time": 0.5 + 1.75 * number,
                "end_time": 0.5 + 1.75 * number + 1.51,
                "text_tn": text,
                "subsets": subsets,
            }
            for number, text in enumerate(texts)
        ]
        audios.append(
            {
                "title": "N/A",
                "url": "https://example.org",
                "path": f"audio/podcast/P000{place}/{name}.opus",
                "aid": name,
                "source": "podcast",
                "codec": "opus",
                "channels": 1,
                "sample_rate": 16000,
                "duration": 6.0,
                "md5": "0",
                "subsets": subsets,
                "segments": segments,
            }
        )
    path = root / "GigaSpeech" / "GigaSpeech.json"
    path.write_text(json.dumps({"dataset": "GigaSpeech", "language": "EN", "audios": audios}), encoding="utf-8")
    return root / "GigaSpeech"


def switchboard(root: Path) -> Path:
    """LDC97S62: two-sided conversations in µ-law SPHERE files, and the Mississippi State transcripts beside them."""
    texts = [
        "hi um yeah i'd like to talk about how you dress for work",
        "[silence]",
        "[laughter-yeah] that's [noise] fine th[at]- you know",
        "[vocalized-noise]",
        "about_1 {weatherwise} [exspecially/especially] <b_aside> so",
    ]
    for place, name in enumerate(("2001", "2005")):
        path = root / "LDC97S62" / f"swb1_d{place + 1}" / "data" / f"sw0{name}.sph"
        _write(path, voice(7.0, 8000, place, channels=2), 8000, "NIST", "ULAW")
        for side in "AB":
            lines = [
                f"sw{name}{side}-ms98-a-{number:04d} {0.2 + 1.3 * number:.6f} {0.2 + 1.3 * number + 1.2:.6f} {text}"
                for number, text in enumerate(texts)
            ]
            folder = root / "LDC97S62" / "swb_ms98_transcriptions" / name[:2] / name
            _lines(folder / f"sw{name}{side}-ms98-a-trans.text", lines)
    return root / "LDC97S62"


def timit(root: Path) -> Path:
    """data/{TRAIN,TEST}/<dialect>/<speaker>/<sentence>.{WAV,TXT,WRD,PHN}; .WAV are SPHERE files."""
    for split, dialect, speaker in (("TRAIN", "DR1", "FCJF0"), ("TEST", "DR1", "FAKS0"), ("TEST", "DR1", "FELC0")):
        for seed, sentence in enumerate(("SA1", "SI1027")):
            path = root / "timit" / "data" / split / dialect / speaker / f"{sentence}.WAV"
            _write(path, voice(1.5, 16000, seed), 16000, "NIST", "PCM_16")
            _lines(path.with_suffix(".TXT"), ["0 24000 Even then, if she took one step forward."])
            _lines(path.with_suffix(".WRD"), ["0 12000 even", "12000 24000 then"])
            _lines(path.with_suffix(".PHN"), ["0 3000 h#", "3000 12000 iy", "12000 24000 v"])
    return root / "timit"


def yesno(root: Path) -> Path:
    """60 WAV files, each named by its eight words."""
    for number in range(60):
        name = "_".join(format(number, "08b"))
        _write(root / "waves_yesno" / f"{name}.wav", voice(0.6, 8000, number), 8000, "WAV", "PCM_16")
    return root / "waves_yesno"


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "librispeech100": librispeech,
    "mini_librispeech": mini_librispeech,
    "common_voice": common_voice,
    "mls": mls,
    "peoples_speech": peoples_speech,
    "gigaspeech": gigaspeech,
    "switchboard": switchboard,
    "timit": timit,
    "yesno": yesno,
}
"""The function that makes the corpus of each recipe, in a folder, and returns the corpus's own folder."""
