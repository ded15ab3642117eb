"""What `mooncake-jax profile` shows: a table of the fits' errors, and a picture of measured against fitted."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mooncake_jax.commands.plots import NO_PICTURE, can_plot, pyplot
from mooncake_jax.commands.profile_points import LOAD, PREFILL, STEP, TRANSFER, Fit, Points, predictor
from mooncake_jax.sched.cost import CostModel

_WIDTH = 120  # where there is no terminal to ask
_NAMES = {
    PREFILL: "prefill by length and prefix",
    STEP: "decoding step by batch and context",
    LOAD: "loading KVCache by bytes",
    TRANSFER: "transfer by bytes and flows",
}


def print_fits(fits: Mapping[str, Fit]) -> None:
    """Errors are those of points that the fit has not seen."""
    table = Table(box=None, header_style="bold")
    table.add_column("fit", no_wrap=True)
    for column in ("points", "held out", "error P50", "P95", "worst"):
        table.add_column(column, justify="right")
    for part, name in _NAMES.items():
        if part in fits:
            fit = fits[part]
            errors = (f"{error:.1%}" for error in (fit.p50, fit.p95, fit.worst))
            table.add_row(name, str(fit.fitted), str(fit.held_out), *errors)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    console.print(table)


def draw(points: Points, cost: CostModel, file: Path) -> str:
    """Each part's points, measured across and fitted upwards; says where the picture is, or why not."""
    if not can_plot():
        return NO_PICTURE
    plot = pyplot()
    figure, axes = plot.subplots(1, len(_NAMES), figsize=(3.6 * len(_NAMES), 3.6), layout="constrained")
    for (part, name), panel in zip(_NAMES.items(), axes, strict=True):
        measured = [seconds for *_, seconds in points[part]]
        fitted = [predictor(cost, part)(*arguments) for *arguments, _ in points[part]]
        ends = [min(measured + fitted, default=1.0), max(measured + fitted, default=1.0)]
        panel.plot(ends, ends, color="lightgrey")
        panel.scatter(measured, fitted, s=12)
        panel.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="fitted, s")
        panel.xaxis.set_minor_formatter("")  # within a decade they would overlap
        panel.set_title(name, fontsize=9)
    figure.savefig(file, dpi=150)
    plot.close(figure)
    return f", measured against fitted in {file.name}"
