"""The experiment of quantisation quality, whole and in parts, on a tiny model that reads bytes."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from deepinfer_lab.cli import main
from deepinfer_lab.errors import QuantisationError, SettingError
from deepinfer_lab.lab.experiment import complete
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.quantisation_quality import (
    QUANTISATION_QUALITY,
    evaluation_tokens,
    planned,
    sensitivity,
    unit_of,
)
from deepinfer_lab.lab.record import check_row
from deepinfer_lab.metrics.quality import compare
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.calibration import SKIPPED, default_calibration
from deepinfer_lab.model.load import open_source
from deepinfer_lab.model.reference_text import reference_text
from deepinfer_lab.model.source import dense_shapes, linear_layers, linear_shape
from deepinfer_lab.model.synthetic import SHAPES, SyntheticSource
from deepinfer_lab.quant.plan import plan_named
from deepinfer_lab.quant.planner import Unit

CONFIG = dataclasses.replace(SHAPES["tiny"], tied_embeddings=False)
UNITS = ["qkv", "o", "gate_up", "down"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model in Hugging Face format with a token for every byte."""
    path, source = tmp_path_factory.mktemp("tiny"), SyntheticSource(CONFIG, "tiny")
    names = [*(name for name, _ in dense_shapes(CONFIG)), *(f"{layer}.weight" for layer in linear_layers(CONFIG))]
    save_file({name: source.tensor(name) for name in names}, path / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": CONFIG.vocab_size, "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size, "num_hidden_layers": CONFIG.num_layers,
        "num_attention_heads": CONFIG.num_heads, "num_key_value_heads": CONFIG.num_kv_heads,
        "max_position_embeddings": CONFIG.max_context, "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.rope_theta, "tie_word_embeddings": False,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    return path


SMALL = {
    "methods": ["rtn", "gptq"], "bits": ["w4", "w3"], "group": 64, "other_groups": [32], "fractions": [0.5],
    "eval_tokens": 200, "window": 64, "sensitivity_tokens": 100, "new_tokens": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(folder) -> list[dict]:
    return list(QUANTISATION_QUALITY.measure(complete(QUANTISATION_QUALITY, {"model": str(folder), **SMALL})))


def test_it_is_registered():
    assert EXPERIMENTS["quantisation_quality"] is QUANTISATION_QUALITY


def test_rows_come_in_order_and_fit_a_record(rows):
    for row in rows:
        check_row(row, "here")
    quality = [(r["bits"], r["method"], r["group"]) for r in rows if r["row"] == "quality"]
    assert quality == [
        ("none", None, None),
        ("w4", "rtn", 64), ("w3", "rtn", 64), ("w4", "gptq", 64), ("w3", "gptq", 64),
        ("w4", "gptq", 32), ("w3", "gptq", 32), ("planned-0.5", "gptq", 64),
    ]  # fmt: skip
    assert [r["row"] for r in rows] == ["quality"] * 7 + ["sensitivity"] * 8 + ["quality"]
    assert [(r["block"], r["unit"]) for r in rows[7:15]] == [(block, unit) for block in (0, 1) for unit in UNITS]
    assert all(r["sample"] for r in rows if r["row"] == "quality")


def test_the_model_is_no_distance_from_itself_and_bits_are_what_decides(rows):
    none, rtn4, rtn3, gptq4, gptq3, fine4, fine3, mix = [r for r in rows if r["row"] == "quality"]
    assert (none["kl"], none["top1"], none["quantise_s"]) == (0.0, 1.0, None)
    for four, three in [(rtn4, rtn3), (gptq4, gptq3), (fine4, fine3)]:
        assert 0 < four["kl"] < three["kl"]
        assert four["bytes"] > three["bytes"]
    assert gptq3["kl"] < rtn3["kl"]
    assert rtn4["bytes"] == gptq4["bytes"] < fine4["bytes"]  # twice the scales
    assert gptq3["bytes"] < mix["bytes"] < gptq4["bytes"]
    assert gptq4["kl"] < mix["kl"] < gptq3["kl"]


def test_sensitivities_add_up_to_the_model_in_bytes(rows):
    by_bits = {r["bits"]: r["bytes"] for r in rows if r["row"] == "quality" and r["group"] == 64}
    found = [r for r in rows if r["row"] == "sensitivity"]
    assert sum(r["bytes3"] for r in found) == by_bits["w3"]
    assert sum(r["bytes4"] for r in found) == by_bits["w4"]
    assert all(r["kl"] > 0 for r in found)


def test_the_planned_mix_is_what_its_row_says(rows):
    found = {f"{r['block']}.{r['unit']}": r for r in rows if r["row"] == "sensitivity"}
    mix = rows[-1]
    assert mix["bytes"] == sum(r["bytes4" if name in mix["in_w4"] else "bytes3"] for name, r in found.items())
    assert 0 < len(mix["in_w4"]) < 8
    plan = planned([unit_of(r) for r in found.values()], 0.5)
    assert {layer for layer, bits in plan.bits.items() if bits == 4} == {
        layer for name in mix["in_w4"] for layer in unit_of(found[name]).layers
    }
    assert set(plan.bits) == set(linear_layers(CONFIG))


def test_a_sensitivity_is_that_of_the_model_with_this_unit_in_w3(folder):
    """Against a decoder built in one go, in which every other layer keeps its own weights."""
    source, tokens = open_source(str(folder)), list(b"what is measured here, and what not?")
    where = {"group": 64, "device": torch.device("cpu"), "dtype": torch.float32}
    dense = build_decoder(source, plan_named("none"), **where)
    found = list(sensitivity(source, dense, tokens, 16, group=64, method="rtn"))
    assert found == list(sensitivity(source, dense, tokens, 16, group=64, method="rtn"))
    assert len({r["kl"] for r in found}) == len(found) == 8
    for row in found:
        plan = dataclasses.replace(planned([unit_of(row)], 0), name=row["unit"])
        kl = compare(build_decoder(source, plan, **where), dense, tokens, 16).kl
        assert row["kl"] == pytest.approx(kl, rel=1e-5)
        shapes = [linear_shape(CONFIG, layer) for layer in unit_of(row).layers]
        assert row["bytes3"] == sum(n * (k * 3 // 8 + 2 * k // 64) for n, k in shapes)
        assert row["bytes4"] == sum(n * (k * 4 // 8 + 2 * k // 64) for n, k in shapes)


def test_no_method_has_seen_what_is_evaluated(folder):
    tokenizer = open_source(str(folder)).tokenizer
    text = tuple(tokenizer.encode(reference_text()))
    longest = evaluation_tokens(tokenizer, SKIPPED)
    assert longest == text[:SKIPPED]
    assert default_calibration(tokenizer).windows[0] == text[SKIPPED : SKIPPED + 512]
    for count in (SKIPPED + 1, 1, 0, -5):
        with pytest.raises(SettingError, match=f"{count} tokens to evaluate: allowed are 2 to {SKIPPED}"):
            evaluation_tokens(tokenizer, count)


def test_plans_between_the_ends():
    units = [Unit((f"l{i}",), 30, 40, float(i)) for i in range(4)]
    for fraction, in_w4 in [(0, []), (0.2, []), (0.25, ["l3"]), (0.5, ["l2", "l3"]), (1, ["l1", "l2", "l3"])]:
        plan = planned(units, fraction)
        assert plan.name == f"planned-{fraction}"
        assert [layer for layer, bits in plan.bits.items() if bits == 4] == in_w4  # l0 loses nothing in W3
    for fraction in (-0.1, 1.01):
        with pytest.raises(SettingError, match=f"fraction {fraction}: allowed are 0"):
            planned(units, fraction)


def test_what_cannot_be_measured_fails_before_anything_is(folder):
    for changes, error, said in [
        ({"other_groups": [128]}, QuantisationError, "K = 64 is not a multiple of group 128"),
        ({"group": 48}, QuantisationError, "group 48"),
        ({"model": "synthetic:tiny"}, SettingError, "synthetic:tiny' has no tokenizer"),
        ({"eval_tokens": 9000}, SettingError, "9000 tokens"),
    ]:
        params = complete(QUANTISATION_QUALITY, {"model": str(folder), **SMALL, **changes})
        with pytest.raises(error, match=said):
            next(iter(QUANTISATION_QUALITY.measure(params)))


def test_the_command_prints_a_row_for_every_method_and_plan_and_keeps_them(folder, tmp_path):
    result = CliRunner().invoke(
        main,
        ["quality", "--model", str(folder), "--bits", "w4,mixed", "--method", "rtn", "--tokens", "100",
         "--beginning", "So", "--json", str(tmp_path / "q.json")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "100 tokens" in lines[0]
    assert "windows of 512" in lines[0]  # the model's whole context is less than 1,024
    assert [line.split()[:2] for line in lines[2:5]] == [["none", "-"], ["w4", "rtn"], ["mixed", "rtn"]]
    kept = json.loads((tmp_path / "q.json").read_text())
    assert [row["bits"] for row in kept["results"]] == ["none", "w4", "mixed"]
    assert kept["provenance"]["device"]
    for line, row in zip(lines[2:5], kept["results"], strict=True):
        assert f"{row['perplexity']:.2f}" in line
        assert f"{row['kl']:.4f}" in line
    assert lines[6] == "So ..."
    assert [line.split()[0] for line in lines[7:10]] == ["none", "w4", "mixed"]
