"""Both engines on tiny models against one plain forward pass: any chunks, prefix, batch, arrival and departure."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import DATA, PlainModel, prefill
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_jax.model.loading import load_model
from mooncake_jax.model.sampling import NO_TOKEN
from mooncake_jax.parallel.decoding import CapacityError, DecodingEngine
from mooncake_jax.parallel.prefill import PrefillEngine, chunk_buckets
from mooncake_jax.parallel.schedule import plan_chunks
from mooncake_jax.request import Sampling

few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OUTPUT = 8


@pytest.fixture(scope="module")
def plain(tiny2):
    return PlainModel(tiny2)


@pytest.fixture(scope="module")
def prefills(tiny2):
    """Engines by chunk."""
    return {chunk: PrefillEngine(tiny2, chunk) for chunk in (1, 7, 16, 33, 96)}


@pytest.fixture(scope="module")
def decoding(tiny2):
    return DecodingEngine(tiny2, max_batch=5, page_size=16, num_pages=40)


@pytest.fixture
def prompt():
    return np.random.default_rng(1).integers(0, 320, 40).tolist()


def prompts(longest=96):
    return st.lists(st.integers(0, 319), min_size=1, max_size=longest)


def test_prefill_gives_the_golden_logits_and_kv(tiny):
    model, plain, golden = tiny
    first, kv = prefill(PrefillEngine(model, 32), model, golden["input_ids"])
    np.testing.assert_allclose([x for _, x in first.top_logits], np.sort(golden["logits"][-1])[:-11:-1], atol=1e-4)
    np.testing.assert_allclose(kv[0, 0].swapaxes(0, 1), golden["layer0_keys"], atol=1e-4)
    np.testing.assert_allclose(kv[-1, 1].swapaxes(0, 1), golden["last_layer_values"], atol=1e-4)
    np.testing.assert_allclose(kv, plain.forward(golden["input_ids"])[1], atol=1e-4)


def test_engines_give_the_golden_continuation(tiny):
    model, _, golden = tiny
    first, kv = prefill(PrefillEngine(model, 16), model, golden["greedy_prompt"])
    engine = DecodingEngine(model, 2, 8, 10)
    engine.join(7, kv, first.token, len(golden["greedy_prompt"]) + len(golden["greedy"]))
    assert [first.token, *(engine.step()[7] for _ in golden["greedy"][1:])] == golden["greedy"].tolist()


@few
@given(ids=prompts(), chunk=st.sampled_from([1, 7, 16, 33, 96]), data=st.data())
def test_any_chunks_and_any_prefix_give_the_same_logits_and_kv(tiny2, plain, prefills, ids, chunk, data):
    logits, kv = plain.forward(ids)
    reused = data.draw(st.integers(0, len(ids) - 1))
    first, computed = prefill(prefills[chunk], tiny2, ids, kv[:, :, :reused] if reused else None)
    assert first.token == logits[-1].argmax()
    np.testing.assert_allclose([x for _, x in first.top_logits], np.sort(logits[-1])[:-11:-1], atol=1e-4)
    np.testing.assert_allclose(computed, kv, atol=1e-4)


@settings(few, max_examples=10)
@given(data=st.data())
def test_any_batch_composition_and_order_gives_the_same_tokens(tiny2, plain, prefills, decoding, data):
    """Requests join and leave between steps as drawn; some leave early; steps may name a part of the batch."""
    for left_by_an_aborted_example in [i for i in range(7) if i in decoding]:
        decoding.leave(left_by_an_aborted_example)
    waiting = dict(enumerate(data.draw(st.lists(prompts(60), min_size=2, max_size=7))))
    golden = {i: plain.greedy(ids, OUTPUT) for i, ids in waiting.items()}
    output = {}
    while waiting or output.keys() & {i for i in output if i in decoding}:
        running = [i for i in output if i in decoding]
        if waiting and len(running) < 5 and (not running or data.draw(st.booleans())):
            i, ids = waiting.popitem()
            first, kv = prefill(prefills[16], tiny2, ids)
            decoding.join(i, kv, first.token, len(ids) + OUTPUT)
            kv[:] = np.nan  # as a receive buffer that is used again
            output[i] = [first.token]
        else:
            stepping = data.draw(st.sampled_from([None, running[:1], running[::-1]]))
            for i, token in decoding.step(stepping).items():
                output[i].append(token)
                if len(output[i]) == OUTPUT or data.draw(st.integers(0, 19)) == 0:
                    decoding.leave(i)
        decoding.check()
    assert decoding.free_pages == 40
    assert output == {i: golden[i][: len(tokens)] for i, tokens in output.items()}


def test_sampled_tokens_do_not_depend_on_the_batch(tiny2, prefills, decoding, prompt):
    def run(others):
        first, kv = prefill(prefills[16], tiny2, prompt, sampling=Sampling(1.5, seed=2**40 + 3))
        for i in range(others):
            decoding.join(i, kv[:, :, : 9 + i], 5, 60, Sampling(0.7, seed=i))
        decoding.join(9, kv, first.token, 60, Sampling(1.5, seed=2**40 + 3))
        tokens = [first.token, *(decoding.step()[9] for _ in range(12))]
        for i in (*range(others), 9):
            decoding.leave(i)
        return tokens

    alone = run(0)
    assert alone == run(4) == run(2)
    assert len(set(alone)) > 3


def test_limits_and_logprobs_do_not_depend_on_the_batch(tiny2, plain, prefills, decoding, prompt):
    sampling = Sampling(temperature=1.5, top_k=12, top_p=0.9, seed=4, logprobs=3)

    def run(others):
        first, kv = prefill(prefills[16], tiny2, prompt, sampling=sampling)
        for i in range(others):
            decoding.join(i, kv[:, :, : 9 + i], 5, 60, Sampling(0.7 * (i % 2), seed=i, top_k=i))
        decoding.join(9, kv, first.token, 60, sampling)
        assert decoding.logprobs(9) is None
        tokens, told = [first.token], [first.logprobs]
        for _ in range(8):
            tokens.append(decoding.step()[9])
            told.append(decoding.logprobs(9))
        assert all(decoding.logprobs(i) is None for i in range(others))
        for i in (*range(others), 9):
            decoding.leave(i)
        return tokens, told

    tokens, told = run(0)
    assert tokens == run(3)[0]
    for i, (token, logprobs) in enumerate(zip(tokens, told, strict=True)):
        expected = np.log(np.asarray(jax.nn.softmax(plain.forward([*prompt, *tokens[:i]])[0][-1])))
        likeliest = np.argsort(-expected)
        np.testing.assert_allclose(logprobs.logprob, expected[token], atol=1e-3)
        assert token in likeliest[:12]
        count = len(logprobs.top)
        assert count == (20 if i == 0 else 3)
        np.testing.assert_allclose([x for _, x in logprobs.top], expected[likeliest[:count]], atol=1e-3)


def test_logprobs_asked_for_by_one_compile_nothing(tiny2, prefills, prompt, compilations):
    engine = DecodingEngine(tiny2, max_batch=2, page_size=16, num_pages=40)
    engine.warm_up()
    _, kv = prefill(prefills[16], tiny2, prompt)
    before = len(compilations)
    engine.join(1, kv, 0, 60, Sampling(1.0, top_k=5, top_p=0.5, logprobs=0))
    engine.join(2, kv, 0, 60)
    engine.step()
    assert engine.logprobs(1).top == () and len(compilations) == before


def test_a_batch_that_comes_and_goes_compiles_nothing(tiny2, prefills, prompt, compilations):
    engine = DecodingEngine(tiny2, max_batch=4, page_size=16, num_pages=40)
    engine.warm_up()
    _, kv = prefill(prefills[16], tiny2, prompt)
    before = len(compilations)
    for size in (1, 3, 2, 4):
        for i in range(size):
            engine.join(i, kv[:, :, : 40 - 7 * i], 0, 60 - i)
        for _ in range(3):
            engine.step()
        for i in range(size):
            engine.leave(i)
    engine.check()
    assert len(compilations) == before


def test_prefill_compiles_a_bounded_set_of_shapes(tiny2, compilations):
    engine = PrefillEngine(tiny2, 48)
    engine.warm_up(1024)
    assert engine.compile_count == len(chunk_buckets(48)) * 2 == 6
    ids, before = np.arange(1000) % 320, len(compilations)
    _, kv = prefill(engine, tiny2, ids)
    for tokens, prefix in ((1, 0), (17, 3), (300, 299), (513, 40), (1000, 7)):
        prefill(engine, tiny2, ids[:tokens], kv[:, :, :prefix] if prefix else None)
    assert (engine.compile_count, len(compilations)) == (6, before)


@pytest.fixture(scope="module")
def compilations():
    """A list that grows with every program that XLA compiles."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: events.append(event) if "backend_compile" in event else None
    )
    jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert events, "JAX reports no compilations any more"
    return events


