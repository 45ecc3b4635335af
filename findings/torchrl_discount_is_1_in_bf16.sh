#!/bin/bash
# TorchRL's losses cast to BF16 have a discount of 1 where 0.999 was given: returns have no horizon, and stop at 256 steps of reward 1.
#
# Seen with torchrl 0.14.1, tensordict 0.14.3 and torch 2.13.0 on a CPU, Linux x86-64. gamma and lambda are buffers, and loss_module.to(torch.bfloat16) or
# .bfloat16(), as a BF16 policy in it requires, rounds them with the weights: 0.999 to 1, 0.998 to 0.996 and 0.99 to 0.988, horizons of 256 and 85
# steps in place of 500 and 100. PPO's returns of 2,048 rewards of 1 at 0.999 should start at 871; they start at 256, where the sum itself stops.
# DQN bootstraps without a discount. reward2go rounds its gamma to the dtype of the rewards, too. Nothing is reported, and neither the
# documentation nor an issue of TorchRL's that we found says so. Right: cast the networks first, and make the loss around them.
#
# Exit code 0: as described; 1: the behaviour has changed. It needs a minute, and gigabytes where pip has no build of torch for CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/python -m pip install --quiet "${TORCH:-torch==2.13.0}" "${TORCHRL:-torchrl==0.14.1}" "${TENSORDICT:-tensordict==0.14.3}" numpy==2.4.6
cat > discount.py <<'PROGRAM'
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import ProbabilisticActor, QValueActor
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value.functional import reward2go

STEPS = 2048


def episode(dtype: torch.dtype) -> TensorDict:
    ends = {name: torch.zeros(1, STEPS, 1, dtype=torch.bool) for name in ("done", "terminated")}
    seen = {"observation": torch.zeros(1, STEPS, 4, dtype=dtype)}
    after = TensorDict({**seen, **ends, "reward": torch.ones(1, STEPS, 1, dtype=dtype)}, [1, STEPS])
    return TensorDict({**seen, **ends, "next": after}, [1, STEPS])


def ppo(gamma: float, dtype: torch.dtype, networks_first: bool) -> str:
    network = torch.nn.Linear(4, 3)
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True)
    critic = TensorDictModule(torch.nn.Linear(4, 1, bias=False), in_keys=["observation"], out_keys=["state_value"])
    if networks_first:
        actor, critic = actor.to(dtype), critic.to(dtype)
    loss = ClipPPOLoss(actor, critic)
    loss.make_value_estimator(gamma=gamma, lmbda=1.0)
    loss = loss if networks_first else loss.to(dtype)
    first = float(loss.value_estimator(episode(dtype))["value_target"][0, 0])
    return f"gamma {float(loss.value_estimator.gamma):.4f}, first return {first:.0f}"


def dqn(gamma: float, dtype: torch.dtype) -> str:
    loss = DQNLoss(QValueActor(torch.nn.Linear(4, 2), in_keys=["observation"], action_space="categorical"), action_space="categorical")
    loss.make_value_estimator(gamma=gamma)
    return f"gamma {float(loss.to(dtype).value_estimator.gamma):.4f}"


for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for gamma in (0.99, 0.998, 0.999):
        print(f"{str(dtype)[6:]}, {gamma}: PPO {ppo(gamma, dtype, False)}; networks cast first {ppo(gamma, dtype, True)}; DQN {dqn(gamma, dtype)}")
    rewards, done = torch.ones(1, 512, 1, dtype=dtype), torch.zeros(1, 512, 1, dtype=torch.bool)
    print(f"{str(dtype)[6:]}, 0.99: reward2go of 512 rewards {float(reward2go(rewards, done, gamma=0.99)[0, 0]):.1f}")
PROGRAM
OMP_NUM_THREADS=1 venv/bin/python -W ignore discount.py 2> log | tee seen || { cat log; exit 1; }
diff seen - <<'EXPECTED' || { echo "changed: see the lines above"; exit 1; }
float32, 0.99: PPO gamma 0.9900, first return 100; networks cast first gamma 0.9900, first return 100; DQN gamma 0.9900
float32, 0.998: PPO gamma 0.9980, first return 492; networks cast first gamma 0.9980, first return 492; DQN gamma 0.9980
float32, 0.999: PPO gamma 0.9990, first return 871; networks cast first gamma 0.9990, first return 871; DQN gamma 0.9990
float32, 0.99: reward2go of 512 rewards 99.4
bfloat16, 0.99: PPO gamma 0.9883, first return 64; networks cast first gamma 0.9900, first return 100; DQN gamma 0.9883
bfloat16, 0.998: PPO gamma 0.9961, first return 128; networks cast first gamma 0.9980, first return 492; DQN gamma 0.9961
bfloat16, 0.999: PPO gamma 1.0000, first return 256; networks cast first gamma 0.9990, first return 872; DQN gamma 1.0000
bfloat16, 0.99: reward2go of 512 rewards 85.0
float16, 0.99: PPO gamma 0.9902, first return 99; networks cast first gamma 0.9900, first return 100; DQN gamma 0.9902
float16, 0.998: PPO gamma 0.9980, first return 448; networks cast first gamma 0.9980, first return 492; DQN gamma 0.9980
float16, 0.999: PPO gamma 0.9990, first return 768; networks cast first gamma 0.9990, first return 871; DQN gamma 0.9990
float16, 0.99: reward2go of 512 rewards 101.8
EXPECTED
