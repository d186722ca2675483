# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · A tiled GEMM that never holds the weights
#
# **Question.** A prompt is read some 30 tokens at a time. The old way to multiply 30 rows with a 4-bit or 3-bit weight was to
# expand the weight to fp16 with torch and call cuBLAS. The DeepInfer-SM86 article, part 7, replaced it with one kernel that
# unpacks 32 x 64 weights at a time into shared memory, and reports 2.24 to 2.87 times the speed at 4 bits and 7.71 to 9.45
# times at 3. Does that hold on another card, what decides it, and from how many rows on is the kernel the right one?
#
# The kernels here are the article's designs, written anew: `deepinfer_lab/kernels/cuda/tiled_gemm.cuh` and what includes it. A
# second pair of ours, `*_split_k`, changes one thing for large cards. Everything measured below comes from a *record*, which
# `mode` either reads or makes.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read a record from data/; measure: run now; auto: measure if this machine has a GPU
device: str = "nvidia-h200"  # whose records replay reads, a folder of data/

# %%
import numpy as np
import pandas as pd

from deepinfer_lab.figures import explore, style
from deepinfer_lab.figures import kernels as kernel_figures
from deepinfer_lab.figures import maps as map_figures
from deepinfer_lab.kernels import dispatch, maps
from deepinfer_lab.kernels.catalogue import KERNELS
from deepinfer_lab.lab import experiment, project, published
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.kernel_cells import summary
from deepinfer_lab.lab.kernel_dispatch import derive_dispatch, sweep

record = experiment.obtain(EXPERIMENTS["tiled_gemm"], mode=mode, device=device)
rows = summary(record.frame())
article = published.table("2.7").rename(columns={"weight_bits": "bits"})
print(experiment.banner(record))
print(f"\nthe article, section 2.7 ({article.attrs['hardware']['gpu']}; {article.attrs['method']}):")
print(article[["bits", "m", "n", "k", "tiled_ms", "fallback_ms", "speedup"]].to_string(index=False))

# %% [markdown]
# ## What lies in memory
#
# Eight consecutive weights of a row are one *unit*: four bytes at 4 bits, three at 3 bits. Each cell below is one bit, with
# its place in its value written on it. At 4 bits a byte holds two whole values. At 3 bits eight values fill 24 bits exactly,
# but bytes end where values do not: `q2` and `q5` (outlined) have bits in two bytes, so nobody can unpack a single byte.

# %%
layouts = {bits: map_figures.bit_table(bits) for bits in (4, 3)}
fig, axes = style.figure(2, 1, height_in=3.6)
map_figures.draw_bit_layout(axes[0, 0], layouts[4], "W4: one unit, lowest bit first")
map_figures.draw_bit_layout(
    axes[1, 0], layouts[3], "W3: one unit, lowest bit first; outlined values straddle two bytes"
)
print(style.save(fig, project.figures(), "01_bits", pd.concat(layouts, names=["bits"]).reset_index("bits")))

# %% [markdown]
# ## Who unpacks what
#
# A block of 256 threads owns 32 x 64 outputs and walks along K in steps of 32. In every step it unpacks 64 rows x 32 weights
# into `shared_b[32][65]`, each thread eight of them. At 4 bits a lane takes a byte: lanes 0-15 read the 16 bytes of one row,
# lanes 16-31 those of the next, and a warp comes back four times. At 3 bits a lane takes a whole unit of three bytes, because
# it must: `lane >> 2` is the row, `lane & 3` the unit, and eight warps cover the tile at once, with no lane idle.
#
# Left, the whole tile, a colour for each of the eight warps. Right, its first eight columns with the number of the lane.

# %%
unpacking = {bits: map_figures.unpack_table(bits) for bits in (4, 3)}
fig, axes = style.figure(2, 2, height_in=9.6, width_ratios=[1.7, 1])
for row, (bits, cells) in enumerate(unpacking.items()):
    map_figures.draw_unpack_map(axes[row, 0], cells, f"W{bits}: warps that fill shared_b")
    map_figures.draw_unpack_map(axes[row, 1], cells, f"W{bits}: lanes", columns=8, lanes=True)
