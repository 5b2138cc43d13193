"""Manifests of audio files: tables, NeMo's and WeNet's JSON Lines, Coqui's and DeepSpeech's CSV, and Kaldi's
folders."""

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Literal

from starling.errors import DataError, did_you_mean
from starling.speech.corpora.lines import field, read_json_lines, read_lines, read_table, seconds
from starling.speech.corpora.utterance import FileCorpus, NamedSets, Utterance

Selection = dict[str, str | tuple[str, ...]]


class TsvCorpus(FileCorpus):
    """Tables with a header. A set is a whole table, or the rows of a table with given values in some columns.

    Audio paths are relative to the table, unless `audio_root` is set.
    """

    kind: Literal["tsv"]
    sets: dict[str, Selection | str]
    """The rows of the table `path` that each set contains, as {column: value, or list of values}, where {} means all
    rows. If `path` is a folder, the name of each set's table in the folder."""
    id: str = "id"
    """Name of the column with the utterance id."""
    speaker: str = "speaker"
    """Name of the column with the speaker."""
    audio: str = "audio"
    """Name of the column with the path of the audio file."""
    text: str = "text"
    """Name of the column with the transcript."""

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        chosen = self.sets[set_name]
        table, selection = (self.inside(set_name, chosen), {}) if isinstance(chosen, str) else (self.located(), chosen)
        if table.is_dir():
            raise DataError(
                f"set {set_name}: {table} is a folder; name a table in it in data.corpus.sets, such as {set_name}.tsv"
            )
        rows = read_lines(table)
        _, header = next(rows, (0, ""))
        names = header.split("\t")
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{table}: the header has the column {twice!r} twice")
        own = (self.id, self.speaker, self.text, self.audio)
        if missing := next((each for each in (*own, *selection) if each not in names), None):
            raise DataError(
                f"{table}: no column {missing!r}; {did_you_mean(missing, names)}it has: "
                f"{', '.join(names) or 'none, for its first line is empty'}; set names in data.corpus (id, speaker, …)"
            )
        wanted = {column: (value,) if isinstance(value, str) else value for column, value in selection.items()}
        for line, text in rows:
            values = text.split("\t")
            if len(values) != len(names):
                raise DataError(f"{table}:{line}: {len(values)} columns, the header has {len(names)}")
            row = dict(zip(names, values, strict=True))
            if all(row[column] in allowed for column, allowed in wanted.items()):
                name, speaker, spoken, audio = (row[column] for column in own)
                yield self.utterance(table, line, name, speaker, spoken, audio)


class NemoCorpus(NamedSets):
    """NeMo manifests with the fields `audio_filepath`, `text`, and optionally `offset`, `duration`, `speaker` and `id`.

    Without `id`, the id is made from the name of the audio file and the offset, if there is one.
    """

    kind: Literal["nemo"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        for line, item in read_json_lines(manifest):
            origin = f"{manifest}:{line}"
            audio = field(item, "audio_filepath", origin)
            start, duration = seconds(item, "offset", origin), seconds(item, "duration", origin)
            name = id_of_file(audio) + (f"-{start:.3f}" if start else "")
            own, speaker = str(item.get("id") or name), str(item.get("speaker") or "unknown")
            text = field(item, "text", origin)
            yield self.utterance(manifest, line, own, speaker, text, audio, start or 0.0, duration)


class WenetCorpus(NamedSets):
    """WeNet lists with the fields `key`, `wav`, `txt`, and optionally `start` and `end` in seconds, and `speaker`."""

    kind: Literal["wenet"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        for line, item in read_json_lines(manifest):
            origin = f"{manifest}:{line}"
            start, end = seconds(item, "start", origin) or 0.0, seconds(item, "end", origin)
            name, text, audio = (field(item, key, origin) for key in ("key", "txt", "wav"))
            speaker, duration = str(item.get("speaker") or "unknown"), None if end is None else end - start
            yield self.utterance(manifest, line, name, speaker, text, audio, start, duration)


def id_of_file(name: str) -> str:
    """An id made from the name of an audio file. It has no suffix and no spaces, and folders are joined with '-'."""
    if not PurePath(name).name:
        return ""  # no file has such a name
    parts = PurePath(name).with_suffix("").parts
    return "-".join("_".join(part.split()) for part in parts if part not in ("/", "."))


class CoquiCorpus(NamedSets):
    """CSV files with the columns `wav_filename`, `transcript`, and optionally `wav_filesize` (not used) and `speaker`.

    The id is made from the name of the audio file.
    """

    kind: Literal["coqui"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        for line, row in read_table(manifest, ("wav_filename", "transcript"), "excel", has_more=True):
            audio, speaker = row["wav_filename"], row.get("speaker") or "unknown"
            yield self.utterance(manifest, line, id_of_file(audio), speaker, row["transcript"], audio)


class KaldiCorpus(NamedSets):
    """Kaldi folders with `wav.scp`, `text`, and optionally `utt2spk` and `segments`. A pipe in `wav.scp` is an error.

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
            _, speaker = speakers.get(utterance_id, (0, "unknown"))
            text, audio = texts[utterance_id][1], recordings[recording][1]
            yield self.utterance(listed, line, utterance_id, speaker, text, audio, start, duration)


def _table(path: Path, empty_values: bool = False) -> dict[str, tuple[int, str]]:
    """The entries of a Kaldi text file, as a mapping from the key to the line number and the value."""
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
    """Parse an entry of `segments`. Returns the line number, the recording, and its start and duration in seconds. An
    end of -1 stands for the end of the recording."""
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
