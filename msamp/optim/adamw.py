"""FP8 AdamW: AdamW whose master weights, gradients and moments each have a format of their own (FP8-LM section 2.2, Table 6)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from msamp.kernels import ops
from msamp.kernels.reference.adamw import GRAD, MASTER, Batch, stored_amaxes
from msamp.kernels.reference.adamw import adamw as reference_adamw
from msamp.kernels.reference.coat_adamw import coat_adamw as reference_coat_adamw
from msamp.kernels.reference.collage import collage as reference_collage
from msamp.kernels.tables import Tables
from msamp.numerics.formats import FP32, by_name
from msamp.numerics.range_expand import Expanded
from msamp.numerics.recipe import O2, REMAINDERS, StateFormats
from msamp.numerics.tensor import ScalingTensor
from msamp.optim.clip import (
    check_max_norm,
    clip_coefficient,
    contiguous,
    first_pass,
    norms_from_square_sums,
    scaled_first,
    second_pass,
    units,
)
from msamp.optim.device_flag import DeviceFlag
from msamp.optim.master import is_own_master, make_master
from msamp.optim.saved_states import saved_states
from msamp.optim.state_coat import as_stored
from msamp.optim.state_fp8 import state_format

SCALE_INV = MASTER + 1  # row of the table of amaxes: the gradient's scale_inv


class LossScale(Protocol):
    """What multiplied the loss, and with it every gradient (`msamp.amp.scaler.LossScaler` is one)."""

    def scale(self, device: torch.device) -> torch.Tensor:
        """FP32 0-dim on `device`; where a CUDA graph holds the step, always in the same memory."""

    def update(self, overflow: torch.Tensor) -> None:
        """Look at a step: bool 0-dim on the device, whether its gradients were not finite."""


@dataclass(eq=False)
class Piece:
    """What one process updates of a parameter: all of it, or (ZeRO) some of its rows.

    Attributes:
        param: the parameter.
        group: its parameter group.
        index: its number over all groups: the order in which norms are added.
        weight: what is updated in place, the parameter itself or a view of its rows; `optimizer.state` is keyed by it.
        rows: which rows along dim 0 that is; None for all.
        place: its number over all pieces of this process.
        grad: in this step, in the group's gradient format.
    """

    param: torch.Tensor
    group: dict[str, Any]
    index: int
    weight: torch.Tensor
    rows: slice | None = None
    place: int = 0
    grad: torch.Tensor | None = None

    def copy_of(self, x: torch.Tensor) -> torch.Tensor:
        """This piece of a state of the whole parameter: a copy of its rows, or `x` itself where the piece is everything."""
        if self.rows is None:
            return x
        if isinstance(x, ScalingTensor):
            return ScalingTensor(x.payload[self.rows].clone(), x.scale_inv.clone(), x.dtype)
        return x[self.rows].clone()


def format_names(formats: StateFormats) -> dict[str, str]:
    """The formats and the update as plain strings: what stands in `param_groups[i]["formats"]` and in checkpoints."""
    return {f.name: str(getattr(formats, f.name)) for f in fields(formats)}


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ValueError(f"{name} is {value}; it must be in [{low}, {high})")


class FP8AdamW(torch.optim.Optimizer):
    """AdamW with states in low precision; with FP32 formats, torch.optim.AdamW bit for bit.

    A gradient is `p.main_grad` where a synchroniser has put one (in any format), else `p.grad`.

    Each step loads to FP32, updates in FP32 from the unquantised new moments and stores. Scales come from bounds that
    hold before the values are known: m from beta1 amax_m + (1 - beta1) amax_g, v likewise with squares, master and
    weight from twice the master's amax. COAT's moments (`formats.COAT_E4M3`, `COAT_E5M2`) are stored with the maximum and the range of
    each group as they are. A weight with a master beside it is cast from the master as stored. A step whose
    gradients are not all finite is skipped, counted in `skipped_steps`, and does not advance the bias correction.

    State of a parameter: `step` (FP32, on the parameter's device), `exp_avg`, `exp_avg_sq`, of COAT's moments also
    their `_max` and `_k`, and `master` where the parameter is not itself stored in the master's format. Where
    `formats.update` is one of Collage's, the update is that of `kernels.reference.collage`, all in BF16, and
    `weight_remainder` and `exp_avg_sq_remainder` hold the second components.

    On a GPU with Triton a step is a few launches over all tensors, one a combination of formats, which read and write
    each element once and take the amaxes that the next step's bounds need; elsewhere, and for weights that are not
    contiguous, the reference twin (one host sync, FP32 temporaries). No step but the first waits for the host, and a
    CUDA graph may hold one: gradients must keep their memory, `refresh` goes before a replay, and after `load_state_dict`,
    `restart` or weights loaded by themselves it must be captured anew.

    A plain FP16 parameter has an FP32 master beside it, and wants a loss scale, which is divided out of its gradients together
    with the clipping; norms and amaxes are those of the unscaled gradients.

    Args:
        params: parameters or groups. A group may carry its own `formats` (StateFormats) and `decoupled`.
        lr, betas, eps, weight_decay: as torch.optim.AdamW.
        formats: master, gradient, m and v. A plain gradient is quantised to its format just-in-time in `step`.
        decoupled: False takes Adam's L2 decay in the gradient.
        clip_grad: clip the global gradient norm to this; None does not clip.
        combine_norms: FP64 [parameters], the gradient norms of this process's parameters -> the global norm, FP64 0-dim, the same
            on all processes that must decide alike, where a model is spread over several.
        loss_scale: by what the gradients are too large; told of every step whether it overflowed. None: they are as they should be.
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
        loss_scale: LossScale | None = None,
    ) -> None:
        if clip_grad is not None:
            check_max_norm(clip_grad)
        self.clip_grad = clip_grad
        self.combine_norms = combine_norms
        self.loss_scale = loss_scale
        self._norm = torch.zeros((), dtype=torch.float64)
        self._skips = torch.zeros((), dtype=torch.int64)
        self._usable = torch.ones((), dtype=torch.bool)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled, "formats": formats}
        super().__init__(params, defaults)
        self._forget()

    def _forget(self) -> None:
        """Drop what is only remembered: tables on the device, amaxes as stored."""
        self._tables: Tables | None = None
        self._kept = torch.zeros(0)
        self._grad_amaxes = torch.zeros(0)
        self._seen: dict[torch.Tensor, tuple[tuple[int, int], ...]] = {}

    @property
    def grad_norm(self) -> torch.Tensor:
        """FP64 0-dim norm of the last step's (quantised) gradients, before clipping."""
        return self._norm.clone()

    @property
    def grad_amaxes(self) -> torch.Tensor:
        """FP32 [parameters, group by group]: largest magnitudes of the last step's gradients, not finite where one is not; 0 without
        one. The next step writes in the same memory."""
        return self._grad_amaxes

    @property
    def skipped_steps(self) -> int:
        """Steps skipped so far; reading it waits for the device."""
        return int(self._skips)

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self._skips.fill_(count)

    def skipped(self) -> bool | DeviceFlag:
        """Whether the last step was skipped: on a GPU as a flag on its way, which makes nobody wait who asks a little later."""
        return DeviceFlag(~self._usable) if self._usable.is_cuda else not bool(self._usable)

    def refresh(self) -> None:
        """Send learning rates and weight decays that have changed to the device: before a replay of a CUDA graph that holds a step."""
        for number in range(len(self.param_groups)):
            self._hyper(number)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch; refuses hyper-parameters out of range, naming value and range."""
        group = {**self.defaults, **param_group}
        _check("lr", float(group["lr"]), 0.0, float("inf"))
        _check("eps", group["eps"], 0.0, float("inf"))
        _check("weight_decay", group["weight_decay"], 0.0, float("inf"))
        for i, beta in enumerate(group["betas"]):
            _check(f"betas[{i}]", beta, 0.0, 1.0)
        formats = group["formats"] if isinstance(group["formats"], dict) else format_names(group["formats"])
        update, master = formats["update"], formats["master"]
        if update != "fp32" and not group["decoupled"]:
            raise ValueError(f"decoupled is False; update {update!r} has AdamW's decay alone: leave it True, or take update fp32")
        params = group["params"]
        if not isinstance(params, torch.Tensor | set):  # a set is torch's to refuse: its order is not sure
            param_group["params"] = params = list(params)
        for p in [params] if isinstance(params, torch.Tensor) else params:
            dtype = p[1].dtype if isinstance(p, tuple) else p.dtype
            if dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"a parameter is {dtype}; the optimizer takes torch.float32, torch.bfloat16, torch.float16 and ScalingTensors: "
                    "convert the model"
                )
            if dtype == torch.float16 and master != FP32.name:
                raise ValueError(
                    f"a parameter is torch.float16 and its master {master}; FP16 without a scale takes an fp32 master (recipe fp16-amp): "
                    "give these formats, or convert the model"
                )
            if update != "fp32" and (isinstance(p, ScalingTensor) or dtype is not torch.bfloat16):
                kind = "a ScalingTensor" if isinstance(p, ScalingTensor) else dtype
                raise ValueError(f"a parameter is {kind}; update {update!r} takes plain torch.bfloat16: give model.bfloat16() as it is")
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if isinstance(added["formats"], StateFormats):
            added["formats"] = format_names(added["formats"])

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("clip_grad", "combine_norms", "loss_scale", "_norm", "_skips", "_usable")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

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
        self._seen = {}

    def _init_state(self, piece: Piece, values: torch.Tensor | None = None) -> None:
        formats = piece.group["formats"]
        master = by_name(formats["master"])
        state = self.state[piece.weight]
        state["step"] = torch.zeros((), device=piece.weight.device)
        for key, moment in (("exp_avg", "m"), ("exp_avg_sq", "v")):
            how = state_format(by_name(formats[moment]))
            state[key] = how.init(piece.weight)
            state.update({key + name: x for name, x in how.beside(piece.weight).items()})
        if not is_own_master(piece.param, master):
            # From the whole parameter, so that its scale does not depend on how it is cut.
            state["master"] = piece.copy_of(make_master(piece.param, master, values))
        for key, fmt in REMAINDERS[formats["update"]].items():
            state[key] = state_format(fmt).init(piece.weight)

    def pieces(self) -> list[Piece]:
        """What this process updates, in parameter order."""
        numbered = enumerate((group, p) for group in self.param_groups for p in group["params"])
        return [Piece(p, group, index, p, place=index) for index, (group, p) in numbered]

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
            piece.grad = contiguous(g)
            pieces.append(piece)
        return pieces

    def _combine_max(self, table: torch.Tensor) -> torch.Tensor:
        """FP32 [.., parameters] maxima of this process's pieces -> those of whole tensors."""
        return table

    def _combine_sum(self, table: torch.Tensor) -> torch.Tensor:
        """int64 [parameters, 2] sums over this process's pieces -> those over whole tensors."""
        return table

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
        table, norm, coefficient, usable = self._decide(pieces)
        # Always in the same memory: a graph writes there, whichever of several is replayed.
        self._norm = self._norm.to(norm.device).copy_(norm)
        self._usable = self._usable.to(norm.device).copy_(usable)
        self._skips = self._skips.to(norm.device).add_(~usable)
        if self._grad_amaxes.shape != table[GRAD].shape or self._grad_amaxes.device != table.device:
            self._grad_amaxes = torch.zeros_like(table[GRAD])
        self._grad_amaxes.copy_(table[GRAD])
        if self.loss_scale is not None:
            self._grad_amaxes.div_(self.loss_scale.scale(table.device))
            self.loss_scale.update(~usable)
        # On a GPU the kernels look at the flag, and under ZeRO every rank must come to the gathering, whatever it has to update.
        if usable.is_cuda or usable:
            self._update(pieces, table, coefficient)
            self._written(pieces)
        if fresh and not usable:
            for piece in fresh:  # a skipped step leaves no trace
                del self.state[piece.weight]
        return loss

    def _decide(self, pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """(the amaxes that `_measure` gives, the gradients' norm, what multiplies them, whether the step can be taken)."""
        table, sums = self._measure(pieces)
        norm, coefficient = self._combined_norm(pieces, table, sums), None
        if self.loss_scale is not None:
            coefficient = self.loss_scale.scale(norm.device).reciprocal()
            norm = norm * coefficient
        if self.clip_grad is not None:
            clip = clip_coefficient(norm, self.clip_grad)
            coefficient = clip if coefficient is None else clip * coefficient
        # A gradient whose square leaves FP32 would leave the second moment without a bound; clipping brings it back in range.
        usable = norm.isfinite() if self.clip_grad is not None else norm.float().square().isfinite()
        return table, norm, coefficient, usable

    def replayed(self) -> None:
        """After a replay of a CUDA graph that holds a step: what `step` does on the host once the device has been told."""
        self._written([piece for piece in self.pieces() if self.state.get(piece.weight)])

    def _written(self, pieces: Sequence[Piece]) -> None:
        """Kernels write behind torch's back: whoever asks for the version of a weight (its FP8 scale is kept by it) must see a new one."""
        torch.autograd.graph.increment_version([p.payload if isinstance(p, ScalingTensor) else p for p in self._params()])
        self._seen |= {piece.weight: self._signature(piece) for piece in pieces}

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _table(self) -> Tables:
        device = self.param_groups[0]["params"][0].device
        if self._tables is None or self._tables.device != device:
            self._tables = Tables(device)
        return self._tables

    def _hyper(self, number: int) -> torch.Tensor:
        """FP64 [7] on the device: a group's `Hyper`, and the logarithms of its betas."""
        group = self.param_groups[number]
        logarithms = [math.log(beta) if beta else -math.inf for beta in group["betas"]]
        numbers = [float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"], *logarithms]
        return self._table().send(("hyper", number), numbers, torch.float64)

    def _signature(self, piece: Piece) -> tuple[tuple[int, int], ...]:
        """Changes when somebody else changes a tensor whose amax is kept."""
        state = self.state[piece.weight]
        held = (piece.param, state["exp_avg"], state["exp_avg_sq"], state.get("master", piece.param))
        return tuple((id(x), x._version) for x in held)

    def _measure(self, pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the bounds and the norm need before anything is updated.

        Returns:
            FP32 [5, parameters]: amax of gradient, m, v and master as stored, 0 where no scale will be taken from it, and the
            gradient's scale_inv, 0 for a plain one; of whole tensors.
            int64 [parameters, 2]: sums of squares of this process's scaled gradients.
        """
        tables, count = self._table(), len(self._params())
        gs, (scaled, plain) = self._sorted_gradients(pieces)
        ordered = [pieces[i] for i in scaled + plain]
        size = 1 + max((piece.place for piece in pieces), default=-1)
        if self._kept.shape[-1] < size or self._kept.device != tables.device:
            self._kept, self._seen = torch.zeros(3, size, device=tables.device), {}
        stale = [piece for piece in ordered if self._seen.get(piece.weight) != self._signature(piece)]
        for number, batch, _ in self._batches(stale):
            self._kept[:, batch.places] = stored_amaxes(batch, decoupled=self.param_groups[number]["decoupled"])
        table = torch.zeros(5, count, device=tables.device)
        sums = torch.zeros(count, 2, dtype=torch.int64, device=tables.device)
        if pieces:
            stats, found = first_pass(tables, gs[: len(scaled)], gs[len(scaled) :])
            index = tables.send("indices", [piece.index for piece in ordered])
            kept = self._kept.index_select(1, tables.send("places", [piece.place for piece in ordered]))
            table.scatter_reduce_(1, index.expand(5, -1), torch.cat([stats[:1], kept, stats[1:]]), "amax")
            sums.index_add_(0, index[: len(scaled)], found)
        return self._combine_max(table), sums

    @staticmethod
    def _sorted_gradients(pieces: list[Piece]) -> tuple[list[torch.Tensor], tuple[list[int], list[int]]]:
        """The gradients, scaled ones first; the places in `pieces` of the scaled and of the plain ones."""
        gs = [piece.grad for piece in pieces if piece.grad is not None]
        scaled, plain = scaled_first(gs)
        return [gs[i] for i in scaled + plain], (scaled, plain)

    def _combined_norm(self, pieces: list[Piece], table: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """FP64 0-dim norm of all gradients, whichever process holds them."""
        tables = self._table()
        gs, (scaled, plain) = self._sorted_gradients(pieces)
        if plain:
            index = tables.send("indices of plain", [pieces[i].index for i in plain])
            numels = [pieces[i].param.numel() for i in plain]
            sums.index_add_(0, index, second_pass(tables, gs[len(scaled) :], table[GRAD, index], numels))
        plain_units = tables.send("units", [float(units(p.numel())) for p in self._params()], torch.float64)
        return self.combine_norms(norms_from_square_sums(self._combine_sum(sums), table[GRAD], table[SCALE_INV], plain_units))

    def _update(self, pieces: list[Piece], amaxes: torch.Tensor, coefficient: torch.Tensor | None) -> None:
        """Load, update, store; `amaxes` as from `_measure`."""
        for number, batch, even in self._batches(pieces):
            group, hyper = self.param_groups[number], self._hyper(number)
            update = group["formats"]["update"]
            if update != "fp32":
                collage = ops.collage if even else reference_collage
                collage(self._table(), batch, hyper, update, coefficient, self._usable)
                continue
            coat = any(isinstance(states[0], Expanded) for states in (batch.ms, batch.vs))
            kernel, twin = (ops.coat_adamw, reference_coat_adamw) if coat else (ops.adamw, reference_adamw)
            (kernel if even else twin)(
                self._table(), batch, hyper, amaxes, self._kept, coefficient, self._usable, decoupled=group["decoupled"]
            )

    def _batches(self, pieces: Sequence[Piece]) -> Iterator[tuple[int, Batch, bool]]:
        """What one launch updates: pieces of one group whose tensors have the same formats; the group's number; whether all are
        laid out by rows."""
        numbers = {id(group): number for number, group in enumerate(self.param_groups)}
        alike: dict[tuple[Any, ...], list[Piece]] = {}
        for piece in pieces:
            own = "master" not in self.state[piece.weight]
            kind = (numbers[id(piece.group)], piece.weight.is_contiguous(), _dtype(piece.grad), None if own else _dtype(piece.weight))
            alike.setdefault(kind, []).append(piece)
        for (number, even, _, own_format), members in alike.items():
            states = [self.state[piece.weight] for piece in members]
            weights = [piece.weight for piece in members]
            batch = Batch(
                grads=[piece.grad for piece in members if piece.grad is not None],
                ms=[as_stored(state, "exp_avg") for state in states],
                vs=[as_stored(state, "exp_avg_sq") for state in states],
                masters=weights if own_format is None else [state["master"] for state in states],
                weights=[] if own_format is None else weights,
                steps=[state["step"] for state in states],
                indices=[piece.index for piece in members],
                places=[piece.place for piece in members],
                weight_remainders=[state["weight_remainder"] for state in states if "weight_remainder" in state],
                v_remainders=[state["exp_avg_sq_remainder"] for state in states if "exp_avg_sq_remainder" in state],
            )
            yield number, batch, even

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in the precision in which they were saved (torch's own would cast them to the parameter's dtype).

        Raises:
            ValueError: where the saved formats are not this optimizer's, naming both; nothing has changed then.
        """
        states = saved_states(self, state_dict, "formats")
        self.take_states(
            {
                piece.place: {key: value if key == "step" else piece.copy_of(value) for key, value in states[piece.index].items()}
                for piece in self.pieces()
                if piece.index in states
            }
        )

    def take_states(self, states: Mapping[int, Mapping[str, torch.Tensor]]) -> None:
        """Replace all states by those of this process's pieces, by their `place`, in this optimizer's formats and on any device; a piece
        of which only some are given starts the others anew."""
        self.restart()
        for piece in self.pieces():
            given, device = states.get(piece.place, {}), piece.weight.device
            if given and "step" not in given:
                self._init_state(piece)
            for key, value in given.items():
                self.state[piece.weight][key] = value.to(device, torch.float32, copy=True) if key == "step" else value.to(device)


def gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of `p`: `p.main_grad` where a synchroniser has put one (Megatron's name), else `p.grad`."""
    main_grad = getattr(p, "main_grad", None)
    return p.grad if main_grad is None else main_grad


def _dtype(x: torch.Tensor | None) -> tuple[torch.dtype, bool]:
    """In what a tensor is stored, and whether with a scale."""
    assert x is not None
    return (x.payload.dtype, True) if isinstance(x, ScalingTensor) else (x.dtype, False)
