"""Counters in GPU memory that kernels find at zero and leave at zero, without a launch that clears them."""

import functools
import threading

import torch

CHUNK = 2**22  # counters that are cleared together: 16 MiB


class Counters:
    """Counters of one device. Launches that may run at the same time never share one.

    Launches of one stream follow one another and share the stream's own. A captured launch may be replayed beside any other, so
    it gets counters that no other launch ever has.
    """

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._of_stream: dict[int, torch.Tensor] = {}
        self._unused: torch.Tensor | None = None
        self._lock = threading.Lock()

    def take(self, count: int) -> torch.Tensor:
        """uint32 zeros, as int32 [count], for a launch on torch's current stream of the device."""
        with self._lock, torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                return self._for_capture(count)
            if self._unused is None:  # now, since no later capture could
                self._unused = self._zeros(CHUNK)
            stream = torch.cuda.current_stream().cuda_stream
            own = self._of_stream.get(stream)
            if own is None or len(own) < count:
                own = self._of_stream[stream] = self._zeros(max(count, 1024))
            return own[:count]

    def reserve(self) -> None:
        """Have counters for launches that will be captured."""
        self.take(1)

    def _for_capture(self, count: int) -> torch.Tensor:
        if self._unused is None or len(self._unused) < count:
            return torch.zeros(
                count, dtype=torch.int32, device=self._device
            )  # every replay clears them: right, but slower
        taken, self._unused = self._unused[:count], self._unused[count:]
        return taken

    def _zeros(self, count: int) -> torch.Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=self._device)
        torch.cuda.current_stream().synchronize()  # other streams will use them, too
        return zeros


@functools.cache
def counters(device: int) -> Counters:
    """The one `Counters` of a device."""
    return Counters(device)
