"""One page of all figures that a folder holds, and the fidelity table as JSON.

The page needs nothing beside itself: pictures are inlined. On top how many numbers each figure has met, then the
fidelity table, a row for each headline number, then each figure with its claim, command, picture, numbers,
sensitivities and what one learns.
"""

import base64
import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from figure import digits, shown

from mooncake_jax.workload.files import write_whole

FIELDS = ("name", "where", "paper", "ours", "ratio", "tolerance", "ok", "kind", "profile", "trace", "note")
_COLUMNS = ("where", "what", "paper", "ours", "ratio", "tolerance", "verdict", "kind", "profile", "trace", "why")
_VERDICTS = {True: ("met", "✓ met"), False: ("miss", "✗ MISS"), None: ("none", "– no target")}
_MOST_SVG = 150_000  # bytes; a PNG is smaller than a larger one
_MOST_ROWS = 60  # of a figure's numbers, on the page
_STYLE = Path(__file__).with_name("page.css")


def write_page(out: Path, failed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """index.html and fidelity.json in `out`, of the results in its folders; failed: figures to be named as such.
    Returns the rows of the fidelity table. Raises UsageError where it cannot write.
    """
    figures = read_figures(out)
    rows = [{field: row[field] for field in FIELDS} for figure in figures for row in figure["headlines"]]
    write_whole(out / "fidelity.json", [json.dumps(rows, indent=1) + "\n"])
    write_whole(out / "index.html", _page(out, figures, rows, failed))
    return rows


def read_figures(out: Path) -> list[dict[str, Any]]:
    """What the figures have published, in order of their names, numbers in names by their value."""
    files = (file for file in out.glob("*/*.json") if file.stem == file.parent.name)
    figures = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return sorted((figure for figure in figures if "headlines" in figure), key=lambda figure: _order(figure["name"]))


def title(name: str) -> str:
    """As people say it: fast25_fig14 is FAST25 figure 14."""
    found = re.fullmatch(r"(arxiv|fast25)_(fig|table)0*(\d+)(_real)?", name)
    if found is None:
        return name.replace("_", " ")
    paper = {"arxiv": "Report", "fast25": "FAST25"}[found[1]]
    what = {"fig": "figure", "table": "table"}[found[2]]
    return f"{paper} {what} {found[3]}{', on this machine' if found[4] else ''}"


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _page(
    out: Path, figures: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], failed: Sequence[str]
) -> Iterable[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>mooncake_jax: the paper's figures</title>\n<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    yield "</head><body>\n<h1>Mooncake's figures, by mooncake_jax</h1>\n"
    yield f"<p>{_counts(rows)}</p>\n"
    if failed:
        yield f'<p class="miss">Failed, and not below: {escape(", ".join(failed))}.</p>\n'
    if any(figure["quick"] for figure in figures):
        yield '<p class="miss">Some were run with --quick: of them no verdict is claimed.</p>\n'
    yield _overview(figures)
    yield '<h2 id="fidelity">Fidelity</h2>\n' + _fidelity(rows)
    for figure in figures:
        yield from _figure(out / figure["name"], figure)
    yield "</body></html>\n"


def _overview(figures: Sequence[Mapping[str, Any]]) -> str:
    """A row for each figure, with a column for each verdict."""
    verdicts = [[row["ok"] for row in figure["headlines"]] for figure in figures]
    cells = [
        [_link(figure["name"]), *(str(of.count(ok)) for ok in _VERDICTS), _prose(figure["claim"])]
        for figure, of in zip(figures, verdicts, strict=True)
    ]
    columns = ("where", *(text for _, text in _VERDICTS.values()), "claim")
    return _table(columns, cells, [False if False in of else None for of in verdicts])


def _link(name: str) -> str:
    return f'<a href="#{escape(name)}">{escape(title(name))}</a>'


def _counts(rows: Sequence[Mapping[str, Any]]) -> str:
    met, missed, none = (sum(row["ok"] is ok for row in rows) for ok in (True, False, None))
    compared = [row["kind"] for row in rows if row["paper"] is not None]
    return (
        f"{len(rows)} headline numbers: {met} within their tolerance, {missed} not, {none} without a target. The paper "
        f"has {len(compared)} of them: {compared.count('fitted')} rest on a constant or a choice that was made on the "
        f"very figure (fitted), {compared.count('predicted')} on none (predicted)."
    )


def _fidelity(rows: Sequence[Mapping[str, Any]], where: bool = True) -> str:
    columns = _COLUMNS if where else _COLUMNS[1:]
    return _table(columns, [_fidelity_row(row)[0 if where else 1 :] for row in rows], [row["ok"] for row in rows])


def _fidelity_row(row: Mapping[str, Any]) -> list[str]:
    figures = [_prose(row["name"]), *(escape(shown(row[field])) for field in ("paper", "ours", "ratio"))]
    verdict = f'<span class="{_VERDICTS[row["ok"]][0]}">{_VERDICTS[row["ok"]][1]}</span>'
    rest = [_prose(row[field]) for field in ("kind", "profile", "trace", "note")]
    return [_link(row["where"]), *figures, escape(row["tolerance"]), verdict, *rest]


def _figure(folder: Path, figure: Mapping[str, Any]) -> Iterable[str]:
    name = figure["name"]
    yield f'<section id="{escape(name)}"><h2>{escape(title(name))}</h2>\n<p>{_prose(figure["claim"])}</p>\n'
    yield f"<p><code>{escape(figure['command'])}</code>{_seeds(figure['seeds'])}</p>\n"
    yield _picture(folder, name)
    yield _fidelity(figure["headlines"], where=False)
    if figure["sensitivities"]:
        yield "<h3>How far assumptions move it</h3>\n" + _sensitivities(figure["sensitivities"])
    if figure["lessons"]:
        yield "<ul>" + "".join(f"<li>{_prose(lesson)}</li>" for lesson in figure["lessons"]) + "</ul>\n"
    yield _numbers(folder / f"{name}.csv") + "</section>\n"


def _seeds(seeds: Sequence[int]) -> str:
    return f", seeds {escape(', '.join(map(str, seeds)))}" if seeds else ""


def _picture(folder: Path, name: str) -> str:
    """The SVG, or the PNG where that is smaller or alone."""
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    if svg.is_file() and svg.stat().st_size <= _MOST_SVG:
        file, kind = svg, "image/svg+xml"
    elif png.is_file():
        file, kind = png, "image/png"
    else:
        return "<p>No picture: matplotlib was not installed.</p>\n"
    data = base64.b64encode(file.read_bytes()).decode()
    return f'<img alt="{escape(title(name))}: ours and the paper\'s points" src="data:{kind};base64,{data}">\n'


def _sensitivities(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [_prose(one["assumption"]), _prose(one["headline"]), escape(f"{shown(value)} → {shown(result)}")]
        for one in found
        for value, result in zip(one["values"], one["results"], strict=True)
    ]
    return _table(("assumption", "what it moves", "value → result"), rows)


def _numbers(file: Path) -> str:
    with file.open(newline="", encoding="utf-8") as lines:
        names, *rows = list(csv.reader(lines)) or [[]]
    cells = [[escape(_short(cell)) for cell in row] for row in rows[:_MOST_ROWS]]
    left_out = f", of which the first {_MOST_ROWS} are here" if len(rows) > _MOST_ROWS else ""
    summary = f"<summary>Numbers: {len(rows)} rows in {escape(file.name)}{left_out}</summary>"
    return f"<details>{summary}{_table(names, cells)}</details>\n"


def _prose(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _short(cell: str) -> str:
    """Five digits of a fraction are enough to look at."""
    try:
        return digits(float(cell), 5) if "." in cell or "e" in cell else cell
    except ValueError:
        return cell


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], verdicts: Sequence[bool | None] = ()) -> str:
    """Cells are HTML. Each knows its column's name: on a narrow screen a row is a card."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = []
    for place, row in enumerate(rows):
        kind = f' class="{_VERDICTS[verdicts[place]][0]}"' if verdicts else ""
        cells = (f'<td data-name="{escape(name)}">{cell}</td>' for name, cell in zip(columns, row, strict=True))
        body.append(f"<tr{kind}>{''.join(cells)}</tr>\n")
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(body)}</tbody></table>\n"
