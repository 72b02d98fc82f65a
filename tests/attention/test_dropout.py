"""Attention dropout: one mask for every layout, degree, batch and recomputation, and the right share of it."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from lightning_longctx.attention import attend, intercepted
from lightning_longctx.attention.backends import Dropout, Scores
from lightning_longctx.attention.backends.dropping import keeps, mix
from lightning_longctx.attention.dropout import CallDropout, StepDraws, drawing, positions_of, row_words
from lightning_longctx.attention.token_dropout import token_dropout
from lightning_longctx.plan.mask import Mask
from lightning_longctx.sequence.record import SequenceRecord
from lightning_longctx.testing.loopback import Mesh, attention_over_ranks
from lightning_longctx.testing.tolerances import FLOAT64
from tests.attention.whole import check, dense, inputs, oracle, sinks_of

CPU = torch.device("cpu")
P = 0.3
MESHES = {
    "one rank": Mesh("contiguous", 1, 1),
    "contiguous": Mesh("contiguous", 3, 1),
    "zigzag": Mesh("zigzag", 4, 2),
    "striped": Mesh("striped", 2, 2),
    "heads": Mesh("contiguous", 1, 1, head=4),
    "heads and a ring": Mesh("zigzag", 2, 2, head=2),
}


def words(seed=7, batch=2, heads=4, length=48):
    rows, positions = torch.arange(batch)[:, None], torch.arange(length)
    return row_words(seed, rows, torch.arange(heads), positions)


def kept(p=P, **kwargs):
    """Bool [B, H, N, N]: what is kept of whole sequences."""
    found = words(**kwargs)
    return keeps(Dropout(p, found, torch.arange(found.shape[2])))


def test_mix_is_a_bijection_of_32_bits():
    words = torch.arange(2**16) * 2**16 + 12345
    found = mix(words)
    assert found.unique().numel() == 2**16 and 0 <= int(found.min()) and int(found.max()) < 2**32
    for word, expected in zip(words.tolist()[::4099], found.tolist()[::4099], strict=True):
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32  # in Python's whole numbers, which never overflow
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        assert word ^ word >> 16 == expected


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("documents", [(), (0, 5, 6, 29, 48)])
def test_the_mask_is_the_same_bit_for_bit_over_layouts_and_degrees(mesh, documents):
    """Values are ones in one place each, so that every weight can be read from the output: 0 exactly where dropped."""
    mesh = MESHES[mesh]
    length = 48
    query, key, _, grad = inputs(length, torch.float64, batch=2, width=length)
    value = torch.eye(length, dtype=torch.float64).expand(2, 2, length, length).contiguous()
    mesh = Mesh(mesh.layout, mesh.num_ranks, mesh.inner, mesh.head, documents)
    result = attention_over_ranks(query, key, value, grad, mesh, dropout=CallDropout(P, 7))
    visible = dense(length, documents=documents)
    assert torch.equal(result.out != 0, kept() & visible)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_and_gradients(mesh, softcap):
    """With a window and sinks; rows of other documents, one after another."""
    tensors, sinks, mask = inputs(48, torch.float64, batch=2), sinks_of(4), Mask(window=20)
    documents = (0, 11, 48, 60, 96)
    mesh = MESHES[mesh]
    mesh = Mesh(mesh.layout, mesh.num_ranks, mesh.inner, mesh.head, documents, num_rows=2)
    scores = Scores(8**-0.5, softcap)
    found = attention_over_ranks(*tensors, mesh, mask=mask, sinks=sinks, scores=scores, dropout=CallDropout(P, 7))
    extra = {"softcap": softcap, "keep": kept(), "dropout_p": P}
    check(found[:5], oracle(*tensors, dense(48, mask, documents, 2), sinks, **extra), FLOAT64)


def test_the_mean_of_4096_draws_is_right_to_three_standard_errors():
    draws = torch.stack([kept(seed=seed, batch=1, heads=1, length=8)[0, 0] for seed in range(4096)]).double()
    error = (P * (1 - P) / 4096) ** 0.5
    mean = draws.mean(0)  # of every (query, key)
    assert (mean - (1 - P)).abs().mean() < 1.2 * 0.8 * error  # the mean absolute deviation of a normal is 0.8 sigma
    assert abs(float(draws.mean()) - (1 - P)) < 3 * error / 8
    assert ((mean - (1 - P)).abs() > 3 * error).double().mean() < 0.06  # 0.3 % are expected, of 64


def test_the_mean_output_of_4096_draws_is_the_output_without_dropout():
    torch.manual_seed(0)
    query, key, value = inputs(6, torch.float64, heads=2, kv_heads=1)[:3]
    outs = []
    for seed in range(4096):
        with drawing(StepDraws(seed)):
            outs.append(attend(query, key, value, dropout_p=P))
    drawn = torch.stack(outs)
    error = drawn.std(0) / 4096**0.5
    far = (drawn.mean(0) - attend(query, key, value)).abs() > 3 * error + 1e-12
    assert far.double().mean() < 0.02


@pytest.mark.parametrize("axis", range(4))
def test_neighbours_agree_as_often_as_chance(axis):
    """Along rows, heads, queries and keys, and from one seed to the next."""
    whole = torch.stack([kept(0.5, seed=seed, batch=4, heads=4, length=64) for seed in range(4)])
    for one in (whole, whole.transpose(0, axis + 1)):
        agreement = (one[1:] == one[:-1]).double().mean()
        assert abs(float(agreement) - 0.5) < 0.005


def test_calls_of_a_step_draw_differently_and_recomputation_alike():
    query, key, value, grad = inputs(32, torch.float64)
    query.requires_grad_()
    draws = StepDraws(3)

    def twice(call, disturb=False):
        torch.manual_seed(1)
        with drawing(StepDraws(3)):
            first = call(query, key, value)
            second = call(query, key, value)
            if disturb:
                torch.randn(7)  # between forward and backward
            grads = torch.autograd.grad([first, second], query, [grad, grad])[0]
        return first.detach(), second.detach(), grads

    def plain(*tensors):
        return attend(*tensors, dropout_p=P)

    def recomputed(*tensors):
        return checkpoint(plain, *tensors, use_reentrant=False)

    first, second, grads = twice(plain)
    assert not torch.equal(first, second)
    for a, b in zip(twice(recomputed, disturb=True), (first, second, grads), strict=True):
        assert torch.equal(a, b)
    with drawing(draws):
        a = attend(query, key, value, dropout_p=P)
    assert torch.equal(a.detach(), first), "the step's seed decides, not torch's generator"


def test_recomputation_that_would_draw_anew_is_an_error():
    query, key, value, grad = inputs(16, torch.float64)
    query.requires_grad_()
    with drawing(StepDraws(3)):
        out = checkpoint(
            lambda q: attend(q, key, value, dropout_p=P), query, use_reentrant=False, preserve_rng_state=False
        )
        with pytest.raises(ValueError, match="preserve_rng_state=True"):
            out.backward(grad)


def test_data_ranks_draw_for_their_rows_of_the_global_batch():
    query, key, value, _ = inputs(16, torch.float64, batch=4)
    with drawing(StepDraws(5)):
        whole = attend(query, key, value, dropout_p=P)
    for rank in range(2):
        mine = slice(rank, None, 2)
        with drawing(StepDraws(5, first_row=rank, row_step=2)):
            assert torch.equal(attend(query[mine], key[mine], value[mine], dropout_p=P), whole[mine])


def test_plain_calls_drop_the_same_on_one_rank():
    """``F.scaled_dot_product_attention`` inside a step: ours where a ring could do it, else PyTorch's own."""
    query, key, value, _ = inputs(16, torch.float64, kv_heads=4)
    with drawing(StepDraws(5)):
        ours = attend(query, key, value, dropout_p=P)
    with drawing(StepDraws(5)), intercepted([SequenceRecord(16)]):
        assert torch.equal(F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=P), ours)
        full = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0)
        masked = F.scaled_dot_product_attention(query, key, value, torch.zeros(16, 16), dropout_p=P)
        short = F.scaled_dot_product_attention(query[:, :, :4], key, value, dropout_p=P, is_causal=False)
    assert full.shape == masked.shape == ours.shape and short.shape[2] == 4


