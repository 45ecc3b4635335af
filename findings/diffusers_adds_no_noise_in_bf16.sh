#!/bin/bash
# diffusers' DDPM schedulers add no noise at all to BF16 latents at the first timesteps, and the wrong amount at the next: 1 - 0.9999 is 0 in BF16.
#
# Seen with diffusers 0.42.1 and torch 2.13.0 on a CPU, Linux x86-64. add_noise rounds the schedule's alpha_bar to the dtype of the samples and takes
# sqrt(1 - alpha_bar) from that. With DDPM's betas BF16 samples of timesteps 0 to 9 get no noise (0.01 to 0.044 is right), though the model is to
# predict it, and those of 10 get a third too much; with Stable Diffusion's schedule 0 and 1. FP16 is wrong to timestep 6. A training loop that keeps
# latents in the model's dtype, as examples with --mixed_precision bf16 do, trains a hundredth of its samples so; get_velocity and the other
# schedulers with that function (DDIM, PNDM, LCM, TCD, unCLIP, CogVideoX) are the same. Nothing is reported, and the docstring of add_noise names no
# dtype. Right: FP32 latents and noise, cast behind add_noise. Flow matching's scale_noise is right.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${DIFFUSERS:-diffusers==0.42.1}" numpy==2.4.6
cat > noise.py <<'PROGRAM'
import diffusers
import torch

TIMES = torch.tensor([0, 1, 2, 4, 6, 9, 10, 20, 100])
stable = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
print("timesteps", TIMES.tolist())
for name, options in (("DDPMScheduler", {}), ("DDPMScheduler", stable), ("PNDMScheduler", stable)):
    print(name, "with Stable Diffusion's betas" if options else "with its defaults")
    scheduler = getattr(diffusers, name)(num_train_timesteps=1000, **options)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zeros, ones = torch.zeros(len(TIMES), 4, dtype=dtype), torch.ones(len(TIMES), 4, dtype=dtype)
        noise = scheduler.add_noise(zeros, ones, TIMES)[:, 0]
        print(f"  {str(dtype)[6:]}: noise is scaled by {[round(x, 3) for x in noise.tolist()]}")
PROGRAM
venv/bin/python -W ignore noise.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
timesteps [0, 1, 2, 4, 6, 9, 10, 20, 100]
DDPMScheduler with its defaults
  float32: noise is scaled by [0.01, 0.015, 0.019, 0.026, 0.033, 0.044, 0.047, 0.079, 0.324]
  float16: noise is scaled by [0.0, 0.0, 0.022, 0.022, 0.031, 0.044, 0.044, 0.08, 0.324]
  bfloat16: noise is scaled by [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.062, 0.088, 0.324]
DDPMScheduler with Stable Diffusion's betas
  float32: noise is scaled by [0.029, 0.041, 0.051, 0.065, 0.078, 0.093, 0.098, 0.137, 0.325]
  float16: noise is scaled by [0.031, 0.038, 0.049, 0.066, 0.077, 0.094, 0.099, 0.136, 0.325]
  bfloat16: noise is scaled by [0.0, 0.0, 0.062, 0.062, 0.088, 0.088, 0.088, 0.14, 0.324]
PNDMScheduler with Stable Diffusion's betas
  float32: noise is scaled by [0.029, 0.041, 0.051, 0.065, 0.078, 0.093, 0.098, 0.137, 0.325]
  float16: noise is scaled by [0.031, 0.038, 0.049, 0.066, 0.077, 0.094, 0.099, 0.136, 0.325]
  bfloat16: noise is scaled by [0.0, 0.0, 0.062, 0.062, 0.088, 0.088, 0.088, 0.14, 0.324]
EXPECTED