print(style.save(fig, project.figures(), "01_unpack", pd.concat(unpacking, names=["bits"]).reset_index("bits")))

# %% [markdown]
# ## Who multiplies what
#
# A thread computes two rows by four columns, framed below with its lane's number. For each of the 32 values of k it takes two
# activations and four weights from shared memory and does eight multiply-adds with them: six values for eight FMAs.

# %%
outputs = map_figures.output_table()
fig, axes = style.figure(height_in=4.6)
map_figures.draw_output_map(axes[0, 0], outputs, "a block's 32 x 64 outputs: warps (colour) and lanes (number)")
print(style.save(fig, project.figures(), "01_outputs", outputs))
budget = maps.shared_bytes()
print(
    f"shared memory: {budget['shared_a']:,} bytes of activations + {budget['shared_b']:,} of weights = {sum(budget.values()):,}"
)

# %% [markdown]
# In JupyterLab, other tiles: how many blocks each limit of a multiprocessor allows. Of registers it knows the accumulators
# only; what the compiler adds, `deepinfer-lab kernels` shows for the kernels that exist.

# %% tags=["nbval-skip"]
explore.explore_tiles()

# %% [markdown]
# ## Why the 65th column
#
# Shared memory has 32 banks of 4-byte words; lanes of a warp that ask one bank for different words take turns. While
# unpacking, lanes of a warp write to one column and many k, so they are a whole row of `shared_b` apart. A row of 64 halves
# is 32 words, and all of them land in the same bank. One more half in each row, never used, staggers them.

# %%
banks = {bits: map_figures.bank_table(bits) for bits in (4, 3)}
fig, axes = style.figure(2, 2, height_in=5.4, sharex=True)
for row, (bits, table) in enumerate(banks.items()):
    for column, length in enumerate((maps.UNPADDED, maps.PADDED)):
        map_figures.draw_banks(axes[row, column], table, length, f"W{bits}, shared_b[32][{length}]")
print(style.save(fig, project.figures(), "01_banks", pd.concat(banks, names=["bits"]).reset_index("bits")))
for bits in (4, 3):
    ways = [maps.conflict_ways(maps.b_write_offsets(bits, stride)) for stride in (maps.UNPADDED, maps.PADDED)]
    print(
        f"W{bits}: turns of a store, mean over all of them: {ways[0].mean():.1f} unpadded, {ways[1].mean():.1f} padded"
    )

# %% [markdown]
# ## How the values are read
#
# Six values need not be six reads. Shared memory delivers 128 bytes a turn, and a read of two bytes wastes most of it. A
# thread's activations of eight consecutive k lie side by side: one read of 16 bytes. Its four weights of one k are neighbours
# too, but a row of 65 halves begins on 8 bytes only where 4 divides k; elsewhere they come in two or three pieces. Below, what
# that saves, by the same index formulas as in the kernel.

# %%
ways_to_read = {"one by one (article)": maps.one_by_one(), "as wide as alignment allows (here)": maps.wide()}
reads_per_k = {name: len(reads) / maps.BK for name, reads in ways_to_read.items()}
turns_per_k = {name: sum(read.turns for read in reads) / maps.BK for name, reads in ways_to_read.items()}
for name in ways_to_read:
    print(f"{name}: {reads_per_k[name]:.2f} reads of a warp for one k, {turns_per_k[name]:.2f} turns of shared memory")

# %% [markdown]
# ## Prediction
#
# Four things can bound the time, and each is a quotient of two numbers that are known before the first run.
#
# 1. **Memory**: packed weights, scales, activations and outputs, once, over the read bandwidth.
# 2. **Shared memory**: the turns above. A multiprocessor serves one a cycle, for all its warps.
# 3. **Instructions**: for one k a warp issues its reads, six conversions from fp16 and eight FMAs. Each of a multiprocessor's
#    four schedulers issues one instruction a cycle. A block needs 8 warps x K times what one k needs, of either kind; the
#    multiprocessor with the most blocks decides. Neither counts unpacking, waiting at barriers, or latency that two warps a
#    scheduler are too few to hide.
# 4. **The fallback's intermediate tensors**: every torch operation in `dequant_cublas` reads and writes whole tensors. Their
#    bytes are listed here for one weight; over the bandwidth they give the fallback's time, unless a large L2 keeps some.
#
# The article's card is a datasheet: 16 multiprocessors at up to 1.74 GHz, and 192 GB/s. The card at hand brings its own
# numbers, in the record.
#
# `*_split_k` divides K over up to eight blocks that share the same outputs, and adds their sums in a second launch. The same
# work then spreads over more multiprocessors: its prediction is the same, with the last row of blocks filled up.

