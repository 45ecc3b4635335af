"""Settings judged together, before anything is allocated or written: `check` raises one ValueError that lists every problem.

A rule is a generator of messages, each with the value, what is legal and the remedy. Rules see only sections whose single values passed,
so they may divide by them. What the files contain is judged by those who read them (data/datasets.py, data/tokenizer.py, checkpoint/).
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from megatron.lm.config import COAT_FORMATS, DEFAULT_SPLIT, FP8_FORMATS, Config, flag

LATEST_CHECKPOINT_FILE = "latest_checkpointed_iteration.txt"
TOKENIZER_SETTINGS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
STATE_FORMAT_FIELDS = ("master_format", "grad_format", "exp_avg_format", "exp_avg_sq_format")

LOSS_SCALE_FIELDS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")

Problems = Iterator[str]


def check(config: Config, world_size: int) -> None:
    """Raise a ValueError listing every setting that is out of range, contradicts another or is not served by this version.

    `world_size` is the number of processes. Looks at the file system (do the named files exist, may the folders be written?) and
    writes nothing; the same on every process that sees the same files.
    """
    problems: list[str] = []
    broken: set[str] = set()
    for section in (f.name for f in fields(config)):
        found = list(single_values(getattr(config, section)))
        problems += found
        broken |= {section} if found else set()
    for rule, sections in RULES.items():
        if not broken & set(sections):
            problems += rule(config, world_size)
    if problems:
        count = "a setting is" if len(problems) == 1 else f"{len(problems)} settings are"
        raise ValueError("\n- ".join([f"{count} refused, nothing was started:", *problems]))


def single_values(section: object) -> Problems:
    """Choices and intervals of one section, from the metadata of its fields."""
    for setting in fields(section):  # type: ignore[arg-type]
        value, legal, choices = getattr(section, setting.name), setting.metadata["legal"], setting.metadata["choices"]
        if value is None:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if choices is not None and one not in choices:
                yield f"{flag(setting.name)} {one}: choose one of {', '.join(choices)}"
        if legal is not None and value not in legal:
            yield f"{flag(setting.name)} {value}: give a number in {legal}"


def attention_shape(config: Config, world_size: int) -> Problems:
    """Heads, groups of heads, positions."""
    model = config.model
    heads, groups = model.num_attention_heads, model.query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}: "
            f"choose a multiple of {heads}, or give the heads' width with --kv-channels"
        )
    elif int(model.head_size * model.rotary_percent) % 2 and model.position_embedding_type == "rope":
        yield (
            f"rotary position embeddings turn pairs: {model.head_size} channels a head x --rotary-percent {model.rotary_percent:g} must be "
            "an even number; change --num-attention-heads or --kv-channels"
        )
    if model.num_query_groups is not None and not model.group_query_attention:
        yield f"--num-query-groups {model.num_query_groups} has no effect by itself: add --group-query-attention, or drop it"
    elif heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}: choose a divisor of {heads}"
    if model.max_positions < model.seq_length:
        yield (
            f"--max-position-embeddings {model.max_positions} is less than --seq-length {model.seq_length}: "
            f"give at least {model.seq_length}, or drop it"
        )


def positions(config: Config, world_size: int) -> Problems:
    """Position ids reach only learned embeddings."""
    if config.data.reset_position_ids and config.model.position_embedding_type == "rope":
        yield (
            "--reset-position-ids has no effect with --position-embedding-type rope, which counts from the start of the sequence: "
            "drop it, or use learned_absolute"
        )


def determinism(config: Config, world_size: int) -> Problems:
    """What adds up in any order is not asked for beside `--deterministic`."""
    if config.training.deterministic and config.model.attention_backend == "cudnn":
        yield "--deterministic with --attention-backend cudnn, whose backward adds up in any order: choose auto or flash"


def recomputation(config: Config, world_size: int) -> Problems:
    """The flags of full recomputation come together, that of selective recomputation with its granularity."""
    training, parallel = config.training, config.parallel
    if training.recompute_modules and training.recompute_granularity != "selective":
        modules = " ".join(training.recompute_modules)
        yield f"--recompute-modules {modules} has no effect by itself: add --recompute-granularity selective, or drop it"
    again = training.recompute_modules or ("core_attn",)
    if training.recompute_granularity == "selective" and config.fuses_layers and config.model.attention_dropout and "core_attn" in again:
        yield (
            f"a fused layer does not recompute attention with --attention-dropout {config.model.attention_dropout:g}: "
            "give --recompute-modules mlp, or drop one of them"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        value = getattr(training, name)
        if training.recompute_granularity != "full" and value is not None:
            yield f"{flag(name)} {value} has no effect by itself: add --recompute-granularity full, or drop it"
        if training.recompute_granularity == "full" and value is None:
            yield f"--recompute-granularity full needs {flag(name)}: add --recompute-method uniform --recompute-num-layers 1"
    stage = max(1, config.model.num_layers // parallel.pipeline_model_parallel_size)
    layers = min(stage, parallel.num_layers_per_virtual_pipeline_stage or stage)
    if training.recompute_num_layers is not None and training.recompute_num_layers > layers:
        what = "pipeline stage" if layers == stage else "virtual pipeline stage"
        yield f"--recompute-num-layers {training.recompute_num_layers} is more than the {layers} layers of a {what}: give 1 to {layers}"


def tensor_parallel_shape(config: Config, world_size: int) -> Problems:
    """What tensor and sequence parallelism cut must be divisible. (The vocabulary is: it is padded.)"""
    model, parallel = config.model, config.parallel
    tp, heads = parallel.tensor_model_parallel_size, model.num_attention_heads
    size_flag = f"--tensor-model-parallel-size {tp}"
    cut: list[tuple[str, int, int]] = []
    if heads % tp:
        served = [n for n in range(tp, model.hidden_size + 1, tp) if model.kv_channels or model.hidden_size % n == 0]
        choice = _nearest(heads, served) or _nearest_multiples(heads, tp)
        yield f"--num-attention-heads {heads} is not divisible by {size_flag}: choose {choice}"
    if heads % tp == 0 or model.kv_channels:  # else its multiples would be those of heads that cannot stay
        cut.append(("hidden_size", model.hidden_size, tp if model.kv_channels else math.lcm(tp, heads)))
    if heads % tp == 0 and model.group_query_attention and heads % model.query_groups == 0 and model.query_groups % tp:
        legal = [groups for groups in _divisors(heads) if groups % tp == 0]
        yield f"--num-query-groups {model.query_groups} is not divisible by {size_flag}: choose {_nearest(model.query_groups, legal)}"
    cut.append(("ffn_hidden_size", model.ffn_size, tp))
    if parallel.sequence_parallel:
        cut.append(("seq_length", model.seq_length, tp))
    for name, size, multiple in cut:
        if size % tp:
            yield f"{flag(name)} {size} is not divisible by {size_flag}: choose {_nearest_multiples(size, multiple)}"
    if parallel.sequence_parallel and tp == 1:
        yield (
            "--sequence-parallel splits between tensor-parallel processes, and there is one: drop it (after a preset: "
            "--no-sequence-parallel), or raise --tensor-model-parallel-size"
        )


def _nearest_multiples(value: int, of: int) -> str:
    """The multiple of `of` below `value` and the one above, as words."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _divisors(value: int) -> list[int]:
    return [number for number in range(1, value + 1) if value % number == 0]


