# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 · What four bits cost, and three
#
# **Question.** Notebook 00 rounded a model to the nearest of 16 or 8 levels, and at 3 bits its text fell apart. How much of
# that is due to the bits, and how much to the rounding? The DeepInfer-SM86 article gives the MLP 3 bits and attention 4, in
# every block alike. Is that a good way to spend the bytes, or do some blocks mind more than others?
#
# Three quantisers make the same format, so that every kernel of this package runs all of them at the same speed:
#
# - `rtn` rounds each weight to the nearest level. The largest of a group sets the step.
# - `scale-search` tries smaller steps too, and takes the one that loses least on inputs that occur.
# - `gptq` rounds one column after the other, and lets the columns still to come make up for the error
#   (`deepinfer_lab/quant/gptq.py`).
#
# The last two read 16,384 tokens of Python's documentation first. What is evaluated stands before those in the same text, and
# neither has seen it. The default model's file stores its matrices in 4 bits already, by another scheme (Q4_1: 16 levels and
# an offset for 32 weights). *Unquantised* means: as in that file, so that what is measured here comes on top.

# %% tags=["parameters"]
mode: str = "replay"  # replay: read a record from data/; measure: run now, which takes 20 minutes on two cores
device: str = "cpu-amd-epyc-2-cores"  # whose record replay reads, a folder of data/

# %%
import math

import numpy as np
import pandas as pd

from deepinfer_lab.figures import quality as quality_figures
from deepinfer_lab.figures import style
from deepinfer_lab.lab import experiment, project
from deepinfer_lab.lab.experiments import EXPERIMENTS

record = experiment.obtain(EXPERIMENTS["quantisation_quality"], mode=mode, device=device)
rows = record.frame()
GROUP = record.params["group"]
OTHER_GROUPS = record.params["other_groups"]
print(experiment.banner(record))

# %% [markdown]
# ## Prediction
#
# **One weight.** Levels stand $\Delta$ apart, and a weight lies anywhere between two of them with equal chance. The error is
# uniform over $\pm\Delta/2$, so its mean square is $\Delta^2/12$. Rounding to nearest sets the largest of $g$ weights on the
# lowest level: $\Delta = \max|w| / 2^{b-1}$. For normal weights of variance $\sigma^2$ all is known, as
#
# $$E[\max\nolimits_g w^2] = \sigma^2 \int_0^\infty 2x\,\bigl(1 - \mathrm{erf}(x/\sqrt 2)^g\bigr)\,dx.$$


# %%
def error_share(bits, group):
    """Mean square error of rounding normal weights to nearest, as a share of their variance."""
    x = np.arange(0, 12, 0.001)
    below = np.array([math.erf(value / math.sqrt(2)) for value in x])
    largest_squared = (2 * x * (1 - below**group)).sum() * 0.001
    return largest_squared / 4 ** (bits - 1) / 12


groups = sorted({GROUP, *OTHER_GROUPS}, reverse=True)
predicted = pd.DataFrame(
    [
        {
            "bits": bits,
            "group": group,
            "bits a weight": bits + 16 / group,
            "error % (rms)": 100 * error_share(bits, group) ** 0.5,
            "squared error": error_share(bits, group) / error_share(4, GROUP),
        }
        for bits in (4, 3)
        for group in groups
    ]
)
print(f"squared error: relative to 4 bits, group {GROUP}")
print(predicted.to_string(index=False, float_format="{:.2f}".format))

# %% [markdown]
# A bit less is four times the squared error. Half the group saves a fifth of it or less, and a scale is 16 bits.
#
# **The whole model.** How far the predictions of two models are apart is measured as
# $\mathrm{KL}(\text{unquantised} \,\|\, \text{quantised})$, in nats per token. It is least, 0, where the two agree, so it
# begins as a *square* of the error. Three predictions follow, and each can fail:
#
# 1. W3 has four times the KL of W4, by any method. More than that means that the error is no longer small: what one block gets
#    wrong, the next makes worse.
# 2. A smaller group lowers KL as the table lowers the squared error.
# 3. If the text were what the model itself would write, the loss in log-perplexity would equal KL.
#
# **The method.** What a layer gets wrong is the weights' error times the layer's input. Rounding to nearest has its error in
# all directions alike. But inputs do not: values of the residual stream move together, and an error in a direction that no
# input has costs nothing. GPTQ can leave its error there. Each rounding error is then paid only for the part of its input
# that the inputs still to come cannot stand in for. How small that part is depends on the activations, and no formula on
# weights can tell: KL(gptq) / KL(rtn) measures it. Scale-search cannot turn its error around. It can only choose the step, and
# so trade a few clipped weights for the precision of all others.
#
# ## Measurement
#
# The first 4,096 tokens of the text, in windows of 1,024 that do not see each other. *top-1*: how often both models take the
# same token to be the likeliest. *seconds*: to load and quantise.

