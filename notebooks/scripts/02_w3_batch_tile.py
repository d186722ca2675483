# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Fewer reads, and yet slower? The W3 batch tile
#
# **Question.** A decode step multiplies 1 to 8 rows, one a request, with every weight. The article's W3 kernel launches
# `grid.y = batch` blocks, and each row reads the weights again. Surely it is better to read them once and keep eight
# accumulators? The article wrote that kernel, and it took *twice as long*: 0.48 to 0.53 times the speed. It blames
# registers and occupancy, and prints neither. Is that the reason, and does the experiment fail here too?
#
# Three kernels, all in `deepinfer_lab/kernels/cuda/`: `w3_gemv_grid_y` (each row reads the weights), `w3_gemv_batch_tile` (the
# experiment: a block of 128 threads shares 4 output rows and keeps 4 x 8 accumulators a thread), and `w3_gemv_warp_tile` (the
# same idea with a warp for every 2 output rows, as the W4 kernel has it: a third line, to tell the idea from its execution).

# %% tags=["parameters"]
mode: str = "auto"  # replay: read a record from data/; measure: run now; auto: measure if this machine has a GPU
device: str = "nvidia-h200"  # whose records replay reads, a folder of data/

# %%
import pandas as pd

from deepinfer_lab.figures import kernels as kernel_figures
from deepinfer_lab.figures import style
from deepinfer_lab.kernels import catalogue, resources
from deepinfer_lab.kernels.compiler import compile_kernel
from deepinfer_lab.lab import experiment, project, published
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.kernel_cells import summary

KERNELS = ["w3_gemv_grid_y", "w3_gemv_batch_tile", "w3_gemv_warp_tile"]
ARCHS = ["sm_86", "sm_90"]  # the article's card; an H200

record = experiment.obtain(EXPERIMENTS["w3_batch_tile"], mode=mode, device=device)
rows = summary(record.frame()).rename(columns={"m": "batch"})
article = published.table("3.2")
group = record.params["group"]
print(experiment.banner(record))
print(f"\nthe article, section 3.2 ({article.attrs['hardware']['gpu']}):")
print(article[["batch", "n", "k", "per_row_ms", "batch_tile_ms", "speedup"]].to_string(index=False))

# %% [markdown]
# ## What the article's own numbers say
#
# Before anything is measured: its weight is 4.5 MB with the scales, and its card reads 192 GB/s, so one reading takes some
# 23 microseconds. If reading were what a kernel waits for, the batch tile would take the same time for 2 rows as for 8.

# %%
weight_bytes = article["n"] * article["k"] * (3 / 8 + 2 / group)
reading_us = (weight_bytes / 192e9 * 1e6).iloc[0]
print(f"one reading of the weight: {reading_us:.0f} us at 192 GB/s")
article_us = article.set_index("batch")[["per_row_ms", "batch_tile_ms"]] * 1e3
for name, us in article_us.items():
    per_row = ", ".join(f"{value / batch:.0f}" for batch, value in us.items())
    print(f"{name[:-3]:>10}: {per_row} us a row at batch {', '.join(map(str, us.index))}")
