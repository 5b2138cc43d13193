"""The server's page in a real Chromium: a dropped file, a microphone, and errors."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page

from tests.chromium import WIDTHS, layout_problems, needs_chromium, started
from tests.serve.conftest import file_of, sung, words_of

pytestmark = [pytest.mark.wide, needs_chromium]


@pytest.fixture(scope="module")
def spoken() -> list[str]:
    return words_of(7)


@pytest.fixture(scope="module")
def page(server: str, spoken: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, in a browser whose microphone hears some words repeatedly."""
    heard = tmp_path_factory.mktemp("microphone") / "words.wav"
    heard.write_bytes(file_of(sung(spoken, 48_000), 48_000))
    arguments = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    arguments += [f"--use-file-for-fake-audio-capture={heard}"]
    with started(*arguments) as browser:
        shown = browser.new_page()
        problems: list[str] = []
        shown.on("console", lambda each: problems.append(each.text) if each.type in ("error", "warning") else None)
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.goto(server)
        yield shown
        assert [each for each in problems if "400" not in each] == []  # the browser reports refused uploads


def test_a_chosen_file_is_shown_by_segment(page: Page, tmp_path: Path) -> None:
    """Each segment is shown with the time at which it begins."""
    words = words_of(3)
    (tmp_path / "talk.wav").write_bytes(file_of(sung(words)))
    page.set_input_files("#file", tmp_path / "talk.wav")
    page.wait_for_selector("#status:has-text('s of audio')")
    assert page.inner_text("#text").split() == ["00:00:00", *words]
    assert page.inner_text("#status").startswith("talk.wav: ")
    assert page.inner_text("#model").endswith("tones")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_screen(width: int, scheme: str, page: Page) -> None:
    """With a transcript on it: nothing reaches beyond the screen, and nothing covers anything else."""
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 900})
    assert layout_problems(page) == []


def test_a_dropped_file_that_is_not_audio_is_refused_in_words(page: Page) -> None:
    """The words are the server's."""
    page.evaluate(
        """() => {
            const transfer = new DataTransfer();
            transfer.items.add(new File(["no audio"], "notes.md"));
            document.getElementById("drop").dispatchEvent(new DragEvent("drop", {dataTransfer: transfer}));
        }"""
    )
    page.wait_for_selector("#status.error")
    assert page.inner_text("#status").startswith("notes.md: cannot be read as audio: ")
    assert page.inner_text("#text") == ""


def test_the_microphone_is_transcribed_during_speech(page: Page, client: httpx.Client, spoken: list[str]) -> None:
    """Partial texts come first, segments after pauses; the button stops it."""
    page.click("#speak")
    page.wait_for_function("() => document.getElementById('partial').textContent !== ''")
    page.wait_for_selector("#text p:nth-child(2)")
    page.click("#speak")
    page.wait_for_selector("#status:has-text('Stopped')")
    lines = page.locator("#text p").all_inner_texts()
    assert " ".join(spoken) in lines[1]
    assert page.inner_text("#speak") == "Speak"
    assert client.get("/health").json()["waiting"] == 0
