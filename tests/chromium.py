"""A real Chromium for tests of pages, and what is wrong with a page's layout."""

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.image
import numpy as np
import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)
WIDTHS = (360, 800, 1400)
"""Widths of a telephone, a tablet and a desk, in pixels."""
_PROBLEMS = """() => {
  const problems = [], width = innerWidth, root = document.documentElement;
  if (root.scrollWidth > width) problems.push(`the page is ${root.scrollWidth} wide`);
  const scrolls = element => element && element !== document.body && (scrolls(element.parentElement) ||
    !element.closest("svg") && ["auto", "scroll", "hidden"].includes(getComputedStyle(element).overflowX));
  const shown = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (parent.closest("script, style, details:not([open]) > :not(summary), audio")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const isDrawn = parent.closest("svg") !== null;
    for (const box of isDrawn ? [parent.getBoundingClientRect()] : range.getClientRects()) {
      if (box.width < 1 || box.height < 1) continue;
      const text = node.data.trim().slice(0, 40);
      const isOutside = box.right > width + 1 || box.left < -1;
      if (isOutside && !scrolls(parent)) problems.push(`"${text}" reaches beyond the page`);
      const frame = isDrawn ? parent.closest("svg").getBoundingClientRect() : null;
      if (frame && (box.right > frame.right + 1 || box.left < frame.left - 1 || box.bottom > frame.bottom + 1))
        problems.push(`"${text}" reaches beyond its figure`);
      shown.push({text, box, node, parent});
    }
  }
  shown.sort((one, other) => one.box.top - other.box.top);
  shown.forEach(({text, box, node, parent}, place) => {
    for (let next = place + 1; next < shown.length && shown[next].box.top < box.bottom - 3; next++) {
      const other = shown[next];
      const across = Math.min(box.right, other.box.right) - Math.max(box.left, other.box.left);
      const down = Math.min(box.bottom, other.box.bottom) - other.box.top;
      const isSame = node === other.node || parent.contains(other.parent) || other.parent.contains(parent);
      if (across > 2 && down > 3 && !isSame && !(scrolls(parent) || scrolls(other.parent)))
        problems.push(`"${text}" and "${other.text}" overlap`);
    }
  });
  return problems;
}"""


@contextmanager
def started(*arguments: str) -> Iterator[Browser]:
    """A Chromium that runs with more command-line arguments."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root with its sandbox
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, *arguments])
        yield running
        running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a module."""
    with started() as running:
        yield running


def layout_problems(page: Page) -> list[str]:
    """What reaches beyond the page or its figure without scrolling there, and which texts overlap, in words."""
    return list(page.evaluate(_PROBLEMS))


def num_inked(part: Locator, page: Page, marks: str) -> int:
    """The number of pixels of a part of the page that change if the elements inside it that match `marks` are hidden,
    such as the curves of a figure without its axes."""
    part.scroll_into_view_if_needed()
    box = part.bounding_box()
    assert box is not None
    pictures = []
    for visibility in ("hidden", ""):
        part.evaluate(
            "(part, [marks, visibility]) => part.querySelectorAll(marks).forEach("
            "each => each.style.visibility = visibility)",
            [marks, visibility],
        )
        pictures.append(matplotlib.image.imread(io.BytesIO(page.screenshot(clip=box))))  # type: ignore[arg-type]
    return int(np.any(pictures[0] != pictures[1], axis=-1).sum())
