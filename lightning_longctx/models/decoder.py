"""A Llama-style decoder (arXiv 2302.13971) that reads as its formula.

Every module sees only this rank's tokens (tensor ranks share them as ``tensor_plan`` says); positions come from
``position_ids`` and attention alone reaches beyond.
Initialisation: normal with standard deviation 0.02; the two matrices of a block that write into the residual stream
are scaled by ``1 / sqrt(2 * num_layers)`` (GPT-2), so that the stream's variance does not grow with depth; norms are 1,
sinks 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from lightning_longctx.attention.attend import attend
from lightning_longctx.attention.token_dropout import token_dropout
from lightning_longctx.models.config import DecoderConfig
from lightning_longctx.models.layers import Embedding, Linear, RMSNorm
from lightning_longctx.models.rope import rotary_angles, rotate
from lightning_longctx.sequence.record import SequenceRecord

INIT_STD = 0.02

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine of ``rotary_angles``."""


def residual_std(config: DecoderConfig) -> float:
    """Initial standard deviation of a matrix that writes into the residual stream."""
    return INIT_STD / math.sqrt(2 * config.num_layers)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped key/value heads.

    Args:
        config: Shape of the model.
        window: Most keys that a query sees, itself included; None is no limit.
    """

    def __init__(self, config: DecoderConfig, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.softcap = config.softcap
        self.dropout = config.attention_dropout
        self.num_heads = config.num_heads
        self.head_width = config.head_size
        self.query = Linear(config.width, config.num_heads * config.head_size, INIT_STD)
        self.key = Linear(config.width, config.kv_heads * config.head_size, INIT_STD)
        self.value = Linear(config.width, config.kv_heads * config.head_size, INIT_STD)
        self.output = Linear(config.num_heads * config.head_size, config.width, residual_std(config))
        self.query_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the sinks to 0; the projections have their own initialisation."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, states: Tensor, rotary: Rotary, sequence: SequenceRecord | None = None) -> Tensor:
        """Let every token of ``states`` [B, T, width] attend to itself and earlier ones of its document."""
        query, key, value = (self.split_heads(project(states)) for project in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, *rotary), rotate(key, *rotary)
        found = attend(
            query,
            key,
            value,
            sequence=sequence,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            dropout_p=self.dropout if self.training else 0.0,
            num_heads=self.num_heads,
        )
        return self.output(found.transpose(1, 2).flatten(2))

    def split_heads(self, states: Tensor) -> Tensor:
        """[B, T, H * D] to [B, H, T, D], for as many heads as there are."""
        return states.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.mlp_size, INIT_STD)
        self.up = Linear(config.width, config.mlp_size, INIT_STD)
        self.down = Linear(config.mlp_size, config.width, residual_std(config))

    def forward(self, states: Tensor) -> Tensor:
        """Transform every token of ``states`` [B, T, width] by itself."""
        return self.down(F.silu(self.gate(states)) * self.up(states))


class Block(nn.Module):
    """Attention, then MLP, each on the normalised stream and added to it; arguments as in ``Attention``."""

    def __init__(self, config: DecoderConfig, window: int | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, window)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, states: Tensor, rotary: Rotary, sequence: SequenceRecord | None = None) -> Tensor:
        """Carry ``states`` [B, T, width] through one layer."""
        dropout = self.dropout if self.training else 0.0
        found = self.attention(self.attention_norm(states), rotary, sequence)
        states = states + token_dropout(found, dropout, sequence)
        return states + token_dropout(self.mlp(self.mlp_norm(states)), dropout, sequence)


class Decoder(nn.Module):
    """Token ids in, next-token logits out.

    Args:
        config: Shape of the model.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.width, INIT_STD)
        self.blocks = nn.ModuleList(Block(config, window) for window in config.layer_windows)
        self.norm = RMSNorm(config.width, config.norm_eps)
        # A tied head is no parameter of its own: one shared between two modules comes apart in to_empty and sharding.
        self.head = None if config.tie_embeddings else Linear(config.width, config.vocab_size, INIT_STD)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, sequence: SequenceRecord | None = None
    ) -> Tensor:
        """Next-token logits of this rank's tokens.

        Args:
            input_ids: Token ids [B, T], int64.
            position_ids: Positions [B, T], int64, within the tokens' documents. Without them the tokens are taken to be
                positions 0 to T - 1, which only a rank that holds whole sequences may do.
            sequence: The batch's ``sequence`` entry; none means that the T tokens are whole sequences.

        Returns:
            Logits [B, T, vocab_size]; with tensor ranks (``models.tensor_plan``) a DTensor, cut over the vocabulary.

        Raises:
            ValueError: ``position_ids`` are missing although the sequence is cut over ranks, or have another shape; or
                rotary scaling asks for the lengths of rows that are cut, and the record does not know them.
        """
        return self.logits(self.hidden(input_ids, position_ids, sequence))

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor | None = None, sequence: SequenceRecord | None = None
    ) -> Tensor:
        """States [B, T, width] after the last norm, which ``logits`` turns into logits; arguments as in ``forward``.

        With tensor ranks a DTensor: each has a part of the tokens.
        """
        positions = _positions(input_ids, position_ids, sequence)
        states = self.embedding(input_ids)
        exact = torch.promote_types(states.dtype, torch.float32)
        config, lengths = self.config, _row_lengths(self.config, sequence)
        rotary = rotary_angles(positions, config.head_size, config.rope_base, exact, config.rope_scaling, lengths)
        states = token_dropout(states, config.dropout if self.training else 0.0, sequence)
        for block in self.blocks:
            states = block(states, rotary, sequence)
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocab_size] of final states [..., width]; with tensor ranks a DTensor over the vocabulary."""
        if self.head is not None:
            return self.head(states)
        if isinstance(states, DTensor):  # gather the tokens, rather than the matrix
            states = states.redistribute(placements=[Replicate()])
        return F.linear(states, self.embedding.weight)

    @property
    def output_weight(self) -> Tensor | None:
        """The matrix [vocab_size, width] whose product with states ``logits`` is; with tensor ranks a DTensor.

        None if the head has been replaced by something else than a matrix, or if FSDP2 was applied to its module (or to
        the decoder) by itself, so that its weights are gathered only in a call of it.
        """
        owner = self.embedding if self.head is None else self.head
        is_matrix = self.head is None or (type(self.head).forward is nn.Linear.forward and self.head.bias is None)
        is_matrix = is_matrix and not any("forward" in vars(part) for part in (self, self.head) if part is not None)
        gathered_apart = isinstance(self, FSDPModule) or isinstance(owner, FSDPModule)
        return owner.weight if is_matrix and not gathered_apart else None

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied head counted once; whole tensors, also when they are sharded."""
        return sum(parameter.numel() for parameter in self.parameters())

    def reset_parameters(self) -> None:
        """Initialise everything anew, in the order of construction."""
        for module in self.modules():
            if isinstance(module, Linear | Embedding | RMSNorm | Attention):
                module.reset_parameters()


