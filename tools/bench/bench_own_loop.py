"""Measure training steps of a transformers model in a plain loop: ours in two lines, our trainer, torch and torchao.

    python tools/bench/bench_own_loop.py --shapes 1b 350m --cases msamp:bf16:eager torchao:bf16:compiled trainer:bf16:captured
    python tools/bench/bench_own_loop.py --shapes smollm2-135m --cases msamp:fp32:captured --level O2
    torchrun --nproc-per-node 2 tools/bench/bench_own_loop.py --cases msamp:bf16:captured:zero torchao:bf16:captured:fsdp

A case is SYSTEM:FORM:WAY, on several GPUs SYSTEM:FORM:WAY:PARALLEL. Systems: `msamp` (`msamp.initialize` at --level), `trainer` (the
trainer's step of the same shape at --level), `torch` (fused AdamW) and `torchao` (its FP8 linear layers without the head). Forms: `bf16`,
weights in BF16 without a master (ours keep the level's); `fp32`, weights in FP32, computed under autocast. Ways: `eager`; `compiled`, each
decoder layer by torch.compile; `captured`, one CUDA graph by `msamp.capture` (the trainer's own graph), which holds the compiled layers of
torch and torchao; `update`, on one GPU, a graph of what follows backward: gradients of all parameters arrive, are clipped to norm 1 and
used. PARALLEL: `ddp`, our gradient synchronization or DistributedDataParallel; `zero`, also the trainer's; `fsdp`, FSDP2 by layers, for
torchao with its FP8 all-gather. Each GPU has the batch of one; time and peak are those of the rank with the most. Weights and tokens are
random, nothing is downloaded; transformers and torchao must be installed. The update is part of the step.
"""

import argparse
import contextlib
import gc
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import msamp
from megatron.lm.processes import process_groups
from megatron.lm.shell.arguments import Parser, count
from msamp.integrations import fsdp
from msamp.integrations.replay_checks import masks_as_in_eager_steps
from tools.bench import rows, training_steps

Shape = tuple[dict[str, Any], int, int]  # configuration of transformers, sequences, tokens of each


def llama(hidden: int, layers: int, width: int, heads: int, groups: int, **more: Any) -> dict[str, Any]:
    """Return transformers' configuration of a Llama."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": width, "num_attention_heads": heads}
    return {"model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False, "num_key_value_heads": groups} | sizes | more


SHAPES: dict[str, Shape] = {
    "350m": (llama(1024, 24, 2816, 16, 16), 8, 2048),
    "1b": (llama(2048, 16, 8192, 32, 8), 8, 2048),
    "8b8": (llama(4096, 8, 14336, 32, 8), 2, 4096),
    "smollm2-135m": (llama(576, 30, 1536, 9, 3, vocab_size=49152, tie_word_embeddings=True), 8, 1024),
    "olmoe8": (
        {"model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 8, "intermediate_size": 1024}
        | {"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
        *(4, 2048),
    ),
}
TRAINER = (  # the trainer's flag -> the value's name in transformers' configuration
    ("--num-layers", "num_hidden_layers"),
    ("--hidden-size", "hidden_size"),
    ("--ffn-hidden-size", "intermediate_size"),
    ("--num-attention-heads", "num_attention_heads"),
)
SYSTEMS = {"msamp": ("ddp", "zero", "fsdp"), "trainer": ("zero",), "torch": ("ddp", "fsdp"), "torchao": ("ddp", "fsdp")}
FORMS, WAYS = ("bf16", "fp32"), ("eager", "compiled", "captured", "update")
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
COLUMNS = ("date", "commit", "gpu", "torch", "shape", "gpus", "parallel", "system", "form", "way", "level", "ms", "peak_gib")


def build(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Return a model of random weights."""
    import transformers  # the trainer's rows do not need it

    config, _, tokens = shape
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config, max_position_embeddings=tokens, attn_implementation="sdpa", use_cache=False)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype).train()  # type: ignore[no-any-return]


