"""GPTQ, AWQ and compressed-tensors folders: read exactly, or refused by name."""

import random
import re

import numpy as np
import pytest
import torch
from checkpoints import edit_json, fallback_tokenizer
from few_bit_checkpoints import config, interleaved, stream, write

from deepinfer_lab.errors import CheckpointError, QuantisationError, UnsupportedArchitecture
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model import quantised
from deepinfer_lab.model.few_bit_source import FewBitSource, is_few_bit
from deepinfer_lab.model.hf_source import HfSource
from deepinfer_lab.model.load import load_model
from deepinfer_lab.model.resolve import resolve
from deepinfer_lab.model.source import PackedSource, linear_layers
from deepinfer_lab.model.step_input import Span, StepInput
from deepinfer_lab.quant.plan import plan_named

CPU = torch.device("cpu")
METHODS = ("gptq", "awq", "compressed-tensors")
VALUES = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
SCALES = {"gptq": "scales", "awq": "scales", "compressed-tensors": "weight_scale"}
DOWN, UP, O_PROJ = (f"model.layers.1.{name}" for name in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"))


def logits(folder, bits: str, group: int = 64) -> torch.Tensor:
    decoder = load_model(str(folder), bits=bits, group=group, device="cpu").decoder
    pool = KVPool(decoder.kv_shape, 2, 16, CPU)
    step = StepInput.build([Span(list(range(20)), 0, [1, 0], all_logits=True)], 16, CPU)
    return decoder.forward(step, pool)


def scattered(k: int, group: int, seed: int = 3) -> list[int]:
    groups = [channel // group for channel in range(k)]
    random.Random(seed).shuffle(groups)
    return groups


@pytest.mark.parametrize(
    ("method", "bits", "group", "architecture", "options"),
    [
        ("gptq", 4, 32, "llama", {}),
        ("gptq", 4, 128, "qwen2", {"desc_act": True, "sym": False}),
        ("gptq", 3, 64, "qwen3", {}),
        ("gptq", 3, 128, "llama", {"zero_stored_less": 0, "checkpoint_format": "gptq_v2"}),
        ("gptq", 4, 64, "llama", {"zero_stored_less": 0, "checkpoint_format": "gptq_v2", "dynamic": {"-:lm_head": {}}}),
        ("awq", 4, 32, "qwen2", {"version": "GEMM"}),
        ("awq", 4, 128, "llama", {}),
        ("compressed-tensors", 4, 64, "qwen3", {"scale_dtype": torch.bfloat16}),
        ("compressed-tensors", 4, 128, "llama", {"scale_dtype": torch.float32}),
    ],
)
def test_weights_and_answers_are_those_of_the_float_model(tmp_path, method, bits, group, architecture, options):
    checkpoint = write(tmp_path / "packed", method, bits=bits, group=group, architecture=architecture, **options)
    source = resolve(str(checkpoint.folder))
    assert isinstance(source, FewBitSource)
    assert isinstance(source, PackedSource)
    assert source.name == "packed"
    for layer in linear_layers(source.config):
        weight = source.packed(layer, bits, group)
        assert weight.scales.dtype == torch.float16
        assert weight.scales.is_contiguous()
        assert weight.packed.is_contiguous()
        assert torch.equal(weight.dequantise(torch.float32), checkpoint.meant[f"{layer}.weight"]), layer
    for name in checkpoint.meant.keys() & checkpoint.tensors.keys():
        assert torch.equal(source.tensor(name), checkpoint.meant[name]), name
    assert torch.equal(source.tensor("lm_head.weight"), checkpoint.meant["model.embed_tokens.weight"])
    dense = checkpoint.save_meant(tmp_path / "dense")
    assert torch.equal(logits(checkpoint.folder, f"w{bits}", group), logits(dense, "none"))


def test_the_packers_of_these_tests_against_words_written_by_hand():
    """AutoGPTQ: value 10 of 32 ends a word with its low two bits, value 21 with its lowest one."""
    values = np.zeros((1, 32), dtype=int)
    values[0, [10, 21, 31]] = 0b110, 0b011, 0b101
    assert stream(values, 3).tolist() == [[-(2**31), -(2**31) + 0b1, (0b101 << 29) + 0b01 - 2**32]]
    assert stream(np.arange(8)[None], 4).tolist() == [[0x76543210]]
    assert interleaved(np.arange(8)[None]).tolist() == [[0x75316420]]


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_scattered_groups_of_down_proj_are_folded(tmp_path, method):
    orders = {DOWN: scattered(256, 64)}
    checkpoint = write(tmp_path / "packed", method, orders=orders, desc_act=True)
    source = resolve(str(checkpoint.folder))
    order = torch.tensor(orders[DOWN]).argsort(stable=True)
    meant = checkpoint.meant
    assert torch.equal(source.packed(DOWN, 4, 64).dequantise(torch.float32), meant[f"{DOWN}.weight"][:, order])
    for layer in (UP, UP.replace("up", "gate")):
        assert torch.equal(source.packed(layer, 4, 64).dequantise(torch.float32), meant[f"{layer}.weight"][order])
    assert source.packed(DOWN, 4, 64).scales.is_contiguous()
    other = UP.replace("1", "0")
    assert torch.equal(source.packed(other, 4, 64).dequantise(torch.float32), meant[f"{other}.weight"])
    dense = logits(checkpoint.save_meant(tmp_path / "dense"), "none")
    torch.testing.assert_close(logits(checkpoint.folder, "w4"), dense, rtol=1e-4, atol=1e-4)
    quantised.write(source, plan_named("w4"), 64, tmp_path / "kept")
    assert torch.equal(logits(tmp_path / "kept", "w4"), logits(checkpoint.folder, "w4"))


def test_float_rows_follow_a_folded_down_proj(tmp_path):
    orders = {DOWN: scattered(256, 64)}
    checkpoint = write(tmp_path / "packed", "gptq", orders=orders, dense=(UP,))
    order = torch.tensor(orders[DOWN]).argsort(stable=True)
    rows = resolve(str(checkpoint.folder)).tensor(f"{UP}.weight")
    assert torch.equal(rows, checkpoint.meant[f"{UP}.weight"][order])


def test_whole_groups_that_are_swapped_are_exact_anywhere(tmp_path):
    layer = "model.layers.0.self_attn.q_proj"
    checkpoint = write(tmp_path / "packed", "gptq", orders={layer: [1] * 64 + [0] * 64})
    weight = resolve(str(checkpoint.folder)).packed(layer, 4, 64)
    assert torch.equal(weight.dequantise(torch.float32), checkpoint.meant[f"{layer}.weight"])


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"])
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_scattered_groups_elsewhere_are_refused(tmp_path, method, name):
    layer = f"model.layers.1.{name}"
    checkpoint = write(tmp_path / "packed", method, orders={layer: scattered(128, 64)})
    source = resolve(str(checkpoint.folder))
    assert source.packed(UP, 4, 64).n == 256
    with pytest.raises(
        QuantisationError, match=rf"^{re.escape(layer)}: \w*g_idx scatters.*supported are mlp\.down_proj"
    ):
        source.packed(layer, 4, 64)


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([0, 1] * 96 + [2, 0] * 32, QuantisationError, "group 0 has 128 channels, expected 64"),
        ([0] * 255 + [4], CheckpointError, "holds 0 to 4, expected 0 to 3"),
        ([-1] * 256, CheckpointError, "holds -1 to -1, expected 0 to 3"),
    ],
)
def test_groups_that_are_none(tmp_path, groups, error, message):
    checkpoint = write(tmp_path / "packed", "gptq")
    checkpoint.tensors[f"{DOWN}.g_idx"] = torch.tensor(groups, dtype=torch.int32)
    checkpoint.save()
    source = resolve(str(checkpoint.folder))
    for layer in (DOWN, UP):
        with pytest.raises(error, match=rf"^{re.escape(DOWN)}.*{message}"):
            source.packed(layer, 4, 64)
    assert source.packed(O_PROJ, 4, 64).n == 128


