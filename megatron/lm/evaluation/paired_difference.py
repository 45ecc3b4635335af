"""Compare the losses of two groups of runs: the mean of the paired differences, its 95 % interval, and one of three verdicts.

Seeds differ by more than most precisions do. Runs of the same seed see the same batches and start from the same weights, so much of the
difference between seeds cancels within a pair. The pairs are a sample of n differences d_i, and the interval of the mean is

    mean(d) +- t * stdev(d) / sqrt(n),

with Student's t at n - 1 degrees of freedom: 12.7 for two pairs, 4.3 for three, 2.36 for eight. One pair has no interval.

The verdict compares the interval of the relative differences with an effect, the smallest relative difference that would count as a loss:

    holds               the interval is between -effect and +effect
    does not hold       it is entirely outside of this range
    too small to say    it contains -effect or +effect, or there is no interval
"""

import functools
import math
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

# The smallest relative loss difference that docs/reproduction counts: BF16 with Kahan summation against BF16 with FP32 master weights.
EFFECT = 0.006
CONFIDENCE = 0.95
Seed = TypeVar("Seed", bound=Hashable)
HOLDS, DOES_NOT_HOLD, TOO_SMALL = "holds", "does not hold", "too small to say"


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
        absolute: other - base, in the unit of the losses (nats per token).
        relative: other / base - 1.
        seeds: of the pairs, in the order of `other`.
    """

    absolute: Interval
    relative: Interval
    seeds: tuple[Hashable, ...]

    def verdict(self, effect: float = EFFECT) -> str:
        """Return `HOLDS`, `DOES_NOT_HOLD` or `TOO_SMALL` for the claim that the two losses are equal.

        Args:
            effect: smallest relative difference that counts as a loss, 0 or more.

        Raises:
            ValueError: if the effect is negative or NaN.
        """
        if not effect >= 0:
            raise ValueError(f"the effect is {effect}: give a relative difference of 0 or more, such as {EFFECT}")
        low, high = self.relative.ends
        if low >= -effect and high <= effect:
            return HOLDS
        return DOES_NOT_HOLD if low > effect or high < -effect or math.isnan(low) else TOO_SMALL

    def sentence(self, base: str, other: str, effect: float = EFFECT, unit: str = "nats per token") -> str:
        """Return a sentence with the difference, its interval, the number of seeds and the verdict; `unit`: of the losses."""
        if not math.isfinite(self.absolute.mean):
            return f"{other} against {base}: a loss is non-finite, so one of the two has diverged"
        difference = f"{other} against {base}: {self.absolute.mean:+.4f} {unit}, {100 * self.relative.mean:+.2f} %"
        if self.relative.half_width is None:
            return f"{difference}, one seed, no interval: {self.verdict(effect)}"
        low, high = (100 * end for end in self.relative.ends)
        reach = {
            HOLDS: f"the losses are equal within {100 * effect:g} %",
            DOES_NOT_HOLD: f"the losses differ by more than {100 * effect:g} %",
            TOO_SMALL: f"{TOO_SMALL} whether they differ by {100 * effect:g} %",
        }[self.verdict(effect)]
        return f"{difference} (95 % interval {low:+.2f} to {high:+.2f} %), {len(self.seeds)} seeds: {reach}"


def paired_difference(base: Mapping[Seed, float], other: Mapping[Seed, float]) -> PairedDifference:
    """Compare losses by seed.

    Args:
        base: seed -> loss of the baseline, in nats per token; seeds that are not in `other` are ignored.
        other: seed -> loss of the runs to compare.

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
