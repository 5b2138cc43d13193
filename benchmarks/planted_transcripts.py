"""Makes a corpus with wrong transcripts, to see which of them `starling check --model` finds.

    starling prepare demo
    python -m benchmarks.planted_transcripts plant data/demo planted
    starling train planted/recipe.yaml
    starling check planted/recipe.yaml --model exp/planted 'data.check.kinds=[swapped,misfit]'
    python -m benchmarks.planted_transcripts count planted

Of the training set, six transcripts are swapped in pairs, three in a circle, six have another first half, and four lack
their last word.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import soundfile
import yaml

from starling.recipe import read_recipe
from starling.speech.check.findings import LIST
from starling.speech.store import SpeechSet

SETS = ("train", "dev", "test")
RECIPE = {"learners": 1, "strategy": "allreduce", "budget": {"epochs": 16}, "batches": {"max_duration": 20}}
"""Keys that differ from the recipe `demo`, besides the data."""


def plant(prepared: Path, folder: Path) -> None:
    """Write the sets that `demo` prepared as FLAC files, with a TSV of wrong transcripts, the list of planted errors,
    and a recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in SETS:
        speech_set = SpeechSet.open(prepared / name)
        for index in range(len(speech_set)):
            file = f"{speech_set.id(index)}.flac"
            soundfile.write(folder / file, speech_set.audio(index), speech_set.sampling_rate)
            rows.append([speech_set.id(index), speech_set.speaker(index), name, file, speech_set.text(index)])
    planted = _spoil([row for row in rows if row[2] == "train"])
    lines = ["id\tspeaker\tsplit\taudio\ttext", *("\t".join(row) for row in rows)]
    (folder / "corpus.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "planted.json").write_text(json.dumps(planted, indent=2), encoding="utf-8")
    tree = read_recipe(Path("demo"))
    corpus = {"kind": "tsv", "path": str(folder / "corpus.tsv"), "sets": {name: {"split": name} for name in SETS}}
    data = tree["data"] | {"folder": str(folder / "data"), "corpus": corpus}
    recipe = tree | RECIPE | {"name": folder.name, "data": data}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def _spoil(rows: list[list[str]]) -> dict[str, str]:
    """Spoil the transcripts (the last column) of some rows; returns the kind of error of each spoilt row, by id."""
    random = np.random.default_rng(5)
    order = [rows[place] for place in random.permutation(len(rows))]
    kinds = {}
    for first, second in zip(order[0:6:2], order[1:6:2], strict=True):
        first[4], second[4] = second[4], first[4]
        kinds |= {first[0]: "swapped", second[0]: "swapped"}
    one, two, three = order[6:9]
    one[4], two[4], three[4] = two[4], three[4], one[4]
    kinds |= {each[0]: "in a circle" for each in (one, two, three)}
    for each in order[9:15]:
        words, half = each[4].split(), max(1, len(each[4].split()) // 2)
        others = rows[random.integers(len(rows))][4].split()
        each[4] = " ".join(others[:half] + words[half:])
        kinds[each[0]] = "half wrong"
    for each in order[15:19]:
        words = each[4].split()
        each[4] = " ".join(words[:-1]) or words[0]
        kinds[each[0]] = "last word missing"
    return kinds


def count(folder: Path) -> None:
    """Print how many of the planted errors a check found, and how many right transcripts it listed."""
    kinds = json.loads((folder / "planted.json").read_text(encoding="utf-8"))
    _, *rows = (folder / "data" / LIST).read_text(encoding="utf-8").splitlines()
    found = {row.split("\t")[2] for row in rows if row.split("\t")[0] in ("swapped", "misfit")}
    totals = Counter(kinds.values())
    for kind, total in totals.items():
        print(f"{kind}: {sum(kinds.get(name) == kind for name in found)} of {total}")
    print(f"right transcripts listed: {len(found - kinds.keys())}")


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"plant": plant, "count": count}[command](*map(Path, paths))
