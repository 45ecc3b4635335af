"""FP8 AdamW: AdamW whose master weights, gradients and moments each have a format of their own (FP8-LM section 2.2, Table 6)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch

from msamp.numerics.formats import by_name
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.clip import check_max_norm, clip_coefficient, grad_norm
from msamp.optim.master import is_own_master, make_master, weight_format
from msamp.optim.state_fp8 import state_format
from msamp.optim.update import Hyper, adam_

# Elements updated at a time: each of the half dozen FP32 temporaries takes 128 MiB, or as much as the largest tensor.
CHUNK = 2**25


def format_names(formats: StateFormats) -> dict[str, str]:
    """The formats as plain strings: what stands in `param_groups[i]["formats"]` and in checkpoints."""
    return {f.name: getattr(formats, f.name).name for f in fields(formats)}


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high})")


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with states in low precision; with FP32 formats, torch.optim.AdamW bit for bit.

    A gradient is `p.main_grad` where a synchroniser has put one (in any format), else `p.grad`.

    Each step loads to FP32, updates in FP32 from the unquantised new moments and stores. Scales come from bounds that
    hold before the values are known: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares, master and
    weight from twice the master's amax. A weight with a master beside it is cast from the master as stored. A step whose
    gradients are not all finite is skipped, counted in `skipped_steps`, and does not advance the bias correction.

    State of a parameter: `step` (FP32, on the CPU as in torch), `exp_avg`, `exp_avg_sq`, and `master` where the
    parameter is not itself stored in the master's format. This is the reference path: one host sync a step (is the norm
    finite?) and FP32 temporaries of `CHUNK` elements.

    Args:
        params: parameters or groups. A group may carry its own `formats` (StateFormats) and `decoupled`.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        formats: master, gradient, m and v. A plain gradient is quantised to its format just-in-time in `step`.
        decoupled: False takes Adam's L2 decay in the gradient.
        clip_grad: clip the global gradient norm to this; None does not clip.

    Attributes:
        grad_norm: FP64 0-dim norm of the last step's (quantised) gradients, before clipping.
        skipped_steps: steps skipped so far.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        formats: StateFormats = O2.states,
        decoupled: bool = True,
        clip_grad: float | None = None,
    ) -> None:
        if clip_grad is not None:
            check_max_norm(clip_grad)
        self.clip_grad = clip_grad
        self.grad_norm = torch.zeros((), dtype=torch.float64)
        self.skipped_steps = 0
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled, "formats": formats}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; refuses hyper-parameters out of range, naming value and range."""
        group = {**self.defaults, **param_group}
        _check("lr", float(group["lr"]), 0.0, float("inf"))
        _check("eps", group["eps"], 0.0, float("inf"))
        _check("weight_decay", group["weight_decay"], 0.0, float("inf"))
        for i, beta in enumerate(group["betas"]):
            _check(f"betas[{i}]", beta, 0.0, 1.0)
        params = group["params"]
        if not isinstance(params, torch.Tensor | set):  # a set is torch's to refuse: its order is not sure
            param_group["params"] = params = list(params)
        for p in [params] if isinstance(params, torch.Tensor) else params:
            dtype = p[1].dtype if isinstance(p, tuple) else p.dtype
            if dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(
                    f"a parameter is {dtype}; the optimizer takes torch.float32, torch.bfloat16 and ScalingTensors: convert the model"
                )
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if isinstance(added["formats"], StateFormats):
            added["formats"] = format_names(added["formats"])

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("clip_grad", "grad_norm", "skipped_steps")}
        return {**super().__getstate__(), **own}

    def init_master(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Start the master of `p` from `values`: what `p` was before it was rounded to FP8. No effect where `p` is its own master."""
        for group in self.param_groups:
            if any(q is p for q in group["params"]):
                if not is_own_master(p, by_name(group["formats"]["master"])):
                    self._init_state(p, group["formats"], values)
                return
        raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer; add its group first")

    def restart(self) -> None:
        """Start all masters and moments anew from the parameters as they are: after weights were loaded by themselves."""
        self.state.clear()

    def _init_state(self, p: torch.Tensor, formats: dict[str, str], values: torch.Tensor | None = None) -> None:
        master = by_name(formats["master"])
        state = self.state[p]
        state["step"] = torch.zeros(())
        state["exp_avg"] = state_format(by_name(formats["m"])).init(p)
        state["exp_avg_sq"] = state_format(by_name(formats["v"])).init(p)
        if not is_own_master(p, master):
            state["master"] = make_master(p, master, values)

    def _gradients(self) -> list[torch.Tensor]:
        """Every group's gradients in parameter order, quantised to the group's gradient format."""
        gradients: list[torch.Tensor] = []
        for group in self.param_groups:
            fmt = by_name(group["formats"]["grad"])
            for p in group["params"]:
                g = gradient(p)
                if g is None:
                    continue
                if g.is_sparse:
                    raise ValueError(f"the gradient of a parameter of shape {tuple(p.shape)} is sparse; use dense embeddings")
                if isinstance(g, ScalingTensor):
                    gradients.append(g)
                else:
                    gradients.append(ScalingTensor.quantize(g, fmt) if fmt.scaled else g.to(fmt.dtype))
        return gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, or none at all where a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        self.grad_norm = grad_norm(gradients)
        # A gradient whose square leaves FP32 would leave the second moment without a bound; clipping brings it back in range.
        usable = self.grad_norm.isfinite() if self.clip_grad is not None else self.grad_norm.float().square().isfinite()
        if not bool(usable):
            self.skipped_steps += 1
            return loss
        coefficient = None if self.clip_grad is None else clip_coefficient(self.grad_norm, self.clip_grad)
        remaining = iter(gradients)
        for group in self.param_groups:
            pairs = [(p, next(remaining)) for p in group["params"] if gradient(p) is not None]
            for p, _ in pairs:
                if not self.state[p]:
                    self._init_state(p, group["formats"])
            for chunk in _chunks(pairs):
                self._update(chunk, group, coefficient)
        return loss

    def _update(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], group: dict[str, Any], coefficient: torch.Tensor | None) -> None:
        """Load, update, store for some parameters of one group."""
        formats = {name: by_name(value) for name, value in group["formats"].items()}
        m_format, v_format, master_format = (state_format(formats[k]) for k in ("m", "v", "master"))
        states = [self.state[p] for p, _ in pairs]
        stored_m, stored_v = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        stored_master = [s.get("master", p) for s, (p, _) in zip(states, pairs, strict=True)]
        gs = [fp32_values(g) for _, g in pairs]
        if coefficient is not None:
            gs = [g * coefficient for g in gs]
        ms, vs, ps = m_format.load(stored_m), v_format.load(stored_v), master_format.load(stored_master)
        weight_decay = group["weight_decay"]
        if weight_decay and not group["decoupled"]:  # Adam's decay is part of the gradient, so the bounds must see it
            gs, weight_decay = list(torch._foreach_add(gs, ps, alpha=weight_decay)), 0.0
        for s in states:
            s["step"] += 1
        beta1, beta2 = group["betas"]
        m_bound = v_bound = p_bound = None
        if formats["m"].scaled or formats["v"].scaled:
            g_amax = _amaxes(gs)
            m_bound = beta1 * _amaxes(ms) + (1 - beta1) * g_amax
            v_bound = beta2 * _amaxes(vs) + (1 - beta2) * g_amax.square()
        if formats["master"].scaled or any(isinstance(p, ScalingTensor) for p, _ in pairs):
            p_bound = 2.0 * _amaxes(ps)
        hyper = Hyper(float(group["lr"]), beta1, beta2, group["eps"], weight_decay)
        adam_(ps, ms, vs, gs, [int(s["step"]) for s in states], hyper)
        m_format.store_(stored_m, ms, m_bound)
        v_format.store_(stored_v, vs, v_bound)
        master_format.store_(stored_master, ps, p_bound)
        for i, (p, _) in enumerate(pairs):
            if "master" in states[i]:
                # From the master as it is stored: a cast of the unrounded update would let every weight whose master sits
                # midway between two FP8 codes (one BF16 value in 16) jump by a code with an update too small for the master.
                bound = p_bound[i : i + 1] if p_bound is not None else None
                state_format(weight_format(p)).store_([p], master_format.load([stored_master[i]]), bound)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the precision in which they were saved (torch's own would cast them to the parameter's dtype).

        Raises:
            ValueError: where the saved formats are not this optimizer's, naming both; nothing has changed then.
        """
        for i, (saved, group) in enumerate(zip(state_dict["param_groups"], self.param_groups, strict=False)):
            if saved.get("formats") != group["formats"]:
                raise ValueError(
                    f"parameter group {i} was saved with formats {saved.get('formats')}, this optimizer has {group['formats']}; "
                    "build it with the saved formats, or start from the weights alone"
                )
        super().load_state_dict({**state_dict, "state": {}})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            if i in state_dict["state"]:
                self.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in state_dict["state"][i].items()}


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `p`: `p.main_grad` where a synchroniser has put one (Megatron's name), else `p.grad`."""
    main_grad = getattr(p, "main_grad", None)
    return p.grad if main_grad is None else main_grad


def _amaxes(xs: list[torch.Tensor]) -> torch.Tensor:
    """FP32 [len(xs)] amax of FP32 tensors."""
    filled = [x if x.numel() else x.new_zeros(1) for x in xs]  # an empty tensor has no infinity norm
    return torch.stack(torch._foreach_norm(filled, float("inf")))


def _chunks(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Runs of parameters with at most CHUNK elements together (or one larger tensor)."""
    chunk: list[tuple[torch.Tensor, torch.Tensor]] = []
    elements = 0
    for pair in pairs:
        if chunk and elements + pair[0].numel() > CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(pair)
        elements += pair[0].numel()
    if chunk:
        yield chunk