def _nearest(value: int, legal: list[int]) -> str:
    """The legal number below `value` and the one above, as words."""
    around = [*[number for number in legal if number < value][-1:], *[number for number in legal if number > value][:1]]
    return " or ".join(map(str, around))


def pipeline_shape(config: Config, world_size: int) -> Problems:
    """Layers over stages and virtual stages."""
    layers, stages = config.model.num_layers, config.parallel.pipeline_model_parallel_size
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if virtual is not None and stages == 1:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} interleaves pipeline stages, and there is one: drop it, or raise "
            "--pipeline-model-parallel-size"
        )
    elif layers % stages:
        unit = stages * (virtual or 1)
        served = [n for n in range(unit, layers + 2 * unit + 1, unit) if virtual is None or n > unit]  # interleaving takes two of them
        yield f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {stages}: choose {_nearest(layers, served)}"
    elif virtual is not None and (virtual == layers // stages or layers // stages % virtual):
        smaller = _divisors(layers // stages)[:-1]
        whole = virtual == layers // stages
        yield (
            f"--num-layers-per-virtual-pipeline-stage {virtual} "
            + ("leaves nothing to interleave: it is a whole" if whole else f"does not divide the {layers // stages} layers of a")
            + f" pipeline stage: {f'choose {_nearest(virtual, smaller)}, or ' if smaller else ''}drop it"
        )


def batches(config: Config, world_size: int) -> Problems:
    """World size over TP x PP, global batch over micro-batch x DP, micro-batches over an interleaved pipeline."""
    parallel, micro = config.parallel, config.training.micro_batch_size
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    if world_size < 1 or world_size % (tp * pp):
        yield (
            f"{world_size} processes do not fit --tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}: "
            f"start {_nearest_multiples(world_size, tp * pp)}, or lower the two sizes"
        )
        return
    copies = config.data_parallel_size(world_size)
    size = config.global_batch_size(world_size)
    if size % (micro * copies):
        yield (
            f"--global-batch-size {size} is not divisible by --micro-batch-size {micro} x {copies} data-parallel processes: "
            f"choose a multiple of {micro * copies}"
        )
    elif parallel.num_layers_per_virtual_pipeline_stage is not None and config.num_micro_batches(world_size) % pp:
        yield (
            f"interleaved pipelining wants the {config.num_micro_batches(world_size)} micro-batches of a step to be a multiple of "
            f"--pipeline-model-parallel-size {pp}: choose --global-batch-size as a multiple of {micro * copies * pp}"
        )


def precision_names(config: Config, world_size: int) -> Problems:
    """One recipe, and formats only where it leaves them open."""
    precision = config.precision
    try:
        is_fp8 = precision.is_fp8
    except ValueError as error:
        yield str(error)
        return
    for name in ("exp_avg_format", "exp_avg_sq_format"):
        value = getattr(precision, name)
        if precision.optimizer_state is not None and value not in (None, *COAT_FORMATS):
            remedy = f"drop one, or choose {' or '.join(COAT_FORMATS)}"
            yield f"--optimizer-state {precision.optimizer_state} contradicts {flag(name)} {value}: {remedy}"
    coat = [name for name in ("optimizer_state", "exp_avg_format", "exp_avg_sq_format") if "coat" in (getattr(precision, name) or "")]
    if coat and precision.name in ("bf16-a", "bf16-kahan", "collage-light", "collage-plus", "collage-fp8"):
        given = f"{flag(coat[0])} {getattr(precision, coat[0])}"
        yield f"{given} contradicts precision {precision.name}, whose update is in BF16: drop it, or use --precision bf16"
    if is_fp8:
        if precision.fp8_gain_cache is not None and (precision.bf16_linears is not None or not precision.fp8_min_gain):
            ground = "--fp8-min-gain 0" if precision.bf16_linears is None else "--bf16-linears"
            yield f"--fp8-gain-cache {precision.fp8_gain_cache} has no effect with {ground}, which leaves nothing to measure: drop one"
        return
    for name in ("fp8_gain_cache", "bf16_linears"):
        value = getattr(precision, name)
        if value is not None:
            given = " ".join(value) if isinstance(value, tuple) else value
            yield (
                f"{flag(name)} {given} is about FP8 linear layers, and precision {precision.name} has none: "
                "drop it, or use --opt-level O1, O2 or O3"
            )
    for name in STATE_FORMAT_FIELDS:
        value = getattr(precision, name)
        if value not in (None, *COAT_FORMATS):
            yield (
                f"{flag(name)} {value} contradicts precision {precision.name}, whose formats are fixed: "
                "drop it, or use --opt-level O1, O2 or O3"
            )
    if precision.fp8_scaling is not None:
        yield (
            f"--fp8-scaling {precision.fp8_scaling} contradicts precision {precision.name}, which has no FP8: "
            "drop it, or use --opt-level O1, O2 or O3"
        )


def loss_scaling(config: Config, world_size: int) -> Problems:
    """A loss scale is FP16's, and what steers a dynamic one leaves a constant one alone."""
    precision = config.precision
    if len(set(precision.requests.values())) > 1:
        return
    given = [f.name for f in fields(precision) if f.name in LOSS_SCALE_FIELDS and getattr(precision, f.name) != f.default]
    for name in given:
        value = getattr(precision, name)
        if precision.name != "fp16-amp":
            yield f"{flag(name)} {value:g} is about FP16, and precision {precision.name} has no loss scale: drop it, or use --fp16"
        elif precision.loss_scale is not None and name != "loss_scale":
            yield f"{flag(name)} {value:g} is about a dynamic loss scale, and --loss-scale {precision.loss_scale:g} is constant: drop one"
    if precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            f"--min-loss-scale {precision.min_loss_scale:g} is more than --initial-loss-scale {precision.initial_loss_scale:g}: "
            "lower it, or start higher"
        )


def gradients(config: Config, world_size: int) -> Problems:
    """FP8 flags want FP8 gradients, and mu wants the exchange that it guards."""
    precision, communication = config.precision, config.communication
    exchange, scaling, mu_rule = communication.grad_exchange, communication.grad_scaling, communication.mu_rule
    if len(set(precision.requests.values())) < 2 and not precision.has_fp8_gradients:
        own = precision.grad_format if precision.is_fp8 else None
        lack = f"--grad-format {own} leaves none" if own else f"precision {precision.name} has none"
        served = ["fp32", "bf16"] if precision.is_fp8 or precision.has_bf16_gradients else ["fp32"]
        way = f"--grad-format {' or '.join(FP8_FORMATS)}" if precision.is_fp8 else "--opt-level O1, O2 or O3"
        remedy = f"drop {'one' if own else 'it'}, or use {way}"
        if exchange == "nccl":
            yield f"--grad-exchange nccl sums FP8 gradients, and {lack}: {remedy}"
        if precision.grad_accum not in served:
            yield (
                f"--grad-accum-dtype {precision.grad_accum} is for FP8 gradients, and {lack}; legal here is {' or '.join(served)}: {remedy}"
            )
    if exchange != "nccl":
        for name, value in (("grad_scaling", scaling), ("mu_rule", mu_rule)):
            if value is not None:
                yield (
                    f"{flag(name)} {value} has no effect with --grad-exchange {exchange}, which sums in FP32, cannot overflow and has no "
                    "mu: drop it, or use --grad-exchange nccl"
                )
    elif mu_rule is not None and communication.gradient_scaling != "auto":
        yield f"--mu-rule {mu_rule} has no effect with --grad-scaling {scaling}, whose mu is fixed: drop it, or use --grad-scaling auto"


def tensor_parallel_wire(config: Config, world_size: int) -> Problems:
    """FP8 between tensor-parallel processes is O3's, and each of its two flags wants the parallelism whose transfer it is about."""
    parallel, precision = config.parallel, config.precision
    is_o3 = set(precision.requests.values()) == {"O3"}
    for name, default, ground, there in (
        ("tp_wire", "bf16", "--tensor-model-parallel-size above 1", parallel.tensor_model_parallel_size > 1),
        ("tp_saved_input", "shard", "--sequence-parallel", parallel.sequence_parallel),
    ):
        value = getattr(parallel, name)
        lacking = [remedy for remedy, given in (("--opt-level O3", is_o3), (ground, there)) if not given]
        if value != default and lacking:
            yield f"{flag(name)} {value} has no effect without {' and '.join(lacking)}: drop it, or add {' and '.join(lacking)}"


def schedule(config: Config, world_size: int) -> Problems:
    """Learning rates and warm-up in order."""
    optimizer, end = config.optimizer, config.lr_decay_iters
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr:g} is above --lr {optimizer.lr:g}: give a value in [0, {optimizer.lr:g}]"
    if optimizer.lr_warmup_iters >= end:
        last = "--train-iters" if optimizer.lr_decay_iters is None else "--lr-decay-iters"
        yield f"--lr-warmup-iters {optimizer.lr_warmup_iters} must end before {last} {end}: give a number in [0, {end - 1}]"


