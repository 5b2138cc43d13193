"""The utterances that all importers yield, the base classes of importers, and manifests of audio files: tables, NeMo's
and WeNet's JSON Lines, Coqui's and DeepSpeech's CSV, and Kaldi's folders."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Literal

from starling.configuration import Config
from starling.errors import DataError, did_you_mean
from starling.speech.audio import Audio, read_audio
from starling.speech.corpora.lines import field, read_json_lines, read_lines, read_table, seconds


@dataclass(frozen=True)
class Utterance:
    """One transcribed utterance of a corpus, whose audio has not been read.

    `origin` is the file or the manifest line that the utterance comes from. `read` returns the audio or raises
    `DataError`. The utterances of an importer can be pickled.
    """

    id: str
    speaker: str
    text: str
    origin: str
    read: Callable[[], Audio]
    segment: str = ""
    """The file, and its segment, that `read` reads; empty if the settings of the corpus determine them."""
    wordless: str = ""
    """Marks, such as `<NOISE>`, if the transcript consists only of them. The utterance is then left out."""


class FileCorpus(Config):
    """The base class of importers for manifests of audio files."""

    path: Path | tuple[Path, ...]
    """The path of the corpus, or several paths, of which the first that exists is used."""
    audio_root: Path | None = None
    """The folder to which audio paths are relative; by default, the folder of the manifest. Audio outside the folder is
    an error, except that absolute paths are allowed by default."""
    channel: int | None = None
    """The channel to read, counted from 0. If it is not set, audio with several channels is an error."""

    def located(self) -> Path:
        """The first path in `path` that exists.

        Raises:
            DataError: None of the paths exists. The message names all of them.
        """
        places = self.path if isinstance(self.path, tuple) else (self.path,)
        for place in places:
            if place.exists():
                return place
        names = ", ".join(str(place.absolute()) for place in places)
        raise DataError(
            f"corpus not found: none of these exists: {names}; put it there, or set data.corpus.path to where it is"
        )

    def inside(self, set_name: str, name: str) -> Path:
        """The file or folder `name` inside `path` from which a set is read.

        Raises:
            DataError: The file or folder is missing, or is outside the corpus.
        """
        base = self.located()
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"set {set_name}: {name!r} is not a path inside {base}; change data.corpus.sets")
        path = base / name
        if not path.exists():
            raise DataError(f"set {set_name}: {path.absolute()} does not exist; change data.corpus.sets")
        return path

    def maker(self, set_name: str) -> str:
        """A description of what a set depends on besides its settings. The default is empty: a set depends on nothing
        else."""
        return ""

    def utterance(
        self,
        manifest: Path,
        line: int,
        id: str,  # noqa: A002 - same name as in `Utterance`
        speaker: str,
        text: str,
        audio: str,
        start: float = 0.0,
        duration: float | None = None,
    ) -> Utterance:
        """An utterance in an audio file, with its start and duration in seconds."""
        origin = f"{manifest}:{line}"
        path = self.audio_path(manifest, origin, audio)
        read = partial(read_audio, path, start, duration, self.channel)
        return Utterance(id, speaker, text, origin, read, f"{path} {start} {duration}")

    def audio_path(self, manifest: Path, origin: str, name: str) -> Path:
        """The path of the audio file `name` in a manifest. It must be inside `audio_root`, or may be absolute if
        `audio_root` is not set."""
        root = (self.audio_root or (manifest if manifest.is_dir() else manifest.parent)).resolve()
        if not name or "\0" in name:
            raise DataError(f"{origin}: {name!r} is not a usable name for an audio file")
        path = root / name
        try:
            target = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise DataError(f"{origin}: {name[:200]!r} is not a usable name for an audio file ({error})") from error
        is_inside = target.is_relative_to(root) or (self.audio_root is None and Path(name).is_absolute())
        if ".." in Path(name).parts or not is_inside:
            raise DataError(
                f"{origin}: audio {name!r} is outside {root}; if that is intended, set data.corpus.audio_root to a "
                f"folder that contains all audio, and use paths without '..'"
            )
        return path


class NamedSets(FileCorpus):
    """A corpus whose sets are files or folders inside `path`, or `path` itself ('.')."""

    sets: dict[str, str]
    """The file or folder of each set, relative to `path`, by the name of the set."""

    def set_path(self, set_name: str) -> Path:
        """The file or folder of a set.

        Raises:
            DataError: The file or folder is missing, or is outside the corpus.
        """
        return self.inside(set_name, self.sets[set_name])


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
