# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 08 · The ghost reply
#
# **Question.** Can a reply contain another request's text? The Mini-SGLang article (its section 5.1) saw it once in some 20,000
# requests: a client asked for the weather and got an answer to something else. Its author found that a KV block had been
# handed to a new request while launched work could still touch it. There an old request read what a new one had written. Here
# the new one reads what the old one writes: the hole is the same, and it is always the new one who still has a reader. The race
# is run on purpose, step by step, with a block allocator that makes this mistake and with the one of this package. Then: how
# often does it happen by chance, and what does it cost to rule it out?
#
# The same article's section 5.2 tells of a second trap on the same boundary: a Python callback that tells the scheduler
# that work is done, and that cost more than all overlap had gained. The last part measures why.
#
# No GPU is needed for either. What matters is the *order* in which work runs, and the lanes here run when they are told to
# (`deepinfer_lab/engine/simulated_lane.py`): a launch only queues, as on a GPU, and the forward pass reads and writes the cache
# later, when it is let run. Scheduler, allocator, cache and model are the package's own.

# %% tags=["parameters"]
mode: str = "auto"  # replay: read a record from data/; measure: run now, two minutes on two cores; auto: measure
device: str = "cpu-amd-epyc-2-cores"  # whose record replay reads, a folder of data/

# %%
import numpy as np
import pandas as pd

from deepinfer_lab.figures import ghost, style
from deepinfer_lab.lab import experiment, project
from deepinfer_lab.lab.experiments import EXPERIMENTS

record = experiment.obtain(EXPERIMENTS["ghost_reply"], mode=mode, device=device)
params = record.params
BROKEN, REAL = "skips PENDING", "waits"


def rows(kind):
    """The record's rows of one kind."""
    return pd.DataFrame([row for row in record.samples if row["row"] == kind]).drop(columns="row")


print(experiment.banner(record))

# %% [markdown]
# ## The race
#
# A block is *free*, *writing* (it has one owner and room), *readonly* (it is full) or *pending*: its owner is gone, and work
# that was launched before may still read or write it. It leaves pending when the last event of every lane has passed, which is
# asked, never waited for (`deepinfer_lab/kv/blocks.py`). The broken allocator here skips pending: its blocks are free again in
# the next cycle, whatever is under way.
#
# The pool has four blocks of 16 tokens. A's prompt fills three. Its first decode step gets the fourth, and will write one
# token there. The step is launched and late, A's client hangs up, and B comes with a prompt that needs all four blocks.
#
# **Prediction.** Without pending, B's prompt is read into A's blocks, and then A's step writes over one token of it. B's first
# token was computed before that and is right. All later ones read a key and a value that are A's, so sooner or later B
# says something else. With pending, B waits for A's step, and says what it says alone.

# %%
race = rows("race")
tables = {name: ghost.block_table(race[race["allocator"] == name]) for name in (BROKEN, REAL)}
fig, axes = style.figure(2, 1, height_in=5.8)
ghost.draw_blocks(axes[0, 0], tables[BROKEN], "An allocator that skips pending: A writes into B's block")
ghost.draw_blocks(axes[1, 0], tables[REAL], "The allocator of this package: B waits for A's step")
ghost.block_legend(axes[1, 0])
shown = pd.concat(tables, names=["allocator"]).reset_index("allocator")
print(style.save(fig, project.figures(), "08_race", shown))

# %%
replies = rows("reply").set_index("allocator")["tokens"]
alone = replies["alone"]


def first_difference(tokens, expected):
    """The place of the first token that differs, counted from 1; None where none does."""
    return next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True), start=1) if a != b), None)


for name, tokens in replies.items():
    marks = [f"{token:>4}{' ' if token == right else '*'}" for token, right in zip(tokens, alone, strict=True)]
    print(f"{name:>13}: {''.join(marks)}")
print("\nB's tokens; * differs from what B says alone")
print(f"the first that differs: {first_difference(replies[BROKEN], alone)} of {len(alone)}")

# %% [markdown]
# ## In words
#
# One wrong token in a prompt gives a reply that is wrong, and not one that is somebody else's. For that, more of A has to
# get into B's cache. A long prompt can do it, because on two lanes decode goes on beside it: A's prompt, a list of patients,
# is launched on the prefill lane and late. A's client hangs up. B, who writes a list of fruits on the decode lane, grows into
# the blocks that were A's. Then A's prompt is read, and its keys and values take the place of B's own list.
#
# This is SmolLM2-135M, greedy. The two lists look alike on purpose: a small model copies what it has just seen, so its text
# tells what lies in its cache. How late A's prompt is was chosen too: the record's `overwritten_tokens` of B's lie in A's
# blocks when it runs. This pair of prompts was looked for: of about a dozen, most gave B a reply that was wrong without a word
# of A's in it, and so did this pair in 4 bits.