doubling = [article_us["batch_tile_ms"][batch] / article_us["batch_tile_ms"][batch // 2] for batch in (4, 8)]
print(f"twice the batch takes the batch tile {doubling[0]:.2f} and {doubling[1]:.2f} times as long")

# %% [markdown]
# Both of the article's kernels take time in proportion to the batch, and more for one row than a reading takes. Neither was
# waiting for the weights. Saving reads could not have helped: what costs time is what is done for each row, and *that* is
# what a batch tile has to lower. So the prediction must count work, not bytes.
#
# ## Prediction
#
# **By bytes.** Grid.y reads the weights once a row (or finds them in the L2), a tile once: at batch 8 up to 8 times faster.
#
# **By work.** The source says what the inner loop does for R output rows, B batch rows and one unit of eight weights:
#
# | | grid.y | batch tile | warp tile |
# |---|---|---|---|
# | output rows R of a loop body | 2 | 4 | 2 |
# | decode weights: a mask and an FMA each | 16 R | 16 R | 16 R |
# | load weights and scales, and widen the scales | 5 R | 5 R | 5 R |
# | multiply: FMAs, for each batch row | 9 R | 9 R | 9 R |
# | load eight activations and widen them, for each batch row | 9 | 9 | 9 |
# | lanes that share a row of K | 32 | 128 | 32 |
# | sums over the lanes at the end, 5 shuffles and 5 additions each | R | 8 R, whatever the batch | R for each batch row |
#
# Decoding and loading are what a tile shares between batch rows. The last is what it multiplies: with 128 lanes on a row of
# K = 2048 there are two loop bodies to a lane, and then 32 sums to add up. The table leaves out addresses and loop control.

# %%
SHAPES = [tuple(shape) for shape in record.params["shapes"]]
DESIGNS = {  # output rows, lanes along K, batch rows of one loop body, sums at the end for a batch
    "w3_gemv_grid_y": (2, 32, lambda batch: 1, lambda batch: 2),
    "w3_gemv_batch_tile": (4, 128, lambda batch: batch, lambda batch: 4 * 8),
    "w3_gemv_warp_tile": (2, 32, lambda batch: batch, lambda batch: 2 * batch),
}


def work(kernel, batch, k):
    """Instructions for one weight and all of its batch rows, by the table above."""
    outputs, lanes, together, sums = DESIGNS[kernel]
    bodies, weights = batch / together(batch), outputs * 8
    once = bodies * (16 + 5) * outputs / weights
    row = batch * (9 * outputs + 9) / weights
    end = bodies * 10 * sums(batch) / (weights * k / 8 / lanes)
    return {"once": once, "per_row": row, "end": end, "all": once + row + end}


predicted = pd.DataFrame(
    [{"kernel": kernel, "k": k, "batch": batch, **work(kernel, batch, k)}
     for k in sorted({k for _, k in SHAPES}) for batch in (1, 2, 4, 8) for kernel in KERNELS]
)  # fmt: skip
for k, table in predicted.groupby("k"):
    print(f"K = {k}: instructions a weight")
    print(table.drop(columns="k").to_string(index=False, float_format="{:.2f}".format), "\n")

# %% [markdown]
# **By occupancy.** The compiler says how many registers a thread takes, and so how many warps a multiprocessor holds. Few warps
# hide less latency. These are compiled now, for the article's architecture and for an H200's, and need no GPU.

# %%
compiled = {(kernel, arch): compile_kernel(kernel, arch) for kernel in KERNELS for arch in ARCHS}
table = []
for (kernel, arch), binary in compiled.items():
    used, threads = resources.usage(binary), catalogue.KERNELS[kernel].threads
    resident = resources.occupancy(arch, threads, used.registers, used.shared)
    table.append(
        {
            "kernel": kernel,
            "arch": arch,
            "threads": threads,
            "registers": used.registers,
            "spills": used.spill_stores,
            "warps": resident.warps,
            "occupancy": resident.fraction,
            "limiter": resident.limiter,
        }
    )
occupancy = pd.DataFrame(table)
print(occupancy.to_string(index=False, float_format="{:.2f}".format))
fig, axes = style.figure(1, 2, height_in=3.4)
percent = occupancy.assign(percent=occupancy["occupancy"] * 100)
kernel_figures.draw_resources(axes[0, 0], occupancy, "registers", "Registers", "registers of a thread")
kernel_figures.draw_resources(axes[0, 1], percent, "percent", "Occupancy", "warp slots filled (%)", "{:.0f}%")
axes[0, 1].set_yticklabels([])
axes[0, 1].legend(loc="upper center", bbox_to_anchor=(0.2, -0.2), ncols=2)
print(style.save(fig, project.figures(), "02_occupancy", percent[["kernel", "arch", "registers", "percent"]]))

# %%
for kernel in KERNELS:
    outputs, _, together, _ = DESIGNS[kernel]
    body = 8 * outputs + 9 * outputs * together(8)
    found = {arch: resources.ptx_instructions(compiled[kernel, arch].ptx, kernel)["fma"] for arch in ARCHS}
    assert all(count >= body for count in found.values()), (
        f"{kernel}: {body} FMAs by the table above, but the PTX holds {found}"
    )
    print(
        f"{kernel}: {body} FMAs a loop body of {together(8)} batch row(s) by the table above; the compiled codes hold as many"
    )

# %% [markdown]
# The two predictions part ways. By work, the batch tile saves about half at batch 8, and *loses* at batch 1 where K is
# short, as its end costs the same for one row as for eight. By occupancy it holds half as many warps as the others, on either
# card. Which of the two decides, only a measurement tells.
#
# ## Measurement
#
# Cold L2, median of 21 replays of a graph that walks over enough copies of the weight to exceed the L2 four times; and the
# article's method beside it. The bandwidth is the operation's bytes, weights once, over the time.

# %%
rows["bytes"] = rows["n"] * rows["k"] * (3 / 8 + 2 / group) + rows["batch"] * (rows["n"] + rows["k"]) * 2
rows["gb_per_s"] = rows["bytes"] / rows["us"] / 1e3
timed = rows[rows["kernel"].isin(KERNELS)]
cold = timed[timed["method"] == "graph_cold"]
read_gb_per_s = (cold["bytes"] / cold["floor_us"] / 1e3).median()
empty = rows[rows["kernel"] == "empty_launch"]["us"].iloc[0]
print(f"measured read bandwidth {read_gb_per_s:.0f} GB/s; a launch that does nothing takes {empty:.2f} us in a graph\n")
for (n, k), table in cold.groupby(["n", "k"], sort=False):
    floor = table["floor_us"].min()
    print(f"{n} x {k}: memory floor {floor:.1f} us at batch 1")
    for value, title in (("us", "microseconds"), ("gb_per_s", "GB/s")):
        print(f"  {title} by batch:")
        print(
            table.pivot(index="kernel", columns="batch", values=value)
            .loc[KERNELS]
            .to_string(float_format="{:.1f}".format)
        )

# %%
fig, axes = style.figure(1, len(SHAPES), height_in=4.4)
for number, (n, k) in enumerate(SHAPES):
    its = cold[(cold["n"] == n) & (cold["k"] == k)]
    kernel_figures.draw_small_batch(axes[0, number], its, f"W3, {n} x {k}")
    if number:
        axes[0, number].set_ylabel("")
handles, labels = axes[0, 0].get_legend_handles_labels()
fig.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
shown = cold[["n", "k", "kernel", "batch", "us", "floor_us"]]
print(style.save(fig, project.figures(), "02_batch", shown))

# %% [markdown]
# ### Beside the article
#
# Speed of each tile relative to grid.y: above 1 the tile is faster. `by_work` is the ratio of the instruction counts predicted
# above; `of_work` is the measured ratio over it. Below 1, the tile got less out of its instructions than grid.y: that is where
# occupancy and latency are, and not only occupancy by registers, of which the warp tile has as much as grid.y.

# %%
speed = timed.pivot(index=["method", "n", "k", "batch"], columns="kernel", values="us")
ratios = pd.DataFrame(
    {name: speed["w3_gemv_grid_y"] / speed[f"w3_gemv_{name}"] for name in ("batch_tile", "warp_tile")}
).reset_index()
counts = {(r.kernel, r.k, r.batch): r.all for r in pd.DataFrame(
    [{"kernel": kernel, "k": k, "batch": b, **work(kernel, b, k)} for kernel in KERNELS for _, k in SHAPES for b in range(1, 9)]
).itertuples()}  # fmt: skip
for name in ("batch_tile", "warp_tile"):
    ratios[f"{name}_by_work"] = [
        counts["w3_gemv_grid_y", r.k, r.batch] / counts[f"w3_gemv_{name}", r.k, r.batch] for r in ratios.itertuples()
    ]
    ratios[f"{name}_of_work"] = ratios[name] / ratios[f"{name}_by_work"]
theirs = article.set_index(["n", "k", "batch"])["speedup"]
ratios["article"] = [theirs.get((r.n, r.k, r.batch), float("nan")) for r in ratios.itertuples()]
for n, k in SHAPES:
    its = ratios[(ratios["method"] == "graph_cold") & (ratios["n"] == n) & (ratios["k"] == k)]
    print(f"{n} x {k}, cold:")
    print(its.drop(columns=["method", "n", "k"]).to_string(index=False, float_format="{:.2f}".format, na_rep="-"), "\n")
same = ratios[(ratios["method"] == "article") & ratios["article"].notna()]
print("by the article's own method, on its shape (a launch's cost in Python included):")
print(same[["batch", "batch_tile", "warp_tile", "article"]].to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# ## Cause
#
# How a kernel's time grows with the batch separates what it pays once from what it pays for each row. A straight line through
# batch 1 to 8 has the cost of a row as its slope; what is left at zero rows does not depend on them: reading and decoding for
# a tile, launching for all, and whatever a first row waits for that further ones do not.

# %%
fits = []
for (n, k, kernel), table in cold.groupby(["n", "k", "kernel"], sort=False):
    centred = table["batch"] - table["batch"].mean()
    slope = (centred * table["us"]).sum() / (centred**2).sum()
    fits.append({"n": n, "k": k, "kernel": kernel, "us_a_row": slope,
                 "us_at_zero_rows": table["us"].mean() - slope * table["batch"].mean()})  # fmt: skip
fits = pd.DataFrame(fits)
print(fits.to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# If the tile's row costs less than grid.y's, its saved decoding outweighs its missing warps, and the article's explanation is
# not the whole of it: the article's tile doubled its time with the batch, so its row cost more than a row of grid.y, whatever
# it read. If it costs more, occupancy has eaten what the counts promise. The warp tile was to tell the idea from its execution:
# it shares the reads as the batch tile does, and keeps the registers and the warps of grid.y. But it has a block where grid.y
# has several, and where N is small they do not fill a card such as an H200.
#
# ## Conclusion
#
# What must hold on any card is asserted. Which kernel wins is computed, and said as it is found.

# %%
by_kernel = occupancy.pivot(index="arch", columns="kernel", values=["registers", "warps"])
claims = {
    "every result agrees with float32 to 2e-3": bool(rows["correct"].all()),
    "the L2 was cold: no launch took less than 3/4 of its memory floor": bool(
        (cold["us"] > 0.75 * cold["floor_us"]).all()
    ),
    "the article's tile takes twice the time for twice the batch, so it did not wait for reads": min(doubling) > 1.7,
    "the batch tile takes more registers, and holds fewer warps, on sm_86 and on sm_90": bool(
        (by_kernel["registers"]["w3_gemv_batch_tile"] > by_kernel["registers"]["w3_gemv_grid_y"]).all()
        and (by_kernel["warps"]["w3_gemv_batch_tile"] < by_kernel["warps"]["w3_gemv_grid_y"]).all()
    ),
    "the warp tile holds as many warps as grid.y": bool(
        (by_kernel["warps"]["w3_gemv_warp_tile"] == by_kernel["warps"]["w3_gemv_grid_y"]).all()
    ),
    "nothing spills": bool((occupancy["spills"] == 0).all()),
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")


def verdict(ratio):
    """Within 3% is a tie."""
    return "as fast as" if abs(ratio - 1) < 0.03 else "faster than" if ratio > 1 else "slower than"


print()
at_cold = ratios[ratios["method"] == "graph_cold"].set_index(["n", "k", "batch"])
for n, k in SHAPES:
    for batch in (2, 8):
        r = at_cold.loc[(n, k, batch)]
        print(
            f"{n} x {k}, batch {batch}: the batch tile is {verdict(r['batch_tile'])} grid.y ({r['batch_tile']:.2f}x), "
            f"the warp tile is {verdict(r['warp_tile'])} grid.y ({r['warp_tile']:.2f}x)"
        )
ours = at_cold.loc[[(r.n, r.k, r.batch) for r in article.itertuples()], "batch_tile"]
agree = "confirmed" if (ours < 0.97).all() else "overturned" if (ours > 1.03).all() else "confirmed in part"
print(f"\nthe article's verdict on its own shape, that the batch tile is slower at 2, 4 and 8 rows, is {agree} here:")
for batch, ratio, theirs in zip(article["batch"], ours, article["speedup"], strict=True):
    print(f"  batch {batch}: {ratio:.2f}x here, {theirs:.2f}x there")
best = at_cold["warp_tile"] > 1.03
print(f"the warp tile is faster than grid.y in {best.sum()} of {len(best)} cases")
