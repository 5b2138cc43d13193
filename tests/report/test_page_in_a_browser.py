"""The report page in a real Chromium: it draws, zooms, plays, turns dark, fits a telephone, and prints."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("plotly", reason="the extra `report` is not installed")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Browser, Page

from starling.experiment.report import report
from starling.experiment.simulate import simulate_recipe
from starling.reporting.page import render
from starling.speech.recipe import check_recipe
from starling.speech.task import SPEECH
from tests.chromium import WIDTHS, browser, layout_problems, needs_chromium, num_inked
from tests.report.test_page import events, evidence, stretch
from tests.runs.conftest import data_of, songs

pytestmark = needs_chromium
__all__ = ["browser", "songs"]


@pytest.fixture(scope="module")
def written(songs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about two simulations, of two and four learners."""
    folder = tmp_path_factory.mktemp("browser")
    tree = {
        "exp": str(folder / "exp"),
        "budget": {"epochs": 1},
        "data": data_of(songs),
        "batches": {"max_duration": 1},
        "model": {"preset": "tiny", "subsampling": 4},
        "optimizer": {"lr": 0.01},
        "stragglers": {"slow": {0: "3x"}},
    }
    for name, learners, strategy in (("few", 2, "allreduce"), ("many", 4, "adpsgd")):
        recipe = check_recipe({**tree, "name": name, "learners": learners, "strategy": strategy}, "r.yaml")
        simulate_recipe(SPEECH, recipe, lambda line: None, Console(file=io.StringIO()))
    return report([folder / "exp" / f"{name}-virtual" for name in ("few", "many")], folder / "page.html").path


class Visit:
    """A page that is open, and what went wrong in it."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda each: self.problems.append(each.text) if each.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url.partition(":")[0]))
        page.goto(path.as_uri())
        self.until("document.documentElement.dataset.drawn")
        assert page.evaluate("document.documentElement.dataset.drawn") == "yes"

    def until(self, holds: str) -> None:
        """Return once an expression is true in the page, whose policy refuses the text of `wait_for_function`."""
        self.page.evaluate(
            "() => new Promise((done, fail) => { const end = performance.now() + 120000; const look = () => "
            f"({holds}) ? done() : performance.now() > end ? fail('never') : setTimeout(look, 10); look(); }})"
        )

    def range_of(self, plot: str) -> list[float]:
        """What the x axis of a figure shows."""
        return [float(each) for each in self.page.evaluate(f"document.getElementById('{plot}').layout.xaxis.range")]

    def colour(self, of: str) -> tuple[int, ...]:
        """A colour of the page's body, as red, green and blue."""
        found = self.page.evaluate(f"getComputedStyle(document.body).{of}")
        return tuple(map(int, re.findall(r"\d+", found)[:3]))


@pytest.fixture(scope="module")
def visit(browser: Browser, written: Path) -> Iterator[Visit]:
    """The page on a screen of 1100 by 800."""
    context = browser.new_context(viewport={"width": 1100, "height": 800})
    yield Visit(context.new_page(), written)
    context.close()


def test_every_figure_is_drawn_without_an_error_or_a_request(visit: Visit) -> None:
    """Curves have points, timelines have lines; the console is empty, and nothing but the file itself was fetched."""
    plots = visit.page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.id)")
    assert plots == ["time", "samples", "speed-up", "timeline-0", "timeline-1", "staleness"]
    for plot in ("time", "samples", "timeline-0", "timeline-1"):
        paths = visit.page.evaluate(
            f"[...document.querySelectorAll('#{plot} .scatterlayer path.js-line')].map(p => p.getTotalLength())"
        )
        assert paths and max(paths) > 10.0, plot
    assert visit.page.evaluate("document.querySelectorAll('#staleness .barlayer .point').length") >= 3
    assert not visit.problems
    assert set(visit.requests) <= {"file", "data", "blob"}
    assert visit.requests.count("file") == 1


def hovered(visit: Visit, plot: str) -> tuple[float, str]:
    """The value of the second point of a figure's first trace, and what the page tells when the mouse is there."""
    visit.page.locator(f"#{plot}").scroll_into_view_if_needed()
    x, y, value = visit.page.evaluate(f"""() => {{
      const plot = document.getElementById("{plot}"), layout = plot._fullLayout;
      const box = plot.getBoundingClientRect(), point = plot.calcdata[0][1];
      return [
        box.x + layout.xaxis._offset + layout.xaxis.c2p(point.x),
        box.y + layout.yaxis._offset + layout.yaxis.c2p(point.y),
        point.y,
      ];
    }}""")
    visit.page.mouse.move(x, y)
    told = visit.page.wait_for_selector(f"#{plot} .hoverlayer .hovertext, #{plot} .hoverlayer .legend")
    return value, (told.text_content() or "") if told is not None else ""


