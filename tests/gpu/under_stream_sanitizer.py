"""Engines under torch's CUDA sanitizer, which knows every stream's reads and writes of each tensor, and what waited for what.

    python tests/gpu/under_stream_sanitizer.py

It watches the thread that imports torch; here threads enter its dispatch mode as they begin, so that it sees the engine's. It
does not see what kernels of ours and replayed graphs touch: copies to and from the device, tokens and logits remain. And it
takes the KV cache for one tensor, so that steps launched one by one, which zero one block while others are read, would be
reported. Exits with 1 where it reports anything, or overlooks a race made for it.
"""

import os
import sys
import threading

os.environ["TORCH_CUDA_SANITIZER"] = "1"

import torch
from test_overlap import built, config, load
from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

from deepinfer_lab.engine.engine import Engine

POLICIES = ("dual-stream-async", "adaptive")  # two lanes, and each on two streams

run = threading.Thread.run


def watched(thread: threading.Thread) -> None:
    with cuda_sanitizer.dispatch:
        run(thread)


def sees_a_race(*, waits: bool) -> bool:
    """Whether a tensor that one stream makes and another changes is reported."""
    found = []

    def body() -> None:
        made = torch.zeros(1 << 20, device="cuda")
        stream = torch.cuda.Stream()
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                made.add_(1)
        except CUDASanitizerErrors as errors:
            found.append(errors)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return bool(found)


def main() -> int:
    threading.Thread.run = watched
    if not sees_a_race(waits=False) or sees_a_race(waits=True):
        print("the sanitizer does not tell a race from none")
        return 1
    model = built(layers=1, batch_invariant=False)
    for name in POLICIES:
        with Engine(model, config=config(name)) as engine:  # it dies of what is reported in its thread
            status = load(engine)
        print(f"{name}: {status['prefill_decode_stream_overlap_steps']} steps on two streams, nothing reported")
    return 0


if __name__ == "__main__":
    sys.exit(main())
