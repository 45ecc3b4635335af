"""Compare the losses of two groups of runs: the mean of the paired differences, its 95 % interval, its cost in tokens, and a verdict.

Seeds differ by more than most precisions do. Runs of the same seed see the same batches and start from the same weights, so much of the
difference between seeds cancels within a pair. The pairs are a sample of n differences d_i, and the interval of the mean is

    mean(d) +- t * stdev(d) / sqrt(n),

with Student's t at n - 1 degrees of freedom: 12.7 for two pairs, 4.3 for three, 2.36 for eight. One pair has no interval.

The verdict on "the two losses are equal" compares the interval with a margin that was fixed before the runs that it judges:

    holds        the interval is between -margin and +margin
    above        it is not, and is entirely above 0: "above by LOW to HIGH"
    below        it is not, and is entirely below 0
    not shown    it contains 0 and reaches beyond the margin, or there is no interval
"""

import functools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

PER_TOKEN = "nats per token"
MARGIN = 0.01  # nats per token, 1 % of perplexity
RELATIVE_MARGIN = 0.002  # of a loss in another unit: about as much at 5 nats per token
CONFIDENCE = 0.95
Seed = TypeVar("Seed", bound=Hashable)
HOLDS, ABOVE, BELOW, NOT_SHOWN = "holds", "above", "below", "not shown"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The mean of differences and the half width of its 95 % interval; `half_width` is None for one difference."""

    mean: float
    half_width: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """Return lower and upper end, infinite for one difference."""
        width = math.inf if self.half_width is None else self.half_width
        return self.mean - width, self.mean + width


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The difference of a group of runs from its baseline.

    Attributes:
        absolute: other - base, in `unit`.
        relative: other / base - 1.
        seeds: of the pairs, in the order of `other`.
        above: number of seeds with a loss above the baseline's.
        unit: unit of the losses.
    """

    absolute: Interval
    relative: Interval
    seeds: tuple[Hashable, ...]
    above: int = 0
    unit: str = PER_TOKEN

    def verdict(self, max_relative: float | None = None) -> str:
        """Return `HOLDS`, `ABOVE`, `BELOW` or `NOT_SHOWN` for the claim that the two losses are equal.

        Args:
            max_relative: another margin, relative to the baseline's loss, 0 or more.

        Raises:
            ValueError: if that margin is negative or NaN.
        """
        judged, margin, _ = self._margin(max_relative)
        low, high = judged.ends
        if low >= -margin and high <= margin:
            return HOLDS
        return BELOW if high < 0 else NOT_SHOWN if low <= 0 else ABOVE  # with a diverged run the ends are NaN: above

    def _margin(self, max_relative: float | None) -> tuple[Interval, float, str]:
        """Return the interval that is judged, its margin, and the margin in words."""
        if max_relative is None and self.unit == PER_TOKEN:
            return self.absolute, MARGIN, f"{MARGIN:g} {PER_TOKEN}"
        margin = RELATIVE_MARGIN if max_relative is None else max_relative
        if not margin >= 0:
            raise ValueError(f"the margin is {margin}: give a relative difference of 0 or more, such as {RELATIVE_MARGIN}")
        return self.relative, margin, f"{100 * margin:g} %"

    def sentence(self, base: str, other: str, max_relative: float | None = None, curve: Sequence[tuple[float, float]] = ()) -> str:
        """Return a sentence with the difference, its interval, the seeds above, the cost in tokens and the verdict.

        Args:
            base: name of the baseline.
            other: name of the other group.
            max_relative: as in `verdict`.
            curve: (tokens or steps, loss) of the baseline, held out if the text is read repeatedly, for the cost in tokens.
        """
        if not math.isfinite(self.absolute.mean):
            return f"{other} against {base}: a loss is non-finite, so one of the two has diverged"
        cost, verdict = cost_in_tokens(self.absolute.mean, curve), self.verdict(max_relative)
        difference = f"{other} against {base}: {self.absolute.mean:+.4f} {self.unit}, {100 * self.relative.mean:+.2f} %"
        covers = "" if cost is None else f", which {base} covers in {100 * cost:.1f} % of its tokens"
        if self.relative.half_width is None:
            return f"{difference}{covers}, one seed, no interval: {verdict}"
        low, high = (100 * end for end in self.relative.ends)
        least, most = sorted(map(abs, self.absolute.ends))
        within = self._margin(max_relative)[2]
        words = {
            HOLDS: f"holds within {within}" + ", although the interval excludes equal losses" * (low * high > 0),
            NOT_SHOWN: f"not shown within {within}",
        }.get(verdict, f"{verdict} by {least:.4f} to {most:.4f} {self.unit}")
        seeds = f"{self.above} of {len(self.seeds)} seeds above"
        return f"{difference} (95 % interval {low:+.2f} to {high:+.2f} %){covers}, {seeds}: {words}"


