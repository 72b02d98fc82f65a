"""The gate before every timing: a system that computes something else has no speed."""

from __future__ import annotations

from lightning_longctx.cli.bench.systems import Case, Job


class WrongResultError(RuntimeError):
    """A system's results are not those of the plain formula."""


def errors(job: Job, case: Case) -> dict[str, float]:
    """Run a job once and compare with the formula.

    Returns:
        For each result ``|actual - expected| / |expected|`` on this rank's part, in the Euclidean norm, in float64;
        infinity if the results have other names or shapes.
    """
    actual, expected = job.finish(job.run()), (job.expected or case.expected)()
    if actual.keys() != expected.keys():
        return {f"results {sorted(actual)} instead of {sorted(expected)}": float("inf")}
    found = {}
    for name, whole in expected.items():
        part = job.part(whole)
        same = part.shape == actual[name].shape
        found[name] = ((actual[name].double() - part).norm() / part.norm()).item() if same else float("inf")
    return found


def refuse_wrong(system: str, found: list[dict[str, float]], case: Case) -> None:
    """Check what ``errors`` found on all ranks.

    Raises:
        WrongResultError: Some error is over the case's tolerance, or NaN.
    """
    wrong = [
        f"{name} on rank {rank} is off by {error:.2g}"
        for rank, by_name in enumerate(found)
        for name, error in by_name.items()
        if not error <= case.tolerance  # written so that NaN fails
    ]
    if wrong:
        raise WrongResultError(
            f"{system} does not compute what it should ({'; '.join(wrong)}; relative to float64, of which "
            f"{case.tolerance:.2g} may be rounding). Checked on {case}."
        )
