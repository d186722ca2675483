"""Multiprocessors divided between two streams, with the CUDA driver's green contexts.

The device is split once, into a part and what remains of it, so that the two have no multiprocessor in common: splitting the
whole device for each stream, as `torch.cuda.green_contexts` does, would give both the same first ones. A CUDA graph captured
on such a stream keeps to its multiprocessors wherever it is replayed.
"""

import functools
from typing import Any

import torch


class PartitionError(Exception):
    """The device, the driver or what is installed cannot divide multiprocessors."""


def partition_streams(device: torch.device, share: float) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """A stream on about `share` of the multiprocessors, rounded as the driver wants (up, to 8 on Hopper), and one on the rest.

    The green contexts live as long as the process, since kernels that are still running when they go would fail. So there are
    two for each share of a device. The streams are new each time: what one engine launched while another captures on the same
    stream would become part of the other's graph.

    Raises:
        PartitionError: green contexts cannot be had here.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise PartitionError(
            "multiprocessors cannot be divided without cuda-bindings: pip install cuda-bindings"
        ) from None
    try:
        with torch.cuda.device(device):
            small, rest = _contexts(driver, torch.cuda.current_device(), share)
            return _stream(driver, small), _stream(driver, rest)
    except (RuntimeError, AttributeError) as error:  # a driver, or bindings, from before green contexts
        raise PartitionError(f"multiprocessors cannot be divided: {error}") from error


@functools.cache
def _contexts(driver: Any, device_index: int, share: float) -> tuple[Any, Any]:
    """Green contexts of a part of the current device's multiprocessors, and of the rest."""
    torch.cuda.current_stream().synchronize()  # the primary context exists now
    device = _ask(driver.cuDeviceGet(device_index))
    whole = _ask(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    count = whole.sm.smCount
    wanted = min(max(1, round(share * count)), count - 1)
    groups, made, rest = _ask(driver.cuDevSmResourceSplitByCount(1, whole, 0, wanted))
    if made != 1 or not rest.sm.smCount:
        raise PartitionError(f"the driver does not divide {count} multiprocessors into {wanted} and the rest")
    return _context(driver, device, groups[0]), _context(driver, device, rest)


def _context(driver: Any, device: Any, part: Any) -> Any:
    description = _ask(driver.cuDevResourceGenerateDesc([part], 1))
    return _ask(driver.cuGreenCtxCreate(description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))


def _stream(driver: Any, context: Any) -> torch.cuda.Stream:
    stream = _ask(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    return torch.cuda.ExternalStream(int(stream))


def _ask(answer: tuple) -> Any:
    """The results of a driver call.

    Raises:
        PartitionError: it failed.
    """
    status, *results = answer
    if int(status):
        raise PartitionError(f"multiprocessors cannot be divided: the driver says {status.name}")
    return results[0] if len(results) == 1 else results
