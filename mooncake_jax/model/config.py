"""The shape of a LLaMA model, and nothing of its weights.

Read from a Hugging Face config.json here, from GGUF metadata in gguf.py. Knows nothing of JAX, so that a rank which
only schedules can read it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_jax.errors import UsageError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """LLaMA 3.1's stretching of the rotary frequencies beyond the context the model was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes in elements, max_context in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_context: int

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KVCache that one token occupies, all layers together; dtype as in DTYPE_BYTES."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def rope_frequencies(self) -> np.ndarray:
        """Radians that each pair of a head's dimensions turns by from one token to the next: float32 [D/2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies = np.float32(1.0) / np.power(np.float32(self.rope_theta), exponents)
        return frequencies if self.rope_scaling is None else _scale_frequencies(frequencies, self.rope_scaling)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], origin: str = "config.json") -> "LlamaConfig":
        """Reads the contents of an HF config.json; origin names the file in errors.

        Raises UsageError for another architecture, a variant of LLaMA that we do not compute, or a missing field.
        """
        _refuse_foreign(data, origin)
        heads = _size(data, "num_attention_heads", origin)
        theta, scaling = _rope(data, origin)
        config = cls(
            vocab_size=_size(data, "vocab_size", origin),
            hidden_size=_size(data, "hidden_size", origin),
            intermediate_size=_size(data, "intermediate_size", origin),
            num_layers=_size(data, "num_hidden_layers", origin),
            num_heads=heads,
            num_kv_heads=_size(data, "num_key_value_heads", origin, heads),
            head_dim=_size(data, "head_dim", origin, _size(data, "hidden_size", origin) // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
            max_context=_size(data, "max_position_embeddings", origin, 2048),
        )
        config.refuse_odd_heads(origin)
        return config

    def refuse_odd_heads(self, origin: str) -> None:
        """Raises UsageError unless the query heads share the KV heads evenly and a head has pairs of dimensions."""
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{origin}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "use a file whose query heads are a multiple of its KV heads"
            )
        if self.head_dim % 2:
            raise UsageError(f"{origin}: head_dim is {self.head_dim}, but RoPE turns pairs; use an even head_dim")


def _scale_frequencies(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """LLaMA 3.1: slow waves are stretched by the factor, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    waves = scaling.original_max_position_embeddings / wavelengths
    blend = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(blend, 0.0, 1.0)
    return ((1 - keep) * frequencies / scaling.factor + keep * frequencies).astype(np.float32)


def _refuse_foreign(data: Mapping[str, Any], origin: str) -> None:
    if data.get("model_type") != "llama":
        raise UsageError(f"{origin}: model_type is {data.get('model_type')!r}; only 'llama' models are served")
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if data.get(field, wanted) != wanted:
            raise UsageError(f"{origin}: {field} is {data[field]!r}; only LLaMA models with {wanted!r} are served")


def _size(data: Mapping[str, Any], field: str, origin: str, default: int | None = None) -> int:
    value = data.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{origin}: {field} is {value!r}; it must be a positive integer")
    return value


def _rope(data: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    new = data.get("rope_parameters") or {}
    rope = new or data.get("rope_scaling") or {}
    theta = new.get("rope_theta", data.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise UsageError(f"{origin}: RoPE scaling {kind!r} is not supported; use a model with 'default' or 'llama3'")
    try:
        scaling = RopeScaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise UsageError(f"{origin}: llama3 RoPE scaling lacks {missing}; take the model's original file") from None
    return float(theta), scaling
