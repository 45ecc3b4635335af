"""The flags of twelve public launch scripts of Megatron-LM, and the sizes that make a toy of each.

Paths and the numbers of processes are those of a test: what a script takes from its environment is filled in.
"""

SHAPE_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 4096 "
)
OUTPUTS = "--log-interval 100 --save-interval 10000 --eval-interval 1000 --save RUN --load RUN --eval-iters 10 --tensorboard-dir EVENTS "
TUNED = "--use-mcore-models --no-masked-softmax-fusion --no-rope-fusion --bf16 --micro-batch-size 1 --save-interval 100000 "
MOE = "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 "

SCRIPTS = {
    "gpt3-175b": "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 "
    "--attention-backend auto --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 "
    "--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 "
    "--lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 "
    "--pipeline-model-parallel-size 16 --data-path DATA --vocab-file VOCAB --merge-file MERGES --split 949,50,1 " + OUTPUTS,
    "bert-340m": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--attention-backend auto --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 "
    "--fp16 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 "
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --data-path DATA --vocab-file VOCAB --split 949,50,1 " + OUTPUTS,
    "t5-220m": "--encoder-num-layers 12 --decoder-num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 "
    "--ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 --max-position-embeddings 512 --micro-batch-size 64 "
    "--global-batch-size 512 --lr 0.0001 --train-iters 1000000 --lr-decay-iters 1000000 --lr-decay-style linear --min-lr 0.00001 "
    "--weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --vocab-extra-ids 100 --init-method-std 0.015 "
    "--transformer-impl transformer_engine --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --attention-backend auto "
    "--data-path DATA --vocab-file VOCAB --tokenizer-type BertWordPieceCase --distributed-backend nccl " + OUTPUTS,
    "llama3-8b-fp8": SHAPE_8B.replace("--normalization RMSNorm ", "")
    + "--use-mcore-models --kv-channels 128 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 "
    "--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134 --attention-backend fused "
    "--apply-layernorm-1p --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 "
    "--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine "
    "--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion "
    "--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
    "--fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path CACHE --tiktoken-pattern v2 --split '99,1,0' "
    "--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-throughput --profile --profile-step-start 4 "
    "--profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 " + OUTPUTS,
    "llama3.1-8b": SHAPE_8B + TUNED + "--use-rotary-position-embeddings --rotary-percent 1.0 --no-position-embedding "
    "--max-position-embeddings 8192 --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1 --rotary-base 500000 "
    "--use-rope-scaling ",
    "qwen3-8b": SHAPE_8B.replace("32 --hidden", "36 --hidden").replace("14336", "12288")
    + TUNED
    + "--position-embedding-type rope --kv-channels 128 --qk-layernorm --max-position-embeddings 40960 --rotary-percent 1.0 "
    "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1187 --rotary-base 1000000 --no-bias-swiglu-fusion ",
    "llama3.1-8b-rl": SHAPE_8B + "--lr-warmup-samples 5120 --micro-batch-size 1 --global-batch-size 64 --grpo-group-size 16 "
    "--ckpt-format torch_dist --inference-max-seq-length 4096 --pretrained-checkpoint RUN --add-qkv-bias --no-masked-softmax-fusion "
    "--attention-softmax-in-fp32 --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 --position-embedding-type rope "
    "--rotary-percent 1.0 --rotary-base 500000 --use-rotary-position-embeddings --max-position-embeddings 131072 --lr 3e-7 "
    "--make-vocab-size-divisible-by 128 --clip-grad 1.0 --rl-use-sequence-packing ",
    "mixtral-8x7b": SHAPE_8B + "--use-mcore-models --max-position-embeddings 32768 --init-method-std 0.01 --attention-dropout 0.0 "
    "--hidden-dropout 0.0 --position-embedding-type rope --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 "
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --overlap-param-gather --overlap-grad-reduce --tokenizer-type "
    "Llama2Tokenizer --tokenizer-model SPM --data-path DATA --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 "
    "--train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 "
    "--clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
    "--use-distributed-optimizer --sequence-parallel --no-load-optim --no-load-rng --wandb-project Mixtral "
    "--wandb-exp-name Mixtral_8x7B " + MOE + OUTPUTS,
    "gpt-oss-20b": TUNED + "--untie-embeddings-and-output-weights --normalization RMSNorm --num-layers 24 --hidden-size 2880 "
    "--ffn-hidden-size 2880 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 --num-experts 32 "
    "--moe-ffn-hidden-size 2880 --moe-router-dtype fp32 --moe-router-topk 4 --seq-length 4096 --max-position-embeddings 40960 "
    "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 128 --rotary-percent 1.0 --rotary-base 150000 "
    "--no-bias-gelu-fusion --sequence-parallel --no-bias-dropout-fusion --padded-vocab-size 201088 --quick-geglu "
    "--glu-linear-offset 1.0 --softmax-type learnable --window-attn-skip-freq 2 --activation-func-clamp-value 7.0 "
    "--window-size 127,0 " + MOE,
    "qwen3-30b-a3b": TUNED + "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --num-experts 128 --moe-ffn-hidden-size 768 "
    "--moe-router-topk 8 --moe-router-dtype fp32 --seq-length 4096 --max-position-embeddings 40960 --rotary-base 1000000 "
    "--no-bias-swiglu-fusion --sequence-parallel " + MOE,
    "deepseek-v2-lite": TUNED + "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 "
    "--num-attention-heads 16 --kv-channels 16 --multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128 "
    "--qk-layernorm --qk-pos-emb-head-dim 64 --num-experts 64 --moe-ffn-hidden-size 1408 --moe-grouped-gemm --moe-router-topk 6 "
    "--seq-length 1024 --max-position-embeddings 1024 --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707 " + MOE,
    "mamba-8b": "--sequence-parallel --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --use-distributed-optimizer "
    "--untie-embeddings-and-output-weights --init-method-std 0.02 --position-embedding-type none --hybrid-layer-pattern M-M*M- "
    "--hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --train-samples 268554688 --lr-warmup-samples 81381 --data-path DATA --split 99,1,0 "
    "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model SPM --micro-batch-size 4 --lr 2.5e-4 --min-lr 2.5e-5 --bf16 "
    "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --no-create-attention-mask-in-dataloader " + OUTPUTS,
}
