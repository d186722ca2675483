# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · Two streams, one GPU: what overlap is, and what it is not
#
# **Question.** A prompt is read (*prefill*) while other requests generate (*decode*). The DeepInfer-SM86 article, part 7, put
# the two on two CUDA streams, joined them after every scheduler cycle, and gained little: 22.6 -> 22.8 tokens/s at four
# clients. It blames memory bandwidth, which both phases share. Is that the cause? Did anything overlap at all? And what
# changes the answer: the join, the launches, or the priority? The article leaves the last two for later.
#
# Three things are called overlap, and none of them implies the next. They are counted apart and never added up:
#
# | counter | what it says | what it does not say |
# |---|---|---|
# | `prefill_decode_overlap_steps` | a scheduler cycle had work of both phases | that two streams exist: a CPU counts, too |
# | `prefill_decode_stream_overlap_steps` | both were launched, on two streams | that the GPU ran them at the same time |
# | `physical_overlap_ms` | a prefill and a decode kernel ran together, so long | that anything finished sooner |
#
# Whether anything finished sooner is a fourth thing, and is measured as such.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read a record from data/; measure: run now; auto: measure if this machine has a GPU
device: str = "nvidia-h200"  # whose records replay reads, a folder of data/

# %%
import numpy as np
import pandas as pd

from deepinfer_lab.figures import overlap as overlap_figures
from deepinfer_lab.figures import style
from deepinfer_lab.figures.style import DECODE, PREFILL
from deepinfer_lab.lab import experiment, project, published
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.model.synthetic import SHAPES

NAMES = ["overlap_proof", "overlap_ablation", "cpu_gpu_gap", "overlap_sweep"]
records = experiment.obtain_all([EXPERIMENTS[name] for name in NAMES], mode=mode, device=device)
for record in records.values():
    print(experiment.banner(record))
proof, sweep = records["overlap_proof"], records["overlap_sweep"].frame()
rows = proof.frame()


def show(table, digits=2):
    print(table.to_string(index=False, float_format=f"{{:,.{digits}f}}".format, na_rep="-"))


def claim(text, holds):
    """What this card showed. Fails, and says with what, on a card that overturns it."""
    assert holds, f"no longer true here: {text}"
    print(f"holds: {text}")


# %% [markdown]
# ## Controls first
#
# `physical_overlap_ms` comes from the profiler's start and end of every kernel: the length of (union of prefill) ∩ (union of
# decode). Before it says anything about an engine, it has to get two known cases right. Two kernels that do nothing but spin
# for 20 ms, each on half of the multiprocessors, one called prefill and the other decode: on one stream they cannot overlap,
# so anything but 0 is a fault of the measurement; on two they fit beside each other, so a share well below 1 means that the
# tool or the machine serialises, and that a 0 elsewhere proves nothing.

# %%
controls = rows[rows["row"] == "control"].set_index("streams")
for streams, control in controls.iterrows():
    print(f"{streams:.0f} stream(s): {control['physical_overlap_ms']:.3f} ms together, share {control['share']:.4f}")
assert controls.at[1, "physical_overlap_ms"] == 0, "two kernels of one stream overlap: the measurement is broken"
assert controls.at[2, "share"] > 0.9, "two half-device kernels on two streams ran in turns: something serialises them"

# %% [markdown]
# ## Prediction
#
# Decode multiplies a few rows with every weight: it waits for memory. Prefill multiplies hundreds: it waits for arithmetic,
# once its GEMM uses the tensor cores. Two loads that wait for different things can share a GPU, and no overlap gets around
#
# $$
# T_\text{both} \ge \max\left(T_P,\; T_D,\;
# \frac{B_P + B_D}{\text{bandwidth}},\; \frac{F_P + F_D}{\text{peak}}\right)
# $$
#
# The first two terms: each phase is a chain of steps, none shorter than alone. The last two, with bytes B and floating-point
# operations F: what they share. Below, for one document among readers as the record has it; attention and the KV cache are
# left out, so these are lower bounds.