# %%
texts = rows("text").set_index("allocator")
print(f"{params['overwritten_tokens']} of B's tokens lie in blocks that were A's")
print(f"A's prompt begins: {params['secret'][:62]!r} ...")
print(f"B's prompt: {params['asked']!r}")
print(f"B's reply before that, the end of it: {texts.at['alone', 'before'][-45:]!r}\n")
for name, row in texts.iterrows():
    print(f"{name:>13}, B goes on: {row['after']!r}")


def words(text):
    """The words of a text."""
    return set("".join(letter if letter.isalpha() else " " for letter in text).split())


own = words(params["asked"]) | words(texts.at["alone", "before"]) | words(texts.at["alone", "after"])
leaked = {name: sorted((words(row["after"]) & words(params["secret"])) - own) for name, row in texts.iterrows()}
print("\nwords that B says, that stand in A's prompt, and that B says neither alone nor in its prompt:")
for name, found in leaked.items():
    print(f"{name:>13}: {', '.join(found) or 'none'}")

# %% [markdown]
# B need not repeat a line of A's to give it away: here it makes up a patient out of A's names. And nothing has failed. No
# assertion, no NaN, no illegal address: the text is fluent, and only who knows both prompts can see what happened.

# %% [markdown]
# ## How often, by chance
#
# Now nothing is arranged. Many short requests to a small model of random weights arrive in random turns, some are cancelled,
# others end with an end-of-sequence token while their next step is under way. In each turn the scheduler runs a cycle, and each
# lane runs one piece of work, or none. A seed decides all of this beforehand, the same for both allocators. Every reply that
# ran to its end is compared with what its request says alone. The sizes of pool and requests, and how many are cancelled, were
# chosen so that ghosts appear at all: how often they do holds for this load alone.
#
# **Prediction.** A reply goes wrong only where many things meet: a block is handed out while a launched step will write to it,
# the new owner's prompt covers the very slot, and its own lane is the faster one. So most blocks that are handed out too
# early harm nobody, and this is why such a bug outlives its tests.

# %%
runs = rows("interleaving")
totals = runs.groupby(["allocator", "late_percent"], as_index=False)[["replies", "early", "wrong"]].sum()
counts = runs.groupby(["allocator", "late_percent"], as_index=False).agg(seeds=("seed", "size"))
print(totals.merge(counts).to_string(index=False))
outcomes = totals[totals["allocator"] == BROKEN][["late_percent", "early", "wrong"]].reset_index(drop=True)
fig, axes = style.figure(height_in=3.8)
ghost.draw_outcomes(axes[0, 0], outcomes)
print(style.save(fig, project.figures(), "08_outcomes", outcomes))
early, wrong = int(outcomes["early"].sum()), int(outcomes["wrong"].sum())
broken_replies = int(totals.loc[totals["allocator"] == BROKEN, "replies"].sum())
print(
    f"\none reply in {broken_replies / wrong:.0f} is wrong: "
    f"of {early:,} blocks handed out early, one in {early / wrong:.0f} shows"
)

# %% [markdown]
# Where the lanes keep up, no block is ever handed out early. So no test on a CPU can find this bug if a launch there has run by
# the time it returns, and a GPU that is quick enough hides it too. *Early* is counted strictly: some lane had not passed all
# that was launched before the release, whether or not that would touch the block.
#
# ## What waiting costs
#
# A pending block is memory that nobody uses, so a newcomer may have to wait for it. It waits for work that is launched
# already, and no longer: as soon as the lanes have run, the block is free.
#
# The picture is one seed's course with lanes that are often late. Grey is what pending takes.

# %%
pool = rows("pool").set_index("allocator")
course = pool.loc[REAL, ["writing", "readonly", "pending", "free"]].apply(pd.Series).T
course.insert(0, "turn", range(len(course)))
late = params["drawn_late_percent"]
fig, axes = style.figure(height_in=3.4)
ghost.draw_pool(axes[0, 0], course, f"Blocks by state, lanes idle in {late}% of turns")
print(style.save(fig, project.figures(), "08_pool", course))

# %%
sums = runs.groupby(["allocator", "late_percent"])[["turns", "pending_block_turns", "started", "wait_turns"]].sum()
real, broken = sums.loc[REAL], sums.loc[BROKEN]
cost = pd.DataFrame(
    {
        "pending % of pool": 100 * real["pending_block_turns"] / real["turns"] / params["blocks"],
        "turns until admitted, waits": real["wait_turns"] / real["started"],
        "the same, skips PENDING": broken["wait_turns"] / broken["started"],
    }
)
cost["difference"] = cost["turns until admitted, waits"] - cost["the same, skips PENDING"]
cost["turns in all, ratio"] = real["turns"] / broken["turns"]
print(cost.to_string(float_format="{:.2f}".format))

