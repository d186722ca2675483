"""The command line, from the outside."""

import json

import click
import pytest
import torch
from click.testing import CliRunner, Result

from deepinfer_lab.cli import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def commands(group: click.Group = main, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found.append((*prefix, name))
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
    return found


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_explains_every_command_and_every_option(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    found = main
    for name in command:
        found = found.commands[name]
    assert found.help
    assert all(option.help for option in found.params if isinstance(option, click.Option))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "hello", "--model", "nope"], ["'nope'", "smollm2-135m", ".gguf"]),
        (["generate", "hello", "--model", "synthetic:nope"], ["synthetic:nope", "synthetic:qwen2.5-3b"]),
        (["generate", "hello", "--bits", "w5"], ["w5", "w4", "mixed"]),
        (["generate", "hello", "--device", "tpu"], ["tpu", "cpu", "cuda"]),
        (["generate", "hello", "--model", "synthetic:tiny", "--group", "128"], ["K = 64", "128"]),
        (["generate", "hello", "--model", "synthetic:tiny", "--bits", "none"], ["no tokenizer"]),
        (["generate", "hello", "--max-tokens", "0"], ["max_tokens = 0", "at least 1"]),
        (["generate", "hello", "--temperature", "-1"], ["temperature = -1"]),
        (["generate", "hello", "--top-p", "1.5"], ["top_p = 1.5", "at most 1"]),
        (["run", "--param", "concurrency"], ["concurrency", "name=value"]),
        (["run", "--only", "99"], ["99", "00_serve_a_real_model"]),
        (["run", "--only", "00", "--param", "speed=3"], ["speed", "concurrency"]),
        (["run", "--only", "00", "--param", "prompt_tokens=many"], ["prompt_tokens", "many"]),
        (["bench", "serve", "--concurrency", "0"], ["'0'", "1 or more"]),
        (["bench", "serve", "--rounds", "0"], ["0", "1 or more"]),
        (["bench", "serve", "--policy", "fastest"], ["fastest", "serial"]),
        (["bench", "serve", "--prompt-tokens", "0"], ["prompt-tokens 0", "1 or more"]),
        (["quality", "--model", "synthetic:tiny"], ["synthetic:tiny", "no tokenizer"]),
        (["quality", "--model", "synthetic:tiny", "--group", "128"], ["K = 64", "128"]),
        (["quality", "--model", "synthetic:tiny", "--bits", "w4,w5"], ["w5", "w4", "mixed"]),
        (["quality", "--model", "synthetic:tiny", "--bits", "w4,,w3"], ["w4,,w3", "separated by commas"]),
        (
            ["quality", "--model", "synthetic:tiny", "--json", "/no/such/folder/a.json"],
            ["/no/such/folder", "no folder"],
        ),
        (["quality", "--model", "synthetic:tiny", "--method", "rtn,awq"], ["awq", "rtn", "scale-search", "gptq"]),
        (["kernels", "--arch", "sm_1"], ["sm_1", "sm_90"]),
        (["kernels", "--explain", "4,16"], ["4,16", "four"]),
        (["kernels", "--explain", "4,8,5632,2047"], ["K = 2047", "multiple", "32, 64, 128"]),
        (["kernels", "--explain", "4,8,-5,2048"], ["N = -5", "1 or more"]),
        (["kernels", "--explain", "4,8,5632,2048", "--group", "48"], ["group 48", "32, 64, 128"]),
        (["kernels", "--warm", "--arch", "sm_1"], ["sm_1", "sm_90"]),
        (["kernels", "--explain", "4,16,64,64", "--warm"], ["--warm does nothing", "--explain"]),
        (["kernels", "--dispatch", "article"], ["--dispatch does nothing", "--explain"]),
        (["tune"], ["--model", "--shape"]),
        (["tune", "--model", "synthetic:tiny", "--shape", "64x64"], ["either --model or --shape"]),
        (["tune", "--shape", "64"], ["'64'", "5632x2048"]),
        (["tune", "--shape", "0x64"], ["'0x64'", "5632x2048"]),
        (["tune", "--shape", "64x64", "--bits", "w4,w5"], ["w5", "w3, w4"]),
        (["tune", "--shape", "64x64", "--m", "2,4"], ["'2,4'", "needs 1 and"]),
        (["tune", "--shape", "64x64", "--m", "1"], ["'1'", "one larger"]),
        (["tune", "--shape", "64x64", "--output", "/no/such/folder/a.json"], ["/no/such/folder", "no folder"]),
        (["bench", "kernels", "--against", "marlin"], ["'marlin'", "tinygemm, humming, gemlite"]),
        (["bench", "kernels", "--shapes", "64x64,7"], ["'7'", "5632x2048"]),
        (["bench", "kernels", "--bits", "w2"], ["w2", "w3, w4"]),
        (["bench", "kernels", "--m", "0"], ["'0'", "1 or more"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0] in main.commands else "",
)
def test_bad_input_is_one_line_that_names_the_value_and_what_is_allowed(arguments, said):
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    for part in said:
        assert part in result.output


