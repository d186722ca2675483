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
# clients. It blames memory bandwidth. Did anything overlap? How much could it have gained? And what changes the answer: the
# join, the launches, or the priority, all of which its section 9 leaves for later?
#
# Three things are called overlap, and none of them implies the next. They are counted apart and never added up:
#
# | counter | what it says | what it does not say |
# |---|---|---|
# | `prefill_decode_overlap_steps` | a scheduler cycle had work of both phases | that two streams exist: a CPU counts, too |
# | `prefill_decode_stream_overlap_steps` | both were launched, on two streams | that the GPU ran them at the same time |
# | `physical_overlap_ms` | a prefill and a decode kernel ran together, so long | that anything finished sooner |
#
# Whether anything finished sooner is a fourth thing: `speedup`, below.

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
records = {name: experiment.obtain(EXPERIMENTS[name], mode=mode, device=device) for name in NAMES}
for record in records.values():
    print(experiment.banner(record))
proof, sweep = records["overlap_proof"], records["overlap_sweep"].frame()
rows = proof.frame()


def show(table, digits=2):
    print(table.to_string(index=False, float_format=f"{{:,.{digits}f}}".format, na_rep="-"))


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
DATA_SHEET = {"nvidia-h200": (4.8e12, 989e12)}  # NVIDIA's: bytes/s, dense fp16 FLOP/s
params = proof.params
shape, document, chunk = SHAPES[params["model"].split(":")[1]], params["document_tokens"], params["chunk"]
q_o, k_v, mlp = 2 * shape.q_size, 2 * shape.kv_size, 3 * shape.intermediate_size
linear = shape.num_layers * shape.hidden_size * (q_o + k_v + mlp)  # weights
head_bytes = shape.vocab_size * shape.hidden_size * 2  # stays fp16
weight_bytes = linear * (int(params["bits"][1:]) / 8 + 2 / params["group"])
chunks, steps_of_decode = -(-document // chunk), params["new_tokens"] - 1
moved = {"prefill": chunks * (weight_bytes + head_bytes), "decode": steps_of_decode * (weight_bytes + head_bytes)}
flops = {
    "prefill": 2 * linear * document,
    "decode": 2 * (linear + head_bytes / 2) * params["readers"] * steps_of_decode,
}
print(f"{params['model']}, {params['bits']}: a pass reads {(weight_bytes + head_bytes) / 1e9:.2f} GB of weights")
print(
    f"prefill: {chunks} chunks of {document:,} tokens; decode: {steps_of_decode} steps of {params['readers']} requests"
)
sheet = DATA_SHEET.get(proof.provenance["device_slug"])
if sheet is None:
    print("this card's data sheet is not in the table above: no roofline")
else:
    floors = pd.DataFrame(
        [{"work": work, "memory ms": read / sheet[0] * 1e3, "arithmetic ms": done / sheet[1] * 1e3}
         for work, read, done in [*((phase, moved[phase], flops[phase]) for phase in moved),
                                  ("both", sum(moved.values()), sum(flops.values()))]]
    )  # fmt: skip
    floors["floor ms"] = floors[["memory ms", "arithmetic ms"]].max(axis=1)
    show(floors)
    one, other, both = floors["floor ms"]
    print(f"by the roofline, overlap could make {one + other:.1f} ms into {both:.1f} ms: {(one + other) / both:.2f}x")

# %% [markdown]
# ### And on the article's card?
#
# Its table prints time per output token at one client. Its card reads 192 GB/s, and the model is the same. If decode waited
# for memory there, that time would be close to one reading of the weights.

# %%
article = published.table("5.2").set_index("concurrency")
reading_ms = (weight_bytes + head_bytes) / 192e9 * 1e3
tpot_ms = article["overlap_tpot_p50_s"] * 1e3
print(f"one reading of the weights at 192 GB/s: {reading_ms:.1f} ms; TPOT at one client: {tpot_ms[1]:.1f} ms")
print(f"so its decode steps spend {reading_ms / tpot_ms[1]:.0%} of their time on what memory has to deliver")
assert reading_ms < 0.5 * tpot_ms[1], "the article's decode would be bound by memory, as it says"

# %% [markdown]
# Memory was not what its decode waited for. What is left is what an eager Python loop does between kernels, and kernels that
# need more time than their bytes do. If that is so, then overlap fails for another reason: the CPU launches one phase after
# the other, and the barrier makes decode wait for the chunk beside it. The ablation below separates these.
#
# ## Measurement
#
# ### What the lanes ran
#
# One document comes in while others decode. Every bar is a step as its lane ran it, between the events before its first and
# after its last kernel; dashed lines are the document's send and its first token. Two bars above each other mean two steps
# under way at once. They prove no more than that: one of them may be waiting for multiprocessors that the other holds.

# %%
steps = rows[rows["row"] == "step"]
ttft = rows[rows["row"] == "window"].set_index("policy")["document_ttft_ms"]
lanes = steps.groupby("policy", sort=False)["lane"].nunique()
fig, axes = style.figure(
    len(lanes), 1, height_in=0.75 * len(lanes) + 0.28 * lanes.sum() + 0.6, sharex=True, height_ratios=lanes + 0.6
)
for panel, policy in zip(axes[:, 0], lanes.index, strict=True):
    title = f"{policy}: first token after {ttft[policy]:.0f} ms"
    overlap_figures.draw_lanes(panel, steps[steps["policy"] == policy], ttft[policy], title)
axes[-1, 0].set_xlabel("time since the document was sent (ms)")
axes[-1, 0].set_xlim(steps["started_ms"].min(), steps["finished_ms"].max())
handles = overlap_figures.phase_legend(steps["phase"].unique())
fig.legend(handles=handles, loc="outside lower center", ncols=len(handles))
style.save(fig, project.figures(), "03_lanes")
shown = steps[["policy", "lane", "phase", "started_ms", "finished_ms", "tokens"]]
print(style.fingerprint(shown, "03_lanes"))

# %% [markdown]
# ### Three counters, side by side
#
# A closed loop, the same for every policy; steps are counted in the timed run, kernels in a shorter one under the profiler.

# %%
profiled = sweep[sweep["physical_overlap_ms"].notna()]
show(profiled[["protocol", "policy", "placement", "join", "concurrency", "prefill_decode_overlap_steps",
               "prefill_decode_stream_overlap_steps", "physical_overlap_ms"]])  # fmt: skip

# %%
modern = profiled[profiled["protocol"] == "modern"]
fig, axes = style.figure(1, 3, height_in=4.2)
for panel, (column, title, unit, form) in zip(axes[0], [
    ("prefill_decode_overlap_steps", "Same cycle", "steps", "{:.0f}"),
    ("prefill_decode_stream_overlap_steps", "Two streams", "steps", "{:.0f}"),
    ("physical_overlap_ms", "Kernels at the same time", "ms, by the profiler", "{:.1f}"),
], strict=True):  # fmt: skip
    overlap_figures.draw_bars(panel, modern, "policy", column, title, unit, form=form)
for panel in axes[0, 1:]:
    panel.set_yticklabels([])
style.save(fig, project.figures(), "03_counters")
counters = ["policy", "prefill_decode_overlap_steps", "prefill_decode_stream_overlap_steps", "physical_overlap_ms"]
print(style.fingerprint(modern[counters], "03_counters"))

# %% [markdown]
# ### What it costs each, and what it gains
#
# The same requests three times under the profiler: only the readers, only the document, and both. *Speedup* is (span of the
# readers + span of the document) / span of both. Kernels that overlap all the time and take twice as long gain nothing.
#
# *Dilation* is what sharing costs: a phase's busy time in company over its busy time in `serial`, for the same requests. A
# policy that forms smaller batches needs more steps, and that is part of its cost. (The recorded `dilation_*` divide by the
# time alone, but readers read prompts, too: in company there is more to read than the document, so that `serial` itself is
# not at 1 there.) `ideal` is the speedup if each phase took as long as in `serial` and the shorter one hid behind the longer:
# (P + D) / max(P, D), by busy times. Idle gaps that overlap fills come on top of it.

# %%
dilation = rows[rows["row"] == "dilation"].copy()
together = dilation[["prefill_together_ms", "decode_together_ms"]]
apart = together[dilation["policy"] == "serial"].iloc[0]
for phase in ("prefill", "decode"):
    dilation[phase] = dilation[f"{phase}_together_ms"] / apart[f"{phase}_together_ms"]
dilation["ideal"] = apart.sum() / apart.max()
dilation["share"] = dilation["physical_overlap_ms"] / together.min(axis=1)
show(dilation[["policy", "prefill_alone_ms", "decode_alone_ms", *together, "physical_overlap_ms", "share"]])
recorded = ["dilation_prefill", "dilation_decode", "decode_covered_p50"]
show(dilation[["policy", *recorded, "prefill", "decode", "speedup", "ideal"]])
alone = dilation[["prefill_alone_ms", "decode_alone_ms"]].median()
if sheet is not None:
    for phase, floor in zip(("prefill", "decode"), floors["floor ms"], strict=False):
        print(f"{phase} alone reaches {floor / alone[f'{phase}_alone_ms']:.0%} of its roofline")

# %%
fig, axes = style.figure(1, 2, height_in=3.6)
costs = dilation.melt("policy", ["prefill", "decode"], "phase", "dilation")
overlap_figures.draw_bars(
    axes[0, 0], costs, "policy", "dilation", "What it costs: busy time", "times as long as in serial", series="phase",
    colours={"prefill": PREFILL, "decode": DECODE}, form="{:.2f}", equal=1,
)  # fmt: skip
gains = dilation.melt("policy", ["speedup", "ideal"], "which", "times")
overlap_figures.draw_bars(
    axes[0, 1], gains, "policy", "times", "What it gains: time in all", "times as fast as one after the other",
    series="which", colours={"speedup": overlap_figures.BARS[0], "ideal": "#BBBBBB"}, form="{:.2f}", equal=1,
)  # fmt: skip
axes[0, 1].set_yticklabels([])
for panel in axes[0]:
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
style.save(fig, project.figures(), "03_dilation")
print(style.fingerprint(dilation[["policy", "prefill", "decode", "speedup", "ideal"]], "03_dilation"))

# %% [markdown]
# ### Which change bought what
#
# The article's executor is the first row: a barrier after every cycle, eager launches, no priority. Its section 9 asks for
# priority and for CUDA graphs; that decode should not wait for the chunk beside it (an *asymmetric* join) is ours to add. All
# eight combinations, with a document among readers. An effect is the ratio with the change over without it, the geometric
# mean of the four pairs that differ in nothing else, and in brackets the least and the most of the four.

# %%
ablation = records["overlap_ablation"].frame()
gaps = ablation["disturbed_itl_ms"]
ablation["max ITL ms"], ablation["p99 ITL ms"] = gaps.map(max), gaps.map(lambda found: np.percentile(found, 99))
ablation["steady ITL ms"] = ablation["steady_itl_ms"].map(np.median)
ablation["launches"] = ablation["graphs"].map({False: "eager", True: "graphs"})
ablation["document TTFT ms"] = ablation["document_ttft_ms"]
outcomes = ["max ITL ms", "p99 ITL ms", "document TTFT ms"]
show(ablation[["join", "launches", "priority", "steady ITL ms", *outcomes]])
factors = {"asymmetric join": ("join", "asymmetric"), "graphs": ("graphs", True), "priority": ("priority", True)}
effects = {}
for name, (column, with_it) in factors.items():
    others = [other for other, _ in factors.values() if other != column]
    changed = ablation[column] == with_it
    new, old = (ablation[which].set_index(others)[outcomes].sort_index() for which in (changed, ~changed))
    ratio = new / old
    effects[name] = np.exp(np.log(ratio).mean())
    parts = [f"{o[:-3]} x{effects[name][o]:.2f} ({ratio[o].min():.2f}-{ratio[o].max():.2f})" for o in outcomes]
    print(f"{name:>15}: {', '.join(parts)}")

# %%
ablation["executor"] = ablation["join"] + ", " + ablation["launches"]
ablation["lane"] = ablation["priority"].map({False: "no priority", True: "decode has priority"})
fig, axes = style.figure(1, 3, height_in=3.9)
for panel, outcome in zip(axes[0], outcomes, strict=True):
    overlap_figures.draw_bars(panel, ablation, "executor", outcome, outcome[:-3], "ms", series="lane", form="{:.1f}")
for panel in axes[0, 1:]:
    panel.set_yticklabels([])
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
style.save(fig, project.figures(), "03_ablation")
print(style.fingerprint(ablation[["executor", "lane", *outcomes]], "03_ablation"))

# %% [markdown]
# ### Time in which the GPU ran nothing
#
# Overlap has two things to win: resources that one phase leaves idle while it runs, and time in which nothing runs at all. The
# second needs no second stream. Share of the span without any kernel, copy or fill, under the profiler, which itself slows
# launches down; the last group is `serial` with eager launches, as the article's executor launches.

# %%
gap = records["cpu_gpu_gap"].frame()
gap["executor"] = gap["policy"] + np.where(gap["graphs"], "", ", eager")
gap["idle %"], gap["clients"] = gap["gpu_idle_share"].astype(float) * 100, gap["concurrency"].map("{} client(s)".format)
show(gap.pivot(index="executor", columns="clients", values="idle %").loc[gap["executor"].unique()].reset_index(), 1)
fig, axes = style.figure(height_in=0.36 * gap["executor"].nunique() + 1.7)
overlap_figures.draw_bars(
    axes[0, 0], gap, "executor", "idle %", "The GPU runs nothing", "% of the time", series="clients", form="{:.1f}"
)
fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
style.save(fig, project.figures(), "03_idle")
print(style.fingerprint(gap[["executor", "concurrency", "idle %"]], "03_idle"))

# %% [markdown]
# ### The article's table, beside ours
#
# Its protocol: chunks of 32, 16 new tokens, 1, 2 and 4 clients; it does not say how long its prompts were, ours have 96
# tokens. Its no-overlap is our `serial`, its overlap our `dual-stream`. It does not define its jitter; ours is the standard
# deviation of all gaps between tokens of a load. TPOT is a request's mean gap; rows hold gaps request after request, and all
# requests have as many. Seconds became milliseconds.

# %%
ours = sweep[sweep["protocol"] == "article"].set_index(["policy", "concurrency"])


def tpot_p50_ms(row):
    return np.median(np.mean(np.reshape(row["itl_ms"], (row["requests"], -1)), axis=1))


table = []
for clients, theirs in article.iterrows():
    for policy, name in (("serial", "no_overlap"), ("dual-stream", "overlap")):
        row = ours.loc[(policy, clients)]
        table.append(
            {
                "clients": clients, "policy": policy,
                "article tok/s": theirs[f"{name}_tokens_per_s"], "ours tok/s": row["tokens_per_s"],
                "article TPOT": theirs[f"{name}_tpot_p50_s"] * 1e3, "ours TPOT": tpot_p50_ms(row),
                "article jitter": theirs[f"{name}_jitter_s"] * 1e3, "ours jitter": np.std(row["itl_ms"]),
                "article 2-stream steps": theirs["stream_overlap_steps"] if name == "overlap" else 0,
                "ours": row["prefill_decode_stream_overlap_steps"],
            }
        )  # fmt: skip
table = pd.DataFrame(table)
show(table)
wide = table.pivot(index="clients", columns="policy")
for clients, values in wide.iterrows():
    parts = [f"{source} {values[f'{source} tok/s', 'dual-stream'] / values[f'{source} tok/s', 'serial'] - 1:+.1%} tokens/s, "
             f"{values[f'{source} jitter', 'dual-stream'] / values[f'{source} jitter', 'serial'] - 1:+.0%} jitter"
             for source in ("article", "ours")]  # fmt: skip
    print(f"{clients} client(s), two streams against one: {'; '.join(parts)}")

# %% [markdown]
# ## Conclusion
#
# What must hold if the measurement is sound is asserted, and so is what this card showed: on one that overturns it, this cell
# fails and says which.

# %%
one_lane = sweep["placement"].isin(["one-lane", "fused"])
overlapping = dilation[dilation["placement"].isin(["two-lanes", "priority-lanes", "sm-partition"])]
wins = effects["asymmetric join"]
claims = {
    "every request of every load ended well": bool((sweep["errors"] == 0).all()),
    "one stream never overlaps, by either counter": bool(
        (sweep.loc[one_lane, "prefill_decode_stream_overlap_steps"] == 0).all()
        and (sweep.loc[one_lane, "physical_overlap_ms"].fillna(0) == 0).all()
        and (dilation.loc[~dilation.index.isin(overlapping.index), "physical_overlap_ms"] == 0).all()
    ),
    # CONCLUSION
    "two streams overlap physically": bool((overlapping["physical_overlap_ms"] > 0).all()),
    # CONCLUSION
    "whoever overlaps pays: decode takes longer beside prefill than in serial": bool((overlapping["decode"] > 1).all()),
    # CONCLUSION
    "without the barrier the longest gap is shorter": bool(wins["max ITL ms"] < 1),
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")


def verdict(ratio, better="better", worse="worse"):
    """Within 3% is a tie."""
    return "no different" if abs(ratio - 1) < 0.03 else better if ratio < 1 else worse


print()
for row in overlapping.itertuples():
    gain = verdict(1 / row.speedup, "faster", "slower")
    print(
        f"{row.policy}: {row.share:.0%} of the shorter phase overlapped, decode took {row.decode:.2f} and prefill "
        f"{row.prefill:.2f} times as long; in all {gain} than one after the other ({row.speedup:.2f}x of {row.ideal:.2f}x)"
    )
for name, effect in effects.items():
    most, waits = effect["max ITL ms"], effect["document TTFT ms"]
    print(f"{name}: longest gap {verdict(most)} (x{most:.2f}), the document's TTFT {verdict(waits)} (x{waits:.2f})")
idle = gap.set_index(["policy", "graphs", "concurrency"])["idle %"]
for clients in sorted(gap["concurrency"].unique()):
    eager, graphs = idle["serial", False, clients], idle["serial", True, clients]
    print(
        f"{clients} client(s), serial: the GPU runs nothing for {eager:.0f}% of the time with eager launches, "
        f"{graphs:.0f}% with graphs"
    )
if sheet is not None:
    busiest = sum(moved.values()) / sheet[0] * 1e3 / alone.max()
    print(
        f"both phases' weights, read at full speed, fill {busiest:.0%} of the longer phase's time: memory "
        f"{'is' if busiest > 0.8 else 'is not'} what keeps them from sharing this card"
    )