def test_group_indices_may_be_absent_only_without_act_order(tmp_path):
    checkpoint = write(tmp_path / "packed", "gptq")
    checkpoint.tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.endswith("g_idx")}
    checkpoint.save()
    weight = resolve(str(checkpoint.folder)).packed(DOWN, 4, 64)
    assert torch.equal(weight.dequantise(torch.float32), checkpoint.meant[f"{DOWN}.weight"])
    edit_json(checkpoint.folder / "config.json", quantization_config=config("gptq", 4, 64) | {"desc_act": True})
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.self_attn\.q_proj\.g_idx'"):
        resolve(str(checkpoint.folder))


@pytest.mark.parametrize(("bits", "stored", "meant"), [(4, 6, 7), (4, 15, 16), (3, 4, 5)])
def test_a_gptq_zero_point_that_is_not_symmetric(tmp_path, bits, stored, meant):
    checkpoint = write(tmp_path / "packed", "gptq", bits=bits)
    zeros = np.full((2, 128), 2 ** (bits - 1) - 1)
    zeros[1, 37] = stored
    checkpoint.tensors[f"{O_PROJ}.qzeros"] = stream(zeros, bits)
    checkpoint.save()
    source = resolve(str(checkpoint.folder))
    message = (
        rf"^{re.escape(O_PROJ)}: 1 of 256 zero points are not {2 ** (bits - 1)}, such as {meant} \(row 37, group 1\)"
    )
    with pytest.raises(QuantisationError, match=message):
        source.packed(O_PROJ, bits, 64)
    assert source.packed(UP, bits, 64).n == 256