def datasets(config: Config, world_size: int) -> Problems:
    """Data named once, in full, and there."""
    data = config.data
    per_split = {name: getattr(data, name) for name in ("train_data_path", "valid_data_path", "test_data_path")}
    given = [flag(name) for name, words in per_split.items() if words]
    if config.logging.dry_run and not data.data_path and not given:
        return
    if data.data_path and given:
        yield f"--data-path and {', '.join(given)} contradict each other: give --data-path with --split, or the others"
    elif not data.data_path and not data.train_data_path:
        beside = f" beside {', '.join(given)}" if given else ""
        yield f"no training data{beside}: give --data-path PREFIX or --train-data-path PREFIX (made by tools/preprocess_data.py)"
    elif data.train_data_path and data.split != DEFAULT_SPLIT:
        yield f"--split {data.split} has no effect on --train-data-path: drop it, or give --data-path"
    if not _is_split(data.split):
        yield f"--split {data.split}: give one to three numbers, 0 or more, for train, valid and test, the first above 0, such as 969,30,1"
    for name, words in {"data_path": data.data_path, **per_split}.items():
        yield from _blend(name, words)


def _is_split(text: str) -> bool:
    shares = [_number(word) for word in text.split(",")]
    return len(shares) <= 3 and shares[0] != 0 and all(share is not None and 0 <= share < float("inf") for share in shares)