# %%
SCHEDULERS, CONVERSIONS, FMAS = 4, 6, 8  # of a multiprocessor; of a warp for one k
cycles_per_k = {
    name: (maps.THREADS // maps.WARP) * max(turns_per_k[name], (reads_per_k[name] + CONVERSIONS + FMAS) / SCHEDULERS)
    for name in ways_to_read
}
article_way, our_way = ways_to_read
for name, cycles in cycles_per_k.items():
    print(f"{name}: {cycles:.0f} cycles of a multiprocessor for one k of a block")

FALLBACK_STEPS = {  # operation: bytes read and written for one weight
    4: {
        "packed & 15": 0.5 + 0.5,
        "packed >> 4": 0.5 + 0.5,
        "stack": 1 + 1,
        "to int8": 1 + 1,
        "^ sign": 1 + 1,
        "- sign": 1 + 1,
        "to float32": 1 + 4,
        "* scale": 4 + 4,
        "to float16": 4 + 2,
        "multiply": 2,
    },
    3: {
        "bytes to int32": 0.375 + 1.5,
        "join three bytes": 4 * 0.5 + 6 * 0.5,
        ">> 0, 3, ... 21": 0.5 + 4,
        "& 7": 4 + 4,
        "to int8": 4 + 1,
        "^ sign": 1 + 1,
        "- sign": 1 + 1,
        "to float32": 1 + 4,
        "* scale": 4 + 4,
        "to float16": 4 + 2,
        "multiply": 2,
    },
}
fallback_bytes = {bits: sum(steps.values()) for bits, steps in FALLBACK_STEPS.items()}
for bits, total in fallback_bytes.items():
    print(
        f"W{bits}: the fallback moves {total:.1f} bytes a weight, where {bits / 8} are stored: {total / (bits / 8):.0f} times"
    )

# %%
group = record.params["group"]
origin = record.provenance


def operation_bytes(table):
    """Weights, scales, activations and outputs, each once."""
    few_bit = table["n"] * table["k"] * (table["bits"] / 8 + 2 / group)
    return few_bit + table["m"] * (table["k"] + table["n"]) * 2


tiled_rows = rows[rows["kernel"].str.endswith("tiled_gemm")]
measured_bandwidth = (operation_bytes(tiled_rows) / tiled_rows["floor_us"] * 1e6).median()
cards = {
    "RTX 3050 Laptop": {
        "multiprocessors": 16,
        "hertz": 1.74e9,
        "bandwidth": 192e9,
        "cycles": cycles_per_k[article_way],
    },
    origin["device"]: {
        "multiprocessors": origin["multiprocessors"],
        "hertz": origin["clocks"].get("sm_max_mhz", np.nan) * 1e6,
        "bandwidth": measured_bandwidth,
        "cycles": cycles_per_k[our_way],
    },
}


def predict(card):
    """Times in microseconds of the article's shapes on a card, by the three quotients."""
    table = article[["bits", "m", "n", "k"]].copy()
    table["blocks"] = -(-table["n"] // maps.BN) * -(-table["m"] // maps.BM)
    table["blocks_per_sm"] = -(-table["blocks"] // card["multiprocessors"])
    table["memory_us"] = operation_bytes(table) / card["bandwidth"] * 1e6
    cycles_of_a_block = table["k"] * card["cycles"]
    table["multiply_us"] = table["blocks_per_sm"] * cycles_of_a_block / card["hertz"] * 1e6
    parts = [
        KERNELS[f"w{r.bits}_tiled_gemm_split_k"].splits(r.n, r.k, card["multiprocessors"]) for r in table.itertuples()
    ]
    table["splits"] = parts
    rounds = -(-table["blocks"] * table["splits"] // card["multiprocessors"])
    table["split_us"] = rounds * cycles_of_a_block / table["splits"] / card["hertz"] * 1e6
    table["fallback_us"] = table["n"] * table["k"] * table["bits"].map(fallback_bytes) / card["bandwidth"] * 1e6
    table["speedup"] = table["fallback_us"] / table[["memory_us", "multiply_us"]].max(axis=1)
    table["split_speedup"] = table["fallback_us"] / table[["memory_us", "split_us"]].max(axis=1)
    return table


predictions = {name: predict(card) for name, card in cards.items()}
for name, card in cards.items():
    print(
        f"{name}: {card['multiprocessors']} multiprocessors, {card['hertz'] / 1e9:.2f} GHz, {card['bandwidth'] / 1e9:.0f} GB/s"
    )
    print(predictions[name].to_string(index=False, float_format="{:.1f}".format), "\n")

# %% [markdown]
# The first table can be held against the article at once. If these quotients explain its measurements, they are worth
# something on the next card.

# %%
check = predictions["RTX 3050 Laptop"][["bits", "n", "k", "multiply_us", "fallback_us"]].copy()
check["article_tiled_us"] = article["tiled_ms"] * 1e3
check["article_fallback_us"] = article["fallback_ms"] * 1e3
check["tiled_share"] = check["multiply_us"] / check["article_tiled_us"]
check["fallback_share"] = check["fallback_us"] / check["article_fallback_us"]
print(check.to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# So the article's tiled kernel was never near its memory's limit: reading *shared* memory value by value takes half to four
# fifths of its time, even if nothing else is counted. Its W4 fallback is explained by the bytes of its intermediate tensors to
# within a fifth. (Its W3 fallback took longer than ours would; its source is not published.)
#
# What changes on a larger card follows. Memory and multiprocessors both grow, but the grid does not: 2,048 to 5,632 outputs are
# 32 to 88 blocks, whether there are 16 multiprocessors to take them or 132. Where blocks are fewer than multiprocessors, the
# rest of the card idles while the fallback uses all of its bandwidth. The speedup must shrink on just those shapes; `speedup`
# says how far, and `split_speedup` what splitting K should bring back.
#
# ## Measurement
#
# Two methods. *Cold*: a CUDA graph launches the kernel once on each of many copies of the weight, more than four times the L2
# in all; the median of 21 replays, the launch's own cost hidden. *Article's*: warm up 3 times, then the mean of 20 launches of
# one weight, which a large L2 holds, and which includes what Python takes to launch. Below, times in microseconds.

# %%
shapes = article[["bits", "m", "n", "k"]].drop_duplicates()
names = {
    "w4_tiled_gemm": "tiled",
    "w3_tiled_gemm": "tiled",
    "w4_tiled_gemm_split_k": "split",
    "w3_tiled_gemm_split_k": "split",
    "dequant_cublas": "fallback",
    "cublas_fp16": "dense",
}
columns = {}
for method in ("graph_cold", "article"):
    found = rows[(rows["method"] == method) & rows["m"].eq(30)]
    for kernel, name in names.items():
        # The dense weight of a shape has no bits of its own: it stands beside both.
        its = found[found["kernel"] == kernel].groupby(["bits", "n", "k"])["us"].first()
        for (bits, n, k), us in its.items():
            for few in (4, 3) if bits == 16 else (bits,):
                columns[method, name, few, n, k] = us
measured = shapes.copy()
for method, short in (("graph_cold", "cold"), ("article", "warm")):
    for name in ("tiled", "split", "fallback", "dense"):
        measured[f"{name}_{short}"] = [columns[method, name, r.bits, r.n, r.k] for r in measured.itertuples()]
measured["floor"] = operation_bytes(measured) / measured_bandwidth * 1e6
print(measured.to_string(index=False, float_format="{:.1f}".format))
empty = rows[rows["kernel"] == "empty_launch"]["us"].iloc[0]
print(f"\na launch that multiplies one number, in a graph: {empty:.2f} us; no kernel above can take less")

# %%
predicted = predictions[origin["device"]]
comparison = measured[["bits", "n", "k"]].copy()
comparison["article"] = article["speedup"].to_numpy()
comparison["predicted"] = predicted["speedup"].to_numpy()
comparison["cold"] = measured["fallback_cold"] / measured["tiled_cold"]
comparison["warm"] = measured["fallback_warm"] / measured["tiled_warm"]
comparison["split_predicted"] = predicted["split_speedup"].to_numpy()
comparison["split_cold"] = measured["fallback_cold"] / measured["split_cold"]
comparison["split_warm"] = measured["fallback_warm"] / measured["split_warm"]
print(comparison.to_string(index=False, float_format="{:.2f}".format))
print("\nas a share of each floor, and against dense cuBLAS, cold:")
shares = measured[["bits", "n", "k"]].copy()
for name, column in (("tiled", "multiply_us"), ("split", "split_us")):
    shares[f"{name}_of_memory"] = measured["floor"] / measured[f"{name}_cold"]
    shares[f"{name}_of_multiply"] = predicted[column].to_numpy() / measured[f"{name}_cold"]
    shares[f"{name}_against_dense"] = measured["dense_cold"] / measured[f"{name}_cold"]
print(shares.to_string(index=False, float_format="{:.2f}".format))

# %%
sources = {
    "article": "article, RTX 3050 Laptop",
    "cold": f"{origin['device']}, cold L2",
    "warm": f"{origin['device']}, article's method",
    "split_cold": f"{origin['device']}, split over K, cold L2",
}
bars = comparison.assign(shape=[f"W{r.bits}, {r.n} x {r.k}" for r in comparison.itertuples()]).melt(
    "shape", list(sources), "source", "speedup"
)
bars["source"] = bars["source"].map(sources)
fig, axes = style.figure(height_in=5.0)
kernel_figures.draw_speedups(axes[0, 0], bars, "Tiled GEMM against dequantise + cuBLAS, M = 30")
print(style.save(fig, project.figures(), "01_speedup", bars))

# %% [markdown]
# ## Why both comparisons
#
# `*_against_dense` compares with an fp16 weight that has already been expanded and lies in memory at 2 bytes a weight,
# multiplied on tensor cores. That is what a user without quantisation has; it is not what the tiled kernel replaced. The module
# it lives in holds packed weights only, so its alternative is `fallback`: expand, then the same cuBLAS. Comparing with dense
# alone hides the expansion, and understates the gain; comparing with the fallback alone hides that cuBLAS on tensor cores is
# the faster multiplication. The two ratios answer different questions.
#
# ## How many rows?
#
# The same weight for M from 1 to 512, cold. GEMV kernels do work in proportion to M. The tiled kernel costs the same from 1 row
# to 32, and then that again for each 32 beyond what an idle part of the card takes for nothing. The fallback pays once for
# expansion, whatever M. `mma_small`, `mma_block` and `wide` do the same work on tensor cores: notebook 06 comes to them. Where
# lines cross, the dispatch table has a border.

# %%
crossing = sweep(record)
few = {bits: crossing[crossing["bits"].isin([bits, 16])] for bits in (4, 3)}
sweep_shapes = [tuple(shape) for shape in record.params["sweep_shapes"]]
fig, axes = style.figure(2, 2, height_in=9.0, sharex=True)
for row, (bits, table) in enumerate(few.items()):
    for column, (n, k) in enumerate(sweep_shapes):
        shown = table[(table["n"] == n) & (table["k"] == k)]
        kernel_figures.draw_crossover(axes[row, column], shown, f"W{bits}, {n} x {k}")
fig.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)  # W3 has every design
shown = crossing[["bits", "m", "n", "k", "kernel", "us", "floor_us"]]
print(style.save(fig, project.figures(), "01_crossover", shown))
for (bits, n, k), table in shown[shown["bits"] != 16].groupby(["bits", "n", "k"], sort=False):
    print(f"\nW{bits}, {n} x {k}, microseconds by M:")
    print(table.pivot(index="kernel", columns="m", values="us").to_string(float_format="{:.1f}".format, na_rep="-"))

# %% [markdown]
# In JupyterLab, the same launches under the card's roof: what memory allows at so many operations a byte, and what FMAs allow
# without tensor cores, one a cycle from each scheduler.

# %% tags=["nbval-skip"]
peak = SCHEDULERS * maps.WARP * 2 * cards[origin["device"]]["multiprocessors"] * cards[origin["device"]]["hertz"]
explore.explore_roofline(shown, group=group, bandwidth=measured_bandwidth, peak=peak)

# %% [markdown]
# The fastest few-bit kernel for each M, by the geometric mean over both shapes, makes a dispatch table of this card's own. The
# one that serves, `data/<device>/dispatch.json`, has rows for every shape of a model's layers: notebook 06.

# %%
derived = derive_dispatch(record)
for title, table in (("the article's table", dispatch.ARTICLE), (f"this record's ({origin['device']})", derived)):
    print(f"{title}:")
    for entry in table:
        end = "" if entry.m_max == entry.m_min else f" to {entry.m_max}" if entry.m_max else " and more"
        print(f"  W{entry.bits}, M = {entry.m_min}{end}: {entry.kernel}")

# %% [markdown]
# ## Cause
#
# The quotient of instructions counts blocks on the busiest multiprocessor. If that is the cause, the shapes that win least are
# those with fewer blocks than multiprocessors; and dividing the same work into more blocks, which changes nothing else, must
# bring the time down towards the floor: `split_gain` is by how much it did.

# %%
cause = predicted[["bits", "n", "k", "blocks", "blocks_per_sm", "splits"]].copy()
cause["busy_share"] = (cause["blocks"] / (cause["blocks_per_sm"] * origin["multiprocessors"])).to_numpy()
cause["time_over_floor"] = 1 / shares["tiled_of_multiply"]
cause["split_time_over_floor"] = 1 / shares["split_of_multiply"]
cause["split_gain"] = measured["tiled_cold"] / measured["split_cold"]
print(cause.to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# ## Conclusion
#
# The statements that must hold on any card are assertions. The article's verdict is computed, and said as it is found.

# %%
fills = cause["blocks"] >= origin["multiprocessors"]
single_row = {dispatch.choose(bits, 1, table=derived) for bits in (4, 3)}
claims = {
    "every result agrees with float32 to 2e-3": bool(rows["correct"].all()),
    "the L2 was cold: no launch took less than 3/4 of its memory floor": bool(
        (rows[rows["method"] == "graph_cold"].eval("us / floor_us") > 0.75).all()
    ),
    "where the grid fills the card, the article's kernel beats the fallback": bool(
        (comparison["cold"][fills] > 1).all()
    ),
    "against dense cuBLAS alone every gain looks smaller": bool(
        (shares["tiled_against_dense"] < comparison["cold"]).all()
    ),
    "memory bandwidth is not what the tiled kernel waits for": bool((shares["tiled_of_memory"] < 0.5).all()),
    "one row is never a matter for the tiled kernel or the fallback": not any(
        part in kernel for kernel in single_row for part in ("tiled_gemm", "dequant")
    ),
    "with K split, the tiled kernel beats the fallback on every shape": bool((comparison["split_cold"] > 1).all()),
    "splitting K gains most where blocks are fewest": bool(
        cause.loc[cause["blocks"].idxmin(), "split_gain"] == cause["split_gain"].max()
    ),
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")

print()
for name, title in {"": "the article's design", "split_": "with K split"}.items():
    cold, warm = comparison[f"{name}cold"], comparison[f"{name}warm"]
    print(f"{title}: faster than the fallback on {(cold > 1).sum()} of {len(cold)} of the article's shapes, cold")
    for bits in (4, 3):
        its = comparison["bits"] == bits
        theirs = article[article["bits"] == bits]["speedup"]
        print(
            f"  W{bits}: {cold[its].min():.2f}x to {cold[its].max():.2f}x cold, {warm[its].min():.2f}x to "
            f"{warm[its].max():.2f}x by the article's method; the article: {theirs.min():.2f}x to {theirs.max():.2f}x"
        )
    for r in comparison[cold <= 1].itertuples():
        print(f"  slower: W{r.bits}, {r.n} x {r.k}, {cold[r.Index]:.2f}x, with {cause['blocks'][r.Index]} blocks")
print(f"the article's dispatch table is {'also' if derived == dispatch.ARTICLE else 'not'} this card's")
