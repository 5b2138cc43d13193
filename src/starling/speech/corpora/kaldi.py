"""Kaldi data folders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from starling.errors import DataError
from starling.speech.corpora.lines import read_lines
from starling.speech.corpora.utterance import NamedSets, Utterance


class KaldiCorpus(NamedSets):
    """Folders with `wav.scp`, `text` and optionally `utt2spk` and `segments`. Pipes in `wav.scp` are an error.

    lhotse's Kaldi importer is not used, because it runs pipes and stops at the first unreadable file.
    """

    kind: Literal["kaldi"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        folder = self.set_path(set_name)
        recordings = _table(folder / "wav.scp")
        for name, (line, value) in recordings.items():
            if "|" in value:
                raise DataError(
                    f"{folder / 'wav.scp'}:{line}: recording {name} is a pipe ({value!r}); commands are not run: "
                    f"write the audio to files first"
                )
        texts = _table(folder / "text", empty_values=True)
        speakers = _table(folder / "utt2spk") if (folder / "utt2spk").exists() else {}
        segments_file = folder / "segments"
        listed = segments_file if segments_file.exists() else folder / "wav.scp"
        if segments_file.exists():
            segments = {name: _segment(segments_file, *entry) for name, entry in _table(segments_file).items()}
        else:
            segments = {name: (line, name, 0.0, None) for name, (line, _) in recordings.items()}
        for utterance_id, (line, recording, start, duration) in segments.items():
            if recording not in recordings:
                raise DataError(f"{segments_file}:{line}: recording {recording!r} is not in wav.scp")
            if utterance_id not in texts:
                raise DataError(f"{folder / 'text'}: no transcript for {utterance_id}")
            fields = {
                "id": utterance_id,
                "speaker": speakers.get(utterance_id, (0, "unknown"))[1],
                "text": texts[utterance_id][1],
                "audio": recordings[recording][1],
            }
            yield self.utterance(listed, line, fields, start, duration)


def _table(path: Path, empty_values: bool = False) -> dict[str, tuple[int, str]]:
    """The entries of a Kaldi text file: key -> (line, value)."""
    table: dict[str, tuple[int, str]] = {}
    for number, line in read_lines(path):
        key, *rest = line.split(maxsplit=1)
        if not rest and not empty_values:
            raise DataError(f"{path}:{number}: {key} has no value")
        if key in table:
            raise DataError(f"{path}:{number}: duplicate key {key}, first in line {table[key][0]}")
        table[key] = (number, rest[0].strip() if rest else "")
    return table


def _segment(path: Path, line: int, value: str) -> tuple[int, str, float, float | None]:
    """Line, recording, start and duration in seconds; an end of -1 is the end of the recording."""
    try:
        recording, first, last = value.split()
        start, end = float(first), float(last)
    except ValueError:
        raise DataError(f"{path}:{line}: {value!r} is not 'recording start end'") from None
    if end == -1 and 0 <= start < float("inf"):
        return line, recording, start, None
    if not 0 <= start < end < float("inf"):
        raise DataError(f"{path}:{line}: invalid segment from {start} s to {end} s")
    return line, recording, start, end - start
