"""What storing a prompt's KVCache adds to its prefill, in a model of the machine (report 5.2, figure 7).

A prefill computes chunk by chunk, and in a chunk layer by layer; the KVCache of a layer and chunk can be sent once it
is computed, over one link, in order. Layer-wise sends it then; serialized sends everything after the last layer. Pure
functions, no clock.
"""

from collections.abc import Sequence

from mooncake_jax.sched.profiles import profile


def serialized_s(kv_bytes: float, bytes_per_s: float) -> float:
    """Seconds added when all is sent in the end."""
    return kv_bytes / bytes_per_s


def layer_wise_s(chunks_s: Sequence[float], chunk_bytes: Sequence[float], layers: int, bytes_per_s: float) -> float:
    """Seconds from the end of the prefill until all is sent.

    chunks_s, chunk_bytes: what each chunk takes to compute, and its KVCache in all layers, which share both equally.
    """
    computed = sent = 0.0
    for seconds, nbytes in zip(chunks_s, chunk_bytes, strict=True):
        for _ in range(layers):
            computed += seconds / layers
            sent = max(sent, computed) + nbytes / layers / bytes_per_s
    return sent - computed


A800 = profile("micro")  # a 70B LLaMA on eight A800, calibrated to FAST25 figure 14
A800_LAYERS = 80
A800_KV_BYTES = 327_680  # of a token of LLaMA2-70B in bfloat16
A800_CHUNK = 8192  # tokens


def a800_bytes_per_s() -> float:
    """Between two nodes."""
    return 1 / (A800.transfer(1) - A800.transfer(0))


def a800_added_s(tokens: int, chunk: int = A800_CHUNK, bytes_per_s: float | None = None) -> tuple[float, float]:
    """(serialized, layer-wise) seconds added for so many tokens; bytes_per_s: None: as between two nodes."""
    rate = a800_bytes_per_s() if bytes_per_s is None else bytes_per_s
    ends = [*range(0, tokens, chunk), tokens]
    parts = list(zip(ends, ends[1:], strict=False))
    seconds = [A800.prefill_compute(end, start) for start, end in parts]
    nbytes = [(end - start) * A800_KV_BYTES for start, end in parts]
    return serialized_s(sum(nbytes), rate), layer_wise_s(seconds, nbytes, A800_LAYERS, rate)
