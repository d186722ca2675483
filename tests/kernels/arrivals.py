"""The counters of blocks that share an output, for kernels on the CPU."""

import torch


class Arrivals:
    """Stands in for `counters`: fresh zeros, which must be zeros again after every launch."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def take(self, count: int) -> torch.Tensor:
        self.taken.append(torch.zeros(count, dtype=torch.int32))
        return self.taken[-1]
