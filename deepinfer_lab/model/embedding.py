"""Token embeddings: ids [T] -> rows [T, hidden] of a table, dense or few-bit."""

import torch
from torch.nn import functional

from deepinfer_lab.quant.layout import PackedWeight


class DenseEmbedding:
    """A table [vocab, hidden] as it is."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.device, self.dtype, self.nbytes = weight.device, weight.dtype, weight.nbytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [T] -> [T, hidden]."""
        return functional.embedding(ids, self.weight)


class PackedEmbedding:
    """A packed table [vocab, hidden], of which a lookup makes just the rows that it wants dense.

    Torch alone, and shapes depend on T only: CUDA graphs can capture it. The weight may be an output head's, too.

    Args:
        dtype: of the rows.
    """

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        self.weight = weight
        self.device, self.dtype, self.nbytes = weight.packed.device, dtype, weight.nbytes

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [T] -> [T, hidden]."""
        table = self.weight
        packed, scales = (tensor.index_select(0, ids) for tensor in (table.packed, table.scales))
        return PackedWeight(table.bits, table.group, len(ids), table.k, packed, scales).dequantise(self.dtype)


Embedding = DenseEmbedding | PackedEmbedding
