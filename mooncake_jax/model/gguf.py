"""Weights, configuration and tokenizer data from a GGUF file of the llama architecture, in Hugging Face's terms.

GGUF stores query and key projections with the two halves of each head interleaved; they are put back here. Of a tensor
only the rows and blocks asked for are read and dequantised, by the `gguf` package. Knows nothing of JAX.
"""

import math
import re
from pathlib import Path

import gguf
import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig, RopeDivisors
from mooncake_jax.model.files import Index, files_digest
from mooncake_jax.model.gguf_header import GGUFHeader, TensorInfo, read_header
from mooncake_jax.model.tokenizer import Tokenizer

_ROPE_DIVISORS = "rope_freqs.weight"
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
        self._path = path
        header = _open(path)
        self._fields = header.fields
        architecture = self._fields.get("general.architecture")
        if architecture != "llama":
            raise UsageError(f"{path}: a GGUF of architecture {architecture!r}; only 'llama' models are served")
        self._tensors = {_hf_name(name): info for name, info in header.tensors.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each weight by its HF name; a tensor unknown to HF keeps its GGUF name."""
        return {name: info.shape for name, info in self._tensors.items() if name != _ROPE_DIVISORS}

    def read(self, name: str, index: Index) -> np.ndarray:
        """A tensor's slice, dequantised to float32, in HF orientation; the caller owns the memory."""
        info = self._tensors[name]
        rows = np.arange(info.rows)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = _unpermuted(rows, self._heads() if "q_proj" in name else self._kv_heads())
        if len(info.shape) == 1:
            return self._read_rows(name, info, rows, index[0])[0]
        return self._read_rows(name, info, rows[index[0]], index[1])

    def _read_rows(self, name: str, info: TensorInfo, rows: np.ndarray, columns: slice) -> np.ndarray:
        """float32 [rows, columns]: whole blocks around the columns are dequantised, then cut to them."""
        block, block_bytes = gguf.GGML_QUANT_SIZES[info.kind]
        first, last, _ = columns.indices(info.shape[-1])
        start, end = first // block, -(-last // block)
        # Mapped anew for every tensor, so that the file's pages do not stay in this process.
        stored = np.memmap(self._path, np.uint8, "r", info.offset, (info.rows, info.row_bytes))
        chosen = stored[rows, start * block_bytes : end * block_bytes]
        try:
            data = gguf.dequantize(chosen, info.kind)
        except NotImplementedError:
            raise UsageError(
                f"{self.origin}: {name} is quantised as {info.kind.name}, which the gguf package cannot read; "
                "use a file in Q8_0, Q4_K or F16"
            ) from None
        return np.asarray(data[:, first - start * block : last - start * block], np.float32)

    def config(self) -> LlamaConfig:
        """The model's shape. Raises UsageError for a missing field or a RoPE variant that we do not compute."""
        heads, width = self._heads(), self._size("embedding_length")
        head_dim = self._size("attention.key_length", max(width // heads, 1))
        config = LlamaConfig(
            vocab_size=self._vocabulary(),
            hidden_size=width,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_heads=heads,
            num_kv_heads=self._kv_heads(),
            head_dim=head_dim,
            rope_theta=self._number("rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(head_dim),
            rms_norm_eps=self._number("attention.layer_norm_rms_epsilon", 1e-5),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            max_context=self._size("context_length"),
        )
        config.refuse_odd_shapes(self.origin)
        return config

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the file's metadata; None where there is none, or none that we can rebuild."""
        metadata = {key: value for key, value in self._fields.items() if key.startswith("tokenizer.")}
        try:
            return Tokenizer.from_gguf(metadata)
        except Exception as error:  # a missing or odd field shows in the tokenizers and jinja2 packages in many ways
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UsageError(
                f"{self.origin}: its tokenizer cannot be rebuilt ({problem}); fetch the file again"
            ) from None

    def identity(self) -> bytes:
        """SHA-256 over the whole file."""
        return files_digest([self._path])

    def _rope_scaling(self, head_dim: int) -> RopeDivisors | None:
        """LLaMA 3.1's scaling travels as a tensor of divisors, linear scaling as a field."""
        rotated = self._fields.get("llama.rope.dimension_count", head_dim)
        kind = self._fields.get("llama.rope.scaling.type", "none")
        if kind not in ("none", "linear") or rotated != head_dim:
            raise UsageError(
                f"{self.origin}: RoPE with scaling {kind!r} over {rotated} of {head_dim} dimensions is not supported; "
                "use a model with LLaMA 3.1's or linear scaling"
            )
        if _ROPE_DIVISORS in self._tensors:
            return RopeDivisors(tuple(self.read(_ROPE_DIVISORS, (slice(None),)).tolist()))
        factor = self._number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
        return None if factor == 1.0 else RopeDivisors((factor,) * (head_dim // 2))

    def _heads(self) -> int:
        return self._size("attention.head_count")

    def _kv_heads(self) -> int:
        return self._size("attention.head_count_kv", self._heads())

    def _number(self, key: str, default: float) -> float:
        value = self._fields.get(f"llama.{key}", default)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{self.origin}: llama.{key} is {value!r}; it must be above 0, fetch the file again")
        return float(value)

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._fields.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{self.origin}: llama.{key} is {value!r}; it must be a positive integer, fetch the file again"
            )
        return value

    def _vocabulary(self) -> int:
        if "model.embed_tokens.weight" not in self._tensors:
            raise UsageError(f"{self.origin}: the tensor model.embed_tokens.weight is missing; fetch the file again")
        return self._tensors["model.embed_tokens.weight"].shape[0]


def _open(path: Path) -> GGUFHeader:
    if not path.is_file():
        raise UsageError(f"{path}: no such GGUF file; check the path")
    try:
        return read_header(path)
    except ValueError as error:
        raise UsageError(f"{path}: not a whole GGUF file ({error}); fetch it again") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; check the file") from None


def _hf_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    return _ENDS.get(name, name)


def _unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Which of llama.cpp's rows [heads, D/2, 2] each of HF's rows [heads, 2, D/2] is; rows count heads * D."""
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
