"""The report page: figures show what is known, text is escaped, and nothing is asked of the network."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("plotly", reason="the extra `report` is not installed")

from starling.experiment.report import _curve_of
from starling.launch.messages import Stretch
from starling.reporting import page as figures
from starling.reporting.evidence import CurvePoint, Evidence, ScoredSet, Utterance
from starling.reporting.page import render

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def stretch(learner: int, place: int, waiting: float = 0.5) -> Stretch:
    """The `place`-th mini-batch of a learner: a second of computing after `waiting` for peers."""
    end = (place + 1) * (1.0 + waiting)
    return Stretch(learner, end, 1.0 + waiting, 2 * place + learner, 1, 4, 100, 200.0, 0.0, 1.0, 0.0, waiting)


def events(staleness: Sequence[int] = (6, 0, 2)) -> list[dict[str, Any]]:
    """What a run told."""
    epoch = {"step": 8, "epoch": 1, "staleness": list(staleness), "consensus_distance": 0.25}
    return [
        {"time": 10.0, "kind": "start", "learners": 2, "strategy": "adpsgd", "command": f"starling train demo {NASTY}"},
        {"time": 11.0, "kind": "loss", "reason": NASTY},
        {"time": 11.5, "kind": "checkpoint", "folder": "step-00000004", "moment": "epoch", "consensus_distance": 0.5},
        {"time": 12.0, "kind": "epoch", **epoch},
        {"time": 13.0, "kind": "validation", "set": "dev", "step": 8, "epochs": 1, "wer": 12.5},
    ]


def evidence(**changes: Any) -> Evidence:
    """An experiment of two learners, of which everything is known."""
    utterance = Utterance("worst", NASTY, 1, 2, ((NASTY, NASTY), ("TWO", "")))
    known = Evidence(
        label="demo",
        path=Path("exp/demo"),
        strategy="adpsgd",
        learners=2,
        is_virtual=False,
        outcome="ended well",
        events=events(),
        stretches=tuple(stretch(learner, place) for place in range(4) for learner in range(2)),
        curve=(CurvePoint(1.5, 2, 8, 3.0), CurvePoint(6.0, 8, 32, 1.0)),
        sets=(
            ScoredSet(
                "test", "decode", 4.0, (3.0, 5.0), 2.0, 100, 1, 1, 2, 50, 4,
                (utterance,), (("TWO", "", 3), (NASTY, "ONE", 1)), 9,
            ),
        ),
    )  # fmt: skip
    return replace(known, **changes)


def values(encoded: Any) -> np.ndarray[Any, Any]:
    """The numbers of an array in a figure's JSON."""
    if isinstance(encoded, dict):
        return np.frombuffer(base64.b64decode(encoded["bdata"]), dtype=encoded["dtype"]).astype(float)
    return np.array([np.nan if each is None else each for each in encoded], dtype=float)


def spec(figure: Any) -> dict[str, Any]:
    """A figure as the page gets it."""
    return dict(json.loads(figure.to_json()))