def test_hovering_shows_values(visit: Visit) -> None:
    """The loss of an experiment at one moment; on the timeline, what a learner did for how long."""
    loss, told = hovered(visit, "time")
    assert f"few-virtual : {loss:.4g}" in told
    _, told = hovered(visit, "timeline-0")
    assert re.search(r"learner 0 computing for [\d.]+ s\s*mini-batch \d+", told)


def test_the_timeline_zooms_by_dragging_and_back(visit: Visit) -> None:
    """To what was dragged across; a double click shows everything again, and a button the beginning."""
    visit.page.locator("#timeline-1").scroll_into_view_if_needed()
    whole = visit.range_of("timeline-1")
    box = visit.page.locator("#timeline-1 .nsewdrag").bounding_box()
    assert box is not None
    middle = box["y"] + 0.5 * box["height"]
    visit.page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
    visit.page.mouse.up()
    visit.until("document.getElementById('timeline-1').layout.xaxis.range[0] > 0.01")
    zoomed = visit.range_of("timeline-1")
    assert (zoomed[1] - zoomed[0]) / (whole[1] - whole[0]) == pytest.approx(0.25, abs=0.02)
    visit.page.mouse.dblclick(box["x"] + 0.3 * box["width"], middle)
    visit.until(
        f"Math.abs(document.getElementById('timeline-1').layout.xaxis.range[1] - {whole[1]}) < 0.05 * {whole[1]}"
    )
    assert not visit.problems


def test_audio_plays(visit: Visit) -> None:
    """The browser knows how long an utterance is, and gets to its end."""
    visit.page.locator("audio").first.scroll_into_view_if_needed()
    assert visit.page.locator("audio").count() == 12
    visit.until("document.querySelector('audio').readyState >= 1")
    seconds = visit.page.evaluate("document.querySelector('audio').duration")
    assert 0.3 < seconds < 3.0
    visit.page.evaluate("document.querySelector('audio').muted = true; document.querySelector('audio').play()")
    visit.until("document.querySelector('audio').ended || document.querySelector('audio').currentTime > 0.1")
    assert visit.page.evaluate("document.querySelector('audio').error") is None


def test_the_page_follows_the_system_to_dark_and_to_light(visit: Visit) -> None:
    """Text and figures, also while it is open."""
    for scheme in ("light", "dark", "light"):
        visit.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        is_dark = scheme == "dark"
        assert (sum(visit.colour("backgroundColor")) < 200) is is_dark
        assert (sum(visit.colour("color")) > 500) is is_dark
        ink = visit.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()")
        visit.until(f"document.getElementById('time').layout.font.color === '{ink}'")


def test_the_page_fits_a_narrow_screen(browser: Browser, written: Path) -> None:
    """Nothing reaches beyond it, so there is no scrolling sideways, also when the screen becomes narrower still; wide
    tables scroll inside themselves."""
    context = browser.new_context(viewport={"width": 400, "height": 800})
    visit = Visit(context.new_page(), written)
    for width in (400, 320):
        visit.page.set_viewport_size({"width": width, "height": 800})
        visit.until(f"document.querySelector('#time .main-svg').getBoundingClientRect().width <= {width}")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        drawn = visit.page.evaluate("document.querySelector('#time .nsewdrag').getBoundingClientRect().width")
        assert drawn > 0.6 * width
    context.close()


def test_a_telephone_needs_no_mouse(browser: Browser, outcomes: Path) -> None:
    """Plotly's tool bar is out of the way, error rates and texts of events are seen without scrolling, and what is said
    about zooming is true: two taps show the whole run again."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    visit = Visit(context.new_page(), outcomes)
    assert visit.page.locator(".modebar").first.is_hidden()
    assert visit.page.locator(".mouse").is_hidden() and visit.page.locator(".touch").is_visible()
    assert visit.page.locator("#wer th").all_inner_texts()[2:5] == ["WER", "95 % interval", "CER"]
    seen = [*visit.page.locator("#wer td:nth-child(5)").all(), *visit.page.locator(".events td.text").all()]
    boxes = [each.bounding_box() for each in seen]
    assert len(boxes) > 6 and all(box and box["x"] + box["width"] <= 390 for box in boxes)
    whole = visit.range_of("timeline-0")
    visit.page.evaluate("Plotly.relayout('timeline-0', {'xaxis.range': [1, 2]})")
    visit.page.locator("#timeline-0").scroll_into_view_if_needed()
    box = visit.page.locator("#timeline-0 .nsewdrag").bounding_box()
    assert box is not None
    for _ in range(2):
        visit.page.touchscreen.tap(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    visit.until(f"Math.abs(document.getElementById('timeline-0').layout.xaxis.range[1] - {whole[1]}) < 1")
    context.close()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run that was scored in two ways and made no error in the end, and one that was stopped."""
    (greedy,) = evidence().sets
    sets = (greedy, replace(greedy, folder="decode/beam", interval=(10.25, 17.31), utterances=()))
    ends = [{"time": 14.0, "kind": "validation", "set": "dev", "step": 8, "epochs": 2, "wer": 0.0}]
    long = tuple(replace(stretch(0, place), end=150.0 * (place + 1), seconds=150.0) for place in range(4))
    stopped = "stopped by SIGINT, saved exp/tt/checkpoints/step-00000592 (exit code 130)"
    experiments = [
        evidence(
            label="mine", events=[*events(), *ends], sets=sets, stretches=long, strategy="adpsgd (pattern=random)"
        ),
        evidence(label="tt", outcome=stopped, sets=(), strategy="allreduce"),
    ]
    path = tmp_path_factory.mktemp("scored") / "page.html"
    path.write_text(render(experiments, "today"), encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [400, 800, 1100, 1400])
