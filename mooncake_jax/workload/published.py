"""What the report publishes of its trace (arXiv 2407.00079, section 4), as read from the paths of its vector figures;
and FAST25 of its tool&agent trace.

The published figures do not agree with one another in full: the middles of figure 5's bins have means of 8,433 and 188
tokens, not 7,590 and 182, and figure 6's blocks are hit more often than table 1's share of hits allows.
"""

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins of equal width; tokens."""

    first: float
    width: float
    counts: tuple[int, ...]

    def cdf(self) -> list[tuple[float, float]]:
        """(upper edge of a bin, share of values below it), for each bin."""
        total = sum(self.counts)
        upper = accumulate(self.counts)
        return [(self.first + self.width * (place + 1), count / total) for place, count in enumerate(upper)]


REQUESTS = 23_608
DURATION_S = 3600
MEAN_INPUT = 7590  # tokens
MEAN_OUTPUT = 182

INPUT_LENGTHS = Histogram(  # figure 5
    890.0,
    3116.4,
    (6823, 9686, 2970, 924, 783, 570, 358, 293, 246, 198, 140, 62, 79, 57, 39, 37, 38, 29, 26, 27)
    + (22, 28, 14, 25, 9, 11, 12, 11, 3, 13, 11, 15, 2, 0, 5, 8, 8, 13, 6, 7),
)
OUTPUT_LENGTHS = Histogram(  # figure 5
    1.0,
    49.975,
    (13350, 616, 541, 522, 688, 835, 1050, 1230, 1245, 1055, 786, 518, 340, 239, 144, 88, 82, 44, 41, 33)
    + (23, 13, 11, 11, 10, 12, 6, 4, 3, 3, 3, 3, 1, 1, 0, 2, 1, 2, 4, 48),
)
# Figure 6: share of blocks with at most so many hits. A block's first use counts as one there.
BLOCK_USES = {
    1: 0.55398, 2: 0.767772, 3: 0.86503, 4: 0.912125, 5: 0.943496, 6: 0.95463, 7: 0.962441, 8: 0.965484, 9: 0.976491,
    10: 0.97786, 11: 0.979179, 12: 0.982247, 13: 0.983921, 14: 0.986559, 15: 0.98945, 16: 0.994649, 17: 0.995638,
    18: 0.996982, 20: 0.997464, 24: 0.997971, 26: 0.999163, 42: 0.999518,
}  # fmt: skip
HOTTEST_BLOCKS = (10_937, 9_202)  # uses
TABLE_1_LRU = {1_000: 0.30, 10_000: 0.40, 30_000: 0.48, 50_000: 0.50, 100_000: 0.51, None: 0.51}  # blocks -> hit rate

# FAST25 figure 9: capacity in tokens -> hit rate on the tool&agent trace.
TOOL_AGENT_HIT_RATES = {
    100_000: 0.362658, 1_000_000: 0.386447, 2_000_000: 0.413545, 4_000_000: 0.48385, 5_000_000: 0.505416,
    8_000_000: 0.544329, 10_000_000: 0.560757, 50_000_000: 0.594788, 100_000_000: 0.594976,
}  # fmt: skip
