"""events.jsonl: every message survives being written and read, and the digest tells actions apart."""

import dataclasses
import json

import pytest

from mooncake_jax.cache.pool import Block
from mooncake_jax.cluster.record import Recorded, decode, digest, encode, fingerprint
from mooncake_jax.request import Request, Sampling, TokenLogprobs
from mooncake_jax.sched import messages as m
from mooncake_jax.sched.actions import Later, Send

SAMPLING = Sampling(0.7, 5, 0.5, 11, 2)
REQUEST = Request("r1", 0.5, 3, 7, (1, 2, 3), (b"\x00" * 32, b"\xff" * 32), SAMPLING, True, ("end", "."), (4, 5))
LOGPROBS = TokenLogprobs(-0.5, ((7, -0.5), (8, -1.25)))
BLOCKS = (Block(b"\x01" * 32, 4), Block(b"\x02" * 32, 0))
MESSAGES = [
    m.Arrived(REQUEST),
    m.Arrived(REQUEST, "the prompt is empty"),
    m.PrefillStarted(1, "prefill0", 32),
    m.PrefillDone(1, "prefill0", 32, 0.25, BLOCKS, BLOCKS[:1], ((5, 1.5), (6, -2.0))),
    m.PrefillFailed(1, "prefill0", "why"),
    m.BlocksReplicated(3, "prefill1", BLOCKS),
    m.BlocksReplicated(3, "prefill1", (), "lost"),
    m.TokensDecoded("decode0", 1.25, (m.Token(1, 7, False, LOGPROBS), m.Token(2, None, True))),
    m.StepsDecoded("decode0", (1.0, 1.25), (1, 2), (2,)),
    m.DecodingFailed(1, "decode0", "why"),
    m.DecodingRejected(1, "decode0", "why", 0.5, 0.25),
    m.NodeLost("decode0"),
    m.Expired("r1"),
    m.Interrupted(),
    m.ReviewRoles(),
    m.SSDReported("prefill0", ((BLOCKS[0].key, None), (BLOCKS[1].key, BLOCKS[0].key))),
    m.BlocksPromoted(3, "prefill1", BLOCKS, "damaged"),
    m.BlocksWritten(3, "prefill1", (BLOCKS[0].key,), "disk full"),
    m.StartPrefill(1, REQUEST, "decode0", BLOCKS, BLOCKS[1:]),
    m.StartPrefill(1, REQUEST, "decode0", BLOCKS, (), m.Replication("prefill1", BLOCKS, BLOCKS)),
    m.StoreOnSSD(2, BLOCKS, (None, BLOCKS[0].key), (BLOCKS[1].key,)),
    m.CopyLost(1, "why"),
    m.KVCacheReceived(1, REQUEST, None),
    m.KVCacheReceived(1, REQUEST, 7, LOGPROBS),
    m.KVCacheLoaded(1, True),
    m.PrefillInlined(1, 0.25, 7, True, LOGPROBS, ((5, 1.5),)),
    m.StepDone(((1, 7), (2, None)), 0.01, (2,), ((1, LOGPROBS),)),
    m.StepsDone((1, 2), (0.5, 0.75)),
    m.StepFailed("why"),
    m.Cancel(1),
]


def test_the_list_above_is_complete():
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_json(message):
    assert decode(json.loads(json.dumps(encode(message)))) == message


@pytest.mark.parametrize(
    "value",
    [
        {"type": "dataclass"},
        {"type": "Cancel"},
        {},
        [],
        None,
        {"type": ["Cancel"]},
        {"type": "Cancel", "dispatch": None},
    ],
)
def test_what_is_no_message_is_refused(value):
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(value)


def test_the_fingerprint_follows_fields_and_types_however_deep():
    def outer(inner_type, **inner_fields):
        inner = dataclasses.make_dataclass("Inner", [("value", inner_type), *inner_fields.items()])
        return dataclasses.make_dataclass("Outer", [("inner", tuple[inner, ...] | None)])

    known = fingerprint(outer(int))
    assert fingerprint(outer(int)) == known
    assert len({known, fingerprint(outer(float)), fingerprint(outer(int, more=str)), fingerprint()}) == 4


def test_a_recorded_actor_answers_the_same_and_writes_one_line_an_event():
    class Echo:
        def handle(self, message, now):
            return [Send("x", message), Later(now, message)]

    lines = []
    recorded = Recorded("node", Echo(), lines.append)
    answers = [recorded.handle(message, 0.1) for message in MESSAGES]
    assert answers[0] == Echo().handle(MESSAGES[0], 0.1)
    assert len(lines) == len(MESSAGES)
    event = json.loads(lines[3])
    assert (event["now"], event["node"], decode(event["message"])) == (0.1, "node", MESSAGES[3])
    assert event["actions"] == digest(answers[3]) != digest(answers[4])