def test_plain_calls_broadcast_as_pytorchs_do():
    """One key/value head for all queries, one row of keys for the whole batch."""
    query = inputs(16, torch.float64, batch=2)[0]
    key, value = (tensor.requires_grad_() for tensor in inputs(16, torch.float64, kv_heads=1, seed=1)[1:3])
    wide_key, wide_value = (tensor.expand(2, 4, -1, -1) for tensor in (key, value))
    with intercepted([SequenceRecord(16)]):
        with drawing(StepDraws(5)):
            narrow = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=P)
        with drawing(StepDraws(5)):
            wide = F.scaled_dot_product_attention(query, wide_key, wide_value, is_causal=True, dropout_p=P)
        with drawing(StepDraws(5)), pytest.raises(ValueError, match="enable_gqa=True"):
            F.scaled_dot_product_attention(query, wide_key[:, :2], wide_value[:, :2], is_causal=True, dropout_p=P)
    assert torch.equal(narrow, wide)
    for one, other in zip(*(torch.autograd.grad(out.sum(), (key, value)) for out in (narrow, wide)), strict=True):
        torch.testing.assert_close(one, other)


def test_refusals():
    tensors = inputs(16, torch.float32)[:3]
    for p in (-0.1, 1.0, 2.0, float("nan")):
        with pytest.raises(ValueError, match="dropout_p=.*below 1"):
            attend(*tensors, dropout_p=p)
    for cap in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="softcap=.*positive"):
            attend(*tensors, softcap=cap)
    record = SequenceRecord(32, "zigzag", num_ranks=2, inner_ring=2, rank=0, ring="ring0")
    with pytest.raises(ValueError, match="outside of a training step"):
        attend(*tensors, sequence=record, dropout_p=P)