def test_an_awq_zero_point_that_is_not_symmetric(tmp_path):
    checkpoint = write(tmp_path / "packed", "awq")
    zeros = np.full((2, 128), 8)
    zeros[0, 3], zeros[1, 126] = 5, 9
    checkpoint.tensors[f"{O_PROJ}.qzeros"] = interleaved(zeros)
    checkpoint.save()
    message = rf"^{re.escape(O_PROJ)}: 2 of 256 zero points are not 8, such as 5 \(row 3, group 0\)"
    with pytest.raises(QuantisationError, match=message):
        resolve(str(checkpoint.folder)).packed(O_PROJ, 4, 64)


def test_the_wrong_gptq_format_is_noticed(tmp_path):
    """Read as "gptq_v2", every zero point of a "gptq" file is one too small: each weight would be wrong by its scale."""
    checkpoint = write(tmp_path / "packed", "gptq", checkpoint_format="gptq_v2")
    with pytest.raises(QuantisationError, match="256 of 256 zero points are not 8, such as 7"):
        resolve(str(checkpoint.folder)).packed(O_PROJ, 4, 64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0.1, QuantisationError, r"1 of 256 scales are not exact in float16.*relative error is 2\.4e-04"),
        (1e6, QuantisationError, r"1 of 256 scales .*relative error is inf"),
        (2.0**-26, QuantisationError, r"1 of 256 scales .*relative error is 1\.0e\+00"),
        (float("nan"), CheckpointError, "scales hold NaN or infinity"),
    ],
)
def test_scales_that_float16_cannot_hold(tmp_path, method, value, error, message):
    checkpoint = write(tmp_path / "packed", method, scale_dtype=torch.float32)
    checkpoint.tensors[f"{O_PROJ}.{SCALES[method]}"][1, 0] = value
    checkpoint.save()
    with pytest.raises(error, match=rf"^{re.escape(O_PROJ)}: {message}"):
        resolve(str(checkpoint.folder)).packed(O_PROJ, 4, 64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("bits", "group"), [("w3", 64), ("mixed", 64), ("w4", 32)])
def test_loading_with_other_bits_or_group_than_the_folder(tmp_path, method, bits, group):
    checkpoint = write(tmp_path / "packed", method)
    with pytest.raises(QuantisationError, match=rf"as 4 bits, group 64 \({method}\), not as . bits, group {group}"):
        load_model(str(checkpoint.folder), bits=bits, group=group, device="cpu")
    with pytest.raises(QuantisationError, match=rf"q_proj as 4 bits, group 64 \({method}\); load it with bits=w4"):
        load_model(str(checkpoint.folder), bits="none", group=group, device="cpu")


