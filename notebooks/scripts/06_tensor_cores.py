# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 · Tensor cores for few bits: from the article's kernels to these
#
# **Question.** The DeepInfer-SM86 article, part 7, names what its kernels lack: tensor cores, copies that run ahead, bandwidth.
# A weight in 4 or 3 bits is a quarter or a fifth of the bytes of fp16, and should be that much faster wherever memory is the
# limit. Other people's kernels get part of it. How much does each change bring, from the article's kernels on, and where does
# the result stand beside theirs?
#
# Two records answer: `kernel_ladder`, every kernel that this project has on a few products, and `kernel_peers`, the one that
# dispatch chooses, on all of them, with cuBLAS and torch's tinygemm in the same run. All times are medians with nothing in the
# L2, of results that were checked against float32 first. A third, `decode_step`, tells what becomes of it in a whole
# model: in steps of a few rows, whose products have to wait for one another.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read records from data/; measure: run now; auto: measure if this machine has a GPU
device: str = "nvidia-h200"  # whose records replay reads, a folder of data/

# %%
import numpy as np
import pandas as pd

from deepinfer_lab.figures import ladder as ladder_figures
from deepinfer_lab.figures import roofline as roof_figures
from deepinfer_lab.figures import steps as step_figures
from deepinfer_lab.figures import style
from deepinfer_lab.figures import tiles as tile_figures
from deepinfer_lab.kernels import chain_plan, dispatch, mma_block
from deepinfer_lab.kernels.tiles_check import UNIT_N, unit_bytes
from deepinfer_lab.lab import experiment, kernel_ladder, project, published
from deepinfer_lab.lab import mode as modes
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.kernel_cells import FEW_BIT
from deepinfer_lab.lab.kernel_standings import by_range, standings
from deepinfer_lab.metrics.roofline import Machine, Span, forward_costs, product
from deepinfer_lab.model.synthetic import SHAPES
from deepinfer_lab.quant.plan import PLANS

GROUP = 128


def show(table, digits=2):
    print(table.to_string(index=False, float_format=f"{{:,.{digits}f}}".format, na_rep="-"))


def judge(text, holds):
    print(f"{'holds' if holds else 'does not hold'}: {text}")


records = {"kernel_ladder": None, "kernel_peers": None, "decode_step": None}
for name in records:
    if modes.resolve(mode, runs_on_cpu=False) == "measure" or (project.data() / device / f"{name}.json").is_file():
        records[name] = experiment.obtain(EXPERIMENTS[name], mode=mode, device=device)
        print(experiment.banner(records[name]))
    else:
        print(f"{name}: no record of {device} yet; what needs it is left out")
ladder, peers, decode = records["kernel_ladder"], records["kernel_peers"], records["decode_step"]
card_slug = next((each.provenance["device_slug"] for each in records.values() if each is not None), device)

# %% [markdown]
# ## What bounds which M
#
# A product of M rows with N x K weights costs 2 M N K FLOPs, and every weight has to be read once. So FLOPs a byte grow with M,
# and the fewer bits a weight has, the sooner they do. The *ridge* is the M from which on arithmetic takes longer than memory.
# Below it few bits win by their bytes. From there to the ridge of fp16 they win less and less, and beyond it nothing: cuBLAS in
# fp16 has the same FLOPs to do, and nothing to decode. `mma.sync`, which all cards since Ampere have, does not reach what
# Hopper's own one does, and has its own ridge.

# %%
if ladder is not None:
    known = kernel_ladder.card_of(ladder)
    card, launch_us = Machine(known.bytes_per_s, known.flops_per_s), known.launch_us
    flops_of_mma = 2 * 16 * 8 * 16 / mma_block.PRODUCT * known.multiprocessors * known.hertz
    source = f"{card_slug}, measured in kernel_ladder"
else:
    ceilings = published.table("ceilings", published.PEERS_FILE).iloc[0]
    card = Machine(ceilings["read_sum_gb_per_s"] * 1e9, ceilings["mm8192_fp16_tflop_per_s"] * 1e12)
    launch_us, flops_of_mma = ceilings["empty_node_us"], None
    source = f"{published.PEERS_DEVICE}, published with the peers' times"
print(f"{source}: {card.bytes_per_s / 1e12:.2f} TB/s, {card.flops_per_s / 1e12:.0f} TFLOPS, launch {launch_us:.2f} us")
if flops_of_mma is not None:
    print(f"mma.sync: {flops_of_mma / 1e12:.0f} TFLOPS, by the cycles that mma_block counts with")

