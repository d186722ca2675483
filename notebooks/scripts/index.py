# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Start here
#
# **What is here?** A laboratory for few-bit LLM inference on one GPU: CUDA kernels for 4-bit and 3-bit weights, a scheduler
# with a paged KV cache, and an executor that lets prefill and decode share the GPU. Each notebook asks one question about it,
# predicts, measures, says why it came out so, and asserts its conclusion.
#
# Below, each question with its answer. Answers are computed here, from the *records* that the notebooks speak from: files of
# raw timings in `data/`, with the machine that made them. This page only reads; it measures nothing.

# %% tags=["parameters"]
gpu: str = "nvidia-h200"  # whose records of GPU experiments are read, a folder of data/
cpu: str = "cpu-amd-epyc-2-cores"  # whose records of CPU experiments are read, a folder of data/

# %%
from math import log
from statistics import median

from deepinfer_lab.lab import experiment, project, record
from deepinfer_lab.lab.kernel_cells import summary
from deepinfer_lab.lab.kernel_standings import by_range, standings
from deepinfer_lab.lab.serving import trace_of
from deepinfer_lab.metrics.footprint import footprint
from deepinfer_lab.metrics.latency import summarise
from deepinfer_lab.model.synthetic import SHAPES
from deepinfer_lab.quant.plan import PLANS

ON_GPU = ["tiled_gemm", "w3_batch_tile", "overlap_sweep", "overlap_ablation", "long_insertion"]
ON_CPU = ["serve_real_model", "few_bits", "quantisation_quality", "ghost_reply"]
records = {name: record.load(project.data() / gpu / f"{name}.json") for name in ON_GPU}
records |= {name: record.load(project.data() / cpu / f"{name}.json") for name in ON_CPU}
if (project.data() / gpu / "kernel_peers.json").is_file():
    records["kernel_peers"] = record.load(project.data() / gpu / "kernel_peers.json")
print(f"{len(records)} records, measured from {min(each.provenance['utc'] for each in records.values())[:10]} on")

# %% [markdown]
# ## [00 · Serve a real model](00_serve_a_real_model.ipynb)
#
# A pretrained model of 135 million weights, rounded to 4 bits, is served on two CPU cores. What does a client see, and what did
# the missing bits cost?

# %%
traces = {}
for row in records["serve_real_model"].samples:
    if row["row"] == "request":
        traces.setdefault(row["concurrency"], []).append(trace_of(row))
few, many = min(traces), max(traces)
rates = {clients: summarise(found).output_tokens_per_s for clients, found in traces.items()}
perplexity = records["few_bits"].frame().set_index("bits")["perplexity"]
print(
    f"{few} client gets {rates[few]:.0f} tokens/s, {many} together {rates[many]:.0f}: a step reads weights once for all."
)
print(f"Rounded to nearest, 4 bits take perplexity from {perplexity['none']:.1f} to {perplexity['w4']:.1f}.")

# %% [markdown]
# ## [01 · A tiled GEMM that never holds the weights](01_tiled_gemm.ipynb)
#
# One kernel unpacks tiles of weights into shared memory, where the old way expanded them all and called cuBLAS. The
# DeepInfer-SM86 article found it 2 to 9 times as fast on a laptop's card. Is it on another?

# %%
cells = summary(records["tiled_gemm"].frame())
cold = cells[(cells["method"] == "graph_cold") & (cells["m"] == 30) & (cells["bits"] < 16)].copy()
cold["design"] = cold["kernel"].str.replace(r"^w\d_", "", regex=True)
us = cold.pivot(index=["bits", "n", "k"], columns="design", values="us").dropna()
for design, words in {"tiled_gemm": "The article's design", "tiled_gemm_split_k": "With K split over blocks"}.items():
    times = us["dequant_cublas"] / us[design]
    spread = f"{times.min():.2f} to {times.max():.2f} times as fast"
    print(f"{words}: {spread}; faster on {(times > 1).sum()} of {len(times)} shapes.")

# %% [markdown]
# ## [02 · Fewer reads, and yet slower?](02_w3_batch_tile.ipynb)
#
# A 3-bit kernel that reads the weights once for all rows of a batch took the article twice as long as one that reads them for
# each. It saves bytes, but what costs time is the work for each row. Does the experiment fail here too?

# %%
cells = summary(records["w3_batch_tile"].frame())
cells = cells[(cells["method"] == "graph_cold") & (cells["n"] == 5632) & (cells["k"] == 2048)]
us = cells.pivot_table(index="m", columns="kernel", values="us")
gain = us["w3_gemv_grid_y"] / us["w3_gemv_batch_tile"]
gains = ", ".join(f"{gain[batch]:.2f} at batch {batch}" for batch in (2, 4, 8))
print(f"The speed of one reading over that of one for each row: {gains}.")

# %% [markdown]
# ## [03 · Two streams, one GPU](03_stream_overlap.ipynb)
#
# Prefill and decode on two CUDA streams gained the article next to nothing. Did anything overlap, and what changes the answer?
# The longest gap between two tokens of somebody who reads while a document of 8,192 tokens comes in tells most.

