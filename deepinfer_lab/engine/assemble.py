"""From a model and settings to a scheduler: its memory, its policy, its lanes."""

import dataclasses

from deepinfer_lab.engine.config import EngineConfig
from deepinfer_lab.engine.cuda_lanes import cuda_lanes
from deepinfer_lab.engine.lane import HostLane
from deepinfer_lab.engine.planner import Limits
from deepinfer_lab.engine.policy import policy_named
from deepinfer_lab.engine.scheduler import Scheduler
from deepinfer_lab.kv.pool import KVPool
from deepinfer_lab.model.decoder import Decoder
from deepinfer_lab.model.tokenizer import Tokenizer

MIB = 1 << 20


def longest(model: Decoder, config: EngineConfig) -> int:
    """Tokens that a request may have, prompt and output."""
    return min(model.config.max_context, config.max_context or model.config.max_context)


def assemble(model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig) -> Scheduler:
    """A scheduler with the lanes that the model's device has. On a GPU this captures graphs, which takes seconds.

    Raises:
        SettingError: no such policy, or a memory budget that holds no block.
    """
    on_gpu = model.device.type == "cuda"
    shape = dataclasses.replace(model.kv_shape, quantised=config.kv_dtype == "int8")
    mib = config.kv_cache_mib or (4096 if on_gpu else 512)
    kv = KVPool.within(mib * MIB, shape, config.block_size, model.device, scratch=on_gpu)
    policy = config.policy
    if isinstance(policy, str):
        policy = policy_named(policy, config.itl_target_ms)
    lanes = None
    if on_gpu:
        lanes = cuda_lanes(
            policy.placement, model, kv, graphs=config.cuda_graphs, chunk_tokens=config.chunk_tokens,
            max_batch=config.max_batch, max_context=longest(model, config), decode_share=config.decode_share,
            decode_chain=config.decode_chain,
        )  # fmt: skip
    return Scheduler(
        model,
        kv,
        policy if on_gpu else policy.on_one_lane(),
        tokenizer.eos_ids if tokenizer else frozenset(),
        Limits(config.chunk_tokens, config.max_batch, config.max_in_flight),
        prefix_cache=config.prefix_cache,
        stream=tokenizer.stream if tokenizer else None,
        lane=HostLane if lanes is None else lambda name, *_: lanes[name],
    )
