"""What papers claim, beside our figures: `python -m benchmarks.papers` writes docs/results/papers.md.

The claims and verdicts are in docs/results/papers/claims.json; the page has nothing else of its own.
"""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "results" / "papers.md"
CLAIMS = DOCS / "results" / "papers" / "claims.json"
VERDICTS = {
    "reproduced": "our figure agrees with the claim",
    "not reproduced": "our figure contradicts the claim at our scale",
    "no difference was shown": "the difference's interval includes zero, p is too large, or two intervals overlap",
    "cannot say here": "we have no figure that could decide; the table says which experiment would",
}
"""The allowed verdicts, with their meanings."""

Claim = Mapping[str, str]
"""A claim: `id`, `group`, `paper`, `claim`, `ours`, `verdict`, `where` (a page below docs), `decides`, `command`."""

INTRODUCTION = """\
# Published claims, beside ours

<!-- Written by `python -m benchmarks.papers` from docs/results/papers/claims.json. -->

This page puts {total} claims of published papers beside our own figures. {counts}.

| verdict | claims | meaning |
|---|---|---|
{table}

How to read it:

- **Our scale is small.** Most figures are from recognisers of connected digits with up to 0.1 million weights, on
  simulated clusters of 4 to 64 learners. A claim that is not reproduced here may hold for large models and long runs.
- **"No difference was shown" does not mean equal.** It is also the verdict where the paper itself claims that nothing
  is lost.
- **A verdict follows from the intervals on the linked page** (95 %, over seeds). Figures without an interval are from
  simulations of timing, from closed forms that a test checks, or from single runs whose difference is a large factor.
- **Hours are predicted, not measured.** A prediction within 10 % of the published hours, the limit of the planner's
  [calibration](../planning.md#how-it-predicts), counts as reproduced.
- We quote most claims from abstracts. A p value is corrected for the comparisons of its page, unless the table says
  otherwise.

This command writes the page from the list of claims, `docs/results/papers/claims.json`:

    python -m benchmarks.papers
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(read()), encoding="utf-8")


def read() -> list[dict[str, str]]:
    """The claims, in the order of the page."""
    claims: list[dict[str, str]] = json.loads(CLAIMS.read_text(encoding="utf-8"))
    return claims


def page(claims: Sequence[Claim]) -> str:
    """The page as Markdown: the number of claims with each verdict, then a table for each group."""
    found = Counter(each["verdict"] for each in claims)
    counts = (
        f"We reproduced {found['reproduced']} and did not reproduce {found['not reproduced']}. For "
        f"{found['no difference was shown']}, no difference was shown. For {found['cannot say here']}, we cannot say"
    )
    table = "\n".join(f"| {verdict} | {found[verdict]} | {meaning} |" for verdict, meaning in VERDICTS.items())
    parts = [INTRODUCTION.format(total=len(claims), counts=counts, table=table)]
    parts += [
        "\n".join(section(group, [each for each in claims if each["group"] == group]))
        for group in dict.fromkeys(each["group"] for each in claims)
    ]
    return "\n".join(parts)


def section(group: str, claims: Sequence[Claim]) -> Iterator[str]:
    """The lines of a group: its table, and the commands that its figures come from."""
    yield f"## {group}\n"
    yield "| published | ours | verdict |"
    yield "|---|---|---|"
    for each in claims:
        paper = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", each["paper"])
        file = posixpath.relpath(each["where"], "results")
        shown = each["where"].removeprefix("results/").removesuffix(".md")
        ours = each["ours"] or f"*To decide:* {each['decides']}"
        yield f"| {each['claim']} ({paper}) | {ours} ([{shown}]({file})) | **{each['verdict']}** |"
    yield "\nThe figures come from these commands:\n"
    yield from (f"    {command}" for command in dict.fromkeys(each["command"] for each in claims) if command)
    yield ""


if __name__ == "__main__":
    main()
