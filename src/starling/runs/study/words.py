"""How a difference is said, so that nobody reads more into it than the seeds can show."""

from starling.runs.study.intervals import Estimate


def seeds(count: int) -> str:
    """`one seed`, `3 seeds`."""
    return "one seed" if count == 1 else f"{count} seeds"


def settings(count: int) -> str:
    """`1 setting`, `3 settings`."""
    return "1 setting" if count == 1 else f"{count} settings"


def listed(parts: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def points(estimate: Estimate) -> str:
    """A difference in points of error rate with its interval."""
    if estimate.half is None:
        return f"{estimate.mean:+.1f}, one seed and hence no interval"
    return f"{estimate.mean:+.1f}, {estimate.low:+.1f} to {estimate.high:+.1f}"


def verdict(estimate: Estimate, more: str, less: str) -> str:
    """`more` or `less` with the difference where the interval allows it, else that there is nothing to be seen."""
    if estimate.half is None:
        return f"one seed cannot tell ({estimate.mean:+.1f})"
    if estimate.sign == 0:
        return f"no difference that {seeds(estimate.count)} can show ({points(estimate)})"
    return f"{more if estimate.sign > 0 else less} ({points(estimate)})"
