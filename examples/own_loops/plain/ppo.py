"""PPO: no data set; a rollout, then several updates from it, in each body."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
actor = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)))
critic = DDP(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)))
opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 1e-2)


def rollout():
    """Act once in each of 64 random states: the action should be 1 where their sum is positive."""
    states = torch.randn(64, 4)
    with torch.no_grad():
        choice = Categorical(logits=actor.module(states))
        actions = choice.sample()
        rewards = (actions == (states.sum(dim=1) > 0)).float()
        return states, actions, rewards, choice.log_prob(actions), critic.module(states)[:, 0]


for it in range(40):
    states, actions, rewards, old, values = rollout()
    for _ in range(4):
        for part in torch.randperm(64).split(32):
            ratio = (
                Categorical(logits=actor(states[part])).log_prob(actions[part]) - old[part]
            ).exp()
            gain = rewards[part] - values[part]
            clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = nn.functional.mse_loss(critic(states[part])[:, 0], rewards[part]) - clipped
            opt.zero_grad()
            loss.backward()
            opt.step()
    if dist.get_rank() == 0 and it % 10 == 9:
        print(f"iteration {it}: mean reward {rewards.mean():.2f}", flush=True)
