"""Flags of parallelism and communication."""

from megatron.lm.config.megatron_flags.topics.row import accepted, dropped, refused, translated
from megatron.lm.config.sections.parallel import AXES
from megatron.lm.config.sections.schema import flag

FSDP = "the trainer shards the optimizer's states and sends gradients to their owners: use --use-distributed-optimizer, or --opt-level O3"
STAGES = "all pipeline stages have the same number of layers: choose --num-layers as a multiple of the stages"
NCCL = "it only changes speed: buckets of --ddp-bucket-size are sent on their own stream"
TP_COMM = "it only changes speed, in Transformer Engine; at O1 to O3, --tp-transport copies overlaps transfers of activations with GEMMs"


FLAGS = (
    *accepted(
        *(f"{flag(size)} N" for size in AXES.values()),
        "--num-layers-per-virtual-pipeline-stage N",
        "--sequence-parallel",
        "--cp-comm-type TEXT",
        "--use-distributed-optimizer",
        "--distributed-backend TEXT",
        "--distributed-timeout-minutes X",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-bucket-size N",
    ),
    *translated("--use-distributed-optimizer", "--data-parallel-sharding-strategy optim"),
    *translated("--tensor-model-parallel-size N", "--model-parallel-size N"),
    *translated("--num-layers-per-virtual-pipeline-stage N", "--num-virtual-stages-per-pipeline-rank N"),
    *dropped(
        "it adds nothing to this trainer's own sharding",
        "--data-parallel-sharding-strategy no_shard",
        "--outer-dp-sharding-strategy no_shard",
    ),
    *dropped(
        NCCL,
        "--ddp-num-buckets N",
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "--no-align-grad-reduce",
        "--no-align-param-gather",
        "--overlap-param-gather-with-optimizer-step",
        "--high-priority-stream-groups TEXT...",
        "--create-all-gather-group",
        "--use-nccl-ub",
        "--disable-symmetric-registration",
        "--use-sharp",
        "--sharp-enabled-group TEXT",
        "--disable-gloo-process-groups",
    ),
    *dropped(
        "the rank that owns a gradient averages it in FP32, whether the sum or the division comes first",
        "--ddp-average-in-collective",
        "--no-gradient-reduce-div-fusion",
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ),
    *dropped(
        "it only changes speed, and the pipeline schedule makes the choice",
        "--no-overlap-p2p-communication",
        "--overlap-p2p-communication-warmup-flush",
        "--no-scatter-gather-tensors-in-pipeline",
        "--use-ring-exchange-p2p",
        "--microbatch-group-size-per-virtual-pipeline-stage N",
        "--pipeline-model-parallel-comm-backend TEXT",
        "--defer-embedding-wgrad-compute",
        "--wgrad-deferral-limit N",
    ),
    *dropped(
        TP_COMM,
        "--tp-comm-*",
        "--no-tp-comm-*",
        "--disable-tp-comm-*",
        "--no-async-tensor-model-parallel-allreduce",
        "--disable-async-tensor-model-parallel-allreduce",
    ),
    *dropped("torchrun passes each process its rank through the environment", "--local-rank N", "--lazy-mpu-init TEXT"),
    *dropped("--distributed-timeout-minutes applies to the whole run", "--distributed-timeout-seconds-after-init N"),
    *dropped("there is one copy of the sharded states here", "--num-distributed-optimizer-instances 1"),
    *refused(
        "the --context-parallel-size processes share equally long sequences in one group, by --cp-comm-type p2p or a2a: drop it",
        "--hierarchical-context-parallel-sizes N...",
        "--max-seqlen-per-dp-cp-rank N",
        "--hybrid-context-parallel",
    ),
    *refused(
        FSDP,
        "--use-torch-fsdp2",
        "--torch-fsdp2-no-reshard-after-forward",
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy TEXT",
        "--outer-dp-sharding-strategy TEXT",
        "--num-distributed-optimizer-instances N",
        "--fsdp-*",
        "--suggested-communication-unit-size N",
        "--keep-fp8-transpose-cache",
        "--enable-full-sharding-in-hsdp",
    ),
    *refused(
        STAGES,
        "--decoder-first-pipeline-num-layers N",
        "--decoder-last-pipeline-num-layers N",
        "--pipeline-model-parallel-layout TEXT",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--standalone-embedding-stage",
    ),
    *refused("ranks are ordered tensor, data, pipeline: drop it", "--use-tp-pp-dp-mapping"),
    *refused("set NCCL's options with its environment variables, such as NCCL_MAX_CTAS", "--nccl-communicator-config-path FILE"),
    *refused("use --dry-run, which prints the memory per process", "--fake-process-group"),
)
