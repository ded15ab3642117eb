"""What accelerators can do at most, as their makers publish it: the roofs of roofline.py.

Dense bfloat16, figures of one device. Knows nothing of models, and of how near to these figures an engine comes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """link_bytes_per_s: what a device sends to the others of its node (NVLink) or slice (ICI), in one direction."""

    flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


ACCELERATORS = {
    "a800": Accelerator(312e12, 80e9, 2.039e12, 200e9),
    "a100": Accelerator(312e12, 80e9, 2.039e12, 300e9),
    "h800": Accelerator(989e12, 80e9, 3.35e12, 200e9),
    "h100": Accelerator(989e12, 80e9, 3.35e12, 450e9),
    "h200": Accelerator(989e12, 141e9, 4.8e12, 450e9),
    "tpu-v5e": Accelerator(197e12, 16e9, 819e9, 200e9),
    "tpu-v5p": Accelerator(459e12, 95e9, 2.765e12, 600e9),
}

_A100 = "NVIDIA A100 datasheet, 80GB SXM"
_A800 = "A100 80GB SXM but for NVLink: FAST25 5.1 names 8 x A800-SXM4-80GB"
_H100 = "NVIDIA H100 datasheet, SXM; without sparsity half of what it prints"
_H800 = "H100 SXM but for NVLink and FP64"
_H200 = "NVIDIA H200 datasheet, SXM; without sparsity half of what it prints"
_V5E = "https://cloud.google.com/tpu/docs/v5e, key chip specifications"
_V5P = "https://cloud.google.com/tpu/docs/v5p, key chip specifications"

# Accelerator -> where each of its figures is from.
SOURCES = {
    "a800": {
        "flops": _A800,
        "memory_bytes": _A800,
        "memory_bytes_per_s": _A800,
        "link_bytes_per_s": "NVLink cut to 400 GB/s in both directions (NVIDIA, November 2022)",
    },
    "a100": {
        "flops": f"{_A100}: 312 TFLOPS",
        "memory_bytes": f"{_A100}: 80 GB",
        "memory_bytes_per_s": f"{_A100}: 2,039 GB/s",
        "link_bytes_per_s": f"{_A100}: 600 GB/s in both directions",
    },
    "h800": {
        "flops": _H800,
        "memory_bytes": _H800,
        "memory_bytes_per_s": _H800,
        "link_bytes_per_s": "NVLink cut to 400 GB/s in both directions",
    },
    "h100": {
        "flops": f"{_H100}: 1,979 TFLOPS",
        "memory_bytes": f"{_H100}: 80 GB",
        "memory_bytes_per_s": f"{_H100}: 3.35 TB/s",
        "link_bytes_per_s": f"{_H100}: 900 GB/s in both directions",
    },
    "h200": {
        "flops": f"{_H200}: 1,979 TFLOPS",
        "memory_bytes": f"{_H200}: 141 GB",
        "memory_bytes_per_s": f"{_H200}: 4.8 TB/s",
        "link_bytes_per_s": f"{_H200}: 900 GB/s in both directions",
    },
    "tpu-v5e": {
        "flops": f"{_V5E}: 197 TFLOPs",
        "memory_bytes": f"{_V5E}: 16 GB",
        "memory_bytes_per_s": f"{_V5E}: 819 GBps",
        "link_bytes_per_s": f"{_V5E}: 400 GBps in both directions",
    },
    "tpu-v5p": {
        "flops": f"{_V5P}: 459 TFLOPs",
        "memory_bytes": f"{_V5P}: 95 GB",
        "memory_bytes_per_s": f"{_V5P}: 2,765 GBps",
        "link_bytes_per_s": f"{_V5P}: 4,800 Gbps",
    },
}
