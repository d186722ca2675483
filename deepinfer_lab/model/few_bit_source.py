"""A weight source that reads few-bit checkpoints of other tools: GPTQ, AWQ and compressed-tensors.

Their weights are used as they are, never rounded again. What our layouts cannot hold exactly is refused by name.

Channels grouped by activation. GPTQ may sort a layer's input channels by how active they are and give neighbours in that
order a scale in common; the file keeps the channels' own order and says which group each is in. Our kernels know only groups
of neighbours, so the channels must be sorted by group, and whatever produces them must deliver them so sorted:
- down_proj reads what gate_proj and up_proj write, value by value, so that sorting the rows of those two is enough. Both are
  a scale per row and group of columns, so rows move freely. The model's answers differ by the order of one sum.
- q, k, v, gate and up read the residual stream. Its order is the same for all layers, and theirs would all be different.
- o_proj reads attention heads. Several query heads share a V head, whose order would have to suit them all.
So down_proj is folded, and the others are refused. Groups that are whole and merely swapped are exact anywhere.
"""

from pathlib import Path

import torch

from deepinfer_lab.errors import CheckpointError, QuantisationError, UnsupportedArchitecture
from deepinfer_lab.model.awq_format import AwqFormat
from deepinfer_lab.model.compressed_format import CompressedFormat
from deepinfer_lab.model.few_bit_format import FewBitFormat, Part
from deepinfer_lab.model.gptq_format import GptqFormat
from deepinfer_lab.model.hf_config import quantisation
from deepinfer_lab.model.hf_folder import HEAD, HfFolder
from deepinfer_lab.model.inventory import check_inventory, tensor_shapes
from deepinfer_lab.model.source import MLP_IN, MLP_OUT, linear_layers, linear_shape
from deepinfer_lab.model.tokenizer import Tokenizer, read_json
from deepinfer_lab.quant.layout import PackedWeight, check_shape, pack, unpack

FORMATS = {"gptq": GptqFormat, "awq": AwqFormat, "compressed-tensors": CompressedFormat}