def test_bfloat16_stays_near_float32(tiny2, prefills, prompt):
    model = load_model(DATA / "tiny-llama2", "bfloat16")
    first, kv = prefill(PrefillEngine(model, 16), model, prompt)
    exact, exact_kv = prefill(prefills[16], tiny2, prompt)
    assert kv.dtype == ml_dtypes.bfloat16
    spread = exact_kv.std()
    assert np.abs(kv.astype(np.float32) - exact_kv).mean() < 0.03 * spread
    np.testing.assert_allclose(first.top_logits[0][1], exact.top_logits[0][1], rtol=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("tiny-llama3", "float32", 1e-3), ("tiny-llama3", "bfloat16", 0.15)]
)
def test_hundreds_of_steps_with_comings_and_goings_follow_the_plain_pass(name, dtype, tolerance):
    """Log-probabilities of every tenth step's tokens, whatever else is in the batch, and the likeliest taken."""
    model, rng = load_model(DATA / name, dtype), np.random.default_rng(0)
    plain, engine, prefills = PlainModel(model), DecodingEngine(model, 6, 8, 84), PrefillEngine(model, 32)
    told, compared = {}, 0
    for step in range(200):
        if len(told) < 6 and rng.random() < 0.4 or not told:
            ids = rng.integers(0, 320, rng.integers(1, 60)).tolist()
            first, kv = prefill(prefills, model, ids)
            engine.join(step, kv, first.token, 110, Sampling(logprobs=0))
            told[step] = [*ids, first.token]
        for request, token in engine.step().items():
            if step % 10 == 0:
                logits = plain.forward(told[request])[0][-1].astype(np.float32)
                expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
                assert abs(engine.logprobs(request).logprob - expected[token]) < tolerance
                assert expected.max() - expected[token] < tolerance
                compared += 1
            told[request].append(token)
        for request in [r for r, ids in told.items() if len(ids) == 110 or rng.random() < 0.02]:
            engine.leave(request)
            del told[request]
        engine.check()
    assert compared > 60


