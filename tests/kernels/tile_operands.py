"""Operands that products with weights in tiles take, and changes that any of them refuses."""

import torch

GOOD = {
    "x": torch.zeros(2, 128).half(),
    "tiles": torch.zeros(1, 1, 1024, dtype=torch.uint8),
    "scales": torch.ones(1, 2, 8, 2).half(),
    "n": 5,
    "group": 64,
}
REFUSED = [  # what is changed in GOOD, and the complaint
    ({"x": torch.zeros(2, 128)}, r"x has dtype torch.float32, must be torch.float16"),
    ({"x": torch.zeros(128).half()}, r"x has shape \(128,\), must be \[M, K\]"),
    ({"x": torch.zeros(0, 128).half()}, r"M = 0, must be 1 to"),
    ({"x": torch.zeros(2, 96).half()}, r"K = 96, must be a positive multiple of group = 64"),
    ({"x": torch.zeros(2, 192).half()}, r"tiles has shape \(1, 1, 1024\), must be \(1, 2, 1024\)"),
    ({"x": torch.zeros(2, 128).half().requires_grad_()}, r"requires a gradient"),
    ({"n": 17}, r"tiles has shape \(1, 1, 1024\), must be \(2, 1, 1024\)"),
    ({"group": 16}, r"group = 16, must be one of 32, 64, 128"),
    ({"tiles": torch.zeros(1, 1, 1024, dtype=torch.int8)}, r"tiles has dtype torch.int8, must be torch.uint8"),
    ({"tiles": torch.zeros(1025, dtype=torch.uint8)[1:].view(1, 1, 1024)}, r"must be 16-byte aligned"),
]
