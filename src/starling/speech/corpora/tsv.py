"""Tab-separated tables with a header."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from starling.errors import DataError, did_you_mean
from starling.speech.corpora.lines import read_lines
from starling.speech.corpora.utterance import FileCorpus, Utterance

Selection = dict[str, str | tuple[str, ...]]


class TsvCorpus(FileCorpus):
    """Tables with a header. A set is a table of its own, or the rows of one table that have given column values.

    Audio paths are relative to the table, unless `audio_root` is set.
    """

    kind: Literal["tsv"]
    sets: dict[str, Selection | str]
    """Name of a set -> {column: value, or list of values} of the table `path`, {} for all rows; or, if `path` is a
    folder, the name of the set's own table in it."""
    id: str = "id"
    """The column of the utterance id."""
    speaker: str = "speaker"
    """The column of the speaker."""
    audio: str = "audio"
    """The column of the audio file's path."""
    text: str = "text"
    """The column of the transcript."""

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
        columns = {name: index for index, name in enumerate(names)}
        if len(columns) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{table}: the header has the column {twice!r} twice")
        wanted = {"id": self.id, "speaker": self.speaker, "audio": self.audio, "text": self.text}
        _check_columns(table, columns, [*wanted.values(), *selection])
        for line, row in rows:
            values = row.split("\t")
            if len(values) != len(columns):
                raise DataError(f"{table}:{line}: {len(values)} columns, the header has {len(columns)}")
            if _selected(selection, columns, values):
                fields = {name: values[columns[column]] for name, column in wanted.items()}
                yield self.utterance(table, line, fields)


def _check_columns(table: Path, columns: dict[str, int], wanted: list[str]) -> None:
    for name in wanted:
        if name not in columns:
            raise DataError(
                f"{table}: no column {name!r}; {did_you_mean(name, columns)}it has: {', '.join(columns) or 'none'}; "
                f"set the column names in data.corpus (id, speaker, audio, text, sets)"
            )


def _selected(selection: Selection, columns: dict[str, int], values: list[str]) -> bool:
    return all(
        values[columns[column]] in ((value,) if isinstance(value, str) else value)
        for column, value in selection.items()
    )
