"""The CSV files of Coqui STT and DeepSpeech."""

import csv
from collections.abc import Iterator
from typing import Literal

from starling.errors import DataError
from starling.speech.corpora.jsonl import id_of_file
from starling.speech.corpora.lines import read_lines
from starling.speech.corpora.utterance import NamedSets, Utterance


class CoquiCorpus(NamedSets):
    """CSV files with the columns `wav_filename`, `transcript` and optionally `wav_filesize` (not read) and `speaker`.

    The id is made from the name of the audio file.
    """

    kind: Literal["coqui"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        line = 1

        def lines() -> Iterator[str]:
            nonlocal line
            for line, text in read_lines(manifest):  # noqa: B007 - for the messages below
                yield text + "\n"

        rows = csv.DictReader(lines(), strict=True)
        try:
            for row in rows:
                if None in row or None in row.values() or not {"wav_filename", "transcript"} <= row.keys():
                    raise DataError(
                        f"{manifest}:{line}: needs the columns wav_filename and transcript, and one value for each "
                        f"column of the header ({', '.join(rows.fieldnames or ())})"
                    )
                fields = {
                    "id": id_of_file(row["wav_filename"]),
                    "speaker": row.get("speaker") or "unknown",
                    "text": row["transcript"],
                    "audio": row["wav_filename"],
                }
                yield self.utterance(manifest, line, fields)
        except csv.Error as error:
            raise DataError(f"{manifest}:{line}: not CSV: {error}") from error
