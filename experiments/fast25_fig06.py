"""FAST25 figure 6: figure 1 on the tool&agent trace, of a long system prompt that many requests share.

    python experiments/fast25_fig06.py --traces=DIR [--seeds=0,1,2,3]        # 2.5 minutes

Claim: Mooncake (8P+8D) serves 22 to 64 % more requests within 100 to 300 ms than the best vLLM on 16 nodes, which is
that with prefix caching here. Without the released trace in DIR, surrogates of four seeds stand in for it: the same
mean lengths and reuse, arrivals at a steady rate. So nothing is expected: bursts, which make long gaps, are missing.
That prefix caching beats plain vLLM comes out; its host's time, a cause of what is missing on figure 1, leads away from
the paper's shares here. With `micro` only the first seed is served.
"""

from capacity import make
from capacity_headlines import Figure
from figure import define_flags, parse, run_script
from systems import PREFIX

FIGURE = Figure(
    workload="toolagent",
    series="tool&agent",
    claim="Mooncake serves 22 to 64 % more of tool&agent's requests within 100 to 300 ms a token than the best vLLM.",
    over=PREFIX,
    varies=(),  # they are varied on figures 1 and 7
)

FLAGS = define_flags("fast25_fig06", traces=True, seeds=4)


def main(arguments: list[str]) -> int:
    parse(FLAGS, arguments)
    return make(FLAGS, FIGURE)


if __name__ == "__main__":
    run_script(main)