# %%
quality = rows[rows["row"] == "quality"].copy()
quality["mb"] = quality["bytes"] / 1e6
dense = quality[quality["bits"] == "none"].iloc[0]
quantised = quality[quality["bits"] != "none"].astype({"group": int})
quantised["log_loss"] = np.log(quantised["perplexity"] / dense["perplexity"])
columns = ["bits", "method", "group", "mb", "perplexity", "log_loss", "kl", "top1", "quantise_s"]
shown = quantised[columns].rename(
    columns={"log_loss": "log-ppl lost", "kl": "KL", "top1": "top-1", "quantise_s": "seconds"}
)
print(f"text: {dense['text']}")
print(
    f"unquantised: perplexity {dense['perplexity']:.2f}; from itself, KL {dense['kl']:.4f} and top-1 {dense['top1']:.0%}\n"
)
formats = {
    "mb": "{:.1f}",
    "perplexity": "{:.2f}",
    "log-ppl lost": "{:.3f}",
    "KL": "{:.4f}",
    "top-1": "{:.1%}",
    "seconds": "{:.0f}",
}
print(shown.to_string(index=False, formatters={name: form.format for name, form in formats.items()}))

# %% [markdown]
# ### Size against perplexity
#
# A point further down loses less, a point further left takes less memory, and on a GPU less time for a decode step. The planned
# mixes are explained below.


# %%
def series(row):
    if row["bits"].startswith("planned"):
        return f"{row['method']}, planned"
    return row["method"] if row["group"] == GROUP else f"{row['method']}, group {row['group']}"


points = quantised.assign(series=quantised.apply(series, axis=1))[["series", "bits", "mb", "perplexity"]]
fig, axes = style.figure(height_in=4.8)
quality_figures.draw_pareto(axes[0, 0], points, dense["perplexity"])
print(style.save(fig, project.figures(), "05_pareto", points))

# %% [markdown]
# ### What it reads like
#
# Greedy continuations of one beginning. A number says how far a model is off; this shows where it ends up. One other token is
# enough to lead elsewhere, so that a different text need not be a worse one.

# %%
print(f"{record.params['beginning']} ...\n")
for row in quality.itertuples():
    name = "unquantised" if row.bits == "none" else f"{row.bits}, {row.method}, group {row.group:.0f}"
    print(f"{name}\n    {' '.join(row.sample.split())}")

# %% [markdown]
# ### What became of the predictions

# %%
by_method = quantised[quantised["group"] == GROUP].pivot(index="method", columns="bits", values="kl")
by_method = by_method.loc[record.params["methods"]]
print("1. KL of W3 over that of W4; predicted: 4")
for method, ratio in (by_method["w3"] / by_method["w4"]).items():
    print(f"   {method:<12} {ratio:.1f}")
print(f"2. KL at a smaller group over that at {GROUP}, gptq")
gptq = quantised[quantised["method"] == "gptq"].set_index(["bits", "group"])["kl"]
for other in OTHER_GROUPS:
    for bits in (4, 3):
        expected = error_share(bits, other) / error_share(bits, GROUP)
        print(
            f"   w{bits}, group {other}: {gptq[f'w{bits}', other] / gptq[f'w{bits}', GROUP]:.2f}; predicted: {expected:.2f}"
        )
print("3. log-perplexity lost over KL; predicted: 1, if the text were the model's own")
for row in quantised[quantised["group"] == GROUP].itertuples():
    print(f"   {row.bits:<12} {row.method:<12} {row.log_loss / row.kl:.2f}")
print("The method: its KL as a share of rtn's, at the same bits")
for bits in record.params["bits"]:
    shares = by_method[bits] / by_method.at["rtn", bits]
    print(f"   {bits:<6} " + ", ".join(f"{method} {share:.0%}" for method, share in shares.items() if method != "rtn"))

# %% [markdown]
# ## Cause: which parts mind
#
# Each unit of the model (q, k and v are one product, and so are gate and up) is put into W3 *alone*, by GPTQ, and everything
# else stays unquantised. KL over the first 512 tokens says what this one unit costs. Units differ in size, so the second map
# shows KL for each MB that W3 saves against W4: what a byte buys back.

# %%
alone = rows[rows["row"] == "sensitivity"].astype({"block": int})[["block", "unit", "bytes3", "bytes4", "kl"]]
alone["saved_mb"] = (alone["bytes4"] - alone["bytes3"]) / 1e6
alone["kl_per_mb"] = alone["kl"] / alone["saved_mb"]
fig, axes = style.figure(2, 1, height_in=4.6)
quality_figures.draw_sensitivity(axes[0, 0], alone, "kl", "One unit alone in W3", "KL (nats)")
quality_figures.draw_sensitivity(axes[1, 0], alone, "kl_per_mb", "The same for each MB that it saves", "KL per MB")
axes[0, 0].set_xlabel("")
print(style.save(fig, project.figures(), "05_sensitivity", alone))

