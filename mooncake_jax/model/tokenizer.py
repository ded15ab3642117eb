"""Text to token ids and back, and chat templates, rebuilt from a GGUF's metadata.

Byte-level BPE with SmolLM's pre-tokenizer: every digit by itself, the rest split as GPT-2 does. Knows nothing of JAX.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

from mooncake_jax.errors import UsageError

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_ENDINGS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Tokenizer:
    """Encodes, decodes and renders chats for one model. Immutable after construction."""

    def __init__(self, bpe: tokenizers.Tokenizer, eos_ids: frozenset[int], template: str | None):
        self._bpe = bpe
        self._template = None if template is None else _environment().from_string(template)
        self.eos_ids = eos_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer | None":
        """From the `tokenizer.` fields of a GGUF; None unless it is a byte-level BPE with SmolLM's pre-tokenizer."""
        field = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        if (field.get("model"), field.get("pre")) != ("gpt2", "smollm"):
            return None
        tokens, types = field["tokens"], field["token_type"]
        merges = [tuple(merge.split(" ")) for merge in field["merges"]]
        bpe = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        digits = pre_tokenizers.Digits(individual_digits=True)
        bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        bpe.decoder = decoders.ByteLevel()
        for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
            added = [t for t, type_ in zip(tokens, types, strict=True) if type_ == kind]
            bpe.add_tokens([tokenizers.AddedToken(t, special=special, normalized=False) for t in added])
        ends = {bpe.token_to_id(token) for token in _ENDINGS} | {field.get("eos_token_id")}
        return cls(bpe, frozenset(ends - {None}), metadata.get("tokenizer.chat_template"))

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of text; special tokens written out in it are recognised, none are added."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._bpe.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders messages (role, content) up to where the assistant answers. Raises UsageError if they do not fit."""
        if self._template is None:
            raise UsageError("this model has no chat template; give a prompt instead of messages")
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise UsageError(f"messages: {dict(message)!r} lacks a text; give each message a role and a content")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise UsageError(f"messages do not fit the chat template ({error}); give it turns that it knows") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders templates: sandboxed, and able to refuse messages by raise_exception."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment
