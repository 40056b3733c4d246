"""The engines, one file each; importing this package registers them."""

from imprint.simulation.engines.protocol import (
    AutoFindings,
    AutoPath,
    Chunk,
    Cost,
    Engine,
    Simulated,
    Work,
    at_checkpoint,
    get,
    join,
    register,
    registered,
    unregister,
)
from imprint.simulation.engines.replay import Replay
from imprint.simulation.engines.spectral import Spectral
from imprint.simulation.engines.tangent import Tangent
from imprint.simulation.engines.trajectories import Trajectories

__all__ = [
    "AutoFindings",
    "AutoPath",
    "Chunk",
    "Cost",
    "Engine",
    "Simulated",
    "Work",
    "at_checkpoint",
    "get",
    "join",
    "register",
    "registered",
    "unregister",
]

register(Tangent, default=True)
register(Trajectories)
register(Spectral)
register(Replay)
