"""Which rows' tokens come from what the lane found to be the likeliest, and which from the logits."""

import torch
from bench import request

from deepinfer_lab.engine.request import Phase, Sequence
from deepinfer_lab.engine.stopping import Stopper
from deepinfer_lab.engine.work import finish, prepare_decode
from deepinfer_lab.errors import NonFiniteLogits


def sequence(name: str, **sampling: float) -> Sequence:
    item = request(name, 5, 9, **sampling)
    made = Sequence(item, 0, Stopper(item.params, (), None))
    made.launched, made.computed, made.in_flight = 5, 4, 1
    return made


def test_only_rows_that_ask_for_more_than_the_likeliest_read_the_logits():
    """Logits of the others are poison, and one sequence has ended meanwhile."""
    sequences = [sequence("a"), sequence("gone"), sequence("b", logprobs=2), sequence("bad"), sequence("c")]
    sequences[1].phase = Phase.FINISHED
    logits = torch.full((5, 8), torch.nan).half()
    logits[2] = torch.tensor([0, 1, 2, 3, 4, 9, 6, 7])
    likeliest = torch.tensor([[1.0, 1.0, torch.nan, torch.inf, -2.0], [6, 0, 0, 1, 3]], dtype=torch.float64)
    work = prepare_decode(sequences, 1)
    found = finish(work, logits, likeliest)
    assert [each.request.id for each, _ in found] == ["a", "b", "bad", "c"]
    choices = [choice for _, choice in found]
    assert choices[1].top[1][0] == 7
    assert (choices[0].token, choices[1].token, choices[3].token) == (6, 5, 3)
    assert isinstance(choices[2], NonFiniteLogits)


def test_a_lane_that_does_not_look_leaves_all_to_the_logits():
    sequences = [sequence("a"), sequence("b")]
    logits = torch.tensor([[0.0, 2, 1], [torch.nan, 0, 0]])
    (_, first), (_, second) = finish(prepare_decode(sequences, 1), logits)
    assert first.token == 1
    assert isinstance(second, NonFiniteLogits)
