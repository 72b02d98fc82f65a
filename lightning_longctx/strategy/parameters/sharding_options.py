"""How parameters are spread over ranks: what the options mean, decided before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

from lightning_longctx.topology import Degrees
from lightning_longctx.topology.degrees import divisors

ShardingName = Literal["replicate", "fsdp", "hsdp"]


@dataclass(frozen=True)
class ShardingOptions:
    """What goes with ``sharding: fsdp`` and ``sharding: hsdp``, in FSDP2's words.

    Args:
        shard_ranks: Over how many neighbouring ranks ``hsdp`` spreads a parameter; every such set of ranks holds a
            replica. Must divide data x context x head. ``auto`` takes the ranks of one node.
        reshard_after_forward: Free the gathered parameters of a block after its forward and gather them again in
            backward. False keeps them in between: a gather less, and all parameters in memory at once.
        cpu_offload: Keep parameters, gradients and the optimizer in host memory, and step there. For accelerators.

    Raises:
        ValueError: ``shard_ranks`` is neither a positive integer nor ``auto``.
    """

    shard_ranks: int | Literal["auto"] = "auto"
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        ranks = self.shard_ranks
        if ranks != "auto" and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
            raise ValueError(f"sharding_options.shard_ranks={ranks!r} must be a positive integer or auto.")


@dataclass(frozen=True)
class Distribution:
    """How the parameters of a module are distributed, as far as another run must agree to use them.

    Args:
        sharding: The option.
        num_ranks: Ranks that hold different tokens, among which parameters are replicated or sharded.
        tensor: Ranks that share every weight matrix.
        shard_ranks: Ranks that share one replica of the parameters; 1 under ``replicate``.
        reshard_after_forward: As in ``ShardingOptions``.
        cpu_offload: As there.
    """

    sharding: ShardingName
    num_ranks: int
    tensor: int
    shard_ranks: int
    reshard_after_forward: bool = True
    cpu_offload: bool = False


def check_sharding(sharding: ShardingName, options: ShardingOptions) -> None:
    """Check that the options go together.

    Raises:
        ValueError: One is unknown, or would be read and ignored.
    """
    if sharding not in get_args(ShardingName):
        raise ValueError(f"sharding={sharding!r} is unknown; choose replicate, fsdp or hsdp.")
    if options.shard_ranks != "auto" and sharding != "hsdp":
        raise ValueError(
            f"sharding_options.shard_ranks={options.shard_ranks} needs sharding=hsdp, but sharding={sharding}: "
            "replicate shards nothing, and fsdp shards over all ranks. Use sharding=hsdp, or leave it out."
        )
    if sharding == "replicate":
        for name, default in (("reshard_after_forward", True), ("cpu_offload", False)):
            if getattr(options, name) != default:
                raise ValueError(
                    f"sharding_options.{name}={not default} needs sharding=fsdp or hsdp: under replicate every rank "
                    "keeps all parameters on its device. Change sharding, or leave it out."
                )


def resolve_sharding(
    sharding: ShardingName, options: ShardingOptions, degrees: Degrees, num_devices: int, device_type: str
) -> Distribution:
    """Fit checked options to the processes of a run.

    Args:
        sharding: The option.
        options: What goes with it.
        degrees: Resolved degrees.
        num_devices: Processes of one node, ``Trainer(devices=...)``.
        device_type: What is trained on, such as ``"cuda"``.

    Raises:
        ValueError: They do not fit; the message names the option and the values that do.
    """
    if options.cpu_offload and device_type == "cpu":
        raise ValueError(
            "sharding_options.cpu_offload=True moves parameters from an accelerator to host memory, but "
            "trainer.accelerator=cpu keeps them there anyway. Leave it out."
        )
    num_ranks = prod(degrees.shape) // degrees.tensor
    shard_ranks = {"replicate": 1, "fsdp": num_ranks}.get(sharding) or _hsdp_ranks(options, degrees, num_devices)
    if num_ranks % shard_ranks:
        named = f"auto ({shard_ranks}, those of one node)" if options.shard_ranks == "auto" else shard_ranks
        raise ValueError(
            f"sharding_options.shard_ranks={named} does not divide the {num_ranks} ranks of data x context x head. "
            f"Use one of {divisors(num_ranks)}, or sharding=fsdp."
        )
    return Distribution(
        sharding, num_ranks, degrees.tensor, shard_ranks, options.reshard_after_forward, options.cpu_offload
    )


def _hsdp_ranks(options: ShardingOptions, degrees: Degrees, num_devices: int) -> int:
    if options.shard_ranks != "auto":
        return options.shard_ranks
    if num_devices % degrees.tensor:
        raise ValueError(
            f"sharding_options.shard_ranks=auto takes the ranks of one node, but tensor={degrees.tensor} does not "
            f"divide the {num_devices} processes of a node (trainer.devices). Give shard_ranks a number."
        )
    return num_devices // degrees.tensor