def test_logits_that_are_no_numbers_end_in_no_token(tiny2, prefills, prompt):
    _, kv = prefill(prefills[16], tiny2, prompt)
    damaged = jax.tree.map(lambda leaf: leaf.at[0].set(np.nan), tiny2.layers[1])
    model = dataclasses.replace(tiny2, layers=(tiny2.layers[0], damaged, *tiny2.layers[2:]))
    with pytest.raises(ArithmeticError, match="not finite numbers"):
        PrefillEngine(model, 16).prefill(prompt)
    engine = DecodingEngine(model, 2, 16, 8)
    engine.join(1, kv, 3, 60)
    assert engine.step() == {1: NO_TOKEN}


def test_kv_moves_to_the_device_on_another_thread_while_others_decode(tiny2, plain, prefills, prompt):
    engine = DecodingEngine(tiny2, max_batch=2, page_size=16, num_pages=16)
    first, kv = prefill(prefills[16], tiny2, prompt)
    engine.join(1, kv, first.token, 100)
    memory = kv.copy()
    with ThreadPoolExecutor(1) as thread:
        moving = thread.submit(engine.stage, memory)
        tokens = [engine.step()[1] for _ in range(5)]
        staged = moving.result()
    memory[:] = np.nan  # it may be used again
    with pytest.raises(ValueError, match="request 1 is in the batch already"):
        engine.join(1, staged, first.token, 100)
    engine.join(2, staged, first.token, 60)
    tokens += [engine.step()[1] for _ in range(5)]
    wanted = plain.greedy(prompt, 11)[1:]
    assert tokens == wanted and [engine.step([2])[2] for _ in range(5)] == wanted[5:]


def test_kv_that_is_no_number_harms_nobody_who_gets_its_pages(tiny2, plain, prefills, prompt):
    engine = DecodingEngine(tiny2, max_batch=2, page_size=16, num_pages=8)
    first, kv = prefill(prefills[16], tiny2, prompt)
    wanted = plain.greedy(prompt, 11)[1:]
    keys, values, both = slice(0, 1), slice(1, 2), slice(None)
    for bad, part, stepped in itertools.product((np.nan, np.inf), (keys, values, both), (True, False)):
        damaged = np.concatenate([kv] * 3, axis=2)  # also in pages that the next request's prompt does not overwrite
        damaged[:, part] = bad
        engine.join(1, damaged, first.token, 8 * 16)
        if stepped:
            assert engine.step() == {1: NO_TOKEN}
        engine.leave(1)
        engine.join(2, kv, first.token, 8 * 16)
        assert [engine.step()[2] for _ in range(10)] == wanted, (bad, part, stepped)
        engine.leave(2)


def test_prefix_memory_may_be_reused_by_the_hook(tiny2, prefills, prompt):
    first, kv = prefill(prefills[16], tiny2, prompt)
    scratch = np.empty_like(kv[0, :, :20])

    def load_layer(layer):
        scratch[:] = kv[layer, :, :20]
        return scratch

    assert prefills[16].prefill(prompt, prefix_len=20, load_layer=load_layer) == prefills[16].prefill(
        prompt, prefix_len=20, load_layer=lambda layer: kv[layer, :, :20].copy()
    )


