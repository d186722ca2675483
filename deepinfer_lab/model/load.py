"""One call from a model's name to a model that runs."""

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_lab.errors import SettingError
from deepinfer_lab.kernels import dispatch as dispatch_tables
from deepinfer_lab.model import quantised, synthetic
from deepinfer_lab.model.build import build_decoder
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.quantise import PackedModel, quantise_layers
from deepinfer_lab.model.resolve import resolve
from deepinfer_lab.model.source import WeightSource
from deepinfer_lab.model.tokenizer import Tokenizer
from deepinfer_lab.quant.methods import check_method, needs_activations
from deepinfer_lab.quant.plan import PLANS, Plan, plan_named


@dataclass(frozen=True)
class LoadedModel:
    """A decoder, its tokenizer (None for synthetic models), and the settings that made it."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer | None
    bits: str
    group: int


def open_source(spec: str) -> WeightSource:
    """The weight source for a spec: everything that `resolve` takes, `synthetic:SHAPE`, or a folder that `quantise` wrote.

    Raises:
        ModelNotFound, CheckpointError, UnsupportedArchitecture, DownloadError: as the source does.
    """
    if spec.startswith(synthetic.PREFIX):
        return synthetic.synthetic(spec)
    folder = Path(spec).expanduser()
    if quantised.is_quantised(folder):
        return quantised.QuantisedSource(folder)
    return resolve(spec)


def pick_device(name: str | None) -> torch.device:
    """The device called `name`, or the GPU if there is one, else the CPU.

    Raises:
        SettingError: not a device, or CUDA without a GPU that works.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise SettingError(f"device '{name}': allowed are cpu, cuda and cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device '{name}': torch {torch.__version__} finds no CUDA GPU here; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(f"device '{name}': this machine has {torch.cuda.device_count()} CUDA GPUs, cuda:0 onwards")
    return device


def load_model(
    spec: str,
    *,
    bits: str | Plan = "w4",
    group: int = 64,
    device: str | None = None,
    dispatch: str | Path | None = None,
    method: str = "rtn",
    batch_invariant: bool = False,
) -> LoadedModel:
    """Load a model and quantise it.

    Args:
        spec: a model; see `open_source`.
        bits: a name of `quant.plan.PLANS`, a plan's .json file, or a plan. A folder that is quantised already must be loaded
            with the bits that its linear layers have.
        group: values along K that share a scale: 32, 64 or 128.
        device: cpu, cuda or cuda:N; the GPU where there is one, by default. Computes in float32 on a CPU, float16 on a GPU.
        method: how to quantise, one of `quant.methods.METHODS`; embedding and head are rounded to nearest by any. All but rtn
            read calibration texts first, which takes a minute for the smallest models: `deepinfer-lab quantise` keeps the
            result.
        dispatch: a dispatch.json that says which kernel takes how many rows on a GPU, or "article" for the article's choice. By
            default kernels on tensor cores, where the GPU has them.
        batch_invariant: on a GPU, a token's logits are the same bits in any batch and at any chunking of its prompt, at a price
            (`model.invariance`). On a CPU it changes nothing, and they are the same but for rounding (`build_decoder`).

    Raises:
        SettingError: unknown bits, method or device; a method that needs texts, for a model without a tokenizer;
            `batch_invariant` beside `dispatch`, or on a GPU that cannot run this model so.
        KernelError: `dispatch` is no dispatch table, or has no row for these bits.
        ModelNotFound, CheckpointError, UnsupportedArchitecture, DownloadError, QuantisationError: as their docstrings say.
    """
    plan, where = plan_named(bits) if isinstance(bits, str) else bits, pick_device(device)
    check_method(method)
    if batch_invariant and dispatch is not None:
        raise SettingError(
            f"dispatch {dispatch}: batch_invariant takes one kernel for any number of rows; leave one of the two out"
        )
    table = dispatch_tables.table_named(dispatch, where)
    source = open_source(spec)
    if needs_activations(method) and plan is not PLANS["none"]:
        layers = quantise_layers(source, plan, group=group, method=method, device=where)
        source = PackedModel(source, dict(layers))
    dtype = torch.float16 if where.type == "cuda" else torch.float32
    decoder = build_decoder(
        source, plan, group=group, device=where, dtype=dtype, table=table, batch_invariant=batch_invariant
    )
    return LoadedModel(source.name, decoder, source.tokenizer, plan.name, group)
