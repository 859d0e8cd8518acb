"""Decoding: how the tokens of a call are drafted, scored, chosen and committed."""

from spectr_jax.decoding.generate import Call, Generation, generate
from spectr_jax.decoding.methods import METHODS, Method, get_method, register
from spectr_jax.decoding.policy import Policy

__all__ = ["METHODS", "Call", "Generation", "Method", "Policy", "generate", "get_method", "register"]
