# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · Roofline and capacity: what a card can serve, and what keeps it from that
#
# **Question.** How fast could this model run on this card, by arithmetic and memory alone? What does a client get, and where
# does the rest go? How many clients is that enough for, who has to wait, and what fits into the 4 GiB of the article's card?
#
# A reference sheet on inference (its sections 2 to 6) gives the formulas: FLOPs, arithmetic intensity, the parts of a TTFT,
# Little's law. It calls them tools for thinking. Here each is held against records of this package.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read records from data/; measure: run now; auto: measure what this machine can
device: str = "nvidia-h200"  # whose records replay reads, a folder of data/
second_device: str = "cpu-amd-epyc-2-cores"  # whose open loops stand beside: a tiny model on a busy CPU

# %%
from functools import partial

import numpy as np
import pandas as pd

from deepinfer_lab.engine.policy import POLICIES
from deepinfer_lab.figures import capacity as load_figures
from deepinfer_lab.figures import roofline as roof_figures
from deepinfer_lab.figures import style
from deepinfer_lab.figures.style import DECODE, PALETTE, PREFILL
from deepinfer_lab.lab import capacity_tables, experiment, project, published
from deepinfer_lab.lab import mode as modes
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.metrics.capacity import Slo, little
from deepinfer_lab.metrics.footprint import footprint
from deepinfer_lab.metrics.roofline import Machine, Span, decode, forward_costs, product, total
from deepinfer_lab.model.synthetic import SHAPES
from deepinfer_lab.quant.plan import PLANS

NAMES = ["tiled_gemm", "kernel_peers", "overlap_sweep", "cpu_gpu_gap", "serve_real_model"]
records = experiment.obtain_all([EXPERIMENTS[name] for name in NAMES], mode=mode, device=device)
replays = modes.resolve(mode, runs_on_cpu=True) == "replay"
capacity = {}  # by device, of those that have a record
for where in [device, second_device] if replays else [device]:
    if not replays or (project.data() / where / "capacity.json").is_file():
        record = experiment.obtain(EXPERIMENTS["capacity"], mode=mode, device=where)
        capacity[record.provenance["device_slug"]] = record
    else:
        print(f"capacity: no record of {where} yet; what needs it is left out")
for record in [*records.values(), *capacity.values()]:
    print(experiment.banner(record))


def show(table, digits=2):
    print(table.to_string(index=False, float_format=f"{{:,.{digits}f}}".format, na_rep="-"))


def claim(text, holds):
    """What this card showed. Fails, and says with what, on a card that overturns it."""
    assert holds, f"no longer true here: {text}"
    print(f"holds: {text}")


# %% [markdown]
# ## What the model asks of a card
#
# From the config and the plan alone (`deepinfer_lab/metrics/roofline.py`): a product of T tokens with N x K weights costs
# 2 N K T FLOPs and reads the weights once; attention costs 4 heads x head_dim FLOPs for every pair of a query and a position
# that it sees, and reads keys and values once a sequence. FLOPs over bytes is the arithmetic intensity. The 3B model:

# %%
MODELS = {"3B W4": ("qwen2.5-3b", "w4"), "7B mixed": ("qwen2.5-7b", "mixed")}
GROUP, CONTEXT = 128, 576  # a prompt of 512, and half of its 128 new tokens
LOADS = {f"decode, {batch}": decode(batch, CONTEXT) for batch in (1, 4, 16, 64)} | {"chunk of 512": [Span(512, 0)]}


def costs_of(model, spans):
    """By kind of layer."""
    shape, plan = MODELS[model]
    return forward_costs(SHAPES[shape], PLANS[plan], GROUP, spans)


for load in ("decode, 1", "decode, 64", "chunk of 512"):
    costs = costs_of("3B W4", LOADS[load])
    asked = [(kind, c.flops / 1e9, c.bytes / 1e6, c.intensity) for kind, c in {**costs, "all": total(costs)}.items()]
    show(pd.DataFrame(asked, columns=[load, "GFLOP", "MB", "FLOP/B"]), 1)

# %% [markdown]
# ## What the card has
#
# Bandwidth: a sum over 2 GiB. Arithmetic: the fastest dense fp16 product in a record, which is cuBLAS's. Neither is what the
# data sheet prints. The *ridge* is their ratio: below so many FLOPs a byte memory is the limit, above it arithmetic.

