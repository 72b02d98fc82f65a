"""Merging partial softmax results: exact, safe far apart, and honest about NaN."""

import torch

from lightning_longctx.attention.merge import RunningSoftmax, merge_
from lightning_longctx.plan.stacks import Span
from lightning_longctx.testing.oracle import attention_oracle

INF = float("inf")


def test_parts_of_the_keys_merge_to_the_whole_in_any_order():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(3))
    everything = torch.ones(6, 6, dtype=torch.bool)
    expected, expected_lse = attention_oracle(query, key, value, mask=everything)
    for order in ((0, 1, 2), (2, 0, 1)):
        running = RunningSoftmax(query, 4)
        for part in order:
            keys = slice(2 * part, 2 * part + 2)
            # keys one by one as [1-key] attention: out is the value, lse the score
            for index in range(keys.start, keys.stop):
                score = (query * key[:, :, index : index + 1]).sum(-1) * 0.5
                out = value[:, :, index : index + 1].expand(1, 2, 6, 4).clone()
                running.add(Span(0, 6, 1, 0), out, score)
        out, lse = running.result()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


def test_rows_without_keys_stay_nothing():
    out, lse = torch.zeros(1, 1, 2, 1), torch.full((1, 1, 2), -INF)
    merge_(out, lse, torch.tensor([[[[5.0], [0.0]]]]), torch.tensor([[[1.0, -INF]]]))
    assert out.flatten().tolist() == [5.0, 0.0] and lse.flatten().tolist() == [1.0, -INF]
    merge_(out, lse, torch.tensor([[[[9.0], [0.0]]]]), torch.full((1, 1, 2), -INF))
    assert out.flatten().tolist() == [5.0, 0.0] and lse.flatten().tolist() == [1.0, -INF]
    nothing = RunningSoftmax(torch.zeros(1, 1, 3, 2), 2).result()
    assert nothing[0].eq(0).all() and nothing[1].eq(-INF).all()


def test_results_far_apart_do_not_overflow():
    out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -1000.0)
    merge_(out, lse, torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 1000.0))
    assert out.item() == 1.0 and lse.item() == 1000.0


def test_nan_is_not_hidden():
    out, lse = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    merge_(out, lse, torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), float("nan")))
    assert out.isnan().all() and lse.isnan().all()
