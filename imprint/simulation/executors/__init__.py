"""Where the parts of a simulation or of a retraining are made: in this process, or on a Ray cluster.

An executor knows nothing of what a part is: it is given a `Recipe`, makes the parts it is told to, and says how each of
them ended. `run_parts` decides what is made when, what is tried again, and what is reported.
"""

from imprint.simulation.executors.in_process import InProcess
from imprint.simulation.executors.on_ray import RayExecutor
from imprint.simulation.executors.protocol import Executor, Outcome, Place, Pool, Recipe, Reports
from imprint.simulation.executors.running import run_parts

__all__ = ["Executor", "InProcess", "Outcome", "Place", "Pool", "RayExecutor", "Recipe", "Reports", "run_parts"]
