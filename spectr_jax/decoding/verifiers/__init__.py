"""Verifiers: rules that choose a call's tokens from a drafted and scored tree. One file each."""

from spectr_jax.decoding.verifiers.base import Selection as Selection
from spectr_jax.decoding.verifiers.base import Verifier as Verifier
from spectr_jax.decoding.verifiers.block import Block as Block
from spectr_jax.decoding.verifiers.layer import Layer as Layer
from spectr_jax.decoding.verifiers.multipath import MultiPath as MultiPath
from spectr_jax.decoding.verifiers.token_by_token import FromTarget as FromTarget
from spectr_jax.decoding.verifiers.token_by_token import TokenByToken as TokenByToken
from spectr_jax.decoding.verifiers.traversal import Traversal as Traversal
