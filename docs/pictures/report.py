"""The picture of a report, of two runs that begin with the recogniser of `make demo`, learner 0 three times as slow:

    for choice in 'synchronous strategy=allreduce' 'asynchronous strategy={name: adpsgd, pattern: pairs}'; do
        starling train demo name=${choice%% *} learners=3 "${choice#* }" warm_start=exp/demo optimizer.lr=4e-4 \\
            budget.steps=480 checkpoints.every=96 stragglers.slow='{0: 3x}'
    done
    python docs/pictures/report.py exp/synchronous exp/asynchronous

It needs the extra `report`, playwright, and a Chromium on the PATH.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import starling

PICTURE = Path(__file__).with_name("report.png")
SIZE = {"width": 1000, "height": 1000}


def main(experiments: list[str]) -> None:
    """Write the report, open it, zoom into the timelines, and take the picture."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium, chromium-browser or google-chrome on the PATH")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        page_file = starling.report(experiments, Path(folder) / "report.html").path
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = started.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
        page.goto(page_file.as_uri())
        page.locator("html[data-drawn=yes]").wait_for()
        for place in range(len(experiments)):
            page.locator(f"#timeline-{place} .updatemenu-button", has_text="middle").click()
        # the overview, the loss against time and the timelines; what is between them is left out
        page.evaluate("""() => {
          const shown = ["overview", "training", "time", "timeline"];
          for (const part of document.querySelectorAll("main > *")) {
            const is_shown = shown.some(id => part.id === id || part.querySelector("#" + id));
            if (!is_shown && !part.querySelector("[id^=timeline-]")) part.style.display = "none";
          }
          scrollTo(0, 0);
        }""")
        page.mouse.move(0, 0)
        height = page.evaluate("Math.ceil(document.body.getBoundingClientRect().height)")
        clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": height}
        page.screenshot(path=PICTURE, clip=clip, full_page=True)  # type: ignore[arg-type]
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
