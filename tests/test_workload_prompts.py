"""Reading prompts: what loads, what is told to the user, and the built-in set."""

import json

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.prompts import Prompt, builtin_prompts, read_prompts, write_prompts

GOOD = '{"id": "a", "prompt": "hello"}'


def write(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_fields_and_defaults(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True, "arrival_s": 1.25}
    path = write(
        tmp_path,
        GOOD,
        json.dumps({"id": "b", "messages": messages, **options}),
        "",
        json.dumps({"id": "c", "prompt_ids": [5, 6]}),
    )
    assert read_prompts(path, 2.0) == [
        Prompt("a", 0.0, text="hello", max_tokens=32, temperature=0, ignore_eos=False),
        Prompt("b", 1.25, messages=tuple(messages), max_tokens=7, temperature=0.5, ignore_eos=True),
        Prompt("c", 4.0, prompt_ids=(5, 6)),
    ]


def test_prompts_come_in_order_of_arrival(tmp_path):
    path = write(tmp_path, '{"id": "late", "prompt": "x", "arrival_s": 9}', '{"id": "early", "prompt": "y"}')
    assert [prompt.id for prompt in read_prompts(path, 1.0)] == ["early", "late"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""},
        {"prompt_ids": []},
        {"prompt_ids": [-1, 10**30]},
        {"prompt": "x", "stop_token_ids": [-1, 10**30]},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": -3},
    ],
)
def test_what_a_server_would_refuse_still_loads(tmp_path, fields):
    (prompt,) = read_prompts(write(tmp_path, json.dumps({"id": "a", **fields})), 0)
    assert prompt.id == "a"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", '"{" is not JSON'),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "[1] is no JSON object"),
        ("null", "null is no JSON object"),
        (b'{"id": "\xff", "prompt": ""}', "not UTF-8 (at byte 9"),
        ('{"prompt": "x"}', "must have id and exactly one of prompt, messages, prompt_ids"),
        ('{"id": "b"}', "has id; it must have id and exactly one of"),
        ('{"id": "b", "prompt": "x", "prompt_ids": [1]}', "has id, prompt, prompt_ids; it must have"),
        ('{"id": "b", "prompt": "x", "max_token": 3}', "unknown field 'max_token'"),
        ('{"id": "a", "prompt": "x"}', 'field id is "a"; it must be unique: line 1 has it'),
        ('{"id": "b", "prompt": "x", "prompt": "y"}', 'key "prompt" is given twice; keep one'),
        ('{"id": "b", "seed": 1, "prompt": "x", "seed": 1, "id": "c"}', 'key "seed" is given twice'),
        ('{"id": "b", "messages": [{"role": "user", "content": "x", "role": "x"}]}', 'key "role" is given twice'),
        ('{"id": "b", "' + "x\\n" * 100 + '": 1, "' + "x\\n" * 100 + '": 1}', 'key "x\\nx'),
        ('{"id": 3, "prompt": "x"}', "field id is 3"),
        ('{"id": "", "prompt": "x"}', 'field id is ""'),
        ('{"id": "b", "prompt": null}', "field prompt is null"),
        ('{"id": "b", "prompt": "\\ud800"}', 'field prompt is "\\ud800"'),
        ('{"id": "b", "prompt_ids": "12"}', "field prompt_ids"),
        ('{"id": "b", "prompt_ids": [1.0]}', "field prompt_ids is [1.0]"),
        ('{"id": "b", "prompt_ids": [true]}', "field prompt_ids is [true]"),
        ('{"id": "b", "messages": []}', "field messages is []"),
        ('{"id": "b", "messages": ["hi"]}', "field messages"),
        ('{"id": "b", "messages": [{"role": "user"}]}', "field messages"),
        ('{"id": "b", "messages": [{"content": "x"}]}', "field messages"),
        ('{"id": "b", "messages": [{"role": "user", "content": null}]}', "field messages"),
        ('{"id": "b", "messages": [{"role": "user", "content": "x", "tool": 1}]}', "field messages"),
        ('{"id": "b", "prompt": "x", "max_tokens": 3.0}', "field max_tokens is 3.0"),
        ('{"id": "b", "prompt": "x", "max_tokens": true}', "field max_tokens is true"),
        ('{"id": "b", "prompt": "x", "temperature": -1}', "field temperature is -1"),
        ('{"id": "b", "prompt": "x", "temperature": NaN}', "field temperature is NaN"),
        ('{"id": "b", "prompt": "x", "ignore_eos": 1}', "field ignore_eos is 1"),
        ('{"id": "b", "prompt": "x", "top_k": -1}', "field top_k is -1"),
        ('{"id": "b", "prompt": "x", "top_k": 9999999999}', "field top_k is 9999999999"),
        ('{"id": "b", "prompt": "x", "top_p": 0}', "field top_p is 0"),
        ('{"id": "b", "prompt": "x", "top_p": 1.5}', "field top_p is 1.5"),
        ('{"id": "b", "prompt": "x", "seed": 1.5}', "field seed is 1.5"),
        ('{"id": "b", "prompt": "x", "logprobs": 21}', "field logprobs is 21"),
        ('{"id": "b", "prompt": "x", "stop": "end"}', 'field stop is "end"'),
        ('{"id": "b", "prompt": "x", "stop": [""]}', 'field stop is [""]'),
        ('{"id": "b", "prompt": "x", "stop_token_ids": 5}', "field stop_token_ids is 5"),
        ('{"id": "b", "prompt": "x", "priority": 10}', "field priority is 10; it must be an integer, 0 to 9"),
        ('{"id": "b", "prompt": "x", "priority": 1.0}', "field priority is 1.0"),
        ('{"id": "b", "prompt": "x", "ttft_slo": 0}', "field ttft_slo is 0; it must be a number of seconds above 0"),
        ('{"id": "b", "prompt": "x", "tbt_slo": null}', "field tbt_slo is null"),
        ('{"id": "b", "prompt": "x", "arrival_s": -0.5}', "field arrival_s is -0.5"),
        ('{"id": "b", "prompt": "x", "arrival_s": 1e999}', "field arrival_s is Infinity"),
        ('{"id": "b", "prompt": "x", "arrival_s": 1' + "0" * 400 + "}", "field arrival_s is 1000"),
    ],
)
def test_a_bad_line_is_told_in_one_line(tmp_path, line, told):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(UsageError) as raised:
        read_prompts(path, 1.0)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 2: ")
    assert told in message
    assert "\n" not in message and len(message) < len(str(path)) + 250


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="absent.jsonl: cannot be read .No such file"):
        read_prompts(tmp_path / "absent.jsonl", 1.0)
    with pytest.raises(UsageError, match="cannot be read .Is a directory"):
        read_prompts(tmp_path, 1.0)
    for lines in ([], ["", "  "]):
        with pytest.raises(UsageError, match="prompts.jsonl: the file is empty"):
            read_prompts(write(tmp_path, *lines), 1.0)


