"""Prompts to serve: read from a JSONL file, or the built-in set.

A prompt is text, chat messages or token ids, not yet tokenised: this module knows no tokenizer, model or context. What
one request alone gets wrong (an empty prompt, ids out of vocabulary, max_tokens of 0) is no error here: it is rejected
later, with its reason, and the rest of the run goes on.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mooncake_jax.errors import UsageError
from mooncake_jax.request import MOST_LOGPROBS
from mooncake_jax.workload.checks import is_integer, is_number, require
from mooncake_jax.workload.jsonl import field_error, line_error, read_objects

SOURCES = ("prompt", "messages", "prompt_ids")
SAMPLING = ("temperature", "top_k", "top_p", "seed", "logprobs")
SERVICE = ("priority", "ttft_slo", "tbt_slo")
OPTIONS = ("max_tokens", *SAMPLING, "ignore_eos", "stop", "stop_token_ids", "cache_salt", *SERVICE, "arrival_s")
LISTS = ("messages", "prompt_ids", "stop", "stop_token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the user writes it; exactly one of text, messages and prompt_ids is given.

    arrival in seconds since the start; each message is {"role": ..., "content": ...}. priority: 0 to 9, lower ones are
    rejected first; ttft_slo and tbt_slo in seconds, None for the cluster's own.
    """

    id: str
    arrival: float
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    ttft_slo: float | None = None
    tbt_slo: float | None = None


def read_prompts(path: str | os.PathLike, interval_s: float) -> list[Prompt]:
    """The prompts of a JSONL file in order of arrival: `arrival_s`, or else n * interval_s for the n-th line from 0.

    Raises UsageError naming file, line, field, value and remedy.
    """
    require(is_number(interval_s), "interval_s", interval_s, "a number of seconds, not negative")
    prompts, lines = [], {}
    for index, (number, fields) in enumerate(read_objects(path)):
        prompt = _prompt(path, number, fields, index * interval_s)
        if prompt.id in lines:
            raise field_error(path, number, "id", prompt.id, f"unique: line {lines[prompt.id]} has it already")
        lines[prompt.id] = number
        prompts.append(prompt)
    return sorted(prompts, key=lambda prompt: prompt.arrival)


def builtin_prompts(interval_s: float) -> list[Prompt]:
    """The built-in set: single questions, three conversations and three questions over one long text, interleaved."""
    return read_prompts(Path(__file__).with_name("builtin_prompts.jsonl"), interval_s)


def write_prompts(path: str | os.PathLike, prompts: Iterable[Prompt]) -> None:
    """Writes a file that read_prompts reads back. Raises UsageError where it cannot be written."""
    text = "".join(json.dumps(_fields(prompt)) + "\n" for prompt in prompts)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error}); name a file that can") from None


def _fields(prompt: Prompt) -> dict:
    source = dict(zip(SOURCES, (prompt.text, prompt.messages, prompt.prompt_ids)))
    options = {name: getattr(prompt, name) for name in OPTIONS[:-1]}
    given = {name: value for name, value in (source | options).items() if value is not None}
    return {"id": prompt.id, **given, "arrival_s": prompt.arrival}


def _prompt(path: str | os.PathLike, number: int, fields: dict, arrival: float) -> Prompt:
    known = ("id", *SOURCES, *OPTIONS)
    for name in fields:
        if name not in known:
            raise line_error(path, number, f"unknown field {name!r}; known are {', '.join(known)}")
    given = [name for name in SOURCES if name in fields]
    if "id" not in fields or len(given) != 1:
        got = ", ".join(fields) or "nothing"
        raise line_error(path, number, f"has {got}; it must have id and exactly one of {', '.join(SOURCES)}")
    for name, value in fields.items():
        ok, wanted = RULES[name]
        if not ok(value):
            raise field_error(path, number, name, value, wanted)
    given = {name: tuple(value) if name in LISTS else value for name, value in fields.items()}
    arrival = float(given.pop("arrival_s", arrival))
    return Prompt(arrival=arrival, text=given.pop("prompt", None), **given)


def _is_text(value: object) -> bool:
    # JSON can spell half of a surrogate pair, which no UTF-8 file, terminal or tokenizer takes.
    return type(value) is str and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _is_message(value: object) -> bool:
    return type(value) is dict and value.keys() == {"role", "content"} and all(map(_is_text, value.values()))


def _is_ids(value: object) -> bool:
    return type(value) is list and all(type(token) is int for token in value)


RULES = {
    "cache_salt": (_is_text, "a string"),
    "id": (lambda value: _is_text(value) and value != "", "a string that is not empty"),
    "prompt": (_is_text, "a string of valid Unicode"),
    "messages": (
        lambda value: type(value) is list and value != [] and all(map(_is_message, value)),
        'a list, not empty, of {"role": string, "content": string}',
    ),
    "prompt_ids": (_is_ids, "a list of integers"),
    "max_tokens": (lambda value: type(value) is int, "an integer"),
    "temperature": (is_number, "a number, not negative"),
    "top_k": (lambda value: type(value) is int and 0 <= value < 2**31, "an integer, 0 for all tokens"),
    "top_p": (lambda value: is_number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "seed": (lambda value: type(value) is int, "an integer"),
    "logprobs": (
        lambda value: type(value) is int and 0 <= value <= MOST_LOGPROBS,
        f"how many of the likeliest tokens to tell, 0 to {MOST_LOGPROBS}",
    ),
    "stop": (
        lambda value: type(value) is list and all(_is_text(stop) and stop for stop in value),
        "a list of texts, none of them empty",
    ),
    "stop_token_ids": (_is_ids, "a list of integers"),
    "priority": (
        lambda value: is_integer(value, 0) and value <= 9,
        "an integer, 0 to 9: lower ones are rejected first",
    ),
    "ttft_slo": (lambda value: is_number(value) and value > 0, "a number of seconds above 0"),
    "tbt_slo": (lambda value: is_number(value) and value > 0, "a number of seconds above 0"),
    "ignore_eos": (lambda value: type(value) is bool, "true or false"),
    "arrival_s": (is_number, "a number of seconds, not negative"),
}
