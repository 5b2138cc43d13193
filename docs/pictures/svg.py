"""The little of SVG that the pictures need: a panel with a title, shapes by class, both colour schemes."""

from collections.abc import Mapping
from html import escape

LIGHT = {
    "panel": "#ffffff",
    "edge": "#d0d7de",
    "text": "#1f2328",
    "muted": "#59636e",
    "fast": "#3a72b8",
    "slow": "#b85f14",
    "waits": "#8b949e",
    "averaging": "#2c9467",
    "message": "#7b4fc0",
    "node": "#eaf1fb",
}
DARK = {
    "panel": "#161b22",
    "edge": "#3d444d",
    "text": "#e6edf3",
    "muted": "#a0aab5",
    "fast": "#3f7fcf",
    "slow": "#b9671f",
    "waits": "#7d8590",
    "averaging": "#3fb37f",
    "message": "#b18cf0",
    "node": "#22324a",
}
ON_BARS = "#ffffff"
WIDTH = 880
"""Of every picture, in pixels."""


def rules(colours: Mapping[str, str]) -> str:
    """The classes of shapes as CSS, in some colours."""
    return "".join(
        (
            f".panel{{fill:{colours['panel']};stroke:{colours['edge']}}}",
            f"text{{fill:{colours['text']}}}",
            f".muted{{fill:{colours['muted']}}}",
            f".on{{fill:{ON_BARS}}}",
            f".axis{{stroke:{colours['edge']};fill:none}}",
            f".fast{{fill:{colours['fast']}}}",
            f".slow{{fill:{colours['slow']}}}",
            f".waits{{stroke:{colours['waits']};fill:none}}",
            f".averaging{{fill:{colours['averaging']}}}",
            f".rim{{stroke:{colours['averaging']};fill:none}}",
            f".message{{stroke:{colours['message']};fill:none}}",
            f".head{{fill:{colours['message']}}}",
            f".other{{stroke:{colours['slow']};fill:none}}",
            f".node{{fill:{colours['node']};stroke:{colours['fast']}}}",
            f".round{{stroke:{colours['averaging']};fill:none}}",
        )
    )


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


class Picture:
    """An SVG on a panel of its own, so that it reads on any page; dark where the reader's device is."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._size = (width, height)
        self._title, self._description = title, description
        self._parts: list[str] = []

    def rectangle(self, kind: str, x: float, y: float, width: float, height: float, more: str = "") -> None:
        self._add(
            f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"',
            more,
        )

    def line(self, kind: str, x1: float, y1: float, x2: float, y2: float, more: str = "") -> None:
        self._add(f'<path class="{kind}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"', more)

    def path(self, kind: str, commands: str, more: str = "") -> None:
        self._add(f'<path class="{kind}" d="{commands}"', more)

    def circle(self, kind: str, x: float, y: float, radius: float, more: str = "") -> None:
        self._add(f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"', more)

    def text(
        self, x: float, y: float, words: str, kind: str = "", size: int = 12, anchor: str = "", bold: bool = False
    ) -> None:
        more = f' class="{kind}"' if kind else ""
        more += f' font-size="{size}"' if size != 12 else ""
        more += f' text-anchor="{anchor}"' if anchor else ""
        more += ' font-weight="bold"' if bold else ""
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}"{more}>{escape(words, quote=False)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, more: str = "") -> None:
        self.line("message", x1, y1, x2, y2, 'marker-end="url(#to)" ' + more)

    def waiting(self, x: float, y: float, width: float, height: float) -> None:
        """A stretch of waiting: a dashed outline, hatched."""
        self.rectangle("waits", x, y, width, height, 'stroke-width=".6" stroke-dasharray="2 2"')
        starts = range(0, max(1, int(width)), 6)
        lengths = (min(height, width - at) for at in starts)
        hatch = "".join(
            f"M{number(x + at)} {number(y + height)}l{number(length)} {number(-length)}"
            for at, length in zip(starts, lengths, strict=True)
        )
        self.path("waits", hatch, 'stroke-width=".6"')

    def finished(self) -> str:
        """The whole file."""
        width, height = self._size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-labelledby="title desc" font-family="sans-serif" font-size="12">',
            f'<title id="title">{escape(self._title, quote=False)}</title>',
            f'<desc id="desc">{escape(self._description, quote=False)}</desc>',
            f"<style>{rules(LIGHT)}@media (prefers-color-scheme:dark){{{rules(DARK)}}}</style>",
            '<defs><marker id="to" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto-start-reverse"><path class="head" d="M0 0.8L8 4L0 7.2z"/></marker></defs>',
            f'<rect class="panel" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _add(self, start: str, more: str) -> None:
        self._parts.append(f"{start} {more}/>" if more else f"{start}/>")
