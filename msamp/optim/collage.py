"""AdamW with BF16 parameters, its weights and second moments as pairs of BF16 (Collage, algorithm 2), and the baselines of its table 2."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import Batch, Hyper
from msamp.kernels.reference.collage import SUMS, VARIANTS, Variant, step_
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.tables import Tables
from msamp.numerics import mcf, metrics
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.masters import follow_states_, version_of
from msamp.optim.shard import gradient
from msamp.optim.states import Expected, check_state, parameter_names, saved_states, take_groups


class CollageAdamW(torch.optim.Optimizer):
    """AdamW on BF16 parameters and gradients, without FP32 copies of them: Collage-light and -plus, and their baselines.

    The update is delta = -lr (m^ / (sqrt(v^) + eps) + weight_decay theta), the decay inside. In the BF16 variants each elementary operation
    is rounded to BF16. Bytes a parameter are those of weight, gradient and all states.

    | variant | the paper's option | m, v | weight | bytes |
    | --- | --- | --- | --- | --- |
    | "a" | A | BF16 | BF16 | 8 |
    | "light" | B, Collage-light | BF16 | pair of BF16, theta = Grow(theta, delta) | 10 |
    | "kahan" | BF16-Kahan | BF16 | BF16 + compensation: Fast2Sum(theta, compensation + delta) | 10 |
    | "plus" | C, Collage-plus | BF16; v a pair, v = Grow(Mul(beta2, v), (1 - beta2) g^2) | as light | 12 |
    | "fp8" | none: plus, remainders in E4M3 | BF16; v a pair of BF16 and E4M3 | as v | 10 |
    | "d-mw" | D without master weights | FP32 | BF16 | 12 |
    | "d" | D | FP32 | BF16 + FP32 master | 16 |

    A beta that BF16 cannot hold is rounded in all BF16 variants, 0.999 to 1, but for beta2 of "plus" and "fp8". The model computes with
    the first component of a pair, and v^ is that of v's first. How E4M3 holds a remainder: `mcf.remainder_payload`. An update below 2^-13
    of a weight may be lost in "fp8", below 2^-17 in the other pairs.

    State of a parameter: `step`, `exp_avg`, `exp_avg_sq`, and by variant `weight_remainder` (second component or compensation),
    `exp_avg_sq_remainder`, `master`. The optimizer does not look for gradients that are not finite; `torch.nn.utils.clip_grad_norm_` with
    `error_if_nonfinite` does.

    A group's parameters are updated by one kernel that reads and writes each element once, to the same bits; "d", "d-mw", the options
    `weight_sum`, `eps_inside_root` and `keep_update`, and tensors that are not laid out by rows take torch's operations, one by one.

    Args:
        params: BF16 parameters or groups; a group may carry its own options.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        variant: see above.
        weight_sum: how "light", "plus" and "fp8" add delta: "fast-two-sum", the paper's, which is exact while `|theta| >= |delta|`, or
            "two-sum", which always is. v is always added by TwoSum, because g^2 often exceeds it.
        eps_inside_root: sqrt(v^ + eps), as algorithm 2 prints it.
        keep_update: keep the wanted and the effective update of each step, 16 bytes a parameter, for `edq` and `lost_frac`.

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
        self._tables: dict[torch.device, Tables] = {}
        self._cast: dict[torch.Tensor, tuple[int, ...]] = {}  # weights as they were last cast from their masters
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        choices = {"variant": variant, "weight_sum": weight_sum, "eps_inside_root": eps_inside_root}
        super().__init__(params, {**defaults, **choices})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "keep_update": self.keep_update, "_updates": self._updates, "_tables": {}, "_cast": {}}

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
        given = [(n, p, gradient(p)) for n, group in enumerate(self.param_groups) for p in group["params"]]
        ready = [(index, n, p, g) for index, (n, p, g) in enumerate(given) if g is not None]
        for *_, g in ready:
            _check_gradient(g)
        self._updates = []
        together: dict[tuple[int, torch.device, bool], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for index, n, p, g in ready:
            group, state = self.param_groups[n], self.state[p]
            if not state:
                state.update(_initial(p, VARIANTS[group["variant"]]))
            if self._cast.get(p) != version_of(p):
                follow_states_(state, p, p)
            if self.keep_update or not _in_one_kernel(group):
                self._step_alone(p, g, group)
            else:
                by_rows = all(x.is_contiguous() for x in (p, g, *state.values()))
                together.setdefault((n, p.device, by_rows), []).append((index, p, g))
        for (n, device, by_rows), members in together.items():
            self._step_together(n, device, members, ops.collage if by_rows else reference_collage)
        self._cast = {p: version_of(p) for _, _, p, _ in ready}
        return loss

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Update now the masters of "d" and the second components of pairs from weights that were written from outside, also by writes that
        no version counts, such as those through `.data` (Megatron's name). A step does it by itself for all other writes."""
        self._cast = {}
        for p, state in self.state.items():
            follow_states_(state, p, p)

    def _step_alone(self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        before = _value(p, state) if self.keep_update else None
        steps, options = int(state["step"].add_(1)), {name: group[name] for name in ("weight_sum", "eps_inside_root")}
        delta = step_(p, g, state, steps, _hyper(group), VARIANTS[group["variant"]], **options)
        if before is not None:
            self._updates.append((delta.flatten(), (_value(p, state) - before).flatten()))

    def _step_together(
        self, number: int, device: torch.device, members: list[tuple[int, torch.Tensor, torch.Tensor]], update: Callable[..., None]
    ) -> None:
        """One launch over parameters of a group: their numbers over all groups, themselves, and their gradients."""
        indices, weights, grads = (list(column) for column in zip(*members, strict=True))
        if device not in self._tables:
            self._tables[device] = Tables(device)
        tables, group = self._tables[device], self.param_groups[number]

        def column(key: str) -> list[torch.Tensor]:
            return [self.state[p][key] for p in weights if key in self.state[p]]

        batch = Batch(
            grads=grads,
            ms=column("exp_avg"),
            vs=column("exp_avg_sq"),
            masters=weights,
            weights=[],
            steps=column("step"),
            indices=indices,
            places=indices,
            weight_remainders=column("weight_remainder"),
            v_remainders=column("exp_avg_sq_remainder"),
        )
        hyper = tables.send(("hyper", number), list(_hyper(group)), torch.float64)
        usable = tables.send("usable", [True], torch.bool).view(())
        update(tables, batch, hyper, group["variant"], None, usable)

    @property
    def edq(self) -> float:
        """Effective descent quality of the last step over all its parameters [Collage, definition 3.3]: at best the norm of the update,
        which is that of this variant, in its own arithmetic; 0 where every gradient and moment was 0.

        The effective update of a pair, or of a weight with compensation or master, is that of its value.
        """
        return metrics.edq(*self._last_update())

    @property
    def lost_frac(self) -> float:
        """Share of the parameters that the last step left unchanged although their update was not zero [Collage, figure 3]."""
        return metrics.lost_frac(*self._last_update())

    @property
    def update_norm(self) -> float:
        """Norm of the last wanted update: the value of `edq` where nothing was lost."""
        return float(self._last_update()[0].norm())

    def _last_update(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._updates:
            raise ValueError("no update has been kept; build the optimizer with keep_update=True and take a step with gradients")
        wanted, effective = zip(*self._updates, strict=True)
        return torch.cat([delta.double() for delta in wanted]), torch.cat(effective)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the precision in which they were saved, copied (torch's own would round FP32 states to the parameter's BF16).

        Raises:
            ValueError: where the saved states do not fit this optimizer: another variant, other names, shapes or
                dtypes, values that a state cannot hold; nothing has changed then.
        """
        states, names = saved_states(self, state_dict, "variant"), parameter_names(self)
        params = [(p, VARIANTS[group["variant"]]) for group in self.param_groups for p in group["params"]]
        for i, state in states.items():
            p, variant = params[i]
            begun = _initial(torch.empty_like(p, device="meta"), variant)
            least = {"step": 0.0, "exp_avg_sq": 0.0}
            check_state(names[i], state, {key: Expected(x, least.get(key, -math.inf)) for key, x in begun.items()})
        for saved in state_dict["param_groups"]:
            _check_group({**saved, "params": []})
        take_groups(self, state_dict)
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if i in states:
                self.state[p] = {key: x.to(p.device, copy=True) for key, x in states[i].items()}


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
            f"weight_sum {group['weight_sum']!r} has no meaning for variant {group['variant']!r}: its weights are no pairs; "
            "choose variant light, plus or fp8, or leave it out"
        )
    for p in group["params"]:
        if isinstance(p, ScalingTensor) or p.dtype is not torch.bfloat16:
            kind = "a ScalingTensor" if isinstance(p, ScalingTensor) else p.dtype
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {kind}; CollageAdamW takes torch.bfloat16: "
                "convert the model by model.bfloat16(), or give the parameter to another optimizer"
            )


def _in_one_kernel(group: dict[str, Any]) -> bool:
    plain = group["weight_sum"] == "fast-two-sum" and not group["eps_inside_root"]
    return plain and VARIANTS[group["variant"]].dtype is torch.bfloat16


def _hyper(group: dict[str, Any]) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])


def _check_gradient(g: torch.Tensor) -> None:
    if isinstance(g, ScalingTensor) or g.dtype is not torch.bfloat16 or g.layout is not torch.strided:
        kind = "a ScalingTensor" if isinstance(g, ScalingTensor) else f"{g.dtype}, {g.layout}"
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(g.shape)} is {kind}; CollageAdamW takes dense torch.bfloat16: "
            "use dense embeddings, and formats.BF16 in a gradient synchroniser"
        )


def _initial(p: torch.Tensor, variant: Variant) -> dict[str, torch.Tensor]:
    state = {"step": torch.zeros((), device=p.device)}
    state |= {key: torch.zeros_like(p, dtype=variant.dtype) for key in ("exp_avg", "exp_avg_sq")}
    if variant.pair_v:
        state["exp_avg_sq_remainder"] = torch.zeros_like(p, dtype=variant.remainder)
    if variant.weight == "master":
        state["master"] = p.detach().float()
    elif variant.weight != "nothing":
        state["weight_remainder"] = torch.zeros_like(p, dtype=variant.remainder)
    return state


def _value(p: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The value of a weight, in FP64."""
    if "weight_remainder" in state:
        first, second = mcf.load_pair(p, state["weight_remainder"])
        return first.double() + second
    return state.get("master", p).double()
