"""The shape of a LLaMA model, and nothing of its weights.

Read from a Hugging Face config.json here, from GGUF metadata in gguf.py; those of well-known models are in
architectures.py. Knows nothing of JAX, so that a rank which only schedules can read it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mooncake_jax.errors import UsageError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_LLAMA3_FIELDS = {
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": int,
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """LLaMA 3.1's stretching of the rotary frequencies beyond the context the model was first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeDivisors:
    """What each rotary frequency is divided by, as a GGUF carries it: D/2 numbers, 1 where a frequency is kept."""

    divisors: tuple[float, ...]


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
    rope_scaling: RopeScaling | RopeDivisors | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_context: int

    @property
    def parameters(self) -> int:
        """How many weights the model has; a tied head counts once."""
        width, query, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = 2 * width * (query + keys) + 3 * width * self.intermediate_size + 2 * width
        ends = (1 if self.tie_word_embeddings else 2) * self.vocab_size * width + width
        return ends + self.num_layers * layer

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of KVCache that one token occupies, all layers together; dtype as in DTYPE_BYTES."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def rope_frequencies(self) -> np.ndarray:
        """Radians that each pair of a head's dimensions turns by from one token to the next: float32 [D/2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies = np.float32(1.0) / np.power(np.float32(self.rope_theta), exponents)
        match self.rope_scaling:
            case None:
                return frequencies
            case RopeDivisors(divisors):
                return frequencies / np.asarray(divisors, np.float32)
            case scaling:
                return _scale_frequencies(frequencies, scaling)

    def to_hf(self) -> dict[str, Any]:
        """The contents of an HF config.json that from_hf reads back as this very config."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rope_scaling": _rope_to_hf(self.rope_scaling),
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_context,
        }

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
        config.refuse_odd_shapes(origin)
        return config

    def refuse_odd_shapes(self, origin: str) -> None:
        """Raises UsageError unless the query heads share the KV heads evenly and RoPE fits a head's dimensions."""
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{origin}: {self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly; "
                "use a file whose query heads are a multiple of its KV heads"
            )
        if self.head_dim % 2:
            raise UsageError(f"{origin}: head_dim is {self.head_dim}, but RoPE turns pairs; use an even head_dim")
        if isinstance(self.rope_scaling, RopeDivisors) and len(self.rope_scaling.divisors) != self.head_dim // 2:
            raise UsageError(
                f"{origin}: {len(self.rope_scaling.divisors)} RoPE divisors for a head_dim of {self.head_dim}; "
                "use a file with one for each pair of dimensions"
            )


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


def _rope(data: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | RopeDivisors | None]:
    """Theta and scaling from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    new = data.get("rope_parameters") or {}
    rope = new or data.get("rope_scaling") or {}
    theta = float(new.get("rope_theta", data.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind == "default":
            return theta, None
        if kind == "llama3":
            return theta, RopeScaling(**{name: as_type(rope[name]) for name, as_type in _LLAMA3_FIELDS.items()})
        if kind == "divisors":
            return theta, RopeDivisors(tuple(map(float, rope["divisors"])))
    except KeyError as missing:
        raise UsageError(f"{origin}: {kind} RoPE scaling lacks {missing}; take the model's original file") from None
    raise UsageError(f"{origin}: RoPE scaling {kind!r} is not supported; use a model with 'default' or 'llama3'")


def _rope_to_hf(scaling: RopeScaling | RopeDivisors | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    # HF has no name for bare divisors: "divisors" is ours, for checkpoints made from a GGUF.
    kind = "divisors" if isinstance(scaling, RopeDivisors) else "llama3"
    return {"rope_type": kind, **asdict(scaling)}
