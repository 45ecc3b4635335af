"""Tables and figures that nothing here reproduces, and why."""

from tools.reproduce.entry import Entry

ENTRIES = (
    Entry(
        name="fp8lm-table2",
        title="FP8-LM, Table 2",
        claim="Zero-shot scores of FP8 models are those of BF16 models.",
        reason="It wants 7B and 13B models that were trained on 100B tokens; smaller ones are at chance.",
    ),
    Entry(
        name="fp8lm-table3",
        title="FP8-LM, Table 3 and Figure 5",
        claim="Supervised fine-tuning in FP8 is as good as in BF16, with less memory and 27 % more throughput.",
        reason="AlpacaEval and MT-Bench need a judge model, which is not to be had. The recipe is examples/sft, which ran on a toy alone.",
    ),
    Entry(
        name="fp8lm-table4",
        title="FP8-LM, Table 4 and Figure 6",
        claim="RLHF in FP8 is as good as in BF16, with less memory.",
        reason="AlpacaEval and MT-Bench need a judge model, which is not to be had. The recipe is examples/rlhf, which ran on a toy alone.",
    ),
    Entry(
        name="collage-table3",
        title="Collage, Table 3",
        claim="Pre-training perplexity of BERT and RoBERTa: plus is that of option D.",
        reason="The encoder and its two phases are there, examples/bert; BERT-base and RoBERTa-base were not pre-trained on a GPU.",
    ),
    Entry(
        name="collage-table4",
        title="Collage, Table 4",
        claim="GLUE scores of BERT and RoBERTa: plus is as good as option D.",
        reason="No package brings GLUE. BoolQ stands in, examples/bert/finetune_boolq.py; no encoder of full size was pre-trained for it.",
    ),
    Entry(
        name="coat-llama",
        title="COAT, its table of memory and speed",
        claim="Llama-2 7B on two GPUs: 11,351 tokens/s/GPU at 52.8 GB, against BF16's 6,130.",
        reason="7B on two GPUs of 80 GiB was not run; the rows at 1.3B stand under coat-memory.",
    ),
)