def _row_lengths(config: DecoderConfig, sequence: SequenceRecord | None) -> tuple[int, ...]:
    """What the record says of whole rows; nothing if this rank holds them and can look for itself."""
    lengths = () if sequence is None else sequence.row_lengths
    depends = config.rope_scaling is not None and config.rope_scaling.depends_on_length
    if depends and not lengths and sequence is not None and sequence.num_ranks * sequence.head > 1:
        raise ValueError(
            "rope_scaling.rope_type=dynamic goes by the length of whole rows, which this rank cannot see, and the "
            "batch's sequence record has no row_lengths. Let the strategy (batch.ShardCollate) cut the batch, or set "
            "row_lengths."
        )
    return lengths


def _positions(input_ids: Tensor, position_ids: Tensor | None, sequence: SequenceRecord | None) -> Tensor:
    if position_ids is None:
        if sequence is not None and sequence.num_ranks > 1:
            raise ValueError(
                f"position_ids=None, but the sequence is cut over {sequence.num_ranks} ranks, so this rank cannot "
                "count its positions. Pass batch['position_ids'] to the model."
            )
        return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    if position_ids.shape != input_ids.shape:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} do not fit input_ids of shape "
            f"{tuple(input_ids.shape)}. Pass one position per token: batch['position_ids']."
        )
    return position_ids
