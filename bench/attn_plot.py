#!/usr/bin/env python3
"""The picture of docs/performance.md from the rows of `./x bench attn --json`, as SVG, without any library.

    attn_plot.py ROWS.json PICTURE.svg

Above: shares of what the machine can do. Below: how many times as fast as others. A bar ends at the median, a thin line is its
95 % interval, an upright mark is what is required; colours tell whether it is met.
"""

import json
import pathlib
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, LINE, BAR = 860, 400, 70, 21, 13
VALUE = 45  # width of a value beside its bar
COLOURS = {"pass": "#2f7d4f", "fail": "#b3392f", "inconclusive": "#8a8a8a"}
FREE_COLOUR = "#6f8fb3"  # nothing is required
LEGEND = "upright: required; green: met, red: missed, grey: undecided, blue: nothing required"


def text(x, y, what, anchor="start", size=12, weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{escape(what)}</text>'


def bars(rows, title, top, label, show, ticks):
    """A panel: title, one bar a row, an axis with ticks; and its height."""
    scale = (WIDTH - LEFT - RIGHT) / ticks[-1]
    bottom = top + 30 + LINE * len(rows)
    parts = [text(12, top + 16, title, size=14, weight="bold")]
    for tick in ticks:
        x = LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top + 26}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        parts.append(text(x, bottom + 14, show(tick), "middle", 11))
    for i, row in enumerate(rows):
        y = top + 30 + LINE * i
        end, middle = LEFT + min(row["value"], ticks[-1]) * scale, y + BAR / 2
        parts.append(text(LEFT - 8, y + BAR - 2, label(row), "end"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{max(end - LEFT, 0):.1f}" height="{BAR}" '
                     f'fill="{FREE_COLOUR if row["must"] is None else COLOURS[row["verdict"]]}"/>')
        low, high = (LEFT + min(row[key], ticks[-1]) * scale for key in ("low", "high"))
        parts.append(f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="#111111"/>')
        after = max(end, high)
        if row["must"] is not None:
            x = LEFT + min(row["must"], ticks[-1]) * scale
            parts.append(f'<line x1="{x:.1f}" y1="{y - 3}" x2="{x:.1f}" y2="{y + BAR + 3}" stroke="#111111" stroke-width="2"/>')
            if after < x + 3 and x < after + VALUE:  # the value would lie on it
                after = x
        parts.append(text(after + 6, y + BAR - 2, show(row["value"]), size=11))
    return parts, bottom + 34 - top


def ticks_to(most, steps):
    """0, step, 2 step, … to the first that is not below `most`."""
    step = next((step for step in steps if most / step <= 8), steps[-1])
    return [step * i for i in range(int(-(-most // step)) + 1)]


def draw(rows):
    there = [row for row in rows if row["value"] is not None]
    shares = [row for row in there if row["unit"] == "share" and "share of" in row["metric"] and row["better"] == "higher"]
    ratios = [row for row in there if row["case"].startswith("peers:") and row["unit"] == "ratio"]
    most = max((max(row["value"], row["must"] or 0) for row in ratios), default=1)
    parts, top = [], 10
    for chosen, title, label, show, ticks in (
            (shares, "Share of what the machine can do",
             lambda row: f"{row['case']}: {row['metric'].replace(', share of', ', of')}",
             lambda value: f"{100 * value:.0f} %", [.2 * i for i in range(6)]),
            (ratios, "Tokens a second, times those of others",
             lambda row: f"{row['case'].removeprefix('peers: ')}: {row['metric'].removesuffix(', tokens/s')}",
             lambda value: f"{value:.1f}", ticks_to(most, [.5, 1, 2, 5, 10]))):
        if chosen:
            panel, height = bars(chosen, title, top, label, show, ticks)
            parts += panel
            top += height
    parts.append(text(12, top + 6, LEGEND, size=11))
    top += 20
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
            f'font-family="sans-serif" fill="#111111">\n<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n'
            + "\n".join(parts) + "\n</svg>\n")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    lines = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    pathlib.Path(sys.argv[2]).write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