def _blend(name: str, words: tuple[str, ...]) -> Problems:
    weights, prefixes = words[0::2], words[1::2]
    if all(_number(word) is None for word in words):
        prefixes = words
    elif len(words) % 2 or any(_number(word) is not None for word in prefixes):
        yield f"{flag(name)} {' '.join(words)}: give prefixes alone, or a weight before each prefix"
        return
    else:
        for weight in weights:
            value = _number(weight)
            if value is None or not 0 < value < float("inf"):
                yield f"{flag(name)} {' '.join(words)}: the weight {weight} is not a number above 0; leave out what is not to be used"
    for prefix in prefixes:
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not os.path.isfile(prefix + suffix)]
        if missing:
            yield f"{flag(name)} {prefix}: {' and '.join(missing)} do not exist; give the prefix of what tools/preprocess_data.py wrote"


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def tokenizer(config: Config, world_size: int) -> Problems:
    """A tokenizer with just the settings that belong to it."""
    kind = config.data.tokenizer_type
    if kind is None and config.logging.dry_run:
        return
    if kind is None:
        yield f"--tokenizer-type is missing: choose one of {', '.join(TOKENIZER_SETTINGS)}"
        return
    for owner, names in TOKENIZER_SETTINGS.items():
        for name in names:
            value = getattr(config.model if name == "vocab_size" else config.data, name)
            if owner != kind and value is not None:
                yield f"{flag(name)} {value} belongs to {owner} and has no effect on --tokenizer-type {kind}: drop it"
            if owner == kind and value is None:
                yield f"--tokenizer-type {kind} needs {' and '.join(map(flag, names))}: add {flag(name)}"
            if owner == kind and isinstance(value, str) and not os.path.exists(value):
                yield f"{flag(name)} {value} does not exist: name the file that the data was tokenised with"
    if kind == "NullTokenizer" and config.model.vocab_size == 1:
        yield "--vocab-size 1 leaves no token beside the end of document: give at least 2"


