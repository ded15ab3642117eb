"""The picture of FAST25 figures 1, 6 and 7: capacity by TBT limit, with the named profiles and with `micro`."""

from collections.abc import Mapping, Sequence
from typing import Any

from capacity_measures import GRID_MS, LIMITS_MS, Measured
from reference import points as papers
from style import cdf, line
from systems import MICRO, NAMED

from mooncake_jax.metrics import mean

_TITLES = {NAMED: "profiles fast25, vllm051, vllm051-chunked", MICRO: "profile micro"}


def draw(panels: Sequence[Any], found: Mapping[tuple[str, str], Sequence[Measured]], file: str) -> None:
    """A panel for each calibration. file: of the paper's curves."""
    theirs = papers(file)
    for axes, calibration in zip(panels, _TITLES, strict=True):
        systems = [system for of, system in found if of == calibration]
        for place, system in enumerate(systems):
            of = found[calibration, system]
            shares = {limit: [one.within(limit) for one in of] for limit in GRID_MS}
            line(axes, [(ms, mean(some)) for ms, some in shares.items()], system, place, markers=False)
            if len(of) > 1:
                _spread(axes, {limit: shares[limit] for limit in LIMITS_MS}, place)
            if system in theirs:
                cdf(axes, theirs[system], f"{system}, FAST25", place, paper=True)
        for limit in LIMITS_MS:
            axes.axvline(limit, color="black", linewidth=0.4)
        axes.set_xscale("log")
        axes.set(xlim=(20, 2000), ylim=(0, 102), xlabel="TBT limit, ms", title=_TITLES[calibration])
        axes.set_ylabel("requests within it and a TTFT of 30 s, %")
    panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=6)


def _spread(axes: Any, shares: Mapping[int, Sequence[float]], place: int) -> None:
    """Of the seeds, at the limits."""
    for limit, some in shares.items():
        line(axes, [(limit, mean(some))], "_", place, spread=[(min(some), max(some))], markers=False)
