"""Azure's CSV: both years' ways to write it, and what a bad line is told as."""

import warnings

import pytest

from mooncake_jax.errors import UsageError
from mooncake_jax.workload.azure import read_azure, write_azure
from mooncake_jax.workload.trace import TraceRow

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:17:03.9799600,4808,10"


def write(tmp_path, *lines, header=HEADER, end="\n"):
    path = tmp_path / "azure.csv"
    path.write_text("".join(line + end for line in (header, *lines)), newline="")
    return path


def test_reads_2023(tmp_path):
    path = write(tmp_path, GOOD, "2023-11-16 18:17:04.0319600,3180,8", "", "2023-11-16 18:17:05.0319605,0,0")
    assert read_azure(path) == [
        TraceRow(0, 4808, 10, (), 0),
        TraceRow(52, 3180, 8, (), 1),
        TraceRow(1052, 0, 0, (), 2),
    ]
    assert len(read_azure(path, limit=2)) == 2


def test_reads_2024_with_its_time_zone_and_other_line_ends(tmp_path):
    rows = ("2024-05-10 00:00:00.009930+00:00,2162,5", "2024-05-10 00:00:00+00:00,2399,6")
    path = write(tmp_path, *rows, header="\ufeff" + HEADER, end="\r\n")
    with pytest.warns(UserWarning, match="1 of 2 rows were out of order"):
        assert read_azure(path) == [TraceRow(0, 2399, 6, (), 1), TraceRow(9.93, 2162, 5, (), 0)]


def test_writes_what_it_reads(tmp_path):
    rows = [TraceRow(0, 700, 3, (1, 2), 0), TraceRow(1.5, 0, 2, (), 1), TraceRow(90_000_000, 512, 0, (9,), 2)]
    write_azure(tmp_path / "out.csv", rows)
    assert (tmp_path / "out.csv").read_text().splitlines()[:3] == [
        HEADER,
        "1970-01-01 00:00:00.0000000,700,3",
        "1970-01-01 00:00:00.0015000,0,2",
    ]
    back = read_azure(tmp_path / "out.csv")
    assert [(row.timestamp, row.input_length, row.output_length) for row in back] == [
        (row.timestamp, row.input_length, row.output_length) for row in rows
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("2023-11-16 18:17:04,5", "has 2 columns"),
        (GOOD + ",1", "has 4 columns"),
        ("yesterday,5,5", 'TIMESTAMP is "yesterday"'),
        ("2023-13-16 18:17:04,5,5", 'TIMESTAMP is "2023-13-16 18:17:04"'),
        ("2023-11-16 18:17:04+00:00,5,5", "has a time zone or lacks it, unlike the first row"),
        ("2023-11-16 18:17:04,5.0,5", 'ContextTokens is "5.0"'),
        ("2023-11-16 18:17:04,-5,5", 'ContextTokens is "-5"'),
        ("2023-11-16 18:17:04,,5", 'ContextTokens is ""'),
        ("2023-11-16 18:17:04,5,5000000000", 'GeneratedTokens is "5000000000"'),
        ("2023-11-16 18:17:04,5,\u0665", "GeneratedTokens is"),
        ("\udcff,5,5", "TIMESTAMP is"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, line, told):
    path = tmp_path / "azure.csv"
    path.write_bytes(f"{HEADER}\n{GOOD}\n\n{line}\n".encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as raised:
        read_azure(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 4: ") and told in message and "\n" not in message


def test_empty_absent_and_foreign_files(tmp_path):
    with pytest.raises(UsageError, match="the trace is empty"):
        read_azure(write(tmp_path))
    with pytest.raises(UsageError, match="cannot be read"):
        read_azure(tmp_path / "absent.csv")
    for header in ("", "time,in,out", '{"timestamp": 1}'):
        with pytest.raises(UsageError, match=f"line 1: the header is .*it must be {HEADER}"):
            read_azure(write(tmp_path, GOOD, header=header))
    with pytest.raises(UsageError, match="--limit=0"):
        read_azure(write(tmp_path, GOOD), limit=0)


@pytest.mark.traces
@pytest.mark.parametrize(("name", "count", "most"), [("code", 8_819, 7_437), ("conv", 19_366, 14_050)])
def test_whole_traces_read(traces, name, count, most):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # both are sorted
        rows = read_azure(traces / f"AzureLLMInferenceTrace_{name}.csv")
    assert len(rows) == count and max(row.input_length for row in rows) == most
    assert rows[0].timestamp == 0 and 3_400_000 < rows[-1].timestamp < 3_600_000
