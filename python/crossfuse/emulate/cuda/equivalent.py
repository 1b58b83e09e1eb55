"""Mutants that are no faults, and why, by rules about the text."""

from __future__ import annotations

from crossfuse.emulate.cuda.mutants import Mutant, Mutated


def reason_of(mutated: Mutated, mutant: Mutant) -> str:
    """Why a mutant is no fault; empty if nothing says so."""
    return ""
