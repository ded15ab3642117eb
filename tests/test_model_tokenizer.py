"""The tokenizer rebuilt from GGUF metadata, on SmolLM2's own and on a small one made here."""

import pytest
from tokenizers import pre_tokenizers

from mooncake_jax.errors import UsageError
from mooncake_jax.model.sources import inspect_model
from mooncake_jax.model.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def metadata():
    """Two control tokens, one user-defined, all bytes, and two merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "in", "Ġin", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.merges": ["i n", "Ġ in"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def test_bytes_digits_merges_and_special_tokens(metadata):
    tokenizer = Tokenizer.from_gguf(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    split = [tokens[i] for i in tokenizer.encode("in in 1234<|im_end|><tool>é")]
    assert split == ["in", "Ġin", "Ġ", "1", "2", "3", "4", "<|im_end|>", "<tool>", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("in in 1234<|im_end|><tool>é\n🙂")) == "in in 1234<tool>é\n🙂"
    assert tokenizer.encode("") == []
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.eos_ids == {0, 2}


def test_other_tokenizers_are_not_guessed_at(metadata):
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}) is None
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.model": "llama"}) is None
    assert Tokenizer.from_gguf({}) is None


def test_chat_renders_and_refuses(metadata):
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>>"
    for messages in ([{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}]):
        with pytest.raises(UsageError, match="give each message a role and a content"):
            tokenizer.chat(messages)
    strict = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": "{{ raise_exception('no such role') }}"})
    with pytest.raises(UsageError, match="no such role"):
        strict.chat([{"role": "user", "content": "hi"}])
    hostile = Tokenizer.from_gguf(
        metadata | {"tokenizer.chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}
    )
    with pytest.raises(UsageError, match="do not fit"):
        hostile.chat([{"role": "user", "content": "hi"}])
    del metadata["tokenizer.chat_template"]
    with pytest.raises(UsageError, match="no chat template"):
        Tokenizer.from_gguf(metadata).chat([{"role": "user", "content": "hi"}])


def test_smollm2_gives_the_golden_ids_and_prompts(smollm2_path, smollm2_cases):
    config, tokenizer = inspect_model(smollm2_path)
    assert tokenizer.vocab_size == config.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}
    for case in smollm2_cases:
        if "messages" in case:
            assert tokenizer.chat(case["messages"]) == case["prompt"]
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        special = case["text"].replace("<|im_end|>", "").replace("<|im_start|>", "")
        assert tokenizer.decode(case["greedy"]) == special
