"""The JSON Lines manifests of NeMo and WeNet."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from starling.speech.corpora.lines import field, read_json_lines, seconds
from starling.speech.corpora.utterance import NamedSets, Utterance


class NemoCorpus(NamedSets):
    """NeMo manifests: `audio_filepath`, `text`, and optionally `offset`, `duration`, `speaker`, `id`.

    Without `id`, the id is made from the name of the audio file and the offset, if any.
    """

    kind: Literal["nemo"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        for line, item in read_json_lines(manifest):
            origin = f"{manifest}:{line}"
            audio = field(item, "audio_filepath", origin)
            start, duration = seconds(item, "offset", origin), seconds(item, "duration", origin)
            name = id_of_file(audio) + (f"-{start:.3f}" if start else "")
            fields = {
                "id": str(item.get("id") or name),
                "speaker": str(item.get("speaker") or "unknown"),
                "text": field(item, "text", origin),
                "audio": audio,
            }
            yield self.utterance(manifest, line, fields, start or 0.0, duration)


class WenetCorpus(NamedSets):
    """WeNet lists: `key`, `wav`, `txt`, and optionally `start` and `end` in seconds, `speaker`."""

    kind: Literal["wenet"]

    def utterances(self, set_name: str) -> Iterator[Utterance]:
        manifest = self.set_path(set_name)
        for line, item in read_json_lines(manifest):
            origin = f"{manifest}:{line}"
            start, end = seconds(item, "start", origin) or 0.0, seconds(item, "end", origin)
            fields = {
                "id": field(item, "key", origin),
                "speaker": str(item.get("speaker") or "unknown"),
                "text": field(item, "txt", origin),
                "audio": field(item, "wav", origin),
            }
            yield self.utterance(manifest, line, fields, start, None if end is None else end - start)


def id_of_file(name: str) -> str:
    """An id made from the name of an audio file: without suffix, folders joined by '-', no spaces."""
    if not PurePath(name).name:
        return ""  # no file has such a name
    parts = PurePath(name).with_suffix("").parts
    return "-".join("_".join(part.split()) for part in parts if part not in ("/", "."))
