"""Flags of mixtures of experts."""

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, translated

CAPACITY = "experts have no capacity here and no token is dropped: drop it, or use Megatron-LM"
NOT_BUILT = "this variant of a mixture of experts is not supported: drop it, or use Megatron-LM"
GATHERED = "processes that share experts gather all their tokens once, as the type allgather does, in the format of --moe-wire"

FLAGS = (
    *accepted(
        "--num-experts N",
        "--moe-layer-freq TEXT",
        "--moe-ffn-hidden-size N",
        "--moe-shared-expert-intermediate-size N",
        "--moe-router-topk N",
        "--moe-router-score-function TEXT",
        "--moe-router-pre-softmax",
        "--moe-router-topk-scaling-factor X",
        "--moe-router-num-groups N",
        "--moe-router-group-topk N",
        "--moe-router-dtype TEXT",
        "--moe-router-load-balancing-type TEXT",
        "--moe-aux-loss-coeff X",
        "--moe-z-loss-coeff X",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate X",
    ),
    *translated("--recompute-granularity selective --recompute-modules mlp", "--moe-layer-recompute"),
    *dropped("all experts of a layer are one grouped GEMM anyway", "--moe-grouped-gemm", "--moe-use-legacy-grouped-gemm"),
    *dropped("fusions only change speed", "--moe-permute-fusion", "--moe-router-fusion"),
    *dropped(
        GATHERED,
        "--moe-token-dispatcher-type TEXT",
        "--moe-flex-dispatcher-backend TEXT",
        "--moe-enable-deepep",
        "--moe-deepep-num-sms N",
        "--moe-hybridep-num-sms N",
        "--moe-shared-expert-overlap",
        "--overlap-moe-expert-parallel-comm",
        "--ep-overlap-early-attn-memory-release",
    ),
    *dropped("it only changes speed", "--delay-wgrad-compute"),
    *dropped(
        "rows are padded only inside the kernels",
        "--moe-router-padding-for-fp8",
        "--moe-router-padding-for-quantization",
    ),
    *dropped("the metrics contain every layer", "--moe-per-layer-logging"),
    *refused(
        CAPACITY,
        "--moe-expert-capacity-factor X",
        "--moe-pad-expert-input-to-capacity",
        "--moe-token-drop-policy TEXT",
    ),
    *refused(
        "it routes at random, for benchmarks: drop it, and balance with --moe-aux-loss-coeff or --moe-router-enable-expert-bias",
        "--moe-router-force-load-balancing",
    ),
    *refused(NOT_BUILT, "--moe-*"),
)
