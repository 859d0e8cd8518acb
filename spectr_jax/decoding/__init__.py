"""Decoding: drafts, scores, verifies and commits the tokens of each call of the target."""

from spectr_jax.decoding.generate import Generation, decode
from spectr_jax.decoding.loop import Call
from spectr_jax.decoding.methods import METHODS, Method, get_method, register
from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.processing import bias, only, repetition_penalty
from spectr_jax.decoding.slots import Completion, generate_all
from spectr_jax.decoding.steps import Step, stream

__all__ = [
    "METHODS",
    "Call",
    "Completion",
    "Generation",
    "Method",
    "Policy",
    "Step",
    "bias",
    "decode",
    "generate_all",
    "get_method",
    "only",
    "register",
    "repetition_penalty",
    "stream",
]
