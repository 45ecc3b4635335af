"""FP8 AdamW: AdamW whose master weights, gradients and moments each have a format of their own (FP8-LM section 2.2, Table 6)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from msamp.numerics.formats import by_name
from msamp.numerics.recipe import O2, StateFormats
from msamp.numerics.tensor import ScalingTensor, fp32_values
from msamp.optim.clip import check_max_norm, clip_coefficient, norms_from_square_sums, square_sum, tensor_amaxes, unit_scale
from msamp.optim.master import is_own_master, make_master, weight_format
from msamp.optim.state_fp8 import state_format
from msamp.optim.update import Hyper, adam_

# Elements updated at a time: each of the half dozen FP32 temporaries takes 128 MiB, or as much as the largest tensor.
CHUNK = 2**25
GRAD, M, V, MASTER = range(4)  # rows of the table of amaxes


@dataclass(eq=False)
class Piece:
    """What one process updates of a parameter: all of it, or (ZeRO) some of its rows.

    Attributes:
        param: the parameter.
        group: its parameter group.
        index: its number over all groups: the order in which norms are added.
        weight: what is updated in place, the parameter itself or a view of its rows; `optimizer.state` is keyed by it.
        rows: which rows along dim 0 that is; None for all.
        grad: in this step, in the group's gradient format.
    """

    param: torch.Tensor
    group: dict[str, Any]
    index: int
    weight: torch.Tensor
    rows: slice | None = None
    grad: torch.Tensor | None = None

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        """This piece of a state of the whole parameter: a copy of its rows, or `x` itself where the piece is everything."""
        if self.rows is None:
            return x
        if isinstance(x, ScalingTensor):
            return ScalingTensor(x.payload[self.rows].clone(), x.scale_inv.clone(), x.dtype)
        return x[self.rows].clone()


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
        combine_norms: FP64 [parameters], the gradient norms of this process's parameters -> the global norm, FP64 0-dim, the same
            on all processes that must decide alike, where a model is spread over several.

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
        combine_norms: Callable[[torch.Tensor], torch.Tensor] = torch.linalg.vector_norm,
    ) -> None:
        if clip_grad is not None:
            check_max_norm(clip_grad)
        self.clip_grad = clip_grad
        self.combine_norms = combine_norms
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
        own = {name: getattr(self, name) for name in ("clip_grad", "combine_norms", "grad_norm", "skipped_steps")}
        return {**super().__getstate__(), **own}

    def init_master(self, p: torch.Tensor, values: torch.Tensor) -> None:
        """Start the master of `p` from `values`: what `p` was before it was rounded to FP8. No effect where `p` is its own master."""
        if not any(q is p for group in self.param_groups for q in group["params"]):
            raise ValueError(f"a parameter of shape {tuple(p.shape)} is not in this optimizer; add its group first")
        for piece in self.pieces():
            if piece.param is p and not is_own_master(p, by_name(piece.group["formats"]["master"])):
                self._init_state(piece, values)

    def restart(self) -> None:
        """Start all masters and moments anew from the parameters as they are: after weights were loaded by themselves."""
        self.state.clear()

    def _init_state(self, piece: Piece, values: torch.Tensor | None = None) -> None:
        formats = piece.group["formats"]
        master = by_name(formats["master"])
        state = self.state[piece.weight]
        state["step"] = torch.zeros(())
        state["exp_avg"] = state_format(by_name(formats["m"])).init(piece.weight)
        state["exp_avg_sq"] = state_format(by_name(formats["v"])).init(piece.weight)
        if not is_own_master(piece.param, master):
            # From the whole parameter, so that its scale does not depend on how it is cut.
            state["master"] = piece.copy_of(make_master(piece.param, master, values))

    def pieces(self) -> list[Piece]:
        """What this process updates, in parameter order."""
        numbered = enumerate((group, p) for group in self.param_groups for p in group["params"])
        return [Piece(p, group, index, p) for index, (group, p) in numbered]

    def _ready(self) -> list[Piece]:
        """Those with a gradient in this step, which they carry in its format."""
        pieces = []
        for piece in self.pieces():
            g = gradient(piece.param)
            if g is None:
                continue
            if g.is_sparse:
                raise ValueError(f"the gradient of a parameter of shape {tuple(g.shape)} is sparse; use dense embeddings")
            fmt = by_name(piece.group["formats"]["grad"])
            if not isinstance(g, ScalingTensor):
                g = ScalingTensor.quantize(g, fmt) if fmt.scaled else g.to(fmt.dtype)
            piece.grad = g
            pieces.append(piece)
        return pieces

    def _combine_max(self, table: torch.Tensor) -> torch.Tensor:
        """FP32 [.., parameters] maxima of this process's pieces -> those of whole tensors."""
        return table

    def _combine_sum(self, table: torch.Tensor) -> torch.Tensor:
        """int64 [parameters, 2] sums over this process's pieces -> those over whole tensors."""
        return table

    def _batches(self, pieces: list[Piece], amaxes: torch.Tensor) -> Iterator[list[Piece]]:
        """The pieces in the order of their update, some at a time, each batch of one group; `amaxes` as in `_amaxes`."""
        for group in self.param_groups:
            yield from chunks([piece for piece in pieces if piece.group is group])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient, or none at all where a gradient is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pieces = self._ready()
        fresh = [piece for piece in pieces if not self.state.get(piece.weight)]
        for piece in fresh:
            self._init_state(piece)
        amaxes = self._combine_max(self._amaxes(pieces))
        self.grad_norm = self._norm(pieces, amaxes[GRAD])
        # A gradient whose square leaves FP32 would leave the second moment without a bound; clipping brings it back in range.
        usable = self.grad_norm.isfinite() if self.clip_grad is not None else self.grad_norm.float().square().isfinite()
        if not bool(usable):
            self.skipped_steps += 1
            for piece in fresh:  # a skipped step leaves no trace
                del self.state[piece.weight]
            return loss
        if self.clip_grad is None:
            coefficient = None
        else:
            coefficient = clip_coefficient(self.grad_norm, self.clip_grad)
            amaxes[GRAD] *= coefficient
        for batch in self._batches(pieces, amaxes):
            self._update(batch, amaxes[:, [piece.index for piece in batch]], coefficient)
        return loss

    def _amaxes(self, pieces: list[Piece]) -> torch.Tensor:
        """FP32 [4, parameters]: amax of gradient, m, v and master as stored; 0 where no scale will be taken from it."""
        params = [p for group in self.param_groups for p in group["params"]]
        table = torch.zeros(4 * len(params), device=params[0].device)
        places: list[int] = []
        tensors: list[torch.Tensor] = []
        for piece in pieces:
            state, formats = self.state[piece.weight], piece.group["formats"]
            scaled = {key: by_name(formats[key]).scaled for key in ("m", "v", "master")}
            assert piece.grad is not None
            needed = {GRAD: piece.grad}
            if scaled["m"]:
                needed[M] = state["exp_avg"]
            if scaled["v"]:
                needed[V] = state["exp_avg_sq"]
            if scaled["master"] or isinstance(piece.weight, ScalingTensor) or not piece.group["decoupled"]:
                needed[MASTER] = state.get("master", piece.weight)
            places += [row * len(params) + piece.index for row in needed]
            tensors += needed.values()
        if tensors:
            index = torch.tensor(places).to(table.device, non_blocking=True)
            table.scatter_reduce_(0, index, tensor_amaxes(tensors), "amax")
        return table.view(4, -1)

    def _norm(self, pieces: list[Piece], amax: torch.Tensor) -> torch.Tensor:
        """FP64 0-dim norm of all gradients, whichever process holds them."""
        params = [p for group in self.param_groups for p in group["params"]]
        scales = unit_scale(amax).unbind()
        sums: list[torch.Tensor] = [torch.zeros(2, dtype=torch.int64, device=amax.device)] * len(params)
        for piece in pieces:
            assert piece.grad is not None
            sums[piece.index] = sums[piece.index] + square_sum(piece.grad, scales[piece.index], piece.param.numel())
        totals = self._combine_sum(torch.stack(sums))
        return self.combine_norms(norms_from_square_sums(totals, amax, [p.numel() for p in params]))

    def _update(self, pieces: list[Piece], amaxes: torch.Tensor, coefficient: torch.Tensor | None) -> None:
        """Load, update, store for some pieces of one group.

        Args:
            amaxes: FP32 [4, pieces]: of the whole tensors that the pieces belong to, the gradient's after clipping.
        """
        group = pieces[0].group
        formats = {name: by_name(value) for name, value in group["formats"].items()}
        m_format, v_format, master_format = (state_format(formats[k]) for k in ("m", "v", "master"))
        states = [self.state[piece.weight] for piece in pieces]
        stored_m, stored_v = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        stored_master = [s.get("master", piece.weight) for s, piece in zip(states, pieces, strict=True)]
        gs = [fp32_values(piece.grad) for piece in pieces]  # type: ignore[arg-type]
        if coefficient is not None:
            gs = [g * coefficient for g in gs]
        ms, vs, ps = m_format.load(stored_m), v_format.load(stored_v), master_format.load(stored_master)
        g_amax, weight_decay = amaxes[GRAD], group["weight_decay"]
        if weight_decay and not group["decoupled"]:  # Adam's decay is part of the gradient, so the bounds must see it
            gs, weight_decay = list(torch._foreach_add(gs, ps, alpha=weight_decay)), 0.0
            g_amax = g_amax + group["weight_decay"] * amaxes[MASTER]
        for s in states:
            s["step"] += 1
        beta1, beta2 = group["betas"]
        m_bound = beta1 * amaxes[M] + (1 - beta1) * g_amax
        v_bound = beta2 * amaxes[V] + (1 - beta2) * g_amax.square()
        p_bound = 2.0 * amaxes[MASTER]
        hyper = Hyper(float(group["lr"]), beta1, beta2, group["eps"], weight_decay)
        adam_(ps, ms, vs, gs, [int(s["step"]) for s in states], hyper)
        m_format.store_(stored_m, ms, m_bound)
        v_format.store_(stored_v, vs, v_bound)
        master_format.store_(stored_master, ps, p_bound)
        # A weight beside a master comes from the master as it is stored: a cast of the unrounded update would let every weight
        # whose master sits midway between two FP8 codes (one BF16 value in 16) jump by a code with an update too small for the master.
        apart = [i for i, state in enumerate(states) if "master" in state]
        values = dict(zip(apart, master_format.load([stored_master[i] for i in apart]), strict=True))
        for fmt in {weight_format(pieces[i].weight) for i in apart}:
            alike = [i for i in apart if weight_format(pieces[i].weight) == fmt]
            state_format(fmt).store_([pieces[i].weight for i in alike], [values[i] for i in alike], p_bound[alike])

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
        for piece in self.pieces():
            saved = state_dict["state"].get(ids[piece.index])
            if saved is not None:
                states = {key: piece.copy_of(value).to(piece.weight.device) for key, value in saved.items() if key != "step"}
                self.state[piece.weight] = {"step": saved["step"].clone(), **states}


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `p`: `p.main_grad` where a synchroniser has put one (Megatron's name), else `p.grad`."""
    main_grad = getattr(p, "main_grad", None)
    return p.grad if main_grad is None else main_grad


def chunks(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces with at most CHUNK elements together (or one larger piece)."""
    chunk: list[Piece] = []
    elements = 0
    for piece in pieces:
        if chunk and elements + piece.weight.numel() > CHUNK:
            yield chunk
            chunk, elements = [], 0
        chunk.append(piece)
        elements += piece.weight.numel()
    if chunk:
        yield chunk
