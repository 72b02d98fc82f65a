"""FLOP counts of the ring op: PyTorch's convention over the pairs that are seen."""

import pytest
import torch
from lightning.fabric.utilities.throughput import measure_flops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_longctx.attention import attend
from lightning_longctx.plan.choose import visible_pairs_on_rank
from lightning_longctx.plan.mask import CAUSAL, Mask
from lightning_longctx.sequence.layout import LAYOUTS
from lightning_longctx.sequence.record import SequenceRecord
from tests.attention import ring_calls
from tests.attention.whole import dense, inputs

HEADS, KV_HEADS, WIDTH = 4, 2, 8
FORWARD, BACKWARD = torch.ops.longctx.ring_attention, torch.ops.longctx.ring_attention_backward

CASES = {
    "causal": (CAUSAL, (), 1),
    "full": (Mask(causal=False), (), 1),
    "window": (Mask(window=5), (), 1),
    "documents": (CAUSAL, (0, 5, 6, 20, 32), 1),
    "documents not kept apart": (Mask(isolate=False), (0, 5, 6, 20, 32), 1),
    "documents and window": (Mask(window=5), (0, 5, 6, 20, 32), 1),
    "rows of their own": (CAUSAL, (0, 5, 6, 20, 32, 40, 64), 2),
    "rows of their own, not kept apart": (Mask(isolate=False), (0, 5, 6, 20, 32, 40, 64), 2),
}


def seen(length, mask, documents, num_rows, batch):
    """Pairs over all rows, by the dense mask."""
    if not mask.isolate:
        documents, num_rows = (), 1
    return int(dense(length, mask, documents, num_rows).sum()) * batch // num_rows


@pytest.mark.parametrize("case", CASES)
def test_counts_are_the_closed_form(case):
    mask, documents, num_rows = CASES[case]
    query, key, value, grad = inputs(32, torch.float32, HEADS, KV_HEADS, batch=2, width=WIDTH)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    record = SequenceRecord(32, documents=documents, num_rows=num_rows)
    code, options = record.encode(), ("", "auto", 0.3, mask.causal, mask.window, mask.isolate, None, 0.0, None, False)
    if num_rows > 1:
        leaves = [tensor.transpose(0, 1).reshape(1, -1, 64, WIDTH) for tensor in leaves]
        grad = grad.transpose(0, 1).reshape(1, -1, 64, WIDTH)
    with FlopCounterMode(display=False) as counter:
        out, _, _ = FORWARD(*leaves, None, code, *options)
        torch.autograd.grad(out, leaves, grad)
    numbers = HEADS * WIDTH * seen(32, mask, documents, num_rows, batch=2)
    assert counter.get_flop_counts()["Global"] == {FORWARD: 4 * numbers, BACKWARD: 10 * numbers}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_add_up_to_one_process(layout, case):
    mask, documents, num_rows = CASES[case]
    whole = visible_pairs_on_rank(SequenceRecord(32, documents=documents, num_rows=num_rows), mask)
    assert whole == seen(32, mask, documents, num_rows, batch=num_rows)
    for num_ranks, inner in ((3, 3), (4, 2), (8, 4)):
        fields = {"inner_ring": inner, "documents": documents, "num_rows": num_rows}
        records = [SequenceRecord(32, layout, num_ranks, rank=rank, **fields) for rank in range(num_ranks)]
        assert sum(visible_pairs_on_rank(record, mask) for record in records) == whole


@pytest.mark.parametrize("degrees", [{"context": 2}, {"head": 2}])
def test_counts_of_real_ranks(gloo, degrees):
    """Exchanges of heads count nothing; what one rank counts is its own work."""
    counts = gloo(2).run(ring_calls.counted_flops, degrees, inputs(32, torch.float32, HEADS, KV_HEADS, width=WIDTH))
    numbers = HEADS * WIDTH * seen(32, CAUSAL, (), 1, batch=1)
    assert all(set(count) == {str(FORWARD), str(BACKWARD)} for count in counts)
    assert sum(count[str(FORWARD)] for count in counts) == 4 * numbers
    assert sum(count[str(BACKWARD)] for count in counts) == 10 * numbers


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(16, 3 * 16, bias=False)

    def forward(self, tokens):
        query, key, value = self.project(tokens).unflatten(-1, (3, 4, 4)).transpose(1, 3).unbind(2)
        return attend(query, key, value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lightnings_measure_flops(device):
    with torch.device(device):
        model, tokens = Attention(), torch.randn(1, 24, 16)
    linear, pairs = 2 * 24 * 16 * 48, 24 * 25 // 2
    assert measure_flops(model, lambda: model(tokens)) == linear + 4 * 16 * pairs
    trained = measure_flops(model, lambda: model(tokens), lambda out: out.sum())
    assert trained == 2 * linear + 14 * 16 * pairs  # no gradient of the tokens


def test_what_cannot_be_read_is_bounded_from_above():
    """While compiling, the record is a fake tensor: every key counts."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        attend(*(torch.empty(2, heads, 24, 8) for heads in (4, 2, 2)), window=3)
    assert counter.get_total_flops() == 4 * 2 * 4 * 8 * 24 * 24
