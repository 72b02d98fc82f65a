"""``torch.compile`` around attention: one graph, eager's numbers, and no ring twice where a policy keeps its output."""

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

from lightning_longctx.attention import attend
from lightning_longctx.attention.dropout import StepDraws, drawing
from lightning_longctx.attention.op import rings_run
from lightning_longctx.sequence.record import SequenceRecord
from tests.attention import ring_calls

LENGTH, WIDTH, HEADS = 16, 16, 2
DOCUMENTS = SequenceRecord(LENGTH, documents=(0, 3, 16))
OPTIONS = {
    "causal": {},
    "documents, window and softcap": {"sequence": DOCUMENTS, "window": 5, "softcap": 2.0},
    "full": {"causal": False},
}


@pytest.fixture(autouse=True)
def _compile_anew():
    """Inductor's cache does not know of changes in what an op's fake says; Dynamo's keeps count of recompilations."""
    torch.compiler.reset()
    with warnings.catch_warnings(), inductor.patch(force_disable_caches=True):
        # Dynamo says that it looks through functools.lru_cache, and that caches are off.
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield
    torch.compiler.reset()


class Layer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, states, **options):
        query, key, value = self.project(states).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        found = attend(query, key, value, **self.options, **options)
        return states + self.output(found.transpose(1, 2).flatten(2)).tanh()


class Checkpointed(torch.nn.Module):
    """A layer that is recomputed, with or without its attention."""

    def __init__(self, keep, **options):
        super().__init__()
        self.layer = Layer(**options)
        self.context = {"context_fn": ring_calls.selective} if keep else {}

    def forward(self, states):
        return checkpoint(self.layer, states, use_reentrant=False, **self.context)


def seeded(make, *args, **kwargs):
    torch.manual_seed(0)
    return make(*args, **kwargs).double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)


def differentiated(call, model, states, **options):
    out = call(states, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [states, *model.parameters()])


def check_alike(found, expected):
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", list(OPTIONS))
def test_one_graph_with_eagers_numbers(options):
    model, states = seeded(Layer, **OPTIONS[options])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    check_alike(differentiated(compiled, model, states), differentiated(model, model, states))


@pytest.mark.parametrize(("keep", "rings"), [(True, 1), (False, 2)])
def test_checkpointing_inside_a_graph(keep, rings):
    """The policy names the op, and the graph's partitioner follows it."""
    model, states = seeded(Checkpointed, keep, window=5)
    expected, before = differentiated(model, model, states), rings_run()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = differentiated(compiled, model, states)
    assert rings_run() - before == rings
    check_alike(found, expected)


def test_other_documents_need_no_other_graph():
    """Of prepared records, as the strategy makes them; their lengths vary once, and then for good."""
    model, states = seeded(Layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for start in range(1, 13):
        documents = (0, start, LENGTH) if start < 6 else (0, *range(start, LENGTH + 1))
        record = SequenceRecord(LENGTH, documents=documents, num_valid_tokens=start, checksum=start)
        record.prepare()
        check_alike([compiled(states, sequence=record)], [model(states, sequence=record)])
    assert counter.frame_count <= 2


def test_a_prepared_record_is_the_same_record():
    record, other = SequenceRecord(LENGTH, documents=(0, 3, 16)), DOCUMENTS
    record.prepare()
    assert record == other and hash(record) == hash(other) and repr(record) == repr(other)
    assert record.encode() is record.encode() and torch.equal(record.encode(), other.encode())
    changed = replace(record, num_ranks=2, rank=1)
    assert changed.num_local_tokens == 8 and changed.encode().tolist()[2] == 2
    assert pickle.loads(pickle.dumps(record)).encode().tolist() == other.encode().tolist()


def test_many_calls_are_one_graph():
    """What counts the calls of attention is no input of the graph."""
    model, states = seeded(Layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, before = torch.compile(model, backend=counter, fullgraph=True), rings_run()
    for _ in range(4):
        compiled(states)
    assert counter.frame_count == 1 and rings_run() - before == 4


def test_dropout_breaks_the_graph_and_draws_alike():
    model, states = seeded(Layer, dropout_p=0.5)
    results = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        for seed in (1, 2):
            torch.manual_seed(0)
            draws = StepDraws(seed)
            with drawing(draws):
                results.append(differentiated(call, model, states))
    check_alike(results[2], results[0])
    check_alike(results[3], results[1])
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.slow
def test_inductor():
    """Two layers in one graph, since compiling takes its time: one as it is, one that keeps its attention."""
    options = OPTIONS["documents, window and softcap"]
    model, states = seeded(lambda: torch.nn.Sequential(Layer(**options), Checkpointed(True, window=5)))
    expected, before = differentiated(model, model, states), rings_run()
    compiled = torch.compile(model, fullgraph=True)
    found = differentiated(compiled, model, states)
    assert rings_run() - before == 2, "one ring a layer"
    check_alike(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"context": 2}, {"head": 2}])
def test_our_decoder_over_ranks(gloo, degrees):
    """Graphs of two processes, with rings and exchanges of heads in them."""
    for eager, compiled in gloo(2).run(ring_calls.compiled_decoder, degrees, LENGTH):
        check_alike(compiled, eager)


IN_A_STEP = """
import torch, torch.nn.functional as F
from lightning_longctx.attention import intercepted
from lightning_longctx.sequence import SequenceRecord
records = [SequenceRecord(8), SequenceRecord(8, "zigzag", num_ranks=2, inner_ring=2, ring="none")]
layer = torch.nn.Linear(8, 8)
for record in records:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x).relu(), backend="eager", fullgraph=True)
    with intercepted([record]):
        torch.testing.assert_close(compiled(torch.ones(2, 8)), layer(torch.ones(2, 8)).relu())
import torch._dynamo.trace_rules as rules
assert F.scaled_dot_product_attention in rules.get_torch_obj_rule_map()
assert F.scaled_dot_product_attention in torch.overrides.get_testing_overrides()
assert F.scaled_dot_product_attention in torch.overrides.get_overridable_functions()[F]
print("fine")
"""


def test_compiling_for_the_first_time_inside_a_step():
    """In a process of its own: PyTorch lists its functions once, and must not list what stands in for one."""
    done = subprocess.run([sys.executable, "-c", IN_A_STEP], capture_output=True, text=True, timeout=240)
    assert done.stdout == "fine\n", done.stderr
