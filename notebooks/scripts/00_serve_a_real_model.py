# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Serve a real model
#
# **Question.** A pretrained language model, rounded to 4 bits, is served by this package's own paged scheduler. What does a
# client see, where does the time go, and what did the missing bits cost?
#
# The model is SmolLM2-135M-Instruct: 30 layers, hidden size 576, 9 query heads over 3 KV heads, Apache-2.0. It is small
# enough to run on two CPU cores, and real enough to answer. Everything printed below comes from a *record*: a JSON file of
# raw timings with the machine that made them. `mode` decides whether this notebook reads one or makes one.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read a record from data/; measure: run now; auto: measure what this machine can
device: str = "cpu-amd-epyc-2-cores"  # whose records replay reads, a folder of data/
model: str = "smollm2-135m"  # what is served
bits: str = "w4"  # weights while serving: w4, w3, mixed or none
concurrency: list = [1, 8]  # clients, one load each
prompt_tokens: int = 128  # length of every prompt
output_tokens: int = 64  # tokens that every request generates

# %%
import pandas as pd

from deepinfer_lab.figures import bits as bits_figure
from deepinfer_lab.figures import latency, style, timeline
from deepinfer_lab.lab import experiment, project
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.serving import trace_of
from deepinfer_lab.metrics.latency import summarise

served = experiment.obtain(
    EXPERIMENTS["serve_real_model"],
    mode=mode,
    device=device,
    params={
        "model": model,
        "bits": bits,
        "concurrency": concurrency,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    },
)
rows = served.frame().astype({"concurrency": "Int64", "tokens": "Int64"})  # not every row has them
print(experiment.banner(served))

# %% [markdown]
# ## It speaks
#
# `Engine.load("smollm2-135m", bits="w4")` reads the checkpoint, rounds every linear layer to 4 bits, and starts the
# scheduler on a thread of its own; `engine.generate([prompt])` waits for an answer and `engine.stream(prompt)` yields it
# piece by piece. These are greedy answers of the 4-bit model:

# %%
for answer in rows[rows["row"] == "answer"].itertuples():
    print(f"> {answer.question}\n{answer.text.strip()}\n")

# %% [markdown]
# ## Prediction
#
# A decode step multiplies one row per request with every weight of the model. With so few rows the arithmetic is nothing
# and the *reading* is everything: a step takes at least
#
# $$T_\text{step} \ge \frac{\text{bytes of weights} + \text{bytes of cached keys and values}}{\text{read bandwidth}}$$
#
# Eight clients share one reading of the weights, so eight should produce nearly eight times the tokens, until arithmetic
# starts to matter. On a CPU the few-bit weights are expanded once at load time, to float32: fewer bits save disk, not
# time, and the bytes below are those of the expanded weights.

# %%
machine = rows[rows["row"] == "machine"].iloc[0]
bandwidth, step_bytes = machine["read_bytes_per_s"], machine["step_bytes"]
context = prompt_tokens + output_tokens / 2  # tokens of a request in mid-answer
floor_ms = {c: (step_bytes + c * context * machine["kv_bytes_per_token"]) / bandwidth * 1e3 for c in concurrency}
print(f"measured read bandwidth {bandwidth / 1e9:.1f} GB/s; a step reads {step_bytes / 1e6:.0f} MB of weights")
for clients, milliseconds in floor_ms.items():
    print(
        f"{clients} clients: at least {milliseconds:.2f} ms a step, at most {clients / milliseconds * 1e3:.0f} tokens/s"
    )

# %% [markdown]
# ## Measurement
#
# A *closed loop*: each client sends a prompt cut from Python's documentation, reads the answer to its last token, and
# sends the next. TTFT runs from the client's send to its first token, so it contains queueing and tokenising; ITL is the gap
# between two tokens of one request and never contains the TTFT; TPOT is a request's mean gap,
# $(\text{E2E} - \text{TTFT}) / (N - 1)$.

# %%
requests = rows[rows["row"] == "request"]
traces = {c: [] for c in concurrency}
for row in served.samples:
    if row["row"] == "request":
        traces[row["concurrency"]].append(trace_of(row))