def loop_step(shape: Shape, system: str, form: str, way: str, level: str, parallel: str, **options: Any) -> Callable[[], Any]:
    """Return a step of the plain loop; `options` are of `msamp.initialize` and `msamp.integrations.fsdp.optimizer`."""
    model: Any = build(shape, torch.float32 if form == "fp32" else torch.bfloat16)
    device, layers = next(model.parameters()).device, model.model.layers
    graph = way in ("captured", "update")
    peer_captured = graph and system != "msamp"
    if system == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

        settings = Float8LinearConfig(enable_fsdp_float8_all_gather=parallel == "fsdp")
        convert_to_float8_training(model, config=settings, module_filter_fn=lambda _, name: "lm_head" not in name)
    if system == "msamp" and parallel == "fsdp":
        fsdp.prepare(model, level)
    for module in (*layers, model) if parallel == "fsdp" else ():
        fully_shard(module, mp_policy=POLICY)
    rate: Any = torch.tensor(1e-4, device=device) if peer_captured else 1e-4
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=peer_captured)
    if system == "msamp" and parallel == "fsdp":
        optimizer = fsdp.optimizer(model, optimizer, level, **options)
    elif system == "msamp":
        options |= {"zero": parallel == "zero", "clip_grad": 1.0 if way == "update" else None}
        model, optimizer = msamp.initialize(model, optimizer, level, **options)
    elif peer_captured:
        model.held = contextlib.ExitStack()  # for good: a layer must not be compiled again in the capture
        model.held.enter_context(masks_as_in_eager_steps(model))
    for layer in layers if way == "compiled" or peer_captured else ():
        layer.compile()
    vocabulary, (_, sequences, tokens) = model.config.vocab_size, shape
    rank = dist.get_rank() if parallel else 0
    ids = torch.randint(0, vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(1 + rank)).to(device)

    def forward_backward(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=form == "fp32"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def update() -> None:
        optimizer.step()
        if system == "torchao" and parallel == "fsdp":
            precompute_float8_dynamic_scale_for_fsdp(model)

    if system != "msamp" and parallel == "ddp":
        torch._dynamo.config.optimize_ddp = False  # it would split each compiled layer between DDP's buckets
        training_steps.synchronize()
        # PyTorch's rule for a graph with DDP: made on another stream than the default, and eleven eager steps before the capture.
        aside = peer_captured and device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if aside else contextlib.nullcontext():
            model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
            for _ in range(12 if peer_captured else 0):
                forward_backward(ids)
                optimizer.zero_grad()
        training_steps.synchronize()
    if way == "update":
        params = list(model.parameters())
        gradients = [1e-3 * torch.randn(p.shape, dtype=p.dtype, device=device) for p in params]

    def gradients_arrive(ids: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(params, gradients)
        return ids if system == "msamp" else nn.utils.clip_grad_norm_(params, 1.0)

    if graph:
        run = gradients_arrive if way == "update" else forward_backward
        captured = msamp.capture(model, optimizer, run, update=update)  # type: ignore[attr-defined]

        def replayed() -> Any:
            result = captured(ids)
            if captured.obstacle is not None:  # its steps are eager, which the row would not say
                raise ValueError(captured.obstacle)
            return result

        return replayed

    def step() -> torch.Tensor:
        loss = forward_backward(ids)
        update()
        optimizer.zero_grad()
        return loss

    return step


def trainer_step(shape: Shape, level: str, fp8_min_gain: float) -> Callable[[], Any]:
    """Return a step of the trainer on a GPT of the same shape."""
    config, sequences, tokens = shape
    flags = [word for flag, name in TRAINER for word in (flag, str(config[name]))]
    groups = config.get("num_key_value_heads", config["num_attention_heads"])
    flags += ["--group-query-attention", "--num-query-groups", str(groups), "--seq-length", str(tokens), "--swiglu"]
    flags += ["--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"]
    flags += ["--fp8-min-gain", str(fp8_min_gain)]
    flags += ["--global-batch-size", str(sequences * (dist.get_world_size() if dist.is_initialized() else 1))]
    flags += [] if config["tie_word_embeddings"] else ["--untie-embeddings-and-output-weights"]
    options = argparse.Namespace(
        preset="1.3b", micro_batch_size=sequences, flags=" ".join(flags), vocab_size=config["vocab_size"], csv=None, commit=None
    )
    settings = training_steps.configuration(level, options)
    process_groups.initialize(settings)
    return training_steps.prepare(settings, options, 1)[1]


def measure(case: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a case; collective."""
    system, form, way, parallel = (*case.split(":"), "")[:4]
    gpus = dist.get_world_size() if dist.is_initialized() else 1
    kinds = ("",) if gpus == 1 else () if way == "update" else SYSTEMS.get(system, ())
    if system not in SYSTEMS or form not in FORMS or way not in WAYS or parallel not in kinds:
        raise ValueError(f"case is {case!r}; it must be SYSTEM:FORM:WAY of {(*SYSTEMS,)}, {FORMS} and {WAYS}, and :PARALLEL of {kinds}")
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    size = SHAPES[shape]
    if system == "trainer":
        step = trainer_step(size, options.level, options.fp8_min_gain)
    else:
        settings = {"fp8_min_gain": options.fp8_min_gain} if system == "msamp" else {}
        step = loop_step(size, system, form, way, options.level, parallel, **settings)
    training_steps.warm_up(step, options.warm_up)
    times, _ = training_steps.synchronized_step_times(step, options.steps)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    most = torch.tensor([statistics.median(times) * 1e3, peak / 2**30], dtype=torch.float64, device=process_groups.device())
    if gpus > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    del step
    gc.collect()  # NCCL waits for graphs with its collectives before it leaves a group
    if system == "trainer":
        process_groups.leave_grid()
    row = rows.machine(options.commit) | {"shape": shape, "gpus": gpus, "parallel": parallel, "system": system, "form": form, "way": way}
    row |= {"level": options.level if system in ("msamp", "trainer") else ""}
    row |= {"ms": round(float(most[0]), 1), "peak_gib": round(float(most[1]), 2) or ""}
    return {name: row[name] for name in COLUMNS}


def main() -> int:
    """Measure every case of every shape, and append a row of each; a case that fails is printed, and the others go on."""
    flags = Parser(description=__doc__)
    flags.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1b"])
    flags.add_argument("--cases", nargs="+", default=["msamp:bf16:eager", "torch:bf16:compiled"], metavar="SYSTEM:FORM:WAY[:PARALLEL]")
    flags.add_argument("--level", default="O3")
    flags.add_argument("--fp8-min-gain", type=float, default=1.0, help="of ours; 0: time no layers, which takes half a minute at first")
    flags.add_argument("--warm-up", type=count(1), default=20, help="delayed scaling is just in time for 16 steps")
    flags.add_argument("--steps", type=count(2), default=8, help="measured steps")
    rows.add_flags(flags, "own_loop.csv")
    options = flags.parse_args()
    failed, launch = 0, process_groups.launch_from_environment()
    if launch.world_size > 1:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    for shape in options.shapes:
        for case in options.cases:
            try:
                row = measure(case, shape, options)
            except Exception as error:  # another system's error must not lose the rows after it
                failed += 1
                print(f"{shape} {case} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            if launch.rank == 0:
                print(" ".join(str(row[name]) for name in COLUMNS[4:]), flush=True)
                rows.append(options.csv, [row])
    if launch.world_size > 1:
        process_groups.shutdown()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
