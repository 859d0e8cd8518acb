"""Drafts trained to agree with a target: labels of the target, losses, students."""
