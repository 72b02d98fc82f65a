"""Other packages that spread attention over ranks, side by side: one file for each, and none is needed to be installed.

They are written for CUDA and gloo alike but for flash-attn, which has no CPU kernel: ``flash_attn_stand_in`` gives them
PyTorch's own CPU operation in its place. So their schedules are compared on equal kernels, not their kernels.
"""

from lightning_longctx.cli.bench.peers.admission import PEERS, admitted_peers
from lightning_longctx.cli.bench.peers.peer import Peer

__all__ = ["PEERS", "Peer", "admitted_peers"]
