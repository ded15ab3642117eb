"""The tokenizer rebuilt from GGUF metadata, on SmolLM2's own and on a small one made here."""

import json

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
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "qwen2"}) is None
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


@pytest.mark.parametrize(
    "template, told",
    [
        ("{{ messages + 1 }}", "TypeError: "),
        ("{{ messages | length / (messages | length - 1) }}", "ZeroDivisionError: "),
        ("{{ strftime_now(5) }}", "TypeError: "),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError: "),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
        ("{% if messages %}{{ 'x' | no_such_filter }}{% endif %}", "No filter named 'no_such_filter'"),
        ("{{ messages[0].no_such_field.deeper }}", "has no attribute 'no_such_field'"),
        ("{{ raise_exception('two\\nlines') }}", "(two)"),
    ],
)
def test_a_template_that_fails_is_told_in_one_line(metadata, template, told):
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": template})
    with pytest.raises(UsageError, match="; give it turns that it knows|; give a prompt instead of messages") as caught:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert told in str(caught.value) and "\n" not in str(caught.value)


LLAMA3_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eot_id|>{% endfor %}"


@pytest.fixture
def llama3():
    """In LLaMA 3's manner: a token to begin with, digits in threes, whole words before merges."""
    tokens = ["<|begin|>", "<|end|>", "<|eot_id|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "123", "45", "Ġhi"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": LLAMA3_TEMPLATE,
    }


def test_llama3_splits_as_published_and_begins_a_text_once(llama3):
    tokenizer, tokens = Tokenizer.from_gguf(llama3), llama3["tokenizer.ggml.tokens"]
    split = [tokens[i] for i in tokenizer.encode("12345 hi!'S\n")]
    assert split == ["<|begin|>", "123", "45", "Ġhi", "!", "'", "S", "Ċ"]
    chat = tokenizer.chat([{"role": "user", "content": "x"}])
    assert chat == "<|begin|><|user|>x<|eot_id|>"
    assert tokenizer.encode(chat).count(0) == 1
    assert tokenizer.decode(tokenizer.encode("12345 hi é")) == "12345 hi é"
    assert tokenizer.eos_ids == {1, 2}
    unbegun = Tokenizer.from_gguf(llama3 | {"tokenizer.ggml.add_bos_token": False})
    assert unbegun.encode("123") == [tokens.index("123")]


@pytest.mark.parametrize("which", ["metadata", "llama3"])
def test_a_saved_tokenizer_is_the_same(which, request, tmp_path):
    tokenizer = Tokenizer.from_gguf(request.getfixturevalue(which))
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    text = "in in 12345 hi<|im_end|> é"
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.eos_ids, again.vocab_size) == (tokenizer.eos_ids, tokenizer.vocab_size)
    messages = [{"role": "user", "content": "hi"}]
    assert again.chat(messages) == tokenizer.chat(messages)


def test_a_folder_as_hugging_face_lays_it_out(llama3, tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None
    Tokenizer.from_gguf(llama3).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path).eos_ids == {1}
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"bos_token": {"content": "<|begin|>"}, "eos_token": "<|end|>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_ids == {1, 2, 7, 9}
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|end|>"


@pytest.mark.parametrize(
    "name, content, complaint",
    [
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: holds a list"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "tokenizer_config.json: not JSON .*surrogates"),
        ("generation_config.json", '{"eos_token_id": 1, "eos_token_id": 2}', "'eos_token_id' is both 1 and 2; correct"),
        ("chat_template.jinja", "{% for", "the chat template is broken"),
    ],
)
def test_a_broken_file_is_named(llama3, tmp_path, name, content, complaint):
    Tokenizer.from_gguf(llama3).save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=complaint) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, field, values",
    [
        ("tokenizer_config.json", "eos_token", (5, [], True, {}, {"content": 5}, {"content": None})),
        ("tokenizer_config.json", "bos_token", (5, {"content": ["x"]})),
        ("tokenizer_config.json", "chat_template", (5, {}, False, [5], [{"name": "default"}], [{"template": "x"}])),
        ("tokenizer_config.json", "chat_template", ([{"name": "default", "template": 5}],)),
        ("generation_config.json", "eos_token_id", ({}, [[1]], "x", ["x"], True, 1.5, [None], -1, 2**31)),
        ("config.json", "eos_token_id", ({}, [[1]], "x")),
    ],
)
def test_a_field_of_another_type_is_named(llama3, tmp_path, name, field, values):
    Tokenizer.from_gguf(llama3).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for value in values:
        (tmp_path / name).write_text(json.dumps({field: value}))
        with pytest.raises(UsageError, match=f"/{name}: {field} is .*; it must be .*, fetch the model again") as caught:
            Tokenizer.from_folder(tmp_path)
        assert "\n" not in str(caught.value)


def test_fields_that_say_nothing(llama3, tmp_path):
    Tokenizer.from_gguf(llama3).save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    for template in (None, [], [{"name": "tools", "template": "x"}]):
        config = {"eos_token": None, "bos_token": None, "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.eos_ids == frozenset()
        with pytest.raises(UsageError, match="no chat template"):
            tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template, complaint",
    [
        (b"\xff\xfe{{ x }}", "chat_template.jinja: not a text in UTF-8"),
        (b"{% for x in y %}" * 40 + b"{% endfor %}" * 40, "the chat template is broken"),
        (b"{{ 'x' | no_such_filter }}", "the chat template is broken .No filter named 'no_such_filter'"),
        (b"{{ " + b"9" * 5000 + b" }}", "the chat template is broken"),
        (b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}", "the chat template is broken"),
    ],
    ids=["not UTF-8", "40 loops", "no such filter", "5000 digits", "5000 brackets"],
)
def test_a_template_that_cannot_be_compiled(llama3, tmp_path, template, complaint):
    Tokenizer.from_gguf(llama3).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(UsageError, match=complaint) as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


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