# %%
longest = records["overlap_ablation"].frame().set_index("policy")["disturbed_itl_ms"].map(max)
before, after = longest["barrier, eager, no priority"], longest["asymmetric, graphs, priority"]
print(f"With CUDA graphs, no barrier and priority, the longest gap falls from {before:.1f} to {after:.1f} ms.")
sweep = records["overlap_sweep"].frame().query("protocol == 'modern' and concurrency == 64")
rate = sweep.set_index("policy")["tokens_per_s"]
print(f"Most tokens/s for 64 clients: {rate.max():,.0f} with `{rate.idxmax()}`; with `serial` {rate['serial']:,.0f}.")

# %% [markdown]
# ## [04 · What a reader feels](04_itl_analysis.ipynb)
#
# Eight readers watch their answers appear when somebody sends a document of 8,192 tokens. What do they feel, how long does the
# document wait, and which policy should share the GPU?

# %%
long = records["long_insertion"].frame()
long = long[(long["case"] == "3b") & (long["readers"] == 8)].assign(gap=long["disturbed_itl_ms"].map(max))
for policy in ("serial", "priority", "partition"):
    gap, ttft = long.loc[(long["policy"] == policy) & (long["chunk"] == 8192), ["gap", "document_ttft_ms"]].iloc[0]
    print(f"`{policy}`, in one piece: longest gap {gap:.0f} ms, the document's first token after {ttft:.0f} ms.")

# %% [markdown]
# ## [05 · What four bits cost, and three](05_quantisation_quality.ipynb)
#
# At 3 bits the model's text fell apart. How much of that is due to the bits, and how much to the rounding?

# %%
quality = records["quantisation_quality"].frame()
quality = quality[quality["row"] == "quality"]
dense = quality.loc[quality["method"].isna(), "perplexity"].iloc[0]
w3 = quality[(quality["bits"] == "w3") & (quality["group"] == 64)].set_index("method")["perplexity"] / dense
print(f"In 3 bits, rounding to nearest multiplies perplexity by {w3['rtn']:.2f}, GPTQ by {w3['gptq']:.2f}:")
print(f"{1 - log(w3['gptq']) / log(w3['rtn']):.0%} of the loss was the rounding's.")

# %% [markdown]
# ## [06 · Tensor cores for few bits](06_tensor_cores.ipynb)
#
# A weight in 4 bits is a quarter of the bytes of fp16. What does it take to be four times as fast, change by change from the
# article's kernels on, and where does the result stand beside other people's?

# %%
if "kernel_peers" in records:
    ranges = by_range(standings(records["kernel_peers"], gpu))
    for bits, its in ranges.groupby("bits", sort=False):
        means = ", ".join(f"{row.mean:.2f} for M {row.rows}" for row in its.itertuples())
        print(f"W{bits}, the best peer's time over ours, geometric mean over shapes: {means}.")
else:
    print(f"Not measured on {gpu} yet.")

# %% [markdown]
# ## [07 · Roofline and capacity](07_roofline_and_capacity.ipynb)
#
# How fast could a model run on this card, by arithmetic and memory alone? What does a client get, where does the rest go, and
# what fits into the 4 GiB of the article's card?

# %%
alone = records["overlap_sweep"].frame().query("protocol == 'modern' and concurrency == 1 and policy == 'priority'")
step_ms = median(alone["itl_ms"].iloc[0])
sizes = {bits: footprint(SHAPES["qwen2.5-7b"], PLANS[bits], group=128).weights for bits in ("mixed", "mixed-all")}
shares = {bits: f"{size / 2**30:.2f} GiB" for bits, size in sizes.items()}
print(f"One client of the 3B model waits {step_ms:.2f} ms for a token; the notebook says how much of that is memory's.")
print(
    f"The 7B model in 3 and 4 bits takes {shares['mixed']}; with embedding and head in 4 bits, {shares['mixed-all']}."
)

# %% [markdown]
# ## [08 · The ghost reply](08_ghost_reply.ipynb)
#
# Can a reply contain another request's text? With a block allocator that does not wait for launched work it can; how often does
# it happen, and what does waiting cost?

# %%
runs = records["ghost_reply"].frame()
runs = runs[runs["row"] == "interleaving"]
replies = runs.groupby("allocator")[["wrong", "replies"]].sum().astype(int)
for allocator, row in replies.sort_values("wrong", ascending=False).iterrows():
    print(f"An allocator that {allocator}: {row['wrong']:,} of {row['replies']:,} replies are wrong.")

# %% [markdown]
# ## Read, replay, measure
#
# *Run all cells* of a notebook measures what this machine can, on a CPU too where that makes sense, and replays the rest from
# records. The parameter `mode` decides for one notebook, the variable `DEEPINFER_MODE` for all. In a terminal:
#
#     deepinfer-lab run --mode replay          # every notebook from the records; the copies go to build/
#     deepinfer-lab run --only 01 --mode measure
#     deepinfer-lab publish --only 01          # a new record and its notebook become the committed ones
#     deepinfer-lab check                      # which record each number comes from, and whether all of it hangs together
#     deepinfer-lab site                       # all notebooks as pages, in build/site/
#     pytest --nbval                           # every committed output still is what its record says
#
# Notebooks are paired with scripts in `notebooks/scripts/`: edit either, here or in an editor; saving here writes both. Some
# figures in 01 and 04 have controls in a cell below: they need `pip install -e ".[explore]"` and a person who runs the cell.
# More in [the README](../README.md); how to add an experiment or a notebook in [CONTRIBUTING](../CONTRIBUTING.md).
#
# ## Where the numbers above come from

# %%
for each in records.values():
    print(experiment.banner(each))
