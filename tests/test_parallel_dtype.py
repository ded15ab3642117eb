"""--dtype=auto: what is measured is told, and the faster dtype is taken."""

from mooncake_jax.parallel.dtype import DTYPES, choose_dtype, faster


def test_the_smaller_product_of_times_wins():
    assert faster({"float32": 2.0, "bfloat16": 1.0}, {"float32": 1.0, "bfloat16": 1.5}) == "bfloat16"
    assert faster({"float32": 2.0, "bfloat16": 1.0}, {"float32": 1.0, "bfloat16": 3.0}) == "float32"
    assert faster({"float32": 1.0, "bfloat16": 1.0}, {"float32": 1.0, "bfloat16": 1.0}) == "float32"


def test_this_machine_has_a_faster_one():
    choice = choose_dtype()
    assert choice.dtype == faster(choice.prefill_s, choice.decoding_s)
    for seconds in (choice.prefill_s, choice.decoding_s):
        assert set(seconds) == set(DTYPES) and min(seconds.values()) > 0
    assert str(choice).startswith(choice.dtype) and "bfloat16: prefill" in str(choice)