N, K = 37888, 3584
KINDS = {"fp16": None, "W4": 4, "W3": 3}


def cost(kind, m):
    return product(N, K, m, KINDS[kind], GROUP)


def ridge(kind, flops_per_s):
    """The smallest M at which arithmetic takes longer than memory; None where it never does."""
    every = (m for m in range(1, 4096) if cost(kind, m).flops / flops_per_s > cost(kind, m).bytes / card.bytes_per_s)
    return next(every, None)


bounds = pd.DataFrame({
    "weights": list(KINDS), "MB": [cost(kind, 1).bytes / 1e6 for kind in KINDS],
    "memory us": [cost(kind, 1).bytes / card.bytes_per_s * 1e6 for kind in KINDS],
    "ridge at M": [ridge(kind, card.flops_per_s) for kind in KINDS],
})  # fmt: skip
if flops_of_mma is not None:
    bounds["by mma.sync"] = [ridge(kind, flops_of_mma) for kind in KINDS]
print(f"\n{N} x {K}, group {GROUP}:")
show(bounds, 1)

# %%
place = standings(peers, card_slug)
its = place[(place["n"] == N) & (place["k"] == K)]
points = []
for series, kind, bits, column in (
    ("ours, W4", "W4", 4, "us"), ("ours, W3", "W3", 3, "us"),
    ("best peer, W4", "W4", 4, "peer_us"), ("cuBLAS, fp16", "fp16", 4, "cublas_us"),
):  # fmt: skip
    for row in its[its["bits"] == bits].dropna(subset=column).itertuples():
        asked, us = cost(kind, row.m), getattr(row, column)
        if row.m in (1, 8, 64, 512, 2048):
            points.append((series, row.m, asked.intensity, asked.flops / us / 1e6, card.seconds(asked) * 1e6 / us))
points = pd.DataFrame(points, columns=["series", "name", "intensity", "tflops", "reached"])
if len(points):
    fig, axes = style.figure(height_in=5.6)
    span = (1, 4000)
    roof_figures.draw_roof(axes[0, 0], card.bytes_per_s, card.flops_per_s, span, "roof")
    if flops_of_mma is not None:
        roof_figures.draw_roof(axes[0, 0], card.bytes_per_s, flops_of_mma, span, "roof of mma.sync", dashed=True)
    roof_figures.draw_points(axes[0, 0], points, f"{N} x {K}: each point an M")
    axes[0, 0].legend(fontsize=9, loc="lower right")
    print(style.save(fig, project.figures(), "06_roofline", points))

# %% [markdown]
# ## What lies in memory
#
# `mma.m16n8k16` wants its operands in registers, each lane of a warp certain ones of a tile. In the article's layout, a row of
# weights after another, they lie elsewhere, and lanes would have to exchange what they read. So weights are packed anew, once,
# when they are loaded (`deepinfer_lab/quant/tiles.py`): in units of 16 outputs by 128 of k, where each lane reads 16 bytes at a
# time, all its own, and finds the fields in them in the order in which they become operands.
#
# The pictures are computed, not drawn: weights that spell their own number are packed, a bit at a time, and each bit of the
# result tells whose it is. Above, the number of the lane that holds a weight. Below, the words of lane 0: numbers are k,
# colours its two outputs. Words of W3 have one bit to spare in each half, and those of three words make up two more values.

# %%
units = {bits: tile_figures.unit_table(bits) for bits in (4, 3)}
fig, axes = style.figure(3, 1, height_in=8.6, height_ratios=[1.5, 1, 0.8])
tile_figures.draw_lanes(axes[0, 0], units[4], "A unit of 16 x 128 weights: lanes")
for row, (bits, table) in enumerate(units.items(), start=1):
    tile_figures.draw_words(axes[row, 0], table, 0, f"W{bits}: the words of lane 0")
print(style.save(fig, project.figures(), "06_tiles", pd.concat(units, names=["bits"]).reset_index("bits")))
for bits, table in units.items():
    whole = table.groupby(["n", "k"])["word"].nunique().eq(1).mean()
    print(f"W{bits}: {table['word'].nunique()} words a lane, {whole:.0%} of the values within one word")
lanes = [table.drop_duplicates(["n", "k"]).set_index(["n", "k"])["lane"].sort_index() for table in units.values()]
assert lanes[0].equals(lanes[1]), "lanes hold the same weights, whatever the bits"

