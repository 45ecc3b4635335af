"""Rollouts, rewards and advantages for PPO."""
