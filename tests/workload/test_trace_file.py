"""Trace files: three formats, times that start at 0, and errors that say where."""

import csv
import math
import time
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_lab.errors import SettingError
from deepinfer_lab.workload.trace_file import Arrival, read_trace

OURS = "timestamp,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path):
    """Reads a trace with this content."""

    def read(content, **options):
        path = tmp_path / "trace.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_trace(path, **options)

    return read


def test_our_own_columns(trace):
    found = trace(OURS + "10,5,7\n12.5,6,8\n")
    assert found.arrivals == (Arrival(0.0, 5, 7), Arrival(2.5, 6, 8))
    assert found.skipped == 0


def test_azure_2023_has_tenths_of_microseconds_and_no_zone(trace):
    found = trace(AZURE + "2023-11-16 23:59:59.5000009,374,44\n2023-11-17 00:00:01.7500000,396,109\n")
    assert [(each.input_tokens, each.output_tokens) for each in found.arrivals] == [(374, 44), (396, 109)]
    assert [each.at_s for each in found.arrivals] == pytest.approx([0, 2.25], abs=1e-6)


def test_azure_2024_names_its_zone_and_leaves_out_a_fraction_of_zero(trace):
    found = trace(AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,9,6\n")
    assert [each.at_s for each in found.arrivals] == pytest.approx([0, 0.99007], abs=1e-6)


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="this system cannot change its time zone in a process")
def test_no_zone_is_utc_whatever_the_machine_thinks(trace, monkeypatch):
    with monkeypatch.context() as there:
        there.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # on that night, clocks went from 02:00 to 03:00
        time.tzset()
        found = trace(AZURE + "2024-03-31 01:30:00,1,1\n2024-03-31 03:30:00,1,1\n2024-03-31 06:30:00+02:00,1,1\n")
    time.tzset()
    assert [each.at_s for each in found.arrivals] == [0, 7200, 10800]


def test_burstgpt_marks_failed_requests_by_no_response(trace):
    rows = "5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,300,0,300,API log\n45.5,ChatGPT,1087,230,1317,Conversation log\n"
    found = trace(BURST + rows)
    assert found.arrivals == (Arrival(0.0, 472, 18), Arrival(40.5, 1087, 230))
    assert found.skipped == 1


def test_columns_may_stand_anywhere_among_others(trace):
    header = "Log Type,Response tokens,Session ID,Timestamp,Request tokens\n"
    assert trace(header + '"a, b",3,x,9,2\n').arrivals == (Arrival(0.0, 2, 3),)


def test_no_prompt_can_be_empty(trace):
    found = trace(OURS + "0,0,5\n1,4,5\n")
    assert found.arrivals == (Arrival(0.0, 4, 5),)
    assert found.skipped == 1


def test_rows_out_of_order_are_sorted_and_equal_times_keep_theirs(trace):
    found = trace(OURS + "5,1,1\n3,2,2\n5,3,3\n4,4,4\n")
    assert [(each.at_s, each.input_tokens) for each in found.arrivals] == [(0, 2), (1, 4), (2, 1), (2, 3)]


def test_the_limit_counts_requests_and_reads_nothing_behind_them(trace):
    found = trace(OURS + "0,1,0\n1,1,1\n2,1,0\n3,1,1\nnonsense\n", limit=2)
    assert [each.at_s for each in found.arrivals] == [0, 2]
    assert found.skipped == 2
    assert len(trace(OURS + "1,1,1\n", limit=9).arrivals) == 1


def test_speed_up_divides_times(trace):
    assert [each.at_s for each in trace(OURS + "1,1,1\n3,1,1\n", speed_up=4).arrivals] == [0, 0.5]
    assert [each.at_s for each in trace(OURS + "1,1,1\n3,1,1\n", speed_up=0.5).arrivals] == [0, 4]


@pytest.mark.parametrize("content", ["\ufeff" + OURS + "1,2,3\n", OURS.replace("\n", "\r\n") + "\r\n1,2,3\r\n\r\n"])
def test_byte_order_marks_windows_lines_and_empty_ones(trace, content):
    assert trace(content).arrivals == (Arrival(0.0, 2, 3),)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=30
    ).filter(lambda rows: any(i and o for _, i, o in rows)),
    st.booleans(),
)
def test_what_was_written_is_read(tmp_path_factory, rows, azure):
    """Times in microseconds; written as date-times or as seconds."""
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((AZURE if azure else OURS).strip().split(","))
        for at, i, o in rows:
            moment = datetime(2024, 2, 29) + timedelta(microseconds=at)
            writer.writerow((moment.isoformat(" ") if azure else at / 1e6, i, o))
    found = read_trace(path)
    kept = sorted((row for row in rows if row[1] and row[2]), key=lambda row: row[0])
    assert [(each.input_tokens, each.output_tokens) for each in found.arrivals] == [row[1:] for row in kept]
    assert [each.at_s for each in found.arrivals] == pytest.approx(
        [(row[0] - kept[0][0]) / 1e6 for row in kept], abs=1e-6
    )
    assert found.arrivals[0].at_s == 0
    assert found.skipped == len(rows) - len(kept)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OURS + "1,2,3\n2,x,3\n", "trace.csv, line 3, column 'input_tokens': 'x', expected an integer of 0 or more"),
        (OURS + "1,2,-3\n", "line 2, column 'output_tokens': '-3', expected an integer of 0 or more"),
        (OURS + "1,2.5,3\n", "line 2, column 'input_tokens': '2.5'"),
        (OURS + ",2,3\n", "line 2, column 'timestamp': '', expected a number of seconds"),
        (OURS + "nan,2,3\n", "line 2, column 'timestamp': 'nan', expected a number of seconds"),
        (OURS + "1e999,2,3\n", "line 2, column 'timestamp': '1e999'"),
        (OURS + "2023-11-16 18:15:46,2,3\n", "line 2, column 'timestamp': '2023-11-16 18:15:46'"),
        (AZURE + "12.5,2,3\n", "line 2, column 'TIMESTAMP': '12.5', expected a date and time"),
        (BURST + "1,m,2,,2,log\n", "line 2, column 'Response tokens': '', expected an integer of 0 or more"),
        (OURS + "1,2\n", "line 2: 2 fields, expected 3"),
        (OURS + "\n1,2,3,4\n", "line 3: 4 fields, expected 3"),
        (OURS + '1,2,"3\n', "line 2: unexpected end of data; expected CSV"),
        (OURS + '1,2,"3"4\n', "line 2: .*; expected CSV"),
        ("a,b\n1,2\n", "line 1: the columns are a, b; allowed are timestamp, input_tokens, output_tokens; TIMESTAMP"),
        ("timestamp,ContextTokens,Response tokens\n", "line 1: the columns are timestamp, ContextTokens"),
        ("", "line 1: the columns are none"),
        (OURS, "no request, and 0 rows without"),
        (OURS + "1,2,0\n", "no request, and 1 rows without"),
        (b"timestamp\xff", "not UTF-8"),
    ],
)
def test_files_that_are_no_trace(trace, content, message):
    with pytest.raises(SettingError, match=message):
        trace(content)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingError, match="nowhere: cannot be read"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(SettingError, match="cannot be read"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit 0: allowed is 1 or more"),
        ({"speed_up": 0.0}, "speed_up 0.0: allowed is above 0"),
        ({"speed_up": math.nan}, "speed_up nan: allowed"),
        ({"speed_up": math.inf}, "speed_up inf: allowed"),
    ],
)
def test_options_that_are_not_allowed(trace, options, message):
    with pytest.raises(SettingError, match=message):
        trace(OURS + "1,2,3\n", **options)
