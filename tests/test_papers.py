"""The page of published claims is what its list says, and each claim has all that a reader needs."""

import re
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.papers import DOCS, PAGE, VERDICTS, main, page, read
from tests.test_documents import ROOT

CLAIMS = read()
GROUPS = (
    *("Asynchronous and decentralised training", "Stragglers", "Large batches", "Staleness", "Communication"),
    *("Periodic methods", "Planners", "Optimizers"),
)


def test_the_page_is_what_the_command_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise run `python -m benchmarks.papers`."""
    written = tmp_path / "papers.md"
    monkeypatch.setattr("benchmarks.papers.PAGE", written)
    main()
    assert written.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["id"])
def test_a_claim_has_a_verdict_a_source_and_a_page(claim: dict[str, str]) -> None:
    """A claim with a figure also has its command; one without has the experiment that would decide."""
    assert set(claim) == {"id", "group", "paper", "claim", "ours", "verdict", "where", "decides", "command"}
    assert claim["verdict"] in VERDICTS
    assert claim["group"] in GROUPS
    assert re.search(r"arXiv \d{4}\.\d{4,5}$|ICASSP 20\d\d$|\(https://[\w./-]+\)$", claim["paper"])
    assert (DOCS / claim["where"]).is_file()
    assert claim["claim"].endswith(".")
    undecided = claim["verdict"] == "cannot say here"
    assert bool(claim["decides"]) == undecided
    assert bool(claim["ours"]) != undecided
    assert claim["command"] or undecided


@pytest.mark.parametrize("claim", [each for each in CLAIMS if each["ours"]], ids=lambda claim: claim["id"])
def test_every_figure_of_ours_is_on_its_page_or_on_one_that_it_links_to(claim: dict[str, str]) -> None:
    """Numbers with their intervals; signs and separators aside, because pages write a difference either way."""
    pages = [DOCS / claim["where"], *(PAGE.parent / link for link in re.findall(r"\]\(([\w-]+\.md)\)", claim["ours"]))]
    text = " ".join(" ".join(each.read_text(encoding="utf-8") for each in pages).split()).replace(",", "")
    for figure in re.findall(r"\d[\d.]*(?: ± [\d.]*\d| \([\d.]* to [\d.]*\))?", claim["ours"].replace(",", "")):
        assert re.search(rf"(?<![\d.]){re.escape(figure.rstrip('.'))}(?!\d)", text), figure


def test_claims_have_names_of_their_own_and_the_groups_come_in_their_order() -> None:
    """A name is a claim's identity in the list."""
    assert max(Counter(each["id"] for each in CLAIMS).values()) == 1
    assert tuple(dict.fromkeys(each["group"] for each in CLAIMS)) == GROUPS


def test_at_most_a_third_of_the_claims_cannot_be_decided_here() -> None:
    """A page that mostly says that it cannot say would not be worth reading."""
    assert 3 * sum(each["verdict"] == "cannot say here" for each in CLAIMS) <= len(CLAIMS)


def test_the_page_counts_the_verdicts_of_its_claims() -> None:
    """By a list that has one claim of each verdict, and one more."""
    chosen = [next(each for each in CLAIMS if each["verdict"] == verdict) for verdict in VERDICTS]
    text = page([*chosen, chosen[1]])
    assert "5 claims of published papers beside our own figures. We reproduced 1 and did not reproduce 2." in text
    assert "| cannot say here | 1 |" in text


def test_commands_name_recipes_and_modules_that_exist() -> None:
    """Of `starling compare RECIPE`, `python -m benchmarks.NAME` and tests."""
    for claim in CLAIMS:
        for folder, name, suffix in (
            *(
                ("recipes", each, ".yaml")
                for each in re.findall(r"starling (?:compare|storm) (\w+)(?!.*/)", claim["command"])
            ),
            *(("benchmarks", each, ".yaml") for each in re.findall(r"compare benchmarks/(\w+)", claim["command"])),
            *(("benchmarks", each, ".py") for each in re.findall(r"-m benchmarks\.(\w+)", claim["command"])),
            *(("tests", each, ".py") for each in re.findall(r"tests/(\w+)\.py", claim["command"])),
        ):
            assert (ROOT / folder / f"{name}{suffix}").is_file()
