"""What storing a prompt's KVCache adds to its prefill, in a model of the machine (report 5.2, figure 7).

A prefill computes chunk by chunk, and in a chunk layer by layer; the KVCache of a layer and chunk can be sent once it
is computed, over one link, in order. Layer-wise sends it then; serialized sends everything after the last layer. Pure
functions, no clock.
"""

from collections.abc import Sequence


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


def a800_prefill_s(tokens: int) -> float:
    """Seconds to prefill so many tokens of a 70B LLaMA on eight A800: a fit (within 1.5 %) to what FAST25 figure 14
    shows without a reused prefix.
    """
    thousands = tokens / 1024
    return 7.54e-4 * thousands**2 + 0.1174 * thousands


A800_LAYERS = 80
A800_KV_BYTES = 327_680  # of a token of LLaMA2-70B in bfloat16
A800_BYTES_PER_S = 87e9  # what FAST25 figure 12 measures between two nodes with four cards of 200 Gbps
A800_CHUNK = 8192  # tokens


def a800_added_s(tokens: int) -> tuple[float, float]:
    """(serialized, layer-wise) seconds added for so many tokens."""
    ends = [*range(0, tokens, A800_CHUNK), tokens]
    seconds = [a800_prefill_s(end) - a800_prefill_s(start) for start, end in zip(ends, ends[1:], strict=False)]
    nbytes = [(end - start) * A800_KV_BYTES for start, end in zip(ends, ends[1:], strict=False)]
    return (
        serialized_s(sum(nbytes), A800_BYTES_PER_S),
        layer_wise_s(seconds, nbytes, A800_LAYERS, A800_BYTES_PER_S),
    )