@pytest.mark.parametrize("interval_s", [-1.0, float("nan")])
def test_a_bad_interval_is_told(tmp_path, interval_s):
    with pytest.raises(UsageError, match="--interval_s="):
        read_prompts(write(tmp_path, GOOD), interval_s)


def test_what_is_written_reads_back(tmp_path):
    prompts = [
        Prompt("a", 0.1, text="two\nlines, \N{SNOWMAN}"),
        Prompt("b", 0.2, messages=({"role": "user", "content": "x"},), temperature=0.7, max_tokens=5),
        Prompt("c", 0.3, prompt_ids=(1, 2), ignore_eos=True, stop=("end", "!"), stop_token_ids=(4,)),
        Prompt("d", 0.4, text="x", temperature=1.0, top_k=5, top_p=0.5, seed=-3, logprobs=0),
        Prompt("e", 0.5, text="x", priority=9, ttft_slo=1.5, tbt_slo=0.05),
    ]
    path = tmp_path / "out.jsonl"
    write_prompts(path, prompts)
    assert read_prompts(path, 99.0) == prompts
    with pytest.raises(UsageError, match="cannot be written"):
        write_prompts(tmp_path / "absent" / "out.jsonl", prompts)


def test_builtin_prompts_share_prefixes():
    prompts = builtin_prompts(0.5)
    assert [prompt.arrival for prompt in prompts] == [0.5 * place for place in range(len(prompts))]
    assert 14 <= len(prompts) <= 18
    assert all(16 <= prompt.max_tokens <= 48 for prompt in prompts)
    assert any(prompt.text is not None for prompt in prompts)
    talks = [prompt.messages for prompt in prompts if prompt.messages]
    continued = [
        (earlier, later)
        for place, later in enumerate(talks)
        for earlier in talks[:place]
        if len(later) == len(earlier) + 2 and later[: len(earlier)] == earlier
    ]
    assert len(continued) == 6, "three conversations of three turns, each turn after the one before"
    long = [messages[0]["content"] for messages in talks if len(messages[0]["content"]) > 3000]
    assert len(long) >= 3 and len({text[:3000] for text in long}) == 1 and len(set(long)) == len(long)