@pytest.mark.parametrize("method", METHODS)
def test_layers_that_the_folder_leaves_dense(tmp_path, method):
    checkpoint = write(tmp_path / "packed", method, dense=("down_proj",), modules_to_not_convert=["down_proj"])
    source = resolve(str(checkpoint.folder))
    assert torch.equal(source.tensor(f"{DOWN}.weight"), checkpoint.meant[f"{DOWN}.weight"])
    with pytest.raises(QuantisationError, match=r"layers\.0\.mlp\.down_proj as dense, not as 4 bits, group 64"):
        load_model(str(checkpoint.folder), bits="w4", group=64, device="cpu")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "gptq",
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes'; supported are gptq, awq, compressed-tensors, and float",
        ),
        ("gptq", {"bits": 8}, "bits 8, supported are 3, 4"),
        ("gptq", {"group_size": -1}, "group_size -1, supported are 32, 64, 128"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin', supported are 'gptq', 'gptq_v2'"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"layers '\+:\.\*down\.\*' have \{'bits': 8\}"),
        ("awq", {"bits": 3}, "bits 3, supported are 4"),
        ("awq", {"group_size": 16}, "group_size 16, supported are 32"),
        ("awq", {"version": "gemv"}, "version 'gemv', supported are 'gemm'"),
        ("compressed-tensors", {"format": "int-quantized"}, "format 'int-quantized', supported are 'pack-quantized'"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "has a kv_cache_scheme"),
        ("compressed-tensors", {"transform_config": {"R1": {}}}, "has a transform_config"),
        ("compressed-tensors", {"config_groups": {"a": {}, "b": {}}}, "2 config_groups"),
    ],
)
def test_settings_that_are_refused(tmp_path, method, changes, message):
    checkpoint = write(tmp_path / "packed", method, **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"config\\.json: .*{message}"):
        resolve(str(checkpoint.folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bits": 8}, "num_bits 8, supported are 4"),
        ({"type": "float"}, "type 'float'"),
        ({"symmetric": False}, "symmetric False, supported are True"),
        ({"strategy": "channel", "group_size": None}, "strategy 'channel', supported are 'group'"),
        ({"group_size": 256}, "group_size 256"),
    ],
)
def test_compressed_weights_that_are_refused(tmp_path, changes, message):
    checkpoint = write(tmp_path / "packed", "compressed-tensors")
    settings = config("compressed-tensors", 4, 64)
    scheme = settings["config_groups"]["group_0"]
    scheme["weights"] |= changes
    edit_json(checkpoint.folder / "config.json", quantization_config=settings)
    with pytest.raises(UnsupportedArchitecture, match=message):
        resolve(str(checkpoint.folder))
    scheme["input_activations"] = {"num_bits": 8}
    edit_json(checkpoint.folder / "config.json", quantization_config=settings)
    with pytest.raises(UnsupportedArchitecture, match="input_activations are quantised"):
        resolve(str(checkpoint.folder))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("gptq", {"dynamic": [1]}),
        ("compressed-tensors", {"config_groups": None}),
        ("compressed-tensors", {"config_groups": {"group_0": 3}}),
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": None}}}),
    ],
)
def test_settings_that_are_malformed(tmp_path, method, changes):
    checkpoint = write(tmp_path / "packed", method, **changes)
    with pytest.raises(CheckpointError, match=r"config\.json: .*expected an object"):
        resolve(str(checkpoint.folder))