def test_no_table_is_cut_off_and_no_value_is_broken(width: int, browser: Browser, scored: Path) -> None:
    """Wide tables use the whole window or become cards; a number stays with its unit."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    visit = Visit(context.new_page(), scored)
    tables = visit.page.evaluate("[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])")
    assert len(tables) >= 4 and all(content <= shown for content, shown in tables)
    rows = visit.page.locator(".cards td:not(.text, :first-child)").evaluate_all("""cells => cells.map(cell => {
      const range = document.createRange();
      range.selectNodeContents(cell);
      return [cell.innerText, new Set([...range.getClientRects()].map(box => Math.round(box.top))).size];
    })""")
    assert len(rows) > 20 and [text for text, count in rows if count != 1] == []
    assert layout_problems(visit.page) == []
    visit.page.set_viewport_size({"width": min(width, 718), "height": 900})  # as wide as A4 without margins
    visit.page.emulate_media(media="print")
    tables = visit.page.evaluate("[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])")
    assert all(content <= shown for content, shown in tables)
    context.close()


def test_error_rates_of_0_are_seen_whole_and_the_tool_bar_has_no_ground(browser: Browser, scored: Path) -> None:
    """The axis begins a little below 0; the tool bar of a figure is as light or dark as the page."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    visit = Visit(context.new_page(), scored)
    low, high = visit.page.evaluate("document.getElementById('validation').layout.yaxis.range")
    assert -0.2 * high < low < -0.02 * high
    grounds = "[...document.querySelectorAll('.modebar-group')].map(e => getComputedStyle(e).backgroundColor)"
    assert set(visit.page.evaluate(grounds)) == {"rgba(0, 0, 0, 0)"}
    context.close()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run that went well, of so many mini-batches that each is thinner than a pixel, one that failed,
    and one that was resumed."""
    many = tuple(stretch(learner, place, 0.2) for place in range(500) for learner in range(2))
    many = tuple(replace(each, computing=0.9, waiting_for_data=0.1) for each in many)
    failed = [*events(), {"time": 14.0, "kind": "verdict", "text": "too quiet, for a reason that takes a line " * 3}]
    failed += [{"time": 15.0, "kind": "end", "exit_code": 3, "message": f"a/long/path{'/of/folders' * 20}"}]
    resumed = [*events((0, 9, 3)), {"time": 90.0, "kind": "start", "learners": 4, "strategy": "adpsgd"}]
    experiments = [
        evidence(label="well", stretches=many),
        evidence(label="failed", events=failed, outcome=failed[-1]["message"]),
        evidence(label="resumed", events=resumed, learners=4),
    ]
    path = tmp_path_factory.mktemp("outcomes") / "page.html"
    path.write_text(render(experiments, "today"), encoding="utf-8")
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overlaps_and_no_figure_is_blank(width: int, scheme: str, browser: Browser, outcomes: Path) -> None:
    """Legends leave axis titles free, and the timeline of a long run is as green on a telephone as on a desk."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    visit = Visit(context.new_page(), outcomes)
    assert layout_problems(visit.page) == []
    for plot in visit.page.locator(".plot").all():
        assert num_inked(plot, visit.page, ".trace") > 20, plot.get_attribute("id")
    box = visit.page.locator("#timeline-0 .nsewdrag").bounding_box()
    assert box is not None
    assert num_inked(visit.page.locator("#timeline-0"), visit.page, ".trace") > 0.3 * box["width"] * box["height"]
    assert not visit.problems
    context.close()


def test_the_page_prints(visit: Visit, tmp_path: Path) -> None:
    """In light colours, with figures as wide as the paper; afterwards the screen is as before."""
    visit.page.emulate_media(color_scheme="dark")
    before = visit.page.evaluate("document.querySelector('#time svg').getBoundingClientRect().width")
    visit.page.evaluate(
        "window.printed = []; addEventListener('beforeprint', () => printed.push("
        "document.getElementById('time').layout.width, getComputedStyle(document.body).backgroundColor))"
    )
    pdf = visit.page.pdf(format="A4", print_background=True)
    assert pdf.startswith(b"%PDF-") and len(pdf) > 50_000
    assert visit.page.evaluate("printed") == [680, "rgb(255, 255, 255)"]
    visit.until(f"Math.abs(document.querySelector('#time svg').getBoundingClientRect().width - {before}) < 2")
    assert sum(visit.colour("backgroundColor")) < 200
    assert not visit.problems
