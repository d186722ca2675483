"""What torch does before a step's first layer and after its last: what the CUDA kernels are held to, in words."""

import torch

from deepinfer_lab.model.embedding import DenseEmbedding
from deepinfer_lab.model.ops import TorchOps
from deepinfer_lab.model.step_input import Carried, Span, StepInput

CPU = torch.device("cpu")


def test_tokens_of_an_earlier_step_take_their_places():
    table = torch.randn(10, 4)
    spans = [Span([1, 2], 0, [0]), Span([3], 4, [1]), Span([4], 4, [2])]
    plain = StepInput.build(spans, 8, CPU)
    assert torch.equal(TorchOps().embed(DenseEmbedding(table), plain), table[[1, 2, 3, 4]])
    carried = Carried(torch.tensor([7, 8, 9]), torch.tensor([2, -1]))
    step = StepInput(*(list(vars(plain).values())[:-1]), carried)
    assert torch.equal(TorchOps().embed(DenseEmbedding(table), step), table[[1, 2, 9, 4]])
    assert step.token_ids.tolist() == [1, 2, 9, 4]


def test_the_likeliest_of_each_row():
    logits = torch.tensor([[1.0, 3, 3], [torch.nan, 9, torch.nan], [-torch.inf] * 3, [0, torch.inf, torch.nan]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        last = torch.full((6,), -1)
        values, places = TorchOps().likeliest(logits.to(dtype), last)
        assert places.tolist() == [1, 0, 0, 2]
        assert last.tolist() == [1, 0, 0, 2, -1, -1]
        assert torch.equal(
            values.nan_to_num(5.0), torch.tensor([3, 5, -torch.inf, 5], dtype=torch.float64).nan_to_num(5.0)
        )
