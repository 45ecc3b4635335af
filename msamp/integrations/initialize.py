"""`msamp.initialize`: use a precision recipe in your own PyTorch loop with one call.

In a user's loop, the fields of a recipe mean:

- `gemm`: if it has FP8 GEMMs, linear layers become FP8Linear, and experts grouped FP8 products. Their weight is stored in `weight`, with a
  separate master if the master has another format.
- `formats_of` returns the formats of converted weights, of other matrices, and of norms and biases, as in the trainer. A plain FP32
  parameter is its own master.
- A parameter's gradient has the gradient format of its states; on several processes the average is sent in that format.
- `scales_loss`: such a recipe also requires control of the backward, and is for `msamp.amp`.
- `activations`: has no effect, since the model's own norms and activations save what they always saved.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from msamp.integrations import ms_amp, takeover
from msamp.integrations.checks import NoDistributedDataParallel, checked, data_parallel_group
from msamp.integrations.loop_optimizer import LoopOptimizer, parameter_formats
from msamp.integrations.saving import save_plain
from msamp.nn.convert import carry_out
from msamp.nn.decoder_layer import fuse as fuse_layers
from msamp.nn.decoder_layer import unfuse
from msamp.nn.filters import DEFAULT, Filter, behind_swiglu
from msamp.nn.layer_gains import check_min_gain
from msamp.nn.scaling_state import ScalingState
from msamp.nn.survey import survey
from msamp.numerics.formats import Format
from msamp.numerics.recipe import Recipe
from msamp.optim import updates
from msamp.optim.clip import check_max_norm
from msamp.parallel.data_parallel import grad_sync
from msamp.parallel.greedy_zero import ZeRO

_LOG = logging.getLogger("msamp")


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    recipe: str | Recipe | None = None,
    *,
    opt_level: str | None = None,
    fp8_recipe: str | None = None,
    accept: Filter = DEFAULT,
    group: dist.ProcessGroup | None = None,
    zero: bool | None = None,
    clip_grad: float | None = None,
    master_rounding: str | None = None,
    moment_rounding: str | None = None,
    grad_format: str | None = None,
    smooth_swiglu: bool = False,
    fuse: bool = True,
    fp8_min_gain: float = 1.0,
    seed: int = 0,
) -> tuple[nn.Module, LoopOptimizer]:
    """Convert a model and its optimizer to a precision recipe (FP8-LM, levels of section 3; Collage, Table 2; COAT).

    | recipe | linear layers | gradients | master, m, v | model dtype |
    | --- | --- | --- | --- | --- |
    | "O1" | FP8, weight FP16 scaled | E4M3 | the weight, FP32, FP32 | FP32, BF16 |
    | "O2" | FP8, weight FP16 scaled | E4M3 | the weight, E4M3, FP16 scaled | FP32, BF16 |
    | "O3" | FP8, weight E4M3 | E4M3 | FP16 scaled, E4M3, FP16 scaled | FP32, BF16 |
    | "coat" | FP8, weight E4M3 | BF16 | FP32, COAT's E4M3 for both | FP32, BF16 |
    | "collage-light", "collage-plus", "collage-fp8", "bf16-a", "bf16-kahan", "bf16-dmw", "bf16-d" | unchanged | BF16 | Collage's | BF16 |
    | "bf16" (also "O0") | unchanged | FP32 | FP32 | FP32, BF16 |
    | "fp32" | unchanged | FP32 | FP32 | FP32 |

    In a recipe with FP8 layers, the linear layers that `accept` admits become FP8, and the table's columns for gradients, master, m and v
    describe their weights. A gradient is quantized once, after all micro-batches of the step have accumulated; run the backward of every
    micro-batch but the last under `optimizer.no_sync()`. Other matrices, such as embeddings and kernels of convolutions, keep their dtype
    and have BF16 gradients and the same moments. In FP32 they are their own masters; in BF16 they have a separate master in the table's
    format. Norms and biases have FP32 gradients and states. Masters from BF16 weights differ from them by less than half a step of BF16,
    with the same FP8 codes (`off_ties` in `msamp.numerics.stochastic_rounding`). No module is replaced; with `fuse`, layers, norms and
    GELUs of transformers become objects of a subclass of their class, and its loss becomes `causal_lm_loss`. Build the model with
    `msamp.LayerNorm`, `msamp.RMSNorm` and `msamp.Activation` to save their inputs in FP8 groups.

    On one process, a recipe with FP8 gradients casts them during backward: `p.grad` has the parameter's dtype and stores one byte per
    element and a scale (`msamp.numerics.fp8_gradient`). A second backward before `zero_grad`, or any write other than clipping, widens it
    to the parameter's dtype. Under `optimizer.no_sync()` nothing is cast.

    On several processes, the optimizer replaces DistributedDataParallel, which does not support FP8 weights. All processes start from the
    weights and buffers of the group's first rank, send gradients during backward, and `step` uses the average over the ranks. `p.grad` is
    that average for code that uses it between backward and step (`msamp.comm.visible_gradients`), and None afterwards.

    Experts (`msamp.Experts`, and those of transformers' Mixtral, OLMoE and Qwen3-MoE) become FP8 too. Each expert's matrix is then a
    separate parameter (`msamp.nn.expert_matrices`), and the optimizer's groups, names and states are divided accordingly.

    A model that was already initialized keeps its layers. The new optimizer takes the masters of the former one, whose `step` then raises.
    A recipe that stores or casts weights differently is rejected.

    The returned optimizer shares the given optimizer's groups, so a scheduler of either sets its learning rates; the given one's `step`
    raises. The logger `msamp` logs what is in FP8, and what is not and why (`msamp.survey`), and warns if less than half is in FP8. The
    `state_dict` of a model with `save_pretrained` is plain from now on (`msamp.save_plain`).

    Args:
        model: any module tree, changed in place.
        optimizer: torch.optim.AdamW, Adam, SGD or Muon over parameters of `model`, or a list of them, such as Muon
            for matrices and AdamW for the rest, which become one optimizer; None is AdamW with its defaults over all parameters. The
            momentum of SGD and Muon has the recipe's format of m. Collage's recipes and "coat" only support AdamW and Adam.
        recipe: a name in the table or from `msamp.recipes.register`, or a Recipe, such as `msamp.recipes.as_published("fp8-lm")` with its
            paper's arithmetic; None is O2. "fp16-amp" is for `msamp.amp.initialize`.
        opt_level: the same by its short name: "O0" to "O3", or another name of a recipe.
        fp8_recipe: how FP8 GEMMs cast their operands, instead of the recipe's casts: a key of `msamp.recipes.GEMMS`, "delayed",
            "tensorwise", "blockwise", "blockwise-power-of-two", "mxfp8" or "mxfp8-round-up".
        accept: which linear layers to convert, see `msamp.filters`.
        group: the data-parallel ranks; None is all of torch.distributed, if that is initialized.
        zero: shard the optimizer over the ranks, see `ZeRO` (its `state_dict` is collective); None: as the recipe does (only O3).
        clip_grad: clip the global gradient norm to this in `step`, on any number of processes.
        master_rounding: rounding of masters narrower than FP32, "nearest" or "stochastic" (`msamp.numerics.stochastic_rounding`); None:
            as the recipe does.
        moment_rounding: the same for moments.
        grad_format: of the gradients of FP8 layers' weights, "fp8-e4m3", "fp8-e5m2", "fp16", "bf16" or "fp32"; None: as the recipe does.
            With "bf16" no gradient is rounded to FP8, in `p.grad`, on the wire and in the optimizer.
        smooth_swiglu: Smooth-SwiGLU: give each channel of SwiGLU's output a power-of-two scale of its own in its cast to FP8
            (`msamp.nn.channel_scales`), in modules that `msamp.nn.filters.behind_swiglu` knows. Saved weights do not contain it.
        fuse: run the decoder layers of transformers that `msamp.nn.decoder_layer` recognizes by fused functions, layer by layer where
            their parts are in FP8; `msamp.survey` lists which, and why the others are not.
        fp8_min_gain: smallest measured gain of a linear layer, BF16 time / FP8 time on this GPU. At the end of the first step the first
            process times the shapes of that step's forwards, once per machine (`msamp.nn.layer_gains`); layers that gain less compute
            in BF16 from then on, and the log and `msamp.survey` say which. On a CPU nothing is timed and all compute in FP8; 0: the same
            on a GPU.
        seed: of stochastic rounding. `optimizer.state_dict()` contains the parameters' keys that follow from it.

    Returns:
        The model, the same object, and the optimizer. The optimizer has `grad_sync`, its GradSync (bytes sent, statistics; None on one
        process), and `no_sync`, the context for gradient accumulation.

    Raises:
        ValueError: for an unknown recipe, gradient format or optimizer (listing those accepted), two recipes, a model in a dtype that the
            recipe does not support, `smooth_swiglu` without a known SwiGLU in FP8 or delayed scales, an optimizer option without a
            low-precision form, a weight that is not finite, a model in DDP or FSDP, or ranks whose models differ. No layer has been
            converted then.
    """
    ms_amp.check_alone()
    # Choose the recipe, the ranks, and what becomes FP8. What is refused is refused here, and changes nothing.
    chosen = takeover.chosen_recipe(recipe, opt_level, fp8_recipe, master_rounding, moment_rounding, grad_format)
    group = data_parallel_group(group)
    if clip_grad is not None:
        check_max_norm(clip_grad)
    check_min_gain(fp8_min_gain)
    optimizers, conversions, former = checked(model, optimizer, chosen, accept, group)
    smooth = behind_swiglu(model, chosen, conversions) if smooth_swiglu else []
    _report(model, optimizers, chosen, accept, group)

    # Convert the layers in place. A master starts from its weight before the rounding to FP8, or from a former optimizer's master.
    masters: dict[torch.Tensor, torch.Tensor] = {}
    divided = carry_out(model, chosen, conversions, masters if chosen.weight != chosen.states.master else None)
    fuse_layers(model) if fuse and chosen.fp8 else unfuse(model)
    for each in optimizers:
        takeover.divide_parameters(each, divided)
    for layer in smooth:
        layer.scaling.add_channels(layer.in_features)  # type: ignore[union-attr, operator, arg-type]
    for earlier in former:
        masters |= takeover.take_masters(earlier)
        takeover.release(earlier)

    # Attach the gradients: hooks that average them over the ranks.
    groups = [g for each in optimizers for g in takeover.parameter_groups(each, model, chosen)]
    sync, shard = None, None
    if group is not None:
        formats: dict[torch.Tensor, Format] = {p: parameter_formats(p, chosen).grad for p in model.parameters()}
        whole = [p for g in groups for p, states in zip(g["params"], g["formats"], strict=True) if updates.by_name(states.update).whole]
        whole = list(model.parameters()) if chosen.whole_tensors else whole
        zero = chosen.shards_optimizer if zero is None else zero
        exchange: dict[str, Any] = {"exchange": chosen.exchange, "mu_rule": chosen.mu_rule, "accumulate": chosen.accumulator}
        sync = grad_sync(model, formats, group, whole=whole, shard=zero, **exchange)
        shard = ZeRO(sync) if zero else None

    # Build the optimizer that replaces the given ones, with their states.
    defaults = takeover.defaults_of(optimizers[-1])
    low = LoopOptimizer(groups, chosen, ScalingState(model), sync, shard=shard, clip_grad=clip_grad, seed=seed, **defaults)
    low.fp8_min_gain = fp8_min_gain if chosen.fp8 else 0.0
    owned = {id(p) for g in low.param_groups for p in g["params"]}
    low.init_masters((p, values) for p, values in masters.items() if id(p) in owned)
    if any(each.state for each in optimizers):
        low.load_state_dict(takeover.joined_state(optimizers))
        for each in optimizers:
            each.state.clear()
    start = 0
    for each in optimizers:
        end = start + len(each.param_groups)
        takeover.retire(each, low, None if len(optimizers) == 1 else slice(start, end))
        start = end
    if chosen.fp8 or group is not None:
        model._ddp_params_and_buffers_to_ignore = NoDistributedDataParallel()  # type: ignore[assignment]
    if callable(getattr(model, "save_pretrained", None)):
        save_plain(model, low)
    return model, low


def _report(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], recipe: Recipe, accept: Filter, group: dist.ProcessGroup | None
) -> None:
    """Log what becomes FP8, or warn if that is nothing, or less than half of the weight GEMMs. Warn of matrices that no optimizer has."""
    if recipe.fp8 and (group is None or dist.get_rank(group) == 0):
        found = survey(model, recipe, accept)
        if not found.converted:
            warnings.warn(f"recipe {recipe.name!r} converted no layer, and the model trains as before:\n{found}", stacklevel=3)
        elif found.flop_share < 0.5:
            warnings.warn(f"less than half of the model's weight GEMMs are in FP8:\n{found}", stacklevel=3)
        else:
            _LOG.info("%s", found)
    given = {id(p) for optimizer in optimizers for g in optimizer.param_groups for p in g["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and p.dim() >= 2 and id(p) not in given]
    if left:
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        warnings.warn(
            f"no given optimizer has {', '.join(left[:4])}{more}, so they are not trained; pass all optimizers in a list, "
            "msamp.initialize(model, [first, second]), or freeze these parameters by requires_grad_(False)",
            stacklevel=3,
        )