# %%
gemm = records["tiled_gemm"].frame()
gemm = gemm[gemm["method"] == "graph_cold"].assign(us=lambda rows: rows["time_us"].map(np.median))
dense = gemm[gemm["kernel"] == "cublas_fp16"]
moved = 2 * (dense["n"] * dense["k"] + dense["m"] * (dense["n"] + dense["k"]))
bandwidth = (moved / dense["floor_us"] * 1e6).median()  # what floors were made with
rates = {"cuBLAS in tiled_gemm": (2e6 * dense["m"] * dense["n"] * dense["k"] / dense["us"]).max()}
slug = records["tiled_gemm"].provenance["device_slug"]
if slug in capacity:
    rates["a large square product, in capacity"] = capacity[slug].samples[0]["flops_per_s"]
card, sheet = Machine(bandwidth, max(rates.values())), published.data_sheets().get(slug)
for name, rate in rates.items():
    print(f"{name}: {rate / 1e12:.0f} TFLOPS")
print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, ridge at {card.ridge:.0f} FLOPs a byte")
if sheet is not None:
    print(sheet["source"])
    within = bandwidth <= sheet["bytes_per_s"] and card.flops_per_s <= sheet["flops_per_s"]
    claim("nothing measured exceeds the data sheet", within)

# %% [markdown]
# **Prediction.** A decode step reads every weight for one row a client. With so few FLOPs a byte, memory is the limit up to
# many clients; a chunk of 512 lies beyond the ridge. So TPOT at one client should be one reading of the weights, hardly longer
# at 16, and TTFT should be arithmetic.

# %%
passes = [(model, load, total(costs_of(model, spans))) for model in MODELS for load, spans in LOADS.items()]
floors = pd.DataFrame([(model, load, c.intensity, card.seconds(c) * 1e3) for model, load, c in passes],
                      columns=["model", "pass", "FLOP/B", "floor ms"])  # fmt: skip
floors["limit"] = np.where(floors["FLOP/B"] < card.ridge, "memory", "arithmetic")
show(floors)
claim("decode is below the ridge with 64 clients, a chunk of 512 above it",
      (floors["limit"].eq("arithmetic") == floors["pass"].eq("chunk of 512")).all())  # fmt: skip

# %% [markdown]
# ## Where measurements lie
#
# *TPOT*: as many tokens as requests in a mean decode step of a closed loop, in its median TPOT; others' chunks lie in it.
# *TTFT*: one client's prompt of 512. *Product*: one layer's alone, cold, by the kernel that the dispatch table has for so many
# rows. Numbers beside points are clients or rows.

# %%
sweep = records["overlap_sweep"].frame()
labels = {f"synthetic:{shape}": label for label, (shape, _) in MODELS.items()}
sweep = sweep[sweep["model"].isin(list(labels))].assign(label=lambda rows: rows["model"].map(labels))
each_gap = [np.reshape(row.itl_ms, (row.requests, -1)) for row in sweep.itertuples()]
sweep["tpots_ms"] = [gaps.mean(axis=1) for gaps in each_gap]
sweep["tpot_ms"], sweep["ttft_p50_ms"] = sweep["tpots_ms"].map(np.median), sweep["ttft_ms"].map(np.median)
modern = sweep[sweep["protocol"] != "article"].set_index(["label", "policy", "concurrency"]).sort_index()
points = []


def point(series, name, cost, seconds):
    """Note a measurement, and the part of the roof that it reaches."""
    least = card.seconds(cost)
    points.append({"series": series, "name": name, "intensity": cost.intensity, "tflops": cost.flops / seconds / 1e12,
                   "ms": seconds * 1e3, "floor ms": least * 1e3, "reached": least / seconds})  # fmt: skip