def test_text_is_shown_and_never_run() -> None:
    """Names, words, reasons and commands may hold anything; the page's own scripts are its only ones."""
    page = render([evidence(label=NASTY)], "today")
    assert NASTY not in page
    assert "onerror=alert(2)>" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_the_page_needs_nothing_else() -> None:
    """No address is in it but those inside plotly's own script, from which its policy lets nothing out."""
    page = render([evidence(), evidence(label="other", learners=4)], "today")
    outside = re.sub(r'<script type="application/octet-stream" id="plotly">.*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"https?:|//[a-z]", outside)
    assert "default-src 'none'" in page
    (packed,) = re.findall(r'id="plotly">(.*?)</script>', page, re.DOTALL)
    assert b"plotly.js" in gzip.decompress(base64.b64decode(packed))[:400]
    assert len(page) < 3e6


def test_a_page_about_little_says_what_it_lacks() -> None:
    """No figure, no table, a sentence each."""
    bare = evidence(
        stretches=(), curve=(), events=(), sets=(),
        missing={"training": "No training loss was recorded.", "events": "No events & so on."},
    )  # fmt: skip
    page = render([bare], "today")
    assert 'class="plot"' not in page
    assert len(page) < 20_000  # plotly's script would have nothing to draw
    assert "No training loss was recorded." in page and "No events &amp; so on." in page
    assert "The command that started this run was not recorded." in page


def test_the_timeline_shows_every_second_once() -> None:
    """In the order in which a learner spends them: it waits for peers, then computes."""
    figure = spec(figures.timeline(evidence(), 100))
    by_name = {trace["name"]: trace for trace in figure["data"]}
    assert by_name.keys() == {"computing", "waiting for peers"}
    computing, waiting = (values(by_name[name]["x"]).reshape(-1, 4) for name in ("computing", "waiting for peers"))
    assert len(computing) == len(waiting) == 8
    assert np.allclose(computing[:, 2] - computing[:, 0], 1.0)
    assert np.allclose(waiting[:, 2], computing[:, 0])
    assert np.isnan(computing[:, 3]).all()
    rows = values(by_name["computing"]["y"]).reshape(-1, 4)[:, 0]
    assert sorted(rows) == [0.0] * 4 + [1.0] * 4


@pytest.mark.parametrize("most", [1, 3, 8])
def test_a_long_timeline_is_put_together_and_loses_nothing(most: int) -> None:
    """Neighbouring stretches become one, with all of their seconds."""
    stretches = tuple(stretch(0, place, waiting=0.1 * place) for place in range(8))
    long = evidence(stretches=tuple(replace(each, end=100.0, seconds=100.0) for each in stretches))
    figure = spec(figures.timeline(long, most))
    seconds = {trace["name"]: sum(told[1] for told in trace["customdata"][::4]) for trace in figure["data"]}
    assert seconds == pytest.approx({"computing": 8.0, "waiting for peers": 2.8})
    assert len(figure["data"][0]["customdata"]) // 4 <= most


def test_speed_up_is_relative_to_the_fewest_learners() -> None:
    """Twice the utterances per second on four times the learners is twice, where four times were ideal."""
    one = evidence(label="one", learners=1, stretches=tuple(stretch(0, place, 0.0) for place in range(4)))
    four = evidence(
        label="four",
        learners=4,
        stretches=tuple(stretch(learner, place, 1.0) for learner in range(4) for place in range(4)),
    )
    (measured, ideal) = spec(figures.speed_up([four, one]))["data"]
    assert values(measured["x"]).tolist() == [1, 4]
    assert values(measured["y"]) == pytest.approx([1.0, 2.0])
    assert values(ideal["y"]).tolist() == [1.0, 4.0]


def test_there_is_no_speed_up_where_nothing_differs_or_clocks_do() -> None:
    """Equal numbers of learners; a real clock beside a simulated one."""
    assert not figures.speed_up([evidence(), evidence(label="b")]).data
    assert not figures.speed_up([evidence(), evidence(label="b", learners=4, is_virtual=True)]).data


def test_experiments_are_drawn_over_each_other() -> None:
    """One line each, each with a colour of its own; staleness in per cent."""
    both = [evidence(), evidence(label="b", events=events((4,)))]
    for make in (figures.loss_by_time, figures.loss_by_samples, figures.validation, figures.consensus):
        traces = spec(make(both))["data"]
        assert [trace["name"] for trace in traces] == ["demo", "b"]
        assert traces[0]["line"]["color"] != traces[1]["line"]["color"]
    first, second = spec(figures.staleness(both))["data"]
    assert (values(first["x"]).tolist(), values(first["y"]).tolist()) == ([0.0, 2.0], [75.0, 25.0])
    assert values(second["y"]).tolist() == [100.0]


def test_the_page_begins_with_why_a_model_does_not_work() -> None:
    """As the newest run said last; in place of how it ended, the table points there."""
    failed = [*events(), {"time": 14.0, "kind": "verdict", "text": "too early"}]
    failed += [{"time": 15.0, "kind": "verdict", "text": f"too quiet {NASTY}"}]
    page = render([evidence(events=failed, outcome=f"too quiet {NASTY}")], "2026-01-01")
    assert page.index('<p class="verdict"><b>demo:</b> too quiet &lt;/script&gt;') < page.index('<table id="overview">')
    assert '<td class="text" data-of="outcome">does not work: see above</td>' in page
    assert NASTY not in page
    told = [*failed, {"time": 16.0, "kind": "verdict", "text": "no use; likeliest cause: noise; remedy: quiet"}]
    page = render([evidence(events=[*told, {"time": 17.0, "kind": "end", "message": told[-1]["text"]}])], "2026-01-01")
    assert page.count("likeliest cause: noise") == 1 and page.count("no use") == 3
    for works in ({"kind": "verdict", "text": ""}, {"kind": "start", "command": "starling train demo resume=exp/demo"}):
        page = render([evidence(events=[*failed, {"time": 16.0, **works}])], "2026-01-01")
        assert '<p class="verdict">' not in page
        assert '<td class="text" data-of="outcome">ended well</td>' in page


def test_the_page_begins_with_goodput_and_warnings() -> None:
    """The error that ended the newest run comes first; what an earlier run said is left to the table of events."""
    told = [*events(), {"time": 20.0, "kind": "start", "learners": 2}, {"time": 21.0, "kind": "advice", "text": "wait"}]
    seconds = {"machines": 10.0, "useful": 5.0, "lost_work": 1.0, "entering": 0.5}
    told.append({"kind": "goodput", "ratio": 0.5, "waiting_for_peers": 2.0, "waiting_for_data": 1.0, **seconds})
    told.append({"time": 22.0, "kind": "end", "exit_code": 3, "message": f"no disk {NASTY}"})
    page = render([evidence(events=told)], "2026-01-01")
    head = page[: page.index('<table id="overview">')]
    assert "demo, since the resume:</b> goodput 50.0\u00a0% of 10 s of machine time; lost work 10.0\u00a0%" in head
    assert "since the resume" not in render([evidence(events=[told[0], *told[-2:]])], "2026-01-01")
    first, second = re.findall("<li>(.*)</li>", head)
    assert first.startswith("no disk &lt;/script&gt;") and second == "wait"


def test_the_score_is_the_first_on_the_card_and_utterances_name_their_decoding() -> None:
    """With each set and search; the model of tied states has no greedy decoding."""
    beam = replace(evidence().sets[0], folder="decode/beam", wer=3.5, utterances=())
    page = render([evidence(sets=(*evidence().sets, beam)), evidence(loss_unit="frame", sets=())], "today")
    scores = "<b>4.0&nbsp;%</b> on test (greedy), <b>3.5&nbsp;%</b> on test (beam search)"
    assert (
        f'<td>demo</td><td class="text" data-of="WER">{scores}</td>' in page
        and '<td class="text" data-of="WER">–</td>' in page
    )
    assert "<h3>demo, test: best and worst (greedy decoding)</h3>" in page
    assert "<h3>Most frequent errors of demo on test (beam search)</h3>" in page
    assert "<b>4.0&nbsp;%</b> on test</td>" in render([evidence()], "today")
    assert "greedy" not in render([evidence(loss_unit="frame")], "today")


def test_utterances_without_errors_are_among_the_best() -> None:
    """Whichever place they have in the order of a set that was recognised well."""
    (scored,) = evidence().sets
    ranks: tuple[Literal["best", "median", "worst"], ...] = ("best", "median", "worst")
    for errors, title, shown in (
        ((0, 0, 0), "all without errors", ["best"] * 3),
        ((0, 0, 1), "best and worst", ["best", "best", "worst"]),
        ((1, 1, 2), "best, median and worst", [*ranks]),
    ):
        utterances = tuple(Utterance(rank, rank, wrong, 3, ()) for rank, wrong in zip(ranks, errors, strict=True))
        page = render([evidence(sets=(replace(scored, utterances=utterances),))], "today")
        assert f"<h3>demo, test: {title} (greedy decoding)</h3>" in page
        assert re.findall(r'class="utterance"><div><b>(.*?)</b>', page) == shown


def test_distances_of_the_end_and_single_ones_are_not_drawn() -> None:
    """After the last averaging, the distance is not that of training."""
    end = {"kind": "checkpoint", "folder": "step-00000009", "moment": "end", "consensus_distance": 4.0}
    assert evidence(events=[*events(), end]).distances == [(4, 0.5), (8, 0.25)]
    (line,) = figures.consensus([evidence(events=[*events(), end])]).data
    assert list(line.y) == [0.5, 0.25]
    assert not figures.consensus([evidence(events=[events()[3], end])]).data


def test_a_short_last_stretch_of_a_loss_curve_is_no_point_of_its_own() -> None:
    """It would be the noise of a single mini-batch beside means over four."""
    steps = [Stretch(0, place + 1.0, 1.0, place, 1, 4, frames=10, losses=10.0) for place in range(301)]
    curve = _curve_of([*steps[:-1], replace(steps[-1], losses=100.0)])
    assert (len(curve), curve[-1].step, curve[-1].loss) == (75, 301, pytest.approx(2.8))


def test_error_rates_during_training_name_their_set() -> None:
    """As the recipe and the terminal do."""
    assert figures.validation([evidence()]).layout.yaxis.title.text == "WER on dev, %"


def test_shares_are_of_the_training_time_as_in_the_terminal() -> None:
    """Time that is neither computing nor waiting, such as saving, counts."""
    saved = tuple(replace(stretch(0, place), end=2.0 * (place + 1), seconds=2.0) for place in range(4))
    assert evidence(stretches=saved).share("computing") == pytest.approx(50.0)
    assert evidence(stretches=saved).share("waiting_for_peers") == pytest.approx(25.0)


def test_gradients_without_staleness_take_a_sentence_and_no_figure() -> None:
    """Beside an asynchronous run they are drawn."""
    in_step = evidence(label="in step", events=events((8,)))
    assert not figures.staleness([in_step]).data
    assert len(figures.staleness([in_step, evidence()]).data) == 2


def test_the_loss_is_labelled_with_its_unit() -> None:
    """Unless experiments differ."""
    title = figures.loss_by_time([evidence(loss_unit="token")]).layout.yaxis.title.text
    assert title == "training loss per token"
    both = figures.loss_by_time([evidence(loss_unit="token"), evidence(loss_unit="frame")])
    assert both.layout.yaxis.title.text == "training loss"


def test_losses_that_differ_much_have_a_logarithmic_axis() -> None:
    """Otherwise the end of a long run would be a flat line; losses below zero have no logarithm."""
    for last, kind in ((0.04, "log"), (1.0, None), (-0.1, None)):
        curve = tuple(CurvePoint(place, place, float(place), loss) for place, loss in enumerate((3.0, last)))
        for figure in (figures.loss_by_time, figures.loss_by_samples):
            assert figure([evidence(curve=curve)]).layout.yaxis.type == kind


def test_no_heading_is_empty_and_links_lead_to_the_others() -> None:
    """A row of a comparison has a loss curve and nothing else, and no sentences about what it lacks."""
    row = evidence(label="row", stretches=(), events=(), sets=())
    for shown, wanted in (([row], 2), ([row, evidence()], 7)):
        page = render(shown, "today")
        main = page[page.index("<main>") : page.index("</main>")]
        _, *parts = re.split(r"<h2 ", main)
        assert all(re.sub(r"<h3>.*?</h3>|<[^>]*>", "", part.partition("</h2>")[2]).strip() for part in parts)
        identifiers = [part.partition('"')[2].partition('"')[0] for part in parts]
        assert len(identifiers) == wanted
        assert re.findall(r'<a href="#(.*?)">', page[: page.index("<main>")]) == identifiers


def test_all_time_axes_of_a_page_have_the_unit_of_the_longest_run_and_begin_at_0() -> None:
    """A run of four minutes that began at 12 s on its clock, beside one of six seconds."""
    stretches = tuple(
        replace(stretch(learner, place, 59.0), end=12.0 + 60.0 * (place + 1))
        for place in range(4)
        for learner in (0, 1)
    )
    shown = [evidence(), evidence(label="long", stretches=stretches, curve=_curve_of(stretches))]
    page = render(shown, "today")
    (text,) = re.findall(r'id="specs">(.*?)</script>', page, re.DOTALL)
    specs = json.loads(text)
    axes = {name: specs[name]["layout"]["xaxis"] for name in ("time", "timeline-0", "timeline-1")}
    assert {axis["title"]["text"] for axis in axes.values()} == {"time of training, min"}
    assert axes["timeline-0"]["range"] == pytest.approx([0.0, 0.1])
    assert axes["timeline-1"]["range"] == pytest.approx([0.0, 4.0])
    assert values(specs["time"]["data"][1]["x"]).max() == pytest.approx(4.0)
    computing = next(each for each in specs["timeline-1"]["data"] if each["name"] == "computing")
    assert np.nanmax(values(computing["x"])) == pytest.approx(4.0)