@pytest.mark.parametrize(
    ("method", "part"),
    [(method, part) for method in METHODS for part in (VALUES[method], SCALES[method])]
    + [("gptq", "qzeros"), ("awq", "qzeros"), ("compressed-tensors", "weight_shape")],
)
def test_damaged_layers(tmp_path, method, part):
    checkpoint = write(tmp_path / "packed", method)
    name = f"{DOWN}.{part}"
    original = checkpoint.tensors.pop(name)
    checkpoint.save()
    with pytest.raises(CheckpointError, match=f"no tensor '{re.escape(name)}'"):
        resolve(str(checkpoint.folder))
    checkpoint.tensors[name] = original[:-1]
    checkpoint.save()
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' has shape"):
        resolve(str(checkpoint.folder))
    checkpoint.tensors[name] = original.to(torch.int16)
    checkpoint.save()
    with pytest.raises(CheckpointError, match=f"'{re.escape(name)}' is I16, expected"):
        resolve(str(checkpoint.folder))


def test_a_weight_shape_that_does_not_fit(tmp_path):
    checkpoint = write(tmp_path / "packed", "compressed-tensors")
    checkpoint.tensors[f"{DOWN}.weight_shape"] = torch.tensor([256, 128])
    checkpoint.save()
    with pytest.raises(CheckpointError, match=r"down_proj: weight_shape is \[256, 128\], expected \[128, 256\]"):
        resolve(str(checkpoint.folder)).packed(DOWN, 4, 64)


@pytest.mark.parametrize("method", METHODS)
def test_a_truncated_file(tmp_path, method):
    file = write(tmp_path / "packed", method).folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        resolve(str(file.parent))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 96}, "q_proj: K = 96 is not a multiple of group 64"),
        ({"head_dim": 34}, "k_proj: 68 values of 4 bits do not fill whole int32 words"),
    ],
)
def test_shapes_that_do_not_divide(tmp_path, changes, message):
    checkpoint = write(tmp_path / "packed", "gptq")
    edit_json(checkpoint.folder / "config.json", **changes)
    with pytest.raises(QuantisationError, match=message):
        resolve(str(checkpoint.folder))


def test_biases_of_zeros_are_void_and_others_are_not(tmp_path):
    """Early AutoGPTQ gave every layer a bias."""
    checkpoint = write(tmp_path / "packed", "gptq")
    bias = checkpoint.tensors[f"{DOWN}.bias"] = torch.zeros(128)
    checkpoint.save()
    assert resolve(str(checkpoint.folder)).packed(DOWN, 4, 64).n == 128
    bias[100] = 1
    checkpoint.save()
    with pytest.raises(UnsupportedArchitecture, match=f"'{DOWN}.bias'"):
        resolve(str(checkpoint.folder))


@pytest.mark.parametrize("extra", ["lm_head.qweight", f"{DOWN}.weight_zero_point"])
def test_tensors_without_a_use(tmp_path, extra):
    checkpoint = write(tmp_path / "packed", "gptq")
    checkpoint.tensors[extra] = torch.zeros(4, 4, dtype=torch.int32)
    checkpoint.save()
    with pytest.raises(UnsupportedArchitecture, match=f"'{extra}' is I32"):
        resolve(str(checkpoint.folder))


def test_a_name_that_the_model_does_not_have(tmp_path):
    source = resolve(str(write(tmp_path / "packed", "awq").folder))
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.bias'"):
        source.tensor("model.layers.0.mlp.up_proj.bias")


def test_the_folder_says_which_source_reads_it(tmp_path):
    checkpoint = write(tmp_path / "packed", "awq")
    dense = checkpoint.save_meant(tmp_path / "dense")
    assert (is_few_bit(checkpoint.folder), is_few_bit(dense)) == (True, False)
    assert isinstance(resolve(str(dense)), HfSource)
    with pytest.raises(UnsupportedArchitecture, match="quantised by 'awq'"):
        HfSource(checkpoint.folder)
    edit_json(dense / "config.json", quantization_config=["gptq"])
    with pytest.raises(CheckpointError, match=r"quantization_config is \['gptq'\], expected an object"):
        resolve(str(dense))


def test_the_tokenizer_comes_along(tmp_path):
    checkpoint = write(tmp_path / "packed", "awq")
    assert resolve(str(checkpoint.folder)).tokenizer is None
    fallback_tokenizer().save(str(checkpoint.folder / "tokenizer.json"))
    assert resolve(str(checkpoint.folder)).tokenizer.encode("hi")
