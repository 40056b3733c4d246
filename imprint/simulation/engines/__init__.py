"""The engines, one file each; importing this package registers them."""

from imprint.simulation.engines.protocol import (
    Choice,
    Chunk,
    Cost,
    Engine,
    Work,
    at_checkpoint,
    get,
    join,
    register,
    registered,
)
from imprint.simulation.engines.spectral import Spectral
from imprint.simulation.engines.tangent import Tangent
from imprint.simulation.engines.trajectories import Trajectories

__all__ = ["Choice", "Chunk", "Cost", "Engine", "Work", "at_checkpoint", "get", "join", "register", "registered"]

register(Tangent, default=True)
register(Trajectories)
register(Spectral)