def test_an_empty_prompt_is_refused(smollm2_path):
    result = run("generate", "", "--raw")
    assert result.exit_code == 1
    assert "holds no tokens" in result.output


def test_quantise_writes_a_folder_that_loads_and_refuses_other_bits(tmp_path):
    folder = str(tmp_path / "tiny-w3")
    done = run("quantise", "synthetic:tiny", folder, "--bits", "w3", "--group", "32")
    assert done.exit_code == 0
    assert "quantised.safetensors" in done.output
    refused = run("generate", "x", "--model", folder, "--bits", "w4", "--group", "32")
    assert refused.exit_code == 1
    assert "3 bits" in refused.output
    assert "w3" in refused.output


def test_list_and_info_name_what_there_is():
    listing = run("list").output
    for name in ("00_serve_a_real_model", "serve_real_model", "few_bits", "smollm2-135m", "serial"):
        assert name in listing
    facts = json.loads(run("info", "--json").output)
    assert {"device", "torch", "python", "records", "model cache"} <= facts.keys()


def test_explain_says_which_kernel_and_why():
    assert "w4_mma_small" in run("kernels", "--explain", "4,16,5632,2048").output
    assert "w4_tiled_gemm" in run("kernels", "--explain", "4,16,5632,2048", "--dispatch", "article").output


def test_explain_speaks_of_the_table_that_it_is_given(tmp_path):
    table = tmp_path / "dispatch.json"
    table.write_text(
        '{"schema_version": 1, "rows": [{"bits": 4, "m_min": 1, "m_max": null, "kernel": "dequant_cublas"}]}'
    )
    found = run("kernels", "--explain", "4,16,5632,2048", "--dispatch", str(table)).output
    assert "dequant_cublas, the table's row for M of 1 and more" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["tune", "--shape", "64x64"], ["bench", "kernels", "--against", "tinygemm"]])
def test_what_needs_a_gpu_says_so(arguments):
    result = run(*arguments)
    assert result.exit_code == 1
    assert "measures on a CUDA GPU" in result.output


def test_warming_compiles_every_kernel_once(tmp_path, monkeypatch):
    from deepinfer_lab.kernels import compiler
    from deepinfer_lab.kernels.ops_catalogue import COMPILED, runs_on

    compiled = []
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *pair: compiled.append(pair))
    said = run("kernels", "--warm", "--arch", "sm_86", "--arch", "sm_90").output
    expected = [
        (name, arch) for arch in ("sm_86", "sm_90") for name, kernel in COMPILED.items() if runs_on(kernel, arch)
    ]
    assert sorted(compiled) == sorted(expected)
    assert f"{len(COMPILED)} kernels for sm_86, sm_90 are in {tmp_path}" in said
