"""Verifiers: rules that choose a call's tokens from a drafted and scored tree. One file each."""

from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.decoding.verifiers.block import Block
from spectr_jax.decoding.verifiers.from_target import FromTarget
from spectr_jax.decoding.verifiers.layer import Layer
from spectr_jax.decoding.verifiers.multipath import MultiPath
from spectr_jax.decoding.verifiers.token_by_token import TokenByToken
from spectr_jax.decoding.verifiers.traversal import Traversal

__all__ = [
    "Block",
    "FromTarget",
    "Layer",
    "MultiPath",
    "Selection",
    "TokenByToken",
    "Traversal",
    "Verifier",
]
