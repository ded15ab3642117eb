"""One look for all pictures, legible in black and white: series differ by dash, marker and hatch besides colour, and
the paper's points are hollow and joined by a thin dotted line.

Each helper draws one series; `place` is its number in the picture, which says how it looks: ours and the paper's of one
series share it. Knows nothing of figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.4,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "path",
}
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's
_DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (3, 3)))
_MARKERS = "osD^vPX"
_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oo")
_PAPER = {"linestyle": ":", "linewidth": 0.8, "markerfacecolor": "none"}

Point = tuple[float, float]


def line(
    axes: Any,
    points: Sequence[Point],
    label: str,
    place: int = 0,
    *,
    paper: bool = False,
    spread: Sequence[Point] | None = None,
    markers: bool = True,
) -> None:
    """(x, y) points joined. spread: the least and the greatest y of all seeds at each x, drawn as error bars."""
    xs, ys = zip(*points, strict=True)
    look = {"color": _of(_COLOURS, place), "marker": _of(_MARKERS, place) if markers else None}
    look |= _PAPER if paper else {"linestyle": _of(_DASHES, place)}
    axes.plot(xs, ys, label=label, **look)
    if spread is not None:
        _error_bars(axes, xs, ys, spread, _of(_COLOURS, place))


def tick(axes: Any, point: Point, place: int = 0) -> None:
    """A short upright stroke at one point: a number of the table, where it lies in the picture."""
    axes.plot(*point, marker="|", markersize=11, markeredgewidth=2, color=_of(_COLOURS, place), zorder=5)


def cdf(axes: Any, points: Sequence[Point], label: str, place: int = 0, *, paper: bool = False) -> None:
    """(value, share) points as a curve without markers; of the paper's, some."""
    xs, ys = zip(*points, strict=True)
    look = {"color": _of(_COLOURS, place), "linestyle": _of(_DASHES, place)}
    if paper:
        look |= _PAPER | {"marker": _of(_MARKERS, place), "markevery": 0.08}
    axes.plot(xs, ys, label=label, **look)


def bars(
    axes: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    paper: Mapping[str, Sequence[float | None]] | None = None,
    *,
    spread: Mapping[str, Sequence[Point]] | None = None,
    paper_label: str = "paper",
) -> None:
    """A bar for each group and series, None for none; the paper's values as hollow markers upon them, its series by the
    same names. spread: least and greatest of all seeds.
    """
    width = 0.8 / len(series)
    for place, (name, heights) in enumerate(series.items()):
        xs = [group - 0.4 + width * (place + 0.5) for group in range(len(groups))]
        drawn = [float("nan") if height is None else height for height in heights]
        look = {"color": "white", "edgecolor": _of(_COLOURS, place), "hatch": _of(_HATCHES, place)}
        if not place:
            look["color"] = _COLOURS[0]
        axes.bar(xs, drawn, 0.9 * width, label=name, **look)
        if spread is not None and name in spread:
            _error_bars(axes, xs, drawn, spread[name], "black")
        if paper is not None and name in paper:
            _paper_marks(axes, xs, paper[name], None if place else paper_label)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="x", visible=False)


def box(axes: Any, boxes: Mapping[str, Mapping[str, float]], paper: Mapping[str, Mapping[str, float]]) -> None:
    """For each name a box of ours, and beside it one of the paper's in dashes. Of each, by the names that the paper's
    CSVs use: whisker_low, q1, median, q3, whisker_high, and mean (a triangle).
    """
    for found, shift, dash, colour in ((boxes, -0.19, "-", _COLOURS[0]), (paper, 0.19, ":", "black")):
        stats = [_box_stats(found[name]) for name in boxes if name in found]
        xs = [place + shift for place, name in enumerate(boxes) if name in found]
        lines = {"linestyle": dash, "color": colour}
        props = {f"{part}props": lines for part in ("box", "whisker", "cap", "median")}
        props["meanprops"] = {"marker": "^", "markeredgecolor": colour, "markerfacecolor": "none"}
        drawn = axes.bxp(stats, xs, widths=0.32, showfliers=False, showmeans=True, manage_ticks=False, **props)
        drawn["boxes"][0].set_label("ours" if found is boxes else "paper")
    axes.set_xticks(range(len(boxes)), boxes)
    axes.grid(axis="x", visible=False)


def _box_stats(of: Mapping[str, float]) -> dict[str, float]:
    whiskers = {"whislo": of["whisker_low"], "whishi": of.get("whisker_high", of["q3"])}
    return whiskers | {"q1": of["q1"], "med": of["median"], "q3": of["q3"], "mean": of["mean"]}


def _paper_marks(axes: Any, xs: Sequence[float], ys: Sequence[float | None], label: str | None) -> None:
    known = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    look = {"linestyle": "none", "marker": "D", "color": "black", "markerfacecolor": "white"}
    axes.plot([x for x, _ in known], [y for _, y in known], label=label, zorder=4, **look)


def _error_bars(axes: Any, xs: Sequence[float], ys: Sequence[float], spread: Sequence[Point], colour: str) -> None:
    below = [max(0.0, y - low) for y, (low, _) in zip(ys, spread, strict=True)]
    above = [max(0.0, high - y) for y, (_, high) in zip(ys, spread, strict=True)]
    axes.errorbar(xs, ys, yerr=[below, above], fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, zorder=3)


def _of(looks: Sequence[Any], place: int) -> Any:
    return looks[place % len(looks)]
