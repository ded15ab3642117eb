"""What the engines are compared with: the same model as one scan over its layers, and in transformers."""

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mooncake_jax.errors import UsageError
from mooncake_jax.model.config import LlamaConfig, RopeDivisors, RopeScaling
from mooncake_jax.model.layers import rotary_table
from mooncake_jax.model.loading import LoadedModel
from mooncake_jax.model.weights import LAYER_NAMES
from mooncake_jax.parallel.attention import attend_chunk

_CHECKED = 128  # tokens after which logits are compared
_TOLERANCE = 1e-2


def layer_scan(model: LoadedModel, ids: np.ndarray) -> Callable[[], object]:
    """Prefill of ids as one compiled function without hooks: all layers in a lax.scan, the last token's logits."""
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *model.layers)

    @jax.jit
    def forward(embedder, layers, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends = nnx.merge(model.embedder_def, embedder)
        rotary = rotary_table(model.config, jnp.arange(len(ids)))

        def layer(x: jax.Array, params) -> tuple[jax.Array, jax.Array]:
            kept = []

            def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
                kept.append(kv)
                return attend_chunk(q, kv, 0)

            return nnx.merge(model.layer_def, params)(x, rotary, attend), kept[0]

        x, kv = jax.lax.scan(layer, ends.encode(ids), layers)
        return ends.decode(x[-2:]), kv

    ids = np.asarray(ids, np.int32)
    return lambda: jax.block_until_ready(forward(model.embedder, layers, ids))


def transformers_peer(model: LoadedModel) -> "TransformersPeer | None":
    """The same weights in transformers; None if it or torch is not installed.

    Raises UsageError if it computes something else: its times would be compared with another model's.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        return None
    peer = TransformersPeer(model)
    check_logits(model, peer)
    peer.set_dtype(np.dtype(model.dtype).name)
    return peer


def check_logits(model: LoadedModel, peer: "TransformersPeer") -> None:
    """Raises UsageError unless both give the same logits after some tokens, in float32 whatever the model's dtype."""
    tokens = min(_CHECKED, model.config.max_context)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens)
    embedder, layers = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (model.embedder, model.layers))
    wide = replace(model, dtype=jnp.dtype("float32"), embedder=embedder, layers=layers)
    ours = np.asarray(layer_scan(wide, ids)()[0][-1])
    difference = float(np.abs(ours - peer.logits(ids)).max())
    if not difference <= _TOLERANCE:
        raise UsageError(
            f"transformers' logits differ from ours by {difference:.3g}, more than {_TOLERANCE:g}: it computes another "
            "model; measure without it, in an environment that lacks torch"
        )


class TransformersPeer:
    """A model's weights in transformers, in float32 at first."""

    def __init__(self, model: LoadedModel):
        import torch
        from transformers import LlamaForCausalLM

        self._torch = torch
        self._model = LlamaForCausalLM(_config(model.config)).eval()
        state = {name: torch.from_numpy(np.array(leaf, np.float32)) for name, leaf in _state(model)}
        self._model.load_state_dict(state, strict=True)
        scaling = model.config.rope_scaling
        if isinstance(scaling, RopeDivisors):  # a GGUF's, for which transformers' configuration has no word
            self._model.model.rotary_emb.inv_freq /= torch.tensor(scaling.divisors)

    def set_dtype(self, dtype: str) -> None:
        rotary = self._model.model.rotary_emb
        frequencies = rotary.inv_freq  # float32 in whatever dtype transformers loads a model
        self._model.to(getattr(self._torch, dtype))
        rotary.inv_freq = frequencies

    def logits(self, ids: np.ndarray) -> np.ndarray:
        """Those after the last token: [V]."""
        with self._torch.inference_mode():
            return self._model(self._torch.from_numpy(ids[None]), logits_to_keep=1).logits[0, 0].numpy()

    def prefill(self, ids: np.ndarray) -> object:
        with self._torch.inference_mode():
            ids = self._torch.from_numpy(ids.astype(np.int64))[None]
            return self._model(ids, use_cache=True, logits_to_keep=1).cache

    def decoding(self, batch: int, context: int) -> Callable[[], object]:
        """A call that adds one greedy token to each request of a batch, whose caches hold context tokens at first."""
        with self._torch.inference_mode():
            cache = self.prefill(np.zeros(context, np.int64))
            cache.batch_repeat_interleave(batch)
        tokens = self._torch.zeros((batch, 1), dtype=self._torch.int64)

        def step() -> object:
            with self._torch.inference_mode():
                return self._model(tokens, cache=cache, use_cache=True).logits.argmax(-1)

        return step


def _config(config: LlamaConfig):
    import transformers

    scaling = config.rope_scaling
    llama3 = {"rope_type": "llama3", **asdict(scaling)} if isinstance(scaling, RopeScaling) else {}
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **llama3},
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _state(model: LoadedModel):
    """(transformers' name, array in transformers' orientation) of all parameters; a tied head is the embedding."""
    embedding, head = model.embedder["embedding"], model.embedder.get("head")
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", model.embedder["norm"]["scale"]
    yield "lm_head.weight", embedding if head is None else head.T
    for i, layer in enumerate(model.layers):
        for path, leaf in jax.tree_util.tree_leaves_with_path(layer):
            name = LAYER_NAMES["/".join(str(key.key) for key in path)]
            yield f"model.layers.{i}.{name}.weight", leaf.T