# %%
by_unit = alone.groupby("unit", sort=False).agg(
    saved_mb=("saved_mb", "sum"), kl=("kl", "sum"), least=("kl", "min"), most=("kl", "max")
)
by_unit["kl_per_mb"] = by_unit["kl"] / by_unit["saved_mb"]
print("all blocks together; least and most: of one block")
print(by_unit.to_string(float_format="{:.4f}".format))
print("\nthe five that mind most, by the MB:")
worst = alone.sort_values("kl_per_mb", ascending=False).head(5)
print(worst[["block", "unit", "kl", "kl_per_mb"]].to_string(index=False, float_format="{:.4f}".format))
half = alone.sort_values("kl", ascending=False)["kl"].cumsum() <= alone["kl"].sum() / 2
print(f"\nhalf of all that the {len(alone)} units lose is lost by {half.sum() + 1} of them")

# %% [markdown]
# ## A plan by layer
#
# With a loss and a size for every unit, "what should have 4 bits?" is a knapsack: `deepinfer_lab/quant/planner.py` solves it
# exactly. But it adds up losses that were measured one at a time, and the rest of the model was unquantised then. In a plan the
# rest has 3 or 4 bits, and GPTQ lets later blocks make up for earlier ones. So the sums are no forecast of KL; they only
# have to rank plans rightly. `sum` is what the planner minimised, KL what came of it. Budgets lie a quarter, a half
# and three quarters of the way from all-W3 to all-W4, so `planned-0.25` may take a quarter of what a fourth bit costs.

# %%
saved = alone.assign(name=alone["block"].astype(str) + "." + alone["unit"]).set_index("name")


def units_in_w4(row):
    """Which units have 4 bits in a row's plan."""
    if row["bits"].startswith("planned"):
        return list(row["in_w4"])
    attention = saved["unit"].isin(["qkv", "o"])
    return list(saved.index[{"w4": attention | True, "mixed": attention, "w3": attention & False}[row["bits"]]])


plans = quantised[(quantised["method"] == "gptq") & (quantised["group"] == GROUP)].sort_values(["bytes", "kl"])
table = []
for _, row in plans.iterrows():
    four = units_in_w4(row)
    table.append(
        {"plan": row["bits"], "mb": row["mb"], "sum": saved["kl"].drop(four).sum(), "KL": row["kl"],
         "perplexity": row["perplexity"], "top-1": row["top1"],
         **{unit: sum(name.endswith(f".{unit}") for name in four) for unit in saved["unit"].unique()}}
    )  # fmt: skip
table = pd.DataFrame(table)
print("qkv to down: how many of them have 4 bits")
print(table.to_string(index=False, formatters={"mb": "{:.1f}".format, "sum": "{:.4f}".format, "KL": "{:.4f}".format,
                                               "perplexity": "{:.2f}".format, "top-1": "{:.1%}".format}))  # fmt: skip

# %% [markdown]
# ## Conclusion
#
# What must hold on any machine is asserted. Whether the plan by layer beats the article's is computed, and said as it is found.

# %%
perplexity = quantised[quantised["group"] == GROUP].pivot(index="method", columns="bits", values="perplexity")
of_dense = perplexity / dense["perplexity"]
by_plan = table.set_index("plan")
rivals = by_plan[by_plan.index.str.startswith("planned") & (by_plan["mb"] <= by_plan.at["mixed", "mb"])]
claims = {
    "the unquantised model is no distance from itself": dense["kl"] == 0 and dense["top1"] == 1,
    "GPTQ at 4 bits costs at most 10% of perplexity": of_dense.at["gptq", "w4"] <= 1.10,
    "GPTQ at 3 bits costs at most 80%": of_dense.at["gptq", "w3"] <= 1.8,
    "for every method the article's mix lies between W4 and W3": bool(
        perplexity["mixed"].between(perplexity["w4"], perplexity["w3"]).all()
    ),
    "scale-search is better than rtn at any bits, and GPTQ better than scale-search": bool(
        (by_method.loc[["rtn", "scale-search", "gptq"]].diff().dropna() < 0).all(axis=None)
    ),
    "no plan of the planner has a larger sum than the article's at the same bytes": bool(
        (rivals["sum"].min() <= by_plan.at["mixed", "sum"]) or rivals.empty
    ),
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")

print(
    f"\nat W3, rtn multiplies perplexity by {of_dense.at['rtn', 'w3']:.2f} and GPTQ by {of_dense.at['gptq', 'w3']:.2f}: "
    f"of the log-perplexity that rtn lost, {1 - math.log(of_dense.at['gptq', 'w3']) / math.log(of_dense.at['rtn', 'w3']):.0%} "
    "was the rounding's, not the bits'"
)
mix = by_plan.loc["mixed"]
print(f"\nways to spend the same {mix['mb']:.1f} MB, all by GPTQ:")
same = quantised[(quantised["method"] == "gptq") & np.isclose(quantised["mb"], mix["mb"], rtol=1e-3)].sort_values("kl")
for row in same.itertuples():
    print(f"  {row.bits}, group {row.group}: KL {row.kl:.4f}, perplexity {row.perplexity:.2f}")
if not rivals.empty:
    ratio = rivals["KL"].min() / mix["KL"]
    verdict = "as good as" if abs(ratio - 1) < 0.03 else "better than" if ratio < 1 else "worse than"
    print(f"the best plan by layer of at most this size is {verdict} the article's: {ratio:.2f}x its KL")
