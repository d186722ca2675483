"""Tiny decoders for decode_chain.cuh, and what a step of theirs is, in float32 with the launches' roundings to float16."""

from dataclasses import dataclass, fields, replace

import torch
from torch.nn.functional import silu

from deepinfer_lab.kernels.chain_plan import ChainShape
from deepinfer_lab.kernels.decode_chain import DecodeChain, LayerTensors
from deepinfer_lab.quant.interleave import interleave
from deepinfer_lab.quant.layout import PackedWeight, pack
from deepinfer_lab.quant.tiles import to_tiles

EPS, BLOCK, COLUMNS, SLOTS = 1e-5, 4, 250, 1000


@dataclass(frozen=True)
class Model:
    """Weights as the reference wants them, beside what the kernel gets."""

    shape: ChainShape
    dense: list[list[torch.Tensor]]  # of each layer: qkv, o, gate over up, down
    layers: list[LayerTensors]
    norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def on(self, device: str) -> "Model":
        """What the kernel gets, there."""

        def moved(value):
            if isinstance(value, tuple):
                return tuple(moved(each) for each in value)
            return None if value is None else value.to(device)

        layers = [
            LayerTensors(*(moved(getattr(layer, field.name)) for field in fields(layer))) for layer in self.layers
        ]
        return replace(self, layers=layers, norm=moved(self.norm), cos=moved(self.cos), sin=moved(self.sin))

    def chain(self, blocks: int | None = None) -> DecodeChain:
        return DecodeChain(
            self.shape, self.layers, self.norm, self.cos, self.sin, eps=EPS, block_size=BLOCK, blocks=blocks
        )


def make(shape: ChainShape, bias: bool = True, seed: int = 0) -> Model:
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).half()

    dense, layers = [], []
    for _ in range(shape.layers):
        weights = []
        for i, (n, k) in enumerate(shape.products):
            bits = shape.attention_bits if i < 2 else shape.mlp_bits
            q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k), generator=random, dtype=torch.int8)
            scales = ((torch.rand(n, k // 128, generator=random) + 0.5) * 2 ** (3 - bits) * k**-0.5).half()
            weights.append(PackedWeight(bits, 128, n, k, pack(q, bits), scales))
        dense.append([weight.dequantise(torch.float32) for weight in weights])
        weights[2] = interleave(weights[2])
        tiled = [to_tiles(weight) for weight in weights]
        layers.append(
            LayerTensors(
                tuple((each.tiles, each.scales) for each in tiled), normal(shape.products[0][0]) if bias else None,
                1 + normal(shape.hidden) / 4, 1 + normal(shape.hidden) / 4,
                normal(SLOTS, shape.kv_heads, 128), normal(SLOTS, shape.kv_heads, 128),
            )
        )  # fmt: skip
    angle = torch.rand(BLOCK * COLUMNS, 64, generator=random) * 6
    return Model(shape, dense, layers, 1 + normal(shape.hidden) / 4, angle.cos().half(), angle.sin().half())


@dataclass(frozen=True)
class Layer:
    """What each phase of a layer leaves, float32 [1, ...], and the new K and V [1, kv_heads, 128]."""

    qkv: torch.Tensor
    attended: torch.Tensor
    after_o: torch.Tensor
    gated: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rounded(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float())


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.half().float()


def reference(model: Model, x: torch.Tensor, table: torch.Tensor, length: int) -> list[Layer]:
    """x: [1, hidden]. table: [1, B]. length: the new token included."""
    x, shape, layers = x.float(), model.shape, []
    heads, kv_heads = shape.heads, shape.kv_heads
    cos, sin = (angles[length - 1].float() for angles in (model.cos, model.sin))
    for dense, tensors in zip(model.dense, model.layers, strict=True):
        bias = 0 if tensors.qkv_bias is None else tensors.qkv_bias.float()
        qkv = rounded(normed(x, tensors.input_norm) @ dense[0].T + bias)
        q, k, v = qkv.view(len(x), -1, 128).split((heads, kv_heads, kv_heads), dim=1)
        q, k = (
            rounded(torch.cat((a * cos - b * sin, b * cos + a * sin), -1)) for a, b in (y.chunk(2, -1) for y in (q, k))
        )
        slots = (table[0].unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[: length - 1]
        keys, values = (
            torch.cat((past[slots].float(), new)).repeat_interleave(heads // kv_heads, 1)
            for past, new in ((tensors.k, k), (tensors.v, v))
        )
        weights = (torch.einsum("hd,nhd->hn", q[0], keys) * 128**-0.5).softmax(-1)
        attended = rounded(torch.einsum("hn,nhd->hd", weights, values).view(1, -1))
        after_o = rounded(x + rounded(attended @ dense[1].T))
        gate, up = rounded(normed(after_o, tensors.post_norm) @ dense[2].T).chunk(2, -1)
        gated = rounded(silu(gate) * up)
        x = rounded(after_o + rounded(gated @ dense[3].T))
        layers.append(Layer(qkv, attended, after_o, gated, x, k, v))
    return layers