# %% [markdown]
# ## The ladder
#
# The rungs, in the order in which they came. The first is the article's kernel for so many rows.

# %%
ENDINGS = list(dict.fromkeys(name[3:] for name in FEW_BIT))
for ending in ENDINGS:
    print(f"{ending:>20}: {next(product.summary for name, product in FEW_BIT.items() if name[3:] == ending)}")

# %% [markdown]
# **Prediction.** Each rung gets the time of an empty launch and then that of its slowest part: bytes from memory, bytes that
# blocks fetch again from the L2, turns of shared memory, instructions, or products on tensor cores
# (`deepinfer_lab/lab/kernel_ladder_model.py` has each number with its source). Nothing waits in that model. It says what a
# design can reach, and what stops it there; a kernel that takes much longer loses its time to latency.
#
# - GEMV decodes with scalar instructions, so many that they take longer than memory does, even for one row. Every further row
#   costs nearly as much again.
# - Tiles through shared memory spend as many instructions on fetching and converting values as on multiplying them.
# - To dequantise and call cuBLAS is to write the weight in fp16 and to read it: some nine times the bytes of W4, for any M.
# - On tensor cores, with weights in tiles, a weight costs one or two instructions, and a row, up to some dozens, hardly any. So
#   a few rows should take as long as one, and one as long as memory does.
# - Many rows are limited by tensor cores. There the last rung counts, with Hopper's own instruction, on cards that have it.

# %%
if ladder is not None:
    rungs = ladder.frame().iloc[2:].copy()  # after the empty launch and the large product
    rungs["us"] = rungs["time_us"].map(np.median)
    n, k = ladder.params["shapes"][1]
    shown = rungs[(rungs["n"] == n) & (rungs["k"] == k)]
    for bits in (4, 3):
        few = shown[shown["bits"] == bits]
        print(f"\npredicted for W{bits}, {n} x {k}, in microseconds, by M; and what sets the time")
        said = few.assign(text=[f"{row.predicted_us:.1f} {row.bound}" for row in few.itertuples()])
        order = [name for name in FEW_BIT if name in set(few["kernel"])]
        print(said.pivot(index="kernel", columns="m", values="text").loc[order].fillna("-").to_string())

# %% [markdown]
# **Measurement.** Bars are measured, black marks predicted, the dashed line is one reading of the packed weights.

# %%
if ladder is not None:
    every_m = ladder.params["m"]
    fig, axes = style.figure(len(every_m), 2, height_in=2.6 * len(every_m))
    drawn = []
    for row, m in enumerate(every_m):
        for column, bits in enumerate((4, 3)):
            table = shown[(shown["m"] == m) & shown["bits"].isin([bits, 16])]
            ladder_figures.draw_ladder(axes[row, column], table, f"W{bits}, M = {m}")
            drawn.append(table.assign(panel=bits)[["panel", "m", "n", "k", "kernel", "us", "predicted_us", "floor_us"]])
    fig.supxlabel(f"time of one launch (µs, log scale), weights {n} x {k}", fontsize=11)
    print(style.save(fig, project.figures(), "06_ladder", pd.concat(drawn)))

# %% [markdown]
# What each rung gains over the fastest before it; and below, the fastest of all over the article's choice for so many rows.

# %%
if ladder is not None:
    few = rungs[rungs["bits"] != 16].reset_index(drop=True)
    cells = few.groupby(["bits", "m", "n", "k"], sort=False)
    for gain, time in (("predicted gain", "predicted_us"), ("gain", "us")):
        few[gain] = cells[time].cummin().groupby([few[name] for name in ("bits", "m", "n", "k")]).shift() / few[time]
    few["of prediction"] = few["predicted_us"] / few["us"]
    columns = ["bits", "m", "kernel", "us", "predicted_us", "bound", "predicted gain", "gain", "of prediction"]
    show(few.loc[(few["n"] == n) & (few["k"] == k), columns])
    total = []
    for (bits, m, n, k), cell in cells:
        first = cell.set_index("kernel")["us"].get(dispatch.choose(bits, m), np.nan)  # by the article's table
        best = cell.loc[cell["us"].idxmin()]
        total.append((bits, m, n, k, dispatch.choose(bits, m), first, best["kernel"], best["us"],
                      first / best["us"], best["floor_us"] / best["us"]))  # fmt: skip
    total = pd.DataFrame(
        total, columns=["bits", "m", "n", "k", "article", "us", "fastest", "its us", "gain", "of floor"]
    )
    print("\nfrom the article's choice to the fastest rung")
    show(total)
    later = few[few["gain"].notna()]
    right = later["gain"].gt(1) == later["predicted gain"].gt(1)
    print(f"\nwhether a rung is the fastest so far, the model says rightly in {right.sum()} of {len(right)} cases")
    by_kernel = few.groupby("kernel", sort=False)["of prediction"].median().sort_values(ascending=False)
    print(
        "median of predicted over measured time: " + ", ".join(f"{kernel} {x:.0%}" for kernel, x in by_kernel.items())
    )

