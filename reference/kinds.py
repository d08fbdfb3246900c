"""Kinds of systems that no model stands beside: facts and clauses judge them alone."""

from __future__ import annotations

from collections.abc import Mapping

from reference.blocks.config import ENGINE_PRESETS, EngineConfig
from reference.tiers.config import TIER_PRESETS, TierConfig

JudgedConfig = EngineConfig | TierConfig
JUDGED_PRESETS: Mapping[str, JudgedConfig] = {**ENGINE_PRESETS, **TIER_PRESETS}
