"""`bench serve` and the engine's options, from the outside: every load on a tiny model, in seconds and on a CPU."""

import json
import re

import pytest
from click.testing import CliRunner, Result

from deepinfer_lab.cli import main, options
from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.policy import POLICIES, PRESETS
from deepinfer_lab.lab import serve_bench
from deepinfer_lab.lab.load_spec import OpenLoad

SERVE = ("bench", "serve", "--model", "synthetic:tiny", "--rounds", "1", "--device", "cpu")
SHORT = ("--prompt-tokens", "8", "--output-tokens", "3")
CSV = "timestamp,input_tokens,output_tokens\n0,8,3\n0.5,0,3\n1,12,4\n2,9,2\n"


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """Half a second that these tests do not need."""
    monkeypatch.setattr(serve_bench, "read_bandwidth", lambda _device: 1e9)


@pytest.fixture
def csv(tmp_path) -> str:
    path = tmp_path / "requests.csv"
    path.write_text(CSV, encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def written(tmp_path, *arguments: str) -> tuple[Result, list[dict]]:
    file = tmp_path / "results.json"
    result = run(*SERVE, *arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["provenance"]
    return result, content["results"]


def test_closed_is_the_default_and_sweeps(tmp_path):
    result, rows = written(tmp_path, *SHORT, "--concurrency", "1,3")
    assert [(row["load"], row["concurrency"], row["requests_per_client"]) for row in rows] == [
        ("closed", 1, 2),
        ("closed", 3, 2),
    ]
    assert [row["rounds"][0]["requests"] for row in rows] == [2, 6]
    assert result.output.count("deepinfer-lab ") == 2
    assert "warning" not in result.output


def test_every_setting_that_decides_a_result_is_in_its_row(tmp_path):
    given = {
        "policy": "priority", "itl_target_ms": 7.5, "chunk_tokens": 32, "max_in_flight": 2, "cuda_graphs": False,
        "decode_chain": False, "kv_dtype": "int8",
    }  # fmt: skip
    assert given.keys() == set(options.ENGINE_SETTINGS)
    arguments = []
    for name, value in given.items():
        option = name.replace("_", "-")
        arguments += [f"--no-{option}"] if value is False else [f"--{option}", str(value)]
    result, (row,) = written(tmp_path, *SHORT, "--concurrency", "1", *arguments)
    assert row.items() >= {**given, "prompt_tokens": 8, "output_tokens": 3, "device": "cpu"}.items()
    assert "nothing overlaps without a GPU" in result.output


def test_engine_settings_are_the_engine_s_own_defaults(tmp_path):
    _, (row,) = written(tmp_path, *SHORT, "--concurrency", "1", "--no-prefill-decode-overlap")
    assert {name: row[name] for name in options.ENGINE_SETTINGS} == {
        name: getattr(EngineConfig(), name) for name in options.ENGINE_SETTINGS
    }


@pytest.mark.parametrize(
    ("load", "cv", "extra"), [("poisson", 1.0, ()), ("gamma", 2.0, ()), ("gamma", 3.0, ("--burstiness", "3"))]
)
def test_an_open_load_prints_offered_and_achieved(tmp_path, load, cv, extra):
    result, (row,) = written(tmp_path, "--load", load, "--rate", "200", "--requests", "6", *SHORT, *extra)
    expected = OpenLoad.drawn(load, 200, cv, 6, 8, 3)
    assert (row["load"], row["due"], row["sizes"]) == (load, list(expected.due), [[8, 3]] * 6)
    said = re.search(r"offered ([\d.]+), achieved ([\d.]+); the latest was sent [\d.]+ ms after", result.output)
    assert float(said[1]) == pytest.approx(row["rounds"][0]["offered_rate"], abs=0.01)
    assert float(said[2]) == pytest.approx(row["achieved_rate"], abs=0.01)
    for name in ("TTFT", "TPOT", "ITL"):
        assert re.search(rf"^{name} +\d", result.output, re.MULTILINE)


def test_a_limit_of_concurrency_lowers_the_rate_and_does_not_do_so_silently(tmp_path):
    result, (row,) = written(
        tmp_path, "--load", "poisson", "--rate", "1e6", "--requests", "5", "--max-concurrency", "1", *SHORT
    )
    assert row["kept_up"] is False
    assert row["max_concurrency"] == 1
    assert row["rounds"][0]["max_lateness_s"] > 0
    assert re.search(r"warning: [\d.]+ requests/s is less than the [\d.]+ offered", result.output)


def test_a_trace_is_replayed_with_its_own_sizes(tmp_path, csv):
    result, (row,) = written(tmp_path, "--load", "trace", "--trace-csv", csv, "--speed-up", "100")
    assert (row["due"], row["sizes"], row["skipped"]) == ([0, 0.01, 0.02], [[8, 3], [12, 4], [9, 2]], 1)
    assert row["rounds"][0]["summary"]["output_tokens"] == 9
    assert "1 rows of the trace left out" in result.output
    _, (row,) = written(tmp_path, "--load", "trace", "--trace-csv", csv, "--speed-up", "100", "--limit", "2")
    assert row["sizes"] == [[8, 3], [12, 4]]


def test_one_request_has_no_rate(tmp_path, csv):
    result, _ = written(tmp_path, "--load", "trace", "--trace-csv", csv, "--limit", "1")
    assert "offered -, achieved -" in result.output
    assert "warning" not in result.output


def test_refused_requests_are_said(tmp_path, csv):
    with open(csv, "a", encoding="utf-8") as file:
        file.write("3,4000,1\n")
    result, (row,) = written(tmp_path, "--load", "trace", "--trace-csv", csv, "--speed-up", "100")
    assert row["rounds"][0]["summary"]["errors"] == 1
    assert "warning: 1 of 4 requests failed or were refused" in result.output


def test_insertion_prints_gaps_without_and_with_the_document(tmp_path):
    result, (row,) = written(
        tmp_path, "--load", "insertion", "--readers", "2", "--document-tokens", "200", "--prompt-tokens", "8"
    )
    assert row.items() >= {"load": "insertion", "readers": 2, "document_tokens": 200, "prompt_tokens": 8}.items()
    (found,) = row["rounds"]
    assert found["beside_itl"]["max"] > 0
    assert re.search(r"^steady ITL +\d", result.output, re.MULTILINE)
    assert re.search(r"^ITL beside it +\d", result.output, re.MULTILINE)
    assert f"document's TTFT: {found['document_ttft_s'] * 1e3:.1f} ms" in result.output


def test_a_trace_shows_the_last_round(tmp_path):
    file = tmp_path / "run.json"
    result = run(*SERVE[:4], "--rounds", "2", *SHORT, "--concurrency", "2", "--trace", str(file))
    assert f"trace: {file}" in result.output
    assert "ui.perfetto.dev" in result.output
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    begun = [event["name"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == ["c2-0", "c2-1", "c2-2", "c2-3", "warm-up-0", "warm-up-1"]
    assert {"prefill", "decode"} <= {event["cat"] for event in events if event["ph"] == "X"}


def test_generate_takes_the_engine_s_options_too(tmp_path, smollm2_path):
    file = tmp_path / "answer.json"
    arguments = ("--max-tokens", "3", "--policy", "adaptive", "--chunk-tokens", "4", "--trace", str(file))
    result = CliRunner().invoke(main, ["generate", "The capital of France is", "--raw", *arguments])
    assert result.exit_code == 0, result.output
    assert "trace:" not in result.stdout  # which holds the text alone
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    chunks = [event["args"]["tokens"] for event in events if event["ph"] == "X" and event["cat"] == "prefill"]
    assert max(chunks) <= 4 < sum(chunks)


@pytest.mark.parametrize("command", [("generate",), ("bench", "serve")], ids=" ".join)
def test_help_says_what_every_policy_does(command):
    output = run(*command, "--help").output
    for name in POLICIES:
        assert re.search(rf"^ +{name} +{re.escape(PRESETS[name].summary)}$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "mixed", "--no-prefill-decode-overlap"], ["--policy mixed", "serial"]),
        (["--itl-target-ms", "0"], ["itl_target_ms = 0", "above 0"]),
        (["--max-in-flight", "0"], ["max_in_flight = 0", "1 or more"]),
        (["--chunk-tokens", "-3"], ["chunk_tokens = -3", "1 or more"]),
        (["--kv-dtype", "fp8"], ["fp8", "int8"]),
        (["--load", "burst"], ["burst", "gamma"]),
        (["--load", "poisson", "--rate", "0"], ["rate 0.0", "above 0"]),
        (["--load", "poisson", "--requests", "0"], ["requests 0", "1 or more"]),
        (["--load", "poisson", "--max-concurrency", "0"], ["max-concurrency", "0"]),
        (["--load", "gamma", "--burstiness", "0"], ["cv 0.0", "0.01 to 100"]),
        (["--load", "trace"], ["--trace-csv FILE"]),
        (["--load", "trace", "--trace-csv", "nowhere.csv"], ["nowhere.csv"]),
        (["--load", "trace", "--trace-csv", __file__], ["line 1", "timestamp, input_tokens, output_tokens"]),
        (["--load", "insertion", "--readers", "0"], ["readers 0", "1 or more"]),
        (["--load", "insertion"], ["2048", "512"]),
        (["--prompt-tokens", "600"], ["all 2 requests failed", "ContextOverflow", "512"]),
        (["--trace", "no/such/folder/t.json"], ["t.json", "no/such/folder", "exists"]),
        (["--json", "no/such/folder/r.json"], ["r.json", "no/such/folder"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_input_is_one_line_that_names_the_value_and_what_is_allowed(arguments, said):
    result = run(*SERVE, *arguments)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    for part in said:
        assert part in result.output


@pytest.mark.parametrize(
    ("load", "option"),
    [
        ("closed", "--rate"), ("closed", "--readers"), ("poisson", "--burstiness"), ("poisson", "--concurrency"),
        ("trace", "--requests"), ("trace", "--output-tokens"), ("insertion", "--speed-up"), ("gamma", "--limit"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(load, option):
    result = run(*SERVE, "--load", load, option, "3")
    assert result.exit_code == 2
    assert f"{option} does nothing with --load {load}" in result.output


def test_transformers_is_compared_under_the_closed_load_alone():
    result = run(*SERVE, "--load", "poisson", "--against", "transformers")
    assert result.exit_code == 2
    assert "--against does nothing with --load poisson: it is for closed" in result.output
