"""Stand-in for OpenRLHF 0.11.2; see cli/train_ppo_ray.py."""
