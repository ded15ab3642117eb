"""Text to token ids and back, and chat templates: from an HF folder's files, or rebuilt from a GGUF's metadata.

Of GGUF's tokenizers the byte-level BPEs of SmolLM (every digit by itself, the rest split as GPT-2 does) and of LLaMA 3
(digits in threes) are known. Knows nothing of JAX.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers, processors

from mooncake_jax.errors import UsageError
from mooncake_jax.model.files import read_json, shown

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_ENDINGS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
_SMOLLM, _LLAMA3 = ("smollm",), ("llama-bpe", "llama3", "llama-v3")  # GGUF's names of pre-tokenizers
# How LLaMA 3 splits text before BPE, part of its published tokenizer.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_FILE, _CONFIG, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_TEMPLATE = "chat_template.jinja"
FILES = (_FILE, _CONFIG, _GENERATION, _TEMPLATE)  # all that a folder's tokenizer consists of, beside config.json


class Tokenizer:
    """Encodes, decodes and renders chats for one model. Immutable after construction."""

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        eos_ids: frozenset[int],
        template: str | None,
        named: Mapping[str, str] | None = None,
    ):
        """named: the texts of bos_token and eos_token, which templates may ask for."""
        self._bpe = bpe
        self._source = template
        self._template = None if template is None else _environment().from_string(template)
        self._named = dict(named or {})
        self.eos_ids = eos_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer | None":
        """From the `tokenizer.` fields of a GGUF; None unless it is a byte-level BPE that we know how to rebuild."""
        field = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        if field.get("model") != "gpt2" or field.get("pre") not in _SMOLLM + _LLAMA3:
            return None
        bpe = _bpe_of_gguf(field)
        ids = {name: field.get(f"{name}_id") for name in ("bos_token", "eos_token", "eot_token")}
        named = {name: field["tokens"][i] for name, i in ids.items() if i is not None}
        if field.get("add_bos_token", field["pre"] in _LLAMA3) and "bos_token" in named:
            bpe.post_processor = processors.TemplateProcessing(
                single=f"{named['bos_token']} $A", special_tokens=[(named["bos_token"], ids["bos_token"])]
            )
        ends = {bpe.token_to_id(token) for token in _ENDINGS} | {ids["eos_token"], ids["eot_token"]}
        return cls(bpe, frozenset(ends - {None}), metadata.get("tokenizer.chat_template"), named)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer | None":
        """From tokenizer.json and what lies beside it in HF layout; None without that file. Raises UsageError."""
        path = folder / _FILE
        if not path.is_file():
            return None
        try:
            bpe = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more precise
            raise UsageError(f"{path}: not a tokenizer ({_first_line(error)}); fetch the model again") from None
        config = _json_or_empty(folder / _CONFIG)
        named = {name: _text(folder / _CONFIG, name, config.get(name)) for name in ("bos_token", "eos_token")}
        named = {name: text for name, text in named.items() if text is not None}
        ends = _eos_ids(folder / _GENERATION) | _eos_ids(folder / "config.json")
        if "eos_token" in named:
            ends |= {bpe.token_to_id(named["eos_token"])}
        try:
            return cls(bpe, frozenset(ends - {None}), _template(folder, config), named)
        except Exception as error:  # Jinja's own, and Python's: Jinja compiles to it, and computes what is constant
            raise UsageError(
                f"{folder}: the chat template is broken ({_first_line(error)}); fetch the model again"
            ) from None

    def save(self, folder: Path) -> None:
        """Writes the files that from_folder reads."""
        self._bpe.save(str(folder / _FILE))
        (folder / _CONFIG).write_text(json.dumps(self._named, indent=2) + "\n")
        (folder / _GENERATION).write_text(json.dumps({"eos_token_id": sorted(self.eos_ids)}) + "\n")
        if self._source is not None:
            (folder / _TEMPLATE).write_text(self._source, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        return self._bpe.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of text. Special tokens written out in it are recognised; of its own the model's convention adds
        at most what begins a text, unless it stands there already, as in a rendered chat.
        """
        begun = "bos_token" in self._named and text.startswith(self._named["bos_token"])
        return self._bpe.encode(text, add_special_tokens=not begun).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._bpe.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders messages (role, content) up to where the assistant answers. Raises UsageError if they do not fit, or
        the template itself is at fault.
        """
        if self._template is None:
            raise UsageError("this model has no chat template; give a prompt instead of messages")
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise UsageError(f"messages: {dict(message)!r} lacks a text; give each message a role and a content")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._named)
        except jinja2.TemplateError as error:
            problem = f"messages do not fit the chat template ({_first_line(error)})"
            raise UsageError(f"{problem}; give it turns that it knows") from None
        except Exception as error:  # a template computes, and so can go wrong in any way
            problem = f"the chat template fails on these messages ({type(error).__name__}: {_first_line(error)})"
            raise UsageError(f"{problem}; give a prompt instead of messages, or correct the template") from None


def _bpe_of_gguf(field: Mapping[str, Any]) -> tokenizers.Tokenizer:
    tokens, types = field["tokens"], field["token_type"]
    merges = [tuple(merge.split(" ")) for merge in field["merges"]]
    llama3 = field["pre"] in _LLAMA3
    vocabulary = {token: i for i, token in enumerate(tokens)}
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3))
    if llama3:
        first = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated")
    else:
        first = pre_tokenizers.Digits(individual_digits=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama3)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([first, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [t for t, type_ in zip(tokens, types, strict=True) if type_ == kind]
        bpe.add_tokens([tokenizers.AddedToken(t, special=special, normalized=False) for t in added])
    return bpe


def _json_or_empty(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(path: Path, field: str, token: Any) -> str | None:
    """A special token's text, which HF writes bare or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) and token is not None:
        raise UsageError(
            f"{path}: {field} is {shown(token)}; it must be a text or an object with a content, fetch the model again"
        )
    return text


def _eos_ids(path: Path) -> set[int]:
    found = _json_or_empty(path).get("eos_token_id")
    if found is None:
        return set()
    ids = found if isinstance(found, list) else [found]
    if not all(type(one) is int and 0 <= one < 2**31 for one in ids):  # true and false are ints to isinstance
        raise UsageError(
            f"{path}: eos_token_id is {shown(found)}; it must be a token's id or a list of them, fetch the model again"
        )
    return set(ids)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a field; of several the one named default."""
    path = folder / _TEMPLATE
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except ValueError as error:
            raise UsageError(f"{path}: not a text in UTF-8 ({error}); fetch the model again") from None
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list) and all(map(_is_named_template, found)):
        return next((each["template"] for each in found if each["name"] == "default"), None)
    raise UsageError(
        f"{folder / _CONFIG}: chat_template is {shown(found)}; it must be a text or a list of named templates, "
        "fetch the model again"
    )


def _is_named_template(each: Any) -> bool:
    return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("name", "template"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers renders templates: sandboxed, able to refuse messages by raise_exception, and to ask the date."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment
