"""The pictures of a figure: PNG and SVG with what made them in their metadata, where matplotlib is installed."""

from collections.abc import Callable, Mapping
from pathlib import Path

from style import STYLE

from mooncake_jax.commands.plots import NO_PICTURE, can_plot, pyplot

_DPI = 150


def save_pictures(
    out: Path,
    name: str,
    draw: Callable[..., None],
    panels: tuple[int, int],
    size: tuple[float, float],
    metadata: Mapping[str, str],
) -> str:
    """<name>.png and <name>.svg in `out`; says where they are, or why not. Those of an earlier run go in any case."""
    files = {kind: out / f"{name}.{kind}" for kind in ("png", "svg")}
    for file in files.values():
        file.unlink(missing_ok=True)
    if not can_plot():
        return NO_PICTURE
    plot = pyplot()
    with plot.rc_context(STYLE | {"svg.hashsalt": name}):
        figure, axes = plot.subplots(*panels, figsize=size, squeeze=False, layout="constrained")
        draw(*axes.flat)
        figure.savefig(files["png"], dpi=_DPI, metadata=dict(metadata))
        figure.savefig(files["svg"], metadata={**metadata, "Date": None})
        plot.close(figure)
    return f", pictures in {files['png'].name} and {files['svg'].name}"