# %% [markdown]
# ## Who says that it is done
#
# A block leaves pending, and a token reaches its client, when the scheduler *knows* that work is done. It can ask
# (`cudaEventQuery`, once a cycle), or be told: CUDA can call a function when a stream gets there. If that function is Python,
# the driver's thread needs the interpreter's lock (GIL), which the scheduler's thread holds while it plans. CPython asks
# whoever holds the lock to let go only after the *switch interval*, 5 ms by default. And a stream goes on only when its host
# function has returned.
#
# **Prediction.** Asked: late by a part of a cycle at most. Called back while the scheduler runs Python: late by the switch
# interval, in every step, so that a step takes its own time plus 5 ms. With the interval shortened, so is the delay, which
# would show that the lock is the cause and not threads as such.
#
# On a CPU a thread that sleeps stands for the stream. The scheduler's thread spins in Python, or it prepares the tensors of
# decode steps, as the package's does, or it sleeps. The first line is no overlap at all: launch, wait, plan, and so on.

# %%
completion = rows("completion")
quantiles = np.stack([np.percentile(times, (5, 50, 95)) for times in completion["late_ms"]])
completion[["p5", "p50", "p95"]] = quantiles
completion["called_back"], completion["asks"] = completion["way"] == "is called back", completion["way"] == "asks"
completion["ms a step"] = [
    total / len(times) * 1e3 for total, times in zip(completion["total_s"], completion["late_ms"], strict=True)
]
completion["way"] = [
    f"{row.way},\nmeanwhile {row.meanwhile}" + (f", {row.switch_ms:g} ms" if row.called_back else "")
    for row in completion.itertuples()
]
step_ms = params["step_ms"]
lateness = completion.loc[completion["called_back"] | completion["asks"], ["way", "called_back", "p5", "p50", "p95"]]
fig, axes = style.figure(height_in=5.6)
ghost.draw_lateness(axes[0, 0], lateness, step_ms)
print(style.save(fig, project.figures(), "08_lateness", lateness))
table = completion[["way", "p50", "p95", "ms a step"]].assign(way=completion["way"].str.replace("\n", " "))
print(f"a step takes {step_ms:g} ms; ms at the end of a way: the switch interval")
print(table.to_string(index=False, float_format="{:.3f}".format))

# %% [markdown]
# The scheduler that spins costs most in the mean. One that prepares tensors lets go of the lock by itself, inside calls to
# torch, and mostly a callback comes with the next such call. But nobody has promised when: the latest were late by several
# switch intervals.
#
# **What this cannot show.** The cost of the driver's own thread, and that of CUDA's rule that a host function must not call
# CUDA, which makes a callback useless for launching the next step. How much of a real schedule an extra 5 ms can hide behind
# other streams is for a GPU to say. The order of things is the same: this package's lanes have no callbacks. They keep an
# event for each launch, and the scheduler asks (`deepinfer_lab/engine/cuda_lane.py`).
#
# ## Conclusion
#
# The statements below are assertions. On a machine where one of them no longer holds, this cell fails and says which.

# %%
python_callbacks = completion[completion["called_back"] & (completion["meanwhile"] == "Python")].set_index("switch_ms")
default_ms = python_callbacks.index.max()
spinning, callback_step_ms = python_callbacks["p50"], python_callbacks.at[default_ms, "ms a step"]
asks = completion[completion["asks"]]
in_turn_ms, asked_ms = completion["ms a step"].iloc[0], asks["ms a step"].iloc[0]
claims = {
    "without PENDING, B's reply in the race is another one": replies[BROKEN] != alone,
    "with it, B says what it says alone": replies[REAL] == alone,
    "without PENDING, B says words that only A's prompt has": bool(leaked[BROKEN]),
    "with it, none, and the same text as alone": not leaked[REAL]
    and texts.at[REAL, "tokens"] == texts.at["alone", "tokens"],
    "by chance, the broken allocator gives wrong replies": wrong > 0,
    "and the real one not one": totals.loc[totals["allocator"] == REAL, "wrong"].sum() == 0,
    "most blocks that are handed out early harm nobody": wrong < early / 2,
    "waiting makes the runs longer by less than a tenth": bool((cost["turns in all, ratio"] < 1.1).all()),
    "who asks is late by less than a step": bool((asks["p50"] < step_ms).all()),
    "a callback is late by the switch interval while the scheduler runs Python": bool(
        (spinning >= spinning.index).all() and spinning[default_ms] < 2 * default_ms
    ),
    "that is slower than no overlap at all": callback_step_ms > in_turn_ms,
}
for claim, holds in claims.items():
    assert holds, f"no longer true here: {claim}"
    print(f"holds: {claim}")
real_replies = int(totals.loc[totals["allocator"] == REAL, "replies"].sum())
print(
    f"\nwrong replies: {wrong} of {broken_replies:,} without PENDING, 0 of {real_replies:,} with it, for "
    f"{cost['difference'].min():.2f} to {cost['difference'].max():.2f} turns more until a request is admitted"
)
print(
    f"a step of {step_ms:g} ms takes {callback_step_ms:.1f} ms with a callback while the scheduler runs Python, "
    f"{in_turn_ms:.1f} ms without overlap, {asked_ms:.1f} ms where the scheduler asks"
)
