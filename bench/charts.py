"""Small charts as SVG, without a library: grouped bars and lines, with a title, axes and direct labels.

bars(title, unit, groups, series) and lines(title, x_label, y_label, series) return the text of a file. They draw on white, so
that a page in the dark shows them as well.
"""

import html
import math

COLORS = "#2f6fab", "#e07b39", "#3d9970", "#8e5ea2", "#7a7a7a"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 64, 20, 64, 58
INK, FAINT = "#222222", "#dddddd"


def nice_ceiling(value):
    """The next of 1, 1.5, 2 … × 10^n that divides into fifths that can be read."""
    if value <= 0:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def label(value):
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def text(x, y, content, anchor="middle", size=12, fill=INK, extra=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{extra}>'
            f"{html.escape(content)}</text>")


def broken(name, width=13):
    """The words of a name in lines of so many characters."""
    result = [""]
    for word in name.replace("_", " ").split():
        if result[-1] and len(result[-1]) + 1 + len(word) > width:
            result.append("")
        result[-1] = f"{result[-1]} {word}".strip()
    return result


def frame(title, y_label, y_max, names):
    """Title, legend and horizontal grid."""
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           'font-family="Helvetica, Arial, sans-serif" role="img">')
    yield f"<title>{html.escape(title)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield text(LEFT, 22, title, "start", 15, extra=' font-weight="bold"')
    x = LEFT
    for name, color in zip(names, COLORS):
        yield f'<rect x="{x}" y="34" width="11" height="11" fill="{color}"/>'
        yield text(x + 16, 44, name, "start")
        x += 34 + 6.6 * len(name)
    for i in range(6):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * i / 5
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{FAINT if i else INK}"/>'
        yield text(LEFT - 8, y + 4, label(y_max * i / 5), "end")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield text(16, middle, y_label, extra=f' transform="rotate(-90 16 {middle:.1f})"')


def bars(title, y_label, groups, series):
    """groups: names below the axis; series: name -> one value for each group, None where there is none."""
    y_max = nice_ceiling(max(v for values in series.values() for v in values if v is not None) * 1.05)
    parts = list(frame(title, y_label, y_max, series))
    span, high = (WIDTH - LEFT - RIGHT) / len(groups), HEIGHT - TOP - BOTTOM
    width = min(40, span * 0.8 / len(series))
    for g, group in enumerate(groups):
        middle = LEFT + span * (g + 0.5)
        for i, line in enumerate(broken(group)):
            parts.append(text(middle, HEIGHT - BOTTOM + 18 + 14 * i, line, size=11))
        for s, (values, color) in enumerate(zip(series.values(), COLORS)):
            if values[g] is None:
                continue
            x, bar = middle + (s - len(series) / 2) * width, high * values[g] / y_max
            parts.append(f'<rect x="{x + 1:.1f}" y="{HEIGHT - BOTTOM - bar:.1f}" width="{width - 2:.1f}" '
                         f'height="{bar:.1f}" fill="{color}"/>')
            parts.append(text(x + width / 2, HEIGHT - BOTTOM - bar - 5, label(values[g]), size=11))
    return "\n".join([*parts, "</svg>", ""])


def lines(title, x_label, y_label, series):
    """series: name -> list of (x, y); both axes begin at 0."""
    points = [point for values in series.values() for point in values]
    x_max, y_max = nice_ceiling(max(x for x, _ in points)), nice_ceiling(max(y for _, y in points))
    parts = list(frame(title, y_label, y_max, series))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    for i in range(6):
        parts.append(text(LEFT + wide * i / 5, HEIGHT - BOTTOM + 18, label(x_max * i / 5), "end" if i == 5 else "middle"))
    parts.append(text(LEFT + wide / 2, HEIGHT - 14, x_label))
    for values, color in zip(series.values(), COLORS):
        at = [(LEFT + wide * x / x_max, HEIGHT - BOTTOM - high * y / y_max) for x, y in values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in at]
    return "\n".join([*parts, "</svg>", ""])
