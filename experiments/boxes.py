"""Boxes and whiskers of many values, as matplotlib draws them and style.box() takes them."""

from collections.abc import Iterable

from mooncake_jax.metrics import mean, percentile

Box = dict[str, float]


def box_of(values: Iterable[float]) -> Box:
    """Quartiles and mean, in the values' unit; whiskers end at the last values within 1.5 times the box beyond it.

    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there is no value to make a box of")
    q1, median, q3 = (percentile(ordered, q) for q in (25, 50, 75))
    reach = 1.5 * (q3 - q1)
    within = [value for value in ordered if q1 - reach <= value <= q3 + reach]
    whiskers = {"whisker_low": within[0], "whisker_high": within[-1]}
    return whiskers | {"q1": q1, "median": median, "q3": q3, "mean": mean(ordered)}
