"""Random runs of torch_kv beside the reference."""

from impl.choices import RandomChoices
from impl.torch_kv import TorchKV
from reference.commands import Mode
from reference.geometry import Geometry
from stateful_tests.generate.next_command import finale, propose
from stateful_tests.generate.run_profile import draw_profile
from stateful_tests.lockstep.lockstep import Lockstep


def conforms(system: TorchKV, seed: str, machine: str, geometry: Geometry, mode: Mode) -> None:
    """Check a random run, and the end of everything that it began."""
    source = RandomChoices(seed)
    profile = draw_profile(source, system.capabilities, machine)
    lockstep = Lockstep(system, geometry, mode)
    for _ in range(50):
        lockstep.do(propose(lockstep.state, source, profile))
        assert lockstep.violation is None, (geometry, lockstep.violation)
    for command in finale(lockstep.state):
        lockstep.do(command)
        assert lockstep.violation is None, (geometry, lockstep.violation)