def loading(config: Config, world_size: int) -> Problems:
    """A checkpoint to load is there, and flags about loading have one."""
    checkpoint = config.checkpoint
    if checkpoint.load is None:
        for name in ("finetune", "no_load_optim", "no_load_rng"):
            if getattr(checkpoint, name):
                yield f"{flag(name)} has no effect without a checkpoint: add --load FOLDER, or drop it"
        if checkpoint.ckpt_step is not None:
            yield f"--ckpt-step {checkpoint.ckpt_step} has no effect without a checkpoint: add --load FOLDER, or drop it"
        return
    if checkpoint.resumes_itself:
        return  # its first start finds no checkpoint
    folder = Path(checkpoint.load)
    if not os.path.isdir(folder):  # unlike Path.is_dir, no exception where a folder above may not be entered
        yield f"--load {folder} is no folder: name one that a run with --save wrote, or drop --load to start afresh"
    elif not os.path.isfile(folder / LATEST_CHECKPOINT_FILE):
        yield f"--load {folder} holds no checkpoint ({LATEST_CHECKPOINT_FILE} is missing): name another, or drop --load to start afresh"


def faults(config: Config, world_size: int) -> Problems:
    """A spike is a rise, and going back wants a place to go back to."""
    found, checkpoint = config.faults, config.checkpoint
    if 0 < found.loss_spike_threshold <= 1:
        yield f"--loss-spike-threshold {found.loss_spike_threshold:g} calls every loss a spike: give more than 1, such as 2, or 0 for none"
    if not found.loss_spike_threshold:
        for setting in (f for f in fields(found) if f.name in ("loss_spike_window", "loss_spike_action")):
            value = getattr(found, setting.name)
            if value != setting.default:
                yield f"{flag(setting.name)} {value} has no effect without --loss-spike-threshold: add it, or drop this"
    elif found.loss_spike_action == "rollback" and None in (checkpoint.save, checkpoint.save_interval):
        yield "--loss-spike-action rollback goes back to checkpoints of this run: add --save FOLDER and --save-interval N, or choose warn"


