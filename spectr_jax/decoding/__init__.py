"""Decoding: how the tokens of a call are drafted, scored, chosen and committed."""

from spectr_jax.decoding import generate
from spectr_jax.decoding.generate import Generation, decode, stream
from spectr_jax.decoding.loop import Call
from spectr_jax.decoding.methods import METHODS, Method, get_method, register
from spectr_jax.decoding.policy import Policy

__all__ = ["METHODS", "Call", "Generation", "Method", "Policy", "decode", "generate", "get_method", "register", "stream"]
