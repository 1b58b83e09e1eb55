"""What this machine offers, and what to install where something is missing."""

from __future__ import annotations

from crossfuse.doctor.collect import collect
from crossfuse.doctor.report import Check, Report

__all__ = ["Check", "Report", "collect"]
