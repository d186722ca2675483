"""Small random checkpoints in the few-bit formats of other tools, packed value by value from each format's definition."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from checkpoints import edit_json, random_model
from safetensors.torch import save_file

SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word belongs to this column of its eight


@dataclass
class Checkpoint:
    """What a folder holds: tensors by name as saved, and the weights that they mean."""

    folder: Path
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    meant: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors")

    def save_meant(self, folder: Path) -> Path:
        """The same model as a float checkpoint."""
        folder.mkdir()
        save_file(self.meant, folder / "model.safetensors")
        (folder / "config.json").write_text((self.folder / "config.json").read_text())
        edit_json(folder / "config.json", quantization_config=None)
        return folder


def write(
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 64,
    architecture: str = "llama",
    zero_stored_less: int = 1,
    dense: tuple[str, ...] = (),
    orders: dict[str, list[int]] | None = None,
    scale_dtype: torch.dtype = torch.float16,
    **settings: object,
) -> Checkpoint:
    """Write a random model as `method` (gptq, awq, compressed-tensors) does.

    `zero_stored_less` is what GPTQ takes off a zero point before it stores it. `dense` names layers that stay float, by
    their last part or in full. `orders` gives the group of each input channel, by layer in full. `settings` go into
    `quantization_config`.
    """
    folder.mkdir(parents=True)
    model = random_model(architecture, **SIZES, tie_word_embeddings=True)
    model.config.save_pretrained(folder)
    checkpoint, generator = Checkpoint(folder), np.random.default_rng(5)
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        if name == "lm_head.weight":
            continue
        last = layer.rsplit(".", 1)[-1]
        if last not in LINEAR or name.endswith(".bias") or layer in dense or last in dense:
            checkpoint.tensors[name] = checkpoint.meant[name] = parameter.detach().clone()
            continue
        n, k = parameter.shape
        fields = generator.integers(0, 2**bits, (n, k))
        signs = generator.choice([-1, 1], (n, k // group))
        scales = torch.from_numpy(signs * generator.uniform(0.001, 0.02, signs.shape)).bfloat16().to(scale_dtype)
        groups = (orders or {}).get(layer) or [channel // group for channel in range(k)]
        zero = 2 ** (bits - 1)
        checkpoint.meant[name] = torch.from_numpy(fields - zero).float() * scales[:, groups].float()
        parts = PACKERS[method](fields, scales, groups, bits, zero - zero_stored_less)
        checkpoint.tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    edit_json(folder / "config.json", quantization_config=config(method, bits, group) | settings)
    checkpoint.save()
    return checkpoint


def config(method: str, bits: int, group: int) -> dict[str, object]:
    """`quantization_config` as each tool writes it."""
    if method == "gptq":
        own = {"bits": bits, "group_size": group, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    elif method == "awq":
        own = {"bits": bits, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    else:
        weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        own = {"format": "pack-quantized", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}
    return json.loads(json.dumps({"quant_method": method, **own}))


def stream(values: np.ndarray, bits: int) -> torch.Tensor:
    """[rows, values] -> int32 [rows, values * bits / 32]: value i has bits i * bits onwards of a little-endian stream."""
    rows = []
    for row in values:
        number = sum(int(value) << (bits * place) for place, value in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), dtype="<i4"))
    return torch.from_numpy(np.stack(rows))


def _gptq(fields: np.ndarray, scales: torch.Tensor, groups: list[int], bits: int, zero: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": stream(fields, bits).T,
        "qzeros": stream(np.full(tuple(scales.T.shape), zero), bits),
        "scales": scales.T,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }


def interleaved(values: np.ndarray) -> torch.Tensor:
    """[rows, columns] -> int32 [rows, columns / 8] in AWQ's order of nibbles."""
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.int64)
    for nibble, column in enumerate(AWQ_ORDER):
        words |= values[:, column::8].astype(np.int64) << (4 * nibble)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _awq(fields: np.ndarray, scales: torch.Tensor, groups: list[int], bits: int, zero: int) -> dict[str, torch.Tensor]:
    symmetric = np.full(tuple(scales.T.shape), 2 ** (bits - 1))
    return {"qweight": interleaved(fields.T), "qzeros": interleaved(symmetric), "scales": scales.T}


def _compressed(
    fields: np.ndarray, scales: torch.Tensor, groups: list[int], bits: int, zero: int
) -> dict[str, torch.Tensor]:
    parts = {"weight_packed": stream(fields, bits), "weight_scale": scales, "weight_shape": torch.tensor(fields.shape)}
    if groups != sorted(groups):
        parts["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return parts


PACKERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