for model, policy in (("3B W4", "serial"), ("3B W4", "priority"), ("7B mixed", "priority")):
    for clients, row in modern.loc[model, policy].iterrows():
        at_once = round(row["requests"] * (row["new_tokens"] - 1) / row["decode_steps"])
        spans = decode(at_once, row["prompt_tokens"] + row["new_tokens"] // 2)
        point(f"TPOT, {model}, {policy}", clients, total(costs_of(model, spans)), row["tpot_ms"] / 1e3)
for model in MODELS:
    row = modern.loc[model, "priority", 1]
    prompt = total(costs_of(model, [Span(row["prompt_tokens"], 0)]))
    point("TTFT, one client", model, prompt, row["ttft_p50_ms"] / 1e3)
products = records["kernel_peers"].frame()
products = products.assign(us=lambda rows: rows["time_us"].map(np.median)).sort_values("m")
n, k = products.loc[(products["n"] * products["k"]).idxmax(), ["n", "k"]]
alone = products[(products["n"] == n) & (products["k"] == k) & products["m"].isin([1, 8, 64, 512])]
ours = alone[(alone["peer"] == "deepinfer_lab") & (alone["bits"] == 4)].set_index("m")
dense = alone[alone["peer"] == "cublas"].set_index("m")
for series, bits, table in (("product, 4 bits", 4, ours), ("product, cuBLAS fp16", None, dense)):
    for m, us in table["us"].items():
        point(series, m, product(n, k, m, bits, GROUP), us / 1e6)
points = pd.DataFrame(points)
fig, axes = style.figure(height_in=6.2)
span = (1, 4000)
roof_figures.draw_roof(axes[0, 0], card.bytes_per_s, card.flops_per_s, span, "roof, measured")
if sheet is not None:
    roof_figures.draw_roof(
        axes[0, 0], sheet["bytes_per_s"], sheet["flops_per_s"], span, "roof, data sheet", dashed=True
    )
roof_figures.draw_points(axes[0, 0], points, "Measurements under the roof")
axes[0, 0].legend(fontsize=9, loc="lower right")
show(points)
print(style.save(fig, project.figures(), "07_roofline", points))

# %%
reached = points.groupby("series", sort=False)["reached"]
claim("no measurement is above the roof", (points["reached"] <= 1).all())
best = reached.max()[lambda most: most.index.str.startswith("TPOT")]
print("decode's best of what the roof allows: " + ", ".join(f"{name[6:]} {part:.0%}" for name, part in best.items()))
claim("decode of the 3B model gets about half of it at best, and of the 7B less than two thirds",
      (best < np.where(best.index.str.contains("3B"), 0.55, 2 / 3)).all())  # fmt: skip
claim("cuBLAS with dense fp16 comes within a quarter of it, always", reached.min()["product, cuBLAS fp16"] > 0.75)
more = [modern.at[("3B W4", "priority", clients), "tpot_ms"] for clients in (1, 16)]
least = floors.set_index(["model", "pass"])["floor ms"]["3B W4"]
print(
    f"TPOT at 16 clients over that at one: {more[1] / more[0]:.1f}, by floors {least['decode, 16'] / least['decode, 1']:.1f}"
)
print(f"{n} x {k}: " + ", ".join(f"{m} rows {row['kernel']} {row['us']:.0f} us (cuBLAS fp16 {dense['us'][m]:.0f})"
                                 for m, row in ours.iterrows()))  # fmt: skip
article = published.table("5.2").set_index("concurrency")["overlap_tpot_p50_s"]
small_card = published.data_sheets()["rtx-3050-laptop"]
reading = total(costs_of("3B W4", decode(1, 96))).bytes / small_card["bytes_per_s"]
print(f"the article, 3B W4, one client: TPOT {article[1] * 1e3:.1f} ms, one reading {reading * 1e3:.1f} ms, so "
      f"{reading / article[1]:.0%} of its roof; here {reached.first()['TPOT, 3B W4, priority']:.0%}")  # fmt: skip

# %% [markdown]
# ## What keeps a decode step below the roof
#
# One client of the 3B model, under the profiler. *Floor*: the roofline's. *Kernels*: what they took beyond that. *Nothing*: the
# GPU ran nothing, as the CPU had not launched yet. The reference sheet warns that a roofline holds neither launches nor CPU.

# %%
gap = records["cpu_gpu_gap"]
runs = gap.frame()
runs = runs[(runs["concurrency"] == 1) & runs["policy"].isin(["serial", "priority"])]
steps = 2 * (gap.params["new_tokens"] - 1)  # two requests, one after the other; the first token is the prompt's
context = gap.params["prompt_tokens"] + gap.params["new_tokens"] // 2
floor_ms = card.seconds(total(costs_of("3B W4", decode(1, context)))) * 1e3
broken = pd.DataFrame({
    "name": runs["policy"] + np.where(runs["graphs"], "", ", eager"), "floor": floor_ms,
    "kernels": runs["decode_busy_ms"] / steps - floor_ms, "nothing": runs["gpu_idle_share"] * runs["span_ms"] / steps,
}).sort_values("nothing", ascending=False, ignore_index=True)  # fmt: skip
parts = {"floor": "#BBBBBB", "kernels": DECODE, "nothing": PALETTE[5]}
shares = broken.assign(**{part: broken[part] / broken[[*parts]].sum(axis=1) * 100 for part in parts})
fig, axes = style.figure(height_in=2.4)
roof_figures.draw_parts(axes[0, 0], shares, parts, "Where a token's time goes, one client", "% of the time")
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
show(broken.rename(columns={part: f"{part} ms" for part in parts}))
print(style.save(fig, project.figures(), "07_step", shares))
ahead, eager = broken.set_index("name").loc["priority"], shares.set_index("name").loc["serial, eager"]
print(f"with graphs, kernels reach {floor_ms / (floor_ms + ahead['kernels']):.0%} of the roof; "
      f"one product of a row, cold, {reached.first()['product, 4 bits']:.0%}")  # fmt: skip
claim("launched eagerly, over 80% of a token's time is launches", eager["nothing"] > 80)
claim("with graphs and work in flight, kernels lose more than launches", ahead["kernels"] > ahead["nothing"])

# %% [markdown]
# So bandwidth is not what decode waits for, here or on the article's card. Launches come first. Once they are gone it is the
# step itself: each product needs what the one before it made, and memory has nothing to do meanwhile (notebook 06). A large
# product alone comes nearer to the roof than a step does. That TPOT grows with clients more than the floor does is not for the
# products, where 8 rows take no longer than one: others' chunks lie in it, attention, and launches, as all layers are one
# launch for a single row alone.
#
# ## A TTFT in its parts
#
# SmolLM2-135M, prompts of 128 tokens in chunks of 64, one client and then eight: each step is on record with the requests in
# it. *c8-3* is the fourth request of the eight. *Queue*: before the first chunk. *Beside*: between its chunks, while others
# read or decoded. *Idle*: between its chunks, and nothing ran. **Prediction**: with eight clients nearly all is waiting for
# others, since one chunk runs at a time; reading one's own prompt takes as long as alone.

# %%
PARTS = {"queue": "#DDDDDD", "prefill": PREFILL, "beside": DECODE, "idle": PALETTE[5], "first_token": PALETTE[2]}
split = capacity_tables.ttft_table(records["serve_real_model"].frame())
fig, axes = style.figure(height_in=4.6)
roof_figures.draw_parts(axes[0, 0], split, PARTS, "Time to first token, request by request", "ms", form="{:.0f}")
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
mean = split.groupby("clients")[[*PARTS, "ttft"]].mean()
show(mean.reset_index(), 1)
print(style.save(fig, project.figures(), "07_ttft", split))
crowd, single = mean.iloc[-1], mean.iloc[0]
others = (crowd["queue"] + crowd["beside"]) / crowd["ttft"]
own = crowd["prefill"] / single["prefill"]
print(
    f"{mean.index[-1]} clients: {others:.0%} of TTFT are others' steps; own chunks take {own:.2f} times their time alone"
)
claim("the parts of every TTFT add up to it", np.allclose(split[[*PARTS]].sum(axis=1), split["ttft"]))
claim("with eight clients, most of a TTFT is waiting for others", others > 0.5)
theirs = published.table("5.1").set_index("concurrency")["new_ttft_p50_s"]
ours = sweep[(sweep["protocol"] == "article") & (sweep["policy"] == "dual-stream")]
ours = ours.set_index("concurrency")["ttft_p50_ms"]
for name, ttft in (("the article", theirs), ("its protocol here", ours)):
    print(f"TTFT at 1, 2 and 4 clients over that at one, {name}: " + ", ".join(f"{x:.2f}" for x in ttft / ttft[1]))

# %% [markdown]
# ## Little's law
#
# N = λ W: requests in the system are the arrival rate times the time that each spends there. It needs one condition: the time
# looked at begins and ends with nobody there. **Prediction**: in a closed loop of C clients λ W is C. For every recorded loop,
# λ from its tokens per second, W from its requests:

# %%
loops = sweep[sweep["protocol"] == "modern"].copy()
loops["W s"] = [(np.mean(row.ttft_ms) + np.sum(row.itl_ms) / row.requests) / 1e3 for row in loops.itertuples()]
loops["lambda"] = loops["tokens_per_s"] / loops["new_tokens"]
loops["lambda W"] = loops["lambda"] * loops["W s"]
loops["times"] = [capacity_tables.rebuilt(row) for _, row in loops.iterrows()]
laws = [little(*times) for times in loops["times"]]
loops["rebuilt N"] = [law.mean_in_system for law in laws]
loops["short %"] = (1 - loops["lambda W"] / loops["concurrency"]) * 100
shown = ["policy", "concurrency", "lambda", "W s", "lambda W", "rebuilt N", "short %"]
show(loops.loc[loops["policy"].isin(["serial", "priority", "mixed"]), shown])
claim("both sides of the law agree", np.allclose(loops["rebuilt N"], [law.rate * law.mean_time for law in laws]))
claim("lambda W is never more than there are clients", (loops["lambda W"] <= loops["concurrency"]).all())
claim("one client is always in the system", loops.loc[loops["concurrency"] == 1, "short %"].max() < 1)
missing = (loops["rebuilt N"] / loops["lambda W"] - 1).abs()
claim("what is missing is clients who have finished, to 2%", missing.max() < 0.02)

# %% [markdown]
# Where λ W is less than C the law is not wrong: the clients are not there. While the last requests run, who has ended sends
# nothing more. *rebuilt N* is the count over time, put together from how long each request took, and says the same. With two
# requests a client that tail is a good part of the run, and throughput too low by as much.
#
# ### Fixed concurrency, fixed rate
#
# A closed loop sends when the system is ready: a slower system gets a lower λ, and the queue never exceeds C. Users do not wait
# for each other. **Prediction**: at the same throughput, arrivals at random make TTFT longer than a closed loop does, bursts
# longer still; above capacity N grows for as long as requests come. A percentage is the offered rate over what the first
# policy served to the most clients. Limits are ten times the TTFT and twice the TPOT of one client. On a CPU this is a tiny
# model on a machine with other work: read the shape, not the numbers.

# %%
TTFT_TIMES, TPOT_TIMES = 10, 2
open_loops = {}
for where, record in capacity.items():
    rows, slo = capacity_tables.loop_table(record, TTFT_TIMES, TPOT_TIMES)
    has, first = record.samples[0], rows.iloc[0]
    print(f"\n{where}: {has['read_bytes_per_s'] / 1e9:,.0f} GB/s, {has['flops_per_s'] / 1e12:.2f} TFLOPS {has['dtype']}; "
          f"{first['model']} {first['bits']}, prompts of {first['prompt_tokens']}, {first['new_tokens']} new tokens; "
          f"limits TTFT {slo.ttft * 1e3:.1f} ms, TPOT {slo.tpot * 1e3:.2f} ms")  # fmt: skip
    show(rows[["policy", "name", "offered_per_s", "served/s", "N", "TTFT p50", "TTFT max", "within %", "good/s"]])
    claim("Little's law holds in every loop", np.allclose(rows["N"], rows["served/s"] * rows["W ms"] / 1e3))
    claim("goodput is never more than throughput", (rows["good/s"] <= rows["served/s"]).all())
    fixed = rows[rows["loop"] == "closed"]
    claim("no closed loop has more requests than clients", (fixed["N"] <= fixed["clients"] + 1e-3).all())
    open_loops[where] = rows
if not open_loops:
    print("no record of open loops yet")

# %%
its = loops[(loops["policy"] == "priority") & (loops["concurrency"] > 1)]
panels = {f"{slug}, priority": [(f"closed, {row.concurrency} clients", row.times) for row in its.itertuples()]}
for where, rows in open_loops.items():
    its = rows[rows["policy"] == rows["policy"].iloc[0]]  # of whose capacity rates are parts
    its = its[(its["loop"] != "closed") | (its["clients"] == its["clients"].max())]
    panels[f"{where}, {its['policy'].iloc[0]}"] = list(zip(its["name"], its["times"], strict=True))
fig, axes = style.figure(len(panels), 1, height_in=2.9 * len(panels))
tables = []
for panel, (title, curves) in zip(axes[:, 0], panels.items(), strict=True):
    table = pd.concat([capacity_tables.in_system_table(name, times) for name, times in curves])
    load_figures.draw_in_system(panel, table, title)
    tables.append(table.assign(panel=title))
print(style.save(fig, project.figures(), "07_in_system", pd.concat(tables)))

# %% [markdown]
# A flat line is a closed loop: its clients set N, and it hides what a higher rate would do. Arrivals at random set N
# themselves. With `serial`, N and TTFT are then below those of a closed loop about as fast on the H200, and above them on the
# CPU. Bursts at half of its capacity make requests wait longer than unconnected arrivals at nine tenths on both, though fewer
# are in the system in the mean: they come together. Above capacity N rises until arrivals end on the H200; on the CPU it goes
# up and down, where the rate is hardly above what is served. So bursts are as predicted on both, arrivals at random on the CPU
# alone, and the growth of N on the H200 alone.
#
# ## Goodput
#
# Requests a second that keep both limits, here those of one client of `serial` on the GPU. Throughput counts the others, too.
# **Prediction**: throughput rises with every client, goodput does not; and who is the best in one need not be in the other.

# %%
first = modern.loc["3B W4", "serial", 1]
slo = Slo(TTFT_TIMES * first["ttft_p50_ms"] / 1e3, TPOT_TIMES * first["tpot_ms"] / 1e3)
limits = {"both": slo, "TTFT kept": Slo(slo.ttft, np.inf), "TPOT kept": Slo(np.inf, slo.tpot)}
for name, limit in limits.items():
    loops[name] = list(map(partial(capacity_tables.share_within, limit), loops["ttft_ms"], loops["tpots_ms"]))
loops["goodput"], loops["loop"] = loops["lambda"] * loops["both"], "closed"
print(f"TTFT within {slo.ttft * 1e3:.0f} ms and TPOT within {slo.tpot * 1e3:.2f} ms: requests a second, by clients")
show(loops.pivot(index="policy", columns="concurrency", values="goodput").loc[list(POLICIES)].reset_index())
most = loops[loops["concurrency"] == loops["concurrency"].max()]
show(most[["policy", "lambda", *limits, "goodput"]])
chosen = loops[loops["policy"].isin(["serial", "dual-stream-async", "priority", "mixed", "partition"])]
fig, axes = style.figure(1, 2, height_in=4.0)
for panel, (y, title) in zip(axes[0], {"lambda": "Throughput", "goodput": "Goodput"}.items(), strict=True):
    load_figures.draw_load(panel, chosen, "concurrency", y, title, "clients (log scale)", "requests a second")
    style.log_axis(panel.xaxis, subs=(1, 2, 4, 6))
    panel.set_ylim(0, chosen["lambda"].max() * 1.08)
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
print(style.save(fig, project.figures(), "07_goodput", chosen[["policy", "concurrency", "lambda", "goodput"]]))
best, busy = loops.loc[loops["goodput"].idxmax()], loops.loc[loops["lambda"].idxmax()]
print(f"the most goodput: {best['goodput']:.1f} requests/s, {best['policy']} with {best['concurrency']} clients; the most "
      f"throughput: {busy['lambda']:.1f}, {busy['policy']} with {busy['concurrency']}")  # fmt: skip
claim("the most throughput takes more clients than the most goodput", busy["concurrency"] > best["concurrency"])

# %% [markdown]
# ## What fits into 4 GiB
#
# The bytes of each part, by config and plan. Embedding and output head stay fp16 with most plans, as in most few-bit formats.
# For 7B they are two tables of a gigabyte each. The plan `mixed-all` is `mixed`, and rounds both to 4 bits: a lookup unpacks
# the rows that it wants, and the head is a few-bit product like any other. What it costs in quality is not on record here.

# %%
BUDGET = 4 << 30
CASES = {**MODELS, "7B mixed-all": ("qwen2.5-7b", "mixed-all")}
sizes = {name: footprint(SHAPES[shape], PLANS[plan], group=GROUP) for name, (shape, plan) in CASES.items()}
sizes["the same, int8 KV"] = footprint(SHAPES["qwen2.5-7b"], PLANS["mixed-all"], group=GROUP, int8_kv=True)
PIECES = ["attention", "mlp", "scales", "embedding", "head", "small", "workspace"]
fit = pd.DataFrame([{"name": name, **vars(size)} for name, size in sizes.items()])
fit[[*PIECES, "weights"]] = fit.assign(weights=[size.weights for size in sizes.values()])[[*PIECES, "weights"]] / 2**30
fit["KV tokens"] = [size.kv_tokens(BUDGET) for size in sizes.values()]
colours = dict(zip(PIECES, [*PALETTE[:6], "#BBBBBB"], strict=True))
fig, axes = style.figure(height_in=3.4)
title, line = "Bytes before the first token of KV", (4, "4 GiB")
roof_figures.draw_parts(axes[0, 0], fit.iloc[:-1], colours, title, "GiB", form="{:.2f}", limit=line)
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
show(fit.rename(columns={"kv_token": "KV bytes a token"}))
print(style.save(fig, project.figures(), "07_budget", fit))
packed = sizes["7B mixed-all"]
claim("7B mixed does not fit while both tables are fp16", sizes["7B mixed"].kv_tokens(BUDGET) < 0)
claim("with both in 4 bits it does, and 2,048 tokens of KV beside it", packed.kv_tokens(BUDGET) > 2048)
reading = (packed.weights - packed.embedding) / small_card["bytes_per_s"]
print(f"the article's card reads that in {reading * 1e3:.1f} ms: at most {1 / reading:.0f} tokens/s to one client")

# %% [markdown]
# The article says that its mixed 7B runs in 4 GB and not steadily, and does not say where its two tables lie: not there in
# fp16, whatever else is left out. A display and CUDA's own context come on top. Held to a hard cap on torch's memory, of which
# the engine leaves 256 MiB for what a step needs:

# %%
for where, record in capacity.items():
    budgets = [row for row in record.samples if row["row"] == "budget"]
    for row in budgets:
        pool = "no KV" if row["kv_pool_tokens"] is None else f"KV for {row['kv_pool_tokens']:,} tokens"
        print(f"{where}: {row['model']} {row['bits']} within {row['cap_mib']:,} MiB: reached '{row['reached']}', {pool}, "
              f"peak {row['peak_bytes'] / 2**20:,.0f} MiB")  # fmt: skip
        claim("the cap held", row["peak_bytes"] <= row["cap_mib"] << 20)
    if not budgets:
        print(f"{where}: no GPU, so no cap")
if slug not in capacity:
    print(f"{slug}: not measured yet")

# %% [markdown]
# ## Conclusion
#
# 1. By bytes and FLOPs decode waits for memory, with 64 clients too, and prefill for arithmetic. Decode gets about half of
#    that, or less. First it is launches; with graphs, products that wait for one another.
# 2. A TTFT under load is other people's steps. One's own prompt is the small part.
# 3. Little's law holds because it must. What it finds is the tail of short closed loops, where clients are missing.
# 4. Throughput goes on rising where goodput has fallen. The same policy can be first in both.
# 5. 7B in 3 and 4 bits fits into 4 GiB once its embedding and output head are packed, too.

# %%
for policy in ("serial", "priority", "mixed"):
    row = most.set_index("policy").loc[policy]
    print(f"{policy:>9}, {row['concurrency']} clients: {row['lambda']:.1f} requests/s, {row['goodput']:.1f} of them within "
          f"the limits; N {row['lambda W']:.1f}, {row['short %']:.0f}% short")  # fmt: skip
for name in ("7B mixed", "7B mixed-all"):
    room = max(sizes[name].kv_tokens(BUDGET), 0)
    print(f"{name}: weights {sizes[name].weights / 2**30:.2f} GiB, room for {room:,} tokens of KV")