@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("num_rows", [1, 2])
def test_token_dropout_is_the_same_over_layouts_and_degrees(mesh, num_rows):
    states = torch.ones(2, 48, 16)
    with drawing(StepDraws(9)):
        whole = token_dropout(states, P)
    documents = (0, 11, 48, 60, 96) if num_rows == 2 else (0, 11, 48)
    mesh = MESHES[mesh]
    mesh = Mesh(mesh.layout, mesh.num_ranks, mesh.inner, mesh.head, documents, num_rows)
    for record in (record for row in mesh.records(48) for record in row):
        rows = record.row_ranges
        places = torch.stack([positions_of(rows[i if len(rows) > 1 else 0], CPU) for i in range(2)])
        with drawing(StepDraws(9)):
            part = token_dropout(states[:, : places.shape[1]], P, record)
        assert torch.equal(part, whole.gather(1, places[..., None].expand_as(part)))


def test_token_dropout_keeps_the_mean_and_differs_between_steps_and_calls():
    states = torch.ones(2, 500, 64, dtype=torch.float64)
    with drawing(StepDraws(9)):
        first, second = token_dropout(states, 0.5), token_dropout(states, 0.5)
    with drawing(StepDraws(10)):
        third = token_dropout(states, 0.5)
    for found in (first, second, third):
        assert set(found.unique().tolist()) == {0.0, 2.0}
        assert abs(float(found.mean()) - 1) < 3 / 64000**0.5
    for one, other in ((first, second), (first, third)):
        assert abs(float((one == other).double().mean()) - 0.5) < 0.01
    assert token_dropout(states, 0.0) is states
