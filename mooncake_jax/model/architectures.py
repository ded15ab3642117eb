"""Configurations of well-known LLaMA models, as published: what can be planned for, and run with dummy weights,
without any file.

Knows nothing of JAX.
"""

from mooncake_jax.model.config import LlamaConfig, RopeScaling

_LLAMA31_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def _llama2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> LlamaConfig:
    return _llama(hidden, intermediate, layers, heads, kv_heads, vocabulary=32000, theta=1e4, context=4096)


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    return _llama(hidden, intermediate, layers, heads, 8, vocabulary=128256, theta=5e5, context=8192)


def _llama31(hidden: int, intermediate: int, layers: int, heads: int) -> LlamaConfig:
    return _llama(
        hidden, intermediate, layers, heads, 8, vocabulary=128256, theta=5e5, context=131072, scaling=_LLAMA31_ROPE
    )


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocabulary: int,
    theta: float,
    context: int,
    scaling: RopeScaling | None = None,
    tied: bool = False,
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        max_context=context,
    )


ARCHITECTURES = {
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, vocabulary=49152, theta=1e5, context=8192, tied=True),
    "llama2-7b": _llama2(4096, 11008, 32, 32, 32),
    "llama2-13b": _llama2(5120, 13824, 40, 40, 40),
    "llama2-70b": _llama2(8192, 28672, 80, 64, 8),
    "llama3-8b": _llama3(4096, 14336, 32, 32),
    "llama3-70b": _llama3(8192, 28672, 80, 64),
    "llama3.1-8b": _llama31(4096, 14336, 32, 32),
    "llama3.1-70b": _llama31(8192, 28672, 80, 64),
}
