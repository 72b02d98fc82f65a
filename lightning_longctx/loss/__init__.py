"""Losses as (sum, count): nothing is averaged before all ranks have been heard."""

from lightning_longctx.loss.cross_entropy import token_cross_entropy
from lightning_longctx.loss.linear_cross_entropy import linear_cross_entropy
from lightning_longctx.loss.options import TiledLoss
from lightning_longctx.loss.token_mean import TokenMean

__all__ = ["TiledLoss", "TokenMean", "linear_cross_entropy", "token_cross_entropy"]