# %% [markdown]
# ## A whole step
#
# One row, a product at a time, gets up to three quarters of the bandwidth, the larger the more. A step is many of them. A layer
# is five launches: norm and qkv, attention, o, norm with gate and up, down. Each begins when the one before it has ended: its
# blocks come, ask for their first bytes and wait for them, and at its end the last of them has nothing more to read. Meanwhile
# memory idles. With some megabytes to a launch that is longer than the reading itself, and there are 36 layers of it. So a step
# of one row is a matter of latency.
#
# The *chain* (`deepinfer_lab/kernels/decode_chain.py`) is one launch for all layers, with a block on each multiprocessor that
# has its share of every product.
#
# - **Words that say themselves that they are there.** Between two products every block needs what all others have made. A place
#   in the L2 holds a pattern that is no number until its word comes; whoever needs it reads it until it is another. That is one
#   way to the L2 and back. A counter beside it would take three: a fence, the counter, the word.
# - **Weights wait for nobody.** They are no block's output, so one warp of each block copies them into a ring in shared memory,
#   product after product and layer after layer, a ring's length ahead of those that multiply, whatever these wait for.
# - **How many copies under way.** Enough to keep the memory busy, and no more: a word that all wait for stands in line behind
#   them. It is three slots of the ring while a block multiplies, and one while it waits.
# - **Nor do keys and values wait.** All but the new token's were there before. They lie in shared memory a layer ahead, in the
#   place of some of the ring's slots: asked for when they are needed, they would stand in front of the words that their block
#   waits for.
# - **Splits become one.** The blocks that share the positions of a KV head join what they have found, and the others read that
#   alone, instead of each what all splits have left.
#
# Where it should stop paying:
#
# - *Rows.* Each block makes all norms and reads all activations for itself, once a row, and keeps them in shared memory, which
#   the ring loses. A trial with two rows was no faster than launches. So chains are made for one.
# - *Context.* Attention has a block for each of at most eight parts of a sequence's positions and each KV head, and the others
#   look on; launches have as many as they like. Beyond the last column below there is no chain.
# - *K.* 2,048 are sixteen units of 128, one for each of sixteen warps: every one that a warp meets is another output tile's.
#   With 3,584 they are 28, and warps have to find out where a tile ends. And 18,944 activations take room from the ring.
#
# What the rings hold, with this card's multiprocessors and Hopper's shared memory, and how long memory takes to fill them:

# %%
STEP_MODELS = {"3B W4": ("qwen2.5-3b", "w4"), "3B W4, head too": ("qwen2.5-3b", "w4-all"),
               "7B mixed": ("qwen2.5-7b", "mixed"), "7B mixed, head too": ("qwen2.5-7b", "mixed-all")}  # fmt: skip
SHARED = 227 * 1024  # bytes of shared memory that a block may have on Hopper


def ring(model, multiprocessors):
    """Blocks, slots, megabytes in all rings, microseconds of memory that is, the longest context; None without a chain."""
    shape, plan = SHAPES[STEP_MODELS[model][0]], PLANS[STEP_MODELS[model][1]]
    sizes = shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads
    sizes = chain_plan.ChainShape(*sizes, plan.attention_bits, plan.mlp_bits)
    if chain_plan.obstacle(sizes, multiprocessors, SHARED) is not None:
        return model, *[None] * 5
    chain = chain_plan.plan(sizes, multiprocessors, SHARED)
    slot = chain_plan.WARPS * (unit_bytes(plan.mlp_bits) + 2 * UNIT_N)
    held = chain.blocks * chain.depth * slot
    return model, chain.blocks, chain.depth, held / 1e6, held / card.bytes_per_s * 1e6, chain.longest


if ladder is not None:
    rings = [ring(model, known.multiprocessors) for model in ("3B W4", "7B mixed")]
    show(pd.DataFrame(rings, columns=["model", "blocks", "slots", "MB of MLP", "us to fill", "positions"]), 1)