def cost_in_tokens(distance: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of its tokens in which a run's loss falls by a distance.

    The loss falls as in the last quarter of the run, by a straight line through its losses.

    Args:
        distance: of two losses; the sign does not count.
        curve: (tokens or steps, loss), at least two in the last quarter, of several seeds together if given; else there is no
            answer.

    Returns:
        0 or more; None without a curve, or if it does not fall.
    """
    end = max((x for x, _ in curve), default=0.0)
    late = [(x, loss) for x, loss in curve if x >= 0.75 * end]
    if len({x for x, _ in late}) < 2:
        return None
    slope = statistics.linear_regression([x for x, _ in late], [loss for _, loss in late]).slope
    return abs(distance / slope) / end if slope < 0 else None


def paired_difference(base: Mapping[Seed, float], other: Mapping[Seed, float], unit: str = PER_TOKEN) -> PairedDifference:
    """Compare losses by seed.

    Args:
        base: seed -> loss of the baseline; seeds that are not in `other` are ignored.
        other: seed -> loss of the runs to compare.
        unit: unit of the losses.

    Raises:
        ValueError: if `other` is empty, one of its seeds has no baseline, or a baseline loss is 0.
    """
    if not other:
        raise ValueError("there is no run to compare: give at least one loss")
    lacking = [seed for seed in other if seed not in base]
    if lacking:
        raise ValueError(
            f"seed {lacking[0]} has no baseline run (seeds: {', '.join(map(str, base)) or 'none'}): train it, or drop the seed"
        )
    zero = [seed for seed in other if base[seed] == 0]
    if zero:
        raise ValueError(f"the baseline's loss of seed {zero[0]} is 0, but a relative difference requires another value")
    return PairedDifference(
        absolute=interval([loss - base[seed] for seed, loss in other.items()]),
        relative=interval([loss / base[seed] - 1 for seed, loss in other.items()]),
        seeds=tuple(other),
        above=sum(loss > base[seed] for seed, loss in other.items()),
        unit=unit,
    )


def interval(differences: list[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of a sample and its interval by Student's t distribution.

    Raises:
        ValueError: if the sample is empty.
    """
    if not differences:
        raise ValueError("an interval needs at least one difference")
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return Interval(mean=mean, half_width=None)
    if not all(map(math.isfinite, differences)):
        return Interval(mean=mean, half_width=math.nan)
    width = student_t_quantile((1 + confidence) / 2, count - 1) * statistics.stdev(differences) / math.sqrt(count)
    return Interval(mean=mean, half_width=width)


@functools.cache  # tables of many runs need the same few
def student_t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution: t with P(T < t) = `probability`, to twelve digits, by bisection.

    Raises:
        ValueError: if the probability is not within [0.5, 1), or there is no degree of freedom.
    """
    if not 0.5 <= probability < 1:
        raise ValueError(f"the probability is {probability}: give a value in [0.5, 1)")
    if degrees < 1:
        raise ValueError(f"{degrees} degrees of freedom: give at least 1, that is two differences")
    within = 2 * probability - 1
    low, high = 0.0, 1.0
    while _within(high, degrees) < within:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < within else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """Return P(|T| < t) as a finite sum of powers of cos(atan(t / sqrt(degrees))) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * math.cos(angle) ** 2
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
