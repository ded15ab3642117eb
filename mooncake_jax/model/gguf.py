"""Weights, configuration and tokenizer data from a GGUF file of the llama architecture, in Hugging Face's terms.

GGUF stores query and key projections with the two halves of each head interleaved; they are put back here. Tensors
are read and dequantised one by one. The `gguf` package parses the file; it reports damage by whatever its parsing
stumbles over. Knows nothing of JAX.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig

_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFSource:
    """A WeightSource (sources.py) over one GGUF file. Raises UsageError unless it is whole and of a llama model."""

    def __init__(self, path: Path):
        self.origin = str(path)
        self.files = (path,)
        self._reader = _open(path)
        architecture = self._field("general.architecture")
        if architecture != "llama":
            raise UsageError(f"{path}: a GGUF of architecture {architecture!r}; only 'llama' models are served")
        self._tensors = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by its HF name; a tensor unknown to HF keeps its GGUF name."""
        return {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32, in HF orientation; the caller owns the memory."""
        tensor = self._tensors[name]
        try:
            data = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise UsageError(
                f"{self.origin}: {tensor.name} is quantised as {kind}, which the gguf package cannot read; "
                "use a file in Q8_0, Q4_K or F16"
            ) from None
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            config = self.config()
            data = _unpermute(data, config.num_heads if "q_proj" in name else config.num_kv_heads)
        return np.array(data, dtype=np.float32)  # a copy: float32 data would still lie in the mapped file

    def config(self) -> LlamaConfig:
        """The model's shape. Raises UsageError for a missing field or a RoPE variant that GGUF hides in tensors."""
        heads, width = self._size("attention.head_count"), self._size("embedding_length")
        head_dim = self._field("llama.attention.key_length", width // heads)
        rotated = self._field("llama.rope.dimension_count", head_dim)
        scaling = self._field("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors or rotated != head_dim:
            raise UsageError(
                f"{self.origin}: scaled or partial RoPE in a GGUF is not supported; use the HF safetensors"
            )
        config = LlamaConfig(
            vocab_size=int(self._tensor_shape("model.embed_tokens.weight")[0]),
            hidden_size=width,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_heads=heads,
            num_kv_heads=self._field("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            rope_theta=float(self._field("llama.rope.freq_base", 10000.0)),
            rope_scaling=None,
            rms_norm_eps=float(self._field("llama.attention.layer_norm_rms_epsilon", 1e-5)),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            max_context=self._size("context_length"),
        )
        config.refuse_odd_heads(self.origin)
        return config

    def tokenizer_metadata(self) -> Mapping[str, Any]:
        """The fields under `tokenizer.`, by their full names."""
        return {key: self._field(key) for key in self._reader.fields if key.startswith("tokenizer.")}

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _size(self, key: str) -> int:
        value = self._field(f"llama.{key}")
        if not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{self.origin}: llama.{key} is {value!r}; it must be a positive integer, fetch the file again"
            )
        return value

    def _tensor_shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise UsageError(f"{self.origin}: the tensor {name} is missing; fetch the file again")
        return self.shapes[name]


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise UsageError(f"{path}: no such GGUF file; check the path")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # a cut or foreign file makes the package fail in a dozen ways, none of them documented
        detail = str(error).partition("\n")[0]
        raise UsageError(f"{path}: not a whole GGUF file ({type(error).__name__}: {detail}); fetch it again") from None


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    return _ENDS.get(name, name)


def _unpermute(data: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads, D/2, 2] as llama.cpp keeps them -> rows [heads, 2, D/2] as HF does; data is [heads * D, E]."""
    return data.reshape(heads, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)
