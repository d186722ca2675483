"""The experiment of notebook 08: blocks that change hands too early, what waiting costs, and how an end becomes known."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepinfer_lab.engine.request import Phase, Request
from deepinfer_lab.engine.sampling import SamplingParams
from deepinfer_lab.engine.stopping import FinishReason
from deepinfer_lab.errors import SettingError
from deepinfer_lab.kv.blocks import BlockAllocator, BlockState
from deepinfer_lab.lab.completion import completion_rows
from deepinfer_lab.lab.experiment import Experiment
from deepinfer_lab.lab.ghost_stage import ALLOCATORS, BLOCK, Hasty, Stage, alone, made_up, small_model
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.load import load_model

SECRET = """Patients:
- Margaret Hale: diabetes
- Robert Finch: asthma
- Ellen Price: migraine
- Thomas Ward: pneumonia
- Alice Moore: anaemia
- Henry Cole: diabetes
- Susan Blake: asthma
- Peter Grant: migraine
- Laura Stone: pneumonia
- George Hill: anaemia
- Emma Reed: diabetes
- Frank Shaw: asthma
- Helen Wood: migraine
- James Lane: pneumonia
- Nancy Cook: anaemia
- Oscar Bell: diabetes
- Paula West: asthma
- Simon Ford: migraine
"""


def race_rows(model: Decoder) -> Iterator[dict[str, Any]]:
    """A is cancelled while its decode step is late, and B comes. A "race" row for each moment, then B's "reply" rows.

    The pool has four blocks of 16 tokens. A's step writes the 49th token of its sequence, to the first slot of block 3.
    """
    a, b = made_up("A", 3 * BLOCK, 2), made_up("B", 3 * BLOCK + 2, BLOCK - 2)
    yield {"row": "reply", "allocator": "alone", "tokens": alone(model, b)}
    for name, allocator in ALLOCATORS.items():
        yield from _race(model, name, allocator, a, b)


def _race(
    model: Decoder, name: str, allocator: type[BlockAllocator], a: Request, b: Request
) -> Iterator[dict[str, Any]]:
    stage = Stage(model, allocator, 4, BLOCK)
    owners = [""] * 4

    def moment(what: str, written: int | None = None) -> dict[str, Any]:
        for request in "AB":
            for block in stage.blocks_of(request):
                owners[block] = request
        states = [stage.allocator.state(block).value for block in range(4)]
        return {
            "row": "race",
            "allocator": name,
            "moment": what,
            "states": states,
            "owners": ["" if state == "free" else owner for owner, state in zip(owners, states, strict=True)],
            "written": written,
        }

    stage.scheduler.add(a)
    stage.cycle()
    stage.prefill.advance()
    yield moment("A's prompt\nis read")
    stage.cycle()
    yield moment("A's decode step\nis launched, late")
    stage.cancel("A")
    yield moment("A is\ncancelled")
    stage.scheduler.add(b)
    stage.cycle()  # with nothing else to do, the scheduler waits for what is under way: A's step, where B got no block
    if not stage.blocks_of("B"):
        yield moment("B waits;\nA's step runs", written=3)
        stage.cycle()
    yield moment("B gets\nthe blocks")
    stage.prefill.advance()
    yield moment("B's prompt\nis read")
    if stage.decode.advance():
        yield moment("A's step runs", written=3)
    yield {"row": "reply", "allocator": name, "tokens": stage.run().tokens["B"]}


def text_rows(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A's prompt is under way, late, when A is cancelled. B, who is writing, grows into A's blocks; then A's prompt is read.

    A "text" row for each allocator: what B had said when `overwritten_tokens` of its tokens lay in blocks that were A's, and
    what it said after that.
    """
    loaded = load_model(params["model"], bits=params["bits"], device="cpu")
    model, tokenizer = loaded.decoder, loaded.tokenizer
    if tokenizer is None:
        raise SettingError(f"model '{loaded.name}' has no tokenizer, so there is no text that could change")
    asked, secret = (tokenizer.encode(params[name]) for name in ("asked", "secret"))
    b = Request("B", tuple(asked), SamplingParams(max_tokens=params["new_tokens"], ignore_eos=True))
    blocks = -(-(len(asked) + params["new_tokens"]) // BLOCK)
    moment = (blocks - -(-len(secret) // BLOCK)) * BLOCK + params["overwritten_tokens"]  # in tokens of B's
    for name, allocator in {"alone": BlockAllocator, **ALLOCATORS}.items():
        stage = Stage(model, allocator, blocks, BLOCK)
        stage.scheduler.add(b)
        stage.cycle()
        stage.prefill.advance()
        if name != "alone":
            stage.scheduler.add(Request("A", tuple(secret), SamplingParams(max_tokens=1)))
            stage.cycle()
            assert stage.blocks_of("A"), "the pool does not hold A's prompt beside B"
            stage.cancel("A")
        while len(asked) + len(stage.tokens["B"]) < moment:
            stage.cycle()
        before = len(stage.tokens["B"])
        in_time = stage.prefill.done > 1  # the scheduler has waited for A's prompt
        stage.prefill.advance()
        tokens = stage.run().tokens["B"]
        yield {
            "row": "text",
            "allocator": name,
            "before": tokenizer.decode(tokens[:before]),
            "after": tokenizer.decode(tokens[before:]),
            "waited_for_a": in_time,
            "tokens": tokens,
        }


def interleaving_rows(model: Decoder, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same requests, cancels and late lanes for each allocator: an "interleaving" row for each seed and lateness.

    In every turn a request may arrive and one may be cancelled; the scheduler runs a cycle; then each lane runs one piece of
    what it was given, or, so many percent of the time, none. The seed decides all of it beforehand. A "pool" row is one seed's
    course, turn by turn.
    """
    eos = range(0, 256, params["eos_every"])
    known = [made_up(f"request {i}", 1 + i % 12, 2 + i % 7) for i in range(params["known"])]
    expected = {request.id: alone(model, request, eos) for request in known}
    for late in params["late_percent"]:
        for seed in range(params["seeds"]):
            for name, allocator in ALLOCATORS.items():
                stage = Stage(model, allocator, params["blocks"], params["block_size"], eos)
                chosen = random.Random(seed).sample(known, params["requests"])
                pool, waits = _play(stage, chosen, random.Random(seed), late / 100)
                ended = [r.id for r in chosen if stage.reasons[r.id] in (FinishReason.STOP, FinishReason.LENGTH)]
                same = {"allocator": name, "late_percent": late, "seed": seed}
                yield {
                    "row": "interleaving",
                    **same,
                    "replies": len(ended),
                    "wrong": sum(stage.tokens[request] != expected[request] for request in ended),
                    "early": stage.allocator.early if isinstance(stage.allocator, Hasty) else 0,
                    "turns": len(pool),
                    "pending_block_turns": sum(counts["pending"] for counts in pool),
                    "started": len(waits),
                    "wait_turns": sum(waits),
                }
                if late == params["drawn_late_percent"] and seed == params["drawn_seed"]:
                    states = {state: [counts[state] for counts in pool] for state in pool[0]}
                    yield {"row": "pool", **same, **states}


def _play(
    stage: Stage, requests: Sequence[Request], dice: random.Random, late: float
) -> tuple[list[Mapping[str, int]], list[int]]:
    """Blocks by state after each turn, and how many turns each request waited for its first blocks, if it ever got any."""
    coming = list(reversed(requests))
    scheduler = stage.scheduler
    arrived: dict[str, int] = {}
    waits: dict[str, int] = {}
    pool = []
    while coming or scheduler.busy():
        arrives, cancels, whose, *lates = (dice.random() for _ in range(5))
        if coming and arrives < 0.5:
            request = coming.pop()
            arrived[request.id] = len(pool)
            scheduler.add(request)
        if arrived and cancels < 0.15:
            stage.cancel(list(arrived)[-3:][int(whose * min(len(arrived), 3))])
        stage.cycle()
        for lane, chance in zip((stage.prefill, stage.decode), lates, strict=True):
            if chance >= late:
                lane.advance()
        for sequence in scheduler.live():
            if sequence.phase is not Phase.WAITING:
                waits.setdefault(sequence.request.id, len(pool) - arrived[sequence.request.id])
        pool.append({state.value: stage.allocator.counts()[state.value] for state in BlockState})
    return pool, list(waits.values())


def _measure(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    model = small_model()
    yield from race_rows(model)
    yield from text_rows(params)
    yield from interleaving_rows(model, params)
    yield from completion_rows(params)


GHOST_REPLY = Experiment(
    name="ghost_reply",
    measure=_measure,
    defaults={
        # text: two requests to a real model
        "model": "smollm2-135m",
        "bits": "none",
        "asked": "Fruits:\n- apple: red\n- banana: yellow\n- cherry: red\n-",
        "secret": SECRET,
        "new_tokens": 220,
        "overwritten_tokens": 96,
        # interleavings of requests to a small model
        "known": 40,
        "eos_every": 16,
        "blocks": 8,
        "block_size": 4,
        "requests": 16,
        "seeds": 250,
        "late_percent": [0, 50, 75, 90],
        "drawn_late_percent": 75,
        "drawn_seed": 0,
        # how the scheduler learns that work is done
        "steps": 200,
        "step_ms": 3.0,
        "in_flight": 4,
        "cycle_ms": 0.5,
        "requests_in_step": 32,
        "context": 512,
        "switch_ms": [5.0, 1.0, 0.2],
    },
    runs_on_cpu=True,
    description="Blocks that change hands too early: replies, what waiting costs, and how the scheduler learns of an end",
)
