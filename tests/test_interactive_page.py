"""The interactive page of the strategies in a real Chromium: all strategies, its controls, its widths."""

import base64
import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page

from tests.chromium import WIDTHS, browser, layout_problems, needs_chromium, num_inked

pytestmark = needs_chromium
__all__ = ["browser"]

FILE = Path(__file__).parents[1] / "docs" / "strategies" / "interactive.html"
TEXT = FILE.read_text(encoding="utf-8")
GIVEN, STRATEGIES = (json.loads(re.findall(f'id="{each}">(.*?)</script>', TEXT)[0]) for each in ("given", "strategies"))
OPENED = "allreduce,adpsgd-pairs,4,3,0.03"
SETTINGS = ("2,1,0.01", "4,3,0.03", "8,10,0.1", "8,2,0.3")
_BARS = """bars => {
  const rows = {};
  for (const bar of bars) rows[bar.getAttribute("y")] = (rows[bar.getAttribute("y")] ?? 0) + 1;
  return Object.keys(rows).sort((one, other) => one - other).map(row => rows[row]);
}"""
"""The number of bars in each row, from the top."""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """The page as it opens; at the end, nothing has gone wrong in it, and only the file itself was fetched."""
    shown = browser.new_page(viewport={"width": 1400, "height": 900})
    problems: list[str] = []
    requests: list[str] = []
    shown.on("console", lambda each: problems.append(each.text))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("request", lambda request: requests.append(request.url.partition("#")[0]))
    shown.goto(FILE.as_uri())
    until_drawn(shown, OPENED)
    yield shown
    shown.close()
    assert not problems
    assert set(requests) == {FILE.as_uri()}


def until_drawn(page: Page, what: str) -> None:
    """Return once two strategies are drawn in a setting."""
    page.locator(f'html[data-drawn="#{what}"]').wait_for()


def visit(page: Page, what: str) -> None:
    """Show two strategies in a setting."""
    page.evaluate("what => { location.hash = what; }", what)
    until_drawn(page, what)


def drawings(page: Page) -> list[str]:
    """Both timelines as SVG."""
    return [timeline.inner_html() for timeline in page.locator(".timeline").all()]


@cache
def columns(runs: str) -> Any:
    """The runs in the page, by column and then by setting."""
    return json.loads(gzip.decompress(base64.b64decode(re.findall(f'id="runs-{runs}">(.*?)<', TEXT)[0])))


def run(name: str, setting: str) -> tuple[list[int], list[int]]:
    """The figures of a run, and each learner's number of gradients that begin in what is drawn."""
    place = 0
    for values, value in zip((GIVEN["learners"], GIVEN["slowness"], GIVEN["sending"]), setting.split(","), strict=True):
        place = place * len(values) + values.index(float(value))
    figures, counts = (column[place] for column in columns(STRATEGIES[name]["runs"])[:2])
    return figures, counts


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen_and_no_timeline_is_blank(width: int, scheme: str, page: Page) -> None:
    """With few and many learners, with servers and without."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 900})
    for what in ("parameter-server,decoupled-diloco,8,10,0.1", "hogwild,ako,2,1,0.3", "sgp,hadpsgd,4,3,0.03"):
        visit(page, what)
        assert layout_problems(page) == [], what
        for timeline in page.locator(".timeline").all():
            box = timeline.bounding_box()
            assert box is not None
            assert num_inked(timeline, page, "g") > 0.1 * box["width"] * box["height"], what


def test_a_resize_does_not_replace_an_address_that_was_just_entered(page: Page) -> None:
    """The browser reports the new address only after it has reported the new size."""
    what = "sgp,hadpsgd,4,3,0.03"
    page.evaluate("what => { location.hash = what; dispatchEvent(new Event('resize')); }", what)
    until_drawn(page, what)


def test_every_strategy_is_drawn_with_a_bar_for_each_gradient(page: Page) -> None:
    """In each learner's row, as many as the run has; those of learner 0 are in their own colour while it is slower."""
    assert len(STRATEGIES) >= 14
    for setting in SETTINGS:
        slower = float(setting.split(",")[1])
        for first, second in zip(STRATEGIES, [*list(STRATEGIES)[1:], *STRATEGIES], strict=False):
            visit(page, f"{first},{second},{setting}")
            for name, panel in zip((first, second), page.locator("section").all(), strict=True):
                figures, counts = run(name, setting)
                of_rows = panel.locator("rect.fast, rect.slow").evaluate_all(_BARS)
                assert of_rows == counts, (name, setting)
                assert panel.locator("rect.slow").count() == (counts[0] if slower > 1 else 0)
                said, of = panel.locator("li").first.inner_text().split(" ", 1)
                assert of == "gradients per second"
                assert float(said) == pytest.approx(figures[0] / GIVEN["seconds"], abs=0.051)


@pytest.mark.parametrize("slider", ["learners", "slowness", "sending"])
def test_a_slider_changes_both_pictures_by_keyboard(slider: str, page: Page) -> None:
    """The label says the new value, a step back restores the pictures, and the address leads to the setting."""
    before = drawings(page)
    place = list(GIVEN).index(slider)
    values, opened = GIVEN[slider], ["4", "3", "0.03"]
    more = str(values[values.index(float(opened[place])) + 1])
    page.locator(f"#{slider}").press("ArrowRight")
    until_drawn(page, ",".join(["allreduce", "adpsgd-pairs", *opened[:place], more, *opened[place + 1 :]]))
    assert more in page.locator(f"label:has(#{slider}) output").inner_text()
    changed = drawings(page)
    assert all(one != other for one, other in zip(before, changed, strict=True))
    page.reload()
    page.locator("html[data-drawn]").wait_for()
    assert drawings(page) == changed
    page.locator(f"#{slider}").press("ArrowLeft")
    until_drawn(page, OPENED)
    assert drawings(page) == before


def test_the_page_says_which_strategy_computes_more_and_links_to_its_page(page: Page) -> None:
    """The verdict is the ratio of the figures, and the sentence is that of the code."""
    fast, slow = (run(name, "4,3,0.03")[0][0] for name in ("adpsgd-pairs", "allreduce"))
    verdict, more = page.locator("#verdict"), STRATEGIES["adpsgd-pairs"]["title"]
    assert verdict.inner_text() == f"{more} computes {fast / slow:.1f} times as many gradients per second as allreduce."
    page.get_by_label("second strategy").get_by_role("combobox").select_option("allreduce")
    until_drawn(page, "allreduce,allreduce,4,3,0.03")
    assert verdict.inner_text() == "Choose another second strategy to compare."
    assert len(set(drawings(page))) == 1
    for panel in page.locator("section").all():
        assert "All learners step together" in panel.inner_text()
        link = panel.get_by_role("link")
        assert link.get_attribute("href") == "allreduce.md" and link.inner_text() == "More on allreduce"
    for each in STRATEGIES.values():
        assert (FILE.parent / each["page"]).exists()
