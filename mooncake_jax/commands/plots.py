"""Pictures: matplotlib where it is installed (extra `plots`), and what is said where it is not."""

import importlib.util
from types import ModuleType

INSTALL = "matplotlib is not installed (pip install 'mooncake-jax[plots]')"
NO_PICTURE = f"; no picture, since {INSTALL}"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def picture_formats() -> list[str]:
    """What names of pictures may end with, without the dot. Imported late: it takes its time."""
    from matplotlib.backend_bases import FigureCanvasBase

    return sorted(FigureCanvasBase.get_supported_filetypes())


def pyplot() -> ModuleType:
    """matplotlib's, for files alone: no screen is needed. Imported late: it takes its time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
