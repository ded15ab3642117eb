"""Writes LLaMA models as llama.cpp does: other names, interleaved q and k rows."""

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name):
    stem = hf_name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.weight"
    _, _, layer, stem = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[stem]}.weight"


def interleaved(rows, head_dim):
    """HF's rows [heads, 2, D/2] in llama.cpp's order [heads, D/2, 2]."""
    return rows.reshape(-1, 2, head_dim // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def config_fields(config):
    return {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }


def write_gguf(path, fields, tensors, *, architecture="llama", texts=None, theta=10000.0):
    """fields: the numbers under llama., None to drop; texts: more metadata, texts, lists and floats, by full key;
    tensors: by GGUF name, float arrays, or (bytes [rows, row_bytes], type) of a quantised one.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if value is not None:
            writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", theta)
    for key, value in (texts or {}).items():
        {str: writer.add_string, float: writer.add_float32, list: writer.add_array}[type(value)](key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
