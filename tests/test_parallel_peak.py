"""The peak that MFU is a share of: a rate, and one that more devices do not come by for nothing."""

import jax
import pytest

from mooncake_jax.parallel.peak import measure_peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_of_products(dtype):
    assert 1e7 < measure_peak(jax.local_devices()[:1], dtype) < 1e17


def test_a_device_named_twice_computes_twice_as_much_in_more_time():
    [device] = jax.local_devices()[:1]
    once, twice = (max(measure_peak([device] * times, "float32") for _ in range(3)) for times in (1, 2))
    assert 0.2 < twice / once < 5