summaries = {c: summarise(found) for c, found in traces.items()}
table = pd.DataFrame(
    [
        {
            "clients": c,
            "requests": s.requests,
            "errors": s.errors,
            "tokens/s": s.output_tokens_per_s,
            "TTFT p50 ms": s.ttft.p50 * 1e3,
            "TTFT p95 ms": s.ttft.p95 * 1e3,
            "TPOT p50 ms": s.tpot.p50 * 1e3,
            "ITL p99 ms": s.itl.p99 * 1e3,
            "ITL max ms": s.itl.max * 1e3,
            "% of roofline": 100 * floor_ms[c] / (s.tpot.p50 * 1e3),
        }
        for c, s in summaries.items()
    ]
)
print(table.to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# ### Where a request's time goes
#
# One bar per request of the largest load: grey while it waits, blue from its first prefill chunk to its first token, orange
# while it decodes; every tick is a token. Under the `serial` policy a cycle runs one decode batch and then one prefill
# chunk, so whoever decodes waits for somebody else's chunk in every cycle: ticks stand far apart while prompts are read,
# and close together once all are.

# %%
largest = max(concurrency)
shown = requests[requests["concurrency"] == largest]
steps = rows[(rows["row"] == "step") & (rows["concurrency"] == largest)]
bars = timeline.timeline_table(shown, steps)
fig, axes = style.figure(height_in=0.28 * len(bars) + 1.6)
timeline.draw_timeline(axes[0, 0], bars, shown)
print(style.save(fig, project.figures(), "00_timeline", bars))
print(bars.head(4).to_string(index=False, float_format="{:.1f}".format))

# %%
gaps = latency.itl_table(requests.rename(columns={"concurrency": "clients"}), "clients")
fig, axes = style.figure(height_in=3.8)
latency.draw_itl_ecdf(axes[0, 0], gaps, "clients")
print(style.save(fig, project.figures(), "00_itl", gaps))

# %%
lane = rows[rows["row"] == "step"].assign(busy_ms=lambda t: (t["finished_s"] - t["started_s"]) * 1e3)
busy = lane.groupby(["concurrency", "phase"]).agg(
    steps=("busy_ms", "size"), tokens=("tokens", "sum"), busy_ms=("busy_ms", "sum"), median_ms=("busy_ms", "median")
)
print(busy.to_string(float_format="{:.1f}".format))

# %% [markdown]
# ## What fewer bits cost
#
# The same model, each linear layer rounded to the nearest of 16 levels (W4) or 8 (W3), one scale for 64 weights; `mixed`
# gives the MLP 3 bits and attention 4, as the DeepInfer-SM86 article did for its 7B model. Embeddings stay as they are.
#
# *Perplexity* is over the first 4,096 tokens of Python's own language reference, in windows of 1,024. *Agreement* is the
# share of those positions at which the rounded model and the original take the same token to be the likeliest. *Same
# beginning* counts the tokens of a greedy continuation before the two part ways.

# %%
rounded = experiment.obtain(EXPERIMENTS["few_bits"], mode=mode, device=device, params={"model": model})
quality = rounded.frame()
quality["linear_mb"] = quality["linear_bytes"] / 1e6
quality["tpot_ms"] = quality["token_times_s"].map(lambda times: times[-1] / (len(times) - 1) * 1e3)
columns = ["bits", "linear_mb", "load_s", "tpot_ms", "perplexity", "top1_agreement", "same_beginning_tokens"]
print(experiment.banner(rounded))
print(f"text: {quality['text'].iloc[0]}\n")
print(quality[columns].to_string(index=False, float_format="{:.2f}".format))

# %%
fig, axes = style.figure(height_in=4.0)
bits_figure.draw_size_and_perplexity(axes[0, 0], quality)
print(style.save(fig, project.figures(), "00_bits", quality[["bits", "linear_mb", "perplexity"]]))

# %%
for row in quality.itertuples():
    print(f"{row.bits:>5}: {rounded.params['beginning']}{row.continuation!r}")

# %% [markdown]
# ## Conclusion
#
# The statements below are assertions. On a machine where one of them no longer holds, this cell fails and says which.

# %%
by_bits = quality.set_index("bits")
fewest, most = min(concurrency), max(concurrency)
alone, together = summaries[fewest], summaries[most]
step_gain = (most / together.tpot.p50) / (fewest / alone.tpot.p50)
claims = {
    "no request failed": all(s.errors == 0 for s in summaries.values()),
    "no step beats the roofline": all(floor_ms[c] <= s.tpot.p50 * 1e3 for c, s in summaries.items()),
    "clients that share a step gain from it": step_gain > 1.5 or most == fewest,
    "perplexity rises as bits fall": by_bits["perplexity"]
    .reindex(["none", "w4", "mixed", "w3"])
    .is_monotonic_increasing,
    "rounded to nearest, W4 keeps most predictions and W3 loses more than half of its text's quality": (
        by_bits.at["w4", "top1_agreement"] > 0.5
        and by_bits.at["w3", "perplexity"] > 2 * by_bits.at["none", "perplexity"]
    ),
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")
print(
    f"{most} clients against {fewest}: {step_gain:.1f}x the tokens/s while decoding, "
    f"{together.output_tokens_per_s / alone.output_tokens_per_s:.1f}x with reading the prompts"
)
