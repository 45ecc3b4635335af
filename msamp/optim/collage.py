"""AdamW with BF16 parameters, its weights and second moments as pairs of BF16 (Collage, algorithm 2), and the baselines of its table 2."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from msamp.numerics import mcf, metrics
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.adamw import gradient


class Variant(NamedTuple):
    """One precision option.

    Attributes:
        dtype: of m, v and the arithmetic of the update; scalars are computed in FP64 and rounded to it.
        weight: what stands beside the BF16 weight: "nothing", "pair" (a second component), "kahan" (a compensation), "master" (FP32).
        pair_v: v and beta2 are pairs.
    """

    dtype: torch.dtype
    weight: str
    pair_v: bool = False


VARIANTS = {
    "a": Variant(torch.bfloat16, "nothing"),
    "light": Variant(torch.bfloat16, "pair"),
    "plus": Variant(torch.bfloat16, "pair", pair_v=True),
    "kahan": Variant(torch.bfloat16, "kahan"),
    "d-mw": Variant(torch.float32, "nothing"),
    "d": Variant(torch.float32, "master"),
}
SUMS = {"fast-two-sum": mcf.fast_two_sum, "two-sum": mcf.two_sum}


class CollageAdamW(torch.optim.Optimizer):
    """AdamW on BF16 parameters and gradients, without FP32 copies of them: Collage-light and -plus, and what they are compared with.

    The update is delta = -lr (m^ / (sqrt(v^) + eps) + weight_decay theta), the decay inside. In the BF16 variants each elementary operation
    is rounded to BF16. Bytes a parameter are those of weight, gradient and all states.

    | variant | the paper's option | m, v | weight | bytes |
    | --- | --- | --- | --- | --- |
    | "a" | A | BF16 | BF16 | 8 |
    | "light" | B, Collage-light | BF16 | pair of BF16, theta = Grow(theta, delta) | 10 |
    | "kahan" | BF16-Kahan | BF16 | BF16 + compensation: Fast2Sum(theta, compensation + delta) | 10 |
    | "plus" | C, Collage-plus | BF16; v a pair, v = Grow(Mul(beta2, v), (1 - beta2) g^2) | as light | 12 |
    | "d-mw" | D without master weights | FP32 | BF16 | 12 |
    | "d" | D | FP32 | BF16 + FP32 master | 16 |

    A beta that BF16 cannot hold is rounded in all BF16 variants, 0.999 to 1, but for beta2 of "plus". The model computes with the first
    component of a pair, and v^ is that of v's first.

    State of a parameter: `step`, `exp_avg`, `exp_avg_sq`, and by variant `weight_remainder` (second component or compensation),
    `exp_avg_sq_remainder`, `master`. A gradient that is not finite is not looked for; `torch.nn.utils.clip_grad_norm_` with
    `error_if_nonfinite` does.

    Args:
        params: BF16 parameters or groups; a group may carry its own options.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        variant: see above.
        weight_sum: how "light" and "plus" add delta: "fast-two-sum", the paper's, which is exact while |theta| >= |delta|, or "two-sum",
            which always is. v is always added by TwoSum, because g^2 often exceeds it.
        eps_inside_root: sqrt(v^ + eps), as algorithm 2 prints it.
        keep_update: keep what each step wanted and what it did, 16 bytes a parameter, for `edq` and `lost_frac`.

    Raises:
        ValueError: for an option out of range and for a parameter or gradient that is not a plain BF16 tensor, before anything has changed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        variant: str = "plus",
        weight_sum: str = "fast-two-sum",
        eps_inside_root: bool = False,
        keep_update: bool = False,
    ) -> None:
        self.keep_update = keep_update
        self._updates: list[tuple[torch.Tensor, torch.Tensor]] = []
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        choices = {"variant": variant, "weight_sum": weight_sum, "eps_inside_root": eps_inside_root}
        super().__init__(params, {**defaults, **choices})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "keep_update": self.keep_update, "_updates": self._updates}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; refuses options out of range and parameters that are not BF16."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient: `p.main_grad` where a synchroniser has put one, else `p.grad`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = [(p, g, group) for group in self.param_groups for p in group["params"] if (g := gradient(p)) is not None]
        for _, g, _ in ready:
            _check_gradient(g)
        self._updates = []
        for p, g, group in ready:
            variant = VARIANTS[group["variant"]]
            state = self.state[p]
            if not state:
                state.update(_initial(p, variant))
            before = _value(p, state) if self.keep_update else None
            delta = _delta(p, g, state, group, variant)
            _apply(p, delta, state, variant, SUMS[group["weight_sum"]])
            if before is not None:
                self._updates.append((delta.flatten(), (_value(p, state) - before).flatten()))
        return loss

    @property
    def edq(self) -> float:
        """Effective descent quality of the last step over all its parameters [Collage, definition 3.3]: at best the norm of the update.

        The effective update of a pair, or of a weight with compensation or master, is that of its value.
        """
        return metrics.edq(*self._last_update())

    @property
    def lost_frac(self) -> float:
        """Share of the parameters whose value the last step left as it was although it wanted a change [Collage, figure 3]."""
        return metrics.lost_frac(*self._last_update())

    def _last_update(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._updates:
            raise ValueError("no update has been kept; build the optimizer with keep_update=True and take a step with gradients")
        wanted, effective = zip(*self._updates, strict=True)
        return torch.cat([delta.double() for delta in wanted]), torch.cat(effective)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the precision in which they were saved, copied (torch's own would round FP32 states to the parameter's BF16).

        Raises:
            ValueError: where the saved states are of another variant, naming both; nothing has changed then.
        """
        for i, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            if saved.get("variant") != group["variant"]:
                raise ValueError(
                    f"parameter group {i} was saved with variant {saved.get('variant')!r}, this optimizer has {group['variant']!r}; "
                    "build it with the saved variant, or start from the weights alone"
                )
        super().load_state_dict({**state_dict, "state": {}})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            saved = state_dict["state"].get(i, {})
            if saved:
                self.state[p] = {key: x.to("cpu" if key == "step" else p.device, copy=True) for key, x in saved.items()}


def _check_group(group: dict[str, Any]) -> None:
    limits = {"lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "betas[0]": 1.0, "betas[1]": 1.0}
    values = (group["lr"], group["eps"], group["weight_decay"], *group["betas"])
    for (name, limit), value in zip(limits.items(), values, strict=True):
        if not 0.0 <= value < limit:
            raise ValueError(f"{name} is {value}; choose it in [0, {limit})")
    for name, known in (("variant", VARIANTS), ("weight_sum", SUMS)):
        if group[name] not in known:
            raise ValueError(f"{name} {group[name]!r} is unknown; choose one of {', '.join(known)}")
    if group["weight_sum"] != "fast-two-sum" and VARIANTS[group["variant"]].weight != "pair":
        raise ValueError(
            f"weight_sum {group['weight_sum']!r} has no meaning for variant {group['variant']!r}, whose weights are no pairs; "
            "choose variant light or plus, or leave it out"
        )
    for p in group["params"]:
        if isinstance(p, ScalingTensor) or p.dtype is not torch.bfloat16:
            kind = "a ScalingTensor" if isinstance(p, ScalingTensor) else p.dtype
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {kind}; CollageAdamW takes torch.bfloat16: "
                "convert the model by model.bfloat16(), or give the parameter to another optimizer"
            )


def _check_gradient(g: torch.Tensor) -> None:
    if isinstance(g, ScalingTensor) or g.dtype is not torch.bfloat16 or g.layout is not torch.strided:
        kind = "a ScalingTensor" if isinstance(g, ScalingTensor) else f"{g.dtype}, {g.layout}"
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(g.shape)} is {kind}; CollageAdamW takes dense torch.bfloat16: "
            "use dense embeddings, and formats.BF16 in a gradient synchroniser"
        )


def _initial(p: torch.Tensor, variant: Variant) -> dict[str, torch.Tensor]:
    state = {"step": torch.tensor(0.0)}
    state |= {key: torch.zeros_like(p, dtype=variant.dtype) for key in ("exp_avg", "exp_avg_sq")}
    if variant.pair_v:
        state["exp_avg_sq_remainder"] = torch.zeros_like(p)
    if variant.weight == "master":
        state["master"] = p.detach().float()
    elif variant.weight != "nothing":
        state["weight_remainder"] = torch.zeros_like(p)
    return state


def _value(p: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a weight stands for, in FP64."""
    return state["master"].double() if "master" in state else p.double() + state.get("weight_remainder", 0.0)


def _delta(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any], variant: Variant) -> torch.Tensor:
    """Algorithm 2, lines 6 to 12: bring the moments up to date and return the update of the weight, in the variant's dtype."""

    def scalar(x: float) -> float:
        return torch.tensor(x, dtype=torch.float64).to(variant.dtype).item()

    (beta1, beta2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
    steps = state["step"].add_(1).item()
    g = g.to(variant.dtype)
    theta = state.get("master", p).to(variant.dtype)
    m.copy_(m * scalar(beta1) + g * scalar(1 - beta1))
    squares = g * g * scalar(1 - beta2)
    if variant.pair_v:
        remainder = state["exp_avg_sq_remainder"]
        _store((v, remainder), mcf.grow(mcf.mul(mcf.expansion(beta2), (v, remainder)), squares, mcf.two_sum))
    else:
        v.copy_(v * scalar(beta2) + squares)
    m_hat, v_hat, eps = m / scalar(1 - beta1**steps), v / scalar(1 - beta2**steps), scalar(group["eps"])
    root = (v_hat + eps).sqrt() if group["eps_inside_root"] else v_hat.sqrt() + eps
    return (m_hat / root + theta * scalar(group["weight_decay"])) * scalar(-group["lr"])


def _apply(p: torch.Tensor, delta: torch.Tensor, state: dict[str, torch.Tensor], variant: Variant, add: Callable[..., mcf.Pair]) -> None:
    """Algorithm 2, line 13: add the update to the weight."""
    if variant.weight == "master":
        p.copy_(state["master"].add_(delta))
    elif variant.weight == "nothing":
        p.copy_(p + delta)
    else:
        remainder = state["weight_remainder"]
        new = mcf.grow((p, remainder), delta, add) if variant.weight == "pair" else mcf.fast_two_sum(p, remainder + delta)
        _store((p, remainder), new)


def _store(pair: mcf.Pair, new: mcf.Pair) -> None:
    pair[0].copy_(new[0])
    pair[1].copy_(new[1])