def outputs(config: Config, world_size: int) -> Problems:
    """Everything that will be written can be; flags of a dry run have one."""
    if config.logging.device_memory_gib is not None and not config.logging.dry_run:
        yield f"--device-memory-gib {config.logging.device_memory_gib:g} has no effect without --dry-run: add it, or drop the memory"
    if config.checkpoint.save_interval is not None and config.checkpoint.save is None:
        yield f"--save-interval {config.checkpoint.save_interval} has no effect without a folder: add --save FOLDER, or drop it"
    if config.checkpoint.keep_last is not None and config.checkpoint.save is None:
        yield f"--keep-last {config.checkpoint.keep_last} has no effect without a folder: add --save FOLDER, or drop it"
    if config.checkpoint.async_save and config.checkpoint.save is None:
        yield "--async-save has no effect without a folder: add --save FOLDER, or drop it"
    folders = {
        "save": config.checkpoint.save,
        "tensorboard_dir": config.logging.tensorboard_dir,
        "data_cache_path": config.data.data_cache_path,
    }
    for name, folder in folders.items():
        if folder is not None:
            yield from _writable(f"{flag(name)} {folder}", Path(folder))
    files = {
        "metrics_file": config.logging.metrics_file,
        "record_precision": config.logging.record_precision,
        "fp8_gain_cache": config.precision.fp8_gain_cache,
    }
    for name, path in files.items():
        if path is None:
            continue
        file = Path(path)
        if os.path.isdir(file):
            yield f"{flag(name)} {file} is a folder: name a file in it"
        elif os.path.exists(file) and not os.access(file, os.W_OK):
            yield f"{flag(name)} {file} cannot be written: change its permissions, or name another"
        else:
            yield from _writable(f"{flag(name)} {file}", file.parent)


def _writable(what: str, folder: Path) -> Problems:
    """Can `folder` be written to, or made in the nearest folder above it that exists?"""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not os.path.isdir(nearest):
        yield f"{what}: {nearest} is a file, not a folder; name another place"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: no permission to write in {nearest}; name another place, or change its permissions"


RULES: dict[Callable[[Config, int], Problems], tuple[str, ...]] = {
    attention_shape: ("model",),
    positions: ("model", "data"),
    determinism: ("training", "model"),
    recomputation: ("model", "training", "parallel"),
    tensor_parallel_shape: ("model", "parallel"),
    pipeline_shape: ("model", "parallel"),
    batches: ("training", "parallel"),
    precision_names: ("precision",),
    loss_scaling: ("precision",),
    gradients: ("precision", "communication"),
    tensor_parallel_wire: ("parallel", "precision"),
    schedule: ("optimizer", "training"),
    datasets: ("data", "logging"),
    tokenizer: ("model", "data", "logging"),
    loading: ("checkpoint",),
    faults: ("faults", "checkpoint"),
    outputs: ("checkpoint", "logging", "data", "precision"),
}
