"""The server's page in a real Chromium: a dropped file, a microphone, and errors."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from playwright.sync_api import Page, sync_playwright

from tests.serve.conftest import file_of, sung, words_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"),
]


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
    arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        shown = browser.new_page()
        problems: list[str] = []
        shown.on("console", lambda each: problems.append(each.text) if each.type in ("error", "warning") else None)
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.goto(server)
        yield shown
        browser.close()
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
    assert page.inner_text("#status") == "notes.md: cannot be read as audio: Format not recognised."
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
