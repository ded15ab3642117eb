"""The shape of a LLaMA model, and nothing of its weights.

Read from a Hugging Face config.json here, from GGUF metadata in gguf.py; those of well-known models are in
architectures.py. Knows nothing of JAX, so that a rank which only schedules can read it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.files import shown

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Far beyond any model, and small enough for 32-bit positions and for tables with a row for each layer.
_MOST, _MOST_LAYERS = 2**31 - 1, 10_000
_FLOAT32 = np.finfo(np.float32)


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
            rms_norm_eps=_number(data, "rms_norm_eps", origin, 1e-6),
            tie_word_embeddings=_flag(data, "tie_word_embeddings", origin, False),
            max_context=_size(data, "max_position_embeddings", origin, 2048),
        )
        config.refuse_odd_shapes(origin)
        return config

    def refuse_odd_shapes(self, origin: str) -> None:
        """Raises UsageError unless the query heads share the KV heads evenly, RoPE fits a head's dimensions and turns
        them, and sizes are such as a model can have.
        """
        _refuse_huge(self, origin)
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
        if isinstance(self.rope_scaling, RopeDivisors) and not all(map(_is_positive, self.rope_scaling.divisors)):
            raise UsageError(
                f"{origin}: RoPE divisors are {shown(self.rope_scaling.divisors)}; "
                "use a file in which all are finite and above 0"
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
        raise UsageError(f"{origin}: model_type is {shown(data.get('model_type'))}; only 'llama' models are served")
    for field, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if data.get(field, wanted) != wanted:
            raise UsageError(f"{origin}: {field} is {shown(data[field])}; only LLaMA models with {wanted!r} are served")
    if data.get("quantization_config") is not None:
        raise UsageError(
            f"{origin}: quantization_config is {shown(data['quantization_config'])}; "
            "use the model's unquantised weights, or a GGUF file"
        )


def _refuse_huge(config: LlamaConfig, origin: str) -> None:
    for field in fields(config):
        value, most = getattr(config, field.name), _MOST_LAYERS if field.name == "num_layers" else _MOST
        if isinstance(value, int) and value > most:
            raise UsageError(f"{origin}: {field.name} is {value}, and no model has over {most}; fetch the model again")


def _size(data: Mapping[str, Any], field: str, origin: str, default: int | None = None) -> int:
    value = data.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise UsageError(
            f"{origin}: {field} is {shown(value)}; it must be a whole number from 1 to {_MOST}, fetch the model again"
        )
    return value


def _number(data: Mapping[str, Any], field: str, origin: str, default: float | None = None) -> float:
    value = data.get(field, default)
    if not _is_positive(value):
        raise UsageError(
            f"{origin}: {field} is {shown(value)}; it must be a finite number above 0, fetch the model again"
        )
    return float(value)


def _is_positive(value: Any) -> bool:
    """Whether value is a number that is finite and above 0 in float32 too, in which we compute."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return float(_FLOAT32.tiny) <= value <= float(_FLOAT32.max)


def _flag(data: Mapping[str, Any], field: str, origin: str, default: bool) -> bool:
    value = data.get(field, default)
    if not isinstance(value, bool):
        raise UsageError(f"{origin}: {field} is {shown(value)}; it must be true or false, fetch the model again")
    return value


def _object(data: Mapping[str, Any], field: str, origin: str) -> Mapping[str, Any]:
    """A field that holds an object, empty where it is null or missing."""
    value = data.get(field)
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{origin}: {field} is {shown(value)}; it must be an object, fetch the model again")
    return value or {}


def _rope(data: Mapping[str, Any], origin: str) -> tuple[float, RopeScaling | RopeDivisors | None]:
    """Theta and scaling from rope_parameters (transformers 5) or rope_theta and rope_scaling (before)."""
    new = _object(data, "rope_parameters", origin)
    rope = new or _object(data, "rope_scaling", origin)
    for where in (data, rope):
        if where.get("partial_rotary_factor") not in (None, 1):
            raise UsageError(
                f"{origin}: partial_rotary_factor is {shown(where['partial_rotary_factor'])}; "
                "use a model whose RoPE turns whole heads"
            )
    theta = _number(new if "rope_theta" in new else data, "rope_theta", origin, 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, _llama3_scaling(rope, origin)
    if kind == "divisors":
        return theta, _divisors(rope, origin)
    raise UsageError(f"{origin}: RoPE scaling {shown(kind)} is not supported; use a model with 'default' or 'llama3'")


def _llama3_scaling(rope: Mapping[str, Any], origin: str) -> RopeScaling:
    for field in fields(RopeScaling):
        if field.name not in rope:
            raise UsageError(f"{origin}: llama3 RoPE scaling lacks {field.name!r}; take the model's original file")
    scaling = RopeScaling(
        factor=_number(rope, "factor", origin),
        low_freq_factor=_number(rope, "low_freq_factor", origin),
        high_freq_factor=_number(rope, "high_freq_factor", origin),
        original_max_position_embeddings=_size(rope, "original_max_position_embeddings", origin),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UsageError(
            f"{origin}: low_freq_factor is {scaling.low_freq_factor}, not below high_freq_factor, which is "
            f"{scaling.high_freq_factor}; take the model's original file"
        )
    return scaling


def _divisors(rope: Mapping[str, Any], origin: str) -> RopeDivisors:
    divisors = rope.get("divisors")
    if not isinstance(divisors, list | tuple) or not all(map(_is_positive, divisors)):
        raise UsageError(
            f"{origin}: divisors is {shown(divisors)}; it must be a list of numbers above 0, convert the model again"
        )
    return RopeDivisors(tuple(map(float, divisors)))


def _rope_to_hf(scaling: RopeScaling | RopeDivisors | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    # HF has no name for bare divisors: "divisors" is ours, for checkpoints made from a GGUF.
    kind = "divisors" if isinstance(scaling, RopeDivisors) else "llama3"
    return {"rope_type": kind, **asdict(scaling)}
