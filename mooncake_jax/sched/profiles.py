"""Cost models by name: a 70B LLaMA on one node of eight A800, as the paper's own figures have it.

Why several: the paper's figures do not agree on decoding. Its micro-benchmarks (report figure 2, FAST25 figure 14) say
that a request more in the batch adds about 0.14 ms to a step, beside its context; the end-to-end runs of FAST25
(figures 1, 7, 15) need 3.6 ms, those of the report (figures 11, 12) at most 1 ms. Nobody outside knows why, and no
single calibration fits all, so every result that depends on it must say which one it used:

- `micro`: what the micro-benchmarks measured. The honest choice where no figure is to be reproduced.
- `arxiv`: 0.6 ms a request, for the report's figures 8, 11 and 12; chosen on the TBT of its figure 11. Its overload
  experiments (figures 9 and 10, table 3) show their effects with `fast25` only, since with `arxiv` decoding never
  binds there, and figure 13 comes nearer with `fast25`.
- `fast25`: 3.6 ms a request, for FAST25's end-to-end runs of Mooncake; chosen on its figure 1, a check on 7 and 15.
- `vllm`: the coupled baseline in FAST25's runs (vLLM 0.5.1): 5 ms a request, chosen on its figure 1 (4.5 to 5 fit), and
  a prefix cache that lies on the device, so that reuse loads nothing.
- `vllm-chunked`: the same with chunked prefill, whose 60 ms a chunk of 2,048 tokens only show as a sum (15 ms of 512
  would be the same): a cost per token here, as figure 8 determines no more.
- `vllm051`, `vllm051-chunked`: the same at 4.75 ms, the middle of 4.5 to 5, which one for all modes of that vLLM takes:
  in figure 1 plain ones fit 4.6 to 5, those with chunks (of 1,792 tokens) 4.5 to 4.75.

In all of them a request alone at 8k takes 26.5 ms a step. Prefill, transfer and load are fitted by least squares on
relative errors to FAST25 figure 14; the SSD's rates are an assumption, since the paper gives none.
"""

from dataclasses import replace

from mooncake_jax.errors import UsageError
from mooncake_jax.model.architectures import ARCHITECTURES
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.sched.cost import PolynomialCost
from mooncake_jax.sched.roofline import Efficiency, RooflineCost

# The models that the paper ran, and one more of their shape.
PROFILED_MODELS = ("llama2-70b", "llama3-70b", "llama3.1-70b")
# Conductor's decision, which a simulation adds to each TTFT: 38 to 53 ms in FAST25 figure 14, whatever the length.
SCHEDULE_S = 0.05

_K = 1024  # "8k" in figure 14 must be 8,192 tokens: so the mean prompt's prefill is figure 8's
_ALONE_S, _ALONE_CONTEXT = 0.0265, 8192
_CONTEXT_S = 3.466e-8  # of a token of context: figure 14's steps at 8k to 128k, 26.5 to 30.8 ms
_REUSE_S = 0.0667

# Between and within the paper's nodes: 87.5 GB/s over the network, which transfers share; 102 GB/s from DRAM to the
# devices (128 are possible: FAST25 table 1); a drive of PCIe 4.0 x4 as SSD.
_NODE = {
    "transfer_coefficients": (0.0, 1 / 87.5e9),
    "flow_coefficients": (0.0, 1 / 87.5e9),
    "load_coefficients": (0.00277, 1 / 102.2e9),
    "ssd_read_coefficients": (1e-4, 1 / 6.8e9),
    "ssd_write_coefficients": (1e-4, 1 / 4.0e9),
}


def _decoding(request_s: float) -> tuple[float, float, float]:
    """Such that a request alone takes the same, whatever the cost of one more."""
    return _ALONE_S - request_s - _CONTEXT_S * _ALONE_CONTEXT, request_s, _CONTEXT_S


_MICRO = PolynomialCost(
    prefill_coefficients=(0.0, 0.1174 / _K, 2 * 7.54e-4 / _K**2),
    prefix_coefficients=(_REUSE_S, 2.536e-3 / _K),
    step_coefficients=_decoding(0.14e-3),
    **_NODE,
)
_VLLM = replace(_MICRO, step_coefficients=_decoding(5e-3), prefix_coefficients=(0.0, 0.0))
_VLLM_CHUNK_S = 0.060 / 2048  # of a token
_CHUNKED = replace(_VLLM, prefill_coefficients=(0.0, 0.1174 / _K + _VLLM_CHUNK_S, 2 * 7.54e-4 / _K**2))
_VLLM051_STEP = _decoding(4.75e-3)

PROFILES = {
    "micro": _MICRO,
    "arxiv": replace(_MICRO, step_coefficients=_decoding(0.6e-3)),
    "fast25": replace(_MICRO, step_coefficients=_decoding(3.6e-3)),
    "vllm": _VLLM,
    "vllm-chunked": _CHUNKED,
    "vllm051": replace(_VLLM, step_coefficients=_VLLM051_STEP),
    "vllm051-chunked": replace(_CHUNKED, step_coefficients=_VLLM051_STEP),
}

# What makes the roofline of LLaMA2-70B on eight A800 equal to `micro`. Figure 14 determines the sum of products and
# all-reduces, not how they share it: 0.8 of NVLink is what all-reduces of large arrays reach.
A800_EFFICIENCY = Efficiency(
    products=0.638, attention=0.730, memory=0.580, links=0.8, step_s=0.01156, request_s=0.111e-3
)


def profile(name: str) -> PolynomialCost:
    """The cost model of this name. Raises UsageError if there is none."""
    if name not in PROFILES:
        raise UsageError(f"cost profile {name!r} is not known; use one of {', '.join(PROFILES)}")
    return PROFILES[name]


def roofline(model: LlamaConfig, accelerator: str, tp: int) -> RooflineCost:
    """A model on tp accelerators of a node, as near to their limits as the paper's engine is, with its node's network,
    DRAM and SSD. Raises UsageError for an unknown accelerator and for too few of them.
    """
    return RooflineCost(
        model=model,
        accelerator=accelerator,
        tp=tp,
        efficiency=A800_EFFICIENCY,
        reuse_coefficients=(_REUSE_S, 1 / 132.3e9),
        **_NODE,
    )


A800_LLAMA2_70B = roofline(ARCHITECTURES["llama2-70b"], "a800", 8)
# What a node of PROFILES could compute at most, for MFU.
NODE_PEAK_FLOPS = A800_LLAMA2_70B.peak_flops