# %%
DATA_SHEET = {"nvidia-h200": (4.8e12, 989e12)}  # NVIDIA's: bytes/s, dense fp16 FLOP/s; of other cards no roofline: nan
bandwidth, peak = DATA_SHEET.get(proof.provenance["device_slug"], (np.nan, np.nan))
params = proof.params
shape, document, readers = SHAPES[params["model"].split(":")[1]], params["document_tokens"], params["readers"]
linear = 2 * shape.q_size + 2 * shape.kv_size + 3 * shape.intermediate_size
linear *= shape.num_layers * shape.hidden_size  # weights
head = shape.vocab_size * shape.hidden_size  # stays fp16
weight_bytes = linear * (int(params["bits"][1:]) / 8 + 2 / params["group"]) + 2 * head
chunks, decode_steps = -(-document // params["chunk"]), params["new_tokens"] - 1
floors = pd.DataFrame([
    {"work": f"prefill, {chunks} chunks", "bytes": chunks * weight_bytes, "FLOP": 2 * linear * document},
    {"work": f"decode, {decode_steps} steps of {readers}", "bytes": decode_steps * weight_bytes,
     "FLOP": 2 * (linear + head) * readers * decode_steps},
])  # fmt: skip
floors.loc[2] = ["both", *floors[["bytes", "FLOP"]].sum()]
floors["memory ms"], floors["arithmetic ms"] = floors["bytes"] / bandwidth * 1e3, floors["FLOP"] / peak * 1e3
floors["floor ms"] = floors[["memory ms", "arithmetic ms"]].max(axis=1)
show(floors.drop(columns=["bytes", "FLOP"]))
one, other, both = floors["floor ms"]
print(f"by the roofline, overlap could make {one + other:.1f} ms into {both:.1f} ms: {(one + other) / both:.2f}x")

# %% [markdown]
# ### And on the article's card?
#
# Its table prints time per output token at one client. Its card reads 192 GB/s, and the model is the same. If decode waited
# for memory there, that time would be close to one reading of the weights.

# %%
article = published.table("5.2").set_index("concurrency")
reading_ms = weight_bytes / 192e9 * 1e3
tpot_ms = article["overlap_tpot_p50_s"] * 1e3
print(f"one reading of the weights, {weight_bytes / 1e9:.2f} GB at 192 GB/s: {reading_ms:.1f} ms")
print(f"TPOT at one client: {tpot_ms[1]:.1f} ms, of which memory needs {reading_ms / tpot_ms[1]:.0%}")
claim("the article's decode takes over 5 times what memory needs", tpot_ms[1] > 5 * reading_ms)

# %% [markdown]
# So we predict other causes. An eager Python loop launches one phase after the other, each kernel later than the GPU could
# take it. A barrier makes decode wait for the chunk beside it. Both can be removed, and then the roofline says that both
# phases fit side by side. The measurement has to show each of these three.
#
# ## Measurement
#
# ### What the lanes ran
#
# One document comes in while others decode. Every bar is a step as its lane ran it, between the events before its first and
# after its last kernel; dashed lines are the document's send and its first token. Two bars above each other mean two steps
# under way at once. They prove no more than that: one of them may be waiting for multiprocessors that the other holds.
#
# Look at the white. `serial` and `dual-stream` pause after every cycle: the CPU sees the result, and only then plans and
# launches. Under the barrier decode also has nothing to do while the chunk beside it finishes.

# %%
steps = rows[rows["row"] == "step"]
ttft = rows[rows["row"] == "window"].set_index("policy")["document_ttft_ms"]
lanes = steps.groupby("policy", sort=False)["lane"].nunique()
height = 0.75 * len(lanes) + 0.28 * lanes.sum() + 0.6
fig, axes = style.figure(len(lanes), 1, height_in=height, sharex=True, height_ratios=lanes + 0.6)
for panel, policy in zip(axes[:, 0], lanes.index, strict=True):
    title = f"{policy}: first token after {ttft[policy]:.0f} ms"
    overlap_figures.draw_lanes(panel, steps[steps["policy"] == policy], ttft[policy], title)
axes[-1, 0].set_xlabel("time since the document was sent (ms)")
axes[-1, 0].set_xlim(steps["started_ms"].min(), steps["finished_ms"].max())
handles = overlap_figures.phase_legend(steps["phase"].unique())
fig.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
shown = steps[["policy", "lane", "phase", "started_ms", "finished_ms", "tokens"]]
print(style.save(fig, project.figures(), "03_lanes", shown))

# %% [markdown]
# ### Three counters, side by side
#
# Closed loops of four clients; steps are counted in the timed run, kernels in a shorter one under the profiler.

# %%
profiled = sweep[sweep["physical_overlap_ms"].notna()]
counters = ["prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps", "physical_overlap_ms"]
names = dict(zip(counters, ("same cycle", "two streams", "physical ms"), strict=True))
show(profiled[["protocol", "policy", "placement", "join", *counters]].rename(columns=names), 1)
physical = profiled.set_index(["protocol", "policy"])["physical_overlap_ms"]
single = sweep["placement"].isin(["one-lane", "fused"])
for column in counters[1:]:
    claim(f"on one stream {column} is 0", (sweep.loc[single, column].fillna(0) == 0).all())
claim("two streams overlap physically, in the article's protocol as well", physical["article", "dual-stream"] > 10)
unjoined = physical["modern", "dual-stream-async"]
claim("the barrier throws away about half of the overlap", 0.3 < physical["modern", "dual-stream"] / unjoined < 0.6)

# %% [markdown]
# ### What it costs each, and what it gains
#
# From the steps above: how long a chunk and a decode step take while the document is read, beside what they take where
# nothing is beside them. And what the window got done: every step counts for what it takes in `serial`, whatever it took
# here, over the length of the window. 1 is one lane without a pause; 2 would be two lanes, each as fast as alone. A mixed
# step counts for the chunk and the decode step that it contains.

# %%
inside = steps.assign(ms=steps["finished_ms"] - steps["started_ms"], window=steps["policy"].map(ttft))
shared = inside["finished_ms"].clip(upper=inside["window"]) - inside["started_ms"].clip(lower=0)
inside["part"] = shared.clip(lower=0) / inside["ms"]  # of the step, in the window
quiet = inside[inside["finished_ms"] <= 0].groupby("policy")["ms"].median()  # decode, before the document
median = inside[inside["part"] == 1].groupby(["policy", "phase"])["ms"].median().unstack()
chunk_ms, step_ms = median.loc["serial", ["prefill", "decode"]]
worth = inside["phase"].map({"prefill": chunk_ms, "decode": step_ms, "mixed": chunk_ms + step_ms})
gain = pd.DataFrame({
    "chunk ms": median["prefill"].fillna(median["mixed"]), "decode ms": median["decode"].where(median["mixed"].isna()),
    "decode alone ms": quiet,
    "gain": (worth * inside["part"]).groupby(inside["policy"]).sum() / ttft,
}).loc[lanes.index].rename_axis("policy").reset_index()  # fmt: skip
gain["chunk"], gain["decode step"] = gain["chunk ms"] / chunk_ms, gain["decode ms"] / step_ms
show(gain)

# %%
fig, axes = style.figure(1, 2, height_in=3.9)
costs = gain.melt("policy", ["chunk", "decode step"], "step", "times as long")
overlap_figures.draw_bars(
    axes[0, 0], costs, "policy", "times as long", "What it costs: a step's duration", "times as long as in serial",
    series="step", colours={"chunk": PREFILL, "decode step": DECODE}, form="{:.2f}", equal=1,
)  # fmt: skip
overlap_figures.draw_bars(
    axes[0, 1], gain, "policy", "gain", "What it gains: work in the window", "times what one lane does without a pause",
    form="{:.2f}", equal=1,
)  # fmt: skip
axes[0, 1].set_yticklabels([])
handles = axes[0, 0].get_legend_handles_labels()
fig.legend(*handles, loc="outside lower left", ncols=2, frameon=False)
print(style.save(fig, project.figures(), "03_gain", gain[["policy", "chunk", "decode step", "gain"]]))
got = gain.set_index("policy")["gain"]
overlapping = ["dual-stream-async", "priority", "partition"]
claim("overlap gains 5% to 30% of the 100% that two free lanes would", got[overlapping].between(1.05, 1.3).all())
claim("two streams with a barrier gain nothing over it", got["dual-stream"] < 1.05)
claim("one pass for both gains more than any two lanes", got["mixed"] > got[overlapping].max())

# %% [markdown]
# ## Cause
#
# ### Is it bandwidth?
#
# The profiler's busy times, for the same requests alone and together. *share*: of the shorter phase's kernels that had the
# other phase beside them. *speedup*: (span of the readers + span of the document) / span of both, each policy against its
# own lanes; those of `partition` are small, so that its speedup flatters.

# %%
dilation = rows[rows["row"] == "dilation"].set_index("policy")
together = dilation[["prefill_together_ms", "decode_together_ms"]]
dilation["share"] = dilation["physical_overlap_ms"] / together.min(axis=1)
shown = ["prefill_alone_ms", "decode_alone_ms", *together, "physical_overlap_ms", "share", "speedup"]
show(dilation[shown].reset_index())
alone = dilation.loc["serial", shown[:2]].astype(float)
reached, fill = floors["floor ms"][:2] / alone.to_numpy(), floors.at[2, "memory ms"] / alone.max()
print(f"alone, prefill reaches {reached[0]:.0%} of its roofline and decode {reached[1]:.0%}")
print(f"both phases' weights, read at full speed, fill {fill:.0%} of the longer phase's time")
claim("bandwidth is not the limit here either: the weights need less than a fifth of the time", not fill >= 0.2)
claim("without a barrier, over half of the shorter phase overlaps", (dilation.loc[overlapping, "share"] > 0.5).all())

# %% [markdown]
# ### What decode waits for
#
# A decode step becomes longer beside a chunk. Either its kernels run longer, as they share caches, bandwidth and
# multiprocessors; or they wait to be started, because a chunk's blocks hold the multiprocessors and none is taken from a
# block that runs. The profiler tells: the first adds to decode's busy time, the second does not.

# %%
decode_parts = inside[inside["phase"] == "decode"].groupby("policy")["part"].sum()
wait = gain.set_index("policy").loc[overlapping]
added = pd.DataFrame({
    "steps": decode_parts[overlapping],
    "added to steps ms": (wait["decode ms"] - wait["decode alone ms"]) * decode_parts[overlapping],
    "added to kernels ms": (dilation["decode_together_ms"] - dilation["decode_alone_ms"])[overlapping],
})  # fmt: skip
added["kernels' part"] = added["added to kernels ms"] / added["added to steps ms"]
show(added.reset_index())
shared_part = added.loc[["dual-stream-async", "priority"], "kernels' part"]
claim("on shared multiprocessors, most of what decode loses is waiting for a place", (shared_part < 0.5).all())
claim("with multiprocessors of its own, decode does not wait", added.at["partition", "kernels' part"] > 0.8)
fused = median.at["mixed", "mixed"] - chunk_ms
print(f"fused into a chunk, a decode step costs {fused:.2f} ms, else {step_ms:.2f}: a chunk reads the weights anyway")
claim("fused into a chunk, a decode step costs less than a third", fused < step_ms / 3)

# %% [markdown]
# So a lane of its own is not enough. A decode step is a chain of small kernels, several in every layer, and beside a large
# GEMM each of them waits anew. Priority only decides who is next when a block ends. Multiprocessors of its own end the
# waiting, at a price: a quarter of the card makes every step slower, with company or without. `mixed` waits for nothing
# either, and does the most work, but its readers get a token only as often as a chunk ends. What readers feel is notebook 04.
#
# ### Which change bought what
#
# The article's executor is the first row: a barrier after every cycle, eager launches, no priority. Its section 9 asks for
# priority and for CUDA graphs; that decode should not wait for the chunk beside it (an *asymmetric* join) is ours to add. All
# eight combinations, with a document among readers. An effect is the ratio with the change over without it,
# from the least to the most of the pairs that differ in nothing else.

# %%
ablation = records["overlap_ablation"].frame()
ablation["max ITL ms"] = ablation["disturbed_itl_ms"].map(max)
ablation["steady ITL ms"] = ablation["steady_itl_ms"].map(np.median)
ablation["launches"] = ablation["graphs"].map({False: "eager", True: "graphs"})
ablation["document TTFT ms"] = ablation["document_ttft_ms"]
outcomes = ["steady ITL ms", "max ITL ms", "document TTFT ms"]
show(ablation[["join", "launches", "priority", *outcomes]])
cells = ablation.set_index(["join", "launches", "priority"])[outcomes]
by_launch = {launches: cells.xs(launches, level="launches") for launches in ("eager", "graphs")}
effects = {"graphs": by_launch["graphs"] / by_launch["eager"]}
for launches, found in by_launch.items():
    effects[f"asymmetric, {launches}"] = found.xs("asymmetric", level="join") / found.xs("barrier", level="join")
    effects[f"priority, {launches}"] = found.xs(True, level="priority") / found.xs(False, level="priority")
for name, ratio in effects.items():
    parts = [f"{outcome[:-3]} x{ratio[outcome].min():.2f} to {ratio[outcome].max():.2f}" for outcome in outcomes]
    print(f"{name:>18}: {', '.join(parts)}")

# %%
ablation["executor"] = ablation["join"] + ", " + ablation["launches"]
ablation["lane"] = ablation["priority"].map({False: "no priority", True: "decode has priority"})
fig, axes = style.figure(1, 3, height_in=3.9)
for panel, outcome in zip(axes[0], outcomes, strict=True):
    overlap_figures.draw_bars(panel, ablation, "executor", outcome, outcome[:-3], "ms", series="lane", form="{:.1f}")
for panel in axes[0, 1:]:
    panel.set_yticklabels([])
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
print(style.save(fig, project.figures(), "03_ablation", ablation[["executor", "lane", *outcomes]]))
longest = {name: ratio["max ITL ms"] for name, ratio in effects.items()}
claim("graphs cut the longest gap to less than a third, whatever else is changed", (longest["graphs"] < 1 / 3).all())
claim("with graphs, the asymmetric join about halves it", longest["asymmetric, graphs"].between(0.3, 0.65).all())
priority = longest["priority, graphs"]
claim("with graphs, priority changes it by under 20% at this chunk", (priority - 1).abs().max() < 0.2)
hurts = [longest[f"{change}, eager"].max() for change in ("asymmetric", "priority")]
claim("with eager launches, each of these two makes one pair worse: noise", min(hurts) > 1)

# %% [markdown]
# Graphs come first, by far. Without them decode is bound by the CPU that launches it, even with no document in sight: see the
# steady gap. Then it makes no difference what waits for what on the GPU, and what the other two changes do is noise. With
# graphs the join is next. Priority comes last at this chunk; its worth grows with the chunk, as notebook 04 shows.
#
# ### Time in which the GPU ran nothing
#
# Overlap has two things to win: resources that one phase leaves idle while it runs, and time in which nothing runs at all. The
# second needs no second stream, only that the CPU runs ahead. Share of the span without any kernel, copy or fill, under the
# profiler, which itself slows launches down; the last group is `serial` with eager launches, as in the article's executor.

# %%
gap = records["cpu_gpu_gap"].frame()
gap["executor"] = gap["policy"] + np.where(gap["graphs"], "", ", eager")
gap["idle %"], gap["clients"] = gap["gpu_idle_share"].astype(float) * 100, gap["concurrency"].map("{} client(s)".format)
fig, axes = style.figure(height_in=0.36 * gap["executor"].nunique() + 1.7)
bars = {"series": "clients", "form": "{:.1f}"}
overlap_figures.draw_bars(axes[0, 0], gap, "executor", "idle %", "The GPU runs nothing", "% of the time", **bars)
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
print(style.save(fig, project.figures(), "03_idle", gap[["executor", "concurrency", "idle %"]]))
idle = gap.set_index(["executor", "concurrency"])["idle %"]
claim("launched eagerly, the GPU idles for more than 85% of the time", idle["serial, eager"].min() > 85)
claim("with graphs, but awaited every cycle, for more than 20%", idle[["serial", "dual-stream"]].min() > 20)
ahead = max(idle["dual-stream-async", 16], idle["priority", 16])
claim("with further work always in flight, for less than 5% at 16 clients", ahead < 5)

# %% [markdown]
# ### The article's table, beside ours
#
# Its protocol: chunks of 32, 16 new tokens, 1, 2 and 4 clients; it does not say how long its prompts were, ours have 96
# tokens. Its no-overlap is our `serial`, its overlap our `dual-stream`. It does not define its jitter; ours is the standard
# deviation of all gaps between tokens of a load. TPOT is a request's mean gap. Seconds became milliseconds.

# %%
ours = sweep[sweep["protocol"] == "article"].set_index(["policy", "concurrency"])
table = []
for clients, theirs in article.iterrows():
    for policy, name in (("serial", "no_overlap"), ("dual-stream", "overlap")):
        row = ours.loc[(policy, clients)]
        gaps = np.reshape(row["itl_ms"], (row["requests"], -1))
        table.append({
            "clients": clients, "policy": policy,
            "article tok/s": theirs[f"{name}_tokens_per_s"], "ours tok/s": row["tokens_per_s"],
            "article TPOT": theirs[f"{name}_tpot_p50_s"] * 1e3, "ours TPOT": np.median(gaps.mean(axis=1)),
            "article jitter": theirs[f"{name}_jitter_s"] * 1e3, "ours jitter": gaps.std(),
            "article 2-stream": theirs["stream_overlap_steps"] if name == "overlap" else 0,
            "ours 2-stream": row["prefill_decode_stream_overlap_steps"],
        })  # fmt: skip
table = pd.DataFrame(table)
show(table)
wide = table.set_index(["policy", "clients"])
change = wide.loc["dual-stream"] / wide.loc["serial"] - 1
print("\ntwo streams against one:")
shown = [f"{whose} {what}" for what in ("tok/s", "jitter") for whose in ("article", "ours")]
show(change[shown].mul(100).add_suffix(" %").reset_index(), 1)
best, gains = ours.xs(4, level="concurrency")["tokens_per_s"], change["ours tok/s"]
print(f"4 clients without the barrier: {best['dual-stream-async']:.0f} tokens/s")
at_one = sweep["concurrency"] == 1
claim("every request of every load ended well", (sweep["errors"] == 0).all())
claim("at one client nothing can overlap", (sweep.loc[at_one, "prefill_decode_overlap_steps"] == 0).all())
claim("four clients gain something by two streams, and less than a sixth", 0 < gains[4] < 1 / 6)
claim("without the barrier they get over 20% more than serial", best["dual-stream-async"] > 1.2 * best["serial"])

# %% [markdown]
# ## Conclusion
#
# Two streams and a barrier: the article's result stands on this card too. The kernels do overlap, and little comes of it. Its
# cause does not stand. Bandwidth limits neither decode on its card, nor either phase on this one. What comes in the way, in
# this order:
#
# 1. **Launches.** Eager decode waits for the CPU, and the GPU idles nearly all of the time.
# 2. **The barrier.** It lets decode wait for the chunk and both wait for the CPU. Without it the GPU no longer idles.
# 3. **Multiprocessors.** What is left is waiting for blocks of the other phase. Only a partition ends that, and at a price.
#
# What overlap gains in work is small in the end: part of what two free lanes could do, and less than one fused pass does. The
# roofline promised more, as it counts bytes and operations, not places on the card. Overlap is worth having for the gaps
# between tokens, not for throughput.

# %%
busy = sweep[(sweep["protocol"] == "modern") & (sweep["concurrency"] == 64)].set_index("policy")["tokens_per_s"]
claim("at 64 clients, one fused lane serves more tokens/s than any other policy", busy.idxmax() == "mixed")
first, last = ablation.iloc[0], ablation.iloc[-1]
parts = [f"{outcome[:-3]} {first[outcome]:,.1f} -> {last[outcome]:,.1f} ms" for outcome in outcomes]
print(f"the article's executor -> all three changes: {', '.join(parts)}")
print(f"work, one lane without a pause = 1: {', '.join(f'{name} {value:.2f}' for name, value in got.items())}")
parts = [f"{name} {idle[name, 16]:.1f}%" for name in ("serial, eager", "serial", "priority")]
print(f"the GPU runs nothing, 16 clients: {', '.join(parts)}")
