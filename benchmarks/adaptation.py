"""Adapting a model to a new speaker with a tenth of the recordings, beside training from scratch on all of them.

    python -m benchmarks.adaptation FOLDER FILE.jsonl [--speakers NAME ...] [--seeds NUMBER ...]
    python -m benchmarks.adaptation --table

For each speaker of the digits and each seed, four models are trained in FOLDER: on the five other speakers; on a tenth
of the speaker's recordings, starting from the first model; on that tenth alone; and on all recordings of all six. Each
is scored on the speaker's test recordings. Each run's result is appended to FILE.jsonl; runs that it has are skipped.
`--table` prints the table of docs/adapting.md.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.small_corpora import DATA
from benchmarks.study_tables import text_of
from starling.comparing.table import estimate

ROOT = Path(__file__).parents[1]
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
FIRST_TAKE, NUM_TAKES, NUM_DIGITS = 5, 45, 10
"""Of each digit, a speaker's training recordings are takes 5 to 49."""
ADAPTING = ("budget.epochs=32", "optimizer.lr=2e-3")
"""Chosen on the first speaker, from 8 or 32 epochs at rates of 5e-4, 2e-3 and 5e-3."""
ARMS = {
    "others": ("data.train=others",),
    "adapted": ("data.train=tenth", *ADAPTING, "warm_start={others}", "alignment={{experiment: {others}}}"),
    "tenth": ("data.train=tenth", "budget.epochs=32"),
    "all": ("data.train=all",),
}


TITLES = {
    "others": "trained on the other five",
    "adapted": "adapted with a tenth",
    "tenth": "trained on the tenth only",
    "all": "trained on all data",
}
RESULTS = ROOT / "docs" / "results" / "adaptation" / "runs.jsonl"


def read() -> list[dict[str, Any]]:
    """The runs that docs/adapting.md reports."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def tenth(speaker: str) -> list[str]:
    """Return the names of a tenth of a speaker's training recordings: four or five takes of each digit."""
    return [
        f"{digit}_{speaker}_{FIRST_TAKE + take}"
        for take in range(NUM_TAKES)
        for digit in range(NUM_DIGITS)
        if take * NUM_DIGITS + digit < NUM_TAKES * NUM_DIGITS // 10
    ]


def write_recipe(folder: Path, data: Path, speaker: str) -> Path:
    """Write the recipe whose sets leave `speaker` out, or contain only this speaker."""
    sets: dict[str, Any] = {
        "others": {"official_split": "train", "speaker": [each for each in SPEAKERS if each != speaker]},
        "all": {"official_split": "train"},
        "tenth": {"utt_id": tenth(speaker)},
        "own": {"official_split": "test", "speaker": speaker},
    }
    copies = {**dict.fromkeys(sets, 1), "own": 2}
    corpus = {"path": str(data / "fsdd.tsv"), "sets": sets}
    chosen = {"folder": f"data/{speaker}", "corpus": corpus, "strings": {"copies": copies}, "test": ["own"]}
    tree = {"base": str(ROOT / "recipes" / "fsdd_frames.yaml"), "data": chosen | {"train": "others"}}
    recipe = folder / f"{speaker}.yaml"
    recipe.write_text(yaml.safe_dump(tree | {"engine": {"threads": 1}}, sort_keys=False), encoding="utf-8")
    return recipe


def train(folder: Path, recipe: Path, speaker: str, arm: str, seed: int) -> dict[str, Any]:
    """Train and score one model, and return its errors and the number of words."""
    name = f"{arm}-{speaker}-{seed}"
    keys = [key.format(others=f"exp/others-{speaker}-{seed}") for key in ARMS[arm]]
    settings = [f"name={name}", f"seed={seed}", "overwrite=true", *keys]
    command = [sys.executable, "-m", "starling", "train", recipe.name, *settings]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=folder, stdout=log, stderr=log, check=True)
    summary = (folder / "exp" / name / "decode" / "wer-summary-own.txt").read_text(encoding="utf-8")
    errors, words = re.findall(r"%WER \S+ \[ (\d+) / (\d+),", summary)[0]
    return {"speaker": speaker, "arm": arm, "seed": seed, "errors": int(errors), "words": int(words)}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The word error rates in per cent by speaker and arm, over all seeds; and means over speakers with intervals."""
    speakers = dict.fromkeys(each["speaker"] for each in runs)
    rates = {arm: [_rate(runs, speaker, arm) for speaker in speakers] for arm in ARMS}
    lines = [f"| speaker | {' | '.join(TITLES[arm] for arm in ARMS)} |", "|---|" + "---|" * len(ARMS)]
    for number, speaker in enumerate(speakers):
        lines.append(f"| {speaker} | {' | '.join(f'{rates[arm][number]:.1f}' for arm in ARMS)} |")
    lines.append(f"| mean | {' | '.join(text_of(estimate(each), 1) for each in rates.values())} |")
    return "\n".join(lines)


def _rate(runs: Sequence[dict[str, Any]], speaker: str, arm: str) -> float:
    own = [each for each in runs if (each["speaker"], each["arm"]) == (speaker, arm)]
    errors, words = (sum(int(each[key]) for each in own) for key in ("errors", "words"))
    return 100.0 * errors / words


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--speakers", nargs="+", choices=SPEAKERS, default=SPEAKERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args(arguments)
    if given.table:
        print(table(read()))
        return
    if given.folder is None or given.results is None:
        parser.error("name a folder and a file of results")
    given.folder.mkdir(parents=True, exist_ok=True)
    lines = given.results.read_text(encoding="utf-8").splitlines() if given.results.exists() else []
    done = {(each["speaker"], each["arm"], each["seed"]) for each in map(json.loads, lines)}
    for speaker in given.speakers:
        recipe = write_recipe(given.folder, given.data.resolve(), speaker)
        for seed in given.seeds:
            for arm in ARMS:
                if (speaker, arm, seed) in done:
                    continue
                found = train(given.folder, recipe, speaker, arm, seed)
                print(found, flush=True)
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