def is_few_bit(folder: Path) -> bool:
    """Whether the `config.json` of a folder says that its weights are quantised, by whatever tool.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = folder / "config.json"
    return quantisation(read_json(path), path) is not None


class FewBitSource:
    """Reads one folder. Float tensors come as stored, few-bit layers in our layout.

    Args:
        folder, name: as for `HfFolder`.

    Raises:
        CheckpointError: as `HfFolder` does, or a tensor is missing, or of another shape or dtype than expected.
        UnsupportedArchitecture: as `HfFolder` does; another tool or format; or a tensor without a use.
        QuantisationError: a layer whose shape the group or the format's words do not divide.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self._folder = HfFolder(folder, name)
        self.name, self.config = self._folder.name, self._folder.config
        settings = self._folder.quantisation or {}
        self._method = settings.get("quant_method", "unnamed")
        if self._method not in FORMATS:
            raise UnsupportedArchitecture(
                f"{self._folder.config_path}: quantised by '{self._method}'; supported are {', '.join(FORMATS)}, and "
                "float checkpoints, which the lab quantises itself"
            )
        self._format: FewBitFormat = FORMATS[self._method].from_settings(settings, self._folder.config_path)
        # The files decide which layers are dense: settings name them by patterns, in another way for each tool.
        names = self._folder.names
        self._packed = frozenset(layer for layer in linear_layers(self.config) if f"{layer}.weight" not in names)
        self._shapes = tensor_shapes(self.config)
        self._check()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """As `HfFolder.tokenizer`."""
        return self._folder.tokenizer

    def tensor(self, name: str) -> torch.Tensor:
        """One float tensor on the CPU, as stored, but for rows that a folded `down_proj` asks to be sorted.

        Raises:
            CheckpointError: the model has no such tensor, or its bytes cannot be read.
            QuantisationError: the folder holds it in few-bit form.
        """
        layer = name.removesuffix(".weight")
        if layer in self._packed:
            raise QuantisationError(
                f"{self._folder.path} holds {layer} as {self._held(layer)}; "
                f"load it with bits=w{self._format.bits}, group {self._format.group}"
            )
        if name not in self._shapes and name != HEAD:
            raise CheckpointError(f"{self._folder.path}: a model of this config has no tensor '{name}'")
        rows = self._row_order(layer)
        return self._folder.read(name) if rows is None else self._folder.read(name)[rows]

    def packed(self, layer: str, bits: int, group: int) -> PackedWeight:
        """A few-bit layer in our layout. The intermediate channels of an MLP may come in another order than stored.

        Raises:
            CheckpointError: damaged values.
            QuantisationError: the folder holds the layer otherwise, or in a way that our layout cannot express.
        """
        if layer not in self._packed or (self._format.bits, self._format.group) != (bits, group):
            raise QuantisationError(
                f"{self._folder.path} holds {layer} as {self._held(layer)}, not as {bits} bits, group {group}"
            )
        n, k = linear_shape(self.config, layer)
        names = {part: f"{layer}.{part}" for part in self._parts(layer)}
        tensors = {part: self._folder.read(name) for part, name in names.items() if name in self._folder.names}
        weight = self._format.weight(layer, tensors, n, k)
        packed, scales = weight.packed, weight.scales
        groups, columns = self._channel_groups(layer), self._column_order(layer)
        if columns is not None:
            groups = groups[columns]
            packed = pack(unpack(packed, bits, k)[:, columns], bits)
        if groups is not None:
            scales = scales[:, groups[::group]]
        rows = self._row_order(layer)
        if rows is not None:
            packed, scales = packed[rows], scales[rows]
        return PackedWeight(bits, group, n, k, packed, scales)

    def _held(self, layer: str) -> str:
        if layer not in self._packed:
            return "dense"
        return f"{self._format.bits} bits, group {self._format.group} ({self._method})"

    def _parts(self, layer: str) -> dict[str, Part]:
        n, k = linear_shape(self.config, layer)
        try:
            check_shape(k, self._format.bits, self._format.group)
            return self._format.parts(n, k)
        except QuantisationError as error:
            raise QuantisationError(f"{self._folder.where}: {layer}: {error}") from error

    def _row_order(self, layer: str) -> torch.Tensor | None:
        """The order in which `down_proj` wants the rows of `gate_proj` and `up_proj`; None for the stored one."""
        for name in MLP_IN:
            if layer.endswith(name):
                return self._column_order(layer.removesuffix(name) + MLP_OUT[0])
        return None

    def _column_order(self, layer: str) -> torch.Tensor | None:
        """The order of a layer's input channels that makes neighbours of each group's; None where they are already.

        Raises:
            QuantisationError: there is none, or what comes before the layer cannot follow it.
        """
        groups, size = self._channel_groups(layer), self._format.group
        if groups is None or (groups.view(-1, size) == groups[::size, None]).all():
            return None
        moved = f"{layer}: {self._format.channel_groups} scatters the input channels of a group"
        if not layer.endswith(MLP_OUT[0]):
            raise QuantisationError(
                f"{moved}, so that they would have to be sorted, and what this layer reads cannot be; "
                f"supported are {', '.join(MLP_OUT)}, or channels in order (desc_act false, actorder static)"
            )
        sizes = groups.bincount()
        if (sizes != size).any():
            wrong = int((sizes != size).nonzero()[0])
            raise QuantisationError(f"{moved}, and group {wrong} has {sizes[wrong]} channels, expected {size}")
        return groups.argsort(stable=True)

    def _channel_groups(self, layer: str) -> torch.Tensor | None:
        """int64 [K]: the group of each input channel; None where the file does not say, and neighbours share one."""
        part = self._format.channel_groups
        name = f"{layer}.{part}"
        if part is None or layer not in self._packed or name not in self._folder.names:
            return None
        groups = self._folder.read(name).long()
        count = len(groups) // self._format.group
        if groups.min() < 0 or groups.max() >= count:
            raise CheckpointError(f"{name} holds {groups.min()} to {groups.max()}, expected 0 to {count - 1}")
        return groups

    def _check(self) -> None:
        """Compare what the files hold with what the config promises, reading headers and suspicious biases only."""
        expected, found = {}, {}
        for name, shape in self._shapes.items():
            layer = name.removesuffix(".weight")
            if layer not in self._packed:
                expected[name] = shape
                continue
            for part, form in self._parts(layer).items():
                full = f"{layer}.{part}"
                present = full in self._folder.names
                if present or form.required:
                    expected[full] = form.shape
                if present:
                    dtype, found[full] = self._folder.header(full)
                    if dtype not in form.dtypes:
                        raise CheckpointError(
                            f"{self._folder.where}: tensor '{full}' is {dtype}, expected {' or '.join(form.dtypes)}"
                        )
        others = [name for name in self._folder.names if name not in found and not self._is_void(name)]
        check_inventory(self._folder.where, expected, found | self._folder.float_shapes(others))

    def _is_void(self, name: str) -> bool:
        """Whether a tensor is a bias of zeros that the model does not have: early AutoGPTQ gave every layer one."""
        layer = name.removesuffix(".bias")
        return name not in self._shapes and layer in self._packed and not self._folder.read(name).any()
