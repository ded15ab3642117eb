"""What of mpiexec's standard error reaches the user."""

from mooncake_jax.cluster.mpi_warnings import without_known_warnings

RULE = "-" * 74 + "\n"
KNOWN = [RULE, "WARNING: The selected 'osc' module 'sm' is not tested for post-failure\n", "operation, ...\n", RULE]
OTHER = [RULE, "There are not enough slots available in the system\n", RULE]


def kept(*lines):
    return list(without_known_warnings(lines))


def test_only_the_known_warning_is_left_out():
    lines = [
        "one\n",
        *OTHER,
        "two\n",
        "4 more processes have sent help message help-mpi-ft.txt / module:untested:failundef\n",
    ]
    assert kept(*KNOWN, *lines, *KNOWN, "three\n") == ["one\n", *OTHER, "two\n", "three\n"]


def test_a_warning_that_does_not_end_is_not_kept_back():
    assert kept(RULE, "half\n") == [RULE, "half\n"]
    long = [RULE, *(f"{i}\n" for i in range(100))]
    assert kept(*long) == long