# %% [markdown]
# **Prediction.** The first trials on an H200, with a layer of 3B at a context of 128, are below. What a layer takes beyond the
# reading of its weights is shared by its five phases, as the time that each waits. If phases wait as long in any model and
# context, and with eight rows as with one, then a step is all its phases' waiting, and one reading of weights, head, K and V.

# %%
PHASES = chain_plan.PHASES
FLOOR_US, LAYER_US = 9.1, {"launches": 26.2, "chain": 21.0}  # of one layer: its weights read, and what it took
WAIT_US = {way: (us - FLOOR_US) / PHASES for way, us in LAYER_US.items()}
CONTEXTS = (128, 512, 1024, 2000)  # the new token among them


def predicted(model, way, rows, context):
    """Floor and time of a step in microseconds."""
    shape, plan = SHAPES[STEP_MODELS[model][0]], PLANS[STEP_MODELS[model][1]]
    costs = forward_costs(shape, plan, GROUP, [Span(1, context - 1)] * rows)
    floor = sum(part.bytes for part in costs.values()) / card.bytes_per_s * 1e6
    return floor, floor + WAIT_US[way] * PHASES * shape.num_layers


print("a phase waits " + ", ".join(f"{us:.1f} us in the {way}" for way, us in WAIT_US.items()))
expected = pd.DataFrame(
    [(model, rows, context, way, *predicted(model, way, rows, context)) for model in STEP_MODELS for rows in (1, 8)
     for context in CONTEXTS for way in LAYER_US if way == "launches" or rows == 1],
    columns=["model", "rows", "context", "way", "floor_us", "predicted_us"],
)  # fmt: skip
one_row = expected[expected["rows"] == 1].pivot(index=["model", "context"], columns="way", values="predicted_us")
one_row["floor"] = expected[expected["rows"] == 1].groupby(["model", "context"])["floor_us"].first()
one_row["gain"] = one_row["launches"] / one_row["chain"]
print("predicted microseconds of a step of one row")
show(one_row.loc[list(STEP_MODELS), ["launches", "chain", "floor", "gain"]].reset_index())

# %% [markdown]
# **Measurement.** Steps as an engine captures them, from a token's embedding to the likeliest next token on the host; lines are
# measured, crosses predicted, the dashed line below is one reading of all that a step of one row must read.

