"""Our decoder from and to the files of other programs: Hugging Face folders and GGUF."""

from lightning_longctx.models.pretrained.folders import load_pretrained, save_pretrained
from lightning_longctx.models.pretrained.gguf import load_gguf
from lightning_longctx.models.pretrained.sources import locate, pretrained_config, pretrained_weights

__all__ = ["load_gguf", "load_pretrained", "locate", "pretrained_config", "pretrained_weights", "save_pretrained"]
