"""A few SVG shapes, in colours that a page can override: enough for the pictures of docs/concepts.md."""

from html import escape

# The same variable names as in docs/assets/site.css. These values apply when a picture is shown by itself.
LIGHT = "--ink:#1f2933;--soft:#6b7785;--paper:#eef1f4;--good:#0f766e;--bad:#b4371f;--mark:#9a6700"
DARK = "--ink:#e6e9ec;--soft:#9aa5b1;--paper:#2b323b;--good:#4fd1c0;--bad:#ff9b85;--mark:#f0c36a"


class Picture:
    """Shapes on a canvas; colours are names: ink, soft, paper, good, bad, mark.

    Example:
        picture = Picture(200, 40)
        picture.box(10, 10, 80, 20, "prompt")
        picture.svg()
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.shapes: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, color: str = "ink", anchor: str = "start", size: int = 13
    ) -> None:
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" fill="var(--{color})" text-anchor="{anchor}" font-size="{size}">'
            f"{escape(words)}</text>"
        )

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str = "paper", line: str | None = None
    ) -> None:
        stroke = f' stroke="var(--{line})"' if line else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="var(--{fill})"{stroke}/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, words: str, *, line: str = "soft", color: str = "ink"
    ) -> None:
        """A rectangle with centred text, which may have several lines."""
        self.rect(x, y, width, height, line=line)
        lines = words.split("\n")
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line_of_words in enumerate(lines):
            self.text(x + width / 2, top + 16 * number, line_of_words, anchor="middle", color=color)

    def line(
        self, *points: tuple[float, float], color: str = "soft", dashed: bool = False, width: float = 1.5
    ) -> None:
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.shapes.append(f'<path d="{path}" fill="none" stroke="var(--{color})" stroke-width="{width:g}"{dash}/>')

    def arrow(self, *points: tuple[float, float], color: str = "soft") -> None:
        """A line with an arrowhead at its end; its last segment must be horizontal or vertical."""
        self.line(*points, color=color)
        (x0, y0), (x, y) = points[-2:]
        dx, dy = ((x > x0) - (x < x0)) * 6, ((y > y0) - (y < y0)) * 6
        wings = (x - dx + dy / 1.5, y - dy + dx / 1.5), (x, y), (x - dx - dy / 1.5, y - dy - dx / 1.5)
        self.line(*wings, color=color)

    def svg(self) -> str:
        style = f"svg{{{LIGHT}}}@media (prefers-color-scheme:dark){{svg{{{DARK}}}}}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                'font-family="system-ui, sans-serif">',
                f"<style>{style}</style>",
                *self.shapes,
                "</svg>\n",
            ]
        )
