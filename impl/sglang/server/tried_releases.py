"""Releases on which parts of a whole server were tried: on no other are they driven or looked at."""

CANARY = ("0.5.23",)  # their own KV canary, on a CPU; that of 0.5.14 needs CUDA
STATES = ("0.5.23",)  # their recurrent layers
TIERS = ("0.5.23",)  # their host tier
LOWEST = ("0.5.23",)  # that retract by priority
PAIRS = ("0.5.23",)  # a prefill and a decode server, by Mooncake
