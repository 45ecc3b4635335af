"""Flags of data and tokenizers."""

from megatron.lm.config.megatron_flags.row import accepted, dropped, refused, translated

FIM = "fill-in-the-middle is not built here: rewrite the documents before `python -m megatron.lm.tools.preprocess_data`"

FLAGS = (
    *accepted(
        "--data-path TEXT...",
        "--train-data-path TEXT...",
        "--valid-data-path TEXT...",
        "--test-data-path TEXT...",
        "--data-args-path FILE",
        "--mock-data",
        "--split TEXT",
        "--data-cache-path FOLDER",
        "--tokenizer-type TEXT",
        "--tokenizer-model FILE",
        "--vocab-file FILE",
        "--merge-file FILE",
        "--vocab-size N",
        "--tiktoken-pattern TEXT",
        "--tiktoken-num-special-tokens N",
        "--tokenizer-special-tokens TEXT...",
        "--legacy-tokenizer",
        "--num-workers N",
        "--eod-mask-loss",
        "--mask-prob X",
        "--reset-position-ids",
    ),
    *dropped(
        "samples are read in one shuffled order of each epoch, which --seed gives", "--dataloader-type single", "--dataloader-type cyclic"
    ),
    *dropped("token files are always mapped, which reads the same tokens", "--no-mmap-bin-files"),
    *dropped("blends are drawn sample by sample, without a surplus", "--mid-level-dataset-surplus X"),
    *dropped(
        "index caches are built once, by rank 0, and mapped",
        "--num-dataset-builder-threads N",
        "--dataloader-fast-cache-load",
        "--dataloader-defer-npy-index-mmap",
        "--per-dataset-sequences-path FILE",
    ),
    *dropped("tokens are not padded here", "--allow-ambiguous-pad-tokens"),
    *dropped("it is the share of short sequences in BERT's sentence pairs, which are not made here", "--short-seq-prob X"),
    *dropped("all data is used, at a sample rate of 1", "--sample-rate 1"),
    *dropped("the tokenizer's own files say it", "--tokenizer-hf-use-fast"),
    *translated("--tokenizer-special-tokens TEXT...", "--tiktoken-special-tokens TEXT..."),
    *refused("give --train-data-path, --valid-data-path and --test-data-path", "--per-split-data-args-path FILE"),
    *refused("attention reaches over documents here yet: drop it", "--reset-attention-mask"),
    *refused("GPT has one sequence: give --seq-length alone", "--decoder-seq-length N"),
    *refused(
        "sentence pairs of BERT are not built here: use HuggingFaceTokenizer with --objective masked-lm",
        "--tokenizer-type BertWordPieceLowerCase",
        "--tokenizer-type BertWordPieceCase",
    ),
    *refused("the model reads text alone", "--tokenizer-type MultimodalTokenizer", "--tokenizer-type NullMultimodalTokenizer"),
    *refused("this command pre-trains: examples/sft fine-tunes", "--tokenizer-type SFTTokenizer"),
    *refused(
        "special tokens come from the tokenizer's own files: add them there",
        "--tokenizer-metadata FILE",
        "--tokenizer-sentencepiece-legacy",
        "--tokenizer-hf-include-special-tokens",
    ),
    *refused("a tokenizer's code is not run: give its tokenizer.json to HuggingFaceTokenizer", "--trust-remote-code"),
    *refused("the embedding has the tokenizer's tokens: give --make-vocab-size-divisible-by", "--padded-vocab-size N"),
    *refused("batches come from --data-path alone: drop it", "--dataloader-type TEXT"),
    *refused("all data is used: sample it before `python -m megatron.lm.tools.preprocess_data`", "--sample-rate X"),
    *refused("data is read from a file system: copy or mount it", "--object-storage-cache-path FOLDER"),
    *refused(FIM, "--fim-*"),
)
