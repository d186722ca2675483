"""Launchers of what a step does before its first layer and after its last, each in one kernel. On torch's current stream.

They raise KernelError, naming the argument, its value and the limit. `out` is written into; None allocates it.
"""

import torch

from deepinfer_lab.kernels.counters import counters
from deepinfer_lab.kernels.loader import launch_op, multiprocessors
from deepinfer_lab.kernels.ops_catalogue import OPS
from deepinfer_lab.kernels.ops_check import expect, require

Maybe = torch.Tensor | None
VECTOR = 8  # values of one 16-byte access
RESIDENT = 4  # blocks of `likeliest` that a multiprocessor is given at once: enough loads on their way to keep it busy
MAX_VOCABULARY = 2**31 - 2**16  # places are 32-bit numbers


def embed(
    tokens: torch.Tensor, table: torch.Tensor, sources: Maybe = None, last: Maybe = None, out: Maybe = None
) -> torch.Tensor:
    """Rows of a table.

    Args:
        tokens: int64 [T], each below V. table: float16 [V, N], N a multiple of 8.
        sources: int64 [R], for the last R of the tokens: a row of `last`, whose token takes the place of the given one, or
            below 0. last: int64 [L], where there are sources.

    Returns:
        float16 [T, N].
    """
    name = "embed"
    require(tokens.dim() == 1, f"{name}: tokens have shape {tuple(tokens.shape)}, must be [T]")
    require(table.dim() == 2, f"{name}: table has shape {tuple(table.shape)}, must be [V, N]")
    rows, (vocabulary, columns) = len(tokens), table.shape
    require(columns > 0 and columns % VECTOR == 0, f"{name}: N = {columns}, must be a positive multiple of {VECTOR}")
    carried = 0 if sources is None else len(sources)
    require(carried <= rows, f"{name}: {carried} sources, must be at most {rows}, the number of tokens")
    require((sources is None) == (last is None), f"{name}: sources and last, must be both or neither")
    out = table.new_empty(rows, columns) if out is None else out
    expect(name, "tokens", tokens, torch.int64, (rows,), table.device)
    expect(name, "table", table, torch.float16, (vocabulary, columns), table.device, aligned=True)
    expect(name, "out", out, torch.float16, (rows, columns), table.device, aligned=True)
    for label, tensor in (("sources", sources), ("last", last)):
        if tensor is not None:
            expect(name, label, tensor, torch.int64, (len(tensor),), table.device)
    if rows:
        blocks = -(-columns // (OPS[name].threads * VECTOR))
        launch_op(OPS[name], (rows, blocks), (tokens, sources, last, table, out), rows - carried, columns, vocabulary)
    return out


def fetch(host: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy int64 [N] out of pinned host memory, which must live until that is done: torch does not know of it."""
    name = "fetch"
    require(host.dtype == torch.int64, f"{name}: host has dtype {host.dtype}, must be torch.int64")
    require(host.is_contiguous(), f"{name}: host has strides {host.stride()}, must be contiguous")
    require(host.is_pinned(), f"{name}: host is on {host.device}, must be in pinned host memory")
    expect(name, "out", out, torch.int64, tuple(host.shape), out.device)
    if out.numel():
        launch_op(OPS[name], (-(-out.numel() // OPS[name].threads),), (out, host), out.numel())
    return out


def likeliest(logits: torch.Tensor, last: Maybe = None, out: Maybe = None, host: Maybe = None) -> torch.Tensor:
    """Of each row the largest logit and its token, as `torch.max` has them: a NaN is the largest, of equals the first counts.

    Args:
        logits: float16 [L, V]. last: int64, at least L: the tokens are written to its beginning, too.
        host: int64 [1], the address of pinned host memory, float64 [2, L], to write the result to, too; or it holds 0.

    Returns:
        float64 [2, L], the values, then the tokens, both exact. A zero has no sign.
    """
    name = "likeliest"
    require(logits.dim() == 2, f"{name}: logits have shape {tuple(logits.shape)}, must be [L, V]")
    rows, columns = logits.shape
    require(0 < columns <= MAX_VOCABULARY, f"{name}: V = {columns}, must be 1 to {MAX_VOCABULARY}")
    out = torch.empty(2, rows, dtype=torch.float64, device=logits.device) if out is None else out
    expect(name, "logits", logits, torch.float16, (rows, columns), logits.device, aligned=True)
    expect(name, "out", out, torch.float64, (2, rows), logits.device)
    if last is not None:
        require(len(last) >= rows, f"{name}: last has {len(last)} places, must be at least {rows}")
        expect(name, "last", last, torch.int64, (len(last),), logits.device)
    if host is not None:
        expect(name, "host", host, torch.int64, (1,), logits.device)
    if rows:
        part, parts = cut(rows, columns, multiprocessors(logits.device.index) * RESIDENT)
        found = arrived = None
        if parts > 1:
            found = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
            arrived = counters(logits.device.index).take(rows)
        launch_op(OPS[name], (rows, parts), (logits, out, last, host, found, arrived), columns, part)
    return out


def cut(rows: int, columns: int, slots: int) -> tuple[int, int]:
    """Eights of a row that one block looks through, and how many blocks that makes: as many as `slots` has for each row, but
    none with less than an eight for each of its threads."""
    units = -(-columns // VECTOR)
    parts = max(1, min(slots // rows, -(-units // OPS["likeliest"].threads)))
    part = -(-units // parts)
    return part, -(-units // part)
