"""Every recipe of the package is trained once to its end, where its data are at hand, and recognises what it should."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "src" / "starling" / "recipes"
CEILINGS: dict[str, dict[str, float]] = {
    "demo": {"test %WER": 4.0},
    "demo_frames": {"test %WER": 20.0},
    "streaming": {"test %WER": 35.0},
    "spelling": {"test %WER": 5.0},
    "languages": {"english-test %WER": 40.0, "german-test %WER": 40.0, "spanish-test %WER": 40.0},
    "yesno": {"test %WER": 2.0},
    "fsdd": {"test %WER": 3.0},
    "fsdd_speakers": {"speakers-test %WER": 40.0},
    "fsdd_left_out": {"theo %WER": 30.0},
    "fsdd_frames": {"test %WER": 3.0},
    "fsdd_frames_dev": {"test %WER": 4.0},
    "fsdd_dnn": {"test %WER": 15.0},
    "fsdd_left_out_frames": {"theo %WER": 20.0},
    "readers": {"adults-test %CER": 75.0},
    "fsdd_left_out_readers": {"theo %WER": 30.0},
    "reader": {"test %CER": 45.0},
    "reader_children": {"test %CER": 70.0},
    "domains": {"digits-test %CER": 6.0, "adults-test %CER": 70.0, "children-test %CER": 70.0},
    "speechocean": {"adults-test %CER": 40.0},
}
"""Per cent of errors of greedy decoding, at most, by recipe and set. In the order in which they are trained: those that
begin with the weights of others come after them."""
REAL = {"yesno", "reader", "reader_children", "readers", "domains", "speechocean"}
"""Those that learn from recordings which are no part of Starling, as do all that begin with fsdd."""
WITHOUT_DATA = {
    "common_voice", "gigaspeech", "ibm_frames", "librispeech100", "mini_librispeech", "mls", "peoples_speech",
    "switchboard", "timit",
}  # fmt: skip
"""Those of corpora that are too large, or have to be bought."""
FEW_WORDS = {"reader_children"}
"""Those with a WER above 90 % at any budget, here because they learn from five minutes: their summaries say so."""
BASES = {"small", "large"}
STUDIES = {
    "communication", "large_batches", "models", "muloco", "non_iid", "staleness", "staleness_ctc", "stragglers",
    "stragglers_rates", "topology", "speed_up",
}  # fmt: skip
"""Those whose arms `starling compare` trains; the pages of their results have the commands."""


def test_every_recipe_of_the_package_is_accounted_for() -> None:
    named = [*CEILINGS, *WITHOUT_DATA, *BASES, *STUDIES]
    assert sorted(named) == sorted(path.stem for path in RECIPES.glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_data: Path | None) -> Path:
    """Where all of them are trained, so that those which begin with the weights of others find them."""
    found = tmp_path_factory.mktemp("recipes")
    if shared_data is not None:
        (found / "shared").symlink_to(shared_data.parent)
    (found / "here").mkdir()
    spelt = [sys.executable, "-m", "benchmarks.spelling_corpus", str(found / "here" / "data" / "spelling")]
    subprocess.run(spelt, cwd=ROOT, check=True, capture_output=True)
    return found / "here"


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("name", CEILINGS)
def test_a_recipe_recognises_what_it_should(name: str, folder: Path, shared_data: Path | None) -> None:
    if shared_data is None and (name in REAL or name.startswith("fsdd")):
        pytest.skip("its recordings are not here")
    command = [sys.executable, "-m", "starling", "train", name, f"name={name}"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    summary = (folder / "exp" / name / "log" / "summary.txt").read_text(encoding="utf-8")
    assert ("does not work" in summary) == (name in FEW_WORDS)
    for what, ceiling in CEILINGS[name].items():
        scored, rate = what.split()
        found = (folder / "exp" / name / "decode" / f"wer-summary-{scored}.txt").read_text(encoding="utf-8")
        assert float(re.findall(rf"{rate} (\S+)", found)[0]) <= ceiling, found
