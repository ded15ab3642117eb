"""Parts of a LLaMA's parameters from a weight source, tensor by tensor, each as the slices that lie on this process's
devices: host memory holds what is placed there and one tensor (or slice) more.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig
from mooncake_jax.model.files import Index
from mooncake_jax.model.llama import LlamaParts, Params, abstract_parts
from mooncake_jax.model.placement import Part, aligned, leaf_name, place
from mooncake_jax.model.sources import WeightSource

# Our path of a layer's parameter -> its name in HF's layout, behind "model.layers.N.".
LAYER_NAMES = {
    "attention_norm/scale": "input_layernorm",
    "attention/q/kernel": "self_attn.q_proj",
    "attention/k/kernel": "self_attn.k_proj",
    "attention/v/kernel": "self_attn.v_proj",
    "attention/o/kernel": "self_attn.o_proj",
    "mlp_norm/scale": "post_attention_layernorm",
    "mlp/gate/kernel": "mlp.gate_proj",
    "mlp/up/kernel": "mlp.up_proj",
    "mlp/down/kernel": "mlp.down_proj",
}
_ENDS = {"embedding": "model.embed_tokens", "norm/scale": "model.norm", "head": "lm_head"}
_REMEDY = "check that the config belongs to these weights"
_TRANSPOSED = ("kernel", "head")  # ours are [in, out], HF's [out, in]
_STRIP = 32  # rows transposed at once: several times as fast as whole matrices, whose columns miss the cache


class TensorReader:
    """Reads parts of one model. Raises UsageError naming the tensors that are missing, extra or misshapen."""

    def __init__(self, source: WeightSource):
        self._source = source
        config = source.config()
        _refuse_absurd_depth(config, source)
        _check(config, source, _wanted(config, abstract_parts(config, jnp.float32)))

    def read(self, part: Part, abstract: Params) -> Params:
        """The part's parameters, placed and in dtype as abstract says."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._read(part, leaf_name(path), leaf), abstract)

    def _read(self, part: Part, leaf: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        name, transposed = _hf_name(part, leaf), _is_transposed(leaf)

        def piece(index: Index) -> np.ndarray:
            if transposed:
                return _transpose(self._source.read(name, index[::-1]), wanted.dtype)
            return self._source.read(name, index).astype(wanted.dtype, copy=False)

        return place(wanted, piece)


def _transpose(tensor: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = aligned(tensor.shape[::-1], dtype)
    for row in range(0, tensor.shape[0], _STRIP):
        out[:, row : row + _STRIP] = tensor[row : row + _STRIP].astype(dtype, copy=False).T
    return out


def _wanted(config: LlamaConfig, parts: LlamaParts) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that the model consists of, by HF name and in HF orientation."""
    numbered = [(("layers", i), parts.layer) for i in range(config.num_layers)]
    wanted = {}
    for part, abstract in [(("embedder",), parts.embedder), *numbered]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
            name = leaf_name(path)
            wanted[_hf_name(part, name)] = leaf.shape[::-1] if _is_transposed(name) else leaf.shape
    return wanted


def _hf_name(part: Part, leaf: str) -> str:
    if part[0] == "layers":
        return f"model.layers.{part[1]}.{LAYER_NAMES[leaf]}.weight"
    return f"{_ENDS[leaf]}.weight"


def _is_transposed(leaf: str) -> bool:
    return leaf.endswith(_TRANSPOSED)


def _refuse_absurd_depth(config: LlamaConfig, source: WeightSource) -> None:
    """Keeps the table of wanted tensors as small as the file's own: a damaged number of layers can be billions."""
    if config.num_layers > len(source.shapes):
        raise UsageError(
            f"{source.origin}: the config asks for {config.num_layers} layers, of {len(source.shapes)} tensors in all; "
            f"{_REMEDY}"
        )


def _check(config: LlamaConfig, source: WeightSource, wanted: dict[str, tuple[int, ...]]) -> None:
    found = {name: shape for name, shape in source.shapes.items() if not _redundant(config, name)}
    for what, names in (
        ("missing", wanted.keys() - found.keys()),
        ("unknown to a llama", found.keys() - wanted.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UsageError(f"{source.origin}: tensors {what}: {listed}; {_REMEDY}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise UsageError(
                f"{source.origin}: {name} has shape {list(found[name])}, the config asks for {list(shape)}; {_REMEDY}"
            )


def _redundant(config: LlamaConfig, name: str) -> bool:
    """Tensors that some checkpoints carry although the config makes them: a tied head's copy, RoPE's frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")