# %%
if decode is not None:
    titles = {(f"synthetic:{shape}", bits): model for model, (shape, bits) in STEP_MODELS.items()}
    steps = decode.frame()
    left_out = steps[steps["way"].isna()]
    for row in left_out.itertuples():
        print(f"{titles[row.model, row.bits]} left out: {row.reason}")
    steps = steps.dropna(subset="way").astype({"rows": int, "context": int})
    steps["model"] = [titles[pair] for pair in zip(steps["model"], steps["bits"], strict=True)]
    steps["us"] = steps["time_us"].map(np.median)
    cell = ["model", "rows", "context"]
    steps = steps.merge(expected[[*cell, "way", "predicted_us"]], on=[*cell, "way"])
    steps["of floor"], steps["of prediction"] = steps["floor_us"] / steps["us"], steps["predicted_us"] / steps["us"]
    there = list(dict.fromkeys(steps["model"]))
    fig, axes = style.figure(-(-len(there) // 2), 2, height_in=3.1 * -(-len(there) // 2))
    for panel, model in zip(axes.flat, there, strict=False):
        step_figures.draw_steps(panel, steps[steps["model"] == model], model)
        panel.set_xlabel("context (tokens)", fontsize=10)
    for panel in axes.flat[len(there) :]:
        panel.set_axis_off()
    names = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    fig.legend(names.values(), names.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    fig.supylabel("time of one step (µs)", fontsize=11)
    columns = [*cell, "way", "us", "predicted_us", "floor_us", "of floor", "of prediction"]
    print(style.save(fig, project.figures(), "06_steps", steps[columns]))
    print("microseconds measured / predicted / share of the roofline, by context")
    said = steps.assign(
        text=[f"{row.us:,.0f} / {row.predicted_us:,.0f} / {row.floor_us / row.us:.0%}" for row in steps.itertuples()]
    )
    print(said.pivot(index=["model", "rows", "way"], columns="context", values="text").loc[there].to_string())
    layers = steps["model"].map({model: SHAPES[shape].num_layers for model, (shape, _) in STEP_MODELS.items()})
    steps["waits"] = (steps["us"] - steps["floor_us"]) / (PHASES * layers)
    shortest = steps[steps["context"] == steps["context"].min()]
    waits = shortest.pivot(index=["model", "rows"], columns="way", values="waits").loc[there]
    print(f"microseconds that a phase waits beyond its bytes, at a context of {steps['context'].min()}")
    show(waits.reset_index())

# %%
if decode is not None:
    side = steps.pivot(index=cell, columns="way", values="us")
    if "chain" in side:
        side = side.dropna(subset="chain")
        gain = (side["launches"] / side["chain"]).droplevel("rows").unstack("context").loc[there]
        print("time of the launches over that of the chain, by context")
        show(gain.reset_index())
        first, last = gain.columns[[0, -1]]
        for model, its in gain.iterrows():
            near, far = its[first], its[last]
            judge(f"{model}: one row at a context of {first:,} is {near:.2f} times as fast in a chain", near > 1)
            judge(f"{model}: a context of {last:,} gains less than one of {first:,}, {far:.2f}", far < near)
        for short, long in (("3B W4", "7B mixed"), ("3B W4, head too", "7B mixed, head too")):
            if {short, long} <= set(there):
                few_k, many_k = (waits.at[(model, 1), "chain"] for model in (short, long))
                text = f"{many_k:.1f} us in {long}, {few_k:.1f} in {short}"
                judge(f"phases of a chain wait longer with K of 3,584 than with 2,048: {text}", many_k > few_k)
    for way, its in steps.groupby("way", sort=False):
        near = its["of prediction"].between(1 / 1.15, 1.15)
        judge(f"{way}: a step takes what was predicted, within 15%, in {near.sum()} of {len(its)} cells", near.all())
        one = its[its["rows"] == 1]
        print(f"{way}, one row: {one['of floor'].min():.0%} to {one['of floor'].max():.0%} of the roofline")

# %% [markdown]
# Where the prediction fails on the H200, it fails to one side: a phase's waiting is no constant of the card. It grows with the
# context, though keys and values of some hundred positions are next to nothing beside the weights; in a chain less than in
# launches, so that a long context gains more by the chain, not less. It is longer with rows of 3,584 than with 2,048, and with
# eight rows than with one. The chain saves five to seven microseconds of a layer of 3B, a sixth to a fifth of a step, and five
# to eight of one of 7B, a twelfth to an eighth.
#
# ## Beside other people's kernels
#
# Ours is what the card's dispatch table chooses. The best peer is the fastest few-bit kernel of other people's for just that
# product: of those in the same run, and of this project's published measurement of Marlin, Machete, Humming, tinygemm, GemLite,
# ExLlama and Any-Precision by the same method. So it is not one kernel but the best of many, chosen afterwards.

# %%
SERIES = {"us": "ours", "peer_us": "best peer", "cublas_us": "cuBLAS fp16", "floor_us": "memory floor"}
if len(place):
    shapes = list(dict.fromkeys(zip(place["n"], place["k"], strict=True)))
    lines = place.rename(columns=SERIES).melt(["bits", "m", "n", "k"], list(SERIES.values()), "series", "us")
    fig, axes = style.figure(len(shapes), 2, height_in=2.0 * len(shapes), sharex=True)
    for row, (n, k) in enumerate(shapes):
        for column, bits in enumerate((4, 3)):
            table = lines[(lines["bits"] == bits) & (lines["n"] == n) & (lines["k"] == k)]
            ladder_figures.draw_against(axes[row, column], table, f"W{bits}, {n} x {k}")
    names = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    fig.legend(names.values(), names.keys(), loc="outside lower center", ncols=4, frameon=False)
    fig.supylabel("time of one launch (µs, log scale)", fontsize=11)
    for panel in axes[-1]:
        panel.set_xlabel("rows M (log scale)", fontsize=11)
    print(style.save(fig, project.figures(), "06_peers", lines.dropna()))

# %% [markdown]
# Before the kernels were written, these were the aims, as the geometric mean over all shapes of the best peer's time over ours:

# %%
AIMS = {
    ("1-8", 4): 1.4,
    ("1-8", 3): 1.5,
    ("16-64", 4): 1.15,
    ("16-64", 3): 1.15,
    ("128-512", 4): 1.0,
    ("128-512", 3): 1.0,
}
if peers is None:
    print("aims: " + ", ".join(f"M {rows} W{bits} {aim}" for (rows, bits), aim in AIMS.items()))
else:
    gains = by_range(place)
    gains["aim"] = [AIMS[row.rows, row.bits] for row in gains.itertuples()]
    show(gains)
    for row in gains.itertuples():
        judge(
            f"W{row.bits}, M {row.rows}: {row.mean:.2f} times as fast as the best peer, aim {row.aim:.2f}",
            row.mean >= row.aim,
        )
    rated = place.dropna(subset="gain")
    slower = rated[rated["gain"] < 1].sort_values("gain")
    print(f"\nslower than the best peer in {len(slower)} of {len(rated)} cells, below M = 16 in {(slower['m'] < 16).sum()}"
          + (":" if len(slower) else ""))  # fmt: skip
    show(slower[["bits", "m", "n", "k", "kernel", "us", "peer", "peer_us", "gain"]].head(12))

# %% [markdown]
# With one row, reading is all there is to do: below, how much of the measured bandwidth that is. With 2,048 rows there is
# nothing to gain, and the question is how little decoding costs. And three bits are a quarter fewer bytes than four.
#
# Just before one row of W4, the H200's record of 2026-12-01 has up to 2,048 rows of the same product in fp16, and no rest
# between. After those the card's power limit holds the clock of multiprocessors down for a while, with the widest weight so far
# that one row is seen to read more slowly. So the ladder's share stands beside it, which has no such neighbour.

# %%
if peers is not None:
    one = place[place["m"] == 1].pivot(index=["n", "k"], columns="bits", values="reached")
    print("share of the read bandwidth at M = 1")
    show(one[[4, 3]].rename(columns={4: "W4", 3: "W3"}).reset_index())
    most = place[place["m"] == place["m"].max()].assign(speed=lambda rows: rows["cublas_us"] / rows["us"])
    print(f"\nM = {place['m'].max()}: cuBLAS's time in fp16 over ours")
    show(
        most.pivot(index=["n", "k"], columns="bits", values="speed")[[4, 3]]
        .rename(columns={4: "W4", 3: "W3"})
        .reset_index()
    )
    pair = place.pivot(index=["m", "n", "k"], columns="bits", values="us").dropna().reset_index()
    limited = pair[[cost_of.intensity < card.ridge for cost_of in
                    (product(row.n, row.k, row.m, 4, GROUP) for row in pair.itertuples())]]  # fmt: skip
    faster = (limited[3] < limited[4]).sum()
    print(f"\nW3 is faster than W4 in {faster} of {len(limited)} cells where memory is the limit, by "
          f"{np.exp(np.log(limited[4] / limited[3]).mean()):.2f} in the mean")  # fmt: skip
    for (n, k), bits, aim in (((37888, 3584), 4, 0.70), ((3584, 18944), 4, 0.55)):
        judge(f"{one.at[(n, k), bits]:.0%} of the bandwidth on {n} x {k}, aim {aim:.0%}", one.at[(n, k), bits] >= aim)
    if ladder is not None:
        alone = total[total["bits"].eq(4) & total["m"].eq(1)]
        shares = ", ".join(f"{row['of floor']:.0%} on {row['n']} x {row['k']}" for _, row in alone.iterrows())
        print(f"in the ladder, W4, one row: {shares}")

# %% [markdown]
# ## What did not help
#
# **A ring in shared memory for a few rows.** One row is as fast as there are bytes on their way, and registers limit those. So
# weights went through a ring of `cp.async` copies, four or five units ahead of each warp, with the activations beside them in
# shared memory. It gained nothing with one row, and lost with eight: the ring takes room from warps that hide latency as well,
# and what is read only once passes through shared memory for nothing. Both times are those of that day's kernels.

# %%
tried = published.table("ring", "tried_h200.json")
tried["registers / ring"] = tried["registers_us"] / tried["ring_us"]
print(f"{tried.attrs['title']} ({tried.attrs['hardware']['gpu']}; {tried.attrs['method']}):")
show(tried)

# %% [markdown]
# **The next products' weights in the L2.** While a few rows attend, memory has little to do. So further blocks of attention's
# launch had the weights of the block's other three products brought to the L2 meanwhile. A decode step gained nothing with any
# number of rows, and mostly lost. Why was not measured.

# %%
tried = published.table("read_ahead", "tried_h200.json")
tried["without / with"] = tried["without_ms"] / tried["with_ms"]
print(f"{tried.attrs['title']} ({tried.attrs['hardware']['gpu']}; {tried.attrs['method']}):")
show(tried, 3)

# %% [markdown]
# **Many rows as they are.** Activations lie in shared memory with their pairs transposed, and where there are many rows a
# launch before the product arranges them so: it reads and writes all of them, and the product waits for its end. Two ways do
# without. Copies of single words (`cp.async` of 4 bytes) put each in its place, four times as many as of 16 bytes. Or rows stay
# as they are, in copies of 16 bytes, and the four lanes that share them transpose the bits of their weights, by shuffles. What
# the launch takes, either loses again in the loop over K: copies by warps keep the tensor cores waiting where bulk copies, one
# thread's work, do not. Three bits lose more, having more to shuffle.

# %%
tried = published.table("arranging", "tried_h200.json")
for way in ("words", "lanes"):
    tried[f"{way} / arranged"] = tried[f"{way}_us"] / tried["arranged_us"]
print(f"{tried.attrs['title']} ({tried.attrs['hardware']['gpu']}; {tried.attrs['method']}):")
show(tried)

# %% [markdown]
# **`mma.sync` where many rows share a weight.** By instructions and tensor cores, `mma_block` should come near the roof of its
# own instruction. What holds it is latency: accumulators and fragments leave room for few warps, a product waits for operands
# that its own warp has to decode first, and hardly anybody else can step in. Hopper's `wgmma` takes activations from shared
# memory, and runs by itself while its warps decode what comes next: hence a rung of its own.

# %%
issue = published.table("issue", "tried_h200.json")
print(f"{issue.attrs['title']} ({issue.attrs['hardware']['gpu']}; {issue.attrs['method']}):")
show(issue, 1)
if ladder is not None:
    many = few[few["m"].ge(64) & few["kernel"].str.endswith(("mma_block", "wide"))]
    many = many.assign(design=many["kernel"].str[3:])
    held = many.pivot(index=["bits", "m", "n", "k"], columns="design", values="of prediction").reset_index()
    print("\npredicted over measured time, M of 64 and more")
    show(held)

# %% [markdown]
# ## How to do it again
#
#     deepinfer-lab tune --shape 3584x18944            # time every kernel, write build/data/<device>/dispatch.json
#     pip install -e ".[peers]"                        # Humming and GemLite; tinygemm comes with torch
#     deepinfer-lab bench kernels --against humming    # a table in the terminal, ours as the dispatch table chooses
#     deepinfer-lab run --only 06 --mode measure       # all records of this notebook
#     deepinfer-lab publish --only 06
#
# Experiments take the dispatch table that `tune` has left in `build/`, or else the published one.
#
# ## Conclusion
#
# What must hold of any record is asserted. How far the ladder leads on this card is said as it is found.

# %%
for name, record in records.items():
    if record is None:
        print(f"{name}: not measured on {device} yet")
        continue
    if record is decode:
        assert not steps["correct"].eq(False).any(), "a chain's logits are not those of the launches"
        assert (steps["of floor"] < 1.33).all(), "a step that takes less than its bytes do"
        judged = steps["rel_err"].dropna()
        if len(judged):
            print(f"{name}: all {len(judged)} chains agree with their launches, the worst to {judged.max():.1e}")
        continue
    frame = record.frame()
    ours = frame[frame["peer"] == "deepinfer_lab"]
    us = ours["time_us"].map(np.median)
    assert ours["correct"].all(), "a kernel of ours is wrong"
    assert (us / ours["floor_us"] > 0.75).all(), "a time below what memory allows: the L2 was not cold"
    print(
        f"{name}: all {len(ours)} results of ours agree with float32 to 2e-3, the worst to {ours['rel_err'].max():.1e}"
    )
if ladder is not None:
    single = total[total["m"] == 1]
    judge(
        "one row goes fastest with weights in tiles", not single["fastest"].str.contains("gemv|cublas|tiled_gemm").any()
    )
    judge("eight rows take less than a quarter longer than one", all(
        cell.set_index("m").loc[8, "its us"] < 1.25 * cell.set_index("m").loc[1, "its us"]
        for _, cell in total.groupby(["bits", "n", "k"])
    ))  # fmt: skip
    judge("the article's choice is never the fastest", (total["gain"] > 1).all())
    print(
        f"from the article's choice to the fastest rung: {total['gain'].min():.1f} to {total['gain'].max():.1f} times as fast"
    )
if peers is not None:
    print(f"against the best peer: ahead in {(rated['gain'] > 1).sum()} of {len(rated)} cells, from {rated['gain'].min():.2f} "
          f"to {rated['gain'].max():.2f} times as fast")  # fmt: skip
