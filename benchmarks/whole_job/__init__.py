"""For dlrm.py: its samples, its models, the time of their steps and parts, their memory."""
