"""Quantised checkpoints: what is written is what is read, and damage is named."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from deepinfer_lab.errors import CheckpointError
from deepinfer_lab.quant.checkpoint import FORMAT, QuantisedTensors, load, save
from deepinfer_lab.quant.rtn import quantise


def example() -> QuantisedTensors:
    generator = torch.Generator().manual_seed(3)
    return QuantisedTensors(
        packed={
            "model.layers.0.mlp.up_proj": quantise(torch.randn((4, 64), generator=generator), 3, 32),
            "model.layers.0.self_attn.q_proj": quantise(torch.randn((2, 128), generator=generator), 4, 64),
        },
        dense={
            "model.norm.weight": torch.randn(8, generator=generator),
            "lm_head.weight": torch.randn((3, 5), generator=generator).half().t(),  # not contiguous
        },
        metadata={"name": "an example", "config": "{}"},
    )


def header(**changes: object) -> dict[str, str]:
    layers = {"L": {"bits": 4, "group": 32, "n": 2, "k": 64} | changes}
    return {"format": FORMAT, "layers": json.dumps(layers)}


def tensors() -> dict[str, torch.Tensor]:
    return {"L.packed": torch.zeros(2, 32, dtype=torch.uint8), "L.scales": torch.ones(2, 2, dtype=torch.float16)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "quantised.safetensors"


def test_round_trip_is_exact(path):
    wrote = example()
    save(path, wrote)
    read = load(path)
    assert read.metadata == wrote.metadata
    assert read.dense.keys() == wrote.dense.keys()
    for name, tensor in wrote.dense.items():
        assert torch.equal(read.dense[name], tensor)
        assert read.dense[name].dtype == tensor.dtype
    assert read.packed.keys() == wrote.packed.keys()
    for name, weight in wrote.packed.items():
        other = read.packed[name]
        assert (other.bits, other.group, other.n, other.k) == (weight.bits, weight.group, weight.n, weight.k)
        assert torch.equal(other.packed, weight.packed)
        assert torch.equal(other.scales, weight.scales)
        assert other.scales.dtype == torch.float16


@given(st.dictionaries(st.text(min_size=1).filter(lambda k: k not in ("format", "layers")), st.text()))
@settings(deadline=None, max_examples=40)
def test_any_metadata_survives(tmp_path_factory, metadata):
    path = tmp_path_factory.mktemp("metadata") / "q.safetensors"
    save(path, QuantisedTensors({}, {"x": torch.ones(1)}, metadata))
    assert load(path).metadata == metadata


def test_saving_leaves_one_file_and_replaces_an_old_one(path):
    path.write_bytes(b"old")
    save(path, example())
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert load(path).metadata["name"] == "an example"


def test_a_save_that_fails_leaves_the_old_file(path, monkeypatch):
    path.write_bytes(b"old")

    def full_disk(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("deepinfer_lab.quant.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save(path, example())
    assert path.read_bytes() == b"old"


def test_missing_file(path):
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


def test_truncated_anywhere(path):
    save(path, example())
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=path.name):
            load(path)


@pytest.mark.parametrize("content", [b"GGUF" + b"\0" * 100, b"not a tensor file", b"\xff" * 64, b"{}"])
def test_other_bytes(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "deepinfer-lab-quantised-2", "layers": "{}"}])
def test_other_formats(path, metadata):
    save_file({"x": torch.ones(1)}, path, metadata=metadata)
    with pytest.raises(CheckpointError, match=f"expected '{FORMAT}'"):
        load(path)


def test_the_helpers_of_this_file_describe_a_good_one(path):
    save_file(tensors(), path, metadata=header())
    assert load(path).packed["L"].k == 64


@pytest.mark.parametrize("name", ["L.packed", "L.scales"])
def test_a_layer_without_one_of_its_tensors(path, name):
    held = tensors()
    del held[name]
    save_file(held | {"x": torch.ones(1)}, path, metadata=header())
    with pytest.raises(CheckpointError, match=rf"layer L lacks.*{name}"):
        load(path)


@pytest.mark.parametrize("layers", ["", "{", "null", "[]", "[1]", "3", '{"L": 3}', '{"L": {}}', '{"L": {"bits": 4}}'])
def test_layers_that_are_no_description(path, layers):
    save_file(tensors(), path, metadata={"format": FORMAT, "layers": layers})
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


def test_a_header_without_layers(path):
    save_file(tensors(), path, metadata={"format": FORMAT})
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [{"bits": 3}, {"bits": 5}, {"group": 64}, {"group": 7}, {"n": 3}, {"k": 128}, {"k": 0}, {"bits": "4"}, {"more": 1}],
)
def test_tensors_that_do_not_fit_their_description(path, changes):
    save_file(tensors(), path, metadata=header(**changes))
    with pytest.raises(CheckpointError, match=path.name):
        load(path)


@pytest.mark.parametrize(("name", "dtype"), [("L.packed", torch.int64), ("L.scales", torch.int8)])
def test_tensors_of_another_dtype(path, name, dtype):
    held = tensors()
    held[name] = held[name].to(dtype)
    save_file(held, path, metadata=header())
    with pytest.raises(CheckpointError, match=path.name):
        load(path)
