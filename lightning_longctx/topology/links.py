"""What the links and the processors of a cluster carry: what choices between plans are counted with."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Links:
    """Speeds of one rank. Only ratios matter for a choice; the numbers of results never depend on them.

    Args:
        inner_gbits: Gbit per second to ranks on the same node (of one inner ring), each way.
        outer_gbits: Gbit per second to ranks on other nodes, each way.
        teraflops: What attention reaches on one rank, in 10^12 floating-point operations per second.
        latency_us: Microseconds before the first byte of a message arrives.
        copy_gbits: Gbit per second at which the processor that computes attention also sends or receives, as it does
            with gloo on CPU. null where network cards do it by themselves.

    Raises:
        ValueError: A speed is not positive.
    """

    inner_gbits: float = 1600.0
    outer_gbits: float = 200.0
    teraflops: float = 300.0
    latency_us: float = 20.0
    copy_gbits: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            speed = getattr(self, field.name)
            if speed is not None and not speed > 0:
                raise ValueError(f"links.{field.name}={speed} must be a positive number.")

    def copy_seconds(self, num_bytes: int) -> float:
        """Time that a rank's processor spends on sending or receiving so many bytes."""
        return num_bytes * 8e-9 / self.copy_gbits if self.copy_gbits else 0.0
