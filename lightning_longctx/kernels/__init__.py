"""Triton kernels: a leaf that imports only torch and triton.

Their sources lie in ``kernels/`` at the top of the checkout, which has no ``__init__.py`` (a top-level package of that
name would shadow Hugging Face's ``kernels``). This module's search path makes them ``lightning_longctx.kernels.NAME``.
"""

from __future__ import annotations

from lightning_longctx._resources import kernels_dir

__path__ = [str(kernels_dir())]
