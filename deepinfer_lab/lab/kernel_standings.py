"""Where our kernels stand among other people's, product by product: a `kernel_peers` record beside the published cells."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from deepinfer_lab.lab import published
from deepinfer_lab.lab.kernel_peers import CUBLAS, OURS
from deepinfer_lab.lab.record import Record

SHAPE = ["m", "n", "k"]
CELL = ["bits", *SHAPE]
RANGES: Mapping[str, tuple[int, int]] = MappingProxyType({"1-8": (1, 8), "16-64": (16, 64), "128-512": (128, 512)})


def standings(record: Record | None, device: str) -> pd.DataFrame:
    """One row a few-bit product, sorted, of wrong results none.

    Args:
        record: of `kernel_peers`; without one, published cells stand alone.
        device: whose published cells count, where there are some, at the record's group.

    Returns:
        Columns bits, m, n, k; `kernel`, `us` and `floor_us` of our fastest; `peer` and `peer_us`, the fastest of other people's
        with as many bits, in the record or published; `cublas_us` of fp16, the record's where it has it; `gain`, peer_us / us,
        and `reached`, floor_us / us. NaN where there is no such time.
    """
    parts = [pd.DataFrame(columns=["peer", *CELL, "kernel", "us", "floor_us"])]
    if record is not None:
        right = record.frame().query("correct")
        parts.append(right.assign(us=[float(np.median(times)) for times in right["time_us"]]))
    if device == published.PEERS_DEVICE and (record is None or record.params["group"] == published.PEERS_GROUP):
        known = published.table("gemm", published.PEERS_FILE).rename(columns={"time_us": "us"})
        parts.append(known.assign(peer=known["peer"].where(known["bits"] == 16, known["peer"] + ", published")))
    everyone = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)
    dense = everyone[everyone["peer"] == CUBLAS].drop_duplicates(SHAPE)  # the record's come first
    few = everyone[everyone["bits"] != 16].sort_values("us", kind="stable")
    mine = few["peer"] == OURS
    ours, theirs = (part.drop_duplicates(CELL) for part in (few[mine], few[~mine]))
    ours = ours.reindex(columns=[*CELL, "kernel", "us", "floor_us"])
    theirs = theirs[[*CELL, "peer", "us"]].rename(columns={"us": "peer_us"})
    table = ours.merge(theirs, on=CELL, how="outer")
    table = table.merge(dense[[*SHAPE, "us"]].rename(columns={"us": "cublas_us"}), on=SHAPE, how="left")
    table = table.sort_values(CELL, ignore_index=True)
    return table.assign(gain=table["peer_us"] / table["us"], reached=table["floor_us"] / table["us"])


def by_range(table: pd.DataFrame) -> pd.DataFrame:
    """Gains of `standings` in ranges of M: bits, rows, cells, mean (geometric), ahead (cells with a gain over 1), least, and
    where that is.

    Cells that lack a time do not count, nor do ranges without a cell.
    """
    parts = []
    for bits, of_bits in sorted(table.dropna(subset="gain").groupby("bits"), reverse=True):
        for name, (low, high) in RANGES.items():
            its = of_bits[of_bits["m"].between(low, high)]
            if len(its):
                worst = its.loc[its["gain"].idxmin()]
                at = f"{worst['m']} x {worst['n']} x {worst['k']}, {worst['peer']}"
                mean, ahead = float(np.exp(np.log(its["gain"]).mean())), int((its["gain"] > 1).sum())
                parts.append((int(bits), name, len(its), mean, ahead, float(worst["gain"]), at))
    return pd.DataFrame(parts, columns=["bits", "rows", "cells", "mean", "ahead", "least", "where"])
