"""What only PPO needs: rollouts, rewards and advantages."""