@pytest.mark.parametrize("hook", ["load_layer", "on_layer"])
def test_what_a_hook_raises_passes_and_the_engine_lives_on(tiny2, prefills, prompt, hook):
    first, kv = prefill(prefills[16], tiny2, prompt)
    calls = []

    def failing(layer, *_):
        calls.append(layer)
        if len(calls) == 3:
            raise OSError("disk gone")
        return kv[layer, :, :20]

    hooks = {"load_layer": lambda layer: kv[layer, :, :20]} | {hook: failing}
    with pytest.raises(OSError, match="disk gone"):
        prefills[16].prefill(prompt, prefix_len=20, **hooks)
    assert prefill(prefills[16], tiny2, prompt)[0] == first


@pytest.mark.parametrize(
    "ids, prefix, complaint",
    [
        ([], 0, "0 tokens"),
        ([1] * 2049, 0, "2049 tokens"),
        ([1, 320], 0, "320"),
        ([-1, 5], 0, "-1"),
        ([2**32], 0, "4294967296"),
        ([1, 2], 2, "prefix_len is 2"),
        ([1, 2], -1, "prefix_len is -1"),
        ([1, 2], 1, "no load_layer"),
    ],
)
def test_prefill_refuses(prefills, ids, prefix, complaint):
    with pytest.raises(ValueError, match=complaint):
        prefills[16].prefill(ids, prefix_len=prefix)


def test_prefill_refuses_a_misshapen_prefix(tiny2, prefills, prompt):
    _, kv = prefill(prefills[16], tiny2, prompt)
    for wrong in (kv[0, :, :9], kv[0, :, :10].astype(np.float16)):
        with pytest.raises(ValueError, match=r"load_layer\(0\)"):
            prefills[16].prefill(prompt, prefix_len=10, load_layer=lambda _, wrong=wrong: wrong)


def test_decoding_refuses_and_the_others_go_on(tiny2, plain, prefills, prompt):
    engine = DecodingEngine(tiny2, max_batch=2, page_size=16, num_pages=6)
    first, kv = prefill(prefills[16], tiny2, prompt)
    engine.join(1, kv, first.token, len(prompt) + 4)
    for request, arguments, error, complaint in (
        (2, (kv, 0, 65), CapacityError, "request 2: 65 tokens need 5 pages, 3 are free"),
        (1, (kv, 0, 41), ValueError, "request 1 is in the batch already"),
        (2, (kv[:3], 0, 41), ValueError, "kv is float32"),
        (2, (kv.astype(np.float16), 0, 41), ValueError, "kv is float16"),
        (2, (kv, 0, 40), ValueError, "request 2: max_context_tokens is 40"),
        (2, (kv, 0, 2049), ValueError, "request 2: max_context_tokens is 2049"),
        (2, (kv, 320, 41), ValueError, "request 2: first_token is 320"),
    ):
        with pytest.raises(error, match=complaint):
            engine.join(request, *arguments)
        engine.check()
    engine.join(2, kv[:, :, :30], 3, 31)
    with pytest.raises(CapacityError, match="request 3: all 2 slots are taken"):
        engine.join(3, kv[:, :, :10], 3, 16)
    tokens = [first.token, engine.step()[1]]
    with pytest.raises(CapacityError, match="request 2: all its 31 tokens are generated"):
        engine.step()
    with pytest.raises(KeyError):
        engine.step([1, 8])
    engine.leave(2)
    tokens += [engine.step()[1] for _ in range(2)]
    assert tokens == plain.greedy(prompt, 4)
    engine.leave(1)
    engine.check()
    assert engine.free_pages == 6 and engine.step() == {}


@pytest.mark.parametrize("name", ["max_batch", "page_size", "num_pages"])
def test_engines_refuse_sizes_below_one(tiny2, name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        DecodingEngine(tiny2, **({"max_batch": 1, "page_size": 1, "num_pages": 1} | {name: 0}))
    with pytest.raises(ValueError, match="prefill_chunk is 0"):
        PrefillEngine(tiny2, 0)


def test_chunks_cover_what_is_not_reused():
    assert plan_chunks(10, 3, 4) == [(3, 4), (7, 3)]
    assert plan_chunks(5, 4, 512) == [(4, 1)]
    assert chunk_buckets(512) == (16, 32, 64, 128, 256, 512)
    assert chunk_buckets(100) == (16, 32, 64, 100)
    assert chunk_buckets(1) == (16,)
